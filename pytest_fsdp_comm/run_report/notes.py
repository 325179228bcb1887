"""Keeps what a test compares and records, in the process that runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_fsdp_comm.comm.profile import fold
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT
from pytest_fsdp_comm.reports.html.timeline import share_timelines, timeline_of
from pytest_fsdp_comm.reports.html.values import Compared, Record, TreeView, Verdict
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.explain import explain_result
from pytest_fsdp_comm.snapshots.extension import CommSnapshot
from pytest_fsdp_comm.text.words import show_path
from pytest_fsdp_comm.tree.model import ShardTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syrupy.assertion import AssertionResult, SnapshotAssertion

    from pytest_fsdp_comm.comm.events import Recording
    from pytest_fsdp_comm.comm.profile import CommProfile

# The name of the plugin that writes, which no rank needs.
SESSION_PLUGIN: Final = "fsdp-comm-report"

# Rows of a tree that are kept.
_MAX_ROWS: Final = 600
# Values that are kept of one test: a test that compares in a loop must not fill the memory.
_MAX_COMPARISONS: Final = 50
_UNCOMPARED: Final = Compared(name="", kind="comm", verdict="uncompared")


# Note [What each rank keeps]
# Ranks compare the same values in the same order, so a place in `Record.compared` is the same value
# on each. What is the same on all of them (the comparison with its explanation, the text, the tree)
# the lowest rank keeps alone, and the others leave `_UNCOMPARED` in its place; what may differ, the
# timeline, each rank keeps of its own recording. `Notes.merge` puts the timelines of all ranks
# beside what the lowest rank kept. If that one died, the places of the next rank are left, and with
# them what the others recorded.


class Notes:
    """What the tests of this process compared; carries the notes of ranks out of them."""

    payload_type: Final = Record

    def __init__(self) -> None:
        """Begin before the first test."""
        self._compared: list[Compared] = []
        # Those that are in `_compared`.
        self._recordings: list[Recording] = []
        self._left_out = 0
        self._tree: ShardTree | None = None
        self._records: dict[str, Record] = {}

    # In the process that runs the test: see Note [What each rank keeps].

    def note_comparison(self, assertion: SnapshotAssertion, values: Mapping[str, object]) -> None:
        """Keep what was compared, and explain what differs while all of it is at hand."""
        item = assertion.test_location.item
        if not isinstance(assertion, CommSnapshot):
            raise TypeError(f"expected a CommSnapshot, got {assertion!r}")
        room = max(0, _MAX_COMPARISONS - len(self._compared))
        self._left_out += len(assertion.last_results[room:])
        for name, result in assertion.last_results[:room]:
            value = values[name]
            compared = _UNCOMPARED
            if _is_lowest_rank(item):
                compared = _describe_comparison(assertion, name, result, value)
            self._add(compared, _recording_of(value))
            if value is self._tree:
                self._tree = None

    def _add(self, compared: Compared, recording: Recording | None) -> None:
        if recording is not None:
            self._recordings.append(recording)
            compared = replace(compared, timelines=(timeline_of(recording),))
        self._compared.append(compared)

    def note_tree(self, tree: ShardTree) -> None:
        """Keep the last tree, in case that it is not compared."""
        self._tree = tree

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Forget what a test left behind that was interrupted."""
        self._forget()

    # Before fixtures end.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Keep what was recorded and compared with nothing."""
        recording = _recording_of((getattr(item, "funcargs", None) or {}).get("comm_mode"))
        is_lowest = _is_lowest_rank(item)
        if recording is not None and not any(recording is one for one in self._recordings):
            text = _write(fold(recording)) if is_lowest else ""
            self._add(replace(_UNCOMPARED, new=text), recording)
        if self._tree is not None and all(one.tree is None for one in self._compared):
            view = TreeView.of(self._tree, _MAX_ROWS) if is_lowest else None
            self._add(replace(_UNCOMPARED, kind="tree", tree=view), None)

    def enter_rank(self, config: pytest.Config) -> None:
        """Leave the writing to the pytest process."""
        if config.pluginmanager.has_plugin(SESSION_PLUGIN):
            config.pluginmanager.unregister(name=SESSION_PLUGIN)

    def rank_payload(self, item: pytest.Item) -> Record:
        """Hand over what the test compared and recorded in this rank."""
        del item
        record = Record(compared=tuple(self._compared), left_out=self._left_out)
        self._forget()
        return record

    def _forget(self) -> None:
        self._compared, self._recordings, self._left_out, self._tree = [], [], 0, None

    # In the pytest process.

    def merge(self, item: pytest.Item, payloads: Mapping[int, Record], **_: bool) -> list[str]:
        """Keep what the ranks of a test sent, until it is reported."""
        settings = item.stash[SETTINGS]
        self._records[item.nodeid] = Record(
            world_size=settings.world_size,
            backend=settings.backend,
            silent_ranks=tuple(rank for rank in settings.ranks if rank not in payloads),
            compared=tuple(_merged(payloads)),
            left_out=max((record.left_out for record in payloads.values()), default=0),
        )
        return []

    def take_record(self, item: pytest.Item) -> Record:
        """Hand over what is known of a test that has ended."""
        if SETTINGS in item.stash:
            return self._records.pop(item.nodeid, Record())
        return self.rank_payload(item)


def _is_lowest_rank(item: pytest.Item) -> bool:
    context = item.config.stash.get(RANK_CONTEXT, None)
    return context is None or context.rank == context.ranks[0]


def _recording_of(value: Any) -> Recording | None:
    """What ``comm_mode`` recorded last; None of another value, or if it recorded nothing."""
    if not hasattr(type(value), "merged_profile"):
        return None
    try:
        recording: Recording = value.recording
    except FsdpCommError:
        return None
    return recording


def _describe_comparison(
    assertion: CommSnapshot, name: str, result: AssertionResult, value: object
) -> Compared:
    item = assertion.test_location.item
    verdict = _verdict(result)
    lines: tuple[str, ...] = ()
    headline = ""
    is_difference = result.recalled_data is not None or result.exception is not None
    if verdict in {"differs", "broken"} or (verdict == "updated" and is_difference):
        lines, headline = explain_result(assertion, name, result)
    return Compared(
        name=name,
        kind="tree" if isinstance(value, ShardTree) else "comm",
        verdict=verdict,
        file=show_path(Path(result.snapshot_location), item.config.rootpath),
        old=_text(result.recalled_data),
        new=_text(result.asserted_data),
        lines=lines,
        headline=headline,
        tree=TreeView.of(value, _MAX_ROWS) if isinstance(value, ShardTree) else None,
    )


def _verdict(result: AssertionResult) -> Verdict:
    if result.exception is not None:
        return "broken"
    if result.created or result.updated:
        return "updated"
    if result.success:
        return "same"
    return "missing" if result.recalled_data is None else "differs"


def _write(profile: CommProfile) -> str:
    """As a snapshot; empty if it is too large for one."""
    try:
        return str(SnapshotText.of(profile, where="the recording"))
    except FsdpCommError:
        return ""


def _text(data: Any) -> str:
    return data if isinstance(data, str) else ""


def _merged(payloads: Mapping[int, Record]) -> Iterator[Compared]:
    """What the lowest rank kept of each value, with the timelines of all ranks."""
    records = sorted(payloads.items())
    for place, one in enumerate(records[0][1].compared if records else ()):
        timelines = (
            replace(timeline, ranks=(rank,))
            for rank, record in records
            for held in record.compared[place : place + 1]
            for timeline in held.timelines
        )
        yield replace(one, timelines=share_timelines(timelines))
