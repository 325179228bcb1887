"""Collect comparisons and recordings of tests, and write the HTML report at session end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any, Final

import pytest
from syrupy.assertion import AssertionResult

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.comm.profile import CommProfile, fold
from pytest_fsdp_comm.errors import FsdpCommError, printable
from pytest_fsdp_comm.marker import may_record, uses_plugin
from pytest_fsdp_comm.options import OBSERVER, SETTINGS, find_first_page, join_paths
from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT
from pytest_fsdp_comm.reports.ci.outcomes import read_origin
from pytest_fsdp_comm.reports.html.values import (
    Compared,
    Outcome,
    Record,
    Result,
    Run,
    Verdict,
    share_timelines,
    timeline_of,
)
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.explain import explain_results
from pytest_fsdp_comm.snapshots.extension import CommSnapshot
from pytest_fsdp_comm.snapshots.failed_comparison import reason_of
from pytest_fsdp_comm.text.codec import from_json, to_json
from pytest_fsdp_comm.text.files import write_atomically
from pytest_fsdp_comm.text.words import shell_word, shorten_line, show_path
from pytest_fsdp_comm.tree.model import ShardTree
from pytest_fsdp_comm.tree.profile import TreeProfile

# Name of the plugin that writes the report; ranks unregister it.
SESSION_PLUGIN: Final = "fsdp-comm-report"

# Name of the report attribute that carries a test's record from an xdist worker to the controller.
_RECORD: Final = "comm_record"

# A test's page shows at most this many characters from the end of its failure text.
_MAX_PROBLEM: Final = 8_000
_MAX_MESSAGE: Final = 300
# The report contains at most this many comparisons per test, so that a test that compares in a loop
# cannot exhaust memory.
_MAX_COMPARISONS: Final = 50
_UNCOMPARED: Final = Compared(name="", kind="comm", verdict="uncompared")


def register(config: pytest.Config, report_path: Path, *, is_rank: bool) -> None:
    """Register the plugins that this process needs for the report."""
    if config.option.collectonly:
        return
    notes = config.stash[OBSERVER] = Notes()
    config.pluginmanager.register(notes, "fsdp-comm-notes")
    if not is_rank:
        plugin = SessionReport(config, notes, report_path)
        config.pluginmanager.register(plugin, SESSION_PLUGIN)


# Note [Records of ranks]
# Ranks compare the same values in the same order, so an index in `Record.compared` refers to the
# same value on every rank. Only the lowest rank stores results that are equal on all ranks: the
# comparison with its explanation, the text and the tree. Other ranks store `_UNCOMPARED` instead.
# Every rank stores the timeline of its recording. `Notes.merge` adds the timelines of all ranks to
# the lowest rank's results. If the lowest rank died, they go to the `_UNCOMPARED` entries of the
# next rank.


class Notes:
    """Collects comparisons of the tests in this process; ranks send them to the pytest process."""

    payload_type: Final = Record

    def __init__(self) -> None:
        self._compared: list[Compared] = []
        # The recordings whose timelines `_compared` already contains.
        self._recordings: list[Recording] = []
        self._records: dict[str, Record] = {}

    # The next methods are called in the process that runs the test; see Note [Records of ranks].

    def note_comparison(self, assertion: CommSnapshot, values: Mapping[str, object]) -> None:
        """Store the results of a comparison, and explain differences while the values exist."""
        room = max(0, _MAX_COMPARISONS - len(self._compared))
        for name, result in assertion.last_results[:room]:
            value = values[name]
            compared = _UNCOMPARED
            if assertion.explains:
                compared = _make_compared(assertion, name, result, value)
            self._add_compared(compared, _get_last_recording(value))

    def _add_compared(self, compared: Compared, recording: Recording | None) -> None:
        if recording is not None:
            self._recordings.append(recording)
            compared = replace(compared, timelines=(timeline_of(recording),))
        self._compared.append(compared)

    # Run first, while fixtures still have their values.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Store a recording that the test did not compare."""
        recording = _get_last_recording((getattr(item, "funcargs", None) or {}).get("comm_mode"))
        if recording is not None and not any(recording is noted for noted in self._recordings):
            compared = _UNCOMPARED
            context = item.config.stash.get(RANK_CONTEXT, None)
            if context is None or context.rank == context.settings.ranks[0]:
                with suppress(FsdpCommError):  # the recording is too large for a snapshot
                    text = SnapshotText.from_profile(fold(recording), where="the recording")
                    compared = replace(_UNCOMPARED, new=str(text))
            self._add_compared(compared, recording)

    def enter_rank(self, config: pytest.Config) -> None:
        """Unregister the report plugin, because only the pytest process writes the report."""
        if config.pluginmanager.has_plugin(SESSION_PLUGIN):
            config.pluginmanager.unregister(name=SESSION_PLUGIN)

    def rank_payload(self, item: pytest.Item) -> Record:
        del item
        record = Record(compared=tuple(self._compared))
        self._compared, self._recordings = [], []
        return record

    # The remaining methods are called in the pytest process.

    def merge(self, item: pytest.Item, payloads: Mapping[int, Record], **_: bool) -> list[str]:
        """Store the merged records of a test's ranks until the test is reported."""
        settings = item.stash[SETTINGS]
        self._records[item.nodeid] = Record(
            world_size=settings.world_size,
            backend=settings.backend,
            silent_ranks=tuple(rank for rank in settings.ranks if rank not in payloads),
            compared=tuple(_merge_timelines(payloads)),
        )
        return []

    def take_record(self, item: pytest.Item) -> Record:
        if SETTINGS in item.stash:
            return self._records.pop(item.nodeid, Record())
        return self.rank_payload(item)


