"""Search for the cheapest list of steps that explains how one profile became another."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Final, Literal, TypeAlias, get_args

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.explanation.amounts import propose_counts, propose_dtypes, propose_sizes
from pytest_fsdp_comm.comm.explanation.names import (
    AxisRenamed,
    Renamed,
    propose_axes,
    propose_layers,
    propose_names,
)
from pytest_fsdp_comm.comm.explanation.passes import propose_of_passes
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Difference,
    Owner,
    Pool,
    Rows,
    State,
    differences,
    keys_that_differ,
    owners_that_differ,
    rows_in,
    sort_owners,
    template,
)
from pytest_fsdp_comm.comm.explanation.steps import WRITES, Step
from pytest_fsdp_comm.comm.explanation.units import propose_of_units
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey

# Note [Search]: this is a beam search. A path is a list of steps with the states that they lead to.
# Its cost is the cost of its steps plus the cost of all leftover rows, so a step is added only if
# it saves more than it costs. If several paths reach the same state, the search follows the
# cheapest, but prefers an exact path if no rows are left over. Each set of steps is tried only in
# the order given by `Step.order`. The result is the cheapest exact path (see Note [Exactness]),
# even if rows are left over. An exact path always exists, because the empty path is exact.

BEAM: Final = 5
"""How many paths to extend in each round. Two are enough for every case in `tests/regressions`, but
three simultaneous changes, such as a switch from DDP to HSDP, need five."""
DEPTH: Final = 6
"""Maximum number of steps in an explanation."""
_LEAST_COST: Final = 1.5
_COLLECTIVE_COST: Final = 4.0
"""Cost of each leftover row of collectives; all other leftover rows cost `_OTHER_COST`."""
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
"""The functions that propose steps, each with the highest `Step.order` that its steps have."""


Subject: TypeAlias = Literal["ahead", "is_async"]
"""A field of `Calls` that describes timing, and so is compared separately."""
Shares: TypeAlias = tuple[tuple[int, Fraction], ...]
"""Each value of a timing field, ascending, and the share of calls that have it. Unlike counts,
shares stay the same if all calls are repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingChange:
    """Calls of some owners are issued earlier or later, or are now synchronous or asynchronous."""

    subject: Subject
    key: RowKey
    owners: tuple[Owner, ...]
    """The new names of the owners, in natural order."""
    before: Shares
    after: Shares


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
        return sum(map(self._cost_between, pairs)) + 0.5 * (len(groups) - len(pairs))

    def _cost_between(self, pair: tuple[Content, Content]) -> float:
        if pair not in self._costs:
            self._costs[pair] = sum(
                _COLLECTIVE_COST if key.subject == "collective" else _OTHER_COST
                for key in keys_that_differ(*pair)
            )
        return self._costs[pair]

    def is_exact(self, path: _Path) -> bool:
        return is_exact(path.states, path.steps, self.target)

    def is_better(self, path: _Path, rival: _Path) -> bool:
        if path.cost == path.description_cost and rival.cost == rival.description_cost:
            ranks = [(not self.is_exact(candidate), candidate.cost) for candidate in (path, rival)]
            return ranks[0] < ranks[1]
        return path.cost < rival.cost

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
    """Find the cheapest explanation whose steps are exact; see Note [Search]."""
    search = _Search(old, new)
    frontier = [_Path(states=(search.old,), steps=(), cost=search.cost_left(search.old))]
    done = list(frontier)
    least = frontier[0].cost  # cost of the cheapest exact path so far
    for _ in range(DEPTH):
        reached: dict[object, _Path] = {}
        for path in frontier:
            for longer in search.longer(path):
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


