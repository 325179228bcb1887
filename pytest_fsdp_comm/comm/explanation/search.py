"""Finds the steps that lead from one profile to another, the shortest exact way first; and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import ROOT_FQN
from pytest_fsdp_comm.comm.explanation.amounts import (
    Counts,
    Scope,
    propose_counts,
    propose_dtypes,
    propose_sizes,
)
from pytest_fsdp_comm.comm.explanation.names import (
    propose_axes,
    propose_layers,
    propose_names,
)
from pytest_fsdp_comm.comm.explanation.passes import propose_of_passes
from pytest_fsdp_comm.comm.explanation.states import (
    Alike,
    Between,
    Content,
    Owner,
    Pool,
    Rows,
    State,
    differences,
    keys_that_differ,
    owners_that_differ,
    rows_in,
    template,
)
from pytest_fsdp_comm.comm.explanation.steps import Seen, Step
from pytest_fsdp_comm.comm.explanation.timing import TimingChange, find_timing_changes
from pytest_fsdp_comm.comm.explanation.units import Freed, Units, propose_of_units
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey

# Note [Search]: a beam search. A path is a list of steps and the states after them; it costs the
# lines of its steps and those that would still have to be told, so that a step is taken only if it
# saves more than it costs. Of the paths to one state the cheapest is followed, but one that would
# be told only if it is exact, and each set of steps is tried in one order, that of `Step.order`. At
# the end the cheapest path is told that is exact in what it claims (see Note [Exactness]), also if
# it does not reach the target; no steps at all always are, so that there is one.

BEAM: Final = 5
"""Paths that are followed at once. In `tests/regressions`, both ways, 2 tell what 5 tell; where
three things changed at once, such as DDP that became HSDP, 4 lose what 5 tell."""
DEPTH: Final = 6
"""The most steps of an explanation."""
_LEAST_COST: Final = 1.5
_COLLECTIVE_COST: Final = 4.0
"""Of telling one row that is left over."""
_OTHER_COST: Final = 1.0

_PROPOSALS: Final = (
    (0, propose_axes),
    (1, propose_names),
    (2, propose_layers),
    (3, propose_counts),
    (3, propose_sizes),
    (3, propose_dtypes),
    (5, propose_of_passes),
    (5, propose_of_units),
)
"""Each with the highest `Step.order` of what it proposes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What turns the old profile into the new one."""

    steps: tuple[Step, ...]
    """In the order in which they are applied."""
    is_exact: bool
    before: tuple[Row, ...]
    """What the steps leave over, as it is after them: only owners that still differ."""
    after: tuple[Row, ...]
    timings: tuple[TimingChange, ...]
    """Of rows that both profiles have, what differs in when they are issued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Path:
    states: tuple[State, ...]
    """Before the first step, and after each."""
    steps: tuple[Step, ...]
    cost: float

    @property
    def description_cost(self) -> float:
        return sum(step.description_cost for step in self.steps)


class _Search:
    def __init__(self, old: CommProfile, new: CommProfile) -> None:
        self.pool = Pool()
        self.old = self.pool.state(old)
        self.target = self.pool.state(new)
        self.axes = old.mesh_axes, new.mesh_axes
        self._costs: dict[tuple[Content, Content], float] = {}

    def cost_left(self, state: State) -> float:
        groups = {
            (template(owner or ""), state[owner], self.target[owner])
            for owner in owners_that_differ(state, self.target)
        }
        pairs = {(old, new) for _, old, new in groups}
        # Modules of other names that differ alike share lines, which name them all.
        return sum(map(self._cost_between, pairs)) + 0.5 * (len(groups) - len(pairs))

    def _cost_between(self, pair: tuple[Content, Content]) -> float:
        if pair not in self._costs:
            self._costs[pair] = sum(
                _COLLECTIVE_COST if key.subject == "collective" else _OTHER_COST
                for key in keys_that_differ(*pair)
            )
        return self._costs[pair]

    def is_exact(self, path: _Path) -> bool:
        return is_exact(path.states, path.steps, self.target, self.pool)

    def is_better(self, path: _Path, known: _Path) -> bool:
        if path.cost == path.description_cost and known.cost == known.description_cost:
            ranks = [(not self.is_exact(one), one.cost) for one in (path, known)]
            return ranks[0] < ranks[1]
        return path.cost < known.cost

    def longer(self, path: _Path) -> Iterator[_Path]:
        state = path.states[-1]
        least = path.steps[-1].order if path.steps else 0
        between = Between(state, self.target, self.old, self.axes)
        proposed = (propose(between) for order, propose in _PROPOSALS if order >= least)
        for step in chain.from_iterable(proposed):
            if step.order < least or step in path.steps:
                continue
            after = step.apply(state, self.pool)
            cost = path.description_cost + step.description_cost + self.cost_left(after)
            if cost < path.cost:
                yield _Path(states=(*path.states, after), steps=(*path.steps, step), cost=cost)


