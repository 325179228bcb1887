"""Define what a step is: one change that explains many rows of a diff."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.explanation.evidence import Recordings
from pytest_fsdp_comm.comm.explanation.states import (
    NOTHING,
    Between,
    Content,
    Owner,
    Pool,
    Rows,
    State,
    template,
)
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey

# A step describes an effect, not its cause. It is reported only if it is exact: after all steps,
# the rows that it changes or `claims` equal the rows of the new profile. A `GlobalStep` computes
# new rows from any state. A `Replaced` copies its rows from the new profile; see Note [Evidence of
# a proposal]. To add a kind of step, write a subclass, and list it in `kinds`.

# Note [Evidence of a proposal]: a `Replaced` step copies its rows from the new profile, so the rows
# are right even if the sentence that users read is wrong. `propose` must therefore check what the
# sentence says about the changed rows. Everything that a sentence says about other rows is computed
# from both `Recordings` when the sentence is written, because the search compares states in which
# other steps have been applied.

Part: TypeAlias = Literal["names", "counts", "sizes", "rows"]
Problem: TypeAlias = Literal[
    "unsharded",
    "unreduced",
    "stale",
    "ungathered",
    "missing",
    "inputs",
    "outputs",
    "part",
    "backwards",
    "ranks",
    "times",
    "again",
    "passes",
    "reduce_op",
    "dtype",
]
"""Problems with gradients, worst first. ``stale``: a trained unit stays gathered from step to step,
so forward does not use what the optimizer changed. ``ungathered``: the optimizer no longer gathers
what it updates on each rank. ``missing``: a unit that did not exist before
reduces none. ``inputs``: backward no longer reduces the gradients of a module's inputs.
``outputs``: forward no longer reduces the outputs of a module that is still sharded. ``part``: some
parameters of a unit get no gradient. ``again``: besides its unit, a module reduces its gradients
too. ``passes``: fewer backwards. ``backwards``, ``reduce_op``, ``dtype``: this field of `Calls`
changed.
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change from the old profile to the new one."""

    order: ClassVar[int] = 5
    """Steps are applied in ascending order: renames first, changes to individual modules last."""
    writes: ClassVar[Part] = "rows"
    """The part of a row that the step changes."""
    least_rows: ClassVar[int] = 1
    """The fewest rows that the step must change, so that it says more than these rows."""

    @property
    def description_cost(self) -> float:
        """Cost of reporting the step; for comparison, a leftover row of a collective costs 4."""
        return 2.0

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        """Yield the steps of this kind that the difference between two states suggests."""
        raise NotImplementedError

    def apply(self, state: State, pool: Pool) -> State:
        """Return the state after the step."""
        raise NotImplementedError

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        """Whether the sentence makes a statement about this call.

        If so, both sides must have equal calls once all steps are applied.
        """
        return False

    def is_plausible(self, old: State, new: State) -> bool:
        """Whether both recordings, under the same names, allow the step's sentence."""
        return True

    def includes(self, owner: Owner) -> bool:
        """Whether the step may change rows of this module."""
        return True

    def rename_owner(self, owner: Owner) -> Owner:
        """Return the module's new name."""
        return owner

    def rename_axis(self, axis: str) -> str:
        """Return the axis's new name."""
        return axis

    def describe(self, recordings: Recordings) -> str:
        """Describe the step in one line; everything in it is true of both recordings."""
        raise NotImplementedError

    def find_cause(self, recordings: Recordings) -> str:
        """Return the likely cause; empty if it is unknown, or if the sentence already names it."""
        return ""

    def find_problem(self, recordings: Recordings) -> Problem | None:
        """Return the problem with gradients that the sentence reports, if it breaks training."""
        return None

    def reduces_elsewhere(self, owner: Owner) -> bool:
        """Whether the sentence says that other calls now reduce the module's gradients."""
        return False

    @property
    def is_regression(self) -> bool:
        """Whether the step counts as a regression, which is listed before other steps."""
        return False

    @property
    def reports_other_units(self) -> bool:
        """Whether the sentence compares the step's units with all other units."""
        return False

    @property
    def is_effect(self) -> bool:
        """Whether the step may follow from new shapes of parameters, which a tree names."""
        return False

    @property
    def changes_units(self) -> bool:
        """Whether the step adds, removes or resizes units, or changes how often they run."""
        return False


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


RowsByOwner: TypeAlias = Mapping[Owner, Mapping[RowKey, Rows]]


@dataclass(frozen=True, kw_only=True)
class Replaced(Step):
    """A step that copies the rows of some modules from the new profile."""

    rows: RowsByOwner
    """Rows of the new profile, keyed by module and row key; an empty tuple removes the rows."""
    old_rows: RowsByOwner = field(compare=False)
    """The rows that are replaced, with the same keys."""
    is_added: bool = True
    """False for the reverse of the step, such as merging instead of splitting off."""

    @classmethod
    def propose_copied_rows(
        cls, between: Between, keys: Mapping[Owner, Iterable[RowKey]], **values: Any
    ) -> Iterator[Self]:
        """Yield a step that copies the rows at `keys` from the target; nothing without keys."""
        # Modules with equal differences share one mapping.
        shared: dict[tuple[object, ...], list[dict[RowKey, Rows]]] = {}
        sides: dict[Owner, list[dict[RowKey, Rows]]] = {}
        for owner, wanted in keys.items():
            old, new = between.state[owner], between.target[owner]
            difference = old, new, id(wanted)
            if difference not in shared:
                differing = [key for key in dict.fromkeys(wanted) if old.row(key) != new.row(key)]
                shared[difference] = [
                    {key: content.row(key) for key in differing} for content in (old, new)
                ]
            sides[owner] = shared[difference]
        if sides:
            old_rows, rows = ({owner: two[i] for owner, two in sides.items()} for i in (0, 1))
            yield cls(rows=rows, old_rows=old_rows, **values)

    @property
    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.rows)

    @property
    def sending_owners(self) -> tuple[Owner, ...]:
        """The modules whose new calls the sentence counts."""
        return self.owners

    def includes(self, owner: Owner) -> bool:
        return owner in self.rows

    @cached_property
    def description_cost(self) -> float:
        kinds = {(template(owner or ""), *rows) for owner, rows in self.rows.items()}
        return 1.5 + 0.5 * len(kinds)

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


def list_collective_rows(side: RowsByOwner) -> Iterator[Row]:
    """Iterate over the rows of collectives on one side of a step."""
    rows = chain.from_iterable(rows_by_key.values() for rows_by_key in side.values())
    return (row for row in chain.from_iterable(rows) if row.axis)


def rename_rows(profile: CommProfile, steps: Iterable[Step]) -> CommProfile:
    """Give the rows of a profile the names of modules and axes that the steps lead to."""
    rows = list(profile.rows)
    for step in steps:
        rows = [
            replace(row, owner=step.rename_owner(row.owner), axis=step.rename_axis(row.axis))
            for row in rows
        ]
    return replace(profile, rows=tuple(rows))
