"""Fold a recording into rows, each with a count of calls, and merge the rows of several ranks."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from pytest_fsdp_comm.comm.calls import NOT_LAST, Calls
from pytest_fsdp_comm.comm.divergence import Divergence
from pytest_fsdp_comm.comm.events import (
    COLLECTIVE_KINDS,
    Answer,
    Collective,
    Gap,
    Phase,
    Recording,
    Role,
    Source,
)
from pytest_fsdp_comm.comm.mesh import MeshAxis, merge_axes
from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.text.rank_lists import ranks_or_empty_if_all

Subject: TypeAlias = Literal["collective", "reshard", "redistribution", "host_wait"]
"""What a row counts. For example, an unshard and its all-gather are counted in separate rows."""
SUBJECTS: Final[tuple[Subject, ...]] = get_args(Subject)

_PHASE_ORDER: Final = {phase: index for index, phase in enumerate(Phase)}
_SUBJECT_ORDER: Final = {subject: index for index, subject in enumerate(SUBJECTS)}
_KIND_ORDER: Final = {kind: index for index, kind in enumerate(COLLECTIVE_KINDS)}

# Matches the embedding's shape in the repr of the placement `_MaskPartial` (torch 2.7 to 2.13).
# Rows omit the shape, because it is not part of the placement.
_SHAPE: Final = re.compile(r"(?:, )?offset_shape=torch\.Size\(\[[^\]]*\]\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A line of code that issued collectives in a row. Reported, never compared or stored."""

    issued_in: str | None
    """FQN of the module that was running; None outside all modules."""
    call_site: str
    """``path:line`` of the innermost user code; empty if unknown."""
    calls: Calls
    """Those of the row's collectives that this line issued."""
    is_of_dtensor: bool = False
    """Whether these calls redistribute a DTensor."""
    is_of_backward: bool = False
    """Whether the line calls ``.backward()``; False for a line in a hook."""


