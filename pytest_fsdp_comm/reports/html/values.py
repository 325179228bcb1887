"""The data behind the HTML pages: comparisons and recordings of a run's tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, Literal

from pytest_fsdp_comm.comm.events import Collective, HostWait, Recording, Reshard
from pytest_fsdp_comm.reports.ci.outcomes import Origin
from pytest_fsdp_comm.reports.explanation import Failure
from pytest_fsdp_comm.text.fqn import name_owners
from pytest_fsdp_comm.text.words import show_flops
from pytest_fsdp_comm.tree.model import ShardTree

Verdict = Literal["differs", "broken", "missing", "updated", "same", "uncompared"]
Outcome = Literal["failed", "error", "passed", "skipped", "xfailed", "unfinished"]

# Maximum number of entries in a timeline. Two steps of a model with 126 layers have about 6,000.
MAX_ENTRIES: Final = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event without its position; unknown strings are empty."""

    operation: str
    """``unshard``, ``reshard``, ``host_wait item`` for a wait in ``item()``, or the kind of a
    collective."""
    module: str | None
    """The owner of the collective or wait, or the unit that is unsharded or resharded; None if
    unknown."""
    phase: str
    nbytes: int
    """The message size, or the bytes of the unit's parameters."""
    axis: str = ""
    site: str = ""
    overlap: str = ""
    """``exposed``, or what can run at the same time as a collective; empty if that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The events of one rank, or of ranks with equal recordings."""

    ranks: tuple[int, ...]
    entries: tuple[Entry, ...]
    """The distinct entries, in order of first appearance."""
    order: tuple[int, ...]
    """The recorded sequence, as indices into `entries`."""
    peak: int
    """Peak gathered bytes of the entire recording, including omitted entries."""
    left_out: int = 0
    """Number of entries omitted at the end."""


def timeline_of(recording: Recording) -> Timeline:
    """Return the first `MAX_ENTRIES` entries that a rank recorded."""
    records: list[Collective | Reshard | HostWait] = [
        *recording.collectives,
        *recording.reshards,
        *recording.host_waits,
    ]
    records.sort(key=attrgetter("index"))
    units = {name for reshard in recording.reshards for name in (reshard.module or "").split("+")}
    entries: dict[Entry, int] = {}
    first = (_make_timeline_entry(record, units) for record in records[:MAX_ENTRIES])
    order = tuple(entries.setdefault(entry, len(entries)) for entry in first)
    return Timeline(
        ranks=(recording.rank,),
        entries=tuple(entries),
        order=order,
        peak=recording.peak_gathered_nbytes,
        left_out=len(records) - len(order),
    )


def _make_timeline_entry(record: Collective | Reshard | HostWait, units: Collection[str]) -> Entry:
    phase = record.phase.value
    match record:
        case Collective():
            return Entry(
                operation=record.kind,
                module=record.owner,
                phase=phase,
                nbytes=record.nbytes,
                axis=record.axis,
                site=record.call_site,
                overlap=_describe_overlap(record, units),
            )
        case HostWait():
            return Entry(
                operation=f"host_wait {record.way}",
                module=record.owner,
                phase=phase,
                nbytes=0,
                site=record.call_site,
            )
        case Reshard():
            return Entry(
                operation=record.action, module=record.module, phase=phase, nbytes=record.nbytes
            )


def _describe_overlap(event: Collective, units: Collection[str]) -> str:
    """Return ``exposed``, or ``beside layers.{0..1} (28.5 GFLOP)``; empty on real ranks."""
    if event.exposed is None:
        return ""
    if event.exposed:
        return "exposed"
    # A layer has many modules with FLOPs. Name its FSDP unit instead, except for the root's unit.
    names = (work.module for work in event.beside)
    modules = dict.fromkeys(_find_enclosing_unit(name, units) or name for name in names)
    flops = sum(work.flops for work in event.beside)
    return f"beside {name_owners(modules)} ({show_flops(flops)})"


def _find_enclosing_unit(module: str | None, units: Collection[str]) -> str:
    name = module or ""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name


def share_timelines(timelines: Iterable[Timeline]) -> tuple[Timeline, ...]:
    """Merge equal timelines of several ranks, in the order of their lowest ranks."""
    ranks_of: dict[Timeline, tuple[int, ...]] = {}
    for timeline in timelines:
        content = replace(timeline, ranks=())
        ranks_of[content] = (*ranks_of.get(content, ()), *timeline.ranks)
    return tuple(replace(content, ranks=ranks) for content, ranks in ranks_of.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A value that a test compared with a snapshot or only recorded; missing strings are empty."""

    name: str
    """The key, if a dict was compared; otherwise empty."""
    kind: Literal["comm", "tree"]
    verdict: Verdict
    file: str = ""
    """The snapshot's path, relative to pytest's root; empty if none was compared."""
    old: str = ""
    new: str = ""
    """The recording or tree, written as a snapshot; empty if that was not possible."""
    failure: Failure | None = None
    """None if no comparison failed."""
    tree: ShardTree | None = None
    """The tree of the lowest rank; None for a recording."""
    timelines: tuple[Timeline, ...] = ()
    """The timelines of all ranks, sorted by lowest rank; empty for a tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The comparisons and recordings of a test, up to its end or failure."""

    world_size: int = 1
    backend: str = ""
    """The backend of the process group; empty for a test that does not run on ranks."""
    silent_ranks: tuple[int, ...] = ()
    """Ranks that ended without sending their recordings, ascending."""
    compared: tuple[Compared, ...] = ()
    """Compared values in order, then values that were only recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a test."""

    nodeid: str
    outcome: Outcome
    seconds: float = 0.0
    problem: str = ""
    """The end of pytest's failure report; empty if the test did not fail."""
    message: str = ""
    address: str = ""
    """The test's URL on GitHub or GitLab; empty if unknown."""
    record: Record = Record()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A pytest run, as the report shows it."""

    tests: tuple[Result, ...]
    """The tests that use this plugin, in the order in which they ended."""
    is_interrupted: bool = False
    command: str = ""
    made_at: str = ""
    versions: str = ""
    """Versions of the packages that decide what is recorded and compared."""
    origin: Origin = field(default_factory=Origin)
