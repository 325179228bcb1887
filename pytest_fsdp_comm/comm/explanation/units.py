"""Propose steps that add, remove or regroup FSDP units, or change their gathers or reductions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.gradients import propose_buckets, propose_reductions
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

# Note [Evidence of a proposal]: a `Replaced` step copies its rows from the new profile, so the rows
# are right even if the sentence that users read is wrong. The function that proposes the step must
# check everything that the sentence says (unchanged forward gathers, equal total bytes, unchanged
# other units), because no later code checks it.


def propose_of_units(between: Between) -> Iterator[Step]:
    """Propose changes in how some units are gathered and reduced."""
    yield from _unit_sizes(between)
    yield from _gathered_elsewhere(between)
    yield from propose_reductions(between)
    yield from _regrouped(between)
    yield from _called(between)
    yield from propose_buckets(between)
    for propose in (_freed, _in_backward, _sharded, _split_off, _units):
        for is_added in (False, True):
            yield from propose(between, is_added=is_added)


def _unit_sizes(between: Between) -> Iterator[Step]:
    rows: dict[Owner, Mapping[RowKey, Rows]] = {}
    for group in between.differences:
        resized = _resized(group.old, group.new)
        rows.update(dict.fromkeys(group.owners if resized else (), resized))
    if not rows:
        return
    nbytes = {
        owner: (between.state[owner].gathered_nbytes, between.target[owner].gathered_nbytes)
        for owner in rows
    }
    # Change only the sizes, because rows copied from the target could also have new counts.
    was = {owner: between.state[owner].rows for owner in rows}
    yield Replaced(kind="unit sizes", rows=rows, was=was, facts={"sizes": nbytes})


def _resized(old: Content, new: Content) -> dict[RowKey, Rows]:
    """Return a unit's rows with new sizes; empty if the sizes on an axis have no common ratio."""
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


def _freed(between: Between, *, is_added: bool) -> Iterator[Step]:
    def rows(less: Content, more: Content) -> list[RowKey]:
        is_changed = (
            more.gathers[Phase.BACKWARD]
            and not less.gathers[Phase.BACKWARD]
            and more.is_resharded
            and not less.is_resharded
            and _gathers_no_more(less, more)
        )
        return _rows_but_reductions(less, more) if is_changed else []

    keys = between.select(rows, is_added=is_added)
    yield from replaced(between, "freed", keys, is_added=is_added)


def _gathered_elsewhere(between: Between) -> Iterator[Step]:
    def rows(old: Content, new: Content) -> list[RowKey]:
        before, after = ({key.axis for key in side.gathers[Phase.BACKWARD]} for side in (old, new))
        is_moved = before and after and before != after
        is_same = is_moved and _gathers_no_more(old, new) and _gathers_no_more(new, old)
        return _rows_but_reductions(old, new) if is_same else []

    yield from replaced(between, "gathered elsewhere", between.select(rows))


def _rows_but_reductions(*sides: Content) -> list[RowKey]:
    return [key for content in sides for key in content.unit_rows if key not in content.reductions]


def _gathers_no_more(first: Content, second: Content) -> bool:
    """Whether `first` has forward gathers, and `second` has all of them at least as often."""
    # Counts may differ: a unit that stays unsharded is gathered only once for all micro-batches.
    less, more = first.gathers[Phase.FORWARD], second.gathers[Phase.FORWARD]
    return bool(less) and all(is_part(rows, more.get(key, ())) for key, rows in less.items())


def _in_backward(between: Between, *, is_added: bool) -> Iterator[Step]:
    def rows(without: Content, having: Content) -> list[RowKey]:
        forward = having.gathers[Phase.FORWARD]
        is_changed = (
            forward
            and forward == without.gathers[Phase.FORWARD]
            and having.is_resharded
            and without.is_resharded
            and having.gathers[Phase.BACKWARD]
            and not without.gathers[Phase.BACKWARD]
            and without.reductions in ({}, having.reductions)
        )
        return [*having.unit_rows, *without.unit_rows] if is_changed else []

    keys = between.select(rows, is_added=is_added)
    less, more = between.sides(is_added=is_added)
    reductions = {(bool(less[at].reductions), bool(more[at].reductions)) for at in keys}
    # If recomputing the forward gathers a unit, backward need not gather it again.
    sides = between.origin, between.target
    is_again = any(side[at].gathers[Phase.RECOMPUTE] for side in sides for at in keys)
    if len(reductions) != 1 or is_again:
        return
    was_reduced, is_reduced = reductions.pop()
    yield from replaced(
        between,
        "gathered in backward" if was_reduced or not is_reduced else "used in backward",
        keys,
        is_added=is_added,
        is_reduced=was_reduced,
    )


def _sharded(between: Between, *, is_added: bool) -> Iterator[Step]:
    # FSDP1 all-reduces unsharded gradients even over a group of one rank.
    single_rank_axes = {axis.name for axis in between.axes[not is_added] if axis.size == 1}

    def rows(replicated: Content, sharded: Content) -> list[RowKey]:
        is_alone = single_rank_axes.issuperset(key.axis for key in replicated.reductions)
        is_changed = _is_sharding(replicated, sharded) and not is_alone
        return [*sharded.unit_rows, *replicated.unit_rows] if is_changed else []

    keys = between.select(rows, is_added=is_added)
    yield from replaced(between, "sharded", keys, is_added=is_added)


def _is_sharding(replicated: Content, sharded: Content) -> bool:
    was, now = sharded.reductions, replicated.reductions
    return (
        bool(sharded.gathers[Phase.FORWARD])
        and not replicated.gathers[Phase.FORWARD]
        and {key.what for key in was} == {"reduce_scatter"}
        and {key.what for key in now} == {"all_reduce"}
        and total_count(was) == total_count(now)
    )


