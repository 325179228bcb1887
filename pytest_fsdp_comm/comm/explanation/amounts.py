"""Explain changes in counts, sizes and dtypes that apply to all modules."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from fractions import Fraction
from itertools import chain
from typing import ClassVar, Final

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.evidence import (
    BETWEEN_STAGES,
    NORM,
    Matches,
    Recordings,
    count_acts,
    count_more_acts,
    list_gathered_axes,
    list_gathers,
)
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Owner,
    State,
    calls_of,
    count_calls,
    get_sole,
    is_gather,
    is_of_gradients,
    is_of_unit,
    keys_that_differ,
    nbytes_of,
    role_of,
    sizes_of,
    template,
)
from pytest_fsdp_comm.comm.explanation.steps import GlobalStep, Part, Problem, Step
from pytest_fsdp_comm.comm.explanation.words import (
    name_factor,
    name_modules,
    name_phase,
    name_times,
)
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey, replace_fields
from pytest_fsdp_comm.text.words import itemsize

# Propose the most common ratios of new to old values as factors. The search applies each factor to
# all rows, and checks the result. Propose fractions only if all products are whole numbers, because
# a later step that writes the same row could hide a rounding error.


NO_BACKWARD: Final = "forwards without a backward, such as an evaluation"
_MODEL_DTYPE: Final = "the dtype of the model's parameters"
_REDUCES_IN_FLOAT32: Final = (2, 15)
"""The first torch version in which FSDP2 reduces in the parameter's original dtype if
``reduce_dtype`` is unset, and casts partial gradients before DTensor reduces them. Older FSDP2, and
FSDP1 in all versions, use ``param_dtype`` in both cases. Observed with torch 2.13.0 and 2.15.0."""
_ROLES: Final = tuple(Role)
_ONE: Final = Fraction(1)
_PASSES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})
_OF_DDP: Final = frozenset({Role.GRADIENTS, Role.BUFFERS, Role.UNUSED_PARAMETERS})
_MAX_KINDS: Final = 2
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
    OUTSIDE = auto()

    def includes(self, key: RowKey, call: Calls, content: Content) -> bool:
        match self:
            case Scope.EVERYTHING:
                return True
            case Scope.OPTIMIZER | Scope.OUTSIDE:
                return key.phase is Phase[self.name]
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

    order: ClassVar[int] = 3
    writes: ClassVar[Part] = "counts"
    least_rows: ClassVar[int] = 2
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
            replace(call, count=int(call.count * self._choose_factor(row.key, call, content)))
            for call in row.calls
        )
        return row if calls == row.calls else replace(row, calls=calls)

    def _choose_factor(self, key: RowKey, call: Calls, content: Content) -> Fraction:
        if self.scope.includes(key, call, content):
            return self.factor
        is_other = self.reductions != 1 and key.phase in _PASSES
        return self.reductions if is_other and is_of_gradients(key, call, content) else _ONE

    def fits(self, contents: Iterable[Content]) -> bool:
        """Whether all new counts are whole numbers."""
        return self.factor.denominator == self.reductions.denominator == 1 or not any(
            call.count % self._choose_factor(key, call, content).denominator
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
            case Scope.OPTIMIZER | Scope.OUTSIDE:
                return key.phase is Phase[self.scope.name]
            case _:
                return key.phase in _PASSES

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        unique = set(between.state.values())
        calls = chain.from_iterable(content.calls() for content in unique)
        sends = any(call.role == Role.ACTIVATIONS for _, call in calls)
        reductions = _find_most_common_ratios(
            (count_calls(before), count_calls(after), len(group.owners))
            for group in between.differences
            for key, before, after in group.rows
            if key.axis
            and before
            and all(is_of_gradients(key, call, group.old) for row in before for call in row.calls)
        )
        for scope in Scope:
            pairs = (
                (count_calls(before), count_calls(after), len(group.owners))
                for group in between.differences
                for key, before, after in group.rows
                if before and scope.includes(key, before[0].calls[0], group.old)
            )
            for ratio in _find_most_common_ratios(pairs):
                # Only the forward scope excludes units.
                units = between.state.items() if scope is Scope.FORWARD else ()
                excluded = tuple(owner for owner, content in units if content.stays_unsharded)
                step = cls(scope=scope, factor=ratio, has_activations=sends, excluded=excluded)
                has_others = scope in {Scope.PASSES, Scope.PASSES_AND_OUTSIDE}
                for reductions_factor in (_ONE, *reductions) if has_others else (_ONE,):
                    guess = replace(step, reductions=reductions_factor)
                    if guess.fits(unique):
                        yield guess

    def is_plausible(self, old: State, new: State) -> bool:
        # If forward repeats all modules, no module disappears.
        return self.scope is not Scope.FORWARD or old.keys() <= new.keys()

    def describe(self, recordings: Recordings) -> str:
        matches: Matches
        match self.scope:
            case Scope.EVERYTHING | Scope.OPTIMIZER | Scope.OUTSIDE:
                where, matches = "", _is_any_call
                if self.scope is not Scope.EVERYTHING:
                    matches = _make_phase_matcher(Phase[self.scope.name])
                    where = f" {name_phase(Phase[self.scope.name])}"
                # A step with forward and backward needs no kinds.
                sent = [*_list_new_matching_calls(matches, recordings)]
                phases = {key.phase for key, _ in sent}
                is_step = {Phase.FORWARD, Phase.BACKWARD} <= phases
                kinds = "" if is_step else _describe_matching_kinds(matches, recordings)
                roles = {call.role for _, call in sent}
                noun = "gradient reductions" if roles == {Role.GRADIENTS} else "calls"
                calls = f"all {noun}{where}{kinds}"
                return self._describe_call_factor(calls, matches, recordings)
            case Scope.ACTIVATIONS:
                return self._describe_call_factor("activation calls", _is_activation, recordings)
            case Scope.FORWARD:
                return self._describe_forward_factor(recordings)
        reductions = recordings.ratio(_is_gradient_reduction, is_shared=True)
        calls = "all forward and backward calls"
        matches = _is_non_gradient_call_in_pass
        if self.has_activations and reductions != self.factor:
            calls = "forwards and backwards"
        phases = {key.phase for key, _ in _list_new_matching_calls(matches, recordings)}
        if phases == {Phase.FORWARD} or recordings.ratio(matches, is_shared=True) != self.factor:
            # Another step changes what backward sends.
            matches = _make_phase_matcher(Phase.FORWARD)
            calls = f"all forward {self._choose_noun_for_calls(matches, recordings)}"
        roles = {call.role for _, call in _list_new_matching_calls(matches, recordings)}
        if roles == {""}:  # user code's, which no module shows
            calls += _describe_matching_kinds(matches, recordings)
        text = self._describe_call_factor(calls, matches, recordings)
        if reductions in {None, 0, self.factor}:
            return text
        if reductions != 1:
            return f"{text}, gradient reductions: {name_factor(reductions)} as many"
        is_same = recordings.is_unchanged(_is_gradient_reduction)
        return f"{text}, gradient reductions {'unchanged' if is_same else 'as often as before'}"

    def _describe_call_factor(self, calls: str, matches: Matches, recordings: Recordings) -> str:
        is_common = recordings.ratio(matches, is_shared=True) == self.factor
        rest = "" if is_common else ", apart from the other changes"
        return f"{calls}: {name_factor(self.factor)} as many{rest}"

    def _describe_forward_factor(self, recordings: Recordings) -> str:
        def is_counted(key: RowKey, _call: Calls, owner: Owner) -> bool:
            return key.phase is Phase.FORWARD and owner not in self.excluded

        is_common = recordings.ratio(is_counted, is_shared=True) == self.factor
        owners = self._find_owners_with_changed_forward(recordings) if self.excluded else []
        who = f" of {name_modules(owners)}" if self.excluded else ""
        calls = self._choose_noun_for_calls(is_counted, recordings)
        parts = [f"forward {calls}{who}: {name_factor(self.factor)} as many"]
        parts += [] if is_common else ["apart from the other changes"]
        is_backward = _make_phase_matcher(Phase.BACKWARD)
        gathers = recordings.ratio(lambda *call: is_backward(*call) and is_gather(*call[:2]))
        if recordings.is_unchanged(is_backward):
            parts += ["backward calls unchanged"]
        elif gathers not in {None, 0, 1}:
            parts += [f"gathers in backward: {name_factor(gathers)} as many"]
        if not recordings.is_unchanged(is_backward) and recordings.is_unchanged(
            _is_gradient_reduction
        ):
            parts += ["gradient reductions unchanged"]
        text = ", ".join(parts)

        def is_gather_of_excluded(key: RowKey, call: Calls, owner: Owner) -> bool:
            return owner in self.excluded and is_gather(key, call)

        if not self.excluded:
            return text
        how = "changed otherwise"
        if recordings.is_unchanged(is_gather_of_excluded):
            how = "unchanged"
        elif recordings.ratio(is_gather_of_excluded) == 1:
            how = "as often as before"
        units = name_modules(self.excluded)
        return f"{text}; gathers of {units} {how} (not resharded after forward)"

    def _choose_noun_for_calls(self, matches: Matches, recordings: Recordings) -> str:
        # If units stay unsharded, a forward gathers less; it may run as often as before.
        roles = {call.role for _, call in _list_new_matching_calls(matches, recordings)}
        is_precise = self.factor < 1 or self.scope is not Scope.FORWARD
        return "gathers" if is_precise and roles == {Role.PARAMETERS} else "calls"

    def _find_owners_with_changed_forward(self, recordings: Recordings) -> list[Owner]:
        old, new = recordings.states
        return [
            owner
            for owner in old
            if owner not in self.excluded and owner in new
            if any(
                key.phase is Phase.FORWARD and key.axis
                for key in keys_that_differ(old[owner], new[owner])
            )
        ]

    def find_cause(self, recordings: Recordings) -> str:
        is_whole = self.factor.denominator == 1
        if self.factor < 1:
            kinds = {row.what for side in recordings.sides for row in side.collectives}
            is_between_stages = set() != kinds <= BETWEEN_STAGES
            placed = "fewer micro-batches or stages, or stages placed on other ranks"
            return placed if is_between_stages else self._explain_fewer_passes(recordings)
        if not (is_whole or self.scope is Scope.FORWARD):
            return ""
        often = f"{self.factor} times as many"
        reductions = recordings.ratio(_is_gradient_reduction, is_shared=True)
        is_of_passes = self.scope in {Scope.PASSES, Scope.PASSES_AND_OUTSIDE}
        if self.scope is Scope.EVERYTHING or (is_of_passes and reductions == self.factor):
            rows = recordings.new.collectives
            roles = {call.role for row in rows for call in row.calls}
            phases = {row.phase for row in rows}
            if Role.GRADIENTS in roles:
                # Without other calls, nothing shows how many steps ran.
                again = ""
                if roles == {Role.GRADIENTS}:
                    again = f", or each gradient is reduced {name_times(self.factor.numerator)}"
                elif roles <= _OF_DDP and phases <= _PASSES:
                    again = ", or DDP's no_sync() no longer covers forward and backward"
                return f"{often} steps, or {often} micro-batches that each reduce gradients{again}"
            if any(row.what == "send" for row in rows):
                return f"{often} micro-batches, stages per rank or steps"
            if phases.isdisjoint(_PASSES):
                return f"{often} steps, or as many steps issue these calls more often"
            if phases <= {Phase.FORWARD}:
                return f"{often} forwards"
            return f"{often} steps, micro-batches or inputs of one loss"
        if self.scope is Scope.FORWARD:
            return self._explain_more_forwards(recordings, often, is_whole=is_whole)
        if self.scope is Scope.OPTIMIZER and is_whole:
            norms = "norms are computed more often, e.g. by clip_grad_norm_ in each micro-batch"
            return f"{often} optimizer steps, or {norms}" if _has_norm_calls(recordings.new) else ""
        if self.scope is Scope.OUTSIDE and is_whole:
            sent = (row for row in recordings.new.collectives if row.phase is Phase.OUTSIDE)
            again = f"each gradient is reduced {name_times(self.factor.numerator)}"
            roles = {call.role for row in sent for call in row.calls}
            return f"{again}, e.g. in each micro-batch" if roles == {Role.GRADIENTS} else ""
        if not is_of_passes or reductions is None:
            return ""
        if reductions != 1:
            return f"{often} micro-batches, with {reductions} times as many gradient reductions"
        # Each backward gathers units that forward reshards, so their gathers show how many ran.
        is_certain = self.has_activations or any(
            row.phase is Phase.BACKWARD and role_of((row,)) == Role.PARAMETERS
            for row in recordings.old.rows
        )
        resharded = "parameters resharded after each backward"
        if recordings.has_same_backwards:
            return f"{resharded}: is set_reshard_after_backward(False) still called?"
        alternative = "" if is_certain else f", or {resharded}"
        return f"gradients accumulated over {often} micro-batches{alternative}"

    def _explain_fewer_passes(self, recordings: Recordings) -> str:
        reshards = [count_acts(side, Phase.FORWARD, "reshard") for side in recordings.sides]
        if self.scope is Scope.FORWARD:
            is_of_forward = recordings.is_unchanged(_make_phase_matcher(Phase.BACKWARD))
            return f"fewer {NO_BACKWARD}" if is_of_forward and reshards[0] > reshards[1] else ""
        often = f"{name_factor(self.factor)} as many"
        roles = {call.role for row in recordings.old.collectives for call in row.calls}
        if self.scope is Scope.EVERYTHING and {Role.PARAMETERS, Role.GRADIENTS} <= roles:
            return f"{often} steps, or {often} micro-batches that each reduce gradients"
        is_of_passes = self.scope in {Scope.PASSES, Scope.PASSES_AND_OUTSIDE}
        if not is_of_passes or recordings.ratio(_is_gradient_reduction, is_shared=True) != 1:
            return ""
        # Units that stay gathered after backward send less, but forward still reshards them.
        is_certain = self.has_activations or reshards[0] > reshards[1]
        return f"gradients accumulated over {often} micro-batches" if is_certain else ""

    def _explain_more_forwards(self, recordings: Recordings, often: str, *, is_whole: bool) -> str:
        sides = ([row for row in side.rows if row.what == "send"] for side in recordings.sides)
        old_sends, new_sends = map(count_calls, sides)
        if new_sends:
            is_same = is_whole and new_sends == old_sends * self.factor
            return f"{often} micro-batches" if is_same else ""
        freed = count_acts(recordings.old, Phase.BACKWARD, "reshard")
        more = count_more_acts(recordings, Phase.BACKWARD, "reshard")
        if any(freed[owner] for owner in more):
            return (
                "forward runs several times before one backward, e.g. for two inputs or in a loop"
            )
        return explain_added_forwards(recordings)


def _has_norm_calls(profile: CommProfile) -> bool:
    return any(NORM in row.what and row.phase is Phase.OPTIMIZER for row in profile.rows)


def explain_added_forwards(recordings: Recordings) -> str:
    """Return why forwards without a backward were added."""
    if not any(row.phase is Phase.BACKWARD for side in recordings.sides for row in side.rows):
        return "more forwards, such as more batches"
    more = count_more_acts(recordings, Phase.FORWARD, "unshard")
    _, new = recordings.states
    is_frozen = any(content.reductions for content in new.values()) and not any(
        new[owner].reductions for owner in more
    )
    return f"{NO_BACKWARD}{', or frozen modules that run on more inputs' if is_frozen else ''}"


def _is_any_call(_key: RowKey, _call: Calls, _owner: Owner) -> bool:
    return True


def _make_phase_matcher(phase: Phase) -> Matches:
    return lambda key, _call, _owner: key.phase is phase and key.axis != ""


def _is_non_gradient_call_in_pass(key: RowKey, call: Calls, _owner: Owner) -> bool:
    return key.phase in _PASSES and key.axis != "" and call.role != Role.GRADIENTS


def _describe_matching_kinds(matches: Matches, recordings: Recordings) -> str:
    """Name the kinds and axes of matching calls: `` (recv[pp], send[pp])``; empty if many."""
    kinds = {str(key) for key, _ in _list_new_matching_calls(matches, recordings)}
    return f" ({', '.join(sorted(kinds))})" if 0 < len(kinds) <= _MAX_KINDS else ""


def _list_new_matching_calls(
    matches: Matches, recordings: Recordings
) -> Iterator[tuple[RowKey, Calls]]:
    """Iterate over the matching collectives of the new recording."""
    for owner, content in recordings.states[1].items():
        for key, call in content.calls():
            if key.axis and matches(key, call, owner):
                yield key, call


def _is_activation(_key: RowKey, call: Calls, _owner: Owner) -> bool:
    return call.role == Role.ACTIVATIONS


def _is_gradient_reduction(key: RowKey, call: Calls, _owner: Owner) -> bool:
    return key.phase in _PASSES and call.role == Role.GRADIENTS


def _find_most_common_ratios(pairs: Iterable[tuple[int, int, int]]) -> list[Fraction]:
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


@dataclass(frozen=True, kw_only=True)
class Steps(GlobalStep):
    """The step has `factor` times as many forwards with a backward, and as many without."""

    order: ClassVar[int] = 3
    writes: ClassVar[Part] = "counts"
    least_rows: ClassVar[int] = 3
    factor: int
    backwards: int
    """How often backward ran, or reduced the gradients of each unit, before."""

    @property
    def description_cost(self) -> float:
        return 2.5

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        changes = {
            (count_calls(before), count_calls(after))
            for group in between.differences
            for key, before, after in group.rows
            if key.axis and key.phase is Phase.BACKWARD
        }
        if len(changes) == 1:
            ((before, after),) = changes
            if before and after > before and after % before == 0:
                yield cls(factor=after // before, backwards=before)

    def change(self, row: Row, content: Content) -> Row:
        # A row is one call, or several equal calls, in each forward or backward.
        if row.phase is Phase.FORWARD:
            added = (self.factor - 1) * self.backwards
            counts = [call.count + added for call in row.calls]
        else:
            counts = [call.count * self.factor for call in row.calls]
        calls = (replace(call, count=n) for call, n in zip(row.calls, counts, strict=True))
        return replace(row, calls=tuple(calls))

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        return key.phase in _PASSES

    def describe(self, recordings: Recordings) -> str:
        forwards = (self.factor - 1) * self.backwards
        backward = _make_phase_matcher(Phase.BACKWARD)
        is_common = recordings.ratio(backward) == self.factor
        calls = "all backward calls" if is_common else "backward calls"
        return f"{calls}: {name_factor(self.factor)} as many, and {forwards} more forwards"

    def find_cause(self, recordings: Recordings) -> str:
        often = f"{self.factor} times as many"
        return (
            f"{often} steps, or {often} micro-batches that each reduce gradients, beside as many "
            "forwards without a backward as before"
        )


class _Scaled(GlobalStep):
    order: ClassVar[int] = 3
    writes: ClassVar[Part] = "sizes"
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

    least_rows: ClassVar[int] = 2
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
        is_activation = _guess_role(key, call.role) == Role.ACTIVATIONS
        return key.subject == "collective" and (is_activation or is_loss)

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        return self.is_affected(key, call)

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        sizes_by_part: defaultdict[tuple[str, str], list[tuple[int, int, int]]] = defaultdict(list)
        for group in between.differences:
            for key, before, after in group.rows:
                sizes, role = sizes_of(before, after), role_of(before)
                if sizes is not None and role == role_of(after):
                    role = _guess_role(key, role)
                    axis = key.axis if role == Role.GRADIENTS else ""
                    sizes_by_part[role, axis].append((*sizes, len(group.owners)))
        for (role, axis), pairs in sizes_by_part.items():
            for ratio in (
                _find_most_common_ratios(pairs)
                if role in {Role.ACTIVATIONS, Role.GRADIENTS}
                else ()
            ):
                for with_loss in (False,) if axis else (False, True):
                    step = cls(factor=ratio, axis=axis, with_loss=with_loss)
                    if step.fits(between.state):
                        yield step

    @property
    def is_effect(self) -> bool:
        return bool(self.axis)

    def describe(self, recordings: Recordings) -> str:
        loss = " and the loss" if self.with_loss else ""
        tensors = f"gradients[{self.axis}]"
        if not self.axis:
            kinds = _describe_matching_kinds(
                lambda key, call, _: self.is_affected(key, call), recordings
            )
            tensors = f"activations{loss}{kinds}"
        return f"{tensors}: {name_factor(self.factor)} the bytes per call"

    def find_cause(self, recordings: Recordings) -> str:
        if self.axis:
            return ""  # the sizes of gradients depend on their parameters and on the mesh
        rows = [
            row
            for row in recordings.old.collectives
            if any(_guess_role(row.key, call.role) == Role.ACTIVATIONS for call in row.calls)
        ]
        kinds, axes = {row.what for row in rows}, {row.axis for row in rows}
        trees = recordings.trees
        sizes = ["batch size", "sequence length"]
        if kinds == {"all_to_all"}:
            sizes += ["expert capacity", "expert routing"]
        elif "all_to_all" in kinds and trees and trees.placed_axes.isdisjoint(axes):
            # No parameters are placed on these axes, so they may belong to experts.
            sizes += ["expert capacity"]
        old, new = map(list_gathers, recordings.sides)
        if not (old == new != set() or (trees and not trees.is_other_shape)):
            sizes.append("parameter shape" if trees else "model width")
        return f"a different {', '.join(sizes[:-1])} or {sizes[-1]}"


def _guess_role(key: RowKey, role: str) -> str:
    """Return the role that decides how a call's size changes; stages send each other activations.

    This is a guess only for calls without a proven role.
    """
    return Role.ACTIVATIONS if not role and key.what in BETWEEN_STAGES else role


@dataclass(frozen=True, kw_only=True)
class Dtype(_Scaled):
    """All collectives with certain roles and axes have a new dtype, which changes their sizes."""

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

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        candidates: dict[tuple[str, str, Fraction], dict[tuple[str, str], set[Owner]]] = {}
        for group in between.differences:
            for key, was, now in group.rows:
                sizes, role = sizes_of(was, now), role_of(was)
                if sizes is None and count_calls(was) == count_calls(now):
                    # The calls differ in size, such as DDP's buckets; their sums have the factor.
                    sizes = nbytes_of(was), nbytes_of(now)
                old, new = (
                    get_sole((call.dtype for call in calls_of(rows)), "") for rows in (was, now)
                )
                is_changed = role and role == role_of(now) and old and new and old != new
                if not (is_changed and sizes and all(sizes)):
                    continue
                # Bytes must be proportional to the element size, unknown if calls mix dtypes.
                if "+" in old + new or sizes[1] * itemsize(old) == sizes[0] * itemsize(new):
                    parts = candidates.setdefault((old, new, Fraction(sizes[1], sizes[0])), {})
                    parts.setdefault((role, key.axis), set()).update(group.owners)
        for (old, new, factor), owners in candidates.items():
            by_role = [{part for part in owners if part[0] == role} for role, _ in owners]
            choices = [set(owners), *by_role, *({part} for part in owners)]
            for chosen in dict.fromkeys(map(frozenset, choices)):
                changed = frozenset(owner for part in chosen for owner in owners[part])
                for limit in (frozenset[Owner](), changed):
                    step = cls(parts=chosen, old=old, new=new, factor=factor, owners=limit)
                    if step.fits(between.state):
                        yield step

    def find_problem(self, recordings: Recordings) -> Problem | None:
        return "dtype" if Role.GRADIENTS in self.roles else None

    def describe(self, recordings: Recordings) -> str:
        axes: defaultdict[str, list[str]] = defaultdict(list)
        for role, axis in sorted(self.parts, key=lambda part: (_ROLES.index(part[0]), part[1])):
            axes[role].append(axis)
        parts = ", ".join(f"{role}[{','.join(names)}]" for role, names in axes.items())
        where = f"{name_modules(self.owners)}: " if self.owners else ""
        nbytes = "same" if self.factor == 1 else f"{name_factor(self.factor)} the"
        return f"{where}{parts} {self.old} -> {self.new}, {nbytes} bytes"

    def find_cause(self, recordings: Recordings) -> str:
        trees, is_refuted = recordings.trees, False
        if trees is not None:
            is_dtype, is_policy = trees.is_other_dtype, trees.is_other_policy
            is_refuted = not (is_dtype or is_policy)
            if is_dtype != is_policy:
                return f"{_MODEL_DTYPE if is_dtype else 'MixedPrecisionPolicy'}, as the tree shows"
        if change := self.find_change_of_torch(recordings):
            return change
        # Compare the gathers too: if their number also changed, no step reports their new dtype.
        types = [{dtype for *_, dtype in list_gathers(side)} for side in recordings.sides]
        if Role.PARAMETERS in self.roles or types[0] != types[1]:
            # Trees do not show hooks, so they cannot rule out this cause.
            hook = "an fsdp_pre_all_gather hook of the weights, such as torchao's float8 all-gather"
            if is_refuted:
                return hook
            hook = f"{hook}, " if ("float8" in self.old) != ("float8" in self.new) else ""
            return f"{hook}MixedPrecisionPolicy, or {_MODEL_DTYPE}"
        gathered = list_gathered_axes(recordings.old)
        is_partial = gathered and gathered.isdisjoint(axis for _, axis in self.parts)
        if Role.GRADIENTS in self.roles and not is_partial:
            hook = "a communication hook"
            if is_refuted:
                return f"{hook}, or a manual cast of gradients"
            has_units = gathered or any(row.subject == "reshard" for row in recordings.old.rows)
            if not has_units:
                return f"{hook}, or parameters of another dtype"
            return f"reduce_dtype of MixedPrecisionPolicy, or {hook}"
        dtype = "MixedPrecisionPolicy, " if gathered else f"{_MODEL_DTYPE}, "
        return f"{'' if is_refuted else dtype}autocast, or a manual cast"

    def find_change_of_torch(self, recordings: Recordings) -> str:
        """Return the change in torch that has this effect; empty if there is none."""
        old, trees = recordings.old, recordings.trees
        versions = (re.findall("[0-9]+", side.torch_version)[:2] for side in recordings.sides)
        before, after = (tuple(map(int, version)) for version in versions)
        low, high = (self.old, self.new) if before < after else (self.new, self.old)
        if (
            not (before and after)
            or (before < _REDUCES_IN_FLOAT32) == (after < _REDUCES_IN_FLOAT32)
            or self.roles != {Role.GRADIENTS}
            or high != "float32"
            or low not in {"bfloat16", "float16"}
            # This rule applies only to FSDP, which reshards; DDP does not.
            or all(row.subject != "reshard" for row in old.rows)
        ):
            return ""
        axes = {axis for _, axis in self.parts}
        gathered = list_gathered_axes(old)
        if gathered and axes.isdisjoint(gathered):
            return (
                "since torch 2.15, FSDP2 casts partial gradients to reduce_dtype or the parameter "
                f"dtype first, so DTensor reduces them over {', '.join(sorted(axes))} in float32, "
                f"not {low}"
            )
        if trees is None:
            setting = "reduce_dtype was changed, or is unset"
        elif trees.is_reduce_dtype_unset:
            setting = "reduce_dtype is unset, as the tree shows"
        else:
            return ""
        return (
            f"{setting}: since torch 2.15, FSDP2 reduces in float32, not {low}; pass "
            f"reduce_dtype=torch.{self.old} to keep the bytes"
        )
