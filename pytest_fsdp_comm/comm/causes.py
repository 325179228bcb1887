"""Why a difference may have come about: readings of a whole story.

A step of a story is exact, so a cause explains all rows of its steps. It is named where these steps
are those of something that is known to happen; where several things send the same, all are named.
docs/causes.md has for each what would refute it, and ``tests/regressions`` its cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import ROOT_FQN, Phase, Role
from pytest_fsdp_comm.comm.story import steps
from pytest_fsdp_comm.comm.story.facts import count_of
from pytest_fsdp_comm.comm.story.steps import Step

if TYPE_CHECKING:
    from pytest_fsdp_comm.comm.evidence import Evidence
    from pytest_fsdp_comm.comm.story.search import Story
    from pytest_fsdp_comm.comm.story.timing import TimingChange


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What may have been changed, or done, with what to do about it where that is known."""

    text: str
    steps: tuple[Step, ...] = ()
    """Those of the story that it explains."""


def find_causes(
    story: Story,
    evidence: Evidence | None = None,
    *,
    is_same_mesh: bool = True,
    torch_versions: tuple[str, str] = ("", ""),
) -> tuple[Cause, ...]:
    """Names the probable causes of a story, those of regressions first.

    Args:
        story: What differs.
        is_same_mesh: Whether the world and its axes are as before.
        evidence: What the trees of the same test say; None if they were not compared.
        torch_versions: Of the snapshot and of the recording; empty where they are not known.
    """
    root = _root_not_sharded(story)
    explained = root.steps if root is not None else ()
    found = [] if root is None else [root]
    for step in story.steps:
        is_of_mesh = isinstance(step, steps.ActivationSizes) and not is_same_mesh
        # Beside rows that are left over, gathers may have moved there from elsewhere.
        is_in_doubt = isinstance(step, steps.RecomputeCame) and not story.is_exact
        if step not in explained and not is_of_mesh and not is_in_doubt:
            known = None if evidence is None else _reading_with(evidence, step)
            known = known or _reading_of_torch(torch_versions, step)
            texts = _readings(step) if known is None else filter(None, [known])
            found += [Cause(text=text, steps=(step,)) for text in texts]
    if story.is_exact and not story.steps:
        found += [Cause(text=text) for change in story.timings for text in _of_timing(change)]
    unique = {cause.text: cause for cause in found}
    return tuple(sorted(unique.values(), key=lambda cause: not is_of_regression(cause)))


_REDUCES_IN_FLOAT32: Final = (2, 15)
"""The first torch whose FSDP2 reduces in float32 where ``reduce_dtype`` is unset; 2.13 reduces in
``param_dtype``, as FSDP1 does in all of them. Recorded with torch 2.13.0 and 2.15.0."""


def _reading_of_torch(versions: tuple[str, str], step: Step) -> str | None:
    """What a change of torch's own says of a step; None if it says nothing of it."""
    was, now = (tuple(map(int, _VERSION.findall(version)[:2])) for version in versions)
    if not (was and now) or (was < _REDUCES_IN_FLOAT32) == (now < _REDUCES_IN_FLOAT32):
        return None
    low, high = ("old", "new") if was < now else ("new", "old")
    if (
        isinstance(step, steps.Dtype)
        and {role for role, _ in step.parts} == {Role.GRADIENTS}
        and getattr(step, high) == "float32"
        and getattr(step, low) in {"bfloat16", "float16"}
    ):
        return (
            "torch 2.15 and newer reduce in float32 where reduce_dtype of MixedPrecisionPolicy is "
            "unset, older ones in param_dtype: set it to keep the bytes"
        )
    return None


_VERSION: Final = re.compile(r"[0-9]+")


def _reading_with(evidence: Evidence, step: Step) -> str | None:
    """What the trees say of a step; None if they say nothing of it."""
    if isinstance(step, steps.Dtype):
        return _dtype_with(evidence)
    if not isinstance(step, steps.Replaced):
        return None
    owners = {owner for owner in step.owners if owner is not None}
    if not owners or not owners <= evidence.units:
        return None
    if isinstance(step, (steps.Kept, steps.Freed, steps.GatheredElsewhere)):
        return _policy_with(evidence, owners)
    return _reductions_with(evidence, step, owners)


