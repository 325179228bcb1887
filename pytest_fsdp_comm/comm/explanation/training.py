"""Find changes that break training."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, product
from math import prod
from typing import Final, Literal, TypeAlias, get_args

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import Volume
from pytest_fsdp_comm.comm.events import REDUCING, ROOT_FQN, Phase, Role
from pytest_fsdp_comm.comm.explanation.amounts import Counts, Dtype
from pytest_fsdp_comm.comm.explanation.names import Renamed
from pytest_fsdp_comm.comm.explanation.states import Owner, calls_of, sole, sort_owners, template
from pytest_fsdp_comm.comm.explanation.steps import Evidence, Replaced, Step
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey
from pytest_fsdp_comm.text.words import itemsize

# If gradients are not reduced, training is wrong, although it often communicates less. To find lost
# reductions, compare the profiles themselves: a step of the search summarizes many rows, so it may
# hide a lost reduction. Do not report a reduction as lost if a harmless change may explain it:
# other modules now reduce more gradients, the gradients are reduced over other axes, collectives of
# forward over that axis changed too, the module was removed, or the tree shows frozen parameters.
# But report a test that now looks like an evaluation: training with a detached loss looks the same.

Problem: TypeAlias = Literal[
    "unsharded", "unreduced", "part", "backwards", "ranks", "times", "passes", "reduce_op", "dtype"
]
"""Problems with gradients, worst first. ``part``: some parameters of a unit get no gradient.
``passes``: fewer backwards. ``backwards``, ``reduce_op``, ``dtype``: this field of `Calls` changed.
"""
_AxisProblem: TypeAlias = tuple[Problem, tuple[str, ...], str, str]
"""A problem, its axes, and the values before and after."""
_PROBLEMS: Final[tuple[Problem, ...]] = get_args(Problem)
_LOST: Final = frozenset({"unsharded", "unreduced"})
_FIELDS: Final[tuple[Problem, ...]] = ("backwards", "reduce_op", "dtype")

_BETWEEN_STAGES: Final = frozenset({"send", "recv"})
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
    was: Volume
    """Gradient reductions over `axes` in the snapshot, on the rank that reduces the most bytes."""
    now: Volume

    def covers(self, owners: Iterable[Owner], key: RowKey, calls: Iterable[Calls]) -> bool:
        """Whether the report of this change already covers these calls."""
        is_of_gradients = all(call.role == Role.GRADIENTS for call in calls)
        is_reduced = key.axis in self.axes and key.what in REDUCING
        is_covered = is_of_gradients and is_reduced and set(owners) <= set(self.owners)
        return is_covered and self.problem not in {"backwards", "reduce_op", "passes"}


def find_training_changes(
    old: CommProfile,
    new: CommProfile,
    steps: Sequence[Step],
    trees: Evidence | None,
    of_torch: Collection[Step] = (),
) -> tuple[TrainingChange | Step, ...]:
    """Return changes and steps that break training, worst first; skip steps in `of_torch`."""
    training = _Training(_Side(old, new, steps), _Side(new, new), trees)
    # If the world size or the recorded ranks differ, only `backwards` can be compared.
    is_same_world = (old.world_size, old.recorded_ranks) == (new.world_size, new.recorded_ranks)
    problems = [pair for pair in training.problems() if is_same_world or pair[1][0] == "backwards"]
    owners_by_problem: defaultdict[_AxisProblem, list[Owner]] = defaultdict(list)
    for owner, problem in problems:
        if not any(_is_reported(problem[0], owner, step) for step in steps):
            owners_by_problem[problem].append(owner)
    changes = [training.change(*group) for group in owners_by_problem.items()]
    lost = {owner for owner, (problem, *_) in problems if problem in _LOST}
    reported: list[tuple[int, TrainingChange | Step]]
    reported = [(_PROBLEMS.index(change.problem), change) for change in changes]
    for step in steps:
        name = _problem_of(step)
        # Fewer reductions are harmless if other modules reduce the gradients instead. More
        # reductions are harmless if the calls in forward or outside grew by the same factor.
        is_real = name not in _LOST or any(map(step.includes, lost))
        if isinstance(step, Replaced) and name == "times":
            is_real = step.facts.get("times") not in training.ratios
        if name is not None and is_real and not (step in of_torch or reports_step(changes, step)):
            # Report a lost phase before lost reductions, because it explains them.
            place = 0 if step.kind == "phase" else len(reported)
            reported.insert(place, (_PROBLEMS.index(name), step))
    return tuple(change for _, change in sorted(reported, key=lambda item: item[0]))


def reports_step(training: Iterable[TrainingChange | Step], step: Step) -> bool:
    """Whether `training` contains a step, or a change that covers everything in the step."""
    return any(
        _reports_all(change, step) if isinstance(change, TrainingChange) else change is step
        for change in training
    )


def _reports_all(change: TrainingChange, step: Step) -> bool:
    if not isinstance(step, Replaced) or step.is_added:
        return False
    if change.problem == "unsharded":
        return step.kind == "unit"
    return step.kind in {"redistributed", "axis", "part reduced"} and all(
        key.subject != "collective" or change.covers([owner], key, calls_of(rows))
        for owner, was in step.was.items()
        for key, rows in was.items()
    )


def _problem_of(step: Step) -> Problem | None:
    """Return the problem that a step's sentence reports, or None."""
    match step:
        case Replaced(
            kind="reduced" | "reduced by more" | "used in backward" | "unit", is_added=False
        ):
            return "unreduced"
        case Replaced(kind="phase", is_added=False) if Phase.BACKWARD in step.facts["phases"]:
            return "unreduced"
        case Replaced(kind="reduced times") | Replaced(facts={"is_again": True}):
            return "times"
        case Dtype() if Role.GRADIENTS in step.roles:
            return "dtype"
    return None


