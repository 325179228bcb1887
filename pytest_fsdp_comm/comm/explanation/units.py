"""Propose steps about FSDP units: which exist, and how they are gathered and reduced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.gradients import (
    propose_buckets,
    propose_reductions,
)
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Owner,
    Rows,
    State,
    calls_of,
    forward_gathers,
    is_of_parameters,
    is_part,
    largest,
    sizes_of,
    total_count,
)
from pytest_fsdp_comm.comm.explanation.steps import Replaced, Step, replaced
from pytest_fsdp_comm.comm.profile import RowKey

# Note [Evidence of a proposal]: a step here writes the rows of the new profile, so it always leads
# there. What its sentence says of these rows (forward gathers that did not change, bytes that add
# up, units beside it that are as before) is therefore checked where the step is proposed, and
# nowhere again.


def propose_of_units(between: Between) -> Iterator[Step]:
    """Propose steps about how some units are gathered and reduced."""
    yield from _unit_sizes(between)
    yield from _gathered_elsewhere(between)
    yield from propose_reductions(between)
    yield from _regrouped(between)
    yield from _called(between)
    yield from propose_buckets(between)
    for propose in (_freed, _in_backward, _sharded, _split_off, _units):
        for came in (False, True):
            yield from propose(between, came=came)


def _unit_sizes(between: Between) -> Iterator[Step]:
    rows: dict[Owner, Mapping[RowKey, Rows]] = {}
    for alike in between.alike:
        resized = _resized(alike.old, alike.new)
        rows.update(dict.fromkeys(alike.owners if resized else (), resized))
    if not rows:
        return
    nbytes = {
        owner: (between.state[owner].gathered_nbytes, between.target[owner].gathered_nbytes)
        for owner in rows
    }
    # Not what the target has: how often units are gathered may have changed as well.
    was = {owner: between.state[owner].rows for owner in rows}
    yield Replaced(kind="unit sizes", rows=rows, was=was, facts={"sizes": nbytes})


def _resized(old: Content, new: Content) -> dict[RowKey, Rows]:
    """A unit's rows with their new sizes; empty if not all on an axis have one ratio."""
    gathers = old.gathers[Phase.FORWARD]
    if not gathers or old.rows.keys() != new.rows.keys():
        return {}
    ratios: dict[str, Fraction] = {}
    for key, rows in old.rows.items():
        if all(is_of_parameters(key, call) for call in calls_of(rows)):
            sizes = sizes_of(rows, new.row(key))
            if not (sizes and all(sizes)):
                return {}
            ratio = Fraction(sizes[1], sizes[0])
            if ratios.setdefault(key.axis, ratio) != ratio:
                return {}
    if all(ratios[key.axis] == 1 for key in gathers):
        return {}

    def resized(key: RowKey, call: Calls) -> Calls:
        ratio = ratios.get(key.axis, 1) if is_of_parameters(key, call) else 1
        return replace(call, nbytes=int(call.nbytes * ratio))

    return {
        key: tuple(
            replace(row, calls=tuple(resized(key, call) for call in row.calls)) for row in rows
        )
        for key, rows in old.rows.items()
        if any(is_of_parameters(key, call) for call in calls_of(rows))
    }


def _freed(between: Between, *, came: bool) -> Iterator[Step]:

    def rows(less: Content, more: Content) -> list[RowKey]:
        is_changed = (
            more.gathers[Phase.BACKWARD]
            and not less.gathers[Phase.BACKWARD]
            and more.is_freed
            and not less.is_freed
            and _gathers_no_more(less, more)
        )
        return _rows_but_reductions(less, more) if is_changed else []

    yield from replaced(between, "freed", between.select(rows, came=came), came=came)


def _gathered_elsewhere(between: Between) -> Iterator[Step]:

    def rows(old: Content, new: Content) -> list[RowKey]:
        before, after = ({key.axis for key in one.gathers[Phase.BACKWARD]} for one in (old, new))
        is_moved = before and after and before != after
        is_same = is_moved and _gathers_no_more(old, new) and _gathers_no_more(new, old)
        return _rows_but_reductions(old, new) if is_same else []

    yield from replaced(between, "gathered elsewhere", between.select(rows))


def _rows_but_reductions(*contents: Content) -> list[RowKey]:
    return [key for one in contents for key in one.unit_rows if key not in one.reductions]


def _gathers_no_more(one: Content, other: Content) -> bool:
    """Whether a unit gathers the same in forward, and not more often."""
    # Not as often: what is kept serves the forwards of several micro-batches.
    less, more = one.gathers[Phase.FORWARD], other.gathers[Phase.FORWARD]
    return bool(less) and all(is_part(rows, more.get(key, ())) for key, rows in less.items())