def _dtype_with(evidence: Evidence) -> str | None:
    if evidence.is_other_dtype == evidence.is_other_policy:
        return None
    what = "the model's own dtype" if evidence.is_other_dtype else "MixedPrecisionPolicy"
    return f"{what}, as the tree says"


def _policy_with(evidence: Evidence, owners: set[str]) -> str | None:
    changes = {evidence.policies.get(owner) for owner in owners}
    change = changes.pop() if len(changes) == 1 else None
    if change is not None:
        return f"{change}, as the tree says"
    if owners <= evidence.new_roots:
        return "became roots, as the tree says: is fully_shard on the module above missing?"
    return None


_REDUCE_MORE: Final = frozenset({steps.ReductionCame, steps.BackwardCame, steps.PartReduced})


def _reductions_with(evidence: Evidence, step: steps.Replaced, owners: set[str]) -> str | None:
    froze = evidence.frozen | evidence.partly_frozen
    is_part = isinstance(step, steps.ReductionGone) and not step.is_all
    if is_part or (isinstance(step, steps.BackwardGone) and not step.has_reductions):
        return None
    if type(step) is steps.ReductionGone or type(step) is steps.BackwardGone:
        if owners <= evidence.frozen:
            return "frozen, as the tree says"
        if owners.isdisjoint(froze):
            return "detached, or not synchronized: as the tree says, nothing was frozen"
    elif isinstance(step, steps.PartReduced) and owners <= froze:
        return "a part of the parameters is frozen, as the tree says"
    elif type(step) in _REDUCE_MORE and owners <= evidence.thawed:
        return "no longer frozen, as the tree says"
    return None


def is_of_regression(cause: Cause) -> bool:
    """Whether a cause is one that nobody wants."""
    return cause.text == _UNCLIPPED or any(type(step) in _REGRESSIONS for step in cause.steps)


_REGRESSIONS: Final = (
    steps.ReducedTimes,
    steps.Called,
    steps.SplitOff,
    steps.UnitRemoved,
    steps.Redistributed,
    steps.GatheredInFull,
)


def _root_not_sharded(story: Story) -> Cause | None:
    """The root's unit is gone, and those below it behave as roots."""
    gone = [step for step in story.steps if type(step) is steps.UnitRemoved]
    kept = [step for step in story.steps if isinstance(step, steps.Kept)]
    if not (gone and kept and gone[0].owners == (ROOT_FQN,)):
        return None
    return Cause(
        text=(
            "fully_shard on the root is missing: its own parameters are not sharded, their "
            "gradients not reduced, and each unit below is a root of its own"
        ),
        steps=(*gone, *kept),
    )


_ALWAYS: Final[Mapping[type[Step], str]] = {
    steps.Kept: (
        "reshard_after_forward became False (FSDP1: SHARD_GRAD_OP), or the unit became a root: "
        "less traffic, more memory"
    ),
    steps.Freed: (
        "reshard_after_forward became True (FSDP1: FULL_SHARD), or the unit is no longer a root: "
        "more traffic, less memory"
    ),
    steps.GatheredElsewhere: "reshard_after_forward became an int, another one, or True",
    steps.ActivationSizes: "another batch or sequence, or another width",
    steps.GatheredInFull: "full_tensor() or redistribute(), or a DTensor that is printed or logged",
}


@singledispatch
def _readings(step: Step) -> Iterator[str]:
    """The causes of a step; none where the step says all."""
    if type(step) in _ALWAYS:
        yield _ALWAYS[type(step)]


@_readings.register
def _(step: steps.ReducedTimes) -> Iterator[str]:
    if step.times <= 1:
        return
    if not step.is_sharded:
        # Nothing else is sent that would count the steps.
        yield (
            f"{step.times} steps in place of one, or reduced in each micro-batch: enter no_sync() "
            "for all micro-batches but the last"
        )
        return
    if step.kinds == ("all_reduce",):
        switch = "call set_requires_all_reduce(False)"
    else:
        switch = "call set_requires_gradient_sync(False), or enter no_sync() with FSDP1,"
    yield f"reduced in each micro-batch: {switch} for all micro-batches but the last"


