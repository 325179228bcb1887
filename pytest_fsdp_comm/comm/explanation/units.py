"""What happened to units of FSDP, and to the gradients of DDP."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.contents import (
    NOTHING,
    calls_of,
    count_of,
    is_gather,
    is_of_parameters,
    is_of_unit,
    is_of_whole_unit,
    is_part,
    nbytes_of,
    role_of,
    sizes_of,
    total_count,
)
from pytest_fsdp_comm.comm.explanation.steps import Replaced, show_sizes
from pytest_fsdp_comm.text.fqn import name_owners

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_fsdp_comm.comm.calls import Calls
    from pytest_fsdp_comm.comm.explanation.between import Between
    from pytest_fsdp_comm.comm.explanation.contents import Content, Owner, Rows, State
    from pytest_fsdp_comm.comm.explanation.steps import Kind, Step
    from pytest_fsdp_comm.comm.profile import RowKey

# Note [Evidence of a proposal]: a step here writes the rows of the new profile, so it always leads
# there: `exactness` refutes it only by what it claims beside them. What its sentence says of these
# rows (forward gathers that did not change, bytes that add up, units beside it that are as before)
# is therefore checked where the step is proposed, and nowhere again.

_CALLED: Final = (
    "called several times in one forward, as by a loss in chunks: unshard it once around the "
    "calls, or leave it in its parent's unit"
)


def propose_of_units(between: Between) -> Iterator[Step]:
    """Steps about how some units are gathered and reduced."""
    yield from _unit_sizes(between)
    yield from _gathered_elsewhere(between)
    yield from _reduced(between)
    yield from _regrouped(between)
    yield from _called(between)
    yield from _buckets(between)
    for propose in (_freed, _in_backward, _sharded, _split_off, _units):
        for came in (False, True):
            yield from propose(between, came=came)


def _unit_sizes(between: Between) -> Iterator[Step]:
    """The parameters of some units have k times the bytes, in all that is sent of them."""
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
    yield Replaced(
        kind="unit sizes",
        writes="sizes",
        rows=rows,
        was={owner: between.state[owner].rows for owner in rows},
        claim=is_of_parameters,
        sentence=lambda _: f"other sizes of parameters: {show_sizes(nbytes)} in each gather",
    )


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
    """Units are freed after forward and gathered again in backward, for as many forward gathers."""

    def rows(less: Content, more: Content) -> list[RowKey]:
        is_changed = (
            more.gathers[Phase.BACKWARD]
            and not less.gathers[Phase.BACKWARD]
            and more.is_freed
            and not less.is_freed
            and _gathers_no_more(less, more)
        )
        return _rows_but_reductions(less, more) if is_changed else []

    if came:
        how, sign = "freed after forward, gathered again in backward", "more"
        cause = (
            "reshard_after_forward became True (FSDP1: FULL_SHARD), or the unit is no longer a "
            "root: more traffic, less memory"
        )
    else:
        how, sign = "kept gathered after forward, not gathered in backward", "less"
        cause = (
            "reshard_after_forward became False (FSDP1: SHARD_GRAD_OP), or the unit became a root: "
            "less traffic, more memory"
        )
    yield from between.replaced(
        "freed",
        between.select(rows, came=came),
        came=came,
        claim=is_of_unit,
        sentence=lambda step: f"{step.who} {how}: {step.calls(is_gather)} {sign}",
        cause=cause,
    )


def _gathered_elsewhere(between: Between) -> Iterator[Step]:
    """Units are gathered in backward over another axis: resharded to a part of the ranks."""

    def rows(old: Content, new: Content) -> list[RowKey]:
        before, after = ({key.axis for key in one.gathers[Phase.BACKWARD]} for one in (old, new))
        is_moved = before and after and before != after
        is_same = is_moved and _gathers_no_more(old, new) and _gathers_no_more(new, old)
        return _rows_but_reductions(old, new) if is_same else []

    def sentence(step: Replaced) -> str:
        axes = {key.axis for held in step.rows.values() for key, after in held.items() if after}
        return f"{step.who} gathered over {', '.join(sorted(axes - {''}))} in backward now"

    yield from between.replaced(
        "gathered elsewhere",
        between.select(rows),
        sentence=sentence,
        cause="reshard_after_forward became an int, another one, or True",
    )


def _rows_but_reductions(*contents: Content) -> list[RowKey]:
    return [key for one in contents for key in one.unit_rows if key not in one.reductions]


def _gathers_no_more(one: Content, other: Content) -> bool:
    """Whether a unit gathers the same in forward, and not more often."""
    # Not as often: what is kept serves the forwards of several micro-batches.
    less, more = one.gathers[Phase.FORWARD], other.gathers[Phase.FORWARD]
    return bool(less) and all(is_part(rows, more.get(key, ())) for key, rows in less.items())


def _in_backward(between: Between, *, came: bool) -> Iterator[Step]:
    """Units that are freed after forward are gathered in backward, and maybe reduced after it."""

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
    # Where its backward runs either way, nothing else leaves this gather out.
    cause = "set_unshard_in_backward(False)" if was_reduced else ""
    if was_reduced and came:
        cause += (
            " is no longer called on it, which saves gathering what its backward does not need, "
            "such as the weight of an embedding"
        )

    def sentence(step: Replaced) -> str:
        if was_reduced or not is_reduced:
            if not came:
                return f"{step.who} not gathered in backward any more"
            return step.with_calls(f"{step.who} gathered in backward now", is_gather)
        acts = "gathered and reduced in backward now"
        return f"{step.who} {acts if came else 'neither gathered nor reduced in backward any more'}"

    yield from between.replaced(
        "gathered in backward" if was_reduced or not is_reduced else "used in backward",
        keys,
        came=came,
        claim=is_of_whole_unit,
        sentence=sentence,
        cause=cause,
        is_regression=came,
    )


def _reduced(between: Between) -> Iterator[Step]:
    """Gradients are reduced otherwise, for as many gathers of the same units."""
    found: defaultdict[tuple[Kind, Fraction], dict[Owner, list[RowKey]]] = defaultdict(dict)
    for alike in between.alike:
        old, new = alike.old, alike.new
        is_gathered_alike = all(
            old.gathers[phase] == new.gathers[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        if NOTHING in {old, new} or not is_gathered_alike:
            continue
        changes: defaultdict[tuple[Kind, Fraction], list[RowKey]] = defaultdict(list)
        for key in {**old.reductions, **new.reductions}:
            change = _reduction_change(old, old.row(key), new.row(key))
            if change is not None:
                changes[change].append(key)
        for change, chosen in changes.items():
            found[change].update(dict.fromkeys(alike.owners, chosen))
    for (kind, ratio), keys in found.items():
        match kind:
            case "reduced times":
                yield from _reduced_times(between, ratio, keys)
            case "reduced":
                yield from _reductions(between, keys, came=bool(ratio))
            case _:
                yield from _reduced_sizes(between, kind, keys)


def _reduction_change(content: Content, before: Rows, after: Rows) -> tuple[Kind, Fraction] | None:
    """What a row of reductions does otherwise, and the ratio of counts; None if nothing known."""
    if before == after:
        return None
    if not (before and after):
        return "reduced", Fraction(0 if before else 1)
    ratio = Fraction(count_of(after), count_of(before))
    if _multiplied(before, ratio) == _multiplied(after, Fraction(1)):
        return "reduced times", ratio
    if ratio != 1:
        return None
    return "part reduced" if content.gathers[Phase.FORWARD] else "gradient sizes", ratio


def _multiplied(rows: Rows, factor: Fraction) -> list[tuple[object, Calls, Fraction]]:
    return [
        (row.ranks, replace(call, count=0), call.count * factor)
        for row in rows
        for call in row.calls
    ]


def _reduced_sizes(
    between: Between, kind: Kind, keys: Mapping[Owner, Iterable[RowKey]]
) -> Iterator[Step]:
    """As many calls have other bytes: of units another part is reduced, and with DDP all is."""
    what = "gradients of"
    if kind == "part reduced":
        what = "another part of the gradients reduced, gathers as before:"

    def sentence(step: Replaced) -> str:
        sizes = {
            owner: max(
                (_largest(step.was[owner][key]), _largest(rows))
                for key, rows in held.items()
                if key.axis
            )
            for owner, held in step.rows.items()
        }
        return f"{what} {show_sizes(sizes)} in each call"

    yield from between.replaced(
        kind, keys, writes="sizes", claim=_is_of_gradients, sentence=sentence
    )


def _is_of_gradients(_key: RowKey, call: Calls) -> bool:
    return call.role == Role.GRADIENTS


def _largest(rows: Rows) -> int:
    return max((call.nbytes for call in calls_of(rows)), default=0)


def _reduced_times(
    between: Between, times: Fraction, keys: Mapping[Owner, Iterable[RowKey]]
) -> Iterator[Step]:
    kinds = sorted({key.what for held in keys.values() for key in held if key.axis})
    # What FSDP reduces is gathered. With DDP nothing else is sent that would count the steps.
    is_sharded = all(between.state[owner].gathers[Phase.FORWARD] for owner in keys)
    steps = "" if is_sharded else f"{times} steps in place of one, or "
    call = f"set_requires_{'all_reduce' if kinds == ['all_reduce'] else 'gradient_sync'}(False)"
    switch = "enter no_sync()"
    if is_sharded and kinds == ["all_reduce"]:
        switch = f"call {call}"
    elif is_sharded:
        switch = f"call {call}, or enter no_sync() with FSDP1,"
    cause = f"{steps}reduced in each micro-batch: {switch} for all micro-batches but the last"
    # Of units beside it: with micro-batches, each of which they are gathered for.
    others = [
        content
        for owner, content in between.state.items()
        if owner not in keys
        and content.reductions
        and content.reductions == between.target[owner].reductions
    ]
    if is_sharded and others and all(_forward_gathers(content) == 1 for content in others):
        cause = (
            "its backward runs several times, as by a loss in chunks: "
            f"call {call} on it for all but the last"
        )

    def sentence(step: Replaced) -> str:
        counts = {
            (count_of(step.was[owner][key]), count_of(rows))
            for owner, held in step.rows.items()
            for key, rows in held.items()
            if key.axis
        }
        often = f"{times} times as often"
        if len(counts) == 1:
            often = "{} -> {} times".format(*counts.pop())
        rest = ", gathers as before" if is_sharded else ""
        return f"gradients of {step.who} reduced {often} ({', '.join(kinds)}){rest}"

    yield from between.replaced(
        "reduced times",
        keys,
        claim=_is_of_gradients,
        sentence=sentence,
        cause=cause if times > 1 else "",
        is_regression=True,
    )


def _reductions(
    between: Between, keys: Mapping[Owner, Iterable[RowKey]], *, came: bool
) -> Iterator[Step]:
    """Gradients of units that are gathered as before are reduced now, or no longer."""
    less, more = between.sides(came=came)
    # A unit that reduces nothing is not resharded after its backward either.
    freed = {
        owner: [
            key
            for key in (*less[owner].rows, *more[owner].rows)
            if key.what == "reshard" and key.phase is Phase.BACKWARD
        ]
        for owner in keys
        if not less[owner].reductions
    }
    # Where the side that has less reduces something still, other kinds of reductions do.
    is_by_more = any(less[owner].reductions for owner in keys)
    how, now = ("reduced", " now") if came else ("no longer reduced", "")

    def sentence(step: Replaced) -> str:
        if is_by_more:
            return f"gradients of {step.who} {how} by {step.sums} too{now}, all else as before"
        return f"gradients of {step.who} {how}{now} ({step.sums}), gathers as before"

    is_lost = not came and not is_by_more
    yield from between.replaced(
        "reduced by more" if is_by_more else "reduced",
        {owner: [*held, *freed.get(owner, ())] for owner, held in keys.items()},
        came=came,
        claim=_is_of_gradients,
        sentence=sentence,
        cause="frozen, detached, or gradient synchronization switched off" if is_lost else "",
    )


def _sharded(between: Between, *, came: bool) -> Iterator[Step]:
    """Units are sharded: they are gathered, and their all-reduces are reduce-scatters."""
    # FSDP1 all-reduces what it does not shard, over a group of one rank too.
    alone = {axis.name for axis in between.axes[not came] if axis.size == 1}

    def rows(replicated: Content, sharded: Content) -> list[RowKey]:
        is_alone = alone.issuperset(key.axis for key in replicated.reductions)
        is_changed = _is_sharding(replicated, sharded) and not is_alone
        return [*sharded.unit_rows, *replicated.unit_rows] if is_changed else []

    how = "replicated instead of sharded: gradients all-reduced, parameters no longer gathered"
    if came:
        how = "sharded instead of replicated: parameters gathered, gradients reduce-scattered"
    yield from between.replaced(
        "sharded",
        between.select(rows, came=came),
        came=came,
        claim=is_of_whole_unit,
        sentence=lambda step: f"{step.who} {how}",
    )


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
    """Modules became units of their own: their bytes left the unit above."""
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
            _forward_gathers(content)
            for state in (between.origin, between.target)
            for owner, content in state.items()
            if owner not in modules and not content.is_kept
        ),
        default=0,
    )
    often = max((_forward_gathers(between.target[module]) for module in modules), default=0)
    is_called = came and 0 < others < often

    def sentence(step: Replaced) -> str:
        parts, wholes = name_owners(modules), name_owners(units)
        if not came:
            return f"{parts} merged into {wholes}, gathered with it"
        times = f", gathered {often} times in forward" if is_called else ""
        return step.with_calls(f"{parts} split off {wholes}{times}", is_gather, modules)

    yield from between.replaced(
        "split off",
        {owner: _unit_keys(between, owner) for at in units for owner in (at, *units[at])},
        came=came,
        about=modules,
        claim=is_of_whole_unit,
        sentence=sentence,
        cause=_CALLED if is_called else "",
        is_regression=came,
    )


def _forward_gathers(content: Content) -> int:
    return total_count(content.gathers[Phase.FORWARD])


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
            _largest(rows)
            for one in side
            for key, rows in one.reductions.items()
            if key.what == "reduce_scatter"
        )
        for side in sides
    }
    return len(gathered) == len(reduced) == 1


def _regrouped(between: Between) -> Iterator[Step]:
    """The same modules are gathered in other units, which have the same bytes together."""
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
        yield from between.replaced(
            "regrouped",
            {owner: _unit_keys(between, owner) for owner in owners},
            claim=is_of_whole_unit,
            more_cost=0.5,
            sentence=lambda _: (
                "other units, with as many bytes together: "
                f"{name_owners(gone)} -> {name_owners(added)}"
            ),
        )


def _policies(state: State, owners: Iterable[Owner]) -> set[tuple[bool, int]]:
    """Whether units but the root are kept after forward, and how often they are gathered in it."""
    return {(state[owner].is_kept, _forward_gathers(state[owner])) for owner in owners if owner}


def _called(between: Between) -> Iterator[Step]:
    """Units are gathered in forward more or less often, and others as often as before."""

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
        {owner: _forward_gathers(state[owner]) for owner in keys}
        for state in (between.state, between.target)
    )
    # Schedules of pipelines gather as they like.
    is_pipeline = any(key.what in {"send", "recv"} for key in between.state.row_keys())
    is_called = max(now.values(), default=0) > most and sum(now.values()) > sum(was.values())

    def sentence(step: Replaced) -> str:
        owners: defaultdict[int, list[Owner]] = defaultdict(list)
        for owner in step.owners:
            owners[now[owner]].append(owner)
        shown = [f"{name_owners(found)} {_times(count)}" for count, found in sorted(owners.items())]
        return f"gathered in forward: {', '.join(shown)}; other units {_times(most)}"

    yield from between.replaced(
        "called",
        keys,
        claim=is_of_unit,
        sentence=sentence,
        cause=_CALLED if is_called and not is_pipeline else "",
        is_regression=True,
    )


def _sizes(rows: Rows) -> set[int]:
    return {call.nbytes for call in calls_of(rows)}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _units(between: Between, *, came: bool) -> Iterator[Step]:
    """Units are gathered and reduced that were not there, with bytes that no other unit had."""
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

    def sentence(step: Replaced) -> str:
        if not came:
            return f"{step.who} no longer gathered nor reduced, other units gathered as before"
        return step.with_calls(f"{step.who} gathered now, other units as before", is_gather)

    yield from between.replaced(
        "unit",
        keys,
        came=came,
        # Elsewhere, all gathers in forward are as before.
        claim=lambda key, call: is_gather(key, call) and key.phase is Phase.FORWARD,
        is_claim_of_all=True,
        more_cost=0.5,
        sentence=sentence,
        is_regression=not came,
    )


def _buckets(between: Between) -> Iterator[Step]:
    """The same bytes of gradients in another number of calls."""
    keys = between.select_rows(
        lambda _, before, after: (
            role_of(before) == role_of(after) == Role.GRADIENTS
            and count_of(before) != count_of(after)
            and nbytes_of(before) == nbytes_of(after)
        )
    )

    def sentence(step: Replaced) -> str:
        rows_of = [rows for held in step.rows.values() for rows in held.values()]
        counts = {
            sum(call.count for call in calls_of(rows) if call.role == Role.GRADIENTS)
            for rows in rows_of
        }
        calls = "1 call" if counts == {1} else f"{'/'.join(map(str, sorted(counts)))} calls"
        return f"gradients of {step.who} sent in {calls}, as many bytes in all"

    yield from between.replaced("buckets", keys, sentence=sentence)