def _get_last_recording(value: Any) -> Recording | None:
    """Return the last recording of a ``comm_mode``; None if there is none, or for other values."""
    recording: Recording | None = None
    with suppress(FsdpCommError):
        recording = value.recording if hasattr(type(value), "merged_profile") else None
    return recording


def _make_compared(
    assertion: CommSnapshot, name: str, result: AssertionResult, value: object
) -> Compared:
    item = assertion.test_location.item
    verdict = _classify_assertion(result)
    is_difference = result.recalled_data is not None or result.exception is not None
    is_explained = verdict in {"differs", "broken"} or (verdict == "updated" and is_difference)
    return Compared(
        name=name,
        kind="tree" if isinstance(value, ShardTree) else "comm",
        verdict=verdict,
        file=show_path(Path(result.snapshot_location), item.config.rootpath),
        old=str(result.recalled_data or ""),
        new=str(result.asserted_data or ""),
        failure=explain_results(assertion, {name: result}) if is_explained else None,
        tree=value if isinstance(value, ShardTree) else None,
    )


def _classify_assertion(result: AssertionResult) -> Verdict:
    if result.exception is not None:
        return "broken"
    if result.created or result.updated:
        return "updated"
    if result.success:
        return "same"
    return "missing" if result.recalled_data is None else "differs"


def _merge_timelines(payloads: Mapping[int, Record]) -> Iterator[Compared]:
    """Add the timelines of all ranks to the lowest rank's comparisons."""
    records = sorted(payloads.items())
    for index, comparison in enumerate(records[0][1].compared if records else ()):
        timelines = (
            replace(timeline, ranks=(rank,))
            for rank, record in records
            for compared in record.compared[index : index + 1]
            for timeline in compared.timelines
        )
        yield replace(comparison, timelines=share_timelines(timelines))


# Note [Records of xdist workers]
# Under xdist the controller writes the HTML report, but workers send it only pytest's reports. A
# worker therefore attaches the record, as JSON, to the teardown report of a test. It attaches None
# to the reports of other phases, so that the controller recognizes tests of this plugin. The
# worker's hook is `tryfirst`, because it must run before xdist's hook, which sends the report. The
# controller removes the attribute before other plugins see the report, because some of them write
# all attributes to a file.


