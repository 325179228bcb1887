"""Reports the outcome of a session where reviewers look: on GitHub, or in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_fsdp_comm.options import MARKER_NAME, OPTIONS
from pytest_fsdp_comm.reports.ci.outcomes import (
    Comparisons,
    FailedTest,
    Outcomes,
    Place,
    read_origin,
)
from pytest_fsdp_comm.snapshots.failed_comparison import HANGS_AT, comparisons_of, reason_of
from pytest_fsdp_comm.snapshots.unused import UnusedSnapshots
from pytest_fsdp_comm.text.words import show_path

_TO_ITS_END: Final = frozenset(
    {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
)


class CiSession:
    """Registered in the one process that reports the outcome."""

    def __init__(self, config: pytest.Config, environment: Mapping[str, str]) -> None:
        self._config = config
        # Nobody reviews a session that a test of another session runs.
        own = {} if "PYTEST_CURRENT_TEST" in environment else environment
        self.summary = config.stash[OPTIONS].summary_file
        step = own.get("GITHUB_STEP_SUMMARY")
        self.step_summary = Path(step) if step else None
        self.annotates = own.get("GITHUB_ACTIONS") == "true"
        self._origin = read_origin(own)
        # By test: the last report of one that was run again counts.
        self._failed: dict[str, FailedTest] = {}
        self._compared: dict[str, tuple[str, ...]] = {}
        self._problems: list[str] = []
        self._outcomes: Outcomes | None = None
        self._annotator: Any = None

    def pytest_sessionstart(self) -> None:
        """Leave to pytest-github-actions-annotate-failures 0.4 what is not annotated here."""
        manager = self._config.pluginmanager
        if self.annotates and manager.has_plugin("annotate_errors"):
            self._annotator = manager.unregister(name="annotate_errors")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test compared, and whether it failed; in xdist's controller, too."""
        comparisons = comparisons_of(report)
        if comparisons is not None:
            self._compared[report.nodeid] = comparisons.files
        if report.when == "setup" and not report.failed:
            self._failed.pop(report.nodeid, None)
        is_ours = comparisons is not None or MARKER_NAME in report.keywords
        # What failed for another reason has compared nothing that differs.
        differing = comparisons if comparisons and comparisons.headline else Comparisons()
        # Of several failures the first counts, unless a later one is a comparison, as where that
        # failed in a subtest.
        known = self._failed.get(report.nodeid)
        is_first = known is None or (differing.headline and not known.comparisons.headline)
        if report.failed and is_ours and is_first:
            reason = differing.headline or reason_of(report) or "failed"
            hangs_at = getattr(report, HANGS_AT, "")
            sent = ((hangs_at, reason),) if hangs_at else differing.sent
            self._failed[report.nodeid] = FailedTest(
                nodeid=report.nodeid,
                reason=reason,
                place=self._place_of(report),
                sent=tuple(self._sent(sent)),
                comparisons=differing,
            )
        failed = self._failed.get(report.nodeid)
        if self._annotator is not None and not (failed and failed.sent):
            self._annotator.pytest_runtest_logreport(report)

    # After the wrappers around it, which decide what is unused and whether that is a failure.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._outcomes = outcomes = self._read_outcomes(session, exitstatus)
        from pytest_fsdp_comm.reports.ci import review  # noqa: PLC0415  # in CI only

        # Earlier sessions of the step may have written to its summary.
        step = self.step_summary if outcomes.has_news else None
        targets = (("GITHUB_STEP_SUMMARY", step, "ab"), ("--comm-summary", self.summary, "wb"))
        for name, path, mode in targets:
            try:
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open(mode) as file:
                        text = review.render_summary(outcomes, self._origin)
                        file.write(b"\n\n" * bool(file.tell()) + text.encode("utf-8", "replace"))
            except OSError as problem:
                what = f"{problem.filename}: {problem.strerror or problem}"
                self._problems.append(f"fsdp-comm: cannot write {name} ({what})")
                if path is self.summary:
                    session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the annotations, which GitHub takes out of the log."""
        for problem in self._problems:
            terminalreporter.write_line(problem, red=True)
        if self.annotates and self._outcomes is not None:
            from pytest_fsdp_comm.reports.ci import review  # noqa: PLC0415  # as above

            terminalreporter.ensure_newline()
            for line in review.annotate(self._outcomes):
                terminalreporter.write_line(line)

    def _read_outcomes(self, session: pytest.Session, exitstatus: int) -> Outcomes:
        unused: UnusedSnapshots | None = self._config.pluginmanager.get_plugin("fsdp-comm-unused")
        found = unused.found if unused is not None else ()
        why = str(session.shouldfail or session.shouldstop or "")
        if not why and exitstatus not in _TO_ITS_END:
            why = f"exit status {int(exitstatus)}"
        return Outcomes(
            compared_tests=len(self._compared),
            compared_files=len({file for files in self._compared.values() for file in files}),
            failed=tuple(self._failed.values()),
            unused=tuple(show_path(path, self._config.rootpath) for path in found),
            annotates_all=self._annotator is None,
            ended_early=f"The session ended early ({why}): not all tests ran." if why else "",
        )

    def _sent(self, sent: Iterable[tuple[str, str]]) -> Iterator[tuple[Place, str]]:
        # Call sites are relative to the directory that pytest was started in.
        start = self._config.invocation_params.dir
        for site, text in sent:
            path, _, line = site.rpartition(":")
            place = self._place(start / path, int(line))
            if place is not None:
                yield place, text

    def _place_of(self, report: pytest.TestReport) -> Place | None:
        """Where the assertion is that failed, or else the test."""
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None and "site-packages" not in Path(crash.path).parts:
            place = self._place(Path(crash.path), crash.lineno)
            if place is not None:
                return place
        file, line, _ = report.location
        return self._place(self._config.rootpath / file, (line or 0) + 1)

    def _place(self, path: Path, line: int) -> Place | None:
        return self._origin.place(path, line, root=self._config.rootpath)
