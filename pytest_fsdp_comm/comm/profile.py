"""Counts and bytes of communication: what is compared with a snapshot.

`fold` makes the profile of one rank's recording, `merge` that of all ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.comm.events import COLLECTIVE_KINDS, MeshAxis, Phase
from pytest_fsdp_comm.text.fqn import natural_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pytest_fsdp_comm.comm.events import Recording

_PHASE_ORDER: Final = {phase: place for place, phase in enumerate(Phase)}
_KIND_ORDER: Final = {kind: place for place, kind in enumerate(COLLECTIVE_KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where in the code a row's collectives were issued. Reported, never compared or stored."""

    issued_in: str | None
    """FQN of the module that was running; None outside every module."""
    call_site: str
    """``path:line`` of the innermost user code; empty if unknown."""
    dtype: str
    """Element type of the tensors; empty for a barrier."""
    count: int
    """How many of the row's collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommRow:
    """The collectives of one kind that serve one module in one phase over one mesh axis."""

    phase: Phase
    owner: str | None
    """FQN of the owning module; None if they serve no module."""
    kind: str
    """As `events.Collective.kind`."""
    axis: str
    """Name of the mesh axis."""
    count: int
    """How many a rank issued."""
    nbytes: int
    """Sum of their message sizes on one rank, in bytes."""
    ranks: tuple[int, ...] = ()
    """The ranks for which this holds, ascending; empty for all ranks."""
    sites: tuple[Site, ...] = field(default=(), compare=False)
    """Of the lowest of these ranks; empty in a profile that was read from a snapshot."""

    @property
    def key(self) -> tuple[Phase, str | None, str, str]:
        """What tells rows apart."""
        return (self.phase, self.owner, self.kind, self.axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardRow:
    """How often one FSDP unit gathered or freed its parameters in one phase."""

    phase: Phase
    module: str
    """FQN of the unit's module."""
    action: str
    """``unshard`` or ``reshard``."""
    count: int
    ranks: tuple[int, ...] = ()
    """The ranks for which this holds, ascending; empty for all ranks."""

    @property
    def key(self) -> tuple[Phase, str, str]:
        """What tells rows apart."""
        return (self.phase, self.module, self.action)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionRow:
    """How often DTensors of one module changed between two placements in one phase."""

    phase: Phase
    owner: str | None
    """FQN of the module; None if they belong to none."""
    change: str
    """``(Shard(dim=0))->(Replicate())``, one placement a mesh axis, without spaces."""
    count: int
    ranks: tuple[int, ...] = ()
    """The ranks for which this holds, ascending; empty for all ranks."""

    @property
    def key(self) -> tuple[Phase, str | None, str]:
        """What tells rows apart."""
        return (self.phase, self.owner, self.change)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommProfile:
    """All that is compared of the communication of one test, and what is shown beside it."""

    world_size: int
    """Ranks of the default group."""
    mesh_axes: tuple[MeshAxis, ...]
    """The axes over which something was sent, sorted by name."""
    rows: tuple[CommRow, ...]
    """In order of phase, owner and kind."""
    reshards: tuple[ReshardRow, ...] = ()
    redistributions: tuple[RedistributionRow, ...] = ()
    recorded_ranks: tuple[int, ...] = field(default=(), compare=False)
    """The ranks that were recorded, ascending; empty in a profile that was read from a snapshot."""
    backend: str = field(default="", compare=False)
    """E.g. ``gloo``."""
    torch_version: str = field(default="", compare=False)
    """As ``torch.__version__``."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """As `events.Recording.notes`."""

    @property
    def is_empty(self) -> bool:
        """Whether not one collective was recorded on any rank."""
        return not self.rows

    def totals(self) -> tuple[CommRow, ...]:
        """Counts and bytes of each kind and axis over all phases and owners.

        Returns:
            Rows without owner, in the order of kinds; of the lowest rank that has the row, where
            ranks differ.
        """
        counts: Counter[tuple[str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        seen: set[Any] = set()
        for row in self.rows:
            if row.key not in seen:
                seen.add(row.key)
                counts[row.kind, row.axis] += row.count
                nbytes[row.kind, row.axis] += row.nbytes
        rows = (
            CommRow(
                phase=Phase.OUTSIDE,
                owner=None,
                kind=kind,
                axis=axis,
                count=count,
                nbytes=nbytes[kind, axis],
            )
            for (kind, axis), count in counts.items()
        )
        return tuple(sorted(rows, key=lambda row: (_kind_key(row.kind), row.axis)))


def fold(recording: Recording) -> CommProfile:
    """Counts one rank's recording."""
    return CommProfile(
        world_size=recording.world_size,
        mesh_axes=recording.mesh_axes,
        rows=sort_rows(_fold_collectives(recording)),
        reshards=sort_rows(_fold_reshards(recording)),
        redistributions=sort_rows(_fold_redistributions(recording)),
        recorded_ranks=(recording.rank,),
        backend=recording.backend,
        torch_version=recording.torch_version,
        notes=recording.notes,
    )


