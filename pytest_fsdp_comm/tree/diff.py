"""Compare two sharded trees; siblings with the same changes share a line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Final, TypeVar

from pytest_fsdp_comm.comm.mesh import MeshAxis, merge_axes, name_mesh_change, show_mesh
from pytest_fsdp_comm.text.fqn import expand, fold_fqns, natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks, write_ranks
from pytest_fsdp_comm.text.words import show_count
from pytest_fsdp_comm.tree.profile import (
    ParameterFacts,
    TreeFacts,
    TreeProfile,
    UnitFacts,
    lost_root,
    policy_change,
    restrict_to_ranks_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeChange:
    """One difference between two trees."""

    subject: str
    """A pattern of units or parameters (`text.fqn`), or ``world_size``, ``ranks`` or ``mesh``."""
    what: str
    """The change without its subject: ``reshard_after_forward True -> False``."""
    noun: str = field(default="", compare=False)
    """``units`` or ``parameters`` if `subject` is a pattern."""
    likely: str = ""
    """The probable cause; empty if unknown."""
    breaks_training: bool = False
    """Whether the change makes training incorrect; such changes are reported first."""

    def __str__(self) -> str:
        cause = f" (likely: {self.likely})" if self.likely else ""
        return f"{self.subject}: {self.what}{cause}"


_ADDED: Final = "added,"
_REMOVED: Final = "removed, was"
_NEW_ROOT: Final = "becomes a root"
_NEW_UNIT: Final = "is now a unit"
_NO_UNIT: Final = "is no longer a unit"
_NOT_MANAGED: Final = "no longer managed by a unit"
_TRAINED: Final = " trained, but no unit manages it or reduces its gradients"
# Changes that start with these texts break training: a parameter no longer has a unit, or its
# gradient is reduced with a different divisor or dtype.
_TRAINING: Final = (_NOT_MANAGED, "gradient_divide_factor ")
_Fact = TypeVar("_Fact")


def compare(
    old: TreeProfile, new: TreeProfile, *, carried_elements: int = 0
) -> tuple[TreeChange, ...]:
    """Return the changes from the snapshot to the captured trees; empty if they are equal.

    Args:
        old: The snapshot's trees.
        new: The captured trees.
        carried_elements: How many elements of gradients new collectives of user code may carry.
    """
    # If ranks have different trees, each change says which ranks it affects.
    old = restrict_to_ranks_of(old, new)
    changes: list[TreeChange] = []
    if old.recorded_ranks != new.recorded_ranks:
        ranks = [write_ranks(side.recorded_ranks) or "all" for side in (old, new)]
        changes.append(TreeChange(subject="ranks", what=f"recorded {ranks[0]} -> {ranks[1]}"))
    if old.common is not None and new.common is not None:
        changes += compare_trees(old.common, new.common, carried_elements=carried_elements)
    elif old.world_size != new.world_size:
        changes += _diff_fact("world_size", old.world_size, new.world_size)
    else:
        changes += _compare_common_ranks(old, new, carried_elements)
    differed, differing = map(_find_parameters_differing_between_ranks, (old, new))
    changes += [
        TreeChange(subject=subject, what="differs between ranks now", breaks_training=True)
        for subject in fold_fqns(differing - differed)
    ]
    return tuple(sorted(changes, key=lambda change: not change.breaks_training))


def _find_parameters_differing_between_ranks(profile: TreeProfile) -> set[str]:
    """Return the parameters whose facts differ between the ranks that have them."""
    first: dict[str, ParameterFacts] = {}
    for tree in profile.trees.values():
        first = {**tree.parameters, **first}
    return {
        name
        for tree in profile.trees.values()
        for name, facts in tree.parameters.items()
        if facts != first[name]
    }


def _compare_common_ranks(
    old: TreeProfile, new: TreeProfile, carried_elements: int
) -> Iterator[TreeChange]:
    """Compare the ranks that both profiles have; yield each change with the ranks it affects."""
    # In an irregular mesh, a rank knows only its own groups, so merge the axes of all ranks.
    was, now = (
        merge_axes(chain.from_iterable(tree.mesh_axes for tree in side.trees.values()))
        for side in (old, new)
    )
    mesh_changes = _diff_meshes(was, now)
    yield from mesh_changes
    before, after = (
        {
            rank: id(tree)
            for ranks, tree in side.trees.items()
            for rank in ranks or side.recorded_ranks or range(side.world_size)
        }
        for side in (old, new)
    )
    trees = {
        id(tree): replace(tree, mesh_axes=()) if mesh_changes else tree
        for side in (old, new)
        for tree in side.trees.values()
    }
    ranks_of: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in sorted(before.keys() & after.keys()):
        ranks_of[before[rank], after[rank]].append(rank)
    ranks_by_change: defaultdict[TreeChange, list[int]] = defaultdict(list)
    for pair, ranks in ranks_of.items():
        for change in compare_trees(*(trees[i] for i in pair), carried_elements=carried_elements):
            ranks_by_change[change] += ranks
    # A parameter that some ranks lost and others gained has moved, such as to another stage.
    moved_from = {
        gained: lost
        for gained in ranks_by_change
        for lost in [replace(gained, what=reverse_addition(gained.what))]
        if lost in ranks_by_change
    }
    for change, ranks in ranks_by_change.items():
        if change in moved_from.values():
            continue
        is_everywhere = len(ranks) == len(before.keys() & after.keys())
        what = change.what if is_everywhere else f"{change.what}, on {name_ranks(ranks)}"
        if change in moved_from:
            old_ranks = ranks_by_change[moved_from[change]]
            what = f"moved from {name_ranks(old_ranks)} to {name_ranks(ranks)}"
        yield replace(change, what=what)


def reverse_addition(what: str) -> str:
    """Return the text of the removal that reverses ``added, ...``; empty for other changes."""
    return what.replace(_ADDED, _REMOVED, 1) if what.startswith(_ADDED) else ""


def _diff_fact(
    subject: str, old: _Fact, new: _Fact, show: Callable[[_Fact], str] = str
) -> list[TreeChange]:
    change = TreeChange(subject=subject, what=f"{show(old)} -> {show(new)}")
    return [change] if old != new else []


def compare_trees(
    old: TreeFacts, new: TreeFacts, *, carried_elements: int = 0
) -> tuple[TreeChange, ...]:
    """Return the changes in world size, mesh, units and parameters, each in natural order."""
    left_out = (
        facts
        for name, facts in new.parameters.items()
        if facts.trainable and not facts.managed and facts != old.parameters.get(name)
    )
    elements = sum(prod(facts.shape) for facts in left_out)
    is_carried = 0 < elements <= carried_elements
    units = _label_units(old), _label_units(new)
    before, after = (
        {module for name in tree.parameters for module in _list_enclosing_modules(name)}
        for tree in (old, new)
    )
    reported = (before ^ after) | _list_modules_of_joint_units(*units)
    likely = lost_root(old, new)
    has_units = any(new.units.values()) and not is_carried
    parameter_changes = partial(_describe_parameter_changes, has_units=has_units)
    problems = _TRAINING if not is_carried else tuple({*_TRAINING} - {_NOT_MANAGED})
    removed = _drop_names_tied_in_other_tree(old.parameters, new.parameters)
    added = _drop_names_tied_in_other_tree(new.parameters, old.parameters)
    moves = _find_moved_parameters(removed, added)
    old_names = {moved: name for name, (moved, _) in moves.items()}
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for name, (_, how) in moves.items():
        names_of[how].append(name)
    return (
        *_diff_fact("world_size", old.world_size, new.world_size),
        *_diff_meshes(old.mesh_axes, new.mesh_axes),
        *(
            replace(change, likely=likely) if change.what == _NEW_ROOT else change
            for change in _compare_named_facts("units", *units, _describe_unit_changes, problems)
            # Parameters say that a module was added or removed with its unit. A unit that has
            # more or fewer modules now is reported under its longer name.
            if not change.what.startswith((_NO_UNIT, _NEW_UNIT))
            or not reported.issuperset(expand(change.subject))
        ),
        *(
            TreeChange(subject=pattern, what=how, noun="parameters")
            for how, names in names_of.items()
            for pattern in fold_fqns(names)
        ),
        *_compare_named_facts(
            "parameters",
            removed,
            {old_names.get(name, name): facts for name, facts in added.items()},
            parameter_changes,
            problems,
        ),
    )


def _find_moved_parameters(
    old: Mapping[str, ParameterFacts], new: Mapping[str, ParameterFacts]
) -> dict[str, tuple[str, str]]:
    """Map parameters to their new name and what happened, if one module around them was added.

    Examples are adapters, which wrap a layer, and a model that becomes part of another one. The
    shape must be the same. A module may also have been removed.
    """
    moves: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    lost, gained = (side.keys() - other for side, other in ((old, new), (new, old)))
    for name in gained:
        for short, module in _list_names_without_one_module(name):
            if short in lost and old[short].shape == new[name].shape:
                moves[short].append((name, f"now below {module}"))
    for name in lost:
        for short, module in _list_names_without_one_module(name):
            if short in gained and old[name].shape == new[short].shape:
                moves[name].append((short, f"no longer below {module}"))
    counts = Counter(name for targets in moves.values() for name, _ in targets)
    return {
        name: targets[0]
        for name, targets in moves.items()
        if len(targets) == 1 and counts[targets[0][0]] == 1
    }


def _list_names_without_one_module(parameter: str) -> Iterator[tuple[str, str]]:
    """Yield the parameter's name without one of the modules around it, and that module."""
    parts = parameter.split(".")
    for index, module in enumerate(parts[:-1]):
        yield ".".join(parts[:index] + parts[index + 1 :]), module


