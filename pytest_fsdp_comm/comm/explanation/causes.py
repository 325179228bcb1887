"""Why a difference may have come about: each step has its rule, and some are read together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fsdp_comm.comm.events import ROOT_FQN
from pytest_fsdp_comm.comm.explanation.units import Freed, Units

if TYPE_CHECKING:
    from pytest_fsdp_comm.comm.explanation.search import Explanation
    from pytest_fsdp_comm.comm.explanation.steps import Seen, Step

# Note [Causes]: a step is exact, so a cause explains all of its rows. The rule beside a step names
# what its rows suggest, unless the trees of the test, or a change of torch's own, know it better;
# here several steps together decide first. docs/causes.md has what would refute each,
# `tests/regressions` its cases.


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
            text, is_of_torch = step.cause(seen), step.is_of_torch(seen)
            found.append(Cause(text=text, steps=(step,), is_of_torch=is_of_torch))
    if explanation.is_exact and not explanation.steps:
        found += [Cause(text=one.cause) for one in explanation.timings]
    unique = {cause.text: cause for cause in found if cause.text}
    return tuple(
        sorted(unique.values(), key=lambda cause: (not cause.is_of_regression, cause.is_of_torch))
    )


def _root_not_sharded(explanation: Explanation) -> list[Cause]:
    """The root's unit is gone, and those below it behave as roots."""
    gone = [step for step in explanation.steps if isinstance(step, Units) and not step.came]
    kept = [step for step in explanation.steps if isinstance(step, Freed) and not step.came]
    if not (gone and kept and gone[0].owners == (ROOT_FQN,)):
        return []
    text = (
        "fully_shard on the root is missing: its own parameters are not sharded, their "
        "gradients not reduced by FSDP, and each unit below is a root of its own"
    )
    return [Cause(text=text, steps=(*gone, *kept))]
