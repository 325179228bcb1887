"""Collects what came of every test of a session, and writes the report when it ends."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_fsdp_comm.launch_environment import is_spawned_rank
from pytest_fsdp_comm.marker import may_record, uses_plugin
from pytest_fsdp_comm.options import OBSERVER, OPTIONS, join_paths
from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT
from pytest_fsdp_comm.reports.ci.outcomes import Origin, read_origin
from pytest_fsdp_comm.snapshots.failed_comparison import first_line
from pytest_fsdp_comm.text.codec import dump_document, load_document
from pytest_fsdp_comm.text.words import shell_word, shorten, show_path

if TYPE_CHECKING:
    from pytest_fsdp_comm.reports.html.values import Outcome, Result
    from pytest_fsdp_comm.run_report.notes import Notes

# The attribute of a report by which a worker of xdist gives its controller a test's record.
_RECORD: Final = "comm_record"
_KIND: Final = "record"
_VERSION: Final = 1

# Characters of a failure's report that are shown: the last ones.
_MAX_PROBLEM: Final = 8_000
_MAX_MESSAGE: Final = 300


def register(config: pytest.Config, directory: Path) -> None:
    """Prepare a process of a session that writes a report, or raise a usage error."""
    if config.option.collectonly:
        return
    launched = config.stash[OPTIONS].launched
    is_worker = hasattr(config, "workerinput")
    is_other = is_spawned_rank() or (launched is not None and not launched.is_leader)
    if not (is_worker or is_other):
        check_directory(directory)
    # Now that it is known that a report will be made.
    from pytest_fsdp_comm.run_report.notes import SESSION_PLUGIN, Notes  # noqa: PLC0415

    notes = config.stash[OBSERVER] = Notes()
    config.pluginmanager.register(notes, "fsdp-comm-notes")
    if not is_other:
        plugin = SessionReport(config, notes, directory)
        config.pluginmanager.register(plugin, SESSION_PLUGIN)


def check_directory(directory: Path) -> None:
    """Make the directory before the first test, which may take long, or raise a usage error."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as problem:
        what = "is a file" if directory.is_file() else f"cannot be written ({problem.strerror})"
        raise pytest.UsageError(
            f"--comm-report: expected a directory for the HTML report, but {directory} {what}; "
            "choose a directory that can be made and written"
        ) from None


# Note [A worker's records]
# Under xdist the controller writes the report, and only reports of phases travel to it. A worker
# hangs a test's record onto the report of its teardown, as text, and an empty text onto the others
# of the test, which tells them from tests that are not ours. It must do so before the hook of
# xdist that sends the report (tryfirst), and the controller takes it off again before other plugins
# see it, which may write all attributes of a report to a file.


class SessionReport:
    """Registered in the process that reports, and in each worker of xdist."""

    def __init__(self, config: pytest.Config, notes: Notes, directory: Path) -> None:
        """Begin before collection."""
        self._config = config
        self._is_worker = hasattr(config, "workerinput")
        self._notes = notes
        self._directory = directory
        self._ours: dict[str, pytest.Item] = {}
        self._results: dict[str, Result] = {}
        self._finished: set[str] = set()
        self._other_tests: set[str] = set()
        # Of a session within a test, nothing is known.
        is_own = "PYTEST_CURRENT_TEST" not in os.environ
        self._origin = read_origin(os.environ) if is_own else Origin()
        self._written = ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which tests the report is about."""
        self._ours = {
            item.nodeid: item for item in session.items if uses_plugin(item) or may_record(item)
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take over a phase's outcome, and what its test recorded."""
        if RANK_CONTEXT in self._config.stash:
            return
        item = self._ours.get(report.nodeid)
        if self._is_worker:
            if item is not None:
                record = self._notes.take_record(item) if report.when == "teardown" else None
                text = dump_document(_KIND, _VERSION, record) if record is not None else ""
                # See Note [A worker's records].
                vars(report)[_RECORD] = text
            return
        sent = vars(report).pop(_RECORD, None)
        if item is None and sent is None and report.when in {"setup", "call", "teardown"}:
            self._other_tests.add(report.nodeid)
            return
        self._add(report, item, sent or "")

    def _add(self, report: pytest.TestReport, item: pytest.Item | None, sent: str) -> None:
        from pytest_fsdp_comm.reports.html.values import Record, Result  # noqa: PLC0415  # as above

        result = self._results.get(report.nodeid)
        if result is None or (report.when == "setup" and report.nodeid in self._finished):
            # Begins, or is run again.
            self._finished.discard(report.nodeid)
            address = self._address_of(report)
            result = Result(nodeid=report.nodeid, outcome="unfinished", address=address)
        outcome = _outcome(report) or result.outcome
        is_worse = result.outcome not in {"failed", "error"} and outcome in {"failed", "error"}
        if is_worse:
            problem, message = report.longreprtext, shorten(first_line(report), _MAX_MESSAGE)
            if len(problem) > _MAX_PROBLEM:
                problem = f"...{problem[-_MAX_PROBLEM:]}"
            result = replace(result, problem=problem, message=message)
        if is_worse or result.outcome == "unfinished":
            result = replace(result, outcome=outcome)
        if report.when == "teardown":
            self._finished.add(report.nodeid)
            record = result.record
            if sent:
                record = load_document(Record, _KIND, _VERSION, sent)
            elif item is not None:
                record = self._notes.take_record(item)
            result = replace(result, record=record)
        seconds = result.seconds + getattr(report, "duration", 0.0)
        self._results[report.nodeid] = replace(result, seconds=seconds)

    def _address_of(self, report: pytest.TestReport) -> str:
        file, line, _ = report.location
        root = self._config.rootpath
        path, top = (root / file).resolve(), Path(self._origin.top or root).resolve()
        if line is None or not path.is_relative_to(top):
            return ""
        return self._origin.line_address(path.relative_to(top).as_posix(), line + 1)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the report, of what there is if the session was interrupted."""
        if self._is_worker or RANK_CONTEXT in self._config.stash:
            return
        from pytest_fsdp_comm.reports.html.values import Run  # noqa: PLC0415  # as above
        from pytest_fsdp_comm.run_report.writing import write_report  # noqa: PLC0415  # as above

        called = self._config.invocation_params
        run = Run(
            tests=tuple(self._results.values()),
            origin=self._origin,
            others=len(self._other_tests),
            is_interrupted=exitstatus == pytest.ExitCode.INTERRUPTED
            or bool(session.shouldfail or session.shouldstop),
            command=" ".join(map(shell_word, ("pytest", *join_paths(map(str, called.args))))),
            made_at=time.strftime("%Y-%m-%d %H:%M"),
        )
        shown = show_path(self._directory / "index.html", called.dir)
        try:
            write_report(run, self._directory)
        except OSError as problem:
            self._written = f"the report {shown} is not complete: {problem}"
        else:
            self._written = f"report: {shown}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say where the report is."""
        if self._written:
            terminalreporter.write_line(f"fsdp-comm: {self._written}")


def _outcome(report: pytest.TestReport) -> Outcome | None:
    if report.failed:
        return "failed" if report.when == "call" else "error"
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    # Not of an attempt that is followed by another, which neither passed nor failed.
    return "passed" if report.passed and report.when == "call" else None
