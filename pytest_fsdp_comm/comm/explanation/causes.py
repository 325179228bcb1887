"""Why steps may have come about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pytest_fsdp_comm.comm.events import ROOT_FQN, Phase, Role
from pytest_fsdp_comm.comm.explanation.amounts import Counts, Dtype, Scope, Sizes
from pytest_fsdp_comm.comm.explanation.search import Explanation
from pytest_fsdp_comm.comm.explanation.steps import Evidence, Replaced, Step
from pytest_fsdp_comm.comm.profile import CommProfile

# Note [Causes]: a step is exact, so a cause explains all of its rows. The rule of a step names what
# its rows suggest, unless the trees of the test, or a change of torch's own, know it better; here
# several steps together decide first. docs/causes.md has what would refute each,
# `tests/regressions` its cases.

_CALLED: Final = (
    "called several times in one forward, as by a loss in chunks: unshard it once around the "
    "calls, or leave it in its parent's unit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What may have been changed, or done, with what to do about it where that is known."""

    text: str
    steps: tuple[Step, ...] = ()
    is_of_torch: bool = False
    """Whether another version of torch does it, without any change of the user's."""

    @property
    def is_of_regression(self) -> bool:
        return any(isinstance(step, Replaced) and _is_regression(step) for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a cause is judged by: both recordings, and the trees of the same comparison."""

    old: CommProfile
    new: CommProfile
    trees: Evidence | None


def _is_regression(step: Replaced) -> bool:
    """Whether nobody wants it, if a cause of it is known."""
    match step.kind:
        case "reduced times" | "redistributed" | "gathered in full" | "called":
            return True
        case "gathered in backward" | "used in backward" | "split off":
            return step.came
        case "phase":
            return step.facts["has_norms"] and not step.came
    return step.kind == "unit" and not step.came


def find_causes(
    explanation: Explanation, seen: Seen, *, is_same_mesh: bool = True
) -> tuple[Cause, ...]:
    """Name the probable causes of a difference, those of regressions first, torch's own last."""
    found = _root_not_sharded(explanation)
    explained = [step for cause in found for step in cause.steps]
    for step in explanation.steps:
        is_of_mesh = step.kind == "sizes" and not is_same_mesh
        # Beside rows that are left over, gathers may have moved there from elsewhere.
        is_in_doubt = step.kind == "recomputed" and not explanation.is_exact
        if step not in explained and not is_of_mesh and not is_in_doubt:
            text = _cause(step, seen)
            is_of_torch = isinstance(step, Dtype) and text == _reading_of_torch(step, seen) != ""
            found.append(Cause(text=text, steps=(step,), is_of_torch=is_of_torch))
    if explanation.is_exact and not explanation.steps:
        found += [Cause(text=one.cause) for one in explanation.timings]
    unique = {cause.text: cause for cause in found if cause.text}
    return tuple(
        sorted(unique.values(), key=lambda cause: (not cause.is_of_regression, cause.is_of_torch))
    )


def _root_not_sharded(explanation: Explanation) -> list[Cause]:
    """The root's unit is gone, and those below it behave as roots."""
    gone, kept = (
        [
            step
            for step in explanation.steps
            if isinstance(step, Replaced) and step.kind == kind and not step.came
        ]
        for kind in ("unit", "freed")
    )
    if not (gone and kept and gone[0].owners == (ROOT_FQN,)):
        return []
    text = (
        "fully_shard on the root is missing: its own parameters are not sharded, their "
        "gradients not reduced by FSDP, and each unit below is a root of its own"
    )
    return [Cause(text=text, steps=(*gone, *kept))]


def _cause(step: Step, seen: Seen) -> str:
    """Why a step may have come about; empty if its sentence says all, or nothing is known."""
    match step:
        case Counts():
            return _of_counts(step)
        case Sizes():
            # Gradients follow their parameters, or the mesh.
            return "" if step.axis else "another batch or sequence, or another width"
        case Dtype():
            return _of_dtype(step, seen)
        case Replaced(kind="recomputed" | "phase" | "redistributed" | "gathered in full"):
            return _of_passes(step)
        case Replaced():
            return _of_units(step, seen.trees)
    return ""


def _of_counts(step: Counts) -> str:
    if step.factor < 1 or step.factor.denominator != 1:
        return ""
    if step.scope is Scope.EVERYTHING:
        cause = "as many steps, or as many micro-batches, each of which reduces gradients"
        return f"{step.factor} times {cause}"
    if step.scope is Scope.FORWARD:
        return "forwards without a backward, such as an evaluation"
    is_of_passes = step.scope in {Scope.PASSES, Scope.PASSES_AND_OUTSIDE}
    if not is_of_passes or step.reductions == step.factor:
        return ""
    other = "" if step.has_activations else ", or parameters freed after each backward"
    return f"gradients accumulated over {step.factor} times as many micro-batches{other}"


def _of_dtype(step: Dtype, seen: Seen) -> str:
    trees = seen.trees
    if trees is not None and trees.is_other_dtype != trees.is_other_policy:
        what = "the model's own dtype" if trees.is_other_dtype else "MixedPrecisionPolicy"
        return f"{what}, as the tree says"
    if torchs := _reading_of_torch(step, seen):
        return torchs
    if Role.PARAMETERS in step.roles:
        # Which trees do not show.
        own = "the weights' own fsdp_pre_all_gather, such as torchao's float8 all-gather, "
        is_own = ("float8" in step.old) != ("float8" in step.new)
        return own * is_own + "MixedPrecisionPolicy, or the model's own dtype"
    if Role.GRADIENTS in step.roles:
        return "reduce_dtype of MixedPrecisionPolicy, or a communication hook"
    return "the model's own dtype, or autocast"


_REDUCES_IN_FLOAT32: Final = (2, 15)
"""The first torch whose FSDP2 takes the parameter's own type where ``reduce_dtype`` is unset, and
casts partial gradients before DTensor reduces them; older ones take ``param_dtype`` for both, as
FSDP1 does in all of them. Recorded with torch 2.13.0 and 2.15.0."""


def _reading_of_torch(step: Dtype, seen: Seen) -> str:
    old, evidence = seen.old, seen.trees
    was, now = (
        tuple(map(int, re.findall("[0-9]+", one.torch_version)[:2])) for one in (old, seen.new)
    )
    low, high = (step.old, step.new) if was < now else (step.new, step.old)
    if (
        not (was and now)
        or (was < _REDUCES_IN_FLOAT32) == (now < _REDUCES_IN_FLOAT32)
        or step.roles != {Role.GRADIENTS}
        or high != "float32"
        or low not in {"bfloat16", "float16"}
        # Of DDP nothing is gathered, nor freed.
        or all(row.subject != "reshard" for row in old.rows)
    ):
        return ""
    since = f"in float32 since torch 2.15, in {low} before"
    axes = {axis for _, axis in step.parts}
    gathered = {
        row.axis
        for row in old.rows
        if row.what == "all_gather" and any(call.role == Role.PARAMETERS for call in row.calls)
    }
    if gathered and axes.isdisjoint(gathered):
        return (
            f"FSDP2 has partial gradients reduced over {', '.join(sorted(axes))} {since}: it casts "
            "them to reduce_dtype, or to the parameters' own type, first"
        )
    if evidence is None:
        known = "reduce_dtype was changed, or is unset"
    elif evidence.is_reduce_dtype_unset:
        known = "reduce_dtype is unset, as the tree says"
    else:
        return ""
    return f"{known}: FSDP2 reduces {since}; reduce_dtype=torch.{step.old} keeps the bytes"


def _of_passes(step: Replaced) -> str:
    facts = step.facts
    match step.kind, step.came:
        case "recomputed", came:
            if came and facts["gathers_again"]:
                return (
                    "recomputation gathers what backward gathers anyway: checkpoint with "
                    "use_reentrant=True does, under FSDP1 and where "
                    "set_modules_to_forward_prefetch is called; use_reentrant=False does not"
                )
            if facts["is_partly"]:
                more_or_less = "more" if came else "less"
                return f"{more_or_less} is recomputed: other modules, or other checkpointing"
            return f"activation checkpointing was switched {'on' if came else 'off'}"
        case "phase", came:
            if not facts["has_norms"]:
                return ""
            if came:
                return "norms of gradients are computed, as clip_grad_norm_ does"
            gone = "norms of gradients are no longer computed"
            if facts["is_elsewhere"]:
                return f"{gone} as clip_grad_norm_ does, or not at all"
            return f"{gone}: is clip_grad_norm_ still called in each step?"
        case "redistributed", came:
            if not came or facts["phase"] is not Phase.FORWARD or None in step.owners:
                return ""
            return "its layouts in the plan and those before or after it no longer match"
    where = "a full state dict as of a checkpoint, or a DTensor that is printed or logged"
    if facts["phase"] is Phase.FORWARD:
        where = "such as once for each chunk of a loss"
    return f"full_tensor() or redistribute(), {where}"


def _of_units(step: Replaced, trees: Evidence | None) -> str:
    facts = step.facts
    match step.kind, step.came:
        case "freed", came:
            now, before, cost = ("False", "SHARD_GRAD_OP", "less traffic, more memory")
            root = "became a root"
            if came:
                now, before, cost = ("True", "FULL_SHARD", "more traffic, less memory")
                root = "is no longer a root"
            guess = f"reshard_after_forward became {now} (FSDP1: {before}), or the unit {root}"
            return _policy(step, trees) or f"{guess}: {cost}"
        case "gathered elsewhere", _:
            guess = "reshard_after_forward became an int, another one, or True"
            return _policy(step, trees) or guess
        case "used in backward", _:
            return _frozen_or_thawed(step, trees)
        case "gathered in backward", came if facts["is_reduced"]:
            if not came:
                return "set_unshard_in_backward(False)"
            return (
                "set_unshard_in_backward(False) is no longer called on it, which saves gathering "
                "what its backward does not need, such as the weight of an embedding"
            )
        case "split off", _ if facts["times"]:
            return _CALLED
        case "called", _ if facts["is_called"]:
            return _CALLED
        case "reduced times", _ if facts["times"] > 1:
            return _of_reduced_times(step)
        case "reduced", came:
            lost = "frozen, detached, or gradient synchronization switched off"
            return _frozen_or_thawed(step, trees) or ("" if came else lost)
        case "part reduced", _:
            owners = _units_in(step, trees)
            if not owners or trees is None:
                return ""
            if owners <= trees.frozen | trees.partly_frozen:
                return "a part of the parameters is frozen, as the tree says"
            return "no longer frozen, as the tree says" if owners <= trees.thawed else ""
    return ""


def _of_reduced_times(step: Replaced) -> str:
    kinds = {key.what for held in step.rows.values() for key in held if key.axis}
    call = f"set_requires_{'all_reduce' if kinds == {'all_reduce'} else 'gradient_sync'}(False)"
    if step.facts["is_alone"]:
        return (
            "its backward runs several times, as by a loss in chunks: "
            f"call {call} on it for all but the last"
        )
    switch, steps = f"call {call}", ""
    if not step.facts["is_sharded"]:
        switch, steps = "enter no_sync()", f"{step.facts['times']} steps in place of one, or "
    elif kinds != {"all_reduce"}:
        switch += ", or enter no_sync() with FSDP1,"
    return f"{steps}reduced in each micro-batch: {switch} for all micro-batches but the last"


def _units_in(step: Replaced, trees: Evidence | None) -> set[str]:
    """The modules of a step, if the trees have each of them as a unit; otherwise none."""
    owners = {owner for owner in step.owners if owner is not None}
    return owners if trees is not None and owners <= trees.units else set()


def _policy(step: Replaced, trees: Evidence | None) -> str:
    """Say what the trees know of units whose policy after forward differs."""
    owners = _units_in(step, trees)
    if not owners or trees is None:
        return ""
    changes = {trees.policies.get(owner) for owner in owners}
    change = changes.pop() if len(changes) == 1 else None
    if change is not None:
        return f"{change}, as the tree says"
    if owners <= trees.new_roots:
        return "became roots, as the tree says: is fully_shard on the module above missing?"
    return ""


def _frozen_or_thawed(step: Replaced, trees: Evidence | None) -> str:
    """Say what the trees know of gradients that units reduce now, or no longer."""
    owners = _units_in(step, trees)
    if not owners or trees is None:
        return ""
    if not step.came and owners <= trees.frozen:
        return "frozen, as the tree says"
    if not step.came and owners.isdisjoint(trees.frozen | trees.partly_frozen):
        return "detached, or not synchronized: as the tree says, nothing was frozen"
    return "no longer frozen, as the tree says" if step.came and owners <= trees.thawed else ""