def _drop_names_tied_in_other_tree(
    parameters: Mapping[str, ParameterFacts], others: Mapping[str, ParameterFacts]
) -> dict[str, ParameterFacts]:
    """Drop names that the other tree lists as tied with a parameter that both trees have."""
    tied = {name for main in parameters.keys() & others for name in others[main].tied}
    return {name: facts for name, facts in parameters.items() if name in others or name not in tied}


def _list_modules_of_joint_units(*sides: Mapping[str, UnitFacts]) -> set[str]:
    """List the modules of all units that have several modules."""
    return {part for units in sides for name in units if "+" in name for part in name.split("+")}


def _list_enclosing_modules(parameter: str) -> Iterator[str]:
    """Yield the names of all modules that contain a parameter."""
    while parameter:
        parameter = parameter.rpartition(".")[0]
        yield parameter


def _label_units(tree: TreeFacts) -> dict[str, UnitFacts]:
    return {
        name if number == 1 else f"{name}@{number}": unit
        for number, units in tree.units.items()
        for name, unit in units.items()
    }


def _compare_named_facts(
    noun: str,
    old: Mapping[str, _Fact],
    new: Mapping[str, _Fact],
    describe: Callable[[_Fact | None, _Fact | None], Iterator[str]],
    problems: tuple[str, ...],
) -> Iterator[TreeChange]:
    """Yield the changes of each unit or parameter; names with equal changes share a pattern."""
    names_of: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before != after:
            names_of[tuple(describe(before, after))].append(name)
    lines = [(pattern, whats) for whats, names in names_of.items() for pattern in fold_fqns(names)]
    for pattern, whats in sorted(lines, key=lambda line: natural_key(expand(line[0])[0])):
        breaks = any(what.startswith(problems) or _TRAINED in what for what in whats)
        for what in whats:
            yield TreeChange(subject=pattern, what=what, noun=noun, breaks_training=breaks)


