"""Compare two sharded trees; siblings with the same changes share a line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Final, TypeVar

from pytest_fsdp_comm.comm.mesh import merge_axes, show_mesh
from pytest_fsdp_comm.text.fqn import expand, fold_fqns, natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks, write_ranks
from pytest_fsdp_comm.tree.profile import (
    ParameterFacts,
    TreeFacts,
    TreeProfile,
    UnitFacts,
    comparable,
    lost_root,
    policy_change,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeChange:
    """One difference between two trees."""

    subject: str
    """A pattern of units or parameters (`text.fqn`), or ``world_size``, ``ranks`` or ``mesh``."""
    what: str
    """The change without its subject: ``reshard_after_forward True -> False``."""
    likely: str = ""
    """The probable cause; empty if unknown."""
    breaks_training: bool = False
    """Whether the change makes training incorrect; such changes are reported first."""

    def __str__(self) -> str:
        cause = f" (likely: {self.likely})" if self.likely else ""
        return f"{self.subject}: {self.what}{cause}"


_NEW_ROOT: Final = "becomes a root"
_NOT_MANAGED: Final = "no longer managed by a unit"
_TRAINED: Final = " trained, but no unit manages it or reduces its gradients"
# Changes that start with these texts break training: a parameter no longer has a unit, or its
# gradient is reduced with a different divisor or dtype.
_TRAINING: Final = (_NOT_MANAGED, "gradient_divide_factor ", "reduce_dtype ")
_Fact = TypeVar("_Fact")


def compare(old: TreeProfile, new: TreeProfile) -> tuple[TreeChange, ...]:
    """Return the changes from the snapshot to the captured trees; empty if they are equal."""
    # If ranks have different trees, each change says which ranks it affects.
    old = comparable(old, new)
    changes: list[TreeChange] = []
    if old.recorded_ranks != new.recorded_ranks:
        ranks = [write_ranks(at.recorded_ranks) or "all" for at in (old, new)]
        changes.append(TreeChange(subject="ranks", what=f"recorded {ranks[0]} -> {ranks[1]}"))
    if old.common is not None and new.common is not None:
        changes += compare_trees(old.common, new.common)
    elif old.world_size != new.world_size:
        changes += _frame_change("world_size", old.world_size, new.world_size)
    else:
        changes += _changes_by_rank(old, new)
    differing = fold_fqns(_differing(new) - _differing(old))
    changes += [
        TreeChange(subject=subject, what="differs between ranks now", breaks_training=True)
        for subject in differing
    ]
    return tuple(sorted(changes, key=lambda change: not change.breaks_training))


def _differing(profile: TreeProfile) -> set[str]:
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


def _changes_by_rank(old: TreeProfile, new: TreeProfile) -> Iterator[TreeChange]:
    """Compare the ranks that both profiles have; yield each change with the ranks it affects."""
    # In an irregular mesh, a rank knows only its own groups, so merge the axes of all ranks.
    was, now = (
        merge_axes(chain.from_iterable(tree.mesh_axes for tree in at.trees.values()))
        for at in (old, new)
    )
    mesh_changes = _frame_change("mesh", was, now, show_mesh)
    yield from mesh_changes
    before, after = (
        {
            rank: id(tree)
            for ranks, tree in at.trees.items()
            for rank in ranks or at.recorded_ranks or range(at.world_size)
        }
        for at in (old, new)
    )
    trees = {
        id(tree): replace(tree, mesh_axes=()) if mesh_changes else tree
        for at in (old, new)
        for tree in at.trees.values()
    }
    ranks_of: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in sorted(before.keys() & after.keys()):
        ranks_of[before[rank], after[rank]].append(rank)
    ranks_by_change: defaultdict[TreeChange, list[int]] = defaultdict(list)
    for pair, ranks in ranks_of.items():
        for change in compare_trees(*(trees[at] for at in pair)):
            ranks_by_change[change] += ranks
    for change, ranks in ranks_by_change.items():
        is_everywhere = len(ranks) == len(before.keys() & after.keys())
        where = "" if is_everywhere else f", on {name_ranks(ranks)}"
        yield replace(change, what=f"{change.what}{where}")


def _frame_change(
    subject: str, old: _Fact, new: _Fact, show: Callable[[_Fact], str] = str
) -> list[TreeChange]:
    change = TreeChange(subject=subject, what=f"{show(old)} -> {show(new)}")
    return [change] if old != new else []


def compare_trees(old: TreeFacts, new: TreeFacts) -> tuple[TreeChange, ...]:
    """Return the changes in world size, mesh, units and parameters, each in natural order."""
    units = _units_by_label(old), _units_by_label(new)
    likely = lost_root(old, new)
    parameter_changes = partial(_parameter_changes, has_units=any(new.units.values()))
    return (
        *_frame_change("world_size", old.world_size, new.world_size),
        *_frame_change("mesh", old.mesh_axes, new.mesh_axes, show_mesh),
        *(
            replace(change, likely=likely) if change.what == _NEW_ROOT else change
            for change in _differences(*units, _unit_changes)
        ),
        *_differences(old.parameters, new.parameters, parameter_changes),
    )


def _units_by_label(tree: TreeFacts) -> dict[str, UnitFacts]:
    return {
        name if number == 1 else f"{name}@{number}": unit
        for number, units in tree.units.items()
        for name, unit in units.items()
    }


def _differences(
    old: Mapping[str, _Fact],
    new: Mapping[str, _Fact],
    describe: Callable[[_Fact | None, _Fact | None], Iterator[str]],
) -> Iterator[TreeChange]:
    """Yield the changes of each unit or parameter; names with equal changes share a pattern."""
    names_of: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before != after:
            names_of[tuple(describe(before, after))].append(name)
    lines = [(pattern, whats) for whats, names in names_of.items() for pattern in fold_fqns(names)]
    for pattern, whats in sorted(lines, key=lambda line: natural_key(expand(line[0])[0])):
        breaks = any(what.startswith(_TRAINING) or _TRAINED in what for what in whats)
        for what in whats:
            yield TreeChange(subject=pattern, what=what, breaks_training=breaks)


def _unit_changes(old: UnitFacts | None, new: UnitFacts | None) -> Iterator[str]:
    if old is None or new is None:
        if new is not None:
            yield f"becomes a unit of its own ({new.kind})"
        if old is not None:
            yield f"is no longer a unit ({old.kind})"
        return
    if old.kind != new.kind:
        yield f"sharded by {old.kind} -> {new.kind}"
    if old.is_root != new.is_root:
        yield _NEW_ROOT if new.is_root else "is no longer a root"
    if _axes(old) != _axes(new):
        yield f"{_axes(old)} -> {_axes(new)}"
    if policy := policy_change(old, new):
        yield policy
    yield from _value_changes(old.precision, new.precision)
    if old.offload != new.offload:
        yield "shards move to host memory" if new.offload else "shards move to the device"
    yield from _value_changes(old, new, "gradient_divide_factor", "force_sum_reduction")
    yield from _value_changes(old, new, "forward_prefetch", "backward_prefetch", "prefetch")


def _value_changes(old: object, new: object, *names: str) -> Iterator[str]:
    """Yield how two dataclasses differ in the fields `names` (default: all fields)."""
    for name in names or [entry.name for entry in fields(old)]:  # type: ignore[arg-type]  # see above
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{name} {_show(before)} -> {_show(after)}"


def _show(value: object) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else str(value)


def _axes(unit: UnitFacts) -> str:
    parts = [f"sharded over {unit.shard_axis}"] if unit.shard_axis is not None else []
    parts += [f"replicated over {unit.replicate_axis}"] if unit.replicate_axis is not None else []
    return ", ".join(parts) or "on no mesh"


def _parameter_changes(
    old: ParameterFacts | None, new: ParameterFacts | None, *, has_units: bool
) -> Iterator[str]:
    # Ignore DTensors outside all units, because their placements decide how gradients are reduced.
    is_loose = has_units and new is not None and not (new.managed or new.placements)
    if old is None or new is None:
        if new is not None:
            yield f"added,{_TRAINED if is_loose and new.trainable else f' {_placement(new)}'}"
        if old is not None:
            yield f"removed, was {_placement(old)}"
        return
    if old.placements != new.placements:
        yield f"{_placement(old)} -> {_placement(new)}"
    if old.shape != new.shape:
        yield f"shape {[*old.shape]} -> {[*new.shape]}"
    yield from _value_changes(old, new, "dtype")
    if old.trainable != new.trainable:
        now = f"now{_TRAINED}" if is_loose else "frozen -> trainable"
        yield now if new.trainable else "trainable -> frozen"
    if old.managed != new.managed:
        yield "now managed by a unit" if new.managed else _NOT_MANAGED
    if old.tied != new.tied:
        yield f"tied with {_show(old.tied)} -> {_show(new.tied)}"


def _placement(parameter: ParameterFacts) -> str:
    placements = [f"{text} over {axis}" for axis, text in parameter.placements]
    return ", ".join(placements) or "a plain tensor"
