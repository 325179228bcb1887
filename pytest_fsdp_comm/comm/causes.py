"""Why a difference may have come about: readings of a whole explanation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import ROOT_FQN, Role
from pytest_fsdp_comm.comm.explanation.amounts import Dtype
from pytest_fsdp_comm.comm.explanation.steps import Replaced, Step

if TYPE_CHECKING:
    from pytest_fsdp_comm.comm.evidence import Evidence
    from pytest_fsdp_comm.comm.explanation.search import Explanation
    from pytest_fsdp_comm.comm.profile import CommProfile


# Note [Causes]: a step is exact, so a cause explains all of its rows. A step itself names what its
# rows suggest; here several steps together, the trees of the test, and a change of torch's own
# decide, in this order. docs/causes.md has what would refute each, `tests/regressions` its cases.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What may have been changed, or done, with what to do about it where that is known."""

    text: str
    steps: tuple[Step, ...] = ()
    is_of_torch: bool = False
    """Whether another version of torch does it, without any change of the user's."""

    @property
    def is_of_regression(self) -> bool:
        """Whether it is one that nobody wants."""
        return any(step.is_regression for step in self.steps)


def find_causes(
    explanation: Explanation,
    sides: tuple[CommProfile, CommProfile],
    evidence: Evidence | None = None,
    *,
    is_same_mesh: bool = True,
) -> tuple[Cause, ...]:
    """Name the probable causes of a difference, those of regressions first, torch's own last."""
    found = _root_not_sharded(explanation)
    explained = [step for cause in found for step in cause.steps]
    for step in explanation.steps:
        is_of_mesh = step.kind == "sizes" and not is_same_mesh
        # Beside rows that are left over, gathers may have moved there from elsewhere.
        is_in_doubt = step.kind == "recomputed" and not explanation.is_exact
        if step not in explained and not is_of_mesh and not is_in_doubt:
            known = None if evidence is None else _reading_with(evidence, step)
            torchs = "" if known else _reading_of_torch(sides, step, evidence)
            text = known or torchs or step.cause
            found.append(Cause(text=text, steps=(step,), is_of_torch=bool(torchs)))
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


_REDUCES_IN_FLOAT32: Final = (2, 15)
"""The first torch whose FSDP2 takes the parameter's own type where ``reduce_dtype`` is unset, and
casts partial gradients before DTensor reduces them; older ones take ``param_dtype`` for both, as
FSDP1 does in all of them. Recorded with torch 2.13.0 and 2.15.0."""


def _reading_of_torch(
    sides: tuple[CommProfile, CommProfile], step: Step, evidence: Evidence | None
) -> str:
    old, _ = sides
    was, now = (tuple(map(int, re.findall("[0-9]+", one.torch_version)[:2])) for one in sides)
    low, high = ("old", "new") if was < now else ("new", "old")
    if (
        not (was and now)
        or (was < _REDUCES_IN_FLOAT32) == (now < _REDUCES_IN_FLOAT32)
        or not isinstance(step, Dtype)
        or step.roles != {Role.GRADIENTS}
        or getattr(step, high) != "float32"
        or getattr(step, low) not in {"bfloat16", "float16"}
        # Of DDP nothing is gathered, nor freed.
        or all(row.subject != "reshard" for row in old.rows)
    ):
        return ""
    since = f"in float32 since torch 2.15, in {getattr(step, low)} before"
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


def _reading_with(evidence: Evidence, step: Step) -> str | None:
    if isinstance(step, Dtype):
        if evidence.is_other_dtype == evidence.is_other_policy:
            return None
        what = "the model's own dtype" if evidence.is_other_dtype else "MixedPrecisionPolicy"
        return f"{what}, as the tree says"
    owners = set(step.owners) - {None} if isinstance(step, Replaced) else set()
    if not isinstance(step, Replaced) or not owners or not owners <= evidence.units:
        return None
    if step.kind in {"freed", "gathered elsewhere"}:
        return _policy_with(evidence, owners)
    return _reductions_with(evidence, step, owners)


def _policy_with(evidence: Evidence, owners: set[str | None]) -> str | None:
    changes = {evidence.policies.get(owner or "") for owner in owners}
    change = changes.pop() if len(changes) == 1 else None
    if change is not None:
        return f"{change}, as the tree says"
    if owners <= evidence.new_roots:
        return "became roots, as the tree says: is fully_shard on the module above missing?"
    return None


def _reductions_with(evidence: Evidence, step: Replaced, owners: set[str | None]) -> str | None:
    froze = evidence.frozen | evidence.partly_frozen
    is_reduced = step.kind in {"reduced", "used in backward"}
    if is_reduced and not step.came:
        if owners <= evidence.frozen:
            return "frozen, as the tree says"
        if owners.isdisjoint(froze):
            return "detached, or not synchronized: as the tree says, nothing was frozen"
    elif step.kind == "part reduced" and owners <= froze:
        return "a part of the parameters is frozen, as the tree says"
    elif (is_reduced or step.kind == "part reduced") and owners <= evidence.thawed:
        return "no longer frozen, as the tree says"
    return None
