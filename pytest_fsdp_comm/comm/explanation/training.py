"""Find changes that break training."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, product
from math import prod
from typing import Final, TypeAlias, get_args

from pytest_fsdp_comm.comm.calls import NOT_LAST, Calls
from pytest_fsdp_comm.comm.cost import Volume, find_busiest
from pytest_fsdp_comm.comm.events import REDUCING, ROOT_FQN, Phase, Role
from pytest_fsdp_comm.comm.explanation.amounts import Counts, Steps
from pytest_fsdp_comm.comm.explanation.evidence import (
    BETWEEN_STAGES,
    SCALAR_NBYTES,
    Recordings,
    count_elements,
)
from pytest_fsdp_comm.comm.explanation.gradients import ReducedPart, ReducedTimes
from pytest_fsdp_comm.comm.explanation.passes import AxisUsed, PhaseUsed, Redistributed
from pytest_fsdp_comm.comm.explanation.states import (
    Owner,
    calls_of,
    get_sole,
    is_gather,
    sort_owners,
    template,
)
from pytest_fsdp_comm.comm.explanation.steps import Problem, Replaced, Step
from pytest_fsdp_comm.comm.explanation.units import Gathered
from pytest_fsdp_comm.comm.explanation.words import describe_volume, name_modules
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey
from pytest_fsdp_comm.text.words import itemsize, show_count, show_nbytes_change

# If gradients are not reduced, training is wrong, although it often communicates less. To find lost
# reductions, compare the profiles themselves: a step of the search summarizes many rows, so it may
# hide a lost reduction. Do not report a reduction as lost if a harmless change may explain it:
# other modules now reduce more gradients, the gradients are reduced over other axes, collectives of
# forward over that axis changed too, the module was removed, or the tree shows frozen parameters.
# New calls over the lost axis that prove no role may carry the gradients instead.
# But report a test that now looks like an evaluation: training with a detached loss looks the same.

_AxisProblem: TypeAlias = tuple[Problem, tuple[str, ...], str, str]
"""A problem, its axes, and the values before and after."""
_PROBLEMS: Final[tuple[Problem, ...]] = get_args(Problem)
_LOST: Final = frozenset({"unsharded", "unreduced"})
_UNMARKED: Final = frozenset({"times", "dtype", "reduce_op"})
"""Problems that need not break training: other code may divide, and rounding may not matter."""
_FIELDS: Final[tuple[Problem, ...]] = ("backwards", "reduce_op", "dtype")

_STATE: Final = frozenset({Role.PARAMETERS, Role.BUFFERS, Role.UNUSED_PARAMETERS})
_AFTER_PASSES: Final = frozenset({Phase.OUTSIDE, Phase.OPTIMIZER})
_AFTER_FORWARD: Final = frozenset({Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingChange:
    """A change that breaks training: some modules' gradients are reduced differently."""

    problem: Problem
    owners: tuple[Owner, ...]
    """The new names of the modules, in natural order."""
    axes: tuple[str, ...]
    """Names of the affected axes, sorted; if the reduction was lost, their old names."""
    before: str = ""
    """The old number, reduce op, dtype or `Calls.backwards`; empty if the problem has no value."""
    after: str = ""
    old: Volume
    """Gradient reductions over `axes` in the snapshot, on the rank that reduces the most bytes."""
    new: Volume

    def covers(self, owners: Iterable[Owner], key: RowKey, calls: Iterable[Calls]) -> bool:
        """Whether the report of this change already covers these calls."""
        is_of_gradients = all(call.role == Role.GRADIENTS for call in calls)
        is_reduced = key.axis in self.axes and key.what in REDUCING
        is_covered = is_of_gradients and is_reduced and set(owners) <= set(self.owners)
        return is_covered and self.problem not in {"backwards", "reduce_op", "passes"}

    def covers_step(self, step: Step) -> bool:
        """Whether the report of this change already covers everything in a step."""
        if isinstance(step, ReducedTimes):
            return self.problem in {"times", "part"} and {*step.owners} <= {*self.owners}
        if not isinstance(step, Replaced) or step.is_added:
            return False
        if self.problem == "unsharded":
            return isinstance(step, Gathered)
        if self.problem == "outputs":
            is_forward = isinstance(step, Redistributed) and step.phase is Phase.FORWARD
            return is_forward and {*step.owners} <= {*self.owners}
        is_part = isinstance(step, ReducedPart) and step.is_of_unit
        return (is_part or isinstance(step, Redistributed | AxisUsed)) and all(
            key.subject != "collective" or self.covers([owner], key, calls_of(rows))
            for owner, old in step.old_rows.items()
            for key, rows in old.items()
        )

    def describe(self, recordings: Recordings) -> str:
        """Describe the change in one line; everything in it is true of both recordings."""
        who, over = name_modules(self.owners), _join_axes(self.axes)
        gradients, before, after = f"gradients of {who} are", self.before, self.after
        old, new = describe_volume(self.old), describe_volume(self.new)
        nbytes = f"{show_nbytes_change(self.old.nbytes, self.new.nbytes)} per rank"
        match self.problem:
            case "unsharded":
                return (
                    f"parameters of {who} are no longer sharded: no unit gathers them, and their "
                    f"gradients are no longer reduced over {over} (was {old})"
                )
            case "unreduced":
                return f"{gradients} no longer reduced over {over} (was {old})"
            case "stale":
                return (
                    f"{who} stay gathered from step to step, so forward does not use what the "
                    "optimizer changed, e.g. after set_reshard_after_backward(False)"
                )
            case "ungathered":
                return (
                    f"parameters of {who} are no longer gathered over {over} after the optimizer "
                    "updates a part on each rank"
                )
            case "missing":
                return f"{gradients} not reduced over {over}"
            case "inputs":
                where = f"gradients of the inputs of {who}"
                return f"{where} are no longer reduced over {over} in backward"
            case "outputs":
                outputs = f"outputs of {who} are no longer reduced over {over} in forward"
                return f"{outputs}, but their parameters are still sharded over it"
            case "part":
                calls = show_count(self.new.count, "call")
                is_unchanged = recordings.is_unchanged(
                    lambda key, call, owner: owner in self.owners and is_gather(key, call)
                )
                gathers = ", gathers unchanged" if is_unchanged else ""
                return f"fewer {gradients} reduced over {over}{gathers}: {calls}, {nbytes}"
            case "passes":
                passes = f"{show_count(int(after), 'backward')} instead of {before}"
                return (
                    f"gradients of {who} come from {passes}, forwards as often: {new} over {over}"
                )
            case "ranks":
                return f"{gradients} reduced over {after} instead of {before}: {new}"
            case "times":
                calls = f"{self.old.count} -> {self.new.count} calls"
                often = f"{before} -> {after} times"
                return f"{gradients} reduced {often} over {over}: {calls}, {nbytes}"
            case "again":
                return f"{gradients} reduced twice over {over}: by FSDP, and by {new} of their own"
            case "backwards":
                where = "in the last backward"
                if after:
                    where = f"in {after.removesuffix(NOT_LAST)}, but not in the last"
                instead = f" (was in {before.removesuffix(NOT_LAST)})" if before else ""
                return f"{gradients} now reduced {where}{instead}: {new} over {over}"
            case "reduce_op":
                how = f"by {after or 'sum'} instead of {before or 'sum'}"
                return f"{gradients} reduced {how} over {over}: {new}"
            case "dtype":
                return f"{gradients} reduced over {over} in {after} instead of {before}: {new}"


