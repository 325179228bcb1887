"""Propose steps that change gradient reductions; see Note [Evidence of a proposal] in `units`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.states import (
    NOTHING,
    Between,
    Content,
    Owner,
    Rows,
    count_of,
    forward_gathers,
    nbytes_of,
    role_of,
)
from pytest_fsdp_comm.comm.explanation.steps import Step, replaced
from pytest_fsdp_comm.comm.profile import RowKey

Keys: TypeAlias = Mapping[Owner, Iterable[RowKey]]


def propose_reductions(between: Between) -> Iterator[Step]:
    """Propose that the gradient reductions of units changed, but not their gathers."""
    keys_by_change: defaultdict[tuple[str, Fraction], dict[Owner, list[RowKey]]] = defaultdict(dict)
    for group in between.differences:
        old, new = group.old, group.new
        has_same_gathers = all(
            old.gathers[phase] == new.gathers[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        if NOTHING in {old, new} or not has_same_gathers:
            continue
        changes: defaultdict[tuple[str, Fraction], list[RowKey]] = defaultdict(list)
        for key in {**old.reductions, **new.reductions}:
            change = _reduction_change(old, old.row(key), new.row(key))
            if change is not None:
                changes[change].append(key)
        for change, chosen in changes.items():
            keys_by_change[change].update(dict.fromkeys(group.owners, chosen))
    for (kind, ratio), keys in keys_by_change.items():
        match kind:
            case "reduced times":
                yield from _reduced_times(between, ratio, keys)
            case "reduced":
                yield from _reductions(between, keys, is_added=bool(ratio))
            case _:
                yield from replaced(between, kind, keys, is_added=bool(ratio))


def _reduction_change(content: Content, before: Rows, after: Rows) -> tuple[str, Fraction] | None:
    """Return the kind of step, and the ratio of counts, or 1 for more reductions, 0 for fewer."""
    if before == after:
        return None
    if not (before and after):
        return "reduced", Fraction(0 if before else 1)
    ratio = Fraction(count_of(after), count_of(before))
    if _multiplied(before, ratio) == _multiplied(after, Fraction(1)):
        return "reduced times", ratio
    if ratio != 1:
        return None
    is_more = Fraction(nbytes_of(after) > nbytes_of(before))
    return "part reduced" if content.gathers[Phase.FORWARD] else "gradient sizes", is_more


def _multiplied(rows: Rows, factor: Fraction) -> list[tuple[object, Calls, Fraction]]:
    return [
        (row.ranks, replace(call, count=0), call.count * factor)
        for row in rows
        for call in row.calls
    ]


def _reduced_times(between: Between, times: Fraction, keys: Keys) -> Iterator[Step]:
    is_sharded = all(between.state[owner].gathers[Phase.FORWARD] for owner in keys)
    # Units with unchanged reductions. If forward gathers them only once, there is one micro-batch.
    other_units = [
        content
        for owner, content in between.state.items()
        if owner not in keys
        and content.reductions
        and content.reductions == between.target[owner].reductions
    ]
    yield from replaced(
        between,
        "reduced times",
        keys,
        times=times,
        is_sharded=is_sharded,
        is_alone=is_sharded
        and bool(other_units)
        and all(forward_gathers(content) == 1 for content in other_units),
    )


def _reductions(between: Between, keys: Keys, *, is_added: bool) -> Iterator[Step]:
    less, more = between.sides(is_added=is_added)
    # Include reshards in backward, which happen only if backward reduces the unit's gradients.
    freed = {
        owner: [
            key
            for key in (*less[owner].rows, *more[owner].rows)
            if key.what == "reshard" and key.phase is Phase.BACKWARD
        ]
        for owner in keys
        if not less[owner].reductions
    }
    # The phases and axes in which gradients are reduced on the side with fewer reductions.
    places = {(key.phase, key.axis) for owner in keys for key in less[owner].reductions}
    yield from replaced(
        between,
        "reduced by more" if places else "reduced",
        {owner: [*rows, *freed.get(owner, ())] for owner, rows in keys.items()},
        is_added=is_added,
        is_again=all((key.phase, key.axis) in places for rows in keys.values() for key in rows),
    )


def propose_buckets(between: Between) -> Iterator[Step]:
    """Propose other buckets: gradients of the same total size, reduced in more or fewer calls."""
    keys = between.select_rows(
        lambda _, before, after: (
            role_of(before) == role_of(after) == Role.GRADIENTS
            and count_of(before) != count_of(after)
            and nbytes_of(before) == nbytes_of(after)
        )
    )
    yield from replaced(between, "buckets", keys)
