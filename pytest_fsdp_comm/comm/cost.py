"""Compute what a change costs one rank: calls, bytes and peak memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from pytest_fsdp_comm.comm.profile import CommProfile

# Report only the cost for the rank whose bytes change most, because in a sum over ranks, more bytes
# on one rank could hide fewer bytes on another. Ranks that are listed in the same rows and peaks
# have equal costs, so group these ranks and compute the cost for the first rank of each group.
# Bytes are message sizes, as in `events.Collective.nbytes`.

_Value = TypeVar("_Value")
_Part: TypeAlias = tuple[str, str]  # axis and kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The number of calls that one rank issues, and their total bytes."""

    count: int = 0
    """Number of calls of known size."""
    nbytes: int = 0
    unsized: int = 0
    """Number of calls of unknown size; `count` and `nbytes` do not include them."""

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            count=self.count + other.count,
            nbytes=self.nbytes + other.nbytes,
            unsized=self.unsized + other.unsized,
        )


def find_busiest(volumes: Iterable[tuple[Sequence[int], Volume]]) -> Volume:
    """Add up volumes, given with their ranks (none for all), on the rank that sends most bytes."""
    by_rank: defaultdict[int | None, Volume] = defaultdict(Volume)
    for ranks, volume in volumes:
        for rank in ranks or (None,):
            by_rank[rank] += volume
    common = by_rank.pop(None, Volume())
    return common + max(by_rank.values(), key=lambda volume: volume.nbytes, default=Volume())


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """The calls over one axis, of one kind or of all kinds, before and after a change."""

    kind: str = ""
    """A kind of collective, such as ``all_gather``; empty for all kinds."""
    axis: str
    before: Volume
    after: Volume


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a change for the rank whose bytes change most."""

    ranks: tuple[int, ...] = ()
    """The ranks that issue `collectives`, ascending; empty for all ranks recorded on both sides."""
    is_largest: bool = False
    """Whether these ranks' bytes and calls change more than those of all other ranks."""
    collectives: tuple[PartCost, ...] = ()
    """One entry for each axis and kind that either side uses, sorted by axis, then kind."""
    exposed_before: int = 0
    """Bytes of exposed calls, on the rank where they change most; 0 on real ranks."""
    exposed_after: int = 0
    peak_before: int = 0
    """Peak bytes of gathered parameters, on the rank whose peak changes most; 0 without gathers."""
    peak_after: int = 0
    peak_ranks: tuple[int, ...] = ()
    """The ranks with these peaks, ascending; empty for all ranks recorded on both sides."""

    @property
    def axes(self) -> tuple[PartCost, ...]:
        """The calls over each axis, summed over all kinds and sorted by axis."""
        by_axis = itertools.groupby(self.collectives, key=lambda part: part.axis)
        return tuple(
            PartCost(
                axis=axis,
                before=sum((part.before for part in parts), Volume()),
                after=sum((part.after for part in parts), Volume()),
            )
            for axis, parts in ((axis, list(group)) for axis, group in by_axis)
        )

    @property
    def before(self) -> Volume:
        return sum((axis.before for axis in self.axes), Volume())

    @property
    def after(self) -> Volume:
        return sum((axis.after for axis in self.axes), Volume())


def cost_of_change(old: CommProfile, new: CommProfile) -> Cost:
    """Compute what a change costs on the ranks in both profiles; empty if they share no ranks."""
    groups = _group_ranks_with_equal_calls(old, new)
    if not groups:
        return Cost()
    firsts = frozenset(groups)
    before, after = (_sum_volumes_by_rank(profile, firsts) for profile in (old, new))
    changes = {
        rank: {
            part: (before[rank][part], after[rank][part])
            for part in sorted({*before[rank], *after[rank]})
        }
        for rank in groups
    }
    change, ranks = _find_largest_and_its_ranks(changes, groups, _volume_change_sort_key)
    old_peaks, new_peaks = (_find_peaks_by_rank(profile, firsts) for profile in (old, new))
    peaks = {rank: (old_peaks[rank], new_peaks[rank]) for rank in groups}
    peak, peak_ranks = _find_largest_and_its_ranks(
        peaks, groups, lambda pair: (abs(pair[1] - pair[0]), pair[1])
    )
    old_exposed, new_exposed = (
        _sum_exposed_nbytes_by_rank(profile, firsts) for profile in (old, new)
    )
    exposed = [(old_exposed[rank], new_exposed[rank]) for rank in groups]
    exposed_before, exposed_after = max(exposed, key=lambda pair: abs(pair[1] - pair[0]))
    collectives = tuple(
        PartCost(kind=kind, axis=axis, before=was, after=now)
        for (axis, kind), (was, now) in change.items()
    )
    return Cost(
        ranks=ranks,
        is_largest=len({_volume_change_sort_key(change)[:2] for change in changes.values()}) > 1,
        collectives=collectives,
        exposed_before=exposed_before,
        exposed_after=exposed_after,
        peak_before=peak[0],
        peak_after=peak[1],
        peak_ranks=peak_ranks,
    )


