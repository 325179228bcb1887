"""Hold the evidence for sentences and causes: both recordings, and changes in the trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Final, TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.states import (
    NOTHING,
    Content,
    Owner,
    Pool,
    State,
    role_of,
)
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey
from pytest_fsdp_comm.text.words import itemsize

BETWEEN_STAGES: Final = frozenset({"send", "recv"})
SCALAR_NBYTES: Final = 8
"""Size of a float64."""
NORM: Final = "_NormPartial("
"""Start of the placement of an unreduced norm, as DTensor prints it (checked in 2.7 to 2.15)."""
Matches: TypeAlias = Callable[[RowKey, Calls, Owner], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Changes to FSDP units, read from a test's sharding trees. Units are named like owners."""

    units: frozenset[str]
    """Units that exist in both trees."""
    emptied: frozenset[str] = frozenset()
    """Units that have no parameters any more."""
    frozen: frozenset[str] = frozenset()
    """Units in which parameters were newly frozen, and none are trainable now."""
    partly_frozen: frozenset[str] = frozenset()
    """Units in which some parameters were newly frozen, and others are trainable now."""
    thawed: frozenset[str] = frozenset()
    """Units in which parameters that used to be frozen are trainable now."""
    trainable: frozenset[str] = frozenset()
    """Modules, units or not, that have trainable parameters now."""
    old_modules: frozenset[str] = frozenset()
    """Modules that had parameters, or contained a module with parameters."""
    placed_axes: frozenset[str] = frozenset()
    """Axes over which parameters are placed, but not by the units that manage them."""
    split_axes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """For each module, the axes besides those of units over which both trees shard one of its
    parameters alike."""
    resharded: frozenset[str] = frozenset()
    """Modules with a parameter that is sharded otherwise now."""
    unmanaged: frozenset[str] = frozenset()
    """Modules with trainable parameters that no unit manages now."""
    carried_elements: int = 0
    """How many elements of gradients new collectives of user code may carry."""
    policies: Mapping[str, str]
    """The text of `tree.profile.policy_change` for each unit that reshards differently."""
    new_roots: frozenset[str] = frozenset()
    lost_root: str = ""
    """The text of `tree.profile.lost_root`: why units became roots."""
    prefetching: Mapping[str, bool] = field(default_factory=dict)
    """The prefetch fields of `tree.profile.UnitFacts` that changed for some unit, and whether any
    unit had one before."""
    is_other_dtype: bool = False
    is_other_policy: bool = False
    """Whether the mixed precision of a unit changed."""
    is_other_shape: bool = False
    """Whether a parameter was added or removed, or changed its shape."""
    is_reduce_dtype_unset: bool = False
    """Whether all units with a `param_dtype` use FSDP2 and set no `reduce_dtype`, on both sides."""

    def has_units(self, owners: Iterable[Owner]) -> bool:
        """Whether all modules of `owners` are units in both trees."""
        names = {owner for owner in owners if owner is not None}
        return bool(names) and names <= self.units

    def rules_out_other_resharding(self, owners: Iterable[Owner]) -> bool:
        """Whether all modules of `owners` are units with the same policy, and no new roots."""
        names = {*owners}
        return self.has_units(names) and names.isdisjoint({*self.policies, *self.new_roots})


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """Both recordings and the evidence of trees: what sentences and causes are checked against."""

    old: CommProfile
    renamed: CommProfile
    """The old recording under the names of modules and axes that the new one uses."""
    new: CommProfile
    trees: Evidence | None = None
    has_same_backwards: bool = False
    """Whether both recordings reduce gradients in the same of as many backwards; False if every
    backward reduces them, because then nothing shows how many ran."""

    @property
    def sides(self) -> tuple[CommProfile, CommProfile]:
        return self.old, self.new

    @cached_property
    def states(self) -> tuple[State, State]:
        """The rows of `renamed` and `new` by module."""
        pool = Pool()
        return pool.state(self.renamed), pool.state(self.new)

    @property
    def renamed_pairs(self) -> Iterator[tuple[Row, Row]]:
        """Each row of `old`, with the same row of `renamed`."""
        return zip(self.old.rows, self.renamed.rows, strict=True)

    @cached_property
    def old_axes(self) -> dict[str, str]:
        """The old names of axes, keyed by the names in `renamed`."""
        return {renamed.axis: old.axis for old, renamed in self.renamed_pairs}

    def list_old_modules(self, owners: Iterable[Owner]) -> list[Owner]:
        """Return the modules that the old recording has, too; all if it has none of them."""
        known, old = [*owners], self.states[0]
        return [owner for owner in known if owner in old] or known

    def can_still_be_gathered(self, units: Iterable[Owner]) -> bool:
        """Whether units without rows in the new recording may be gathered since before it.

        That needs units that forward leaves gathered. The peak counts them from the start.
        """
        old, new = (max((peak.nbytes for peak in side.peaks), default=0) for side in self.sides)
        return 0 < old <= new and all(self.states[0][unit].stays_unsharded for unit in units)

    @cached_property
    def carried_elements(self) -> Counter[str]:
        """The result of `count_carried_elements`, under the new names of axes."""
        return count_carried_elements(self.renamed, self.new)

    def is_unchanged(self, matches: Matches) -> bool:
        """Whether both recordings have the same matching calls, over groups of the same ranks."""
        old_axes, new_axes = (
            {axis.name: (axis.size, axis.dims) for axis in side.mesh_axes} for side in self.sides
        )
        moved = {name for name in old_axes.keys() & new_axes if old_axes[name] != new_axes[name]}
        for owner, old, new in self._pair_contents_by_owner(with_equal=bool(moved)):
            counts = _count_matching_calls(new, matches, owner)
            is_moved = not moved.isdisjoint(key.axis for key, *_ in counts)
            if is_moved or counts != _count_matching_calls(old, matches, owner):
                return False
        return True

    def ratio(self, matches: Matches, *, is_shared: bool = False) -> Fraction | None:
        """Return the factor by which the counts of all matching rows changed; None if they differ.

        With `is_shared`, ignore new rows, and modules that only one recording has.
        """
        ratios: set[Fraction | None] = set()
        for owner, old, new in self._pair_contents_by_owner(with_equal=True):
            if is_shared and NOTHING in {old, new}:
                continue
            before, after = (Counter[object]() for _ in range(2))
            for counts, content in ((before, old), (after, new)):
                for (key, ranks, _), count in _count_matching_calls(
                    content, matches, owner
                ).items():
                    counts[key, ranks] += count
            ratios |= {Fraction(after[row], before[row]) for row in before}
            ratios |= {None} if after.keys() - before.keys() and not is_shared else set()
        return ratios.pop() if len(ratios) == 1 else None

    def _pair_contents_by_owner(
        self, *, with_equal: bool = False
    ) -> Iterator[tuple[Owner, Content, Content]]:
        old, new = self.states
        for owner in {**old, **new}:
            if with_equal or old[owner] is not new[owner]:
                yield owner, old[owner], new[owner]


