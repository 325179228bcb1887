"""Propose steps about phases, axes and activations; see Note [Evidence of a proposal]."""

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
"""DTensor's placement of a norm before it is reduced (read in torch 2.7 to 2.15)."""


def propose_of_passes(between: Between) -> Iterator[Step]:
    """Propose steps about phases, axes and activations."""
    for propose in (_axes, _recomputed, _sequence_parallel, _phases):
        for came in (True, False):
            yield from propose(between, came=came)
    yield from _redistributed(between)
    yield from _gathered_in_full(between)


def _axes(between: Between, *, came: bool) -> Iterator[Step]:
    old, new = ({axis.name for axis in axes} for axes in between.axes)
    for axis in sorted(new - old if came else old - new):
        keys = between.select_rows(partial(_is_over, axis))
        yield from replaced(between, "axis", keys, came=came, axis=axis)


def _is_over(axis: str, key: RowKey, before: Rows, after: Rows) -> bool:
    is_move = key.subject == "redistribution" and not (before and after)
    return key.axis == axis or is_move


def _recomputed(between: Between, *, came: bool) -> Iterator[Step]:
    less, more = between.sides(came=came)
    keys = between.select_rows(lambda key, *_: key.phase is Phase.RECOMPUTE)
    rows = [
        (less[at].row(key), more[at].row(key), more[at].row(key._replace(phase=Phase.FORWARD)))
        for at, held in keys.items()
        for key in held
    ]
    # It repeats what forward sends, of as many bytes.
    if any(
        was or not forward or nbytes_of(again) > nbytes_of(forward) for was, again, forward in rows
    ):
        return
    gathers = [more[at].gathers for at in keys]
    # What moved there from backward is not repeated.
    moved = {
        at: [key for key in less[at].unit_rows if key.phase is Phase.BACKWARD]
        for at in keys
        if total_count(less[at].gathers[Phase.BACKWARD])
        == total_count(more[at].gathers[Phase.RECOMPUTE])
        > total_count(more[at].gathers[Phase.BACKWARD])
    }
    if moved and moved.keys() != keys.keys():
        return
    keys = {at: [*held, *moved.get(at, ())] for at, held in keys.items()}
    yield from replaced(
        between,
        "recomputed",
        keys,
        came=came,
        is_moved=bool(moved),
        gathers_again=any(at[Phase.RECOMPUTE] and at[Phase.BACKWARD] for at in gathers),
        is_partly=any(key.phase is Phase.RECOMPUTE for key in less.row_keys()),
    )


def _sequence_parallel(between: Between, *, came: bool) -> Iterator[Step]:
    off, on = between.sides(came=came)
    scattered = [
        key.axis
        for owner in between.changed
        for key, rows in off[owner].rows.items()
        if key == sum_in_forward("all_reduce", key.axis)
        and _amounts(rows) == _amounts(on[owner].row(key._replace(what="reduce_scatter")))
    ]
    for axis in dict.fromkeys(scattered):
        if sum_in_forward("all_reduce", axis) not in on.row_keys():
            yield from _scattered(between, axis, came=came)


def _scattered(between: Between, axis: str, *, came: bool) -> Iterator[Step]:
    off, _ = between.sides(came=came)
    yield from replaced(
        between,
        "sequence parallel",
        between.select_rows(lambda key, *_: key.axis == axis or key.subject == "redistribution"),
        came=came,
        axis=axis,
        is_whole=sum_in_forward("reduce_scatter", axis) not in off.row_keys(),
    )


def sum_in_forward(kind: str, axis: str) -> RowKey:
    """The key of sums over an axis in forward."""
    return RowKey("collective", Phase.FORWARD, kind, axis)


def _amounts(rows: Rows) -> Counter[tuple[int, str]]:
    found: Counter[tuple[int, str]] = Counter()
    for call in calls_of(rows):
        found[call.nbytes, call.dtype] += call.count
    return found


