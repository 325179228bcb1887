"""What pages are made from: what the tests of a run compared and recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, Literal

from pytest_fsdp_comm.comm.events import Collective, Recording, Reshard
from pytest_fsdp_comm.reports.ci.outcomes import Origin
from pytest_fsdp_comm.reports.explanation import FailureText
from pytest_fsdp_comm.tree.model import ShardTree

Verdict = Literal["differs", "broken", "missing", "updated", "same", "uncompared"]
Outcome = Literal["failed", "error", "passed", "skipped", "xfailed", "unfinished"]

# Entries that are kept of one rank: 126 layers in two steps have about 6,000.
MAX_ENTRIES: Final = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A collective, an unshard or a reshard, without its place in the order."""

    what: str
    """The kind of a collective, ``unshard`` or ``reshard``."""
    module: str | None
    """The owner, or the module of the unit; None for no module."""
    phase: str
    nbytes: int
    """The message size, or the bytes of the unit's parameters."""
    axis: str = ""
    """Empty for an unshard or a reshard."""
    site: str = ""
    """The call site; empty where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The collectives, unshards and reshards of ranks that recorded the same."""

    ranks: tuple[int, ...]
    """Ascending; at least one."""
    entries: tuple[Entry, ...]
    """Each once, in the order of first appearance."""
    order: tuple[int, ...]
    """What happened: places in `entries`."""
    peak: int
    """As `events.Recording.peak_gathered_nbytes`, of the whole recording."""
    left_out: int = 0
    """Later entries that are not kept."""


def timeline_of(recording: Recording) -> Timeline:
    """Put a recording in order; the first `MAX_ENTRIES` are kept."""
    records: list[Collective | Reshard] = [*recording.collectives, *recording.reshards]
    records.sort(key=attrgetter("index"))
    entries: dict[Entry, int] = {}
    order = tuple(entries.setdefault(_entry(one), len(entries)) for one in records[:MAX_ENTRIES])
    return Timeline(
        ranks=(recording.rank,),
        entries=tuple(entries),
        order=order,
        peak=recording.peak_gathered_nbytes,
        left_out=len(records) - len(order),
    )


def _entry(record: Collective | Reshard) -> Entry:
    phase = record.phase.value
    if isinstance(record, Collective):
        return Entry(
            what=record.kind,
            module=record.owner,
            phase=phase,
            nbytes=record.nbytes,
            axis=record.axis,
            site=record.call_site,
        )
    return Entry(what=record.action, module=record.module, phase=phase, nbytes=record.nbytes)


def share_timelines(timelines: Iterable[Timeline]) -> tuple[Timeline, ...]:
    """One timeline for all ranks that recorded the same, in the order of their lowest ranks."""
    ranks: dict[Timeline, tuple[int, ...]] = {}
    for one in timelines:
        alike = replace(one, ranks=())
        ranks[alike] = (*ranks.get(alike, ()), *one.ranks)
    return tuple(replace(one, ranks=held) for one, held in ranks.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A value that a test compared with a snapshot, or recorded without."""

    name: str
    """The value's, where a dict was compared; empty otherwise."""
    kind: Literal["comm", "tree"]
    verdict: Verdict
    file: str = ""
    """The snapshot's path, as the user would type it; empty if none was compared."""
    old: str = ""
    """The snapshot's text; empty if there is none."""
    new: str = ""
    """What was recorded, as a snapshot's text; empty if it could not be written."""
    text: FailureText | None = None
    """Why it failed; None if it did not."""
    accept: str = ""
    """The command that accepts what was recorded; empty if none does."""
    headline: str = ""
    tree: ShardTree | None = None
    """Of the lowest rank; None for a recording."""
    timelines: tuple[Timeline, ...] = ()
    """By their lowest rank; empty for a tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a test compared and recorded, as far as it came."""

    world_size: int = 1
    backend: str = ""
    """Empty for a test that does not run on ranks."""
    silent_ranks: tuple[int, ...] = ()
    """Those that ended without saying what they recorded, ascending."""
    compared: tuple[Compared, ...] = ()
    """In the order of the comparisons, then what was not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a test."""

    nodeid: str
    outcome: Outcome
    seconds: float = 0.0
    problem: str = ""
    """The report of its failure, perhaps without the beginning; empty if it did not fail."""
    message: str = ""
    address: str = ""
    """Where the hosting service shows the test; empty if unknown."""
    record: Record = Record()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that a report is about."""

    tests: tuple[Result, ...]
    """Those that use this plugin, in the order in which they ended."""
    is_interrupted: bool = False
    command: str = ""
    made_at: str = ""
    """Date and time, as they are shown."""
    origin: Origin = field(default_factory=Origin)