# Note [Exactness]: users can rely on the sentence of each step, even if rows are left over, because
# steps are reported only if they meet these conditions:
# 1. After all steps, each row that a step changed equals the row of the new profile.
# 2. After all steps, the calls that a step claims are equal too (see `Step.claims`).
# 3. No two steps write the counts, or the sizes, of the same row.
# 4. A step that replaces entire rows replaces at least one row that no earlier step replaced.
# 5. A step that changes counts or sizes of all modules changes at least two rows.
# 6. No step reports other units as unchanged if another step changes them.

_NAMES: Final = 1
"""Highest `Step.order` of steps that only rename. Conditions 1, 3, 4 and 5 do not apply to them."""
_OF_UNITS: Final = frozenset({"called", "unit", "unit sizes", "split off", "regrouped"})


def is_exact(states: Sequence[State], steps: Sequence[Step], target: State) -> bool:
    """Whether steps meet the conditions of Note [Exactness]; see `_Path` for the arguments."""
    kinds = [step.kind for step in steps]
    if "unit" in kinds and sum(kind in _OF_UNITS for kind in kinds) > 1:
        return False
    remaining = differences(states[-1], target)
    return not any(
        step.claims(owner, key, call)
        for group in remaining
        for key, was, now in group.rows
        for call in _calls_that_differ(was, now)
        for owner in group.owners
        for step in steps
    ) and _are_apart(states, steps, _places(remaining))


def _calls_that_differ(*sides: Rows) -> set[Calls]:
    was, now = ({(row.ranks, call) for row in rows for call in row.calls} for rows in sides)
    return {call for _, call in was ^ now}


def _are_apart(
    states: Sequence[State], steps: Sequence[Step], wrong: set[tuple[Owner, RowKey]]
) -> bool:
    """Whether steps meet conditions 1, 3, 4 and 5; `wrong` lists the rows that still differ."""
    written: defaultdict[str, set[tuple[Owner, RowKey]]] = defaultdict(set)
    for before, step, after in zip(states, steps, states[1:], strict=False):
        if step.order <= _NAMES:
            continue
        touched = _places(differences(before, after))
        least = 2 if step.kind in {"counts", "sizes"} else 1
        kind = WRITES.get(step.kind, "rows")
        is_again = touched & written[kind] if kind in {"counts", "sizes"} else ()
        is_of_another = kind == "rows" and touched <= written[kind]
        if len(touched) < least or touched & wrong or is_again or is_of_another:
            return False
        written[kind] |= touched
    return True


def _places(groups: Sequence[Difference]) -> set[tuple[Owner, RowKey]]:
    return {(owner, key) for group in groups for key, *_ in group.rows for owner in group.owners}


def find_timing_changes(
    old: CommProfile, new: CommProfile, steps: Sequence[Step]
) -> tuple[TimingChange, ...]:
    """Compare the timing of rows that both profiles have, after applying the steps' renames."""
    rows = {(row.key, row.owner, row.ranks): row for row in new.collectives}
    by_change: defaultdict[tuple[Subject, RowKey, Shares, Shares], list[Owner]] = defaultdict(list)
    for row in old.collectives:
        owner, key = row.owner, row.key
        for step in steps:
            if isinstance(step, AxisRenamed) and key.axis == step.old:
                key = key._replace(axis=step.new)
            elif isinstance(step, Renamed):
                owner = step.name(owner)
        now = rows.get((key, owner, row.ranks))
        if now is None or now.calls == row.calls:
            continue
        for subject in get_args(Subject):
            before, after = _shares(row, subject), _shares(now, subject)
            if before != after:
                by_change[subject, key, before, after].append(owner)
    return tuple(
        TimingChange(subject=subject, key=key, owners=sort_owners(owners), before=was, after=now)
        for (subject, key, was, now), owners in by_change.items()
    )


def _shares(row: Row, subject: Subject) -> Shares:
    counts: Counter[int] = Counter()
    for calls in row.calls:
        counts[getattr(calls, subject)] += calls.count
    total = sum(counts.values())
    return tuple((value, Fraction(count, total)) for value, count in sorted(counts.items()))
