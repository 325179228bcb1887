"""Write the step summary and annotations of a session in CI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.options import MARKER_NAME, OPTIONS, find_first_page
from pytest_fsdp_comm.reports.ci.outcomes import FailedTest, FileLine, Outcomes, read_origin
from pytest_fsdp_comm.reports.explanation import Failure, write_headline
from pytest_fsdp_comm.snapshots.failed_comparison import (
    HANGS_AT,
    compared_files,
    failure_of,
    reason_of,
)
from pytest_fsdp_comm.snapshots.unused import UnusedSnapshots
from pytest_fsdp_comm.text.files import write_atomically
from pytest_fsdp_comm.text.words import show_path

_FINISHED: Final = frozenset(
    {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
)


class CiSession:
    """Writes the summary and annotations; exists only in the process that reports to the user."""

    def __init__(self, config: pytest.Config, environment: Mapping[str, str]) -> None:
        self._config = config
        # Ignore CI's variables if a test started this session, because only the outer session may
        # write to the step summary.
        variables = {} if "PYTEST_CURRENT_TEST" in environment else environment
        self.summary = config.stash[OPTIONS].summary_file
        step = variables.get("GITHUB_STEP_SUMMARY")
        self.step_summary = Path(step) if step else None
        self.annotates = variables.get("GITHUB_ACTIONS") == "true"
        self._origin = read_origin(variables)
        # Keyed by test, so that a rerun replaces the results of earlier attempts.
        self._failed: dict[str, FailedTest] = {}
        self._compared: dict[str, tuple[str, ...]] = {}
        self._problems: list[str] = []
        self._outcomes: Outcomes | None = None
        self._annotator: Any = None

    def pytest_sessionstart(self) -> None:
        """Take over annotating from pytest-github-actions-annotate-failures (checked with 0.4)."""
        # `pytest_runtest_logreport` still calls that plugin for failures that we do not annotate.
        manager = self._config.pluginmanager
        if self.annotates and manager.has_plugin("annotate_errors"):
            self._annotator = manager.unregister(name="annotate_errors")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the comparisons and failures of each test."""
        files, failure = compared_files(report), failure_of(report)
        if files is not None:
            self._compared[report.nodeid] = files
        if report.when == "setup" and not report.failed:
            self._failed.pop(report.nodeid, None)
        is_ours = files is not None or MARKER_NAME in report.keywords
        # A test with subtests can fail several times. Report its first failed comparison, or its
        # first failure if no comparison failed.
        previous = self._failed.get(report.nodeid)
        is_reported = previous is None or (failure is not None and previous.failure is None)
        if report.failed and is_ours and is_reported:
            reason = (write_headline(failure) if failure else reason_of(report)) or "failed"
            hangs_at = getattr(report, HANGS_AT, "")
            calls = [(hangs_at, reason)] if hangs_at else _list_changes_with_call_sites(failure)
            location, located = self._find_failed_line(report), [*self._locate_calls(calls)]
            is_headline_located = failure is None or not failure.changes or failure.changes[0].sites
            if located and location is not None and not is_headline_located:
                # Otherwise, the annotations would name only less important changes.
                located.insert(0, (location, reason))
            self._failed[report.nodeid] = FailedTest(
                nodeid=report.nodeid,
                reason=reason,
                location=location,
                sent=tuple(located),
                failure=failure,
            )
        failed = self._failed.get(report.nodeid)
        if self._annotator is not None and not (failed and failed.sent):
            self._annotator.pytest_runtest_logreport(report)

    # Run before other plugins. Hook wrappers run even earlier: one of them finds unused snapshots,
    # and may fail the session.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._outcomes = outcomes = self._make_outcomes(session, exitstatus)
        from pytest_fsdp_comm.reports.ci import review  # noqa: PLC0415  # only for summaries and annotations

        step = self.step_summary if outcomes.has_news else None
        for name, path, write in (
            ("GITHUB_STEP_SUMMARY", step, _append_to_step_summary),
            ("--comm-summary", self.summary, write_atomically),
        ):
            try:
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    summary = review.render_summary(outcomes, self._origin)
                    write(path, summary.encode("utf-8", "replace").decode())
            except OSError as problem:
                reason = f"{problem.filename}: {problem.strerror or problem}"
                self._problems.append(printable(f"fsdp-comm: cannot write {name} ({reason})"))
                if path is self.summary:
                    session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the annotations, which GitHub reads from the log."""
        for problem in self._problems:
            terminalreporter.write_line(problem, red=True)
        if self.annotates and self._outcomes is not None:
            from pytest_fsdp_comm.reports.ci import review  # noqa: PLC0415  # as above

            terminalreporter.ensure_newline()
            for line in review.annotate(self._outcomes):
                terminalreporter.write_line(line)

    def _make_outcomes(self, session: pytest.Session, exitstatus: int) -> Outcomes:
        unused: UnusedSnapshots | None = self._config.pluginmanager.get_plugin("fsdp-comm-unused")
        unused_files = unused.files if unused is not None else ()
        options, start = self._config.stash[OPTIONS], self._config.invocation_params.dir
        reason = str(session.shouldfail or session.shouldstop or "")
        if not reason and exitstatus not in _FINISHED:
            reason = f"exit status {int(exitstatus)}"
        return Outcomes(
            compared_tests=len(self._compared),
            compared_files=len({file for files in self._compared.values() for file in files}),
            failed=tuple(self._failed.values()),
            unused=tuple(show_path(path, self._config.rootpath) for path in unused_files),
            annotates_all=self._annotator is None,
            artifacts=show_path(options.artifacts_dir, start) if options.artifacts_dir else "",
            report=show_path(find_first_page(options.report_dir), start)
            if options.report_dir
            else "",
            directory=self._origin.relative_directory(start),
            ended_early=f"The session ended early ({reason}): not all tests ran." if reason else "",
        )

    def _locate_calls(self, calls: Iterable[tuple[str, str]]) -> Iterator[tuple[FileLine, str]]:
        """Yield each text once, with the first of its lines that is in the checkout."""
        # Call sites are relative to the directory in which pytest started.
        start = self._config.invocation_params.dir
        locations: dict[str, FileLine] = {}
        for site, text in calls:
            path, _, line = site.rpartition(":")
            location = self._locate_line(start / path, int(line))
            if location is not None:
                locations.setdefault(text, location)
        return ((location, text) for text, location in locations.items())

    def _find_failed_line(self, report: pytest.TestReport) -> FileLine | None:
        """Return the line that raised an error; if that is outside the project, the test's line."""
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None and "site-packages" not in Path(crash.path).parts:
            location = self._locate_line(Path(crash.path), crash.lineno)
            if location is not None:
                return location
        file, line, _ = report.location
        return self._locate_line(self._config.rootpath / file, (line or 0) + 1)

    def _locate_line(self, path: Path, line: int) -> FileLine | None:
        return self._origin.locate(path, line, root=self._config.rootpath)


def _append_to_step_summary(path: Path, text: str) -> None:
    # Earlier sessions of this step may have written to the step summary.
    with path.open("ab") as file:
        file.write((b"\n\n" if file.tell() else b"") + text.encode())


def _list_changes_with_call_sites(failure: Failure | None) -> Iterator[tuple[str, str]]:
    """Yield ``path:line`` and the text of each change whose call site is known."""
    for statement in failure.changes if failure else ():
        for site in statement.sites:
            yield site, statement.summary
