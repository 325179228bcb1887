"""Propose changes of counts, sizes and dtypes that hold for all modules."""

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
from pytest_fsdp_comm.comm.profile import Row, RowKey, alike_but
from pytest_fsdp_comm.text.words import itemsize

# Note [Guessed amounts]: a proposal here is a guess with all its numbers, taken from the ratios
# that most rows show; whether it is true of the others shows when it is applied. That a fraction
# divides all of its counts or bytes is checked at once: a number that is made up for one that it
# does not divide would be hidden by a later step that writes the same row.

_PASSES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})
_MOST_TERMS: Final = 64
"""The largest product of a ratio's sides that is told: 3/2 is, 129/65 is a coincidence."""
_MOST_RATIOS: Final = 3


class Scope(Enum):
    """The calls whose count changes."""

    EVERYTHING = auto()
    PASSES = auto()
    """Forward, backward and recomputation, with gradients of parameters by a ratio of their own."""
    PASSES_AND_OUTSIDE = auto()
    """The same, and what is outside of them."""
    FORWARD = auto()
    ACTIVATIONS = auto()
    """Activations, and the redistributions that send them."""
    OPTIMIZER = auto()
    """The optimizer's phase, with clipping."""

    def includes(self, key: RowKey, call: Calls, content: Content) -> bool:
        """Whether the count of a call changes."""
        match self:
            case Scope.EVERYTHING:
                return True
            case Scope.OPTIMIZER:
                return key.phase is Phase.OPTIMIZER
            case Scope.FORWARD:
                # What is kept after forward is there for the next one.
                return key.phase is Phase.FORWARD and not (
                    is_of_unit(key, call) and content.is_kept
                )
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
    """Whether any of it is activations: without them, only gathers tell of forwards."""
    reductions: Fraction = Fraction(1)
    """How often gradients are reduced, where the scope leaves them out."""
    kept: tuple[Owner, ...] = ()
    """Units that a scope of forward leaves out, since they are kept after it for the next one."""

    @property
    def description_cost(self) -> float:
        # More for fractions, and where it is not said of everything.
        whole = self.factor.numerator == 1 or self.factor.denominator == 1
        return (2.0 if whole else 3.0) + (0.0 if self.scope is Scope.EVERYTHING else 0.5)

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
        """Whether all counts that change can be multiplied."""
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


_ONE: Final = Fraction(1)


def propose_counts(between: Between) -> Iterator[Step]:
    """Propose changes of counts."""
    contents = set(between.state.values())
    sends = any(call.role == Role.ACTIVATIONS for one in contents for _, call in one.calls())
    reductions = _ratios(
        (count_of(before), count_of(after), len(alike.owners))
        for alike in between.alike
        for key, before, after in alike.rows
        if key.axis
        and before
        and all(is_of_gradients(key, call, alike.old) for row in before for call in row.calls)
    )
    for scope in Scope:
        pairs = (
            (count_of(before), count_of(after), len(alike.owners))
            for alike in between.alike
            for key, before, after in alike.rows
            if before and scope.includes(key, before[0].calls[0], alike.old)
        )
        for ratio in _ratios(pairs):
            # Other scopes leave no unit out.
            units = between.state.items() if scope is Scope.FORWARD else ()
            kept = tuple(owner for owner, content in units if content.is_kept)
            step = Counts(scope=scope, factor=ratio, has_activations=sends, kept=kept)
            has_others = scope in {Scope.PASSES, Scope.PASSES_AND_OUTSIDE}
            for often in (_ONE, *reductions) if has_others else (_ONE,):
                guess = replace(step, reductions=often)
                if guess.fits(contents):
                    yield guess


def _ratios(pairs: Iterable[tuple[int, int, int]]) -> list[Fraction]:
    """The ratios that hold for most of what was, what is, and in how many modules."""
    # Few pairs occur, in many modules, and fractions are slow to make.
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
    """The element type; empty for that which each has."""

    def is_meant(self, key: RowKey, call: Calls) -> bool:
        raise NotImplementedError

    def fits(self, state: State) -> bool:
        """Whether all bytes that are meant can be scaled."""
        return self.factor.denominator == 1 or not any(
            call.nbytes % self.factor.denominator and self.is_meant(key, call)
            for content in set(state.values())
            for key, call in content.calls()
        )

    def change(self, row: Row, content: Content) -> Row:
        calls = tuple(
            replace(call, nbytes=int(call.nbytes * self.factor), dtype=self.new or call.dtype)
            if self.is_meant(row.key, call)
            else call
            for call in row.calls
        )
        return row if calls == row.calls else replace(row, calls=alike_but(calls))


