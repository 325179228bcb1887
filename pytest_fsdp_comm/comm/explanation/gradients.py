"""What happened to the gradients of parameters; see Note [Evidence of a proposal] in `units`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, TypeAlias

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
from pytest_fsdp_comm.comm.explanation.steps import Evidence, Kind, Replaced, Seen, Step, Writes
from pytest_fsdp_comm.comm.profile import RowKey

Keys: TypeAlias = Mapping[Owner, Iterable[RowKey]]


class _OfGradients(Replaced):
    def claims_beside(self, key: RowKey, call: Calls) -> bool:
        return call.role == Role.GRADIENTS


@dataclass(frozen=True, kw_only=True)
class ReducedTimes(_OfGradients):
    """Gradients are reduced more or less often, and gathers are as before."""

    kind: Kind = "reduced times"
    times: Fraction = field(compare=False)
    is_sharded: bool = field(compare=False)
    """Whether their parameters are gathered. With DDP nothing else would count the steps."""
    is_alone: bool = field(compare=False)
    """Whether there are other units, each of which is gathered once, and reduced as before."""

    @property
    def is_regression(self) -> bool:
        return True

    def cause(self, seen: Seen) -> str:
        if self.times <= 1:
            return ""
        kinds = {key.what for held in self.rows.values() for key in held if key.axis}
        call = f"set_requires_{'all_reduce' if kinds == {'all_reduce'} else 'gradient_sync'}(False)"
        if self.is_alone:
            return (
                "its backward runs several times, as by a loss in chunks: "
                f"call {call} on it for all but the last"
            )
        switch, steps = f"call {call}", ""
        if not self.is_sharded:
            switch, steps = "enter no_sync()", f"{self.times} steps in place of one, or "
        elif kinds != {"all_reduce"}:
            switch += ", or enter no_sync() with FSDP1,"
        return f"{steps}reduced in each micro-batch: {switch} for all micro-batches but the last"


@dataclass(frozen=True, kw_only=True)
class Reduced(_OfGradients):
    """Gradients of units that are gathered as before are reduced now, or no longer."""

    kind: Kind

    def cause(self, seen: Seen) -> str:
        if self.kind != "reduced":
            return ""
        if known := frozen_or_thawed(self, seen.trees):
            return known
        lost = "frozen, detached, or gradient synchronization switched off"
        return "" if self.came else lost


@dataclass(frozen=True, kw_only=True)
class GradientSizes(_OfGradients):
    """As many calls have other bytes: of units another part is reduced, and with DDP all is."""

    kind: Kind
    writes: ClassVar[Writes] = "sizes"

    def cause(self, seen: Seen) -> str:
        owners, trees = self.units_in(seen.trees), seen.trees
        if self.kind != "part reduced" or not owners or trees is None:
            return ""
        if owners <= trees.frozen | trees.partly_frozen:
            return "a part of the parameters is frozen, as the tree says"
        return "no longer frozen, as the tree says" if owners <= trees.thawed else ""


@dataclass(frozen=True, kw_only=True)
class Buckets(Replaced):
    """The same bytes of gradients are sent in another number of calls."""

    kind: Kind = "buckets"


def frozen_or_thawed(step: Replaced, trees: Evidence | None) -> str:
    """Say what the trees know of gradients that units reduce now, or no longer."""
    owners = step.units_in(trees)
    if not owners or trees is None:
        return ""
    if not step.came and owners <= trees.frozen:
        return "frozen, as the tree says"
    if not step.came and owners.isdisjoint(trees.frozen | trees.partly_frozen):
        return "detached, or not synchronized: as the tree says, nothing was frozen"
    return "no longer frozen, as the tree says" if step.came and owners <= trees.thawed else ""


def propose_reductions(between: Between) -> Iterator[Step]:
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
                yield from between.replaced(GradientSizes, keys, kind=kind)


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


def _reduced_times(between: Between, times: Fraction, keys: Keys) -> Iterator[Step]:
    is_sharded = all(between.state[owner].gathers[Phase.FORWARD] for owner in keys)
    # With micro-batches, each of which they are gathered for.
    others = [
        content
        for owner, content in between.state.items()
        if owner not in keys
        and content.reductions
        and content.reductions == between.target[owner].reductions
    ]
    yield from between.replaced(
        ReducedTimes,
        keys,
        times=times,
        is_sharded=is_sharded,
        is_alone=is_sharded
        and bool(others)
        and all(forward_gathers(content) == 1 for content in others),
    )


def _reductions(between: Between, keys: Keys, *, came: bool) -> Iterator[Step]:
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
    yield from between.replaced(
        Reduced,
        {owner: [*held, *freed.get(owner, ())] for owner, held in keys.items()},
        kind="reduced by more" if is_by_more else "reduced",
        came=came,
    )


def propose_buckets(between: Between) -> Iterator[Step]:
    """The same bytes of gradients in another number of calls."""
    keys = between.select_rows(
        lambda _, before, after: (
            role_of(before) == role_of(after) == Role.GRADIENTS
            and count_of(before) != count_of(after)
            and nbytes_of(before) == nbytes_of(after)
        )
    )
    yield from between.replaced(Buckets, keys)