class RowKey(NamedTuple):
    """The fields that identify a `Row`, except for its owner and ranks."""

    subject: Subject
    phase: Phase
    what: str
    axis: str

    def __str__(self) -> str:
        """Return ``all_gather[dp]``, ``unshard`` or ``(Shard(0))->(Replicate())``."""
        return f"{self.what}[{self.axis}]" if self.subject == "collective" else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All calls of one kind that some ranks issued for one module in one phase."""

    subject: Subject = "collective"
    phase: Phase
    owner: str | None
    """FQN of the module or unit; None for calls without a module."""
    what: str
    """`events.Collective.kind`, `events.Reshard.action`, `events.HostWait.way`, or the placements
    of a redistribution, one per mesh axis, without spaces: ``(Shard(dim=0))->(Replicate())``."""
    axis: str = ""
    """Name of the mesh axis of a collective; empty for other subjects."""
    calls: tuple[Calls, ...]
    """The calls, sorted, without duplicates. Subjects other than collectives only have a count."""
    ranks: tuple[int, ...] = ()
    """The ranks that issued `calls`, ascending; empty for all ranks."""
    sites: tuple[Site, ...] = field(default=(), compare=False)
    """The lines that issued the calls or made the host wait, on the lowest of `ranks`. Empty for
    reshards and redistributions, and in profiles that were read from a snapshot."""

    @property
    def key(self) -> RowKey:
        return RowKey(self.subject, self.phase, self.what, self.axis)

    @property
    def count(self) -> int:
        return sum(calls.count for calls in self.calls)

    @property
    def nbytes(self) -> int:
        """Sum of the known message sizes on one rank, in bytes."""
        return sum(calls.count * calls.nbytes for calls in self.calls)

    @property
    def exposed_nbytes(self) -> int:
        """Sum of the known message sizes of calls on one rank that nothing can hide, in bytes."""
        return sum(calls.count * calls.nbytes for calls in self.calls if calls.exposed)

    @property
    def unsized(self) -> int:
        """Number of calls of unknown size on one rank."""
        return sum(calls.count for calls in self.calls if calls.lacks_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredPeak:
    """The peak of gathered parameters, and the ranks that reach it."""

    nbytes: int
    """The most bytes that were gathered at the same time on one rank; at least 1."""
    ranks: tuple[int, ...] = ()
    """The ranks with this peak, ascending; empty for all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Totals for all collectives of one kind over one axis."""

    kind: str
    axis: str
    count: int
    nbytes: int
    """Sum of the known sizes."""
    unsized: int
    """Number of collectives of unknown size; `count` includes them."""
    exposed_nbytes: int
    """Sum of the known sizes of collectives that nothing can hide; 0 on real ranks."""
    num_ranks: int
    """Number of ranks in the sums: 1 if all ranks have the same rows, else all recorded ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommProfile:
    """The recording of one test on all recorded ranks, as rows that can be compared."""

    world_size: int
    """Number of ranks in the default group."""
    mesh_axes: tuple[MeshAxis, ...]
    """The axes that collectives used, sorted by name."""
    rows: tuple[Row, ...]
    """In the order of `sort_rows`."""
    peaks: tuple[GatheredPeak, ...] = ()
    """Sorted by lowest rank; empty if nothing was gathered."""
    recorded_ranks: tuple[int, ...] = ()
    """The ranks that were recorded, ascending; empty for all ranks."""
    shows_async: bool = True
    """Whether torch reports asynchronous calls; if not, `Calls.is_async` is not compared."""
    shows_overlap: bool = False
    """Whether overlap is known; if not, `Calls.exposed` and host waits are not compared."""
    sizes_activations: bool = True
    """Whether sizes of activations are compared; if not, their `Calls.is_unsized` is True."""
    answers: tuple[Answer, ...] = ()
    """The `events.Recording.answers` of all ranks, sorted and without duplicates."""
    backend: str = field(default="", compare=False)
    torch_version: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """The `events.Recording.notes` of all ranks, without duplicates."""
    gaps: tuple[Gap, ...] = field(default=(), compare=False)
    """The `events.Recording.gaps` of all ranks; empty in a profile read from a snapshot."""
    divergence: Divergence | None = field(default=None, compare=False)
    """Where the calls of the ranks diverge; None in a profile read from a snapshot."""

    @property
    def collectives(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.subject == "collective")

    @property
    def num_ranks(self) -> int:
        return len(self.recorded_ranks) or self.world_size

    def totals(self) -> tuple[Total, ...]:
        """Return totals for each kind and axis, over all phases and owners, sorted by kind."""
        is_common = not any(row.ranks for row in self.collectives)
        num_ranks = 1 if is_common else self.num_ranks
        sums: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for row in self.collectives:
            times = 1 if is_common else len(row.ranks) or num_ranks
            for name in ("count", "nbytes", "unsized", "exposed_nbytes"):
                sums[row.what, row.axis][name] += times * getattr(row, name)
        return tuple(
            Total(kind=kind, axis=axis, num_ranks=num_ranks, **sums[kind, axis])
            for kind, axis in sorted(sums, key=lambda key: _kind_sort_key(*key))
        )


_WithRanks = TypeVar("_WithRanks", Row, GatheredPeak, Gap)


def fold(recording: Recording) -> CommProfile:
    """Return the profile of one rank's recording."""
    peak = recording.peak_gathered_nbytes
    return CommProfile(
        world_size=recording.world_size,
        mesh_axes=recording.mesh_axes,
        rows=sort_rows(
            chain(
                _fold_collectives(recording),
                _fold_reshards_and_redistributions(recording),
                _fold_host_waits(recording),
            )
        ),
        peaks=(GatheredPeak(nbytes=peak),) if peak else (),
        recorded_ranks=() if recording.world_size == 1 else (recording.rank,),
        shows_async=recording.shows_async,
        shows_overlap=recording.shows_overlap,
        backend=recording.backend,
        torch_version=recording.torch_version,
        notes=recording.notes,
        gaps=recording.gaps,
        answers=recording.answers,
    )