def explain(old: CommProfile, new: CommProfile) -> Explanation:
    """Find the cheapest explanation that is exact in what its steps claim; see Note [Search]."""
    search = _Search(old, new)
    frontier = [_Path(states=(search.old,), steps=(), cost=search.cost_left(search.old))]
    done = list(frontier)
    least = frontier[0].cost  # of the cheapest exact path so far
    for _ in range(DEPTH):
        found: dict[object, _Path] = {}
        for path in frontier:
            for longer in search.longer(path):
                key = frozenset(longer.states[-1].items())
                if key not in found or search.is_better(longer, found[key]):
                    found[key] = longer
        frontier = sorted(found.values(), key=lambda path: path.cost)[:BEAM]
        done += frontier
        whole = [path.cost for path in frontier if path.cost == path.description_cost]
        if whole and min(whole) < least:
            least = min([least, *(path.cost for path in frontier if search.is_exact(path))])
        # One more step has to be worth its lines.
        frontier = [path for path in frontier if path.description_cost + _LEAST_COST < least]
        if not frontier:
            break
    path = next(path for path in sorted(done, key=lambda path: path.cost) if search.is_exact(path))
    end, target = path.states[-1], search.target
    owners = owners_that_differ(end, target)
    return Explanation(
        steps=path.steps,
        is_exact=not owners,
        before=rows_in(end, owners),
        after=rows_in(target, owners),
        timings=find_timing_changes(old, new, path.steps),
    )


# Note [Exactness]: steps are told only if all of this holds, so that a user may take each sentence
# at its word, also where other rows are left over:
# 1. What a step changed is right at the end.
# 2. Where a step claims something, nothing is different at the end.
# 3. Without any one of the steps the end is another.
# 4. No two steps write the counts, or the sizes, of one row.
# 5. No step changes only rows that another one wrote.
# 6. What is said of everything holds for two rows at least.
# 7. No step says of others that they are as before where another one says otherwise.

_NAMES: Final = 1
"""Up to which order steps change names, and with them every row."""
_OF_UNITS: Final = frozenset({"called", "unit", "unit sizes", "split off", "regrouped"})


def is_exact(states: Sequence[State], steps: Sequence[Step], target: State, pool: Pool) -> bool:
    """Whether steps, with the states before and after each, are exact in all that they claim."""
    left = differences(states[-1], target)
    return (
        not any(_contradicts(step, other) for step in steps for other in steps)
        and not any(
            step.claims(owner, key, call)
            for alike in left
            for key, was, now in alike.rows
            for call in _calls_that_differ(was, now)
            for owner in alike.owners
            for step in steps
        )
        and _are_apart(states, steps, _places(left))
        and _are_needed(states, steps, pool)
    )


def _calls_that_differ(*sides: Rows) -> set[Calls]:
    was, now = ({(row.ranks, call) for row in rows for call in row.calls} for rows in sides)
    return {call for _, call in was ^ now}


