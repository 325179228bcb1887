"""What ranks did in order: small enough to be sent, a list to be read, and JSON to be drawn."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.comm.events import Collective

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pytest_fsdp_comm.comm.events import Recording, Reshard

# Entries that are kept of one rank: 126 layers in two steps have about 6,000.
MAX_ENTRIES: Final = 8_000

_LONGEST_PERIOD: Final = 64
_NUMBER: Final = re.compile(r"\d+")


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

    def first(self, count: int) -> Timeline:
        """Drop what happened after the first `count` entries."""
        order = self.order[:count]
        return replace(
            self,
            entries=self.entries[: max(order, default=-1) + 1],
            order=order,
            left_out=self.left_out + len(self.order) - len(order),
        )


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
class ListRow:
    """An entry, or entries that repeat, each with another module."""

    entry: Entry
    """The first of them."""
    place: str
    """``12``, or ``12, ... 627`` by its first and last place."""
    times: int
    modules: tuple[str | None, ...]
    """In order of appearance."""
    differs: bool
    """Whether a module of it differs from the snapshot."""
    opens: bool = False
    """Whether a group of entries that repeat together begins with it."""


def list_entries(timeline: Timeline, differing: Collection[str | None] = ()) -> Iterator[ListRow]:
    """List all entries in order, equal stretches folded; marks those of `differing` modules."""
    likeness = _likeness(timeline)
    at = 0
    while at < len(likeness):
        period, times = _repetition(likeness, at)
        for first in range(at, at + period):
            places = range(first, at + period * times, period)
            entries = [timeline.entries[timeline.order[place]] for place in places]
            modules = tuple(dict.fromkeys(entry.module for entry in entries))
            yield ListRow(
                entry=entries[0],
                place=str(first + 1) if times == 1 else f"{first + 1}, ... {places[-1] + 1}",
                times=times,
                modules=modules,
                differs=any(module in differing for module in modules),
                opens=times > 1 and first == at,
            )
        at += period * times


# Note [Folding a timeline]
# Layers and steps repeat, apart from the numbers in their modules' names. From each place on, the
# period that covers most of what follows is folded, unless none repeats; a step within which layers
# repeat is so folded as a whole only where its layers do not cover more. Periods are bounded, so
# that a timeline of any length is listed in a time that grows with its length.


def _likeness(timeline: Timeline) -> list[int]:
    """A number for each place, equal where entries differ at most in numbers of modules."""
    numbers: dict[tuple[Any, ...], int] = {}
    of_entries = []
    for one in timeline.entries:
        words = one.module and _NUMBER.sub("#", one.module)
        like = (one.what, words, one.phase, one.axis, one.nbytes)
        of_entries.append(numbers.setdefault(like, len(numbers)))
    return [of_entries[place] for place in timeline.order]


def _repetition(likeness: Sequence[int], at: int) -> tuple[int, int]:
    """The period that covers most from a place on, and how often it repeats there."""
    best, covered = (1, 1), 1
    for period in range(1, min(_LONGEST_PERIOD, (len(likeness) - at) // 2) + 1):
        if likeness[at] != likeness[at + period]:
            continue
        end = at + period
        while end < len(likeness) and likeness[end] == likeness[end - period]:
            end += 1
        times = (end - at) // period
        if times > 1 and times * period > covered:
            best, covered = (period, times), times * period
    return best