def _fold_collectives(recording: Recording) -> Iterable[Row]:
    events: defaultdict[tuple[Phase, str | None, str, str], list[Collective]] = defaultdict(list)
    for event in recording.collectives:
        events[event.phase, event.owner, event.kind, event.axis].append(event)
    for (phase, owner, kind, axis), row_events in events.items():
        reduced_in: defaultdict[int | None, set[int | None]] = defaultdict(set)
        for event in row_events:
            reduced_in[event.num_backwards].add(event.backward)
        words = {num: _name_reducing_backwards(num, passes) for num, passes in reduced_in.items()}
        calls = [Calls.from_event(event, words[event.num_backwards]) for event in row_events]
        # Tuples are faster to hash than sites.
        sites = Counter(
            (
                event.issued_in,
                event.call_site,
                call,
                event.source is Source.DTENSOR,
                event.is_of_backward,
            )
            for event, call in zip(row_events, calls, strict=True)
        )
        yield Row(
            phase=phase,
            owner=owner,
            what=kind,
            axis=axis,
            calls=_make_counted_calls(Counter(calls)),
            sites=tuple(
                Site(
                    issued_in=issued_in,
                    call_site=call_site,
                    calls=replace(call, count=count),
                    is_of_dtensor=is_of_dtensor,
                    is_of_backward=is_of_backward,
                )
                for (
                    (issued_in, call_site, call, is_of_dtensor, is_of_backward),
                    count,
                ) in sites.most_common()
            ),
        )


def _name_reducing_backwards(total: int | None, passes: Collection[int | None]) -> str:
    """Describe which of `total` backward passes reduce gradients; return "" if all do."""
    if total is None or len(passes) == total:
        return ""
    for name, number in (("last", total), ("first", 1)):
        if passes == {number}:
            return f"the {name} of {total} backwards"
    text = f"{len(passes)} of {total} backwards"
    return text if total in passes else f"{text}{NOT_LAST}"


def _fold_reshards_and_redistributions(recording: Recording) -> Iterable[Row]:
    def write_placements(placements: Sequence[str]) -> str:
        return f"({','.join(_SHAPE.sub('', text).replace(' ', '') for text in placements)})"

    counts: Counter[tuple[Subject, Phase, str | None, str]] = Counter()
    for reshard in recording.reshards:
        counts["reshard", reshard.phase, reshard.module, reshard.action] += 1
    for move in recording.redistributions:
        sides = move.source_placements, move.target_placements
        change = "->".join(map(write_placements, sides))
        counts["redistribution", move.phase, move.owner, change] += 1
    for (subject, phase, owner, what), count in counts.items():
        calls = (Calls(count=count),)
        yield Row(subject=subject, phase=phase, owner=owner, what=what, calls=calls)


def _fold_host_waits(recording: Recording) -> Iterable[Row]:
    lines: defaultdict[tuple[Phase, str | None, str], Counter[tuple[str | None, str]]]
    lines = defaultdict(Counter)
    for wait in recording.host_waits:
        lines[wait.phase, wait.owner, wait.way][wait.issued_in, wait.call_site] += 1
    for (phase, owner, way), counts in lines.items():
        yield Row(
            subject="host_wait",
            phase=phase,
            owner=owner,
            what=way,
            calls=(Calls(count=counts.total()),),
            sites=tuple(
                Site(issued_in=issued_in, call_site=call_site, calls=Calls(count=count))
                for (issued_in, call_site), count in counts.most_common()
            ),
        )


