"""Propose steps for phases, axes and activations; see Note [Evidence of a proposal] in `units`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Owner,
    Rows,
    calls_of,
    count_of,
    is_part,
    keys_that_differ,
    nbytes_of,
    role_of,
    total_count,
)
from pytest_fsdp_comm.comm.explanation.steps import Step, replaced
from pytest_fsdp_comm.comm.profile import RowKey

NORM: Final = "_NormPartial("
"""Start of the placement of an unreduced norm, as DTensor prints it (checked in 2.7 to 2.15)."""
_PARTS: Final = (
    (Phase.BACKWARD, Phase.RECOMPUTE),
    (Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER),
    (Phase.OPTIMIZER,),
)


def propose_of_passes(between: Between) -> Iterator[Step]:
    """Propose changes to phases, axes or activations."""
    for propose in (_axes, _recomputed, _sequence_parallel, _phases):
        for is_added in (True, False):
            yield from propose(between, is_added=is_added)
    yield from _redistributed(between)
    yield from _gathered_in_full(between)


def _axes(between: Between, *, is_added: bool) -> Iterator[Step]:
    old, new = ({axis.name for axis in axes} for axes in between.axes)
    for axis in sorted(new - old if is_added else old - new):
        keys = between.select_rows(partial(_is_over, axis))
        yield from replaced(between, "axis", keys, is_added=is_added, axis=axis)


def _is_over(axis: str, key: RowKey, before: Rows, after: Rows) -> bool:
    is_move = key.subject == "redistribution" and not (before and after)
    return key.axis == axis or is_move


def _recomputed(between: Between, *, is_added: bool) -> Iterator[Step]:
    less, more = between.sides(is_added=is_added)
    keys = between.select_rows(lambda key, *_: key.phase is Phase.RECOMPUTE)
    rows = [
        (less[at].row(key), more[at].row(key), more[at].row(key._replace(phase=Phase.FORWARD)))
        for at, owner_keys in keys.items()
        for key in owner_keys
    ]
    # Recomputation repeats collectives of forward, so it cannot send more bytes than forward did.
    if any(was or not sent or nbytes_of(again) > nbytes_of(sent) for was, again, sent in rows):
        return
    gathers = [more[at].gathers for at in keys]
    # Units whose gathers moved from backward into recomputation.
    moved = {
        at: [key for key in less[at].unit_rows if key.phase is Phase.BACKWARD]
        for at in keys
        if total_count(less[at].gathers[Phase.BACKWARD])
        == total_count(more[at].gathers[Phase.RECOMPUTE])
        > total_count(more[at].gathers[Phase.BACKWARD])
    }
    if moved and moved.keys() != keys.keys():
        return
    is_of_units = all(
        key in more[at].unit_rows for at, owner_keys in keys.items() for key in owner_keys
    )
    keys = {at: [*owner_keys, *moved.get(at, ())] for at, owner_keys in keys.items()}
    yield from replaced(
        between,
        "recomputed",
        keys,
        is_added=is_added,
        is_moved=bool(moved) and is_of_units,
        gathers_again=any(at[Phase.RECOMPUTE] and at[Phase.BACKWARD] for at in gathers),
        is_partly=any(key.phase is Phase.RECOMPUTE for key in less.row_keys()),
    )


def _sequence_parallel(between: Between, *, is_added: bool) -> Iterator[Step]:
    off, on = between.sides(is_added=is_added)
    scattered = [
        key.axis
        for owner in between.changed
        for key, rows in off[owner].rows.items()
        if key == sum_in_forward("all_reduce", key.axis)
        and _amounts(rows) == _amounts(on[owner].row(key._replace(what="reduce_scatter")))
    ]
    for axis in dict.fromkeys(scattered):
        if sum_in_forward("all_reduce", axis) not in on.row_keys():
            yield from _scattered(between, axis, is_added=is_added)


def _scattered(between: Between, axis: str, *, is_added: bool) -> Iterator[Step]:
    off, _ = between.sides(is_added=is_added)
    yield from replaced(
        between,
        "sequence parallel",
        between.select_rows(lambda key, *_: key.axis == axis or key.subject == "redistribution"),
        is_added=is_added,
        axis=axis,
        is_whole=sum_in_forward("reduce_scatter", axis) not in off.row_keys(),
    )


def sum_in_forward(kind: str, axis: str) -> RowKey:
    """Return the row key of a reduction in forward over an axis."""
    return RowKey("collective", Phase.FORWARD, kind, axis)


def _amounts(rows: Rows) -> Counter[tuple[int, str]]:
    amounts: Counter[tuple[int, str]] = Counter()
    for call in calls_of(rows):
        amounts[call.nbytes, call.dtype] += call.count
    return amounts


def _phases(between: Between, *, is_added: bool) -> Iterator[Step]:
    less, more = between.sides(is_added=is_added)
    without, having = ({key.phase for key in state.row_keys()} for state in (less, more))
    for phases in _PARTS:
        # Recomputation is optional, but the other phases must exist.
        is_there = {phases[0], phases[-1]} <= {*having, Phase.RECOMPUTE}
        if not (without.isdisjoint(phases) and is_there):
            continue
        keys = between.select(partial(_rows_of_phases, phases), is_added=is_added)
        yield from _phase(between, phases, keys, is_added=is_added)
        # If ranks compute the loss together, they communicate outside all modules.
        loss = [
            key
            for key in keys_that_differ(less[None], more[None])
            if key.phase is Phase.OUTSIDE and not less[None].row(key)
        ]
        if loss and Phase.BACKWARD in phases:
            keys[None] = [*keys.get(None, ()), *loss]
            yield from _phase(between, (*phases, Phase.OUTSIDE), keys, is_added=is_added)


def _rows_of_phases(phases: Container[Phase], less: Content, more: Content) -> Iterator[RowKey]:
    for key in keys_that_differ(less, more):
        # If a unit stays unsharded after forward and no backward reshards it, the next forward does
        # not gather it again.
        is_for_backward = key.phase is Phase.FORWARD and (
            key.subject == "reshard"
            or (more.stays_unsharded and role_of(more.row(key) or less.row(key)) == Role.PARAMETERS)
        )
        if key.phase in phases or (is_for_backward and Phase.BACKWARD in phases):
            yield key


def _phase(
    between: Between,
    phases: tuple[Phase, ...],
    keys: Mapping[Owner, Iterable[RowKey]],
    *,
    is_added: bool,
) -> Iterator[Step]:
    old, new = between.origin[None], between.target[None]
    # If no gradients are reduced any more, do not also report that their norms are gone.
    was_reduced, is_reduced = (
        any(content.reductions for content in state.values())
        for state in (between.origin, between.target)
    )
    has_norms = any(NORM in key.what for owner_keys in keys.values() for key in owner_keys)
    yield from replaced(
        between,
        "phase",
        keys,
        is_added=is_added,
        phases=phases,
        has_norms=has_norms and (is_reduced or not was_reduced),
        is_elsewhere=any(
            key.subject == "redistribution"
            and key.phase is Phase.OUTSIDE
            and count_of(rows) > count_of(old.row(key))
            for key, rows in new.rows.items()
        ),
    )


def _redistributed(between: Between) -> Iterator[Step]:
    key_groups: defaultdict[tuple[Phase, str, bool], dict[Owner, list[RowKey]]] = defaultdict(dict)
    for group in between.differences:
        for key, before, after in group.rows:
            if key.subject != "redistribution" or (before and after):
                continue
            sent = {
                sent_key: count_of(now) - count_of(was)
                for sent_key, was, now in group.rows
                if sent_key.subject == "collective" and sent_key.phase is key.phase
            }
            is_whole = "Shard" not in key.what.partition("->")[2]
            target = between.target[group.owners[0]]
            if after and is_whole and _is_by_hand(key.phase, map(target.row, sent)):
                continue  # see `_gathered_in_full`
            # A redistribution issues one collective, so both counts must change by the same number.
            if [*sent.values()] == [count_of(after) - count_of(before)]:
                chosen = [key, *sent]
                keys = key_groups[key.phase, key.what, bool(after)]
                keys.update(dict.fromkeys(group.owners, chosen))
    for (phase, change, is_added), keys in key_groups.items():
        yield from replaced(
            between, "redistributed", keys, is_added=is_added, phase=phase, change=change
        )


def _gathered_in_full(between: Between) -> Iterator[Step]:
    by_role: defaultdict[tuple[Phase, str], dict[Owner, list[RowKey]]] = defaultdict(dict)
    for phase in (Phase.OUTSIDE, Phase.FORWARD):
        for owner, keys in between.select(partial(_gathers_in_full, phase)).items():
            new = between.target[owner]
            sent = [new.row(key) for key in keys if key.subject == "collective"]
            if _is_by_hand(phase, sent):
                roles = _roles(sent)
                by_role[phase, "" if "" in roles else " and ".join(sorted(roles))][owner] = keys
    for (phase, role_names), rows in by_role.items():
        yield from replaced(between, "gathered in full", rows, phase=phase, roles=role_names)


def _is_by_hand(phase: Phase, sent: Iterable[Rows]) -> bool:
    return phase is Phase.OUTSIDE or (phase is Phase.FORWARD and _roles(sent) == {Role.PARAMETERS})


def _roles(sent: Iterable[Rows]) -> set[str]:
    return {call.role for rows in sent for call in calls_of(rows)}


def _gathers_in_full(phase: Phase, old: Content, new: Content) -> list[RowKey]:
    keys = [
        key
        for key in keys_that_differ(old, new)
        if key.phase is phase
        and (key.what in {"all_gather", "all_reduce"} or key.subject == "redistribution")
    ]
    moves = [key for key in keys if key.subject == "redistribution"]
    is_whole = (
        moves
        and len(keys) > len(moves)
        and all("Shard" not in key.what.partition("->")[2] for key in moves)
        and all(is_part(old.row(key), new.row(key)) for key in keys)
    )
    return keys if is_whole else []
