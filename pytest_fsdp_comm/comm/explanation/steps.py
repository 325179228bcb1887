"""Define the steps that explain a diff; each step is one change that may affect many rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Final

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.states import (
    NOTHING,
    Between,
    Content,
    Owner,
    Pool,
    Rows,
    State,
    is_gather,
    template,
)
from pytest_fsdp_comm.comm.profile import Row, RowKey

# A step describes an effect, not its cause. It is reported only if it is exact: after all steps,
# the rows that it changes or `claims` equal the rows of the new profile. A
# `GlobalStep` (in `names` and `amounts`) computes new rows from any state. A `Replaced` copies its
# rows from the new profile; see Note [Evidence of a proposal] in `units`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Changes to FSDP units, read from a test's sharding trees. Units are named like owners."""

    units: frozenset[str]
    """Units that exist in both trees."""
    frozen: frozenset[str] = frozenset()
    """Units in which parameters were newly frozen, and none are trainable now."""
    partly_frozen: frozenset[str] = frozenset()
    """Units in which some parameters were newly frozen, and others are trainable now."""
    thawed: frozenset[str] = frozenset()
    """Units in which parameters that used to be frozen are trainable now."""
    trainable: frozenset[str] = frozenset()
    """Modules, units or not, that have trainable parameters now."""
    policies: Mapping[str, str]
    """The text of `tree.profile.policy_change` for each unit that reshards differently."""
    new_roots: frozenset[str] = frozenset()
    lost_root: str = ""
    """The text of `tree.profile.lost_root`: why units became roots."""
    prefetching: frozenset[str] = frozenset()
    """Names of the prefetch fields of `tree.profile.UnitFacts` that changed for some unit."""
    is_other_dtype: bool = False
    is_other_policy: bool = False
    """Whether the mixed precision of a unit changed."""
    is_other_shape: bool = False
    """Whether a parameter was added or removed, or changed its shape."""
    is_reduce_dtype_unset: bool = False
    """Whether all units with a `param_dtype` use FSDP2 and set no `reduce_dtype`, on both sides."""


WRITES: Final[Mapping[str, str]] = {
    "counts": "counts",
    # The bytes of a call depend on its dtype, so a step that writes one also writes the other.
    **dict.fromkeys(("sizes", "dtype", "unit sizes", "part reduced", "gradient sizes"), "sizes"),
}
"""The part of a row that these kinds of steps write; all other kinds write entire rows."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change from the old profile to the new one."""

    kind: str
    order: ClassVar[int] = 5
    """Steps are applied in ascending order: renames first, changes to individual modules last."""

    @property
    def description_cost(self) -> float:
        """Cost of reporting the step; for comparison, a leftover row of a collective costs 4."""
        return 2.0

    def apply(self, state: State, pool: Pool) -> State:
        raise NotImplementedError

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        """Whether the step's sentence covers a call; after all steps, that call must not differ."""
        return False

    def includes(self, owner: Owner) -> bool:
        return True


class GlobalStep(Step):
    """A step that changes the rows of all modules in the same way."""

    def apply(self, state: State, pool: Pool) -> State:
        changed: dict[Content, Content] = {}
        after = State()
        for owner, content in state.items():
            if not self.includes(owner):
                after[owner] = content
                continue
            if content not in changed:
                rows = chain.from_iterable(content.rows.values())
                changed[content] = pool.content([self.change(row, content) for row in rows])
            after[owner] = changed[content]
        return after

    def change(self, row: Row, content: Content) -> Row:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Replaced(Step):
    """A step that copies the rows of some modules from the new profile."""

    is_added: bool = True
    """False for the reverse of `kind`, such as merging instead of splitting off."""
    rows: Mapping[Owner, Mapping[RowKey, Rows]]
    """Rows of the new profile, keyed by module and row key; an empty tuple removes the rows."""
    was: Mapping[Owner, Mapping[RowKey, Rows]] = field(compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """More values that the sentence and the cause use; the names depend on `kind`."""

    @property
    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.rows)

    def includes(self, owner: Owner) -> bool:
        return owner in self.rows

    @cached_property
    def description_cost(self) -> float:
        kinds = {(template(owner or ""), *rows) for owner, rows in self.rows.items()}
        # The sentences of these two kinds say the least, so make the search prefer all other kinds.
        return 1.5 + 0.5 * len(kinds) + 0.5 * (self.kind in {"regrouped", "unit"})

    def apply(self, state: State, pool: Pool) -> State:
        after = State(state)
        for owner, written in self.rows.items():
            unchanged = (rows for key, rows in state[owner].rows.items() if key not in written)
            content = pool.content(chain.from_iterable((*unchanged, *written.values())))
            if content is not NOTHING:
                after[owner] = content
            else:
                after.pop(owner, None)
        return after

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        # A "phase" step is printed with "forward unchanged", and a "unit" step with the number of
        # gathers of other units. Both would be wrong if these rows still differed after the step.
        is_covered = self.kind == "phase" or (self.kind == "unit" and is_gather(key, call))
        return is_covered and key.phase is Phase.FORWARD


def sent_rows(side: Mapping[Owner, Mapping[RowKey, Rows]]) -> Iterator[Row]:
    """Iterate over the rows of collectives on one side of a step."""
    rows = chain.from_iterable(rows_by_key.values() for rows_by_key in side.values())
    return (row for row in chain.from_iterable(rows) if row.axis)


def replaced(
    between: Between,
    kind: str,
    keys: Mapping[Owner, Iterable[RowKey]],
    *,
    is_added: bool = True,
    **facts: Any,
) -> Iterator[Replaced]:
    """Yield a step that copies the rows at `keys` from the target; nothing if `keys` is empty."""
    # Modules with equal differences share one mapping.
    shared: dict[tuple[object, ...], list[dict[RowKey, Rows]]] = {}
    sides: dict[Owner, list[dict[RowKey, Rows]]] = {}
    for owner, wanted in keys.items():
        old, new = between.state[owner], between.target[owner]
        place = old, new, id(wanted)
        if place not in shared:
            differing = [key for key in dict.fromkeys(wanted) if old.row(key) != new.row(key)]
            shared[place] = [{key: content.row(key) for key in differing} for content in (old, new)]
        sides[owner] = shared[place]
    if sides:
        was, now = ({owner: two[i] for owner, two in sides.items()} for i in (0, 1))
        yield Replaced(kind=kind, is_added=is_added, rows=now, was=was, facts=facts)