def _is_reported(problem: Problem, owner: Owner, step: Step) -> bool:
    if isinstance(step, Counts):
        return problem == "times"
    return step.kind != "phase" and _problem_of(step) == problem and step.includes(owner)


class _Side:
    """The gradient reductions of one profile, keyed by the names that the new profile uses."""

    def __init__(self, profile: CommProfile, new: CommProfile, steps: Sequence[Step] = ()) -> None:
        self.profile = profile
        self.axes = _new_names(profile, new)
        self.sizes = {self.axes[axis.name]: axis.size for axis in profile.mesh_axes}
        self.owners: set[Owner] = set()
        self.reduced: defaultdict[Owner, defaultdict[str, list[Row]]]
        self.reduced = defaultdict(lambda: defaultdict(list))
        self.units: defaultdict[Owner, list[Row]] = defaultdict(list)
        self.work: list[Row] = []  # collectives between ranks that share a batch
        renames = [step for step in steps if isinstance(step, Renamed)]
        for row in profile.rows:
            owner = row.owner
            for step in renames:
                owner = step.name(owner)
            self.owners.add(owner)
            axis = self.axes.get(row.axis, "")
            # Skip groups of one rank: FSDP1 reduces even over these.
            if row.what in REDUCING and _gradients(row) and self.sizes.get(axis) != 1:
                self.reduced[owner][axis].append(row)
            roles = {call.role for call in row.calls}
            if Role.PARAMETERS in roles or row.subject == "reshard":
                self.units[owner].append(row)
            if Role.ACTIVATIONS in roles or row.what in _BETWEEN_STAGES:
                self.work.append(row)
        # Units that stay unsharded may have no rows; only the peak shows that they exist.
        self.has_units = bool(self.units) or any(peak.nbytes for peak in profile.peaks)
        self.reduces = any(map(_gradients, profile.rows))
        self.has_backward = any(row.phase is Phase.BACKWARD for row in profile.rows)

    def num_ranks(self, axes: Iterable[str]) -> int:
        return prod(self.sizes.get(axis, 1) for axis in axes)

    def num_gradients(self, owner: Owner) -> int:
        """Count a module's gradient elements, each once even if it is reduced several times."""
        sizes: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        for row in chain.from_iterable(self.reduced.get(owner, {}).values()):
            for call in _gradients(row):
                sizes[row.axis, row.what].add(call.nbytes // itemsize(call.dtype))
        return max(map(sum, sizes.values()), default=0)

    def acts(self, owner: Owner, phase: Phase) -> dict[tuple[RowKey, tuple[int, ...]], int]:
        """Count how often a unit is gathered and resharded in a phase."""
        return {(row.key, row.ranks): row.count for row in self.units[owner] if row.phase is phase}

    def forward(self, axis: str) -> set[tuple[str, str]]:
        """Return the module and kind of all forward collectives over an axis, except gathers."""
        return {
            (template(row.owner or ""), row.what)
            for row in self.profile.collectives
            if row.phase is Phase.FORWARD
            and self.axes.get(row.axis) == axis
            and any(call.role != Role.PARAMETERS for call in row.calls)
        }

    def num_ranks_besides(self, axes: set[str]) -> int:
        """Return how many ranks share one batch, counting only axes outside `axes`."""
        return self.num_ranks({self.axes.get(row.axis, "") for row in self.work} - axes)


def _new_names(profile: CommProfile, new: CommProfile) -> dict[str, str]:
    """Map each axis to its name in the new profile; a renamed axis is recognized by its ranks."""
    old = {axis.name for axis in profile.mesh_axes}
    new_names = {axis.name for axis in new.mesh_axes}
    renamed = {replace(axis, name=""): axis.name for axis in new.mesh_axes if axis.name not in old}
    return {
        name: name if name in new_names else renamed.get(replace(axis, name=""), name)
        for axis in profile.mesh_axes
        for name in [axis.name]
    }


def _gradients(row: Row) -> list[Calls]:
    return [call for call in row.calls if call.role == Role.GRADIENTS]


def _sole(rows: Iterable[Row], field: str) -> str | None:
    """Return the value of `field` that all gradient calls share; None if the values differ."""
    values: set[str] = {getattr(call, field) for row in rows for call in _gradients(row)}
    # `backwards` is empty for calls that the last backward issues; report it for all other calls.
    return max(values) if field == "backwards" else sole(values, None)


def _volume(rows: Iterable[Row]) -> Volume:
    """Return count and bytes of gradient reductions on the rank that reduces the most bytes."""
    volumes: defaultdict[int | None, Volume] = defaultdict(Volume)
    for row in rows:
        calls = _gradients(row)
        nbytes = sum(call.count * call.nbytes for call in calls)
        volume = Volume(count=sum(call.count for call in calls), nbytes=nbytes)
        for rank in row.ranks or (None,):
            volumes[rank] += volume
    common = volumes.pop(None, Volume())
    return common + max(volumes.values(), key=lambda volume: volume.nbytes, default=Volume())


class _Training:
    def __init__(self, old: _Side, new: _Side, trees: Evidence | None) -> None:
        self.old, self.new, self.trees = old, new, trees
        self.ratios = _ratios(old.work, new.work)
        grown = (at for at in new.reduced if new.num_gradients(at) > old.num_gradients(at))
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
            for problem in self._of_owner(owner, was, new.reduced.get(owner, {})):
                yield owner, problem
        yield from self._passes()

    def change(self, problem_on_axes: _AxisProblem, owners: Sequence[Owner]) -> TrainingChange:
        problem, axes, before, after = problem_on_axes
        was, now = (
            _volume(
                row
                for owner in (side.reduced if problem == "unsharded" else owners)
                for axis, reduced in side.reduced.get(owner, {}).items()
                for row in (reduced if axis in axes else ())
            )
            for side in (self.old, self.new)
        )
        names = [name for name, axis in self.old.axes.items() if axis in axes]
        return TrainingChange(
            problem=problem,
            owners=sort_owners(owners),
            axes=tuple(sorted(names if problem in _LOST else axes)),
            before=before,
            after=after,
            was=was,
            now=now,
        )

    def _of_owner(
        self, owner: Owner, was: Mapping[str, list[Row]], now: Mapping[str, list[Row]]
    ) -> Iterator[_AxisProblem]:
        ranks = self.old.num_ranks(was), self.new.num_ranks(now)
        if ranks[1] < ranks[0] and not self._is_harmless(owner, {*was}, {*now}):
            if now.keys() < was.keys():
                yield "unreduced", tuple(sorted(was.keys() - now.keys())), "", ""
            else:
                yield "ranks", tuple(sorted({*was, *now})), str(ranks[0]), str(ranks[1])
        axes_by_problem: defaultdict[tuple[Problem, str, str], list[str]] = defaultdict(list)
        for axis in sorted(was.keys() & now.keys()):
            if self._is_part(owner) and _volume(was[axis]) != _volume(now[axis]):
                axes_by_problem["part", "", ""].append(axis)
            times = self._times(owner, was[axis], now[axis])
            if times is not None:
                axes_by_problem["times", *times].append(axis)
            for field in _FIELDS:
                before, after = (_sole(rows, field) for rows in (was[axis], now[axis]))
                if before is not None and after is not None and before != after:
                    axes_by_problem[field, before, after].append(axis)
        for (problem, before, after), axes in axes_by_problem.items():
            yield problem, tuple(axes), before, after

    def _is_harmless(self, owner: Owner, was: set[str], now: set[str]) -> bool:
        """Whether a harmless change may explain why a module reduces over fewer ranks."""
        old, new, trees = self.old, self.new, self.trees
        # Ranks that had separate batches may now share one.
        before, after = (
            side.num_ranks(axes) * side.num_ranks_besides(was | now)
            for side, axes in ((old, was), (new, now))
        )
        if after >= before or any(old.forward(axis) != new.forward(axis) for axis in was - now):
            return True
        if trees is not None and owner not in trees.trainable:
            return True
        grown = self.grown - {owner}
        if owner in new.owners:
            return any(_is_related(owner, module) for module in grown)
        return bool(grown) or (trees is None and not self._is_left(owner))

    def _is_left(self, owner: Owner) -> bool:
        """Whether the rows show that a module without rows is still in the model."""
        # If the layer had been removed, its other modules would have no rows either.
        layer = re.match(r"(.*\.)?[0-9]+\.", owner or "")
        siblings = [name for name in self.new.owners if layer and f"{name}".startswith(layer[0])]
        # Without a backward, missing rows do not show that the module was removed.
        return bool(siblings) or owner == ROOT_FQN or not self.new.has_backward

    def _is_part(self, owner: Owner) -> bool:
        """Whether a unit with unchanged gathers reduces fewer gradients."""
        trees = self.trees
        was, now = (
            {call.nbytes // itemsize(call.dtype) for row in side.units[owner] for call in row.calls}
            for side in (self.old, self.new)
        )
        is_less = 0 < self.new.num_gradients(owner) < self.old.num_gradients(owner)
        is_frozen = trees is not None and owner in trees.frozen | trees.partly_frozen
        is_elsewhere = any(_is_related(owner, module) for module in self.grown)
        return was == now != set() and is_less and not (is_frozen or is_elsewhere)

    def _passes(self) -> Iterator[tuple[Owner, _AxisProblem]]:
        """Yield units with fewer backwards, if at least one of them has unchanged forwards."""
        units_by_runs: defaultdict[tuple[int, int], dict[Owner, bool]] = defaultdict(dict)
        for owner in filter(self.new.reduced.__contains__, self.old.reduced):
            before, after = (side.acts(owner, Phase.BACKWARD) for side in (self.old, self.new))
            was, now = (side.acts(owner, Phase.FORWARD) for side in (self.old, self.new))
            runs = {(count, after.get(place, 0)) for place, count in before.items()}
            acts = {key.what for key, _ in before}
            # Each backward reshards the unit once. Gathers in forward show the number of forwards
            # only if forward reshards the unit, and then backward gathers it again.
            if len(runs) == 1 and "reshard" in acts:
                units_by_runs[runs.pop()][owner] = "unshard" in acts and was == now
        for (runs_before, runs_now), owners in units_by_runs.items():
            if 0 < runs_now < runs_before and any(owners.values()):
                for owner in owners:
                    axes = tuple(sorted(self.new.reduced[owner]))
                    yield owner, ("passes", axes, str(runs_before), str(runs_now))

    def _times(self, owner: Owner, was: list[Row], now: list[Row]) -> tuple[str, str] | None:
        """Return old and new counts of reductions; None if equal or due to more forwards."""
        calls = [[call for row in rows for call in _gradients(row)] for rows in (was, now)]
        before, after = (max(call.count for call in side) for side in calls)
        # Calls of several sizes are buckets of gradients, and the number of buckets may change.
        if before == after or any(len({call.nbytes for call in side}) > 1 for side in calls):
            return None
        ratios = self.ratios or _ratios(self.old.units[owner], self.new.units[owner])
        is_new = ratios and Fraction(after, before) not in ratios
        return (str(before), str(after)) if is_new else None


def _ratios(old: Iterable[Row], new: Iterable[Row]) -> set[Fraction]:
    """Return the ratios of new to old counts of rows that both sides have in forward or outside."""
    before = {(row.owner, row.key, row.ranks): row.count for row in old}
    return {
        Fraction(row.count, before[place])
        for row in new
        for place in [(row.owner, row.key, row.ranks)]
        if place in before and row.phase not in _AFTER_FORWARD
    }


def _is_related(first: Owner, second: Owner) -> bool:
    """Whether two modules are the same, or one contains the other."""
    names = ((owner or "").split("+") for owner in (first, second))
    prefixes = ([f"{part}." if part else "" for part in parts] for parts in names)
    return any(old.startswith(new) or new.startswith(old) for old, new in product(*prefixes))