@_readings.register
def _(step: steps.Called) -> Iterator[str]:
    if _most_gathers(step) > step.others and step.is_more and not step.is_pipeline:
        yield _CALLED


_CALLED: Final = (
    "called several times in one forward, as by a loss in chunks: unshard it once around the "
    "calls, or leave it in its parent's unit"
)


def _most_gathers(step: steps.Replaced) -> int:
    return max(
        (
            count_of(facts)
            for rows in step.rows.values()
            for key, facts in rows.items()
            if key.phase is Phase.FORWARD and key.what == "all_gather"
        ),
        default=0,
    )


@_readings.register
def _(step: steps.SplitOff) -> Iterator[str]:
    if type(step) is steps.SplitOff and steps.is_called_more_often(step):
        yield _CALLED


@_readings.register
def _(step: steps.RecomputeCame) -> Iterator[str]:
    facts = [fact for rows in step.rows.values() for held in rows.values() for fact in held]
    came = type(step) is steps.RecomputeCame
    if any(fact.role == Role.PARAMETERS for fact in facts):
        if not came:
            return
        yield (
            "recomputation repeats the prefetching of set_modules_to_forward_prefetch: checkpoint "
            "with use_reentrant=True does, use_reentrant=False does not"
        )
    elif step.is_first:
        yield f"activation checkpointing was switched {'on' if came else 'off'}"
    else:
        yield f"{'more' if came else 'less'} is recomputed: other modules, or other checkpointing"


_UNCLIPPED: Final = (
    "norms of gradients are no longer computed: is clip_grad_norm_ still called in each step?"
)


@_readings.register
def _(step: steps.PhaseGone) -> Iterator[str]:
    # DTensor's placement of a norm before it is reduced (read in torch 2.6 to 2.15).
    if any("(_NormPartial" in key.what for rows in step.rows.values() for key in rows):
        came = type(step) is steps.PhaseCame
        yield "norms of gradients are computed, as clip_grad_norm_ does" if came else _UNCLIPPED


@_readings.register
def _(step: steps.ReductionGone) -> Iterator[str]:
    if step.is_all:
        yield "frozen, detached, or gradient synchronization switched off"


@_readings.register
def _(step: steps.Dtype) -> Iterator[str]:
    roles = {role for role, _ in step.parts}
    if Role.PARAMETERS in roles:
        yield "MixedPrecisionPolicy, or the model's own dtype"
    elif Role.GRADIENTS in roles:
        yield "reduce_dtype of MixedPrecisionPolicy, or a communication hook"
    else:
        yield "the model's own dtype, or autocast"


@_readings.register
def _(step: steps.Redistributed) -> Iterator[str]:
    if step.came and step.phase is Phase.FORWARD and None not in step.owners:
        yield "its layout in the plan and that of the module before it no longer match"


@_readings.register
def _(step: steps.Counts) -> Iterator[str]:
    if step.factor < 1 or step.factor.denominator != 1:
        return
    match step.scope:
        case steps.Scope.EVERYTHING:
            yield (
                f"{step.factor} times as many steps, or as many micro-batches, each of which "
                "reduces gradients"
            )
        case steps.Scope.UNREDUCED | steps.Scope.UNREDUCED_OUTSIDE:
            other = "" if step.has_activations else ", or parameters freed after each backward"
            yield f"gradients accumulated over {step.factor} times as many micro-batches{other}"
        case steps.Scope.FORWARD:
            yield "forwards without a backward, such as an evaluation"
        case _:
            return


def _of_timing(change: TimingChange) -> Iterator[str]:
    is_later = change.after[-1][0] < change.before[-1][0]
    if change.subject == "ahead" and change.phase is Phase.FORWARD and is_later:
        yield (
            "less forward prefetching (set_modules_to_forward_prefetch; FSDP1: forward_prefetch)"
        )
    elif change.subject == "ahead" and change.phase is Phase.BACKWARD and is_later:
        yield (
            "less backward prefetching (set_modules_to_backward_prefetch; FSDP1: backward_prefetch)"
        )
