"""Search for the cheapest list of steps that explains how one profile became another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from pytest_fsdp_comm.comm.explanation.exactness import is_exact
from pytest_fsdp_comm.comm.explanation.kinds import KINDS
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Pool,
    State,
    keys_that_differ,
    owners_that_differ,
    rows_in,
    template,
)
from pytest_fsdp_comm.comm.explanation.steps import Step
from pytest_fsdp_comm.comm.explanation.timing import TimingChange, find_timing_changes
from pytest_fsdp_comm.comm.profile import CommProfile, Row

# Note [Search]: this is a beam search. A path is a list of steps with the states that they lead to.
# Its cost is the cost of its steps plus the cost of all leftover rows, so a step is added only if
# it saves more than it costs. If several paths reach the same state, the search follows the
# cheapest, but prefers an exact path. Each set of steps is tried only in
# the order given by `Step.order`. The result is the cheapest exact path (see `exactness`),
# even if rows are left over. An exact path always exists, because the empty path is exact.

BEAM: Final = 5
"""How many paths to extend in each round. Two are enough for every case in `tests/regressions`, but
three simultaneous changes, such as a switch from DDP to HSDP, need five."""
DEPTH: Final = 6
"""Maximum number of steps in an explanation."""
_LEAST_COST: Final = 0.5
"""The least `Step.description_cost`, of a host wait."""
_COLLECTIVE_COST: Final = 4.0
"""Cost of each leftover row of collectives; all other leftover rows cost `_OTHER_COST`."""
_OTHER_COST: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The steps from the old profile to the new one, and the rows that they do not explain."""

    steps: tuple[Step, ...]
    is_exact: bool
    before: tuple[Row, ...]
    """The rows after all steps, for each owner that still differs from the new profile."""
    after: tuple[Row, ...]
    timings: tuple[TimingChange, ...]
    """Changes in the timing of rows that both profiles have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Path:
    states: tuple[State, ...]
    """The states before the first step and after each step."""
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
        # Modules with equal differences are reported on the same lines, so count their rows once.
        return sum(map(self._get_edit_cost, pairs)) + 0.5 * (len(groups) - len(pairs))

    def _get_edit_cost(self, pair: tuple[Content, Content]) -> float:
        if pair not in self._costs:
            self._costs[pair] = sum(
                _COLLECTIVE_COST if key.subject == "collective" else _OTHER_COST
                for key in keys_that_differ(*pair)
            )
        return self._costs[pair]

    def is_exact(self, path: _Path) -> bool:
        return is_exact(path.states, path.steps, self.target)

    def is_better(self, path: _Path, rival: _Path) -> bool:
        """Whether a path is better than another one to the same state."""
        is_exact, is_rival_exact = self.is_exact(path), self.is_exact(rival)
        return is_exact if is_exact != is_rival_exact else path.cost < rival.cost

    def extend(self, path: _Path) -> Iterator[_Path]:
        state = path.states[-1]
        least = path.steps[-1].order if path.steps else 0
        between = Between(state, self.target, self.old, self.axes)
        proposed = (kind.propose(between) for kind in KINDS if kind.order >= least)
        for step in chain.from_iterable(proposed):
            if step.order < least or step in path.steps:
                continue
            after = step.apply(state, self.pool)
            cost = path.description_cost + step.description_cost + self.cost_left(after)
            if cost < path.cost:
                yield _Path(states=(*path.states, after), steps=(*path.steps, step), cost=cost)


def explain(old: CommProfile, new: CommProfile) -> Explanation:
    """Find the cheapest explanation whose steps are exact; see Note [Search]."""
    search = _Search(old, new)
    frontier = [_Path(states=(search.old,), steps=(), cost=search.cost_left(search.old))]
    done = list(frontier)
    least = frontier[0].cost  # cost of the cheapest exact path so far
    for _ in range(DEPTH):
        reached: dict[object, _Path] = {}
        for path in frontier:
            for longer in search.extend(path):
                key = frozenset(longer.states[-1].items())
                if key not in reached or search.is_better(longer, reached[key]):
                    reached[key] = longer
        frontier = sorted(reached.values(), key=lambda path: path.cost)[:BEAM]
        done += frontier
        complete = [path.cost for path in frontier if path.cost == path.description_cost]
        if complete and min(complete) < least:
            least = min([least, *(path.cost for path in frontier if search.is_exact(path))])
        # Extend only paths that can still become cheaper than the cheapest exact one.
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