def _count_matching_calls(
    content: Content, matches: Matches, owner: Owner
) -> dict[tuple[RowKey, tuple[int, ...], Calls], int]:
    """Return the counts of matching calls, keyed by row, ranks and the call's other fields."""
    return {
        (key, row.ranks, replace(call, count=0)): call.count
        for key, rows in content.rows.items()
        for row in rows
        for call in row.calls
        if matches(key, call, owner)
    }


def count_acts(profile: CommProfile, phase: Phase, act: str) -> Counter[Owner]:
    """Count how often each unit is unsharded, resharded or reduced in a phase."""
    counts = Counter[Owner]()
    for row in profile.rows:
        if (row.phase, row.what) == (phase, act) and role_of((row,)) in {"", Role.GRADIENTS}:
            counts[row.owner] += row.count
    return counts


def count_more_acts(recordings: Recordings, phase: Phase, act: str) -> Counter[Owner]:
    """Count how many more acts of a kind each unit has now."""
    old, new = (count_acts(side, phase, act) for side in recordings.sides)
    return new - old


def list_gathers(profile: CommProfile) -> set[tuple[Owner, str, int, str]]:
    """Return the unit, axis, bytes per call and dtype of each gather of parameters."""
    return {
        (row.owner, row.axis, call.nbytes, call.dtype)
        for row in profile.collectives
        for call in row.calls
        if call.role == Role.PARAMETERS
    }


def list_gathered_axes(profile: CommProfile) -> set[str]:
    """Return the axes over which parameters are gathered."""
    return {axis for _, axis, *_ in list_gathers(profile)}


def count_carried_elements(old: CommProfile, new: CommProfile) -> Counter[str]:
    """Return, by axis, how many elements of gradients the new calls of user code may carry."""
    sent = [Counter[tuple[str, Owner, str]](), Counter[tuple[str, Owner, str]]()]
    for side, elements in zip((old, new), sent, strict=True):
        units = {row.owner for row in side.rows if row.subject == "reshard"}
        for row in side.collectives:
            # Calls of several tensors have no role, and calls between stages carry activations.
            roles = {"": row.what not in BETWEEN_STAGES, Role.GRADIENTS: row.owner not in units}
            carried = [call for call in row.calls if roles.get(call.role)]
            elements[row.axis, row.owner, row.what] += count_elements(carried)
    by_axis = Counter[str]()
    for (axis, *_), more in (sent[1] - sent[0]).items():
        by_axis[axis] += more
    return by_axis


def count_elements(calls: Iterable[Calls]) -> int:
    """Return the number of elements that calls send, which does not depend on their dtype."""
    return sum(call.count * call.nbytes // itemsize(call.dtype) for call in calls)
