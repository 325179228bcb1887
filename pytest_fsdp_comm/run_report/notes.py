"""Keeps what a test compares and records, in the process that runs it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.comm.profile import fold
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT
from pytest_fsdp_comm.reports.html.timeline import Timeline, timeline_of
from pytest_fsdp_comm.reports.html.values import (
    Compared,
    RankTimeline,
    Record,
    TreeView,
    Verdict,
)
from pytest_fsdp_comm.reports.tree_rows import summary_words, tree_rows
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.explain import explain_result
from pytest_fsdp_comm.snapshots.extension import CommSnapshot
from pytest_fsdp_comm.text.paths import show_path
from pytest_fsdp_comm.tree.model import ShardTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syrupy.assertion import AssertionResult, SnapshotAssertion

    from pytest_fsdp_comm.comm.profile import CommProfile

SESSION_PLUGIN: Final = "fsdp-comm-report"
"""The name of the plugin that writes, which no rank needs."""

_MAX_ROWS: Final = 600
"""Rows of a tree that are kept."""
_MAX_COMPARISONS: Final = 50
"""Values that are kept of one test: a test that compares in a loop must not fill the memory."""


_UNCOMPARED: Final = Compared(name="", kind="comm", verdict="uncompared")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNotes:
    """What a test compared and recorded in one rank."""

    compared: tuple[Compared, ...]
    """Without timelines, in the order in which all ranks compare; empty but on the lowest rank."""
    timelines: tuple[Timeline | None, ...]
    """One for each value that was compared or recorded; None for a tree."""
    left_out: int
    """Values beyond those that are kept."""


@dataclass(slots=True)
class _Note:
    """A value of the running test."""

    compared: Compared | None
    """None where another rank says it."""
    recording: Recording | None = None
    """None for a tree."""


class Notes:
    """Registered once in each process that runs tests; carries the notes of ranks out of them."""

    payload_type: Final = RankNotes

    def __init__(self) -> None:
        """Begins before the first test."""
        self._notes: list[_Note] = []
        self._left_out = 0
        self._tree: ShardTree | None = None
        self._records: dict[str, Record] = {}

    # In the process that runs the test.

    def note_comparison(self, assertion: SnapshotAssertion, values: Mapping[str, object]) -> None:
        """Keeps what was compared, and explains what differs while all of it is at hand."""
        item = assertion.test_location.item
        if not isinstance(assertion, CommSnapshot):
            raise TypeError(f"expected a CommSnapshot, got {assertion!r}")
        room = max(0, _MAX_COMPARISONS - len(self._notes))
        self._left_out += len(assertion.last_results[room:])
        for name, result in assertion.last_results[:room]:
            value = values[name]
            is_tree = isinstance(value, ShardTree)
            compared = None
            if _is_lowest_rank(item):
                compared = _describe_comparison(assertion, name, result, is_tree=is_tree)
                if isinstance(value, ShardTree):
                    compared = replace(compared, tree=_view(value))
            self._notes.append(_Note(compared=compared, recording=_recording_of(value)))
            if value is self._tree:
                self._tree = None

    def note_tree(self, tree: ShardTree) -> None:
        """Keeps the last tree, in case that it is not compared."""
        self._tree = tree

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Forgets what a test left behind that was interrupted."""
        self._forget()

    # Before fixtures end.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Keeps what was recorded and compared with nothing."""
        mode = (getattr(item, "funcargs", None) or {}).get("comm_mode")
        recording = _recording_of(mode)
        seen = [note.recording for note in self._notes]
        is_lowest = _is_lowest_rank(item)
        if recording is not None and not any(recording is one for one in seen):
            compared = None
            if is_lowest:
                compared = replace(_UNCOMPARED, new=_write(fold(recording)))
            self._notes.append(_Note(compared=compared, recording=recording))
        if self._tree is not None and not any(
            note.compared is not None and note.compared.tree is not None for note in self._notes
        ):
            view = _view(self._tree) if is_lowest else None
            compared = Compared(name="", kind="tree", verdict="uncompared", tree=view)
            self._notes.append(_Note(compared=compared if is_lowest else None))

    def enter_rank(self, config: pytest.Config) -> None:
        """Leaves the writing to the pytest process."""
        if config.pluginmanager.has_plugin(SESSION_PLUGIN):
            config.pluginmanager.unregister(name=SESSION_PLUGIN)

    def rank_payload(self, item: pytest.Item) -> RankNotes:
        """What the test compared and recorded in this rank."""
        del item
        notes, left_out = self._notes, self._left_out
        self._forget()
        return RankNotes(
            left_out=left_out,
            compared=tuple(note.compared for note in notes if note.compared is not None),
            timelines=tuple(
                None if note.recording is None else timeline_of(note.recording) for note in notes
            ),
        )

    def _forget(self) -> None:
        self._notes, self._left_out, self._tree = [], 0, None

    # In the pytest process.

    def merge(
        self, item: pytest.Item, payloads: Mapping[int, RankNotes], *, has_failed: bool
    ) -> list[str]:
        """Keeps what the ranks of a test sent, until it is reported."""
        del has_failed
        settings = item.stash[SETTINGS]
        self._records[item.nodeid] = Record(
            world_size=settings.world_size,
            backend=settings.backend,
            silent_ranks=tuple(rank for rank in settings.ranks if rank not in payloads),
            compared=tuple(_merged(payloads)),
            left_out=max((notes.left_out for notes in payloads.values()), default=0),
        )
        return []

    def take_record(self, item: pytest.Item) -> Record:
        """What is known of a test that has ended; of one without ranks, what this process noted."""
        if SETTINGS in item.stash:
            return self._records.pop(item.nodeid, Record())
        notes = self.rank_payload(item)
        return Record(compared=tuple(_merged({0: notes})), left_out=notes.left_out)


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
    assertion: CommSnapshot, name: str, result: AssertionResult, *, is_tree: bool
) -> Compared:
    verdict = _verdict(result)
    lines: tuple[str, ...] = ()
    headline = ""
    is_difference = result.recalled_data is not None or result.exception is not None
    if verdict in {"differs", "broken"} or (verdict == "updated" and is_difference):
        lines, headline = explain_result(assertion, name, result)
    return Compared(
        name=name,
        kind="tree" if is_tree else "comm",
        verdict=verdict,
        file=show_path(Path(result.snapshot_location), result.test_location.item.config.rootpath),
        old=_text(result.recalled_data),
        new=_text(result.asserted_data),
        lines=lines,
        headline=headline,
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


def _view(tree: ShardTree) -> TreeView:
    rows = tree_rows(tree)
    kept = tuple(itertools.islice(rows, _MAX_ROWS))
    return TreeView(
        title=tree.modules[0].class_name,
        summary=summary_words(tree),
        rows=kept,
        left_out=sum(1 for _ in rows),
        findings=tuple(tree.findings),
        notes=tree.notes,
    )


def _merged(payloads: Mapping[int, RankNotes]) -> Iterator[Compared]:
    """Gives each value what the ranks recorded of it; ranks that recorded the same share it."""
    lowest = min(payloads, default=0)
    compared = payloads[lowest].compared if payloads else ()
    most = max((len(notes.timelines) for notes in payloads.values()), default=0)
    # Where the lowest rank died, the others' recordings are all that is left.
    for place, one in enumerate(compared or (_UNCOMPARED,) * most):
        held: dict[Timeline, list[int]] = {}
        for rank, notes in sorted(payloads.items()):
            timeline = notes.timelines[place] if place < len(notes.timelines) else None
            if timeline is not None:
                held.setdefault(timeline, []).append(rank)
        timelines = (RankTimeline(ranks=tuple(ranks), timeline=one) for one, ranks in held.items())
        yield replace(one, timelines=tuple(timelines))