def _fold_collectives(recording: Recording) -> Iterable[CommRow]:
    counts: Counter[Any] = Counter()
    nbytes: Counter[Any] = Counter()
    sites: defaultdict[Any, Counter[tuple[str | None, str, str]]] = defaultdict(Counter)
    for event in recording.collectives:
        key = (event.phase, event.owner, event.kind, event.axis)
        counts[key] += 1
        nbytes[key] += event.nbytes
        sites[key][event.issued_in, event.call_site, event.dtype] += 1
    for key, count in counts.items():
        phase, owner, kind, axis = key
        yield CommRow(
            phase=phase,
            owner=owner,
            kind=kind,
            axis=axis,
            count=count,
            nbytes=nbytes[key],
            sites=tuple(
                Site(issued_in=issued_in, call_site=call_site, dtype=dtype, count=times)
                for (issued_in, call_site, dtype), times in sites[key].most_common()
            ),
        )


def _fold_reshards(recording: Recording) -> Iterable[ReshardRow]:
    counts = Counter((event.phase, event.module, event.action) for event in recording.reshards)
    for (phase, module, action), count in counts.items():
        yield ReshardRow(phase=phase, module=module, action=action, count=count)


def _fold_redistributions(recording: Recording) -> Iterable[RedistributionRow]:
    def written(placements: Sequence[str]) -> str:
        return f"({','.join(placement.replace(' ', '') for placement in placements)})"

    counts = Counter(
        (
            event.phase,
            event.owner,
            f"{written(event.source_placements)}->{written(event.target_placements)}",
        )
        for event in recording.redistributions
    )
    for (phase, owner, change), count in counts.items():
        yield RedistributionRow(phase=phase, owner=owner, change=change, count=count)


def merge(profiles: Sequence[CommProfile]) -> CommProfile:
    """Merges the profiles of the recorded ranks; equal rows become one.

    Args:
        profiles: One for each rank, in rank order, each of one rank.

    Returns:
        The profile of all of them. A row that not every rank has says which have it.
    """
    ranks = tuple(profile.recorded_ranks[0] for profile in profiles)
    first = profiles[0]
    axes = {axis.name: axis for profile in profiles for axis in profile.mesh_axes}
    return replace(
        first,
        mesh_axes=tuple(axes[name] for name in sorted(axes)),
        rows=_merge_rows(
            {rank: profile.rows for rank, profile in zip(ranks, profiles, strict=True)},
            lambda row: (row.key, row.count, row.nbytes),
        ),
        reshards=_merge_rows(
            {rank: profile.reshards for rank, profile in zip(ranks, profiles, strict=True)},
            lambda row: (row.key, row.count),
        ),
        redistributions=_merge_rows(
            {rank: profile.redistributions for rank, profile in zip(ranks, profiles, strict=True)},
            lambda row: (row.key, row.count),
        ),
        recorded_ranks=ranks,
        notes=tuple(dict.fromkeys(note for profile in profiles for note in profile.notes)),
    )


def _merge_rows(
    by_rank: Mapping[int, Sequence[Any]], content: Callable[[Any], Any]
) -> tuple[Any, ...]:
    groups: dict[Any, tuple[Any, list[int]]] = {}
    for rank, rows in by_rank.items():
        for row in rows:
            groups.setdefault(content(row), (row, []))[1].append(rank)
    everyone = len(by_rank)
    return sort_rows(
        replace(row, ranks=() if len(ranks) == everyone else tuple(ranks))
        for row, ranks in groups.values()
    )


def restrict(profile: CommProfile, ranks: Sequence[int]) -> CommProfile:
    """The part of a profile that some ranks have, as if only they had been recorded.

    Args:
        profile: Of all ranks, e.g. read from a snapshot.
        ranks: The ranks to keep, e.g. those that the fake backend ran.
    """

    def kept(rows: Sequence[Any]) -> tuple[Any, ...]:
        found = []
        for row in rows:
            having = tuple(rank for rank in ranks if not row.ranks or rank in row.ranks)
            if having:
                found.append(replace(row, ranks=() if len(having) == len(ranks) else having))
        return sort_rows(found)

    rows = kept(profile.rows)
    used = {row.axis for row in rows}
    return replace(
        profile,
        mesh_axes=tuple(axis for axis in profile.mesh_axes if axis.name in used),
        rows=rows,
        reshards=kept(profile.reshards),
        redistributions=kept(profile.redistributions),
    )


def sort_rows(rows: Iterable[Any]) -> tuple[Any, ...]:
    """Rows of one sort in order of phase, owner, kind and axis."""
    return tuple(sorted(rows, key=_row_key))


def _row_key(row: Any) -> tuple[Any, ...]:
    phase, name, *rest = row.key
    where = (name is None, natural_key(name or ""))
    if isinstance(row, CommRow):
        return (_PHASE_ORDER[phase], where, _kind_key(row.kind), row.axis, row.ranks)
    return (_PHASE_ORDER[phase], where, tuple(rest), row.ranks)


def _kind_key(kind: str) -> tuple[int, str]:
    return (_KIND_ORDER.get(kind, len(_KIND_ORDER)), kind)