def _are_apart(
    states: Sequence[State], steps: Sequence[Step], wrong: set[tuple[Owner, RowKey]]
) -> bool:
    """Whether each step alone is right about the rows that it changes: 1, 4, 5 and 6."""
    written: defaultdict[str, set[tuple[Owner, RowKey]]] = defaultdict(set)
    for before, step, after in zip(states, steps, states[1:], strict=False):
        if step.order <= _NAMES:
            continue
        touched = _places(differences(before, after))
        least = 2 if step.kind in {"counts", "sizes"} else 1
        kind = step.writes
        is_again = touched & written[kind] if kind in {"counts", "sizes"} else ()
        is_of_another = kind == "rows" and touched <= written[kind]
        if len(touched) < least or touched & wrong or is_again or is_of_another:
            return False
        written[kind] |= touched
    return True


def _are_needed(states: Sequence[State], steps: Sequence[Step], pool: Pool) -> bool:
    for left_out in steps if len(steps) > 1 else ():
        state = states[0]
        for step in steps:
            if step is not left_out:
                state = step.apply(state, pool)
        if state == states[-1]:
            return False
    return True


def _contradicts(step: Step, other: Step) -> bool:
    """Whether a step says that something is as before which another one changes."""
    if step.kind == "unit":
        return step is not other and other.kind in _OF_UNITS
    if isinstance(step, Counts):
        is_policy = other.kind == "freed" and step.scope is Scope.FORWARD
        return is_policy or other.kind == "reduced times"
    return False


def _places(found: Sequence[Alike]) -> set[tuple[Owner, RowKey]]:
    return {(owner, key) for alike in found for key, *_ in alike.rows for owner in alike.owners}


# Note [Causes]: a step is exact, so a cause explains all of its rows. The rule beside a step names
# what its rows suggest, unless the trees of the test, or a change of torch's own, know it better;
# here several steps together decide first. docs/causes.md has what would refute each,
# `tests/regressions` its cases.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What may have been changed, or done, with what to do about it where that is known."""

    text: str
    steps: tuple[Step, ...] = ()
    is_of_torch: bool = False
    """Whether another version of torch does it, without any change of the user's."""

    @property
    def is_of_regression(self) -> bool:
        return any(step.is_regression for step in self.steps)


def find_causes(
    explanation: Explanation, seen: Seen, *, is_same_mesh: bool = True
) -> tuple[Cause, ...]:
    """Name the probable causes of a difference, those of regressions first, torch's own last."""
    found = _root_not_sharded(explanation)
    explained = [step for cause in found for step in cause.steps]
    for step in explanation.steps:
        is_of_mesh = step.kind == "sizes" and not is_same_mesh
        # Beside rows that are left over, gathers may have moved there from elsewhere.
        is_in_doubt = step.kind == "recomputed" and not explanation.is_exact
        if step not in explained and not is_of_mesh and not is_in_doubt:
            text, is_of_torch = step.cause(seen), step.is_of_torch(seen)
            found.append(Cause(text=text, steps=(step,), is_of_torch=is_of_torch))
    if explanation.is_exact and not explanation.steps:
        found += [Cause(text=one.cause) for one in explanation.timings]
    unique = {cause.text: cause for cause in found if cause.text}
    return tuple(
        sorted(unique.values(), key=lambda cause: (not cause.is_of_regression, cause.is_of_torch))
    )


def _root_not_sharded(explanation: Explanation) -> list[Cause]:
    """The root's unit is gone, and those below it behave as roots."""
    gone = [step for step in explanation.steps if isinstance(step, Units) and not step.came]
    kept = [step for step in explanation.steps if isinstance(step, Freed) and not step.came]
    if not (gone and kept and gone[0].owners == (ROOT_FQN,)):
        return []
    text = (
        "fully_shard on the root is missing: its own parameters are not sharded, their "
        "gradients not reduced by FSDP, and each unit below is a root of its own"
    )
    return [Cause(text=text, steps=(*gone, *kept))]
