"""Compares two sharded trees and says what changed, siblings of equal change in one line."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from pytest_fsdp_comm.comm.mesh import merge_axes, show_mesh
from pytest_fsdp_comm.text.fqn import expand, fold_fqns, natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks, write_ranks
from pytest_fsdp_comm.tree.facts import policy_change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_fsdp_comm.tree.facts import ParameterFacts, TreeFacts, UnitFacts
    from pytest_fsdp_comm.tree.model import Precision
    from pytest_fsdp_comm.tree.profile import TreeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeChange:
    """One difference between two trees."""

    subject: str
    """Whose: a pattern of FQNs as `text.fqn.fold_fqns` writes it, or ``world_size``, ``ranks``,
    ``mesh``."""
    what: str
    """``layers.2: reshard_after_forward True -> False`` without its subject."""
    likely: str = ""
    """The probable cause; empty if the pattern fits none."""

    def __str__(self) -> str:
        """The change in one line, with its probable cause."""
        cause = f" (likely: {self.likely})" if self.likely else ""
        return f"{self.subject}: {self.what}{cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeComparison:
    """All that differs between a snapshot and what was captured."""

    is_same: bool
    changes: tuple[TreeChange, ...]
    """Empty if nothing differs. Where ranks differ among themselves, each says which ranks have it.
    """


_NO_ROOT: Final = (
    "fully_shard on the root is missing, so each of these becomes a root and keeps its parameters "
    "after forward"
)
_Fact = TypeVar("_Fact")


def compare(old: TreeProfile, new: TreeProfile) -> TreeComparison:
    """Compares a snapshot with what was captured.

    Where the snapshot has all ranks, but only some were recorded now (the fake backend), only these
    are compared.

    Args:
        old: The snapshot.
        new: What was captured.
    """
    if new.recorded_ranks and not old.recorded_ranks:
        old = old.restricted(new.recorded_ranks)
    changes: tuple[TreeChange, ...] = ()
    if old.recorded_ranks != new.recorded_ranks:
        ranks = [write_ranks(at.recorded_ranks) or "all" for at in (old, new)]
        changes = (TreeChange(subject="ranks", what=f"recorded {ranks[0]} -> {ranks[1]}"),)
    if old.common is not None and new.common is not None:
        if old.common != new.common:
            changes = (*changes, *compare_trees(old.common, new.common))
        return TreeComparison(is_same=not changes, changes=changes)
    is_same = not changes and old.trees == new.trees
    if not is_same:
        changes = (*changes, *_changes_by_rank(old, new))
    return TreeComparison(is_same=is_same, changes=changes)


def _changes_by_rank(old: TreeProfile, new: TreeProfile) -> Iterator[TreeChange]:
    """The changes of the trees of all ranks that both have, each with the ranks that have it."""
    if old.world_size != new.world_size:
        yield TreeChange(subject="world_size", what=f"{old.world_size} -> {new.world_size}")
        return
    # Each rank knows its own groups of a mesh that lies irregularly.
    meshes = [
        show_mesh(merge_axes(chain.from_iterable(tree.mesh_axes for tree in at.trees.values())))
        for at in (old, new)
    ]
    if meshes[0] != meshes[1]:
        yield TreeChange(subject="mesh", what=f"{meshes[0]} -> {meshes[1]}")
    ranks_of: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    before, after = ({rank: id(tree) for rank, tree in _by_rank(at)} for at in (old, new))
    for rank in sorted(before.keys() & after.keys()):
        ranks_of[before[rank], after[rank]].append(rank)
    trees = {
        id(tree): replace(tree, mesh_axes=()) for at in (old, new) for tree in at.trees.values()
    }
    found: defaultdict[TreeChange, list[int]] = defaultdict(list)
    for (was, now), ranks in ranks_of.items():
        for change in compare_trees(trees[was], trees[now]):
            found[change] += ranks
    for change, ranks in found.items():
        is_everywhere = len(ranks) == len(before.keys() & after.keys())
        where = "" if is_everywhere else f", on {name_ranks(sorted(ranks))}"
        yield replace(change, what=f"{change.what}{where}")


def _by_rank(profile: TreeProfile) -> Iterator[tuple[int, TreeFacts]]:
    everyone = profile.recorded_ranks or range(profile.world_size)
    for ranks, tree in profile.trees.items():
        yield from ((rank, tree) for rank in ranks or everyone)


def compare_trees(old: TreeFacts, new: TreeFacts) -> tuple[TreeChange, ...]:
    """Compares two trees.

    Args:
        old: Mostly from a snapshot.
        new: Mostly from a live tree, by `pytest_fsdp_comm.tree.facts.tree_facts`.

    Returns:
        The changes: of the world and its mesh, then of units, then of parameters, each in natural
        order. Empty if the trees are equal.
    """
    changes: list[TreeChange] = []
    if old.world_size != new.world_size:
        changes.append(
            TreeChange(subject="world_size", what=f"{old.world_size} -> {new.world_size}")
        )
    if old.mesh_axes != new.mesh_axes:
        meshes = [show_mesh(tree.mesh_axes) for tree in (old, new)]
        changes.append(TreeChange(subject="mesh", what=f"{meshes[0]} -> {meshes[1]}"))
    units = _units_by_label(old), _units_by_label(new)
    lost_root = "" in units[0] and "" not in units[1]
    changes += _folded(
        _differences(*units, _unit_changes),
        likely=lambda what: _NO_ROOT if lost_root and what.startswith("becomes a root") else "",
    )
    changes += _folded(
        _differences(old.parameters, new.parameters, _parameter_changes), likely=lambda _: ""
    )
    return tuple(changes)


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
) -> dict[str, tuple[str, ...]]:
    found = {}
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before != after:
            found[name] = tuple(describe(before, after))
    return found


def _folded(
    found: dict[str, tuple[str, ...]], *, likely: Callable[[str], str]
) -> Iterator[TreeChange]:
    names_of: dict[tuple[str, ...], list[str]] = {}
    for name, whats in found.items():
        names_of.setdefault(whats, []).append(name)
    lines = [(pattern, whats) for whats, names in names_of.items() for pattern in fold_fqns(names)]
    for pattern, whats in sorted(lines, key=lambda line: natural_key(expand(line[0])[0])):
        for what in whats:
            yield TreeChange(subject=pattern, what=what, likely=likely(what))


def _unit_changes(old: UnitFacts | None, new: UnitFacts | None) -> Iterator[str]:
    if old is None or new is None:
        given = new or old
        kind = given.kind if given is not None else ""
        yield (
            f"becomes a unit of its own ({kind})"
            if old is None
            else f"is no longer a unit ({kind})"
        )
        return
    if old.kind != new.kind:
        yield f"sharded by {old.kind} -> {new.kind}"
    if old.is_root != new.is_root:
        yield "becomes a root" if new.is_root else "is no longer a root"
    if (old.shard_axis, old.replicate_axis) != (new.shard_axis, new.replicate_axis):
        yield f"{_axes(old)} -> {_axes(new)}"
    policy = policy_change(old, new)
    if policy:
        yield policy
    yield from _precision_changes(old.precision, new.precision)
    if old.offload != new.offload:
        yield "shards move to host memory" if new.offload else "shards move to the device"
    for name in ("forward_prefetch", "backward_prefetch", "prefetch"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{name} {', '.join(before) or 'none'} -> {', '.join(after) or 'none'}"


def _precision_changes(old: Precision, new: Precision) -> Iterator[str]:
    for entry in fields(old):
        before, after = getattr(old, entry.name), getattr(new, entry.name)
        if before != after:
            yield f"{entry.name} {before} -> {after}"


def _axes(unit: UnitFacts) -> str:
    parts = [f"sharded over {unit.shard_axis}"] if unit.shard_axis is not None else []
    parts += [f"replicated over {unit.replicate_axis}"] if unit.replicate_axis is not None else []
    return ", ".join(parts) or "on no mesh"


def _parameter_changes(old: ParameterFacts | None, new: ParameterFacts | None) -> Iterator[str]:
    if old is None or new is None:
        yield f"added, {_placement(new)}" if new is not None else f"removed, was {_placement(old)}"
        return
    if old.placements != new.placements:
        yield f"{_placement(old)} -> {_placement(new)}"
    if old.shape != new.shape:
        yield f"shape {_shape(old)} -> {_shape(new)}"
    if old.dtype != new.dtype:
        yield f"dtype {old.dtype} -> {new.dtype}"
    if old.trainable != new.trainable:
        yield "frozen -> trainable" if new.trainable else "trainable -> frozen"
    if old.managed != new.managed:
        yield "now managed by a unit" if new.managed else "no longer managed by a unit"
    if old.tied != new.tied:
        yield f"tied with {', '.join(old.tied) or 'none'} -> {', '.join(new.tied) or 'none'}"


def _placement(parameter: ParameterFacts | None) -> str:
    placements = () if parameter is None else parameter.placements
    return ", ".join(f"{text} over {axis}" for axis, text in placements) or "a plain tensor"


def _shape(parameter: ParameterFacts) -> str:
    return f"[{', '.join(map(str, parameter.shape))}]"
