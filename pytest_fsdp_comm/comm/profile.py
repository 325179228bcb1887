"""Counts and bytes of communication: what is compared with a snapshot."""

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

Subject: TypeAlias = Literal["collective", "reshard", "redistribution"]
"""What a row counts; what unshards and redistributions send are collectives of their own."""
SUBJECTS: Final[tuple[Subject, ...]] = get_args(Subject)

_PHASE_ORDER: Final = {phase: place for place, phase in enumerate(Phase)}
_SUBJECT_ORDER: Final = {subject: place for place, subject in enumerate(SUBJECTS)}
_KIND_ORDER: Final = {kind: place for place, kind in enumerate(COLLECTIVE_KINDS)}

# That of the embedding, in `_MaskPartial` (torch 2.6 to 2.13): its width is no change of placement.
_SHAPE: Final = re.compile(r"(?:, )?offset_shape=torch\.Size\(\[[^\]]*\]\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where in the code a row's collectives were issued. Reported, never compared or stored."""

    issued_in: str | None
    """FQN of the module that was running; None outside every module."""
    call_site: str
    """``path:line`` of the innermost user code; empty if unknown."""
    calls: Calls
    """What each of them is, and how many of the row's collectives."""
    is_of_dtensor: bool = False
    """Whether a redistribution of a DTensor issued them."""
    is_of_backward: bool = False
    """Whether the line is that with ``.backward()``, rather than that of a hook."""


class RowKey(NamedTuple):
    """What distinguishes the rows of one module, except those of ranks that differ."""

    subject: Subject
    phase: Phase
    what: str
    """As `Row.what`."""
    axis: str
    """As `Row.axis`."""

    def __str__(self) -> str:
        """What is counted, e.g. ``all_gather[dp]``, ``unshard``, ``(Shard(0))->(Replicate())``."""
        return f"{self.what}[{self.axis}]" if self.subject == "collective" else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How often some ranks did one thing for one module in one phase.

    It is counted from a recording, written, read, merged, compared, explained and drawn as it is.
    """

    subject: Subject = "collective"
    phase: Phase
    owner: str | None
    """FQN of the module: that of a unit for its reshards; None if it is about no module."""
    what: str
    """As `events.Collective.kind` or `events.Reshard.action`; or the placements of a
    redistribution, one per mesh axis, without spaces: ``(Shard(dim=0))->(Replicate())``."""
    axis: str = ""
    """Name of the mesh axis of a collective; empty for other subjects."""
    calls: tuple[Calls, ...]
    """Sorted, each kind of call once. Those that are no collectives have a count alone."""
    ranks: tuple[int, ...] = ()
    """The ranks for which this holds, ascending; empty for all ranks."""
    sites: tuple[Site, ...] = field(default=(), compare=False)
    """Of the lowest of these ranks; empty where nothing is sent, and in a profile that was read
    from a snapshot."""

    @property
    def key(self) -> RowKey:
        return RowKey(self.subject, self.phase, self.what, self.axis)

    @property
    def count(self) -> int:
        return sum(calls.count for calls in self.calls)

    @property
    def nbytes(self) -> int:
        """Sum of the message sizes on one rank, in bytes, as far as they are known."""
        return sum(calls.count * calls.nbytes for calls in self.calls)

    @property
    def unsized(self) -> int:
        """How many of them, on one rank, have a size that is not known."""
        return sum(calls.count for calls in self.calls if calls.lacks_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredPeak:
    """Most bytes of parameters that were gathered at once."""

    nbytes: int
    """On one rank, from 1."""
    ranks: tuple[int, ...] = ()
    """The ranks for which this holds, ascending; empty for all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """All collectives of one kind over one axis."""

    kind: str
    axis: str
    count: int
    nbytes: int
    """Of those whose size is known."""
    unsized: int
    """How many others there are."""
    num_ranks: int
    """Of how many ranks this is the sum: 1 if all have the same rows, else all recorded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommProfile:
    """All that is compared of the communication of one test, and what is shown beside it."""

    world_size: int
    """Ranks of the default group."""
    mesh_axes: tuple[MeshAxis, ...]
    """The axes over which something was sent, sorted by name."""
    rows: tuple[Row, ...]
    """In the order of `sort_rows`."""
    peaks: tuple[GatheredPeak, ...] = ()
    """In the order of their lowest ranks; empty if nothing was gathered."""
    recorded_ranks: tuple[int, ...] = ()
    """The ranks that were recorded, ascending; empty for all ranks."""
    shows_async: bool = True
    """As `events.Recording.shows_async`; otherwise no `Calls` are compared for it."""
    sizes_activations: bool = True
    """Whether sizes of activations are compared; otherwise `Calls` that carry them have none."""
    answers: tuple[Answer, ...] = ()
    """As `events.Recording.answers`, those of all ranks."""
    backend: str = field(default="", compare=False)
    """E.g. ``gloo``."""
    torch_version: str = field(default="", compare=False)
    """As ``torch.__version__``."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """As `events.Recording.notes`."""
    gaps: tuple[Gap, ...] = field(default=(), compare=False)
    """As `events.Recording.gaps`, those of all ranks; empty in a profile that was read from a
    snapshot."""

    @property
    def collectives(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.subject == "collective")

    @property
    def num_ranks(self) -> int:
        return len(self.recorded_ranks) or self.world_size

    def totals(self) -> tuple[Total, ...]:
        """Counts and bytes of each kind and axis over all phases and owners, by kind."""
        is_common = not any(row.ranks for row in self.collectives)
        num_ranks = 1 if is_common else self.num_ranks
        sums: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for row in self.collectives:
            times = 1 if is_common else len(row.ranks) or num_ranks
            for name in ("count", "nbytes", "unsized"):
                sums[row.what, row.axis][name] += times * getattr(row, name)
        return tuple(
            Total(kind=kind, axis=axis, num_ranks=num_ranks, **sums[kind, axis])
            for kind, axis in sorted(sums, key=lambda what: _kind_order(*what))
        )


_OfRanks = TypeVar("_OfRanks", Row, GatheredPeak, Gap)
"""What holds for some of the recorded ranks, or for all where it has none."""


def fold(recording: Recording) -> CommProfile:
    """Count one rank's recording."""
    peak = recording.peak_gathered_nbytes
    return CommProfile(
        world_size=recording.world_size,
        mesh_axes=recording.mesh_axes,
        rows=sort_rows(chain(_fold_collectives(recording), _fold_others(recording))),
        peaks=(GatheredPeak(nbytes=peak),) if peak else (),
        recorded_ranks=() if recording.world_size == 1 else (recording.rank,),
        shows_async=recording.shows_async,
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
    # Hooks send less than FSDP, DDP and DTensors, whose calls in backward have the line with
    # .backward().
    rows = Counter(
        line
        for (phase, *_), alike in events.items()
        if phase is Phase.BACKWARD
        for line in {event.call_site for event in alike}
    )
    most = max(rows.values(), default=0)
    backward = {line for line, count in rows.items() if count == most}
    for (phase, owner, kind, axis), alike in events.items():
        reduced_in: defaultdict[int | None, set[int | None]] = defaultdict(set)
        for event in alike:
            reduced_in[event.num_backwards].add(event.backward)
        words = {total: _backwards(total, places) for total, places in reduced_in.items()}
        calls = [Calls.of(event, words[event.num_backwards]) for event in alike]
        sites = Counter(
            (event.issued_in, event.call_site, one, event.source is Source.DTENSOR)
            for event, one in zip(alike, calls, strict=True)
        )
        yield Row(
            phase=phase,
            owner=owner,
            what=kind,
            axis=axis,
            calls=tuple(sorted(replace(one, count=count) for one, count in Counter(calls).items())),
            sites=tuple(
                Site(
                    issued_in=issued_in,
                    call_site=call_site,
                    calls=replace(one, count=count),
                    is_of_dtensor=is_of_dtensor,
                    is_of_backward=phase is Phase.BACKWARD and call_site in backward,
                )
                for (issued_in, call_site, one, is_of_dtensor), count in sites.most_common()
            ),
        )


def _backwards(total: int | None, places: Collection[int | None]) -> str:
    """Name the backward passes that reduce, of `total`; empty if all of them do."""
    if total is None or len(places) == total:
        return ""
    for name, place in (("last", total), ("first", 1)):
        if places == {place}:
            return f"the {name} of {total} backwards"
    some = f"{len(places)} of {total} backwards"
    return some if total in places else f"{some}{NOT_LAST}"


def _fold_others(recording: Recording) -> Iterable[Row]:
    def written(placements: Sequence[str]) -> str:
        return f"({','.join(_SHAPE.sub('', one).replace(' ', '') for one in placements)})"

    counts: Counter[tuple[Subject, Phase, str | None, str]] = Counter()
    for reshard in recording.reshards:
        counts["reshard", reshard.phase, reshard.module, reshard.action] += 1
    for move in recording.redistributions:
        change = f"{written(move.source_placements)}->{written(move.target_placements)}"
        counts["redistribution", move.phase, move.owner, change] += 1
    for (subject, phase, owner, what), count in counts.items():
        calls = (Calls(count=count),)
        yield Row(subject=subject, phase=phase, owner=owner, what=what, calls=calls)


def merge(profiles: Sequence[CommProfile], *, ranks: Sequence[int] = ()) -> CommProfile:
    """Merge the profiles of ranks in order; ascending `ranks` name them. See Note [Merging]."""
    # One process alone is all ranks.
    ranks = ranks or [(profile.recorded_ranks or (0,))[0] for profile in profiles]
    groups: dict[int, tuple[CommProfile, list[int]]] = {}
    for rank, profile in zip(ranks, profiles, strict=True):
        groups.setdefault(id(profile), (profile, []))[1].append(rank)
    # One of each group, in the order of the groups' lowest ranks.
    alike = [profile for profile, _ in groups.values()]

    @cache
    def ranks_at(places: frozenset[int]) -> tuple[int, ...]:
        held = [having for _, having in groups.values()]
        listed = sorted(chain.from_iterable(held[place] for place in places))
        return ranks_or_empty_if_all(listed, len(ranks))

    def merged(
        values_of: Iterable[Sequence[_OfRanks]], fields: Callable[[_OfRanks], object]
    ) -> Iterator[_OfRanks]:
        """Make one of equal values, in the order of their lowest ranks."""
        having: dict[object, tuple[_OfRanks, list[int]]] = {}
        for place, values in enumerate(values_of):
            for value in values:
                having.setdefault(fields(value), (value, []))[1].append(place)
        for value, places in having.values():
            yield replace(value, ranks=ranks_at(frozenset(places)))

    # By some fields, where the hash of all takes longer.
    of_row = attrgetter("subject", "phase", "owner", "what", "axis", "calls")
    return replace(
        profiles[0],
        mesh_axes=merge_axes(axis for profile in alike for axis in profile.mesh_axes),
        rows=sort_rows(merged((profile.rows for profile in alike), of_row)),
        peaks=tuple(merged((profile.peaks for profile in alike), attrgetter("nbytes"))),
        recorded_ranks=ranks_or_empty_if_all(ranks, profiles[0].world_size),
        notes=tuple(dict.fromkeys(note for profile in alike for note in profile.notes)),
        gaps=tuple(merged((profile.gaps for profile in alike), attrgetter("kind", "text"))),
        answers=tuple(sorted({one for profile in alike for one in profile.answers})),
    )


# Note [Merging]: of thousands of ranks, most record the same, and the reader of their records hands
# out one object for equal ones. So profiles are grouped by identity, which costs nothing, where
# comparing them takes longer than merging them, and many ranks cost as few as there are groups.
# Lists of ranks are made once, and rows hold one object for each.


def restrict(profile: CommProfile, ranks: Sequence[int]) -> CommProfile:
    """A profile as if only some of its ranks, ascending, had been recorded."""
    kept = frozenset(ranks)
    # Many rows share one list of ranks.
    lists: dict[tuple[int, ...], tuple[int, ...]] = {(): tuple(ranks)}

    def of_kept(held: Iterable[_OfRanks]) -> Iterator[tuple[_OfRanks, tuple[int, ...]]]:
        for one in held:
            if one.ranks not in lists:
                lists[one.ranks] = tuple(rank for rank in one.ranks if rank in kept)
            having = lists[one.ranks]
            if having:
                yield replace(one, ranks=ranks_or_empty_if_all(having, len(ranks))), having

    rows = sort_rows(row for row, _ in of_kept(profile.rows))
    used = {row.axis for row in rows}
    peaks = sorted(of_kept(profile.peaks), key=lambda held: held[1])
    return replace(
        profile,
        mesh_axes=tuple(
            replace(axis, groups=tuple(filter(kept.intersection, axis.groups)))
            for axis in profile.mesh_axes
            if axis.name in used and (not axis.groups or any(map(kept.intersection, axis.groups)))
        ),
        rows=rows,
        peaks=tuple(peak for peak, _ in peaks),
        recorded_ranks=ranks_or_empty_if_all(ranks, profile.world_size),
    )


def without_async(profile: CommProfile) -> CommProfile:
    """A profile as if torch had not said which calls are asynchronous."""
    rows = tuple(replace(row, calls=alike_but(row.calls, is_async=False)) for row in profile.rows)
    return replace(profile, rows=rows, shows_async=False)


def without_activation_sizes(profile: CommProfile) -> CommProfile:
    """A profile as if nobody knew how large the activations were."""
    rows = []
    for row in profile.rows:
        sized = {one for one in row.calls if one.role == Role.ACTIVATIONS and not one.is_object}
        calls = {*row.calls} - sized | {*alike_but(sized, nbytes=0, is_unsized=True)}
        rows.append(replace(row, calls=tuple(sorted(calls))))
    return replace(_united(profile, rows), sizes_activations=False)


def _without_backwards(profile: CommProfile) -> CommProfile:
    """A profile as if nobody knew in how many backwards gradients are reduced, up to the last."""

    def changed(row: Row) -> Row:
        calls = (one if one.lacks_last else replace(one, backwards="") for one in row.calls)
        return replace(row, calls=alike_but(calls))

    if not any(one.backwards for row in profile.rows for one in row.calls):
        return profile
    return _united(profile, map(changed, profile.rows))


def _united(profile: CommProfile, rows: Iterable[Row]) -> CommProfile:
    """A profile with other rows, of which those that are alike become one, as by `merge`."""
    alike: dict[tuple[RowKey, str | None, tuple[Calls, ...]], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.key, row.owner, row.calls), []).append(row)
    united = []
    for first, *others in alike.values():
        ranks = sorted(chain(first.ranks, *(row.ranks for row in others)))
        held = ranks_or_empty_if_all(ranks, profile.num_ranks) if others else first.ranks
        united.append(replace(first, ranks=held))
    return replace(profile, rows=sort_rows(united))


# Note [Comparable]: where the snapshot has all ranks, but only some were recorded now (the fake
# backend), only these are compared. Where torch said on one side only which calls are asynchronous,
# none are compared for that. Where sizes of activations are compared on one side only, that is a
# change, and no size of any is another. In how many backwards gradients are reduced is shown, and
# follows from counts and from the number of micro-batches; only whether the last one reduces them
# is compared.


def comparable(old: CommProfile, new: CommProfile) -> tuple[CommProfile, CommProfile]:
    """Reduce a snapshot and a recording to what both have; see Note [Comparable]."""
    if new.recorded_ranks and not old.recorded_ranks:
        old = restrict(old, new.recorded_ranks)
    if old.shows_async != new.shows_async:
        old, new = without_async(old), without_async(new)
    if old.sizes_activations != new.sizes_activations:
        old, new = without_activation_sizes(old), without_activation_sizes(new)
    return _without_backwards(old), _without_backwards(new)


def alike_but(calls: Iterable[Calls], **changes: Any) -> tuple[Calls, ...]:
    """Calls with something changed; those that it makes alike become one."""
    counts: Counter[Calls] = Counter()
    for one in calls:
        counts[replace(one, count=0, **changes)] += one.count
    return tuple(sorted(replace(one, count=count) for one, count in counts.items()))


def sort_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Sort rows by subject, phase, owner, what they count, and ranks."""
    return tuple(sorted(rows, key=_order))


def step_order(row: Row | RowKey) -> tuple[int, int]:
    """Sort by subject, and by the phases of a step."""
    return _SUBJECT_ORDER[row.subject], _PHASE_ORDER[row.phase]


def _order(row: Row) -> tuple[object, ...]:
    where = (row.owner is None, natural_key(row.owner or ""))
    return (*step_order(row), where, _kind_order(row.what, row.axis), row.ranks)


def _kind_order(kind: str, axis: str) -> tuple[int, str, str]:
    return _KIND_ORDER.get(kind, len(_KIND_ORDER)), kind, axis
