"""Whether steps are true wherever they say something, and all needed.

1. What a step changed is right at the end.
2. Where a step claims something, nothing is different at the end.
3. Without any one of the steps the end is another.
4. No two steps write the counts, or the sizes, of one row.
5. No step changes only rows that another one wrote.
6. What is said of everything holds for two rows at least.
7. No step says of others that they are as before where another one says otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.story.steps import (
    ActivationSizes,
    Called,
    Counts,
    Freed,
    Kept,
    ReducedTimes,
    Regrouped,
    Scope,
    SplitOff,
    UnitAdded,
    UnitRemoved,
    UnitSizes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_fsdp_comm.comm.profile import RowKey
    from pytest_fsdp_comm.comm.story.facts import Content, Fact, Owner, Pool, State
    from pytest_fsdp_comm.comm.story.steps import Step

_NAMES: Final = 1
"""Up to which order steps change names, and with them every row."""
_OF_UNITS: Final = (Called, UnitRemoved, UnitAdded, UnitSizes, SplitOff, Regrouped)


def is_exact(states: Sequence[State], steps: Sequence[Step], target: State, pool: Pool) -> bool:
    """Whether steps are exact in all that they claim.

    Args:
        states: Before the first step, and after each.
        steps: In their order.
        target: What is to be reached.
        pool: Of all these states.
    """
    end = states[-1]
    left = [
        (owner, fact)
        for owner in dict.fromkeys((*end, *target))
        if end.get(owner) is not target.get(owner)
        for fact in _facts_left(end.get(owner), target.get(owner))
    ]
    return (
        not any(_contradicts(step, other) for step in steps for other in steps)
        and not any(step.claims(owner, fact) for step in steps for owner, fact in left)
        and _are_apart(states, steps, {(owner, fact.row) for owner, fact in left})
        and _are_needed(states, steps, pool)
    )


def _are_apart(
    states: Sequence[State], steps: Sequence[Step], wrong: set[tuple[Owner, RowKey]]
) -> bool:
    """Whether each step alone is right about the rows that it changes."""
    written: defaultdict[str, set[tuple[Owner, RowKey]]] = defaultdict(set)
    for before, step, after in zip(states, steps, states[1:], strict=False):
        if step.order <= _NAMES:
            continue
        touched = rows_touched(before, after)
        least = 2 if isinstance(step, (Counts, ActivationSizes)) else 1
        # Bytes follow the type, so one step alone writes either.
        kind = "sizes" if step.writes == "dtype" else step.writes
        is_again = touched & written[kind] if kind in {"counts", "sizes"} else ()
        is_of_another = kind == "rows" and touched <= written[kind]
        if len(touched) < least or touched & wrong or is_again or is_of_another:
            return False
        written[kind] |= touched
    return True


def _are_needed(states: Sequence[State], steps: Sequence[Step], pool: Pool) -> bool:
    end = states[-1]
    for left_out in steps if len(steps) > 1 else ():
        state = states[0]
        for step in steps:
            if step is not left_out:
                state = step.apply(state, pool)
        if state.keys() == end.keys() and all(state[owner] is end[owner] for owner in end):
            return False
    return True


def _contradicts(step: Step, other: Step) -> bool:
    """Whether a step says that something is as before which another one changes."""
    if step is other:
        return False
    if isinstance(step, (UnitRemoved, UnitAdded)):
        return isinstance(other, _OF_UNITS)
    if isinstance(step, Counts):
        is_policy = isinstance(other, (Kept, Freed)) and step.scope is Scope.FORWARD
        return is_policy or isinstance(other, ReducedTimes)
    return False


def rows_that_differ(old: Content | None, new: Content | None) -> Iterator[RowKey]:
    """The rows of a module that differ between two contents."""
    for key in {**(old.rows if old else {}), **(new.rows if new else {})}:
        if (old.row(key) if old else {}) != (new.row(key) if new else {}):
            yield key


def rows_touched(before: State, after: State) -> set[tuple[Owner, RowKey]]:
    """The rows that differ between two states."""
    known: dict[tuple[int, int], list[RowKey]] = {}
    found: set[tuple[Owner, RowKey]] = set()
    for owner in (*before, *(owner for owner in after if owner not in before)):
        old, new = before.get(owner), after.get(owner)
        if old is not new:
            place = id(old), id(new)
            if place not in known:
                known[place] = list(rows_that_differ(old, new))
            found.update((owner, key) for key in known[place])
    return found


def _facts_left(old: Content | None, new: Content | None) -> Iterator[Fact]:
    was, now = (old.facts if old else {}), (new.facts if new else {})
    for fact in {**was, **now}:
        if was.get(fact) != now.get(fact):
            yield fact