# If only one side has a unit, it was split off from its parent, was regrouped with other units, or
# is new. Bytes tell these cases apart: `_split_off` and `_regrouped` require that gathers and
# reductions have equal total bytes on both sides; `_units` requires that no other unit lost bytes.
# If several cases apply, `Replaced.description_cost` makes the search prefer `_split_off`.
def _split_off(between: Between, *, is_added: bool) -> Iterator[Step]:
    large, small = between.sides(is_added=is_added)
    # Modules that are units only in `small`, keyed by the closest unit above them in `large`.
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
    # Ignore units that stay unsharded, because they are gathered only once for all micro-batches.
    other_count = max(
        (
            forward_gathers(content)
            for state in (between.origin, between.target)
            for owner, content in state.items()
            if owner not in modules and not content.stays_unsharded
        ),
        default=0,
    )
    often = max((forward_gathers(between.target[module]) for module in modules), default=0)
    is_called = is_added and 0 < other_count < often
    yield from replaced(
        between,
        "split off",
        {owner: _unit_keys(between, owner) for at in units for owner in (at, *units[at])},
        is_added=is_added,
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
    """Whether all sides have the same total bytes if each unit is gathered and reduced once."""
    # Units may have no gathers, but gathers of several sizes in one unit cannot be compared.
    if any(unit.gathers[Phase.FORWARD] and not unit.gathered_nbytes for unit in chain(*sides)):
        return False
    gathered = {sum(unit.gathered_nbytes for unit in side) for side in sides}
    reduced = {
        sum(
            largest(rows)
            for unit in side
            for key, rows in unit.reductions.items()
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
    removed = [owner for owner in owners if owner in old]
    added = [owner for owner in owners if owner in new]
    if (
        not (set(removed) <= set(added) or set(added) <= set(removed))
        and _have_same_bytes(
            [between.state[owner] for owner in removed], [between.target[owner] for owner in added]
        )
        and _policies(between.state, removed) == _policies(between.target, added)
    ):
        yield from replaced(
            between,
            "regrouped",
            {owner: _unit_keys(between, owner) for owner in owners},
            removed=tuple(removed),
            added=tuple(added),
        )


def _policies(state: State, units: Iterable[Owner]) -> set[tuple[bool, int]]:
    """Return the pairs (stays unsharded, number of forward gathers) of all units but the root."""
    return {(state[unit].stays_unsharded, forward_gathers(state[unit])) for unit in units if unit}


def _called(between: Between) -> Iterator[Step]:
    def rows(old: Content, new: Content) -> list[RowKey]:
        before, after = old.gathers[Phase.FORWARD], new.gathers[Phase.FORWARD]
        is_changed = (
            before.keys() == after.keys()
            and before != after
            # A unit that stays unsharded is gathered only once, however often it is called.
            and not new.stays_unsharded
            and all(_sizes(before[key]) == _sizes(after[key]) for key in before)
        )
        return [*old.unit_rows, *new.unit_rows] if is_changed else []

    keys = between.select(rows)
    # All other units must have unchanged gathers, except units that stay unsharded.
    other_units = [
        (content.gathers[Phase.FORWARD], between.target[owner].gathers[Phase.FORWARD])
        for owner, content in between.state.items()
        if owner not in keys and content.gathers[Phase.FORWARD] and not content.stays_unsharded
    ]
    if not other_units or any(was != now for was, now in other_units):
        return
    most = max(total_count(gathers) for gathers, _ in other_units)
    was, now = (
        {owner: forward_gathers(state[owner]) for owner in keys}
        for state in (between.state, between.target)
    )
    # With pipeline parallelism, gathers depend on the schedule, not on how often a unit is called.
    is_called = all(key.what not in {"send", "recv"} for key in between.state.row_keys())
    is_called &= max(now.values(), default=0) > most and sum(now.values()) > sum(was.values())
    yield from replaced(between, "called", keys, times=now, other_units=most, is_called=is_called)


def _sizes(rows: Rows) -> set[int]:
    return {call.nbytes for call in calls_of(rows)}


def _units(between: Between, *, is_added: bool) -> Iterator[Step]:
    without, having = between.sides(is_added=is_added)
    if any(having[at].gathered_nbytes < without[at].gathered_nbytes for at in between.changed):
        return

    def rows(less: Content, more: Content) -> Iterable[RowKey]:
        is_new = more.gathers[Phase.FORWARD] and not less.unit_rows
        return more.unit_rows if is_new else ()

    keys = between.select(rows, is_added=is_added)
    # No other unit may be added or removed, unless `_sharded` reports it.
    if any(
        having[owner].gathers[Phase.FORWARD] and not without[owner].gathers[Phase.FORWARD]
        for owner in between.owners
        if owner not in keys and not _is_sharding(without[owner], having[owner])
    ):
        return

    other_units = {at for at, unit in without.items() if unit.gathers[Phase.FORWARD]} - keys.keys()
    # Other units may be gathered differently in backward, if they now stay unsharded.
    is_regathered = any(
        between.origin.get(owner, between.state[owner]).gathers[Phase.BACKWARD]
        != between.target[owner].gathers[Phase.BACKWARD]
        for owner in other_units
    )
    unchanged = ("unchanged in forward" if is_regathered else "unchanged") if other_units else ""
    is_reduced = any(having[owner].reductions for owner in keys)
    yield from replaced(
        between, "unit", keys, is_added=is_added, other_units=unchanged, is_reduced=is_reduced
    )