def _group_ranks_with_equal_calls(old: CommProfile, new: CommProfile) -> dict[int, list[int]]:
    """Group ranks with equal rows and peaks on both sides; key each group by its lowest rank."""
    lists: set[tuple[int, ...]] = set()
    for profile in (old, new):
        lists.update(row.ranks for row in profile.collectives)
        lists.update(peak.ranks for peak in profile.peaks)
    signatures: defaultdict[int, list[int]] = defaultdict(list)
    for number, ranks in enumerate(lists):
        for rank in ranks:
            signatures[rank].append(number)
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    before, after = (set(side.recorded_ranks or range(side.world_size)) for side in (old, new))
    for rank in sorted(before & after):
        groups[tuple(signatures[rank])].append(rank)
    return {group[0]: group for group in groups.values()}


def _sum_volumes_by_rank(
    profile: CommProfile, ranks: frozenset[int]
) -> dict[int, defaultdict[_Part, Volume]]:
    by_list: defaultdict[tuple[int, ...], defaultdict[_Part, Volume]]
    by_list = defaultdict(lambda: defaultdict(Volume))
    for row in profile.collectives:
        unsized = row.unsized
        volume = Volume(count=row.count - unsized, nbytes=row.nbytes, unsized=unsized)
        by_list[row.ranks][row.axis, row.what] += volume
    sums = {rank: by_list[()].copy() for rank in ranks}
    for listed_ranks, volumes in by_list.items():
        for rank in ranks.intersection(listed_ranks):
            for part, volume in volumes.items():
                sums[rank][part] += volume
    return sums


def _sum_exposed_nbytes_by_rank(profile: CommProfile, ranks: frozenset[int]) -> dict[int, int]:
    sums = dict.fromkeys(ranks, 0)
    for row in profile.collectives if profile.shows_overlap else ():
        nbytes = row.exposed_nbytes
        for rank in ranks.intersection(row.ranks or ranks) if nbytes else ():
            sums[rank] += nbytes
    return sums


def _find_peaks_by_rank(profile: CommProfile, ranks: frozenset[int]) -> dict[int, int]:
    peaks = dict.fromkeys(ranks, 0)
    for peak in profile.peaks:
        peaks.update(dict.fromkeys(ranks.intersection(peak.ranks or ranks), peak.nbytes))
    return peaks


def _volume_change_sort_key(change: Mapping[_Part, tuple[Volume, Volume]]) -> tuple[int, int, int]:
    pairs = change.values()
    return (
        sum(abs(new.nbytes - old.nbytes) for old, new in pairs),
        sum(abs(new.count - old.count) + abs(new.unsized - old.unsized) for old, new in pairs),
        sum(new.nbytes for _, new in pairs),
    )


def _find_largest_and_its_ranks(
    values: Mapping[int, _Value],
    groups: Mapping[int, Sequence[int]],
    weight: Callable[[_Value], tuple[int, ...]],
) -> tuple[_Value, tuple[int, ...]]:
    """Return the value with the greatest weight, and the ranks that have it (empty for all)."""
    largest = max(values.values(), key=weight)
    firsts = [rank for rank, value in values.items() if value == largest]
    ranks = sorted(itertools.chain.from_iterable(groups[rank] for rank in firsts))
    return largest, () if len(firsts) == len(values) else tuple(ranks)