def merge(profiles: Sequence[CommProfile], *, ranks: Sequence[int] = ()) -> CommProfile:
    """Merge profiles in rank order; `ranks` overrides the ranks that the profiles list."""
    # The profile of a single process lists no ranks; its rank is 0.
    ranks = ranks or [(profile.recorded_ranks or (0,))[0] for profile in profiles]
    # With thousands of ranks, most recordings are equal, and their ranks share one profile object.
    # So group by identity: comparing the profiles would take longer than merging them.
    groups: dict[int, tuple[CommProfile, list[int]]] = {}
    for rank, profile in zip(ranks, profiles, strict=True):
        groups.setdefault(id(profile), (profile, []))[1].append(rank)
    # One profile per group, in the order of the groups' lowest ranks.
    distinct = [profile for profile, _ in groups.values()]
    ranks_of_groups = [listed for _, listed in groups.values()]

    @cache
    def ranks_of(indices: frozenset[int]) -> tuple[int, ...]:
        listed = sorted(chain.from_iterable(ranks_of_groups[index] for index in indices))
        return ranks_or_empty_if_all(listed, len(ranks))

    def merge_equal(
        values_of_groups: Iterable[Sequence[_WithRanks]], key: Callable[[_WithRanks], object]
    ) -> Iterator[_WithRanks]:
        """Merge values with equal keys; yield them in the order of their lowest ranks."""
        merged: dict[object, tuple[_WithRanks, list[int]]] = {}
        for index, values in enumerate(values_of_groups):
            for value in values:
                merged.setdefault(key(value), (value, []))[1].append(index)
        for value, indices in merged.values():
            yield replace(value, ranks=ranks_of(frozenset(indices)))

    # Do not use the row itself as the key: hashing all fields would take longer.
    row_key = attrgetter("subject", "phase", "owner", "what", "axis", "calls")
    return replace(
        profiles[0],
        mesh_axes=merge_axes(axis for profile in distinct for axis in profile.mesh_axes),
        rows=sort_rows(merge_equal((profile.rows for profile in distinct), row_key)),
        peaks=tuple(merge_equal((profile.peaks for profile in distinct), attrgetter("nbytes"))),
        recorded_ranks=ranks_or_empty_if_all(ranks, profiles[0].world_size),
        notes=tuple(dict.fromkeys(note for profile in distinct for note in profile.notes)),
        gaps=tuple(merge_equal((profile.gaps for profile in distinct), attrgetter("kind", "text"))),
        answers=tuple(sorted({answer for profile in distinct for answer in profile.answers})),
    )


def restrict(profile: CommProfile, ranks: Sequence[int]) -> CommProfile:
    """Return the profile of only these ranks, which must be in ascending order."""
    chosen = frozenset(ranks)
    # Many rows share a list of ranks, so filter each list only once.
    lists: dict[tuple[int, ...], tuple[int, ...]] = {(): tuple(ranks)}

    def select(values: Iterable[_WithRanks]) -> Iterator[tuple[_WithRanks, tuple[int, ...]]]:
        for value in values:
            if value.ranks not in lists:
                lists[value.ranks] = tuple(rank for rank in value.ranks if rank in chosen)
            common = lists[value.ranks]
            if common:
                yield replace(value, ranks=ranks_or_empty_if_all(common, len(ranks))), common

    rows = sort_rows(row for row, _ in select(profile.rows))
    used = {row.axis for row in rows}
    peaks = sorted(select(profile.peaks), key=lambda pair: pair[1])
    return replace(
        profile,
        mesh_axes=tuple(
            replace(axis, groups=tuple(filter(chosen.intersection, axis.groups)))
            for axis in profile.mesh_axes
            if axis.name in used and (not axis.groups or any(map(chosen.intersection, axis.groups)))
        ),
        rows=rows,
        peaks=tuple(peak for peak, _ in peaks),
        recorded_ranks=ranks_or_empty_if_all(ranks, profile.world_size),
    )


def remove_async(profile: CommProfile) -> CommProfile:
    """Return a copy of the profile that does not say which calls are asynchronous."""
    rows = tuple(
        replace(row, calls=replace_fields(row.calls, is_async=False)) for row in profile.rows
    )
    return replace(profile, rows=rows, shows_async=False)


def remove_overlap(profile: CommProfile) -> CommProfile:
    """Return a copy of the profile without host waits, and without the calls' exposure."""
    rows = (
        replace(row, calls=replace_fields(row.calls, exposed=False))
        for row in profile.rows
        if row.subject != "host_wait"
    )
    return replace(_replace_and_merge_rows(profile, rows), shows_overlap=False)