def _diff_meshes(old: tuple[MeshAxis, ...], new: tuple[MeshAxis, ...]) -> list[TreeChange]:
    return _diff_fact(name_mesh_change(old, new), old, new, show_mesh)


def _describe_unit_changes(old: UnitFacts | None, new: UnitFacts | None) -> Iterator[str]:
    if old is None or new is None:
        if new is not None:
            yield f"{_NEW_UNIT} ({new.kind})"
        if old is not None:
            yield f"{_NO_UNIT} ({old.kind})"
        return
    if old.kind != new.kind:
        yield f"sharded by {old.kind} -> {new.kind}"
    if old.is_root != new.is_root:
        yield _NEW_ROOT if new.is_root else "is no longer a root"
    if _describe_unit_axes(old) != _describe_unit_axes(new):
        yield f"{_describe_unit_axes(old)} -> {_describe_unit_axes(new)}"
    if policy := policy_change(old, new):
        yield policy
    yield from _describe_field_changes(old.precision, new.precision)
    if old.offload != new.offload:
        yield "shards move to host memory" if new.offload else "shards move to the device"
    yield from _describe_field_changes(old, new, "gradient_divide_factor", "force_sum_reduction")
    if old.kind == new.kind:  # each version of FSDP has other settings
        yield from _describe_prefetch_changes(old, new)


