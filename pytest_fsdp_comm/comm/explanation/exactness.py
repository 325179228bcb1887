"""Whether steps are true wherever they say something, and all needed."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.explanation.amounts import Counts, Scope
from pytest_fsdp_comm.comm.explanation.between import differences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.comm.calls import Calls
    from pytest_fsdp_comm.comm.explanation.between import Alike
    from pytest_fsdp_comm.comm.explanation.contents import Owner, Pool, Rows, State
    from pytest_fsdp_comm.comm.explanation.steps import Step
    from pytest_fsdp_comm.comm.profile import RowKey

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
