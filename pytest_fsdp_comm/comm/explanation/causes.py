"""Find the likely causes of the steps that explain a diff."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from pytest_fsdp_comm.comm.events import ROOT_FQN, Phase, Role
from pytest_fsdp_comm.comm.explanation.amounts import Dtype, Sizes, explain_added_forwards
from pytest_fsdp_comm.comm.explanation.evidence import (
    NORM,
    SCALAR_NBYTES,
    Recordings,
    count_acts,
    count_more_acts,
)
from pytest_fsdp_comm.comm.explanation.gradients import ReducedPart
from pytest_fsdp_comm.comm.explanation.overlap import Waits, find_exposure_changes
from pytest_fsdp_comm.comm.explanation.passes import (
    GatheredInFull,
    PhaseUsed,
    Recomputed,
    Redistributed,
)
from pytest_fsdp_comm.comm.explanation.resharding import Freed
from pytest_fsdp_comm.comm.explanation.search import Explanation
from pytest_fsdp_comm.comm.explanation.states import count_calls, is_from_user_code, role_of
from pytest_fsdp_comm.comm.explanation.steps import Replaced, Step
from pytest_fsdp_comm.comm.explanation.units import Gathered
from pytest_fsdp_comm.comm.explanation.words import name_modules, name_with_phase
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey
from pytest_fsdp_comm.text.fqn import name_owners
from pytest_fsdp_comm.text.words import show_count

# A step is one change that explains many rows of a diff (see `steps`). The rule for a kind of step
# names all causes known to have this effect, except those that the recordings, the test's sharding
# trees or the torch versions rule out. Other rules handle combinations of steps, or leftover rows.
# docs/causes.md lists the causes; `tests/regressions/look_alikes.json` lists causes of equal diffs.

_NOT_REDUCED: Final = ", FSDP does not reduce their gradients"
_MISSING_ROOT: Final = (
    f"fully_shard on the root is missing: its parameters are not sharded{_NOT_REDUCED}, and each "
    "unit below becomes a root; or the root's forward is not called"
)


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
        return self.is_unwanted or any(step.is_regression for step in self.steps)


def find_causes(
    explanation: Explanation, recordings: Recordings, *, is_same_mesh: bool = True
) -> tuple[Cause, ...]:
    """Find the likely causes of a diff: regressions first, changes in torch last."""
    causes = [
        *_find_lost_root_causes(explanation, recordings),
        *find_swapped_axes_causes(*recordings.sides),
        *_find_norm_causes(explanation, recordings),
        *_find_left_unsharded_causes(explanation, recordings),
        *_find_evaluation_causes(explanation, recordings),
        *_find_fewer_backwards_causes(explanation, recordings),
        *_find_schedule_causes(explanation, recordings),
        *_find_detach_causes(explanation, recordings),
    ]
    explained = [step for cause in causes for step in cause.steps]
    for step in explanation.steps:
        is_of_mesh = isinstance(step, Sizes | Redistributed | ReducedPart) and not is_same_mesh
        # If rows are left over, the gathers may only have moved from another phase to recompute.
        is_in_doubt = isinstance(step, Recomputed) and not explanation.is_exact
        if step not in explained and not is_of_mesh and not is_in_doubt:
            text = step.find_cause(recordings)
            is_of_torch = (
                isinstance(step, Dtype) and text == step.find_change_of_torch(recordings) != ""
            )
            causes.append(Cause(text=text, steps=(step,), is_of_torch=is_of_torch))
    prefetching = [*_find_prefetch_causes(explanation, recordings)]
    causes += prefetching
    causes += _find_exposure_causes(explanation, recordings, has_other_cause=bool(prefetching))
    causes += _find_ddp_causes(explanation, recordings)
    unique = {cause.text: cause for cause in causes if cause.text}
    return tuple(
        sorted(unique.values(), key=lambda cause: (not cause.is_of_regression, cause.is_of_torch))
    )


# Rules for combinations of steps, and for leftover rows.
def _find_lost_root_causes(explanation: Explanation, recordings: Recordings) -> list[Cause]:
    """Detect a root unit that was removed or is not called, so that units below it become roots."""
    removed = [
        step for step in explanation.steps if isinstance(step, Replaced) and not step.is_added
    ]
    lost_roots = [
        step for step in removed if isinstance(step, Gathered) and step.owners == (ROOT_FQN,)
    ]
    unresharded = [step for step in removed if isinstance(step, Freed)]
    trees = recordings.trees
    if trees is not None and trees.lost_root:
        # Ignore units that only one tree has, because they were added or removed with the root.
        units, roots = trees.units, trees.new_roots
        unresharded = [step for step in unresharded if units.intersection(step.owners) <= roots]
        # If the snapshot has no backward, there were no reductions to lose.
        reduces = any(role_of((row,)) == Role.GRADIENTS for row in recordings.old.rows)
        text = trees.lost_root if reduces else trees.lost_root.replace(_NOT_REDUCED, "")
        return [Cause(text=text, steps=(*lost_roots, *unresharded), is_unwanted=True)]
    is_alone = any(
        (change.subject, change.key.phase, change.after[-1][0]) == ("ahead", Phase.BACKWARD, 0)
        for change in explanation.timings
    )
    if trees is None and lost_roots and (unresharded or is_alone):
        return [Cause(text=_MISSING_ROOT, steps=(*lost_roots, *unresharded))]
    return []


def find_swapped_axes_causes(old: CommProfile, new: CommProfile) -> Iterator[Cause]:
    """Yield causes for mesh axes that swapped places."""
    was, now = (
        {axis.name: (axis.size, axis.dims[0][1]) for axis in side.mesh_axes if len(axis.dims) == 1}
        for side in (old, new)
    )
    for first, second in combinations(sorted(was.keys() & now.keys()), 2):
        strides, new_strides = ([side[name][1] for name in (first, second)] for side in (was, now))
        # An axis that did not change, such as a flattened one, is not swapped.
        if was[first] == now[first] or was[second] == now[second]:
            continue
        if (strides[0] < strides[1]) != (new_strides[0] < new_strides[1]):
            inner = first if new_strides[0] < new_strides[1] else second
            text = f"mesh axes {first} and {second} are swapped: {inner} is now the inner one"
            yield Cause(text=text, is_unwanted=True)


def _find_norm_causes(explanation: Explanation, recordings: Recordings) -> Iterator[Cause]:
    """Detect norms that used to be stacked and reduced in one call, but now need one call each."""
    (old_calls, norms_before), (new_calls, norms) = map(_count_calls_and_norms, recordings.sides)
    removed, added = old_calls - new_calls, new_calls - old_calls
    nbytes = [sum(size * count for size, count in calls.items()) for calls in (removed, added)]
    is_single = removed and added and max(added) <= SCALAR_NBYTES < min(removed)
    if norms > norms_before and is_single and nbytes[1] <= nbytes[0]:
        kinds = PhaseUsed | GatheredInFull | Redistributed
        steps = [step for step in explanation.steps if isinstance(step, kinds)]
        text = (
            "norms of gradients or weights are reduced one by one: pass all parameters to one "
            "clip_grad_norm_ call, or stack the norms before reducing them"
        )
        yield Cause(text=text, steps=tuple(steps), is_unwanted=True)
    elif norms > norms_before and added.total() > removed.total() and 0 < nbytes[1] <= nbytes[0]:
        calls = f"{old_calls.total()} -> {show_count(new_calls.total(), 'call')}"
        yield Cause(
            text=f"norms are reduced in parts, {calls}: clip_grad_norm_ is called several times"
        )


def _count_calls_and_norms(profile: CommProfile) -> tuple[Counter[int], int]:
    """Count all-reduces by size, in phases that reduce norms of DTensors; also count the norms."""
    norms, calls = Counter[Phase](), Counter[int]()
    rows = [row for row in profile.rows if row.owner is None]
    for row in rows:
        norms[row.phase] += row.count * (NORM in row.what)
    for row in rows:
        for call in row.calls if row.what == "all_reduce" and norms[row.phase] else ():
            calls[call.nbytes] += call.count
    return calls, norms.total()


def _find_left_unsharded_causes(
    explanation: Explanation, recordings: Recordings
) -> Iterator[Cause]:
    """Detect units that now stay unsharded after backward or the step, if nothing else changed."""
    rows = set(explanation.before) ^ set(explanation.after)
    old, new = (
        Counter({(row.owner, row.phase, row.what): row.count for row in side})
        for side in (explanation.before, explanation.after)
    )
    acts = {(phase, act) for _, phase, act in old - new}
    phases = {phase for phase, act in acts if act == "reshard"}
    sent = [row for row in rows if row.subject != "reshard" and role_of((row,)) != Role.PARAMETERS]
    if explanation.steps or sent or new - old or (Phase.OUTSIDE, "unshard") in acts:
        return
    owners = {row.owner for row in rows}
    # If no other unit ran in forward, this may be an evaluation of only these units.
    has_others = not owners.issuperset(count_acts(recordings.new, Phase.FORWARD, "unshard"))
    is_resharded = any(new[owner, Phase.BACKWARD, "reshard"] for owner in owners)
    prefix = f"{name_owners(owners)} left unsharded after"
    if phases == {Phase.OUTSIDE} and has_others:
        yield Cause(text=f"{prefix} the block: is reshard() still called?", is_unwanted=True)
    elif phases == {Phase.BACKWARD} and not is_resharded:
        text = f"{prefix} backward, e.g. by set_reshard_after_backward(False)"
        yield Cause(text=text, is_unwanted=True)
    elif phases == {Phase.BACKWARD} and (Phase.FORWARD, "unshard") in acts:
        call = "set_reshard_after_backward(False) is now called, but not for the last"
        yield Cause(text=f"the units are kept from one micro-batch to the next: {call}")


def _find_evaluation_causes(explanation: Explanation, recordings: Recordings) -> Iterator[Cause]:
    """Detect added evaluations: forward gathers all units, or all resharded units, more often."""
    phases = {row.phase for row in {*explanation.before} ^ {*explanation.after}}
    freed, units = (
        count_acts(recordings.old, Phase.FORWARD, act) for act in ("reshard", "unshard")
    )
    gathers, reshards = (
        count_more_acts(recordings, Phase.FORWARD, act) for act in ("unshard", "reshard")
    )
    more = gathers.keys()
    if phases - {Phase.OUTSIDE} == {Phase.FORWARD} and more and more >= (freed or units).keys():
        # If more reshards than gathers were added, earlier forwards did not reshard the units.
        kept = "units are no longer kept from one forward to the next: is resharding still off?"
        yield Cause(text=kept if reshards > gathers else explain_added_forwards(recordings))


def _find_fewer_backwards_causes(
    explanation: Explanation, recordings: Recordings
) -> Iterator[Cause]:
    """Detect that one backward follows several forwards: a kept unit is resharded less often."""
    if explanation.steps:
        return
    old, new = recordings.states
    changes = {
        tuple(
            count_calls(state[owner].row(RowKey("reshard", Phase.BACKWARD, "reshard", "")))
            for state in (old, new)
        )
        for owner in old
        if old[owner].stays_unsharded and new[owner].stays_unsharded
    }
    # Units that are resharded after forward show that as many forwards and backwards ran as before.
    others = [owner for owner in old if owner is not None and not old[owner].stays_unsharded]
    if len(changes) == 1 and others and all(old[owner] is new[owner] for owner in others):
        ((before, after),) = changes
        if 0 < after < before:
            text = f"{after} instead of {before} backwards: losses of micro-batches are summed"
            yield Cause(text=text)


def _find_schedule_causes(explanation: Explanation, recordings: Recordings) -> Iterator[Cause]:
    """Detect that pipeline stages run in another order."""
    sends = [*map(_count_sends, recordings.sides)]
    if not all(sends):
        return
    growth = Counter[Phase]()
    for sign, side in ((-1, explanation.before), (1, explanation.after)):
        for row in side:
            growth[row.phase] += sign * row.count * (row.what == "unshard")
    is_only_moved = growth[Phase.FORWARD] * growth[Phase.BACKWARD] < 0
    if sends[0] == sends[1] and is_only_moved and not explanation.steps:
        yield Cause(text="another pipeline schedule, which runs micro-batches in a different order")


def _count_sends(profile: CommProfile) -> Counter[tuple[int, int]]:
    """Count what stages send to each other, by rank and size."""
    sends = Counter[tuple[int, int]]()
    for row in profile.collectives:
        for call in row.calls if row.what == "send" else ():
            for rank in _list_ranks_of_row(row, profile):
                sends[rank, call.nbytes] += call.count
    return sends


def _list_ranks_of_row(row: Row, profile: CommProfile) -> Sequence[int]:
    return row.ranks or profile.recorded_ranks or range(profile.world_size)


def _find_detach_causes(explanation: Explanation, recordings: Recordings) -> Iterator[Cause]:
    """Detect that user code's collectives have one more or less in backward, but not in forward."""
    forward = {
        (row.owner, row.axis)
        for row in recordings.new.collectives
        if row.phase in {Phase.FORWARD, Phase.OUTSIDE} and role_of((row,)) in {"", Role.ACTIVATIONS}
    }
    unchanged = {*explanation.before} & {*explanation.after}
    before, after = (
        {
            (row.owner, row.key)
            for row in side
            if row.axis and is_from_user_code((row,)) and row not in unchanged
        }
        for side in (explanation.before, explanation.after)
    )
    if explanation.steps or (before and after):
        return
    changed = before or after
    phases = {key.phase for _, key in changed}
    if phases == {Phase.BACKWARD} and {(owner, key.axis) for owner, key in changed} <= forward:
        text = "gradients now pass through a collective of forward, or backward repeats it"
        if before:
            text = (
                "gradients no longer pass through a collective of forward: detach(), a call "
                "without gradients, or a backward that no longer communicates"
            )
        yield Cause(text=text, is_unwanted=bool(before))