def _describe_field_changes(old: object, new: object, *names: str) -> Iterator[str]:
    """Yield how two dataclasses differ in the fields `names` (default: all fields)."""
    for name in names or [entry.name for entry in fields(old)]:  # type: ignore[arg-type]  # see above
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{name} {_show_field_value(before)} -> {_show_field_value(after)}"


def _describe_prefetch_changes(old: UnitFacts, new: UnitFacts) -> Iterator[str]:
    yield from _describe_field_changes(old, new, "prefetch")
    for name in ("forward_prefetch", "backward_prefetch"):
        before, after = getattr(old, name), getattr(new, name)
        if len(before) != len(after):
            # Units usually prefetch different units, and should still share a line.
            yield f"{name} {show_count(len(before), 'unit')} -> {show_count(len(after), 'unit')}"
        elif before != after:
            yield f"{name} {', '.join(before)} -> {', '.join(after)}"


def _show_field_value(value: object) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else str(value)


def _describe_unit_axes(unit: UnitFacts) -> str:
    parts = [f"sharded over {unit.shard_axis}"] if unit.shard_axis is not None else []
    parts += [f"replicated over {unit.replicate_axis}"] if unit.replicate_axis is not None else []
    return ", ".join(parts) or "without parameters"


def _describe_parameter_changes(
    old: ParameterFacts | None, new: ParameterFacts | None, *, has_units: bool
) -> Iterator[str]:
    # Ignore DTensors outside all units, because their placements decide how gradients are reduced.
    is_loose = has_units and new is not None and not (new.managed or new.placements)
    if old is None or new is None:
        if new is not None:
            placement = f" {_describe_parameter(new)}"
            yield f"{_ADDED}{_TRAINED if is_loose and new.trainable else placement}"
        if old is not None:
            yield f"{_REMOVED} {_describe_parameter(old)}"
        return
    if old.placements != new.placements:
        yield f"{_describe_placement(old)} -> {_describe_placement(new)}"
    if old.shape != new.shape:
        yield f"shape {[*old.shape]} -> {[*new.shape]}"
    yield from _describe_field_changes(old, new, "dtype")
    if old.trainable != new.trainable:
        now = f"now{_TRAINED}" if is_loose else "frozen -> trainable"
        yield now if new.trainable else "trainable -> frozen"
    if old.managed != new.managed:
        frozen = "" if old.trainable or new.trainable else "frozen, and "
        yield "now managed by a unit" if new.managed else f"{frozen}{_NOT_MANAGED}"
    if old.tied != new.tied:
        yield f"{_describe_ties(old)} -> {_describe_ties(new)}"


def _describe_ties(parameter: ParameterFacts) -> str:
    return f"tied with {', '.join(parameter.tied)}" if parameter.tied else "not tied"


def _describe_parameter(parameter: ParameterFacts) -> str:
    return f"{_describe_placement(parameter)}{'' if parameter.trainable else ', frozen'}"


def _describe_placement(parameter: ParameterFacts) -> str:
    placements = [f"{text} over {axis}" for axis, text in parameter.placements]
    return ", ".join(placements) or "a plain tensor"