def find_training_changes(
    recordings: Recordings, steps: Sequence[Step], of_torch: Collection[Step] = ()
) -> tuple[tuple[TrainingChange | Step, ...], tuple[TrainingChange | Step, ...]]:
    """Return what breaks training, and what else reduces gradients differently, worst first.

    Skip steps in `of_torch`.
    """
    old, new = recordings.sides
    training = _Training(_Side(old, new, steps), _Side(new, new), recordings)
    # If the world size or the recorded ranks differ, only `backwards` can be compared.
    is_same_world = (old.world_size, old.recorded_ranks) == (new.world_size, new.recorded_ranks)
    problems = [pair for pair in training.problems() if is_same_world or pair[1][0] == "backwards"]
    owners_by_problem: defaultdict[_AxisProblem, list[Owner]] = defaultdict(list)
    for owner, problem in problems:
        if not any(_is_reported_by_step(problem[0], owner, step, recordings) for step in steps):
            owners_by_problem[problem].append(owner)
    for owner, problem in problems:
        # One sentence names all modules whose gradients are reduced more or less often, even if a
        # step reports some of them.
        listed = owners_by_problem.get(problem, [])
        if problem[0] == "times" and listed and owner not in listed:
            listed.append(owner)
    changes = [training.make_change(*group) for group in owners_by_problem.items()]
    lost = {owner for owner, (problem, *_) in problems if problem in _LOST}
    reported: list[tuple[int, TrainingChange | Step]]
    reported = [(_PROBLEMS.index(change.problem), change) for change in changes]
    for step in steps:
        name = step.find_problem(recordings)
        # Fewer reductions are harmless if other modules reduce the gradients instead. More
        # reductions are harmless if the calls in forward or outside grew by the same factor.
        is_real = name not in _LOST or any(map(step.includes, lost))
        if isinstance(step, ReducedTimes):
            is_real = step.times not in training.ratios
        if name is not None and is_real and not (step in of_torch or reports_step(changes, step)):
            # Report a lost phase before lost reductions, because it explains them.
            index = 0 if isinstance(step, PhaseUsed) else len(reported)
            reported.insert(index, (_PROBLEMS.index(name), step))
    reported.sort(key=lambda item: item[0])
    breaks = [(_PROBLEMS[rank] not in _UNMARKED, change) for rank, change in reported]
    return (
        tuple(change for is_broken, change in breaks if is_broken),
        tuple(change for is_broken, change in breaks if not is_broken),
    )


