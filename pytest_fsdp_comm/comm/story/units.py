"""Infers what happened to units of FSDP, and to the gradients of DDP.

What a step rests on is checked here: forward gathers that did not change, bytes that add up, units
beside it that are as before.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.story.between import (
    EMPTY,
    Between,
    Rows,
    carries_gradients,
    consists_of,
    gathered_nbytes,
    gathers_of,
    reductions_of,
    rows_written,
    sizes_of,
    total_count,
    unit_rows,
)
from pytest_fsdp_comm.comm.story.facts import count_of, nbytes_of, once
from pytest_fsdp_comm.comm.story.steps import (
    BackwardCame,
    BackwardGone,
    Buckets,
    Called,
    Freed,
    GatheredElsewhere,
    GradientSizes,
    Kept,
    Merged,
    PartReduced,
    ReducedTimes,
    ReductionCame,
    ReductionGone,
    Regrouped,
    Replaced,
    Replicated,
    Sharded,
    SplitOff,
    Step,
    UnitAdded,
    UnitRemoved,
    UnitSizes,
    is_kept,
    is_of_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_fsdp_comm.comm.profile import RowKey
    from pytest_fsdp_comm.comm.story.facts import Content, Fact, Facts, Owner, State


def propose_of_units(between: Between) -> Iterator[Step]:
    """Steps about how some units are gathered and reduced."""
    for propose in (
        _unit_sizes,
        _kept_or_freed,
        _backward_of_units,
        _reduced,
        _replicated,
        _split,
        _regrouped,
        _called,
        _units,
        _buckets,
    ):
        yield from propose(between)


def _unit_sizes(between: Between) -> Iterator[Step]:
    factors: dict[str, dict[str, Fraction]] = {}
    for owner in between.changed:
        old, new = between.state[owner], between.target[owner]
        if owner is None or old.rows.keys() != new.rows.keys():
            continue
        if not gathers_of(old, Phase.FORWARD):
            continue
        ratios: defaultdict[str, set[Fraction | None]] = defaultdict(set)
        for key in old.rows:
            if consists_of(is_of_parameters, old.row(key)):
                sizes = sizes_of(old.row(key), new.row(key))
                whole = sizes is not None and all(sizes)
                ratios[key.axis].add(Fraction(sizes[1], sizes[0]) if sizes and whole else None)
        known = {axis: next(iter(found)) for axis, found in ratios.items() if len(found) == 1}
        scaled = {axis: ratio for axis, ratio in known.items() if ratio is not None}
        gathered = {key.axis for key in gathers_of(old, Phase.FORWARD)}
        if len(scaled) == len(ratios) and any(scaled[axis] != 1 for axis in gathered):
            factors[owner] = scaled
    if factors:
        nbytes = {
            owner: (
                gathered_nbytes(between.state[owner]),
                gathered_nbytes(between.target[owner]),
            )
            for owner in factors
        }
        yield UnitSizes(factors=factors, nbytes=nbytes)


def _kept_or_freed(between: Between) -> Iterator[Step]:
    found: defaultdict[type[Replaced], Rows] = defaultdict(dict)
    for owner in between.changed:
        old, new = between.state[owner], between.target[owner]
        kind = _policy_change(old, new)
        if kind is not None:
            keys = [
                key
                for content in (old, new)
                for key in unit_rows(content)
                if key not in reductions_of(content)
            ]
            found[kind][owner] = rows_written(between, owner, keys)
    for kind, rows in found.items():
        yield kind(rows=rows)


def _policy_change(old: Content, new: Content) -> type[Replaced] | None:
    """What a unit does otherwise after its forward."""
    before, after = gathers_of(old, Phase.BACKWARD), gathers_of(new, Phase.BACKWARD)
    if before and not after and _is_freed(old) and not _is_freed(new):
        return Kept if _gathers_less(new, old) else None
    if after and not before and _is_freed(new) and not _is_freed(old):
        return Freed if _gathers_less(old, new) else None
    is_elsewhere = {key.axis for key in before} != {key.axis for key in after}
    if before and after and is_elsewhere and _gathers_less(old, new) and _gathers_less(new, old):
        return GatheredElsewhere
    return None


def _gathers_less(one: Content, other: Content) -> bool:
    """Whether a unit gathers the same in forward, and not more often.

    What is kept serves the forwards of several micro-batches.
    """
    less, more = gathers_of(one, Phase.FORWARD), gathers_of(other, Phase.FORWARD)
    return bool(less) and all(
        count <= more.get(key, EMPTY).get(fact, 0)
        for key, facts in less.items()
        for fact, count in facts.items()
    )


@once
def _is_freed(content: Content | None) -> bool:
    """Whether a unit is resharded after its forward."""
    return content is not None and any(
        key.what == "reshard" and key.phase is Phase.FORWARD for key in content.rows
    )


def _backward_of_units(between: Between) -> Iterator[Step]:
    for kind, (with_it, without) in (
        (BackwardGone, (between.state, between.target)),
        (BackwardCame, (between.target, between.state)),
    ):
        rows: Rows = {}
        reduce: set[bool] = set()
        for owner in between.changed:
            one, other = with_it[owner], without[owner]
            forward = gathers_of(one, Phase.FORWARD)
            if (
                forward
                and forward == gathers_of(other, Phase.FORWARD)
                and _is_freed(one)
                and _is_freed(other)
                and gathers_of(one, Phase.BACKWARD)
                and not any(key.phase is Phase.BACKWARD for key in unit_rows(other))
            ):
                rows[owner] = rows_written(between, owner, {**unit_rows(one), **unit_rows(other)})
                reduce.add(bool(reductions_of(one)))
        for has_reductions in reduce if len(reduce) == 1 else ():
            yield kind(rows=rows, has_reductions=has_reductions)


def _reduced(between: Between) -> Iterator[Step]:
    times: defaultdict[Fraction, Rows] = defaultdict(dict)
    others: defaultdict[type[Replaced], Rows] = defaultdict(dict)
    for owner in between.changed:
        old, new = between.state[owner], between.target[owner]
        if not _is_gathered_alike(old, new):
            continue
        before, after = reductions_of(old), reductions_of(new)
        for key in rows_written(between, owner, {**before, **after}):
            was, now = before.get(key, EMPTY), after.get(key, EMPTY)
            ratio = Fraction(count_of(now), count_of(was)) if was else Fraction(0)
            if ratio and _scaled(was, ratio) == now:
                times[ratio].setdefault(owner, {})[key] = now
            elif ratio in {0, 1}:
                others[_kind_of_reduction(old, was, now)].setdefault(owner, {})[key] = now
        if not (before and after):
            # A unit that reduces nothing is not resharded after its backward either.
            rows = others[ReductionGone if before else ReductionCame].get(owner, {})
            rows.update(rows_written(between, owner, _freed_in_backward(old, new)))
    for ratio, changed in times.items():
        kinds = sorted({key.what for held in changed.values() for key in held if key.axis})
        is_sharded = all(gathers_of(between.state[owner], Phase.FORWARD) for owner in changed)
        yield ReducedTimes(rows=changed, times=ratio, kinds=tuple(kinds), is_sharded=is_sharded)
    for kind, changed in others.items():
        if changed:
            yield _reduction(between, kind, changed)


def _reduction(between: Between, kind: type[Replaced], rows: Rows) -> Step:
    if kind not in {ReductionGone, ReductionCame}:
        return kind(rows=rows)
    less = between.target if kind is ReductionGone else between.state
    is_all = not any(reductions_of(less[owner]) for owner in rows)
    return (ReductionGone if kind is ReductionGone else ReductionCame)(rows=rows, is_all=is_all)


def _is_gathered_alike(old: Content, new: Content) -> bool:
    phases = (Phase.FORWARD, Phase.BACKWARD)
    return all(gathers_of(old, phase) == gathers_of(new, phase) for phase in phases)


def _kind_of_reduction(content: Content, before: Facts, after: Facts) -> type[Replaced]:
    if not before:
        return ReductionCame
    if not after:
        return ReductionGone
    return PartReduced if gathers_of(content, Phase.FORWARD) else GradientSizes


def _freed_in_backward(*contents: Content) -> set[RowKey]:
    return {
        key
        for content in contents
        for key in content.rows
        if key.what == "reshard" and key.phase is Phase.BACKWARD
    }


def _scaled(facts: Facts, factor: Fraction) -> dict[Fact, Fraction]:
    return {fact: count * factor for fact, count in facts.items()}


def _replicated(between: Between) -> Iterator[Step]:
    for kind, (first, second) in (
        (Replicated, (between.state, between.target)),
        (Sharded, (between.target, between.state)),
    ):
        rows: Rows = {}
        for owner in between.changed:
            sharded, replicated = first[owner], second[owner]
            was, now = reductions_of(sharded), reductions_of(replicated)
            if (
                gathers_of(sharded, Phase.FORWARD)
                and not gathers_of(replicated, Phase.FORWARD)
                and {key.what for key in was} == {"reduce_scatter"}
                and {key.what for key in now} == {"all_reduce"}
                and total_count(was) == total_count(now)
            ):
                keys = {**unit_rows(sharded), **unit_rows(replicated)}
                rows[owner] = rows_written(between, owner, keys)
        if rows:
            yield kind(rows=rows)


def _split(between: Between) -> Iterator[Step]:
    for kind, (small, large) in (
        (SplitOff, (between.target, between.state)),
        (Merged, (between.state, between.target)),
    ):
        # Units that only one side has, by the unit above that the other side has.
        children: defaultdict[str, list[str]] = defaultdict(list)
        for owner in between.owners:
            if not owner or not gathers_of(small.get(owner), Phase.FORWARD):
                continue
            if gathers_of(large.get(owner), Phase.FORWARD):
                continue
            parent = _unit_above(owner, large)
            if parent is not None:
                children[parent].append(owner)
        rows: Rows = {}
        units: dict[str, tuple[str, ...]] = {}
        for parent, modules in children.items():
            if not _adds_up(large.get(parent), small.get(parent), map(small.get, modules)):
                continue
            units[parent] = tuple(modules)
            for owner in (parent, *modules):
                keys = {
                    **unit_rows(between.state.get(owner)),
                    **unit_rows(between.target.get(owner)),
                }
                rows[owner] = rows_written(between, owner, keys)
        if units:
            parts = {module for modules in units.values() for module in modules}
            others = (
                total_count(gathers_of(content, Phase.FORWARD))
                for state in (between.origin, between.target)
                for owner, content in state.items()
                if owner not in parts and not is_kept(content)
            )
            yield kind(rows=rows, units=units, others=max(others, default=0))


def _regrouped(between: Between) -> Iterator[Step]:
    """Units in place of others, with the same bytes in all."""
    old, new = (
        {
            owner: gathered_nbytes(state.get(owner))
            for owner in between.owners
            if owner is not None and gathers_of(state.get(owner), Phase.FORWARD)
        }
        for state in (between.state, between.target)
    )
    owners = [owner for owner in {**old, **new} if old.get(owner) != new.get(owner)]
    gone = [owner for owner in owners if owner in old]
    came = [owner for owner in owners if owner in new]
    nbytes = sum(old[owner] for owner in gone)
    if (
        all(old[owner] for owner in gone)
        and all(new[owner] for owner in came)
        and nbytes == sum(new[owner] for owner in came)
        and not (set(gone) <= set(came) or set(came) <= set(gone))
        and _reduced_nbytes(map(between.state.get, gone))
        == _reduced_nbytes(map(between.target.get, came))
        and _policies(between.state, gone) == _policies(between.target, came)
    ):
        rows: Rows = {}
        for owner in owners:
            keys = {
                **unit_rows(between.state.get(owner)),
                **unit_rows(between.target.get(owner)),
            }
            rows[owner] = rows_written(between, owner, keys)
        yield Regrouped(rows=rows, old=tuple(gone), new=tuple(came))


def _adds_up(whole: Content | None, rest: Content | None, parts: Iterable[Content | None]) -> bool:
    """Whether a unit has the bytes of what is left of it and of its parts, in all it sends."""
    held = list(parts)
    gathered = [gathered_nbytes(part) for part in held]
    return (
        gathered_nbytes(whole) > 0
        and all(gathered)
        and gathered_nbytes(whole) == gathered_nbytes(rest) + sum(gathered)
        and _reduced_nbytes([whole]) == _reduced_nbytes([rest, *held])
    )


def _reduced_nbytes(contents: Iterable[Content | None]) -> int:
    """Bytes of one reduction of each unit."""
    return sum(
        max(fact.nbytes for fact in facts)
        for content in contents
        for key, facts in reductions_of(content).items()
        if key.what == "reduce_scatter"
    )


def _policies(state: State, owners: Iterable[Owner]) -> set[tuple[bool, int]]:
    """Whether units are kept after forward, and how often they are gathered in it; not of roots."""
    return {
        (is_kept(state.get(owner)), total_count(gathers_of(state.get(owner), Phase.FORWARD)))
        for owner in owners
        if owner
    }


def _unit_above(owner: str, state: State) -> str | None:
    """The closest unit above a module, or above the first of a unit's modules."""
    name = owner.partition("+")[0]
    while name:
        name = name.rpartition(".")[0]
        if gathers_of(state.get(name), Phase.FORWARD):
            return name
    return None


