"""Infers what happened to phases, to axes and to activations.

What a step rests on is checked here, as in `units`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.story.between import (
    EMPTY,
    Between,
    Rows,
    carries_parameters,
    consists_of,
    rows_written,
)
from pytest_fsdp_comm.comm.story.facts import count_of, nbytes_of
from pytest_fsdp_comm.comm.story.steps import (
    AxisCame,
    AxisGone,
    GatheredInFull,
    PhaseCame,
    PhaseGone,
    RecomputeCame,
    RecomputeGone,
    Redistributed,
    SequenceParallel,
    Step,
    is_kept,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_fsdp_comm.comm.profile import RowKey
    from pytest_fsdp_comm.comm.story.facts import Facts, Owner, State


def propose_of_phases(between: Between) -> Iterator[Step]:
    """Steps about phases, axes and activations."""
    for propose in (
        _axes,
        _recomputed,
        _sequence_parallel,
        _phases,
        _redistributed,
        _gathered_in_full,
    ):
        yield from propose(between)


def _recomputed(between: Between) -> Iterator[Step]:
    for kind, (less, more) in (
        (RecomputeCame, (between.state, between.target)),
        (RecomputeGone, (between.target, between.state)),
    ):
        rows: Rows = {}
        is_repeated = True
        for owner, key, *_ in between.pairs():
            if key.phase is not Phase.RECOMPUTE:
                continue
            content = more.get(owner)
            again = content.row(key) if content is not None else EMPTY
            held = less.get(owner)
            if (held is not None and held.row(key)) or content is None:
                is_repeated = False
                break
            # It repeats what forward sends, of as many bytes.
            forward = content.row(key._replace(phase=Phase.FORWARD))
            if nbytes_of(again) > nbytes_of(forward) or not forward:
                is_repeated = False
                break
            rows.setdefault(owner, {}).update(rows_written(between, owner, [key]))
        if rows and is_repeated:
            is_first = not any(
                key.phase is Phase.RECOMPUTE for content in less.values() for key in content.rows
            )
            yield kind(rows=rows, is_first=is_first)


def _sequence_parallel(between: Between) -> Iterator[Step]:
    for is_on, (off, on) in (
        (True, (between.state, between.target)),
        (False, (between.target, between.state)),
    ):
        scattered: Counter[str] = Counter()
        for owner in between.changed:
            less, more = off[owner], on[owner]
            for key, facts in less.rows.items():
                if key.phase is Phase.FORWARD and key.what == "all_reduce":
                    parts = more.row(key._replace(what="reduce_scatter"))
                    if _amounts(parts) == _amounts(facts) and not more.row(key):
                        scattered[key.axis] += 1
        for axis in scattered:
            if _sends_in_forward(on, "all_reduce", axis):
                continue
            rows: Rows = {}
            for owner, key, _, after in between.pairs():
                if key.axis == axis or key.subject == "redistribution":
                    rows.setdefault(owner, {})[key] = after
            is_whole = not _sends_in_forward(off, "reduce_scatter", axis)
            yield SequenceParallel(rows=rows, axis=axis, is_on=is_on, is_whole=is_whole)


def _sends_in_forward(state: State, kind: str, axis: str) -> bool:
    return any(
        key.what == kind and key.phase is Phase.FORWARD and key.axis == axis
        for content in state.values()
        for key in content.rows
    )


def _amounts(facts: Facts) -> Counter[tuple[int, str]]:
    found: Counter[tuple[int, str]] = Counter()
    for fact, count in facts.items():
        found[fact.nbytes, fact.dtype] += count
    return found


_PARTS: Final = (
    (Phase.BACKWARD, Phase.RECOMPUTE),
    (Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER),
    (Phase.OPTIMIZER,),
)


def _phases(between: Between) -> Iterator[Step]:
    old, new = (
        {key.phase for content in state.values() for key in content.rows}
        for state in (between.state, between.target)
    )
    for kind, (without, having), having_of in (
        (PhaseGone, (new, old), between.state),
        (PhaseCame, (old, new), between.target),
    ):
        for phases in _PARTS:
            if not without.isdisjoint(phases) or phases[0] not in having:
                continue
            if len(phases) > 1 and phases[-1] is Phase.OPTIMIZER and phases[-1] not in having:
                continue
            rows: Rows = {}
            for owner, key, before, after in between.pairs():
                # Without backward nothing is freed after it: what is kept is there all the time.
                is_for_it = key.phase is Phase.FORWARD and (
                    key.subject == "reshard"
                    or (
                        consists_of(carries_parameters, before or after)
                        and owner in having_of
                        and is_kept(having_of[owner])
                    )
                )
                if key.phase in phases or (is_for_it and Phase.BACKWARD in phases):
                    rows.setdefault(owner, {})[key] = after
            yield kind(rows=rows, phases=phases)
            # A loss that is spread over ranks is outside of every module.
            loss = {
                key: after
                for owner, key, before, after in between.pairs()
                if owner is None
                and key.phase is Phase.OUTSIDE
                and not (after if kind is PhaseGone else before)
            }
            if loss and Phase.BACKWARD in phases:
                loss.update(rows.get(None, {}))
                yield kind(rows={**rows, None: loss}, phases=(*phases, Phase.OUTSIDE))


def _axes(between: Between) -> Iterator[Step]:
    old, new = ({axis.name for axis in axes} for axes in between.axes)
    for kind, axes in ((AxisCame, new - old), (AxisGone, old - new)):
        for axis in sorted(axes):
            rows: Rows = {}
            for owner, key, before, after in between.pairs():
                is_move = key.subject == "redistribution" and not (before and after)
                if key.axis == axis or is_move:
                    rows.setdefault(owner, {})[key] = after
            if rows:
                yield kind(rows=rows, axis=axis)


def _redistributed(between: Between) -> Iterator[Step]:
    found: defaultdict[tuple[Phase, str, bool], Rows] = defaultdict(dict)
    for owner, key, before, after in between.pairs():
        if key.subject != "redistribution" or (before and after):
            continue
        is_whole = "Shard" not in key.what.partition("->")[2]
        if owner is None and key.phase is Phase.OUTSIDE and is_whole and after:
            continue  # see `_gathered_in_full`
        held = after or before
        sent = rows_written(between, owner, _rows_beside(between, owner, key.phase))
        # Each redistribution issues one collective, which came or went with it.
        if len(sent) == 1:
            ((other, now),) = sent.items()
            old = between.state.get(owner)
            was = old.row(other) if old is not None else EMPTY
            more = count_of(now) - count_of(was)
            if more == (count_of(held) if after else -count_of(held)):
                came = bool(after)
                found[key.phase, key.what, came][owner] = {key: after, other: now}
    for (phase, change, came), rows in found.items():
        yield Redistributed(rows=rows, phase=phase, change=change, came=came)


def _rows_beside(between: Between, owner: Owner, phase: Phase) -> set[RowKey]:
    return {
        key
        for content in (between.state.get(owner), between.target.get(owner))
        for key in (content.rows if content is not None else ())
        if key.subject == "collective" and key.phase is phase
    }


def _gathered_in_full(between: Between) -> Iterator[Step]:
    """DTensors that are gathered for no module outside of the step."""
    old, new = between.state.get(None), between.target.get(None)
    if new is None:
        return
    keys = {
        key
        for key, facts in new.rows.items()
        if key.phase is Phase.OUTSIDE
        and facts != (old.row(key) if old is not None else EMPTY)
        and (key.what in {"all_gather", "all_reduce"} or key.subject == "redistribution")
    }
    moves = [key for key in keys if key.subject == "redistribution"]
    if (
        moves
        and len(keys) > len(moves)
        and all("Shard" not in key.what.partition("->")[2] for key in moves)
        and all(old is None or _is_less(old.row(key), new.row(key)) for key in keys)
    ):
        yield GatheredInFull(rows={None: {key: new.row(key) for key in keys}})


def _is_less(before: Facts, after: Facts) -> bool:
    return all(after.get(fact, 0) >= count for fact, count in before.items())
