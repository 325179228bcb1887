"""What happened to phases, to axes and to activations; see Note [Evidence of a proposal]."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.between import keys_that_differ
from pytest_fsdp_comm.comm.explanation.contents import (
    calls_of,
    count_of,
    is_part,
    nbytes_of,
    role_of,
)
from pytest_fsdp_comm.comm.profile import RowKey
from pytest_fsdp_comm.text.fqn import name_owners

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from pytest_fsdp_comm.comm.explanation.between import Between
    from pytest_fsdp_comm.comm.explanation.contents import Content, Owner, Rows
    from pytest_fsdp_comm.comm.explanation.steps import Replaced, Step


# Note [Claims of all]: a step that says "over tp" or "in backward" speaks of every module, those
# that nothing of it is written for too. Such steps claim their axis or phase everywhere
# (`is_claim_of_all`), and the redistributions that send over an axis with it, so that one module
# in which it is otherwise refutes them.


def propose_of_passes(between: Between) -> Iterator[Step]:
    """Steps about phases, axes and activations."""
    for propose in (_axes, _recomputed, _sequence_parallel, _phases):
        for came in (True, False):
            yield from propose(between, came=came)
    yield from _redistributed(between)
    yield from _gathered_in_full(between)


def _axes(between: Between, *, came: bool) -> Iterator[Step]:
    """Something is sent over an axis that was not there, such as that of tensor parallelism."""
    old, new = ({axis.name for axis in axes} for axes in between.axes)
    for axis in sorted(new - old if came else old - new):
        yield from _axis(between, axis, came=came)


def _axis(between: Between, axis: str, *, came: bool) -> Iterator[Step]:
    def is_meant(key: RowKey, before: Rows, after: Rows) -> bool:
        is_move = key.subject == "redistribution" and not (before and after)
        return key.axis == axis or is_move

    def sentence(step: Replaced) -> str:
        if not came:
            return f"nothing is sent over {axis} any more"
        what = f"sent over {axis} now, over which nothing was"
        # All of it: what was there before the step only came there by the new name of an axis.
        return replace(step, was={}).with_calls(what, lambda key, _: key.axis == axis)

    yield from between.replaced(
        "axis",
        between.select_rows(is_meant),
        came=came,
        claim=lambda key, _: key.axis == axis or key.subject == "redistribution",
        is_claim_of_all=True,
        sentence=sentence,
    )


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
    if came and any(at[Phase.RECOMPUTE] and at[Phase.BACKWARD] for at in gathers):
        cause = (
            "recomputation gathers what backward gathers anyway: checkpoint with "
            "use_reentrant=True does, under FSDP1 and where set_modules_to_forward_prefetch is "
            "called; use_reentrant=False does not"
        )
    elif any(key.phase is Phase.RECOMPUTE for key in less.row_keys()):
        more_or_less = "more" if came else "less"
        cause = f"{more_or_less} is recomputed: other modules, or other checkpointing"
    else:
        cause = f"activation checkpointing was switched {'on' if came else 'off'}"

    def sentence(step: Replaced) -> str:
        if not came:
            return f"nothing of {step.who} is sent again by recomputation any more"
        what = f"forward collectives of {step.who} repeated by recomputation in backward"
        return f"{what}: {step.calls()}"

    yield from between.replaced(
        "recomputed",
        keys,
        came=came,
        claim=lambda key, _: key.phase is Phase.RECOMPUTE,
        is_claim_of_all=True,
        sentence=sentence,
        cause=cause,
    )


def _sequence_parallel(between: Between, *, came: bool) -> Iterator[Step]:
    """Forward's all-reduces of an axis are reduce-scatters of the same modules and bytes."""
    off, on = between.sides(came=came)
    scattered = [
        key.axis
        for owner in between.changed
        for key, rows in off[owner].rows.items()
        if key == _sum_in_forward("all_reduce", key.axis)
        and _amounts(rows) == _amounts(on[owner].row(key._replace(what="reduce_scatter")))
    ]
    for axis in dict.fromkeys(scattered):
        if _sum_in_forward("all_reduce", axis) not in on.row_keys():
            yield from _scattered(between, axis, came=came)


def _scattered(between: Between, axis: str, *, came: bool) -> Iterator[Step]:
    off, _ = between.sides(came=came)
    is_whole = _sum_in_forward("reduce_scatter", axis) not in off.row_keys()
    kinds = ("all-reduces", "reduce-scatters")
    old, new = kinds if came else kinds[::-1]

    def sentence(step: Replaced) -> str:
        became = f"forward {old} became {new} of as many bytes"
        if is_whole:
            return f"sequence parallelism over {axis} {'on' if came else 'off'}: {became}"
        sums = {_sum_in_forward(kind, axis) for kind in ("all_reduce", "reduce_scatter")}
        owners = [owner for owner, rows in step.rows.items() if not sums.isdisjoint(rows)]
        return f"{name_owners(owners)}[{axis}]: {became}"

    yield from between.replaced(
        "sequence parallel",
        between.select_rows(lambda key, *_: key.axis == axis or key.subject == "redistribution"),
        came=came,
        claim=lambda key, _: key.axis == axis or key.subject == "redistribution",
        is_claim_of_all=True,
        sentence=sentence,
    )


