"""Reports the outcome of a session where reviewers look: on GitHub, or in a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_fsdp_comm.options import MARKER_NAME, OPTIONS
from pytest_fsdp_comm.reports.ci.outcomes import (
    Comparisons,
    FailedTest,
    Origin,
    Outcomes,
    Place,
    read_origin,
)
from pytest_fsdp_comm.snapshots.failed_comparison import comparisons_of, first_line
from pytest_fsdp_comm.text.words import show_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_fsdp_comm.snapshots.unused import UnusedSnapshots

# Between the summaries of two sessions.
_BREAK: Final = "\n\n"
_TO_ITS_END: Final = frozenset(
    {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """Where to report a session's outcome."""

    step_summary: Path | None
    """GitHub's file for the summary of the step, which earlier sessions may have written to."""
    summary: Path | None
    """Of ``--comm-summary``."""
    annotates: bool
    """Whether GitHub reads commands from the output."""
    top: Path
    """The top of the checkout, which places are relative to."""
    source: str
    """Where the hosting service shows the checkout; empty if unknown."""


def read_review(config: pytest.Config, environment: Mapping[str, str]) -> Review | None:
    """Find out where to report the outcome of a session; None if nowhere."""
    summary = config.stash[OPTIONS].summary_file
    # Nobody reviews a session that a test of another session runs.
    is_own = "PYTEST_CURRENT_TEST" not in environment
    step = environment.get("GITHUB_STEP_SUMMARY", "") if is_own else ""
    annotates = is_own and environment.get("GITHUB_ACTIONS") == "true"
    if not (summary or step or annotates):
        return None
    origin = read_origin(environment) if is_own else Origin()
    return Review(
        step_summary=Path(step) if step else None,
        summary=summary,
        annotates=annotates,
        top=Path(origin.top or config.rootpath),
        source=origin.source,
    )


class CiSession:
    """Registered in the one process that reports the outcome."""

    def __init__(self, config: pytest.Config, review: Review) -> None:
        """Begin before the first test."""
        self._config = config
        self._review = review
        # By test: the last report of one that was run again counts.
        self._failed: dict[str, FailedTest] = {}
        self._compared: dict[str, tuple[str, ...]] = {}
        self._problems: list[str] = []
        self._outcomes: Outcomes | None = None

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
            self._failed[report.nodeid] = FailedTest(
                nodeid=report.nodeid,
                reason=differing.headline or first_line(report) or "failed",
                place=self._place_of(report),
                sent=tuple(self._sent(differing)),
                comparisons=differing,
            )

    # After the wrappers around it, which decide what is unused and whether that is a failure.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the summaries, once."""
        self._outcomes = outcomes = self._read_outcomes(session, exitstatus)
        from pytest_fsdp_comm.reports.ci import review as texts  # noqa: PLC0415  # in CI only

        review = self._review
        try:
            if review.step_summary is not None and outcomes.has_news:
                # What earlier sessions of the step wrote counts, too.
                held = review.step_summary.stat().st_size if review.step_summary.exists() else 0
                room = texts.MAX_NBYTES - held - len(_BREAK)
                text = texts.render_summary(outcomes, review.source, room=room)
                with review.step_summary.open("ab") as file:
                    file.write((_BREAK * bool(held and text) + text).encode("utf-8", "replace"))
        except OSError as problem:
            self._note_problem("GITHUB_STEP_SUMMARY", problem)
        try:
            if review.summary is not None:
                review.summary.parent.mkdir(parents=True, exist_ok=True)
                text = texts.render_summary(outcomes, review.source)
                review.summary.write_bytes(text.encode("utf-8", "replace"))
        except OSError as problem:
            self._note_problem("--comm-summary", problem)
            session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR

    def _note_problem(self, name: str, problem: OSError) -> None:
        what = f"{problem.filename}: {problem.strerror or problem}"
        self._problems.append(f"fsdp-comm: cannot write {name} ({what})")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the annotations, which GitHub takes out of the log."""
        for problem in self._problems:
            terminalreporter.write_line(problem, red=True)
        if self._review.annotates and self._outcomes is not None:
            from pytest_fsdp_comm.reports.ci.review import annotate  # noqa: PLC0415  # as above

            terminalreporter.ensure_newline()
            for line in annotate(self._outcomes):
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
            unused=tuple((show_path(one.path, self._config.rootpath), one.reason) for one in found),
            ended_early=f"The session ended early ({why}): not all tests ran." if why else "",
        )

    def _sent(self, comparisons: Comparisons) -> Iterator[tuple[Place, str]]:
        # Call sites are relative to the directory that pytest was started in.
        start = self._config.invocation_params.dir
        for site, text in comparisons.sent:
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
        top = self._review.top
        # Links stay where the path as it is lies in the checkout.
        for at, below in ((Path(os.path.abspath(path)), top), (path.resolve(), top.resolve())):  # noqa: PTH100  # see above
            if at.is_relative_to(below):
                return Place(path=at.relative_to(below).as_posix(), line=line)
        return None