def _find_exposure_causes(
    explanation: Explanation, recordings: Recordings, *, has_other_cause: bool
) -> Iterator[Cause]:
    """Say why calls are exposed now: the host waits, or the caller waits for them at once."""
    lost = [change for change in find_exposure_changes(recordings) if change.is_lost]
    waits = [step for step in explanation.steps if isinstance(step, Waits) and step.is_added]
    if has_other_cause:
        # Without prefetching, FSDP1 synchronizes with the GPU more often.
        waits = [step for step in waits if step.way != "synchronize"]
    if lost and waits:
        sources = (f"{name_with_phase(step.owners, step.phase)} ({step.way})" for step in waits)
        text = f"the host now waits for the GPU: {', '.join(sources)}"
        yield Cause(text=text, steps=tuple(waits))
    elif (
        lost
        and not (explanation.steps or has_other_cause)
        and all(change.is_async for change in lost)
    ):
        yield Cause(text="the calls are waited for at once", is_unwanted=True)


def _find_prefetch_causes(explanation: Explanation, recordings: Recordings) -> Iterator[Cause]:
    timings = [change for change in explanation.timings if change.subject == "ahead"]
    rows = (*explanation.before, *explanation.after)
    has_leftovers = any(role_of((row,)) == Role.PARAMETERS for row in rows)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        changes = [change for change in timings if change.key.phase is phase]
        distances = [(change.before[-1][0], change.after[-1][0]) for change in changes]
        later = {after < before for before, after in distances}
        is_alone = all(isinstance(step, Waits) for step in explanation.steps)
        if not (explanation.is_exact and is_alone):
            later = set()
        call, changed = f"set_modules_to_{phase}_prefetch", f"{phase}_prefetch"
        trees = recordings.trees
        if later == {True} and (trees is None or {changed, "prefetch"} & trees.prefetching.keys()):
            # If every unit is a root, no unit prefetches another.
            is_root_called = count_acts(recordings.new, phase, "reshard")[ROOT_FQN]
            has_root = trees or phase is Phase.FORWARD or is_root_called
            is_ahead = any(after for _, after in distances)
            root = "" if has_root or is_ahead else ", or fully_shard on the root is missing"
            yield Cause(text=f"less {phase} prefetching ({call}; FSDP1: {changed}){root}")
        elif trees is None and later == {True, False}:
            yield Cause(text=f"{call} lists different modules, or modules run in a different order")
        elif trees is not None and changed in trees.prefetching and (distances or has_leftovers):
            how = "lists different modules" if trees.prefetching[changed] else "is now called"
            yield Cause(text=f"{call} {how}, as the tree shows")