def _sum_in_forward(kind: str, axis: str) -> RowKey:
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
    """A part of the step is there that was not, and forward is as before."""
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
    # DTensor's placement of a norm before it is reduced (read in torch 2.6 to 2.15).
    has_norms = any("(_NormPartial" in key.what for held in keys.values() for key in held)

    def sentence(step: Replaced) -> str:
        sent = {key.phase for rows in step.rows.values() for key in rows}
        what = " and ".join(
            "the loss" if phase is Phase.OUTSIDE else phase for phase in phases if phase in sent
        )
        if not came:
            return f"nothing is sent in {what} any more, forward as before"
        return step.with_calls(
            f"{what} came, forward as before", lambda key, _: key.phase in phases
        )

    cause = "norms of gradients are computed, as clip_grad_norm_ does"
    # They may be computed of what is sent in another phase now, as of whole gradients.
    old, new = between.origin[None], between.target[None]
    is_elsewhere = any(
        key.subject == "redistribution"
        and key.phase is Phase.OUTSIDE
        and count_of(rows) > count_of(old.row(key))
        for key, rows in new.rows.items()
    )
    if not came and is_elsewhere:
        cause = "norms of gradients are no longer computed as clip_grad_norm_ does, or not at all"
    elif not came:
        is_still = "is clip_grad_norm_ still called in each step?"
        cause = f"norms of gradients are no longer computed: {is_still}"
    yield from between.replaced(
        "phase",
        keys,
        came=came,
        claim=lambda key, _: key.phase in (*phases, Phase.FORWARD),
        is_claim_of_all=True,
        sentence=sentence,
        cause=cause if has_norms else "",
        is_regression=has_norms and not came,
    )


def _redistributed(between: Between) -> Iterator[Step]:
    """DTensors of modules change placements in a phase in which they did not, and send for it."""
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
        yield from _redistribution(between, phase, change, keys, came=came)


def _redistribution(
    between: Between,
    phase: Phase,
    change: str,
    keys: Mapping[Owner, Iterable[RowKey]],
    *,
    came: bool,
) -> Iterator[Step]:
    source, _, target = change.partition("->")

    def sentence(step: Replaced) -> str:
        if not came:
            return f"{step.who} {phase}: no redistribution {source} -> {target} any more"
        return (
            f"{step.who} {phase}: redistributed {source} -> {target}, which sends "
            f"{step.sums}: {step.calls()}"
        )

    is_of_plan = came and phase is Phase.FORWARD and None not in keys
    cause = "its layouts in the plan and those before or after it no longer match"
    yield from between.replaced(
        "redistributed",
        keys,
        came=came,
        sentence=sentence,
        cause=cause if is_of_plan else "",
        is_regression=True,
    )


def _gathered_in_full(between: Between) -> Iterator[Step]:
    """DTensors are gathered whole outside of the step, or parameters once more in forward."""
    found: defaultdict[tuple[Phase, str], dict[Owner, list[RowKey]]] = defaultdict(dict)
    for phase in (Phase.OUTSIDE, Phase.FORWARD):
        for owner, keys in between.select(partial(_gathers_in_full, phase)).items():
            new = between.target[owner]
            sent = [new.row(key) for key in keys if key.subject == "collective"]
            if _is_by_hand(phase, sent):
                roles = _roles(sent)
                found[phase, "" if "" in roles else " and ".join(sorted(roles))][owner] = keys
    otherwise = {
        Phase.OUTSIDE: "a full state dict as of a checkpoint, or a DTensor that is printed or "
        "logged",
        Phase.FORWARD: "such as once for each chunk of a loss",
    }
    for (phase, what), rows in found.items():
        yield from between.replaced(
            "gathered in full",
            rows,
            sentence=partial(_sentence_of_gathers, phase, what),
            cause=f"full_tensor() or redistribute(), {otherwise[phase]}",
            is_regression=True,
        )


def _is_by_hand(phase: Phase, sent: Iterable[Rows]) -> bool:
    return phase is Phase.OUTSIDE or (phase is Phase.FORWARD and _roles(sent) == {Role.PARAMETERS})


def _roles(sent: Iterable[Rows]) -> set[str]:
    return {call.role for rows in sent for call in calls_of(rows)}


def _sentence_of_gathers(phase: Phase, roles: str, step: Replaced) -> str:
    who = f"{step.who}: {roles}" if roles else "DTensors"
    where = "in forward" if phase is Phase.FORWARD else "outside of forward and backward"
    return f"{who} gathered in full {where}: {step.calls()} more"


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