def _in_backward(between: Between, *, came: bool) -> Iterator[Step]:

    def rows(without: Content, having: Content) -> list[RowKey]:
        forward = having.gathers[Phase.FORWARD]
        is_changed = (
            forward
            and forward == without.gathers[Phase.FORWARD]
            and having.is_freed
            and without.is_freed
            and having.gathers[Phase.BACKWARD]
            and not without.gathers[Phase.BACKWARD]
            and without.reductions in ({}, having.reductions)
        )
        return [*having.unit_rows, *without.unit_rows] if is_changed else []

    keys = between.select(rows, came=came)
    less, more = between.sides(came=came)
    reductions = {(bool(less[at].reductions), bool(more[at].reductions)) for at in keys}
    # A forward that is run again gathers for the backward that follows.
    is_again = any(
        state[at].gathers[Phase.RECOMPUTE]
        for state in (between.origin, between.target)
        for at in keys
    )
    if len(reductions) != 1 or is_again:
        return
    was_reduced, is_reduced = reductions.pop()
    yield from replaced(
        between,
        "gathered in backward" if was_reduced or not is_reduced else "used in backward",
        keys,
        came=came,
        is_reduced=was_reduced,
    )


def _sharded(between: Between, *, came: bool) -> Iterator[Step]:
    # FSDP1 all-reduces what it does not shard, over a group of one rank too.
    alone = {axis.name for axis in between.axes[not came] if axis.size == 1}

    def rows(replicated: Content, sharded: Content) -> list[RowKey]:
        is_alone = alone.issuperset(key.axis for key in replicated.reductions)
        is_changed = _is_sharding(replicated, sharded) and not is_alone
        return [*sharded.unit_rows, *replicated.unit_rows] if is_changed else []

    yield from replaced(between, "sharded", between.select(rows, came=came), came=came)


def _is_sharding(replicated: Content, sharded: Content) -> bool:
    was, now = sharded.reductions, replicated.reductions
    return (
        bool(sharded.gathers[Phase.FORWARD])
        and not replicated.gathers[Phase.FORWARD]
        and {key.what for key in was} == {"reduce_scatter"}
        and {key.what for key in now} == {"all_reduce"}
        and total_count(was) == total_count(now)
    )


# Note [Where bytes went]: a unit that only one side has may have been split off the unit above,
# may be one of several that hold the same parameters in other groups, or be new. Bytes tell them
# apart: `_split_off` and `_regrouped` propose only where they add up, in gathers and in reductions,
# and `_units` only where no other unit has less for it. Where two of them are true, what knows
# where the bytes went is told: the others have `more_cost`.


def _split_off(between: Between, *, came: bool) -> Iterator[Step]:
    large, small = between.sides(came=came)
    # Units that only one side has, by the unit above that the other side has.
    children: defaultdict[str, list[str]] = defaultdict(list)
    for owner in between.owners:
        if owner and small[owner].gathers[Phase.FORWARD]:
            parent = _unit_above(owner, large)
            if parent is not None and not large[owner].gathers[Phase.FORWARD]:
                children[parent].append(owner)
    units = {
        parent: modules
        for parent, modules in children.items()
        if _have_same_bytes([large[parent]], [small[owner] for owner in (parent, *modules)])
    }
    modules = tuple(chain.from_iterable(units.values()))
    # Not those that are kept after forward: they are gathered once for all micro-batches.
    others = max(
        (
            forward_gathers(content)
            for state in (between.origin, between.target)
            for owner, content in state.items()
            if owner not in modules and not content.is_kept
        ),
        default=0,
    )
    often = max((forward_gathers(between.target[module]) for module in modules), default=0)
    is_called = came and 0 < others < often

    yield from replaced(
        between,
        "split off",
        {owner: _unit_keys(between, owner) for at in units for owner in (at, *units[at])},
        came=came,
        modules=modules,
        parents=tuple(units),
        times=often if is_called else 0,
    )


def _unit_keys(between: Between, owner: Owner) -> list[RowKey]:
    return [*between.state[owner].unit_rows, *between.target[owner].unit_rows]


def _unit_above(owner: str, state: State) -> str | None:
    name = owner.partition("+")[0]
    while name:
        name = name.rpartition(".")[0]
        if state[name].gathers[Phase.FORWARD]:
            return name
    return None


