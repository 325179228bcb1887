"""Decide whether a list of steps is exact, so that each of its sentences is true."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.explanation.states import (
    Difference,
    Owner,
    Rows,
    State,
    differences,
)
from pytest_fsdp_comm.comm.explanation.steps import Step
from pytest_fsdp_comm.comm.profile import RowKey

_FIRST_CHANGE: Final = 3
"""Lowest `Step.order` of steps that change rows, and not only names and the number of layers."""

# Note [Exactness]: users can rely on the sentence of each step, even if rows are left over, because
# steps are reported only if they meet these conditions:
# 1. After all steps, each row that a step changed equals the row of the new profile.
# 2. After all steps, the calls that a step claims are equal too (see `Step.claims`).
# 3. No two steps write the counts, or the sizes, of the same row.
# 4. A step that replaces entire rows replaces at least one row that no earlier step replaced, and
#    none whose counts an earlier step changed, unless it removes them.
# 5. A step that changes counts or sizes of all modules changes at least two rows.
# 6. Each step is plausible for both recordings, apart from renames (see `Step.is_plausible`).
# 7. No step reports other units as unchanged if another step changes them.


def is_exact(states: Sequence[State], steps: Sequence[Step], target: State) -> bool:
    """Whether steps meet the conditions of Note [Exactness].

    Args:
        states: The states before the first step and after each step.
        steps: The steps.
        target: The state of the new profile.
    """
    if any(step.reports_other_units for step in steps) and (
        sum(step.changes_units for step in steps) > 1
    ):
        return False
    renamed = states[sum(step.order < _FIRST_CHANGE for step in steps)]
    if not all(step.is_plausible(renamed, target) for step in steps):
        return False
    remaining = differences(states[-1], target)
    return not any(
        step.claims(owner, key, call)
        for group in remaining
        for key, old, new in group.rows
        for call in _find_differing_calls(old, new)
        for owner in group.owners
        for step in steps
    ) and _are_changes_of_rows_exact(states, steps, _collect_differing_owners_and_keys(remaining))


def _find_differing_calls(*sides: Rows) -> set[Calls]:
    old, new = ({(row.ranks, call) for row in rows for call in row.calls} for rows in sides)
    return {call for _, call in old ^ new}


def _are_changes_of_rows_exact(
    states: Sequence[State], steps: Sequence[Step], wrong: set[tuple[Owner, RowKey]]
) -> bool:
    """Whether steps meet conditions 1, 3, 4 and 5; `wrong` lists the rows that still differ.

    The conditions do not apply to steps that only rename.
    """
    written: defaultdict[str, set[tuple[Owner, RowKey]]] = defaultdict(set)
    for before, step, after in zip(states, steps, states[1:], strict=False):
        if step.writes == "names":
            continue
        touched = _collect_differing_owners_and_keys(differences(before, after))
        earlier = written[step.writes]
        is_repeated = touched <= earlier if step.writes == "rows" else touched & earlier
        scaled = touched & written["counts"]
        is_mixed = step.writes == "rows" and any(after[owner].row(key) for owner, key in scaled)
        if len(touched) < step.least_rows or touched & wrong or is_repeated or is_mixed:
            return False
        written[step.writes] |= touched
    return True


def _collect_differing_owners_and_keys(groups: Sequence[Difference]) -> set[tuple[Owner, RowKey]]:
    return {(owner, key) for group in groups for key, *_ in group.rows for owner in group.owners}