class SessionReport:
    """Writes the report; registered in the process that writes it, and in each xdist worker."""

    def __init__(self, config: pytest.Config, notes: Notes, report_path: Path) -> None:
        self._config = config
        self._is_worker = hasattr(config, "workerinput")
        self._notes = notes
        self._report_path = report_path
        self._items: dict[str, pytest.Item] = {}
        self._results: dict[str, Result] = {}
        self._finished: set[str] = set()
        self._origin = read_origin(os.environ)
        self._written = ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._items = {
            item.nodeid: item for item in session.items if uses_plugin(item) or may_record(item)
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the outcome of a phase, and the record of its test."""
        item = self._items.get(report.nodeid)
        if self._is_worker:
            if item is not None:
                record = self._notes.take_record(item) if report.when == "teardown" else None
                # See Note [Records of xdist workers].
                vars(report)[_RECORD] = to_json(record)
            return
        if item is not None or hasattr(report, _RECORD):
            self._add_report(report, item, vars(report).pop(_RECORD, None))

    def _add_report(self, report: pytest.TestReport, item: pytest.Item | None, sent: Any) -> None:
        result = self._results.get(report.nodeid)
        if result is None or (report.when == "setup" and report.nodeid in self._finished):
            # This is the first report of the test or of a rerun, so start a new result.
            self._finished.discard(report.nodeid)
            file, line, _ = report.location
            root = self._config.rootpath
            site = None if line is None else self._origin.locate(root / file, line + 1, root=root)
            address = self._origin.line_address(site)
            result = Result(nodeid=report.nodeid, outcome="unfinished", address=address)
        outcome = _classify_report(report) or result.outcome
        is_worse = result.outcome not in {"failed", "error"} and outcome in {"failed", "error"}
        if is_worse:
            problem, message = report.longreprtext, shorten_line(reason_of(report), _MAX_MESSAGE)
            if len(problem) > _MAX_PROBLEM:
                problem = f"...{problem[-_MAX_PROBLEM:]}"
            result = replace(result, problem=problem, message=message)
        if is_worse or result.outcome == "unfinished":
            result = replace(result, outcome=outcome)
        if report.when == "teardown":
            self._finished.add(report.nodeid)
            record = result.record
            if sent:
                record = from_json(Record, sent)
            elif item is not None:
                record = self._notes.take_record(item)
            result = replace(result, record=record)
        seconds = result.seconds + getattr(report, "duration", 0.0)
        self._results[report.nodeid] = replace(result, seconds=seconds)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the report, even if the session was interrupted."""
        if self._is_worker:
            return
        invocation = self._config.invocation_params
        run = Run(
            tests=tuple(self._results.values()),
            origin=self._origin,
            is_interrupted=exitstatus == pytest.ExitCode.INTERRUPTED
            or bool(session.shouldfail or session.shouldstop),
            command=" ".join(map(shell_word, ("pytest", *join_paths(map(str, invocation.args))))),
            made_at=time.strftime("%Y-%m-%d %H:%M"),
            versions=_describe_versions(),
        )
        path = show_path(find_first_page(self._report_path), invocation.dir)
        try:
            write_report(run, self._report_path)
        except OSError as problem:
            self._written = printable(f"the report {path} is not complete: {problem}")
        else:
            self._written = f"report: {path}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._written:
            terminalreporter.write_line(f"fsdp-comm: {self._written}")


def write_report(run: Run, report_path: Path) -> None:
    """Write an HTML report, replacing an earlier run's pages. May raise OSError.

    Args:
        run: The run to show.
        report_path: A file whose name ends with ``.html``, or the directory of the pages.
    """
    from pytest_fsdp_comm.reports.html.pages import (  # noqa: PLC0415  # loads jinja2
        render_pages,
        render_single_page,
    )

    def read(text: str) -> CommProfile | TreeProfile:
        return SnapshotText(text, where="the recording").profile

    if find_first_page(report_path) == report_path:
        report_path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(report_path, render_single_page(run, read))
        return
    (report_path / "tests").mkdir(parents=True, exist_ok=True)
    for name, page in render_pages(run, read):
        write_atomically(report_path / name, page)


def _describe_versions() -> str:
    versions = []
    for name in ("pytest-fsdp-comm", "torch", "pytest", "syrupy"):
        with suppress(metadata.PackageNotFoundError):  # for example, a build without metadata
            versions.append(f"{name} {metadata.version(name)}")
    return ", ".join([*versions, f"Python {python_version()}"])


def _classify_report(report: pytest.TestReport) -> Outcome | None:
    if report.failed:
        return "failed" if report.when == "call" else "error"
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    # Also return None for the outcome "rerun" of pytest-rerunfailures, because the test runs again.
    return "passed" if report.passed and report.when == "call" else None
