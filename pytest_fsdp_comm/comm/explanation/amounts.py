"""Propose changes in counts, sizes and dtypes that apply to all modules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from fractions import Fraction
from typing import ClassVar, Final

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Owner,
    State,
    calls_of,
    count_of,
    is_of_gradients,
    is_of_unit,
    role_of,
    sizes_of,
    sole,
    template,
)
from pytest_fsdp_comm.comm.explanation.steps import GlobalStep, Step
from pytest_fsdp_comm.comm.profile import Row, RowKey, replace_fields
from pytest_fsdp_comm.text.words import itemsize

# Propose the most common ratios of new to old values as factors. The search applies each factor to
# all rows, and checks the result. Propose fractions only if all products are whole numbers, because
# a later step that writes the same row could hide a rounding error.


_ONE: Final = Fraction(1)
_PASSES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})
_MOST_TERMS: Final = 64
"""Largest product of a factor's numerator and denominator. 3/2 is a plausible change, while 129/65
is a coincidence."""
_MOST_RATIOS: Final = 3


class Scope(Enum):
    """The calls whose counts are multiplied by `Counts.factor`."""

    EVERYTHING = auto()
    PASSES = auto()
    """Calls in forward, backward and recomputation, except gradient reductions."""
    PASSES_AND_OUTSIDE = auto()
    """The calls of `PASSES`, and calls in the outside phase."""
    FORWARD = auto()
    ACTIVATIONS = auto()
    OPTIMIZER = auto()

    def includes(self, key: RowKey, call: Calls, content: Content) -> bool:
        match self:
            case Scope.EVERYTHING:
                return True
            case Scope.OPTIMIZER:
                return key.phase is Phase.OPTIMIZER
            case Scope.FORWARD:
                # A unit that stays unsharded is not gathered again for the next forward.
                stays_unsharded = is_of_unit(key, call) and content.stays_unsharded
                return key.phase is Phase.FORWARD and not stays_unsharded
        is_outside = self is Scope.PASSES_AND_OUTSIDE and key.phase is Phase.OUTSIDE
        if not (key.phase in _PASSES or is_outside) or is_of_gradients(key, call, content):
            return False
        is_activation = call.role == Role.ACTIVATIONS or key.subject == "redistribution"
        return is_activation or self is not Scope.ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class Counts(GlobalStep):
    """All calls in a scope happen `factor` times as often."""

    kind: str = "counts"
    order: ClassVar[int] = 3
    scope: Scope
    factor: Fraction
    has_activations: bool
    """Whether any calls send activations; if not, only gathers show how many forwards ran."""
    reductions: Fraction = Fraction(1)
    """Factor for the counts of gradient reductions, if the scope does not include them."""
    excluded: tuple[Owner, ...] = ()
    """Units whose gathers the forward scope excludes, because these units stay unsharded."""

    @property
    def description_cost(self) -> float:
        # Prefer the factors n and 1/n, and prefer changes in all counts.
        is_simple = self.factor.numerator == 1 or self.factor.denominator == 1
        return (2.0 if is_simple else 3.0) + (0.0 if self.scope is Scope.EVERYTHING else 0.5)

    def change(self, row: Row, content: Content) -> Row:
        calls = tuple(
            replace(call, count=int(call.count * self._factor_of(row.key, call, content)))
            for call in row.calls
        )
        return row if calls == row.calls else replace(row, calls=calls)

    def _factor_of(self, key: RowKey, call: Calls, content: Content) -> Fraction:
        if self.scope.includes(key, call, content):
            return self.factor
        is_other = self.reductions != 1 and key.phase in _PASSES
        return self.reductions if is_other and is_of_gradients(key, call, content) else _ONE

    def fits(self, contents: Iterable[Content]) -> bool:
        """Whether all new counts are whole numbers."""
        return self.factor.denominator == self.reductions.denominator == 1 or not any(
            call.count % self._factor_of(key, call, content).denominator
            for content in contents
            for key, call in content.calls()
        )

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        match self.scope:
            case Scope.EVERYTHING:
                return True
            case Scope.ACTIVATIONS:
                return call.role == Role.ACTIVATIONS
            case Scope.FORWARD:
                return key.phase is Phase.FORWARD
            case Scope.OPTIMIZER:
                return key.phase is Phase.OPTIMIZER
            case _:
                return key.phase in _PASSES


def propose_counts(between: Between) -> Iterator[Step]:
    """Propose that counts changed by a common factor."""
    unique = set(between.state.values())
    sends = any(call.role == Role.ACTIVATIONS for content in unique for _, call in content.calls())
    reductions = _ratios(
        (count_of(before), count_of(after), len(group.owners))
        for group in between.differences
        for key, before, after in group.rows
        if key.axis
        and before
        and all(is_of_gradients(key, call, group.old) for row in before for call in row.calls)
    )
    for scope in Scope:
        pairs = (
            (count_of(before), count_of(after), len(group.owners))
            for group in between.differences
            for key, before, after in group.rows
            if before and scope.includes(key, before[0].calls[0], group.old)
        )
        for ratio in _ratios(pairs):
            # Only the forward scope excludes units.
            units = between.state.items() if scope is Scope.FORWARD else ()
            excluded = tuple(owner for owner, content in units if content.stays_unsharded)
            step = Counts(scope=scope, factor=ratio, has_activations=sends, excluded=excluded)
            has_others = scope in {Scope.PASSES, Scope.PASSES_AND_OUTSIDE}
            for reductions_factor in (_ONE, *reductions) if has_others else (_ONE,):
                guess = replace(step, reductions=reductions_factor)
                if guess.fits(unique):
                    yield guess


def _ratios(pairs: Iterable[tuple[int, int, int]]) -> list[Fraction]:
    """Return the most common ratios of new to old values, weighted by the number of modules."""
    # Fractions are slow to create, so first add up the weights of equal pairs.
    weights: Counter[tuple[int, int]] = Counter()
    for old, new, weight in pairs:
        if old and new and old != new:
            weights[old, new] += weight
    ratios: Counter[Fraction] = Counter()
    for (old, new), weight in weights.items():
        ratios[Fraction(new, old)] += weight
    return [
        ratio
        for ratio, _ in ratios.most_common(_MOST_RATIOS)
        if ratio.numerator * ratio.denominator <= _MOST_TERMS
    ]


class _Scaled(GlobalStep):
    order: ClassVar[int] = 3
    factor: Fraction
    new: str = ""
    """The new dtype; empty if it does not change."""

    def is_affected(self, key: RowKey, call: Calls) -> bool:
        raise NotImplementedError

    def fits(self, state: State) -> bool:
        return self.factor.denominator == 1 or not any(
            call.nbytes % self.factor.denominator and self.is_affected(key, call)
            for content in set(state.values())
            for key, call in content.calls()
        )

    def change(self, row: Row, content: Content) -> Row:
        calls = tuple(
            replace(call, nbytes=int(call.nbytes * self.factor), dtype=self.new or call.dtype)
            if self.is_affected(row.key, call)
            else call
            for call in row.calls
        )
        return row if calls == row.calls else replace(row, calls=replace_fields(calls))


@dataclass(frozen=True, kw_only=True)
class Sizes(_Scaled):
    """Activations, or gradients reduced over one axis, have `factor` times as many bytes."""

    kind: str = "sizes"
    factor: Fraction
    axis: str = ""
    """The axis of the gradients; empty for activations, which change over all axes."""
    with_loss: bool = False
    """Whether the calls of a parallel loss (no role, in the outside phase) change too."""

    @property
    def description_cost(self) -> float:
        # Prefer the factors n and 1/n, and prefer changes in activations.
        is_simple = self.factor.numerator == 1 or self.factor.denominator == 1
        return 2.0 if is_simple and not self.axis else 2.5

    def is_affected(self, key: RowKey, call: Calls) -> bool:
        if self.axis:
            return call.role == Role.GRADIENTS and key.axis == self.axis
        is_loss = self.with_loss and not call.role and key.phase is Phase.OUTSIDE
        return key.subject == "collective" and (call.role == Role.ACTIVATIONS or is_loss)

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        return self.is_affected(key, call)


def propose_sizes(between: Between) -> Iterator[Step]:
    """Propose that all activations, or all gradients reduced over one axis, changed in size."""
    sizes_by_part: defaultdict[tuple[str, str], list[tuple[int, int, int]]] = defaultdict(list)
    for group in between.differences:
        for key, before, after in group.rows:
            sizes, role = sizes_of(before, after), role_of(before)
            if sizes is not None and role == role_of(after):
                axis = key.axis if role == Role.GRADIENTS else ""
                sizes_by_part[role, axis].append((*sizes, len(group.owners)))
    for (role, axis), pairs in sizes_by_part.items():
        for ratio in _ratios(pairs) if role in {Role.ACTIVATIONS, Role.GRADIENTS} else ():
            for with_loss in (False,) if axis else (False, True):
                step = Sizes(factor=ratio, axis=axis, with_loss=with_loss)
                if step.fits(between.state):
                    yield step


@dataclass(frozen=True, kw_only=True)
class Dtype(_Scaled):
    """All collectives with certain roles and axes have a new dtype, which changes their sizes."""

    kind: str = "dtype"
    factor: Fraction
    """The new bytes of each call, divided by the old bytes."""
    parts: frozenset[tuple[str, str]]
    """The pairs of role and axis whose collectives have the new dtype."""
    old: str
    new: str
    owners: frozenset[Owner] = frozenset()
    """Modules whose dtype changed; empty for all."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(role for role, _ in self.parts)

    @property
    def description_cost(self) -> float:
        return 2.0 + 0.5 * len({template(owner or "") for owner in self.owners})

    def includes(self, owner: Owner) -> bool:
        return not self.owners or owner in self.owners

    def is_affected(self, key: RowKey, call: Calls) -> bool:
        return (call.role, key.axis) in self.parts and call.dtype == self.old

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        is_part = (call.role, key.axis) in self.parts
        return is_part and call.dtype in {self.old, self.new} and self.includes(owner)


