"""What an explanation is made of: changes of contents, as data."""

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

# Note [Steps]: a step tells an effect: what is different, not why. It is exact or it is not told:
# what it changed must be right at the end, and so must what it `claims` of all modules. A
# `GlobalStep` and its like, in `names` and `amounts`, can be applied to any state. A `Replaced` has
# its rows from the new profile: see Note [Evidence of a proposal] in `units`. `sentences` puts all
# of them into words, and `causes` says why they may have come about.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What two trees say of the units that both have; names as those of owners."""

    units: frozenset[str]
    frozen: frozenset[str] = frozenset()
    """Those whose trainable parameters are all frozen now."""
    partly_frozen: frozenset[str] = frozenset()
    """Those of which some parameters are frozen now, and others trainable."""
    thawed: frozenset[str] = frozenset()
    """Those of which some parameters are trainable now that were frozen."""
    trainable: frozenset[str] = frozenset()
    """Units of either tree, and modules, that have trainable parameters now."""
    policies: Mapping[str, str]
    """As `tree.profile.policy_change` words it, of those with another policy after forward."""
    new_roots: frozenset[str] = frozenset()
    lost_root: str = ""
    """Why they are roots, as `tree.profile.lost_root` words it."""
    prefetching: frozenset[str] = frozenset()
    """Fields of `tree.profile.UnitFacts` that say what is gathered early, and differ."""
    is_other_dtype: bool = False
    is_other_policy: bool = False
    """Whether units that both have got another mixed precision."""
    is_other_shape: bool = False
    """Whether a parameter has another shape, came or went."""
    is_reduce_dtype_unset: bool = False
    """Whether, on both sides, all units with a `param_dtype` are FSDP2's, and set no
    `reduce_dtype`."""


WRITES: Final[Mapping[str, str]] = {
    "counts": "counts",
    # Bytes follow the type, so one step alone writes either.
    **dict.fromkeys(("sizes", "dtype", "unit sizes", "part reduced", "gradient sizes"), "sizes"),
}
"""What of a row steps write, which two of them must not do; the whole of it for other kinds."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change."""

    kind: str
    order: ClassVar[int] = 5
    """Steps are applied in this order: names first, single modules last."""

    @property
    def description_cost(self) -> float:
        """What telling it costs, in lines: 4 is a line of a collective that is left over."""
        return 2.0

    def apply(self, state: State, pool: Pool) -> State:
        """The state after it."""
        raise NotImplementedError

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        """Whether it speaks about a call, of the old profile after it or of the new one."""
        return False

    def includes(self, owner: Owner) -> bool:
        """Whether it changes anything of a module."""
        return True


class GlobalStep(Step):
    """A step that changes rows alike in all modules."""

    def apply(self, state: State, pool: Pool) -> State:
        made: dict[Content, Content] = {}
        after = State()
        for owner, content in state.items():
            if not self.includes(owner):
                after[owner] = content
                continue
            if content not in made:
                rows = chain.from_iterable(content.rows.values())
                made[content] = pool.content([self.change(row, content) for row in rows])
            after[owner] = made[content]
        return after

    def change(self, row: Row, content: Content) -> Row:
        """A row after the step."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Replaced(Step):
    """Some rows of some modules are others; see Note [Steps]."""

    came: bool = True
    """False where it is what `kind` says the other way round."""
    rows: Mapping[Owner, Mapping[RowKey, Rows]]
    """What the new profile has for each of these rows; empty where it has none."""
    # These tell no two steps apart.
    was: Mapping[Owner, Mapping[RowKey, Rows]] = field(compare=False)
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What else its sentence and its cause need, by names that its proposal gives."""

    @property
    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.rows)

    def includes(self, owner: Owner) -> bool:
        return owner in self.rows

    @cached_property
    def description_cost(self) -> float:
        kinds = {(template(owner or ""), *rows) for owner, rows in self.rows.items()}
        # More where another step would say more.
        return 1.5 + 0.5 * len(kinds) + 0.5 * (self.kind in {"regrouped", "unit"})

    def apply(self, state: State, pool: Pool) -> State:
        after = State(state)
        for owner, written in self.rows.items():
            kept = (rows for key, rows in state[owner].rows.items() if key not in written)
            content = pool.content(chain.from_iterable((*kept, *written.values())))
            if content is not NOTHING:
                after[owner] = content
            else:
                after.pop(owner, None)
        return after

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        # Two sentences say that forward, or what other units gather in it, is as before.
        is_meant = self.kind == "phase" or (self.kind == "unit" and is_gather(key, call))
        return is_meant and key.phase is Phase.FORWARD


def sent_rows(side: Mapping[Owner, Mapping[RowKey, Rows]]) -> Iterator[Row]:
    """The rows of collectives on one side of a step."""
    rows = chain.from_iterable(held.values() for held in side.values())
    return (row for row in chain.from_iterable(rows) if row.axis)


def replaced(
    between: Between,
    kind: str,
    keys: Mapping[Owner, Iterable[RowKey]],
    *,
    came: bool = True,
    **facts: Any,
) -> Iterator[Replaced]:
    """The step that writes the target's rows where they differ; none if no rows are given."""
    # Modules in which the same differs share what is written.
    shared: dict[tuple[object, ...], list[dict[RowKey, Rows]]] = {}
    sides: dict[Owner, list[dict[RowKey, Rows]]] = {}
    for owner, wanted in keys.items():
        old, new = between.state[owner], between.target[owner]
        place = old, new, id(wanted)
        if place not in shared:
            differing = [key for key in dict.fromkeys(wanted) if old.row(key) != new.row(key)]
            shared[place] = [{key: one.row(key) for key in differing} for one in (old, new)]
        sides[owner] = shared[place]
    if sides:
        was, now = ({owner: two[i] for owner, two in sides.items()} for i in (0, 1))
        yield Replaced(kind=kind, came=came, rows=now, was=was, facts=facts)