def _have_same_bytes(*sides: Sequence[Content]) -> bool:
    """Whether units have as many bytes together, in one gather and one reduction of each."""
    # What is left of a unit may be nothing; a unit with several sizes is not understood.
    if any(
        one.gathers[Phase.FORWARD] and not one.gathered_nbytes for side in sides for one in side
    ):
        return False
    gathered = {sum(one.gathered_nbytes for one in side) for side in sides}
    reduced = {
        sum(
            largest(rows)
            for one in side
            for key, rows in one.reductions.items()
            if key.what == "reduce_scatter"
        )
        for side in sides
    }
    return len(gathered) == len(reduced) == 1


def _regrouped(between: Between) -> Iterator[Step]:
    old, new = (
        {
            owner: state[owner].gathered_nbytes
            for owner in between.owners
            if owner is not None and state[owner].gathers[Phase.FORWARD]
        }
        for state in (between.state, between.target)
    )
    owners = [owner for owner in {**old, **new} if old.get(owner) != new.get(owner)]
    gone = [owner for owner in owners if owner in old]
    added = [owner for owner in owners if owner in new]
    if (
        not (set(gone) <= set(added) or set(added) <= set(gone))
        and _have_same_bytes(
            [between.state[owner] for owner in gone], [between.target[owner] for owner in added]
        )
        and _policies(between.state, gone) == _policies(between.target, added)
    ):
        yield from replaced(
            between,
            "regrouped",
            {owner: _unit_keys(between, owner) for owner in owners},
            gone=tuple(gone),
            added=tuple(added),
        )


def _policies(state: State, owners: Iterable[Owner]) -> set[tuple[bool, int]]:
    """Whether units but the root are kept after forward, and how often they are gathered in it."""
    return {(state[owner].is_kept, forward_gathers(state[owner])) for owner in owners if owner}


def _called(between: Between) -> Iterator[Step]:

    def rows(old: Content, new: Content) -> list[RowKey]:
        before, after = old.gathers[Phase.FORWARD], new.gathers[Phase.FORWARD]
        is_changed = (
            before.keys() == after.keys()
            and before != after
            # What is kept is gathered again only by another forward.
            and not new.is_kept
            and all(_sizes(before[key]) == _sizes(after[key]) for key in before)
        )
        return [*old.unit_rows, *new.unit_rows] if is_changed else []

    keys = between.select(rows)
    # Units beside it that are gathered as before are the evidence; what is kept always is.
    others = [
        (content.gathers[Phase.FORWARD], between.target[owner].gathers[Phase.FORWARD])
        for owner, content in between.state.items()
        if owner not in keys and content.gathers[Phase.FORWARD] and not content.is_kept
    ]
    if not others or any(was != now for was, now in others):
        return
    most = max(total_count(gathers) for gathers, _ in others)
    was, now = (
        {owner: forward_gathers(state[owner]) for owner in keys}
        for state in (between.state, between.target)
    )
    # Schedules of pipelines gather as they like.
    is_pipeline = any(key.what in {"send", "recv"} for key in between.state.row_keys())
    is_called = max(now.values(), default=0) > most and sum(now.values()) > sum(was.values())

    yield from replaced(
        between, "called", keys, times=now, others=most, is_called=is_called and not is_pipeline
    )


def _sizes(rows: Rows) -> set[int]:
    return {call.nbytes for call in calls_of(rows)}


def _units(between: Between, *, came: bool) -> Iterator[Step]:
    without, having = between.sides(came=came)
    if any(
        having[owner].gathered_nbytes < without[owner].gathered_nbytes for owner in between.changed
    ):
        return

    def rows(less: Content, more: Content) -> Iterable[RowKey]:
        is_new = more.gathers[Phase.FORWARD] and not less.unit_rows
        return more.unit_rows if is_new else ()

    keys = between.select(rows, came=came)
    # No other unit comes or goes beside them, unless `_sharded` tells of it.
    if any(
        having[owner].gathers[Phase.FORWARD] and not without[owner].gathers[Phase.FORWARD]
        for owner in between.owners
        if owner not in keys and not _is_sharding(without[owner], having[owner])
    ):
        return

    others = {owner for owner, one in without.items() if one.gathers[Phase.FORWARD]} - keys.keys()
    # They may be kept after forward now, and no longer gathered in backward.
    is_other = any(
        between.origin.get(owner, between.state[owner]).gathers[Phase.BACKWARD]
        != between.target[owner].gathers[Phase.BACKWARD]
        for owner in others
    )
    rest = ("unchanged in forward" if is_other else "unchanged") if others else ""
    is_reduced = any(having[owner].reductions for owner in keys)
    yield from replaced(between, "unit", keys, came=came, others=rest, is_reduced=is_reduced)