def propose_dtypes(between: Between) -> Iterator[Step]:
    """Propose that the dtype of parameters, gradients or activations changed."""
    candidates: dict[tuple[str, str, Fraction], dict[tuple[str, str], set[Owner]]] = {}
    for group in between.differences:
        for key, was, now in group.rows:
            sizes, role = sizes_of(was, now), role_of(was)
            old, new = (sole((call.dtype for call in calls_of(rows)), "") for rows in (was, now))
            is_changed = role and role == role_of(now) and old and new and old != new
            if not (is_changed and sizes and all(sizes)):
                continue
            # Bytes must be proportional to the element size, which is unknown if calls mix dtypes.
            if "+" in old + new or sizes[1] * itemsize(old) == sizes[0] * itemsize(new):
                parts = candidates.setdefault((old, new, Fraction(sizes[1], sizes[0])), {})
                parts.setdefault((role, key.axis), set()).update(group.owners)
    for (old, new, factor), owners in candidates.items():
        by_role = [{part for part in owners if part[0] == role} for role, _ in owners]
        choices = [set(owners), *by_role, *({part} for part in owners)]
        for chosen in dict.fromkeys(map(frozenset, choices)):
            changed = frozenset(owner for part in chosen for owner in owners[part])
            for limit in (frozenset[Owner](), changed):
                step = Dtype(parts=chosen, old=old, new=new, factor=factor, owners=limit)
                if step.fits(between.state):
                    yield step