def _called(between: Between) -> Iterator[Step]:
    rows: Rows = {}
    for owner in between.changed:
        old, new = between.state[owner], between.target[owner]
        before, after = gathers_of(old, Phase.FORWARD), gathers_of(new, Phase.FORWARD)
        # What is kept is gathered again only by another forward.
        if not before or before.keys() != after.keys() or before == after or is_kept(new):
            continue
        if all(
            {fact.nbytes for fact in before[key]} == {fact.nbytes for fact in after[key]}
            for key in before
        ):
            rows[owner] = rows_written(between, owner, {**unit_rows(old), **unit_rows(new)})
    # Units beside it that are gathered as before are the evidence; what is kept always is.
    others = {
        owner: gathers_of(content, Phase.FORWARD)
        for owner, content in between.state.items()
        if owner not in rows and gathers_of(content, Phase.FORWARD) and not is_kept(content)
    }
    is_alone = all(
        gathers_of(between.target.get(owner), Phase.FORWARD) == gathers
        for owner, gathers in others.items()
    )
    if rows and others and is_alone:
        is_pipeline = any(
            key.what in {"send", "recv"}
            for content in between.state.values()
            for key in content.rows
        )
        most = max(map(total_count, others.values()))
        gathers = [
            sum(total_count(gathers_of(state.get(owner), Phase.FORWARD)) for owner in rows)
            for state in (between.state, between.target)
        ]
        yield Called(
            rows=rows, others=most, is_pipeline=is_pipeline, is_more=gathers[1] > gathers[0]
        )


def _units(between: Between) -> Iterator[Step]:
    for kind, (having, without) in (
        (UnitRemoved, (between.state, between.target)),
        (UnitAdded, (between.target, between.state)),
    ):
        # Bytes that another unit has less, or more, are in that unit.
        if any(
            gathered_nbytes(having.get(owner)) < gathered_nbytes(without.get(owner))
            for owner in between.changed
        ):
            continue
        rows: Rows = {}
        for owner in between.owners:
            held = unit_rows(having.get(owner))
            if (
                held
                and not unit_rows(without.get(owner))
                and gathers_of(having.get(owner), Phase.FORWARD)
            ):
                rows[owner] = rows_written(between, owner, held)
        if rows:
            yield kind(rows=rows)


def _buckets(between: Between) -> Iterator[Step]:
    rows: Rows = {}
    for owner, key, before, after in between.pairs():
        if (
            consists_of(carries_gradients, before)
            and consists_of(carries_gradients, after)
            and count_of(before) != count_of(after)
            and nbytes_of(before) == nbytes_of(after)
        ):
            rows.setdefault(owner, {})[key] = after
    if rows:
        yield Buckets(rows=rows)
