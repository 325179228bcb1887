"""What an explanation is made of: changes of contents, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import ClassVar, Literal, TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.explanation.states import (
    NOTHING,
    Content,
    Owner,
    Pool,
    Rows,
    State,
    template,
)
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey

Kind: TypeAlias = Literal[
    "axis renamed",
    "renamed",
    "layers",
    "counts",
    "sizes",
    "dtype",
    # Of units.
    "unit sizes",
    "freed",
    "gathered elsewhere",
    "gathered in backward",
    "used in backward",
    "sharded",
    "split off",
    "regrouped",
    "called",
    "unit",
    # Of gradients.
    "reduced",
    "reduced by more",
    "reduced times",
    "part reduced",
    "gradient sizes",
    "buckets",
    # Of passes.
    "axis",
    "phase",
    "recomputed",
    "sequence parallel",
    "redistributed",
    "gathered in full",
]
Writes: TypeAlias = Literal["counts", "sizes", "rows", ""]

# Note [Steps]: a step tells an effect: what is different, not why. It is exact or it is not told,
# so each says what it `claims`: where anything of that is different at the end, it is refuted.
# A `GlobalStep` and its like, in `names` and `amounts`, can be applied to any state. A `Replaced`
# has its rows from the new profile: see Note [Evidence of a proposal] in `units`. `sentences` puts
# all of them into words.


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
    policies: Mapping[str, str]
    """As `tree.profile.policy_change` words it, of those with another policy after forward."""
    new_roots: frozenset[str] = frozenset()
    is_other_dtype: bool = False
    is_other_policy: bool = False
    """Whether units that both have got another mixed precision."""
    is_reduce_dtype_unset: bool = False
    """Whether, on both sides, all units with a `param_dtype` are FSDP2's, and set no
    `reduce_dtype`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a cause is judged by: both recordings, and the trees of the same comparison."""

    old: CommProfile
    new: CommProfile
    trees: Evidence | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change."""

    kind: Kind
    order: ClassVar[int]
    """Steps are applied in this order: names first, single modules last."""
    writes: ClassVar[Writes] = ""
    """What of a row it writes, which two steps must not do; empty for names, and with them all."""

    @property
    def is_regression(self) -> bool:
        """Whether nobody wants it, if a cause of it is known."""
        return False

    def cause(self, seen: Seen) -> str:
        """Why it may have come about; empty if its sentence says all, or nothing is known."""
        return ""

    def is_of_torch(self, seen: Seen) -> bool:
        """Whether another version of torch does it, without any change of the user's."""
        return False

    @property
    def description_cost(self) -> float:
        """What telling it costs, in lines: 4 is a line of a collective that is left over."""
        return 2.0

    def apply(self, state: State, pool: Pool) -> State:
        """The state after it."""
        raise NotImplementedError

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        """Whether it speaks about a call, of the old profile after it or of the new one."""
        raise NotImplementedError


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

    def includes(self, owner: Owner) -> bool:
        """Whether it changes anything of a module."""
        return True

    def change(self, row: Row, content: Content) -> Row:
        """A row after the step."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Replaced(Step):
    """Some rows of some modules are others; see Note [Steps]."""

    order = 5
    writes: ClassVar[Writes] = "rows"
    is_claim_of_all: ClassVar[bool] = False
    """Whether it speaks of all modules; otherwise of those whose rows it writes."""
    more_cost: ClassVar[float] = 0.0
    """What it costs beside what others do: more where another step would say more."""

    came: bool = True
    """False where it is what `kind` says the other way round."""
    rows: Mapping[Owner, Mapping[RowKey, Rows]]
    """What the new profile has for each of these rows; empty where it has none."""
    # Facts about them, here and in what follows, tell no two steps apart.
    was: Mapping[Owner, Mapping[RowKey, Rows]] = field(compare=False)

    @property
    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.rows)

    @property
    def about(self) -> tuple[Owner, ...]:
        """The modules whose code has the cause."""
        return self.owners

    def units_in(self, trees: Evidence | None) -> set[str]:
        """The modules, if the trees have each of them as a unit; otherwise none."""
        owners = {owner for owner in self.owners if owner is not None}
        return owners if trees is not None and owners <= trees.units else set()

    @cached_property
    def description_cost(self) -> float:
        kinds = {(template(owner or ""), *rows) for owner, rows in self.rows.items()}
        return 2.0 + 0.5 * (len(kinds) - 1) + self.more_cost

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
        if key in self.rows.get(owner, {}):
            return True
        return (self.is_claim_of_all or owner in self.rows) and self.claims_beside(key, call)

    def claims_beside(self, key: RowKey, call: Calls) -> bool:
        """Whether it speaks about a call beside the rows that it writes."""
        return False
