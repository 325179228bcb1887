"""Counts and bytes of communication: what is compared with a snapshot.

`fold` makes the profile of one rank's recording, `merge` that of all ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import Field, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

from pytest_fsdp_comm.comm.events import COLLECTIVE_KINDS, MeshAxis, Phase
from pytest_fsdp_comm.text.fqn import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_fsdp_comm.comm.events import Collective, Recording

_PHASE_ORDER: Final = {phase: place for place, phase in enumerate(Phase)}
_KIND_ORDER: Final = {kind: place for place, kind in enumerate(COLLECTIVE_KINDS)}

RowKey: TypeAlias = tuple[Phase, str | None, tuple[str, ...]]
"""Phase, owner and `Row.what`."""


class Row(Protocol):
    """What rows of all kinds have in common: how often some ranks did something."""

    # What `dataclasses.replace` asks of a value.
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def phase(self) -> Phase:
        """The part of the step."""

    @property
    def owner(self) -> str | None:
        """FQN of the module that it is about; None if it is about no module."""

    @property
    def what(self) -> tuple[str, ...]:
        """What distinguishes rows of one phase and owner."""

    @property
    def key(self) -> RowKey:
        """What distinguishes rows, except those of ranks that differ."""

    @property
    def count(self) -> int:
        """How often, on one rank."""

    @property
    def nbytes(self) -> int:
        """Bytes on one rank; 0 where only counts are compared."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks for which this holds, ascending; empty for all ranks."""


_Row = TypeVar("_Row", bound=Row)


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
    def what(self) -> tuple[str, str]:
        """Kind and axis."""
        return (self.kind, self.axis)

    @property
    def key(self) -> RowKey:
        """See `Row.key`."""
        return (self.phase, self.owner, self.what)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardRow:
    """How often one FSDP unit gathered or freed its parameters in one phase."""

    phase: Phase
    module: str | None
    """As `events.Reshard.module`."""
    action: str
    """``unshard`` or ``reshard``."""
    count: int
    ranks: tuple[int, ...] = ()
    """The ranks for which this holds, ascending; empty for all ranks."""

    @property
    def owner(self) -> str | None:
        """The module, as other rows call it."""
        return self.module

    @property
    def what(self) -> tuple[str]:
        """The action."""
        return (self.action,)

    @property
    def key(self) -> RowKey:
        """See `Row.key`."""
        return (self.phase, self.module, self.what)

    @property
    def nbytes(self) -> int:
        """None are compared: the collective that an unshard issues has them."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionRow:
    """How often DTensors of one module changed between two placements in one phase."""

    phase: Phase
    owner: str | None
    """FQN of the module; None if they belong to none."""
    change: str
    """``(Shard(dim=0))->(Replicate())``, one placement per mesh axis, without spaces."""
    count: int
    ranks: tuple[int, ...] = ()
    """The ranks for which this holds, ascending; empty for all ranks."""

    @property
    def what(self) -> tuple[str]:
        """The change."""
        return (self.change,)

    @property
    def key(self) -> RowKey:
        """See `Row.key`."""
        return (self.phase, self.owner, self.what)

    @property
    def nbytes(self) -> int:
        """None are compared: the collectives that it issues have them."""
        return 0


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
        """Whether no collective was recorded on any rank."""
        return not self.rows

    def totals(self) -> tuple[CommRow, ...]:
        """Counts and bytes of each kind and axis over all phases and owners.

        Returns:
            Rows without owner, in the order of kinds. Where ranks differ in a row, its lowest rank
            counts.
        """
        counts: Counter[tuple[str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        seen: set[RowKey] = set()
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
        return sort_rows(rows)

    @property
    def named_ranks(self) -> frozenset[int]:
        """The ranks that some row names, since others do not share it; empty if none differ."""
        sections = (self.rows, self.reshards, self.redistributions)
        return frozenset(rank for rows in sections for row in rows for rank in row.ranks)


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
    events: defaultdict[tuple[Phase, str | None, str, str], list[Collective]] = defaultdict(list)
    for event in recording.collectives:
        events[event.phase, event.owner, event.kind, event.axis].append(event)
    for (phase, owner, kind, axis), alike in events.items():
        sites = Counter((event.issued_in, event.call_site, event.dtype) for event in alike)
        yield CommRow(
            phase=phase,
            owner=owner,
            kind=kind,
            axis=axis,
            count=len(alike),
            nbytes=sum(event.nbytes for event in alike),
            sites=tuple(
                Site(issued_in=issued_in, call_site=call_site, dtype=dtype, count=count)
                for (issued_in, call_site, dtype), count in sites.most_common()
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
        rows=_merge_rows(ranks, [profile.rows for profile in profiles]),
        reshards=_merge_rows(ranks, [profile.reshards for profile in profiles]),
        redistributions=_merge_rows(ranks, [profile.redistributions for profile in profiles]),
        recorded_ranks=ranks,
        notes=tuple(dict.fromkeys(note for profile in profiles for note in profile.notes)),
    )


def _merge_rows(ranks: Sequence[int], rows_of: Sequence[Sequence[_Row]]) -> tuple[_Row, ...]:
    """Makes one of equal rows.

    Args:
        ranks: Ascending.
        rows_of: The rows of each of them.
    """
    groups: dict[tuple[RowKey, int, int], tuple[_Row, list[int]]] = {}
    for rank, rows in zip(ranks, rows_of, strict=True):
        for row in rows:
            groups.setdefault((row.key, row.count, row.nbytes), (row, []))[1].append(rank)
    return sort_rows(
        replace(row, ranks=() if len(having) == len(ranks) else tuple(having))
        for row, having in groups.values()
    )


def restrict(profile: CommProfile, ranks: Sequence[int]) -> CommProfile:
    """A profile as if only some of its ranks had been recorded.

    Args:
        profile: Of all ranks, e.g. read from a snapshot.
        ranks: The ranks to keep, e.g. those that the fake backend ran.
    """
    rows = _restrict_rows(profile.rows, ranks)
    used = {row.axis for row in rows}
    return replace(
        profile,
        mesh_axes=tuple(axis for axis in profile.mesh_axes if axis.name in used),
        rows=rows,
        reshards=_restrict_rows(profile.reshards, ranks),
        redistributions=_restrict_rows(profile.redistributions, ranks),
    )


def _restrict_rows(rows: Iterable[_Row], ranks: Sequence[int]) -> tuple[_Row, ...]:
    found = []
    for row in rows:
        having = tuple(rank for rank in ranks if not row.ranks or rank in row.ranks)
        if having:
            found.append(replace(row, ranks=() if len(having) == len(ranks) else having))
    return sort_rows(found)


def sort_rows(rows: Iterable[_Row]) -> tuple[_Row, ...]:
    """Puts rows of one kind into the order of phase, owner and what they count."""
    return tuple(sorted(rows, key=_order))


def _order(row: Row) -> tuple[object, ...]:
    where = (row.owner is None, natural_key(row.owner or ""))
    kind = _KIND_ORDER.get(row.what[0], len(_KIND_ORDER))
    return (_PHASE_ORDER[row.phase], where, kind, row.what, row.ranks)