def reports_step(training: Iterable[TrainingChange | Step], step: Step) -> bool:
    """Whether `training` contains a step, or a change that covers everything in the step."""
    return any(
        change.covers_step(step) if isinstance(change, TrainingChange) else change is step
        for change in training
    )


def _is_reported_by_step(
    problem: Problem, owner: Owner, step: Step, recordings: Recordings
) -> bool:
    if isinstance(step, Counts | Steps):
        return problem == "times"
    if problem in _LOST and step.reduces_elsewhere(owner):
        return True
    # These two name no gradients.
    is_vague = isinstance(step, PhaseUsed | Redistributed)
    is_reported = not is_vague and step.includes(owner)
    return is_reported and step.find_problem(recordings) == problem


class _Side:
    """The gradient reductions of one profile, keyed by the names that the new profile uses."""

    def __init__(self, profile: CommProfile, new: CommProfile, steps: Sequence[Step] = ()) -> None:
        self.profile = profile
        self.axes = _map_to_new_axis_names(profile, new)
        self.sizes = {self.axes[axis.name]: axis.size for axis in profile.mesh_axes}
        self.dims = {self.axes[axis.name]: axis.dims for axis in profile.mesh_axes}
        self.owners: set[Owner] = set()
        self.reduced: defaultdict[Owner, defaultdict[str, list[Row]]]
        self.reduced = defaultdict(lambda: defaultdict(list))
        self.units: defaultdict[Owner, list[Row]] = defaultdict(list)
        self.work: list[Row] = []  # collectives between ranks that share a batch
        for row in profile.rows:
            owner = row.owner
            for step in steps:
                owner = step.rename_owner(owner)
            self.owners.add(owner)
            axis = self.axes.get(row.axis, "")
            # Skip groups of one rank: FSDP1 reduces even over these.
            if row.what in REDUCING and _list_gradient_calls(row) and self.sizes.get(axis) != 1:
                self.reduced[owner][axis].append(row)
            roles = {call.role for call in row.calls}
            if row.subject == "reshard" or (Role.PARAMETERS in roles and row.what == "all_gather"):
                self.units[owner].append(row)
            if Role.ACTIVATIONS in roles or row.what in BETWEEN_STAGES:
                self.work.append(row)
        # Units that stay unsharded may have no rows; only the peak shows that they exist.
        self.has_units = bool(self.units) or any(peak.nbytes for peak in profile.peaks)
        self.reduces = any(map(_list_gradient_calls, profile.rows))
        self.has_backward = any(row.phase is Phase.BACKWARD for row in profile.rows)

    def num_ranks(self, axes: Iterable[str]) -> int:
        return prod(self.sizes.get(axis, 1) for axis in axes)

    def num_gradients(self, owner: Owner) -> int:
        """Count a module's gradient elements, each once even if it is reduced several times."""
        sizes: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        for row in chain.from_iterable(self.reduced.get(owner, {}).values()):
            for call in _list_gradient_calls(row):
                sizes[row.axis, row.what].add(call.nbytes // itemsize(call.dtype))
        return max(map(sum, sizes.values()), default=0)

    def num_reduced(self, owner: Owner) -> int:
        """Count a module's gradient elements, each as often as it is reduced."""
        totals = Counter[tuple[str, str]]()
        for row in chain.from_iterable(self.reduced.get(owner, {}).values()):
            totals[row.axis, row.what] += count_elements(_list_gradient_calls(row))
        return max(totals.values(), default=0)

    def find_enclosing_unit(self, owner: str) -> str:
        """Return the innermost unit that is or contains a module; the root if there is none."""
        while owner and owner not in self.units:
            owner = owner.rpartition(".")[0]
        return owner

    def stays_gathered(self, owner: Owner) -> bool:
        """Whether the step neither gathers a unit before backward nor reshards it afterwards."""
        return all(
            row.phase is Phase.FORWARD
            if row.what == "reshard"
            else row.phase in {Phase.BACKWARD, Phase.RECOMPUTE}
            for row in self.units.get(owner, ())
        )

    def acts(self, owner: Owner, phase: Phase) -> dict[tuple[RowKey, tuple[int, ...]], int]:
        """Count how often a unit is gathered and resharded in a phase."""
        return {(row.key, row.ranks): row.count for row in self.units[owner] if row.phase is phase}

    def forward(self, axis: str) -> set[tuple[str, str]]:
        """Return the module and kind of forward collectives that work on activations."""
        return {
            (template(row.owner or ""), row.what)
            for row in self.profile.collectives
            if row.phase is Phase.FORWARD
            and self.axes.get(row.axis) == axis
            and not {call.role for call in row.calls} <= _STATE
        }

    def num_ranks_sharing_batch(self, axes: set[str]) -> int:
        """Return how many ranks share one batch, counting only axes outside `axes`."""
        return self.num_ranks({self.axes.get(row.axis, "") for row in self.work} - axes)


def _map_to_new_axis_names(profile: CommProfile, new: CommProfile) -> dict[str, str]:
    """Map each axis to its name in the new profile; a renamed axis is recognized by its ranks."""
    old = {axis.name for axis in profile.mesh_axes}
    new_names = {axis.name for axis in new.mesh_axes}
    renamed = {replace(axis, name=""): axis.name for axis in new.mesh_axes if axis.name not in old}
    return {
        name: name if name in new_names else renamed.get(replace(axis, name=""), name)
        for axis in profile.mesh_axes
        for name in [axis.name]
    }


def _join_axes(axes: Iterable[str]) -> str:
    return " and ".join(sorted(axes))


def _list_peers(dims: Mapping[str, tuple[tuple[int, int], ...]], axes: Iterable[str]) -> set[int]:
    """Return the ranks that the axes together connect with rank 0."""
    ranks = {0}
    for size, stride in chain.from_iterable(dims.get(axis, ()) for axis in axes):
        ranks = {rank + n * stride for rank in ranks for n in range(size)}
    return ranks


def _list_gradient_calls(row: Row) -> list[Calls]:
    return [call for call in row.calls if call.role == Role.GRADIENTS]


def _get_common_field_of_gradients(rows: Iterable[Row], field: str) -> str | None:
    """Return the value of `field` that all gradient calls share; None if the values differ."""
    values: set[str] = {getattr(call, field) for row in rows for call in _list_gradient_calls(row)}
    # `backwards` is empty for calls that the last backward issues; report it for all other calls.
    return max(values) if field == "backwards" else get_sole(values, None)


def _find_gradient_volume_on_busiest_rank(rows: Iterable[Row]) -> Volume:
    """Return count and bytes of gradient reductions on the rank that reduces the most bytes."""
    volumes = []
    for row in rows:
        calls = _list_gradient_calls(row)
        nbytes = sum(call.count * call.nbytes for call in calls)
        volumes.append((row.ranks, Volume(count=sum(call.count for call in calls), nbytes=nbytes)))
    return find_busiest(volumes)


class _Training:
    def __init__(self, old: _Side, new: _Side, recordings: Recordings) -> None:
        self.sides = self.old, self.new = old, new
        self.recordings, self.trees = recordings, recordings.trees
        self.ratios = _find_forward_ratios(old.work, new.work)
        self.carried = recordings.carried_elements
        grown = (name for name in new.reduced if new.num_gradients(name) > old.num_gradients(name))
        self.grown = set(grown)

    def problems(self) -> Iterator[tuple[Owner, _AxisProblem]]:
        """Yield each module that has a problem with its gradients, and the problem."""
        old, new = self.old, self.new
        has_tree = self.trees is not None and self.trees.units
        if old.has_units and not (new.has_units or new.reduces or has_tree):
            axes = {axis for reduced in old.reduced.values() for axis in reduced}
            for owner in old.units if axes else ():
                yield owner, ("unsharded", tuple(axes), "", "")
            return
        for owner, was in old.reduced.items():
            for problem in self._find_owner_problems(owner, was, new.reduced.get(owner, {})):
                yield owner, problem
        yield from self._find_units_left_gathered()
        yield from self._find_unreduced_new_units()
        yield from self._find_lost_input_gradient_reductions()
        yield from self._find_lost_output_reductions()
        yield from self._find_doubly_reduced_modules()
        yield from self._find_units_with_fewer_backwards()

    def make_change(self, problem_on_axes: _AxisProblem, owners: Sequence[Owner]) -> TrainingChange:
        problem, axes, before, after = problem_on_axes
        old, new = (
            _find_gradient_volume_on_busiest_rank(
                row
                for owner in (side.reduced if problem == "unsharded" else owners)
                for axis, reduced in side.reduced.get(owner, {}).items()
                for row in (reduced if axis in axes else ())
            )
            for side in self.sides
        )
        names = [name for name, axis in self.old.axes.items() if axis in axes]
        return TrainingChange(
            problem=problem,
            owners=sort_owners(owners),
            axes=tuple(sorted(names if problem in _LOST else axes)),
            before=before,
            after=after,
            old=old,
            new=new,
        )

    def _find_owner_problems(
        self, owner: Owner, old: Mapping[str, list[Row]], new: Mapping[str, list[Row]]
    ) -> Iterator[_AxisProblem]:
        ranks = self.old.num_ranks(old), self.new.num_ranks(new)
        if ranks[1] < ranks[0] and not self._can_fewer_ranks_be_harmless(owner, {*old}, {*new}):
            if new.keys() < old.keys():
                yield "unreduced", tuple(sorted(old.keys() - new.keys())), "", ""
            else:
                count = show_count(ranks[1], "rank")
                yield "ranks", tuple(sorted({*old, *new})), str(ranks[0]), count
        elif ranks[1] >= ranks[0] and self._is_reduced_over_other_ranks({*old}, {*new}):
            yield "ranks", tuple(sorted({*old, *new})), _join_axes(old), _join_axes(new)
        axes_by_problem: defaultdict[tuple[Problem, str, str], list[str]] = defaultdict(list)
        for axis in sorted(old.keys() & new.keys()):
            if self._has_fewer_gradients(owner) and _find_gradient_volume_on_busiest_rank(
                old[axis]
            ) != _find_gradient_volume_on_busiest_rank(new[axis]):
                axes_by_problem["part", "", ""].append(axis)
            times = self._compare_reduction_counts(owner, old[axis], new[axis])
            if times is not None and self._has_fewer_reduced_parameters(owner, axis):
                axes_by_problem["part", "", ""].append(axis)
            elif times is not None:
                axes_by_problem["times", *times].append(axis)
            for field in _FIELDS:
                before, after = (
                    _get_common_field_of_gradients(rows, field) for rows in (old[axis], new[axis])
                )
                if before is not None and after is not None and before != after:
                    axes_by_problem[field, before, after].append(axis)
        for (problem, before, after), axes in axes_by_problem.items():
            yield problem, tuple(axes), before, after

    def _find_units_left_gathered(self) -> Iterator[tuple[Owner, _AxisProblem]]:
        """Yield trained modules whose parameters are no longer gathered after an update."""
        for owner, reduced in self.new.reduced.items():
            kinds = {row.what for rows in reduced.values() for row in rows}
            is_stale = not self.old.stays_gathered(owner) and self.new.stays_gathered(owner)
            if kinds == {"reduce_scatter"} and is_stale:
                # Units reshard, while a sharded optimizer only gathers what it has updated.
                is_unit = any(row.what == "reshard" for row in self.old.units[owner])
                problem: Problem = "stale" if is_unit else "ungathered"
                yield owner, (problem, tuple(sorted(reduced)), "", "")

    def _find_unreduced_new_units(self) -> Iterator[tuple[Owner, _AxisProblem]]:
        """Yield new units with trainable parameters that backward uses, but does not reduce."""
        trees = self.trees
        for owner, rows in self.new.units.items() if self.new.reduces else ():
            is_used = any(row.phase is Phase.BACKWARD for row in rows)
            is_new = owner not in self.old.owners and owner not in self.new.reduced
            if trees is not None and owner in trees.trainable and is_used and is_new:
                axes = {self.new.axes.get(row.axis, "") for row in rows} - {""}
                yield owner, ("missing", tuple(sorted(axes)), "", "")

    def _find_lost_input_gradient_reductions(self) -> Iterator[tuple[Owner, _AxisProblem]]:
        """Yield modules whose backward no longer reduces activations, unlike their forward."""
        old, new = (_count_activation_reductions(side, Phase.BACKWARD) for side in self.sides)
        # If all parameter gradients are still reduced, nothing was detached or frozen.
        is_trained = self.old.reduced.keys() == self.new.reduced.keys()
        is_trained &= bool(self.old.reduced) or self._has_unchanged_flat_reductions_by_user()
        for axis in old if is_trained else ():
            was, now = old[axis], new.get(axis, {})
            lost = was.keys() - now.keys()
            if not self.old.reduced:  # buffers do not show whether modules were removed
                lost = {owner for owner in lost if self._is_still_in_model(owner)}
            is_same_forward = self.old.forward(axis) == self.new.forward(axis)
            if lost and is_same_forward and not now.keys() - was.keys():
                for owner in lost:
                    yield owner, ("inputs", (axis,), "", "")

    def _has_unchanged_flat_reductions_by_user(self) -> bool:
        """Whether user code reduces the same flat data after backward; False if there is none."""
        old, new = (
            {
                (row.phase, row.what, row.axis, row.ranks, calls)
                for row in side.profile.rows
                if row.phase in _AFTER_PASSES and row.what in REDUCING and row.owner is None
                for calls in row.calls
                if calls.nbytes > SCALAR_NBYTES  # not a loss or a norm
            }
            for side in self.sides
        )
        return old == new != set()

    def _find_lost_output_reductions(self) -> Iterator[tuple[Owner, _AxisProblem]]:
        """Yield modules whose forward no longer reduces outputs, although they are still split."""
        split_axes = {} if self.trees is None else self.trees.split_axes
        old, new = (_count_activation_reductions(side, Phase.FORWARD) for side in self.sides)
        for axis in old:
            # Another module may now reduce the outputs, or gather something else.
            if not self.new.forward(axis) <= self.old.forward(axis):
                continue
            for owner in old[axis].keys() - new.get(axis, {}).keys():
                if axis in split_axes.get(owner or "", ()):
                    yield owner, ("outputs", (axis,), "", "")

    def _find_doubly_reduced_modules(self) -> Iterator[tuple[Owner, _AxisProblem]]:
        """Yield modules that now reduce gradients which the unit around them reduces as well."""
        trees = self.trees
        for owner, reduced in self.new.reduced.items() if trees is not None else ():
            # Gradients of parameters that FSDP ignores have to be reduced by the user's code.
            if trees is None or not owner or owner in trees.unmanaged:
                continue
            name = self.new.find_enclosing_unit(owner)
            axes = reduced.keys() & self.new.reduced.get(name, {}).keys()
            axes -= self.old.reduced.get(owner, {}).keys()
            if name != owner and axes:
                yield owner, ("again", tuple(sorted(axes)), "", "")

    def _can_fewer_ranks_be_harmless(self, owner: Owner, was: set[str], now: set[str]) -> bool:
        """Whether a harmless change may explain why a module reduces over fewer ranks."""
        old, new, trees = self.old, self.new, self.trees
        # Ranks that had separate batches may now share one. The unit around a module may reduce the
        # module's gradients, too, and now over more axes.
        around = self._list_enclosing_unit_axes(owner, was)
        before, after = (
            side.num_ranks(axes | of_unit) * side.num_ranks_sharing_batch(was | now)
            for side, axes, of_unit in zip((old, new), (was, now), around, strict=True)
        )
        if after >= before or any(old.forward(axis) != new.forward(axis) for axis in was - now):
            return True
        if trees is not None and owner not in trees.trainable:
            return True
        if was - now and all(map(self._can_new_calls_carry_gradients, was - now)):
            return True
        # If other units are gathered, but this one is not, it was not called: the tree shows it.
        is_unit = trees is not None and new.units and owner in trees.units - new.units.keys()
        if is_unit and not self.recordings.can_still_be_gathered([owner]):
            return True
        # Other modules may reduce these gradients now, but not over the axes that are left.
        kept = was & now
        grown = {module for module in self.grown - {owner} if new.reduced[module].keys() - kept}
        if owner in new.owners:
            return any(_is_same_or_nested(owner, module) for module in grown)
        return bool(grown) or (trees is None and not self._is_still_in_model(owner))

    def _is_reduced_over_other_ranks(self, was: set[str], now: set[str]) -> bool:
        """Whether a module reduces over other ranks, although neither mesh nor forward changed.

        If no module kept its axes, two axes may have swapped roles, which is harmless.
        """
        old, new, added = self.old, self.new, now - was
        is_same_mesh = added <= old.dims.keys() and all(
            old.dims[axis] == dims for axis, dims in new.dims.items() if axis in old.dims
        )
        has_others = any(
            old.reduced.get(other, {}).keys() == axes.keys() for other, axes in new.reduced.items()
        )
        is_same_forward = all(old.forward(axis) == new.forward(axis) for axis in was - now)
        is_covered = _list_peers(old.dims, was) <= _list_peers({**old.dims, **new.dims}, now)
        return is_same_mesh and has_others and is_same_forward and not is_covered

    def _list_enclosing_unit_axes(self, owner: Owner, was: set[str]) -> tuple[set[str], set[str]]:
        """Return the axes over which the unit around a module reduces its gradients, too."""
        nothing = set[str](), set[str]()
        is_unmanaged = self.trees is not None and owner in self.trees.unmanaged
        if owner is None or owner in self.old.units or is_unmanaged:
            return nothing
        old, new = (
            set(side.reduced.get(side.find_enclosing_unit(owner), ())) for side in self.sides
        )
        # If both reduced over the same axis, the unit does not manage the module's parameters.
        return (old, new) if old.isdisjoint(was) else nothing

    def _can_new_calls_carry_gradients(self, axis: str) -> bool:
        """Whether new calls over an axis may carry the gradients that it no longer reduces."""
        lost = (
            row
            for owner, reduced in self.old.reduced.items()
            if axis not in self.new.reduced.get(owner, {})
            for row in reduced.get(axis, ())
        )
        calls = chain.from_iterable(map(_list_gradient_calls, lost))
        return count_elements(calls) <= self.carried[axis]

    def _is_still_in_model(self, owner: Owner) -> bool:
        """Whether the rows show that a module without rows is still in the model."""
        # If the layer had been removed, its other modules would have no rows either.
        layer = re.match(r"(.*\.)?[0-9]+\.", owner or "")
        siblings = [name for name in self.new.owners if layer and f"{name}".startswith(layer[0])]
        # Without a backward, missing rows do not show that the module was removed.
        return bool(siblings) or owner == ROOT_FQN or not self.new.has_backward

    def _has_fewer_gradients(self, owner: Owner) -> bool:
        """Whether a unit with unchanged gathers reduces fewer gradients."""
        trees = self.trees
        old, new = (
            {call.nbytes // itemsize(call.dtype) for row in side.units[owner] for call in row.calls}
            for side in self.sides
        )
        is_less = 0 < self.new.num_gradients(owner) < self.old.num_gradients(owner)
        # Several backwards may each reduce a different part.
        is_less &= self.new.num_reduced(owner) < self.old.num_reduced(owner)
        is_frozen = trees is not None and owner in trees.frozen | trees.partly_frozen
        is_elsewhere = any(_is_same_or_nested(owner, module) for module in self.grown)
        return old == new != set() and is_less and not (is_frozen or is_elsewhere)

    def _has_fewer_reduced_parameters(self, owner: Owner, axis: str) -> bool:
        """Whether fewer parameters of a unit reduce their gradients over an axis.

        DTensors have a call each, so there are more calls than backwards. The unit's
        reduce-scatters show the number of backwards, and that no parameter was frozen.
        """
        old, new = (
            _find_gradient_volume_on_busiest_rank(
                row
                for other, rows in side.reduced[owner].items()
                for row in rows
                if other != axis and row.what == "reduce_scatter"
            )
            for side in self.sides
        )
        before, after = (
            _find_gradient_volume_on_busiest_rank(side.reduced[owner][axis]).count
            for side in self.sides
        )
        is_elsewhere = any(_is_same_or_nested(owner, module) for module in self.grown)
        return old == new and 0 < old.count < before > after and not is_elsewhere

    def _find_units_with_fewer_backwards(self) -> Iterator[tuple[Owner, _AxisProblem]]:
        """Yield units with fewer backwards, if at least one of them has unchanged forwards."""
        units_by_runs: defaultdict[tuple[int, int], dict[Owner, bool]] = defaultdict(dict)
        for owner in filter(self.new.reduced.__contains__, self.old.reduced):
            before, after = (side.acts(owner, Phase.BACKWARD) for side in self.sides)
            old, new = (side.acts(owner, Phase.FORWARD) for side in self.sides)
            runs = {(count, after.get(row, 0)) for row, count in before.items()}
            acts = {key.what for key, _ in before}
            # Each backward reshards the unit once. Gathers in forward show the number of forwards
            # only if forward reshards the unit, and then backward gathers it again.
            if len(runs) == 1 and "reshard" in acts:
                units_by_runs[runs.pop()][owner] = "unshard" in acts and old == new
        for (runs_before, runs_now), owners in units_by_runs.items():
            if 0 < runs_now < runs_before and any(owners.values()):
                for owner in owners:
                    axes = tuple(sorted(self.new.reduced[owner]))
                    yield owner, ("passes", axes, str(runs_before), str(runs_now))

    def _compare_reduction_counts(
        self, owner: Owner, old: list[Row], new: list[Row]
    ) -> tuple[str, str] | None:
        """Return old and new counts of reductions; None if equal or due to more forwards."""
        calls = [
            [call for row in rows for call in _list_gradient_calls(row)] for rows in (old, new)
        ]
        before, after = (max(call.count for call in side) for side in calls)
        # Calls of several sizes are buckets of gradients, and the number of buckets may change.
        if before == after or any(len({call.nbytes for call in side}) > 1 for side in calls):
            return None
        ratios = self.ratios or _find_forward_ratios(self.old.units[owner], self.new.units[owner])
        is_new = ratios and Fraction(after, before) not in ratios
        return (str(before), str(after)) if is_new else None


def _find_forward_ratios(old: Iterable[Row], new: Iterable[Row]) -> set[Fraction]:
    """Return the ratios of new to old counts of rows that both sides have in forward or outside."""
    before = {(row.owner, row.key, row.ranks): row.count for row in old}
    return {
        Fraction(row.count, before[row_id])
        for row in new
        for row_id in [(row.owner, row.key, row.ranks)]
        if row_id in before and row.phase not in _AFTER_FORWARD
    }


def _count_activation_reductions(side: _Side, phase: Phase) -> dict[str, dict[Owner, int]]:
    """Count each module's reductions of activations in a phase, by axis."""
    counts: defaultdict[str, dict[Owner, int]] = defaultdict(dict)
    for row in side.work:
        if row.phase is phase and row.what in REDUCING and row.owner is not None:
            counts[side.axes[row.axis]][row.owner] = row.count
    return counts


def _is_same_or_nested(first: Owner, second: Owner) -> bool:
    """Whether two modules are the same, or one contains the other."""
    names = ((owner or "").split("+") for owner in (first, second))
    prefixes = ([f"{part}." if part else "" for part in parts] for parts in names)
    return any(old.startswith(new) or new.startswith(old) for old, new in product(*prefixes))