@dataclass(frozen=True, kw_only=True)
class Sizes(_Scaled):
    """All activations, or all gradients on an axis, have `factor` times the bytes."""

    kind: str = "sizes"
    factor: Fraction
    axis: str = ""
    """That of gradients; empty for activations on all axes."""
    with_loss: bool = False
    """What is sent for no module outside of forward and backward too, such as a parallel loss."""

    @property
    def description_cost(self) -> float:
        # More for fractions, and for one axis.
        whole = self.factor.numerator == 1 or self.factor.denominator == 1
        return 2.0 if whole and not self.axis else 2.5

    def is_meant(self, key: RowKey, call: Calls) -> bool:
        if self.axis:
            return call.role == Role.GRADIENTS and key.axis == self.axis
        is_loss = self.with_loss and not call.role and key.phase is Phase.OUTSIDE
        return key.subject == "collective" and (call.role == Role.ACTIVATIONS or is_loss)

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        return self.is_meant(key, call)


def propose_sizes(between: Between) -> Iterator[Step]:
    """Propose changes of the sizes of activations, and of gradients on an axis."""
    found: defaultdict[tuple[str, str], list[tuple[int, int, int]]] = defaultdict(list)
    for alike in between.alike:
        for key, before, after in alike.rows:
            sizes, role = sizes_of(before, after), role_of(before)
            if sizes is not None and role == role_of(after):
                axis = key.axis if role == Role.GRADIENTS else ""
                found[role, axis].append((*sizes, len(alike.owners)))
    for (role, axis), pairs in found.items():
        for ratio in _ratios(pairs) if role in {Role.ACTIVATIONS, Role.GRADIENTS} else ():
            for with_loss in (False,) if axis else (False, True):
                step = Sizes(factor=ratio, axis=axis, with_loss=with_loss)
                if step.fits(between.state):
                    yield step


@dataclass(frozen=True, kw_only=True)
class Dtype(_Scaled):
    """All collectives of some roles and axes changed dtype, and their sizes with it."""

    kind: str = "dtype"
    factor: Fraction
    """Bytes of the new type by those of the old."""
    parts: frozenset[tuple[str, str]]
    """Roles, each with an axis."""
    old: str
    new: str
    owners: frozenset[Owner] = frozenset()
    """Whose; empty for all."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(role for role, _ in self.parts)

    @property
    def description_cost(self) -> float:
        return 2.0 + 0.5 * len({template(owner or "") for owner in self.owners})

    def includes(self, owner: Owner) -> bool:
        return not self.owners or owner in self.owners

    def is_meant(self, key: RowKey, call: Calls) -> bool:
        return (call.role, key.axis) in self.parts and call.dtype == self.old

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        is_part = (call.role, key.axis) in self.parts
        return is_part and call.dtype in {self.old, self.new} and self.includes(owner)


def propose_dtypes(between: Between) -> Iterator[Step]:
    """Propose changes of the dtype of parameters, gradients and activations."""
    found: dict[tuple[str, str, Fraction], dict[tuple[str, str], set[Owner]]] = {}
    for alike in between.alike:
        for key, before, after in alike.rows:
            sizes, role = sizes_of(before, after), role_of(before)
            old, new = (
                sole((call.dtype for call in calls_of(rows)), "") for rows in (before, after)
            )
            is_changed = role and role == role_of(after) and old and new and old != new
            if not (is_changed and sizes and all(sizes)):
                continue
            # Bytes change as the element type does; of several types, nobody knows.
            if "+" in old + new or sizes[1] * itemsize(old) == sizes[0] * itemsize(new):
                parts = found.setdefault((old, new, Fraction(sizes[1], sizes[0])), {})
                parts.setdefault((role, key.axis), set()).update(alike.owners)
    for (old, new, factor), owners in found.items():
        by_role = [{part for part in owners if part[0] == role} for role, _ in owners]
        choices = [set(owners), *by_role, *({part} for part in owners)]
        for chosen in dict.fromkeys(map(frozenset, choices)):
            changed = frozenset(owner for part in chosen for owner in owners[part])
            for some in (frozenset[Owner](), changed):
                step = Dtype(parts=chosen, old=old, new=new, factor=factor, owners=some)
                if step.fits(between.state):
                    yield step
