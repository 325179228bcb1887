"""What a change of communication costs a rank: calls, bytes and peak memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from pytest_fsdp_comm.comm.profile import CommProfile

# Note [Cost by rank]: a cost is that of one rank, so its parts add up. It is the rank whose bytes
# change most, so no sum over ranks hides a difference. Ranks in the same lists of ranks have equal
# rows and peaks, so one rank of each such group is computed. Bytes are message sizes, as in
# `events.Collective.nbytes`; calls of unknown size are counted separately.

_Value = TypeVar("_Value")
_What: TypeAlias = tuple[str, str]
"""Axis and kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The calls of one rank."""

    count: int = 0
    """Calls of known size."""
    nbytes: int = 0
    unsized: int = 0
    """Calls of unknown size."""

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            count=self.count + other.count,
            nbytes=self.nbytes + other.nbytes,
            unsized=self.unsized + other.unsized,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """The calls of one kind over one axis, or all calls over it."""

    kind: str = ""
    """As `events.Collective.kind`; empty for all kinds."""
    axis: str
    before: Volume
    after: Volume


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a change for one rank; see Note [Cost by rank]."""

    ranks: tuple[int, ...] = ()
    """The ranks with these calls, ascending; empty for all that both sides recorded."""
    collectives: tuple[PartCost, ...] = ()
    """Kinds that either side has, sorted by axis and kind."""
    peak_before: int = 0
    """Most bytes of parameters that were gathered at once; 0 if none were."""
    peak_after: int = 0
    peak_ranks: tuple[int, ...] = ()
    """The ranks with these peaks, ascending; empty for all that both sides recorded."""

    @property
    def axes(self) -> tuple[PartCost, ...]:
        """All calls over each axis that either side has, sorted by name."""
        by_axis = itertools.groupby(self.collectives, key=lambda one: one.axis)
        return tuple(
            PartCost(
                axis=axis,
                before=sum((one.before for one in alike), Volume()),
                after=sum((one.after for one in alike), Volume()),
            )
            for axis, alike in ((axis, list(group)) for axis, group in by_axis)
        )

    @property
    def before(self) -> Volume:
        return sum((axis.before for axis in self.axes), Volume())

    @property
    def after(self) -> Volume:
        return sum((axis.after for axis in self.axes), Volume())


def cost_of_change(old: CommProfile, new: CommProfile) -> Cost:
    """Compare the sums of both sides on the ranks that both recorded; empty if there are none."""
    alike = _alike_ranks(old, new)
    if not alike:
        return Cost()
    firsts = frozenset(alike)
    before, after = (_volumes(profile, firsts) for profile in (old, new))
    changes = {
        rank: {
            what: (before[rank][what], after[rank][what])
            for what in sorted({*before[rank], *after[rank]})
        }
        for rank in alike
    }
    change, ranks = _largest(changes, alike, _weight)
    old_peaks, new_peaks = (_peaks(profile, firsts) for profile in (old, new))
    peaks = {rank: (old_peaks[rank], new_peaks[rank]) for rank in alike}
    peak, peak_ranks = _largest(peaks, alike, lambda pair: (abs(pair[1] - pair[0]), pair[1]))
    collectives = tuple(
        PartCost(kind=kind, axis=axis, before=was, after=now)
        for (axis, kind), (was, now) in change.items()
    )
    return Cost(
        ranks=ranks,
        collectives=collectives,
        peak_before=peak[0],
        peak_after=peak[1],
        peak_ranks=peak_ranks,
    )


def _alike_ranks(old: CommProfile, new: CommProfile) -> dict[int, list[int]]:
    """The ranks that both sides recorded, with those that are alike, by the lowest of each."""
    lists: set[tuple[int, ...]] = set()
    for profile in (old, new):
        lists.update(row.ranks for row in profile.collectives)
        lists.update(peak.ranks for peak in profile.peaks)
    signatures: defaultdict[int, list[int]] = defaultdict(list)
    for number, ranks in enumerate(lists):
        for rank in ranks:
            signatures[rank].append(number)
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    before, after = (set(one.recorded_ranks or range(one.world_size)) for one in (old, new))
    for rank in sorted(before & after):
        groups[tuple(signatures[rank])].append(rank)
    return {group[0]: group for group in groups.values()}


def _volumes(profile: CommProfile, ranks: frozenset[int]) -> dict[int, defaultdict[_What, Volume]]:
    by_list: defaultdict[tuple[int, ...], defaultdict[_What, Volume]]
    by_list = defaultdict(lambda: defaultdict(Volume))
    for row in profile.collectives:
        unsized = row.unsized
        volume = Volume(count=row.count - unsized, nbytes=row.nbytes, unsized=unsized)
        by_list[row.ranks][row.axis, row.what] += volume
    found = {rank: by_list[()].copy() for rank in ranks}
    for having, volumes in by_list.items():
        for rank in ranks.intersection(having):
            for what, volume in volumes.items():
                found[rank][what] += volume
    return found


def _peaks(profile: CommProfile, ranks: frozenset[int]) -> dict[int, int]:
    found = dict.fromkeys(ranks, 0)
    for peak in profile.peaks:
        found.update(dict.fromkeys(ranks.intersection(peak.ranks or ranks), peak.nbytes))
    return found


def _weight(change: Mapping[_What, tuple[Volume, Volume]]) -> tuple[int, int, int]:
    pairs = change.values()
    return (
        sum(abs(now.nbytes - was.nbytes) for was, now in pairs),
        sum(abs(now.count - was.count) + abs(now.unsized - was.unsized) for was, now in pairs),
        sum(now.nbytes for _, now in pairs),
    )


def _largest(
    values: Mapping[int, _Value],
    alike: Mapping[int, Sequence[int]],
    weight: Callable[[_Value], tuple[int, ...]],
) -> tuple[_Value, tuple[int, ...]]:
    """The value of most weight and the ranks that have it; no ranks if all have it."""
    largest = max(values.values(), key=weight)
    having = [rank for rank, value in values.items() if value == largest]
    ranks = sorted(itertools.chain.from_iterable(alike[rank] for rank in having))
    return largest, () if len(having) == len(values) else tuple(ranks)