def _find_ddp_causes(explanation: Explanation, recordings: Recordings) -> Iterator[Cause]:
    """Name the option of DDP whose calls only one recording has, or say that DDP does not run."""
    old, new = (
        {call.role for row in side.collectives for call in row.calls} for side in recordings.sides
    )
    if {Role.GRADIENTS, Role.BUFFERS} <= old and new.isdisjoint(old - {""}):
        text = "the module is called without DDP, e.g. as model.module, or there is no backward"
        yield Cause(text=text, is_unwanted=True)
    if Role.GRADIENTS not in old & new:
        return
    reduced = [
        {
            row.owner
            for row in side.collectives
            if row.phase is Phase.BACKWARD and role_of((row,)) == Role.GRADIENTS
        }
        for side in recordings.sides
    ]
    wrapped = {row.owner for row in recordings.new.collectives if role_of((row,)) == Role.BUFFERS}
    if Role.BUFFERS not in old and wrapped and wrapped <= reduced[1] - reduced[0]:
        yield Cause(text=f"{name_modules(wrapped)} is now wrapped in DistributedDataParallel")
        return
    for role, changed in (
        (Role.UNUSED_PARAMETERS, "looks for unused parameters (find_unused_parameters)"),
        (Role.BUFFERS, "broadcasts buffers (broadcast_buffers, or the model's buffers)"),
    ):
        if role in old ^ new:
            waits = (step for step in explanation.steps if isinstance(step, Waits))
            steps = tuple(waits) if role is Role.UNUSED_PARAMETERS else ()
            yield Cause(text=f"DDP {'now' if role in new else 'no longer'} {changed}", steps=steps)