def remove_activation_sizes(profile: CommProfile) -> CommProfile:
    """Return a copy of the profile without the sizes of activations."""
    rows = []
    for row in profile.rows:
        sized = {call for call in row.calls if call.role == Role.ACTIVATIONS and not call.is_object}
        calls = {*row.calls} - sized | {*replace_fields(sized, nbytes=0, is_unsized=True)}
        rows.append(replace(row, calls=tuple(sorted(calls))))
    return replace(_replace_and_merge_rows(profile, rows), sizes_activations=False)


def _clear_backwards_that_include_last(profile: CommProfile) -> CommProfile:
    """Clear `Calls.backwards` for all calls that the last backward also issues."""

    def reset(row: Row) -> Row:
        calls = (call if call.lacks_last else replace(call, backwards="") for call in row.calls)
        return replace(row, calls=replace_fields(calls))

    if not any(call.backwards for row in profile.rows for call in row.calls):
        return profile
    return _replace_and_merge_rows(profile, map(reset, profile.rows))


def _replace_and_merge_rows(profile: CommProfile, rows: Iterable[Row]) -> CommProfile:
    """Replace the rows of the profile, and merge rows that differ only in their ranks."""
    groups: dict[tuple[RowKey, str | None, tuple[Calls, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.key, row.owner, row.calls), []).append(row)
    merged = []
    for first, *further in groups.values():
        ranks = sorted(chain(first.ranks, *(row.ranks for row in further)))
        merged_ranks = ranks_or_empty_if_all(ranks, profile.num_ranks) if further else first.ranks
        merged.append(replace(first, ranks=merged_ranks))
    return replace(profile, rows=sort_rows(merged))


# Note [Comparable]: a comparison ignores
# - the rows of ranks that were not recorded, if the recording simulates only some ranks;
# - `is_async`, if torch reported it for only one side;
# - `exposed` and host waits, if only one side is a recording of simulated ranks;
# - sizes of activations, if one side lacks them (this difference is reported as a change);
# - `backwards`, if the last backward reduces these gradients. Its value then follows from counts
#   and the number of micro-batches, so it is printed, but not compared.


def make_comparable(old: CommProfile, new: CommProfile) -> tuple[CommProfile, CommProfile]:
    """Remove from both profiles everything that cannot be compared; see Note [Comparable]."""
    if new.recorded_ranks and not old.recorded_ranks:
        old = restrict(old, new.recorded_ranks)
    if old.shows_async != new.shows_async:
        old, new = remove_async(old), remove_async(new)
    if old.shows_overlap != new.shows_overlap:
        old, new = remove_overlap(old), remove_overlap(new)
    if old.sizes_activations != new.sizes_activations:
        old, new = remove_activation_sizes(old), remove_activation_sizes(new)
    return _clear_backwards_that_include_last(old), _clear_backwards_that_include_last(new)


def replace_fields(calls: Iterable[Calls], **changes: Any) -> tuple[Calls, ...]:
    """Change fields of all calls, and merge calls that become equal."""
    counts: Counter[Calls] = Counter()
    for call in calls:
        counts[replace(call, count=0, **changes)] += call.count
    return _make_counted_calls(counts)


def _make_counted_calls(counts: Counter[Calls]) -> tuple[Calls, ...]:
    return tuple(sorted(replace(call, count=count) for call, count in counts.items()))


def sort_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Sort rows by subject, phase, owner, kind, axis and ranks."""
    return tuple(sorted(rows, key=_row_sort_key))


def subject_and_phase_sort_key(row: Row | RowKey) -> tuple[int, int]:
    """Return a key that sorts rows by subject, then by phase."""
    return _SUBJECT_ORDER[row.subject], _PHASE_ORDER[row.phase]


def _row_sort_key(row: Row) -> tuple[object, ...]:
    owner = (row.owner is None, natural_key(row.owner or ""))
    return (*subject_and_phase_sort_key(row), owner, _kind_sort_key(row.what, row.axis), row.ranks)


def _kind_sort_key(kind: str, axis: str) -> tuple[int, str, str]:
    return _KIND_ORDER.get(kind, len(_KIND_ORDER)), kind, axis
