"""Find the likely causes of the steps that explain a diff."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from pytest_fsdp_comm.comm.events import ROOT_FQN, Phase, Role
from pytest_fsdp_comm.comm.explanation.amounts import Counts, Dtype, Scope, Sizes
from pytest_fsdp_comm.comm.explanation.passes import NORM
from pytest_fsdp_comm.comm.explanation.search import Explanation
from pytest_fsdp_comm.comm.explanation.states import Owner, count_of, role_of, sole, template
from pytest_fsdp_comm.comm.explanation.steps import Evidence, Replaced, Step, sent_rows
from pytest_fsdp_comm.comm.profile import CommProfile
from pytest_fsdp_comm.text.fqn import name_owners

# A step is one change that explains many rows of a diff (see `steps`). The rule for a kind of step
# names all causes known to have this effect, except those that the recordings, the test's sharding
# trees or the torch versions rule out. Other rules handle combinations of steps, or leftover rows.
# docs/causes.md lists the causes; `tests/regressions/look_alikes.json` lists causes of equal diffs.

_NOT_REDUCED: Final = ", FSDP does not reduce their gradients"
_MISSING_ROOT: Final = (
    f"fully_shard on the root is missing: its parameters are not sharded{_NOT_REDUCED}, and each "
    "unit below becomes a root; or the root's forward is not called"
)
_NORM_NBYTES: Final = 8  # a float64
NO_BACKWARD: Final = "forwards without a backward, such as an evaluation"
_MODEL_DTYPE: Final = "the dtype of the model's parameters"
_FROZEN: Final = "frozen, as the tree shows"
_THAWED: Final = f"parameters are no longer {_FROZEN}"
_REDUCES_IN_FLOAT32: Final = (2, 15)
"""The first torch version in which FSDP2 reduces in the parameter's original dtype if
``reduce_dtype`` is unset, and casts partial gradients before DTensor reduces them. Older FSDP2, and
FSDP1 in all versions, use ``param_dtype`` in both cases. Observed with torch 2.13.0 and 2.15.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A likely cause, with the remedy if one is known."""

    text: str
    steps: tuple[Step, ...] = ()
    is_of_torch: bool = False
    """Whether a different version of torch caused the change, rather than the user's code."""
    is_unwanted: bool = False
    """Whether the cause is a regression even if none of its steps is a regression."""

    @property
    def is_of_regression(self) -> bool:
        return self.is_unwanted or any(
            isinstance(step, Replaced) and _is_regression(step) for step in self.steps
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Evidence for causes: both recordings, and changes in the test's sharding trees."""

    old: CommProfile
    new: CommProfile
    trees: Evidence | None

    @property
    def sides(self) -> tuple[CommProfile, CommProfile]:
        return self.old, self.new


def _is_regression(step: Replaced) -> bool:
    """Whether a step with a known cause counts as a regression, which is listed first."""
    match step.kind:
        case "reduced times" | "redistributed" | "gathered in full" | "called":
            return True
        case "gathered in backward" | "used in backward" | "split off":
            return step.is_added
        case "phase":
            return step.facts["has_norms"] and not step.is_added
    return step.kind == "unit" and not step.is_added


def find_causes(
    explanation: Explanation, inputs: Inputs, *, is_same_mesh: bool = True
) -> tuple[Cause, ...]:
    """Find the likely causes of a diff: regressions first, changes in torch last."""
    causes = [
        *_roots(explanation, inputs),
        *swapped_axes(*inputs.sides),
        *_norms_one_by_one(explanation, inputs),
        *_left_unsharded(explanation, inputs),
        *_evaluations(explanation, inputs),
    ]
    explained = [step for cause in causes for step in cause.steps]
    for step in explanation.steps:
        is_of_mesh = step.kind in {"sizes", "redistributed"} and not is_same_mesh
        # If rows are left over, the gathers may only have moved from another phase to recompute.
        is_in_doubt = step.kind == "recomputed" and not explanation.is_exact
        if step not in explained and not is_of_mesh and not is_in_doubt:
            text = _cause(step, inputs)
            is_of_torch = isinstance(step, Dtype) and text == _change_of_torch(step, inputs) != ""
            causes.append(Cause(text=text, steps=(step,), is_of_torch=is_of_torch))
    causes += _prefetching(explanation, inputs)
    unique = {cause.text: cause for cause in causes if cause.text}
    return tuple(
        sorted(unique.values(), key=lambda cause: (not cause.is_of_regression, cause.is_of_torch))
    )


# Rules for combinations of steps, and for leftover rows.
def _roots(explanation: Explanation, inputs: Inputs) -> list[Cause]:
    """Detect a root unit that was removed or is not called, so that units below it become roots."""
    lost_roots, unresharded = (
        [
            step
            for step in explanation.steps
            if isinstance(step, Replaced) and step.kind == kind and not step.is_added
        ]
        for kind in ("unit", "freed")
    )
    lost_roots = [step for step in lost_roots if step.owners == (ROOT_FQN,)]
    trees = inputs.trees
    if trees is not None and trees.lost_root:
        # Ignore units that only one tree has, because they were added or removed with the root.
        units, roots = trees.units, trees.new_roots
        unresharded = [step for step in unresharded if units.intersection(step.owners) <= roots]
        # If the snapshot has no backward, there were no reductions to lose.
        reduces = any(role_of((row,)) == Role.GRADIENTS for row in inputs.old.rows)
        text = trees.lost_root if reduces else trees.lost_root.replace(_NOT_REDUCED, "")
        return [Cause(text=text, steps=(*lost_roots, *unresharded), is_unwanted=True)]
    is_alone = any(
        (change.subject, change.key.phase, change.after[-1][0]) == ("ahead", Phase.BACKWARD, 0)
        for change in explanation.timings
    )
    if trees is None and lost_roots and (unresharded or is_alone):
        return [Cause(text=_MISSING_ROOT, steps=(*lost_roots, *unresharded))]
    return []


def swapped_axes(old: CommProfile, new: CommProfile) -> Iterator[Cause]:
    """Yield causes for mesh axes that swapped places or sizes."""
    was, now = (
        {axis.name: (axis.size, axis.dims[0][1]) for axis in side.mesh_axes if len(axis.dims) == 1}
        for side in (old, new)
    )
    for first, second in combinations(sorted(was.keys() & now.keys()), 2):
        sizes, strides = zip(was[first], was[second], strict=True)
        new_sizes, new_strides = zip(now[first], now[second], strict=True)
        if (strides[0] < strides[1]) != (new_strides[0] < new_strides[1]):
            inner = first if new_strides[0] < new_strides[1] else second
            text = f"mesh axes {first} and {second} are swapped: {inner} is now the inner one"
            yield Cause(text=text, is_unwanted=True)
        elif new_sizes == sizes[::-1] != sizes:
            yield Cause(text=f"the sizes of {first} and {second} are swapped", is_unwanted=True)


def _norms_one_by_one(explanation: Explanation, inputs: Inputs) -> Iterator[Cause]:
    """Detect norms that used to be stacked and reduced in one call, but now need one call each."""
    (was, norms_before), (now, norms) = map(_reduced_norms, inputs.sides)
    removed, added = was - now, now - was
    nbytes = [sum(size * count for size, count in calls.items()) for calls in (removed, added)]
    is_single = removed and added and max(added) <= _NORM_NBYTES < min(removed)
    if norms > norms_before and is_single and nbytes[1] <= nbytes[0]:
        kinds = {"phase", "gathered in full", "redistributed"}
        steps = [step for step in explanation.steps if step.kind in kinds]
        text = (
            "norms of gradients or weights are reduced one by one: pass all parameters to one "
            "clip_grad_norm_ call, or stack the norms before reducing them"
        )
        yield Cause(text=text, steps=tuple(steps), is_unwanted=True)


def _reduced_norms(profile: CommProfile) -> tuple[Counter[int], int]:
    """Count all-reduces by size, in phases that reduce norms of DTensors; also count the norms."""
    norms, calls = Counter[Phase](), Counter[int]()
    rows = [row for row in profile.rows if row.owner is None]
    for row in rows:
        norms[row.phase] += row.count * (NORM in row.what)
    for row in rows:
        for call in row.calls if row.what == "all_reduce" and norms[row.phase] else ():
            calls[call.nbytes] += call.count
    return calls, norms.total()


def _left_unsharded(explanation: Explanation, inputs: Inputs) -> Iterator[Cause]:
    """Detect units that now stay unsharded after backward or the step, if nothing else changed."""
    rows = set(explanation.before) ^ set(explanation.after)
    was, now = (
        Counter({(row.owner, row.phase, row.what): row.count for row in side})
        for side in (explanation.before, explanation.after)
    )
    acts = {(phase, act) for _, phase, act in was - now}
    phases = {phase for phase, act in acts if act == "reshard"}
    sent = [row for row in rows if row.subject != "reshard" and role_of((row,)) != Role.PARAMETERS]
    if explanation.steps or sent or now - was or (Phase.OUTSIDE, "unshard") in acts:
        return
    owners = {row.owner for row in rows}
    # If no other unit ran in forward, this may be an evaluation of only these units.
    has_others = not owners.issuperset(_acts(inputs.new, Phase.FORWARD, "unshard"))
    is_resharded = any(now[owner, Phase.BACKWARD, "reshard"] for owner in owners)
    prefix = f"{name_owners(owners)} left unsharded after"
    if phases == {Phase.OUTSIDE} and has_others:
        yield Cause(text=f"{prefix} the step: is reshard() still called?", is_unwanted=True)
    elif phases == {Phase.BACKWARD} and not is_resharded:
        text = f"{prefix} backward, e.g. by set_reshard_after_backward(False)"
        yield Cause(text=text, is_unwanted=True)


def _evaluations(explanation: Explanation, inputs: Inputs) -> Iterator[Cause]:
    """Detect added evaluations: forward gathers all units, or all resharded units, more often."""
    phases = {row.phase for row in {*explanation.before} ^ {*explanation.after}}
    freed, units = (_acts(inputs.old, Phase.FORWARD, act) for act in ("reshard", "unshard"))
    more = _more_acts(inputs, Phase.FORWARD, "unshard").keys()
    if phases - {Phase.OUTSIDE} == {Phase.FORWARD} and more and more >= (freed or units).keys():
        yield Cause(text=NO_BACKWARD)


def _prefetching(explanation: Explanation, inputs: Inputs) -> Iterator[Cause]:
    timings = [change for change in explanation.timings if change.subject == "ahead"]
    rows = (*explanation.before, *explanation.after)
    has_leftovers = any(role_of((row,)) == Role.PARAMETERS for row in rows)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        changes = [change for change in timings if change.key.phase is phase]
        distances = [(change.before[-1][0], change.after[-1][0]) for change in changes]
        later = {after < before for before, after in distances}
        if explanation.steps or not explanation.is_exact:
            later = set()
        call, changed = f"set_modules_to_{phase}_prefetch", f"{phase}_prefetch"
        trees = inputs.trees
        if later == {True} and (trees is None or {changed, "prefetch"} & trees.prefetching):
            # If every unit is a root, no unit prefetches another.
            is_root_called = _acts(inputs.new, phase, "reshard")[ROOT_FQN]
            has_root = trees or phase is Phase.FORWARD or is_root_called
            is_ahead = any(after for _, after in distances)
            root = "" if has_root or is_ahead else ", or fully_shard on the root is missing"
            yield Cause(text=f"less {phase} prefetching ({call}; FSDP1: {changed}){root}")
        elif trees is None and later == {True, False}:
            yield Cause(text=f"{call} lists different modules, or modules run in a different order")
        elif trees is not None and changed in trees.prefetching and (distances or has_leftovers):
            yield Cause(text=f"{call} lists different modules, as the tree shows")


# Rules for a single step.
def _cause(step: Step, inputs: Inputs) -> str:
    """Return a step's cause; empty if it is unknown, or if the step's sentence already names it."""
    match step:
        case Counts():
            return _of_counts(step, inputs)
        case Sizes():
            return _of_sizes(step, inputs)
        case Dtype():
            return _of_dtype(step, inputs)
        case Replaced(kind="recomputed" | "phase" | "redistributed" | "gathered in full"):
            return _of_passes(step)
        case Replaced():
            return _of_units(step, inputs)
    return ""


def _gathers(profile: CommProfile) -> set[tuple[Owner, str, int, str]]:
    """Return the unit, axis, bytes per call and dtype of each gather of parameters."""
    return {
        (row.owner, row.axis, call.nbytes, call.dtype)
        for row in profile.collectives
        for call in row.calls
        if call.role == Role.PARAMETERS
    }


def _gathered_axes(profile: CommProfile) -> set[str]:
    return {axis for _, axis, *_ in _gathers(profile)}


def _acts(profile: CommProfile, phase: Phase, act: str) -> Counter[Owner]:
    """Count how often each unit is unsharded, resharded or reduced in a phase."""
    counts = Counter[Owner]()
    for row in profile.rows:
        if (row.phase, row.what) == (phase, act) and role_of((row,)) in {"", Role.GRADIENTS}:
            counts[row.owner] += row.count
    return counts


def _more_acts(inputs: Inputs, phase: Phase, act: str) -> Counter[Owner]:
    was, now = (_acts(side, phase, act) for side in inputs.sides)
    return now - was


def _of_counts(step: Counts, inputs: Inputs) -> str:
    is_whole = step.factor.denominator == 1
    if step.factor < 1 or not (is_whole or step.scope is Scope.FORWARD):
        return ""
    often = f"{step.factor} times as many"
    if step.scope is Scope.EVERYTHING:
        rows = inputs.new.collectives
        if any(call.role == Role.GRADIENTS for row in rows for call in row.calls):
            return f"{often} steps, or {often} micro-batches that each reduce gradients"
        is_forward = {row.phase for row in rows} <= {Phase.FORWARD}
        return (
            f"{often} {'forwards' if is_forward else 'steps, micro-batches or inputs of one loss'}"
        )
    if step.scope is Scope.FORWARD:
        sides = ([row for row in side.rows if row.what == "send"] for side in inputs.sides)
        was, now = map(count_of, sides)
        if now:
            return f"{often} micro-batches" if is_whole and now == was * step.factor else ""
        freed = _acts(inputs.old, Phase.BACKWARD, "reshard")
        if any(freed[owner] for owner in _more_acts(inputs, Phase.BACKWARD, "reshard")):
            return (
                "forward runs several times before one backward, e.g. for two inputs or in a loop"
            )
        return NO_BACKWARD
    is_of_passes = step.scope in {Scope.PASSES, Scope.PASSES_AND_OUTSIDE}
    if not is_of_passes or step.reductions == step.factor:
        return ""
    if step.reductions != 1:
        return f"{often} micro-batches, with {step.reductions} times as many gradient reductions"
    alternative = "" if step.has_activations else ", or parameters resharded after each backward"
    return f"gradients accumulated over {often} micro-batches{alternative}"


def _of_sizes(step: Sizes, inputs: Inputs) -> str:
    if step.axis:
        return ""  # the sizes of gradients depend on their parameters and on the mesh
    kinds = {row.what for row in inputs.old.collectives if role_of((row,)) == Role.ACTIVATIONS}
    sizes = ["batch size", "sequence length"]
    if kinds == {"all_to_all"}:
        sizes += ["expert capacity", "expert routing"]
    was, now = map(_gathers, inputs.sides)
    if not (was == now != set() or (inputs.trees and not inputs.trees.is_other_shape)):
        sizes.append("model width")
    return f"a different {', '.join(sizes[:-1])} or {sizes[-1]}"


def _of_dtype(step: Dtype, inputs: Inputs) -> str:
    trees, is_refuted = inputs.trees, False
    if trees is not None:
        is_dtype, is_policy = trees.is_other_dtype, trees.is_other_policy
        is_refuted = not (is_dtype or is_policy)
        if is_dtype != is_policy:
            return f"{_MODEL_DTYPE if is_dtype else 'MixedPrecisionPolicy'}, as the tree shows"
    if torchs := _change_of_torch(step, inputs):
        return torchs
    # Compare the gathers too: if their number also changed, no step reports their new dtype.
    types = [{dtype for *_, dtype in _gathers(side)} for side in inputs.sides]
    if Role.PARAMETERS in step.roles or types[0] != types[1]:
        # Trees do not show hooks, so they cannot rule out this cause.
        hook = "an fsdp_pre_all_gather hook of the weights, such as torchao's float8 all-gather"
        if is_refuted:
            return hook
        hook = f"{hook}, " * (("float8" in step.old) != ("float8" in step.new))
        return f"{hook}MixedPrecisionPolicy, or {_MODEL_DTYPE}"
    gathered = _gathered_axes(inputs.old)
    is_partial = gathered and gathered.isdisjoint(axis for _, axis in step.parts)
    if Role.GRADIENTS in step.roles and not is_partial:
        hook = "a communication hook"
        policy = f"reduce_dtype of MixedPrecisionPolicy, or {hook}"
        return f"{hook}, or a manual cast of gradients" if is_refuted else policy
    dtype = "MixedPrecisionPolicy, " if gathered else f"{_MODEL_DTYPE}, "
    return f"{'' if is_refuted else dtype}autocast, or a manual cast"


def _change_of_torch(step: Dtype, inputs: Inputs) -> str:
    old, evidence = inputs.old, inputs.trees
    versions = (re.findall("[0-9]+", side.torch_version)[:2] for side in inputs.sides)
    was, now = (tuple(map(int, version)) for version in versions)
    low, high = (step.old, step.new) if was < now else (step.new, step.old)
    if (
        not (was and now)
        or (was < _REDUCES_IN_FLOAT32) == (now < _REDUCES_IN_FLOAT32)
        or step.roles != {Role.GRADIENTS}
        or high != "float32"
        or low not in {"bfloat16", "float16"}
        # This rule applies only to FSDP, which reshards; DDP does not.
        or all(row.subject != "reshard" for row in old.rows)
    ):
        return ""
    axes = {axis for _, axis in step.parts}
    gathered = _gathered_axes(old)
    if gathered and axes.isdisjoint(gathered):
        return (
            "since torch 2.15, FSDP2 casts partial gradients to reduce_dtype or the parameter "
            f"dtype first, so DTensor reduces them over {', '.join(sorted(axes))} in float32, not "
            f"{low}"
        )
    if evidence is None:
        setting = "reduce_dtype was changed, or is unset"
    elif evidence.is_reduce_dtype_unset:
        setting = "reduce_dtype is unset, as the tree shows"
    else:
        return ""
    return (
        f"{setting}: since torch 2.15, FSDP2 reduces in float32, not {low}; pass "
        f"reduce_dtype=torch.{step.old} to keep the bytes"
    )


def _of_passes(step: Replaced) -> str:
    facts = step.facts
    match step.kind, step.is_added:
        case "recomputed", _ if facts["is_moved"]:
            return ""  # unknown: a different list of modules to prefetch has the same effect
        case "recomputed", is_added:
            if is_added and facts["gathers_again"]:
                return (
                    "reentrant checkpointing gathers the units a second time (under FSDP1, or "
                    "after set_modules_to_forward_prefetch): pass use_reentrant=False"
                )
            if facts["is_partly"]:
                more_or_less = "more" if is_added else "less"
                return (
                    f"{more_or_less} is recomputed: different modules are checkpointed, or in a "
                    "different mode"
                )
            switched, saves = ("on", "no longer saves") if is_added else ("off", "now saves")
            alternative = f"selective checkpointing {saves} the results of these collectives"
            if facts["gathers_again"]:
                alternative = "use_reentrant became False"
            return f"activation checkpointing was switched {switched}, or {alternative}"
        case "phase", is_added:
            if not facts["has_norms"]:
                return ""
            if is_added:
                return (
                    "norms of gradients or weights are now computed, e.g. by clip_grad_norm_, by "
                    "logging, or by an optimizer such as LAMB"
                )
            text = "norms of gradients or weights are no longer computed"
            if facts["is_elsewhere"]:
                return f"{text}, or not in the way clip_grad_norm_ computes them"
            return f"{text}: is clip_grad_norm_ still called in each step?"
        case "redistributed", is_added:
            if not is_added or facts["phase"] is not Phase.FORWARD or None in step.owners:
                return ""
            return (
                "the module's layouts in the parallelize_module plan no longer match those of the "
                "modules before or after it, or redistribute() or full_tensor() is called"
            )
    where = "a full state dict (e.g. for a checkpoint), or a DTensor that is printed or logged"
    sent = {key.what for rows in step.rows.values() for key in rows if key.subject == "collective"}
    if sent == {"all_reduce"}:
        return "full_tensor() or redistribute() of partial results, such as norms or sums to log"
    if facts["phase"] is Phase.FORWARD:
        where = "e.g. once for each chunk of a loss"
    return f"full_tensor() or redistribute(), {where}"


def _of_units(step: Replaced, inputs: Inputs) -> str:
    facts, trees = step.facts, inputs.trees
    match step.kind, step.is_added:
        case "freed", is_added:
            now, before, cost = ("False", "SHARD_GRAD_OP", "less traffic, more memory")
            root = "became a root"
            if is_added:
                now, before, cost = ("True", "FULL_SHARD", "more traffic, less memory")
                root = "is no longer a root"
            guess = f"reshard_after_forward became {now} (FSDP1: {before}), or the unit {root}"
            return _policy(step, trees) or f"{guess}: {cost}"
        case "gathered elsewhere", _:
            guess = "reshard_after_forward became an int, a different int, or True"
            return _policy(step, trees) or guess
        case "used in backward", _:
            return _frozen_or_thawed(step, trees)
        case "gathered in backward", is_added if facts["is_reduced"]:
            if not is_added:
                return "set_unshard_in_backward(False) is now called on the unit"
            return (
                "set_unshard_in_backward(False) is no longer called on the unit; the call saves "
                "this gather if backward does not need the weight, e.g. of an embedding"
            )
        case "split off" | "called", _ if facts["times"] and facts.get("is_called", True):
            return _of_called(step, inputs)
        case "reduced times", _ if facts["times"] > 1:
            return _of_reduced_times(step, inputs)
        case "reduced", is_added:
            lost = "parameters are frozen or detached, or gradient synchronization is switched off"
            return _frozen_or_thawed(step, trees) or ("" if is_added else lost)
        case "part reduced", is_added:
            owners = _units_in(step, trees)
            lost = "some parameters {}got no gradient, e.g. because of detach() or no_grad()"
            if not owners or trees is None:
                return "" if is_added else lost.format("are frozen, or ")
            if owners <= trees.frozen | trees.partly_frozen:
                return f"some parameters are {_FROZEN}"
            if is_added or trees.is_other_shape or owners & (trees.frozen | trees.partly_frozen):
                return _THAWED if owners <= trees.thawed else ""
            return f"{lost.format('')}: nothing was frozen, as the tree shows"
    return ""


def _of_called(step: Replaced, inputs: Inputs) -> str:
    more = _more_acts(inputs, Phase.FORWARD, "unshard")
    # Ignore gathers in backward: calling a unit without a backward changes what is prefetched.
    is_reduced, is_resharded = (
        any(_more_acts(inputs, Phase.BACKWARD, act)[at] == more[at] > 0 for at in step.owners)
        for act in ("reduce_scatter", "reshard")
    )
    if is_reduced:
        return "the unit runs several times, each time with a backward that reduces its gradients"
    if is_resharded:
        return (
            "called several times in one forward, e.g. by a chunked loss: call unshard() once "
            "before, or leave it in its parent's unit"
        )
    again = "the unit runs again without a backward, e.g. under no_grad()"
    # In a list of layers, only the first layer may have inputs that require no gradients.
    lists = Counter(template(owner) for owner in step.owners if owner is not None)
    if any("*" in name and number > 1 for name, number in lists.items()):
        return again
    return f"{again}, or is called several times on inputs that need no gradient"


def _of_reduced_times(step: Replaced, inputs: Inputs) -> str:
    kinds = {row.what for row in sent_rows(step.rows)}
    call = f"set_requires_{'all_reduce' if kinds == {'all_reduce'} else 'gradient_sync'}(False)"
    is_sharded = step.facts["is_sharded"]
    # The other units show that only this unit's backward runs several times.
    if step.facts["is_alone"] or (not is_sharded and _gathered_axes(inputs.new)):
        return (
            "the unit's backward runs several times, e.g. for a chunked loss: "
            f"call {call} on the unit for all backwards but the last"
        )
    switch, steps, each = f"call {call}", "", "in each micro-batch"
    if not is_sharded:
        switch, steps = "enter no_sync()", f"{step.facts['times']} steps instead of one, or "
    else:
        if kinds != {"all_reduce"}:
            switch += ", or enter no_sync() with FSDP1,"
        reduced = {row.count for row in sent_rows(step.rows)}
        gathered = _acts(inputs.new, Phase.BACKWARD, "unshard")
        backwards = {gathered[owner] for owner in step.owners} - {0}
        often, passes = sole(reduced, 0), sole(backwards, 0)
        if 1 < often < passes:
            each = f"in {often} of {passes} micro-batches"
        elif often > passes > 0 or not passes:
            each = "in each micro-batch, or in several backwards of one forward"
    return f"{steps}reduced {each}: {switch} for all micro-batches but the last"


def _units_in(step: Replaced, trees: Evidence | None) -> set[str]:
    """Return a step's modules if all of them are units in both trees; otherwise an empty set."""
    owners = {owner for owner in step.owners if owner is not None}
    return owners if trees is not None and owners <= trees.units else set()


def _policy(step: Replaced, trees: Evidence | None) -> str:
    """Describe how the units' resharding after forward changed in the trees; "" if it did not."""
    owners = _units_in(step, trees)
    if not owners or trees is None:
        return ""
    change = sole((trees.policies.get(owner, "") for owner in owners), "")
    return f"{change}, as the tree shows" if change else ""


def _frozen_or_thawed(step: Replaced, trees: Evidence | None) -> str:
    """Return why units now reduce gradients or no longer do; empty if the trees do not show it."""
    owners = _units_in(step, trees)
    if not owners or trees is None:
        return ""
    if not step.is_added and owners <= trees.frozen:
        added = "; no unit reduces the gradients of the trained parameters inside"
        return f"parameters are {_FROZEN}{added if owners & trees.trainable else ''}"
    if not step.is_added and owners.isdisjoint(trees.frozen | trees.partly_frozen):
        is_unused = step.kind == "used in backward"
        alternative = "its output is no longer used" if is_unused else "not synchronized"
        return f"the unit is detached, or {alternative}: nothing was frozen, as the tree shows"
    return _THAWED if step.is_added and owners <= trees.thawed else ""