_PARTS: Final = (
    (Phase.BACKWARD, Phase.RECOMPUTE),
    (Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER),
    (Phase.OPTIMIZER,),
)


def _phases(between: Between, *, came: bool) -> Iterator[Step]:
    less, more = between.sides(came=came)
    without, having = ({key.phase for key in state.row_keys()} for state in (less, more))
    for phases in _PARTS:
        # Recomputation alone need not be there.
        is_there = {phases[0], phases[-1]} <= {*having, Phase.RECOMPUTE}
        if not (without.isdisjoint(phases) and is_there):
            continue
        keys = between.select(partial(_rows_of_phases, phases), came=came)
        yield from _phase(between, phases, keys, came=came)
        # A loss that is spread over ranks is outside of every module.
        loss = [
            key
            for key in keys_that_differ(less[None], more[None])
            if key.phase is Phase.OUTSIDE and not less[None].row(key)
        ]
        if loss and Phase.BACKWARD in phases:
            keys[None] = [*keys.get(None, ()), *loss]
            yield from _phase(between, (*phases, Phase.OUTSIDE), keys, came=came)


def _rows_of_phases(phases: Container[Phase], less: Content, more: Content) -> Iterator[RowKey]:
    for key in keys_that_differ(less, more):
        # Without backward nothing is freed after it: what is kept is there all the time.
        is_for_it = key.phase is Phase.FORWARD and (
            key.subject == "reshard"
            or (more.is_kept and role_of(more.row(key) or less.row(key)) == Role.PARAMETERS)
        )
        if key.phase in phases or (is_for_it and Phase.BACKWARD in phases):
            yield key


def _phase(
    between: Between,
    phases: tuple[Phase, ...],
    keys: Mapping[Owner, Iterable[RowKey]],
    *,
    came: bool,
) -> Iterator[Step]:
    old, new = between.origin[None], between.target[None]
    # If nothing reduces gradients any more, lost norms follow from that.
    was_reduced, is_reduced = (
        any(content.reductions for content in state.values())
        for state in (between.origin, between.target)
    )
    has_norms = any(NORM in key.what for held in keys.values() for key in held)
    yield from replaced(
        between,
        "phase",
        keys,
        came=came,
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
    found: defaultdict[tuple[Phase, str, bool], dict[Owner, list[RowKey]]] = defaultdict(dict)
    for alike in between.alike:
        for key, before, after in alike.rows:
            if key.subject != "redistribution" or (before and after):
                continue
            sent = {
                other: count_of(now) - count_of(was)
                for other, was, now in alike.rows
                if other.subject == "collective" and other.phase is key.phase
            }
            is_whole = "Shard" not in key.what.partition("->")[2]
            target = between.target[alike.owners[0]]
            if after and is_whole and _is_by_hand(key.phase, map(target.row, sent)):
                continue  # see `_gathered_in_full`
            # Each redistribution issues one collective, which came or went with it.
            if [*sent.values()] == [count_of(after) - count_of(before)]:
                chosen = [key, *sent]
                keys = found[key.phase, key.what, bool(after)]
                keys.update(dict.fromkeys(alike.owners, chosen))
    for (phase, change, came), keys in found.items():
        yield from replaced(between, "redistributed", keys, came=came, phase=phase, change=change)


def _gathered_in_full(between: Between) -> Iterator[Step]:
    found: defaultdict[tuple[Phase, str], dict[Owner, list[RowKey]]] = defaultdict(dict)
    for phase in (Phase.OUTSIDE, Phase.FORWARD):
        for owner, keys in between.select(partial(_gathers_in_full, phase)).items():
            new = between.target[owner]
            sent = [new.row(key) for key in keys if key.subject == "collective"]
            if _is_by_hand(phase, sent):
                roles = _roles(sent)
                found[phase, "" if "" in roles else " and ".join(sorted(roles))][owner] = keys
    for (phase, what), rows in found.items():
        yield from replaced(between, "gathered in full", rows, phase=phase, roles=what)


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
