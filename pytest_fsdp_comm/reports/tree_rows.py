"""A tree as rows to draw: numbered siblings that are alike share one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.text.fqn import escape, fold_fqns
from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.tree.model import ParameterNode, ShardUnit

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from pytest_fsdp_comm.tree.model import ShardTree

MAX_DEPTH: Final = 40
"""Levels that a drawing indents; deeper rows stay at this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow:
    """One module, or several that are alike, with what hangs on it."""

    name: str
    """Pattern of the names in their parent: ``{0..31}``; ``(root)`` for the root."""
    count: int
    """How many modules share the row, on this level alone."""
    depth: int
    """Rows above it."""
    class_name: str
    wrappers: tuple[str, ...]
    units: tuple[ShardUnit, ...]
    """Of one of the modules."""
    parameters: tuple[ParameterNode, ...]
    """Of one of the modules, without its children's."""
    nbytes: int
    """Bytes of all parameters of one of the modules, its children's included."""
    same_as: str
    """FQN of the module that it repeats; empty for most."""
    inside_as: str
    """Name of the sibling row that is alike but for the policy, and whose parameters and children
    stand for this one's too; empty if they are drawn."""

    @property
    def has_parameter_rows(self) -> bool:
        """Whether parameters have rows of their own; a single one may share that of its module."""
        return len(self.parameters) > 1 or bool(self.units and self.parameters)


def tree_rows(tree: ShardTree) -> Iterator[TreeRow]:
    """The rows of a tree, parents first, in registration order."""
    children = _children(tree)
    parameters: dict[int, list[ParameterNode]] = {}
    for parameter in tree.parameters:
        parameters.setdefault(parameter.module, []).append(parameter)
    units = tree.units_of()
    likeness, inner = _likeness(tree, children, parameters, units)
    nbytes = [
        sum(entry.nbytes for entry in parameters.get(i, ())) for i in range(len(tree.modules))
    ]
    for index in reversed(range(1, len(nbytes))):
        parent = tree.modules[index].parent
        if parent is not None:
            nbytes[parent] += nbytes[index]
    drawn: dict[tuple[int | None, int], str] = {}
    roots: list[tuple[int, ...]] = [
        (index,) for index, node in enumerate(tree.modules) if node.parent is None
    ]
    pending = roots[::-1]
    while pending:
        alike = pending.pop()
        index = alike[0]
        node = tree.modules[index]
        name = _shared_name([tree.modules[i].name for i in alike])
        is_numbered = node.name.isdecimal() and (children[index] or index in parameters)
        first = drawn.setdefault((node.parent, inner[index]), name) if is_numbered else name
        yield TreeRow(
            name=name,
            count=len(alike),
            depth=node.depth,
            class_name=node.class_name,
            wrappers=node.wrappers,
            units=units.get(index, ()),
            parameters=tuple(parameters.get(index, ()) if first == name else ()),
            nbytes=nbytes[index],
            same_as="" if node.alias_of is None else escape(tree.module_fqn(node.alias_of)),
            inside_as="" if first == name else first,
        )
        if first == name:
            pending += reversed(list(_alike_siblings(tree, children[index], likeness)))


def _children(tree: ShardTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in tree.modules]
    for index, node in enumerate(tree.modules):
        if node.parent is not None:
            children[node.parent].append(index)
    return children


def _likeness(
    tree: ShardTree,
    children: Sequence[Sequence[int]],
    parameters: dict[int, list[ParameterNode]],
    units: dict[int, tuple[ShardUnit, ...]],
) -> tuple[list[int], list[int]]:
    """Two numbers for each module: equal where all of it looks alike, and where its inside does."""
    numbers: dict[Hashable, int] = {}
    likeness = [0] * len(tree.modules)
    inner = [0] * len(tree.modules)
    # Children come after their parents: from the end, each finds its children numbered.
    for index in reversed(range(len(tree.modules))):
        node = tree.modules[index]
        below = tuple((tree.modules[child].name, likeness[child]) for child in children[index])
        own = tuple(
            (entry.name, entry.shape, entry.dtype, entry.placements, entry.trainable, entry.tied)
            for entry in parameters.get(index, ())
        )
        policies = tuple(
            replace(unit, modules=(), parameters=(), forward_prefetch=(), backward_prefetch=())
            for unit in units.get(index, ())
        )
        inside = (node.class_name, node.wrappers, node.alias_of, own, below)
        inner[index] = numbers.setdefault(inside, len(numbers))
        likeness[index] = numbers.setdefault((inside, policies), len(numbers))
    return likeness, inner


def _alike_siblings(
    tree: ShardTree, siblings: Iterable[int], likeness: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    def key(index: int) -> tuple[bool, int]:
        is_numbered = tree.modules[index].name.isdecimal()
        return (is_numbered, likeness[index] if is_numbered else index)

    for _, alike in groupby(siblings, key=key):
        yield tuple(alike)


def _shared_name(names: Sequence[str]) -> str:
    return escape(names[0]) if len(names) == 1 else ",".join(fold_fqns(names))


def summary_words(tree: ShardTree) -> str:
    """``4 ranks, dp=4; 33 units; 33 parameters, 128.0 KiB in all, 32.0 KiB of it on rank 0``."""
    nbytes = sum(parameter.nbytes for parameter in tree.parameters)
    kept = sum(parameter.local_numel * parameter.itemsize for parameter in tree.parameters)
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in tree.mesh_axes) or "no mesh"
    return (
        f"{tree.world_size} ranks, {axes}; {len(tree.units)} units; {len(tree.parameters)} "
        f"parameters, {show_nbytes(nbytes)} in all, {show_nbytes(kept)} of it on rank {tree.rank}"
    )


def relation_words(row: TreeRow) -> str:
    """`` is layers.0``, `` same contents as {0..6}``, to follow the class; empty for most."""
    repeated = f" is {row.same_as}" if row.same_as else ""
    return repeated + (f" same contents as {row.inside_as}" if row.inside_as else "")


def mark(unit: ShardUnit) -> str:
    """Whether a unit is sharded at all, in capitals."""
    return "FULLY SHARDED" if unit.is_fully_sharded else "REPLICATED"


def policy_words(unit: ShardUnit) -> str:
    """A unit's policy for people: ``dp=4, stays unsharded after forward, bfloat16``."""
    words = [f"{axis.name}={axis.size}" for axis in (unit.shard_axis,) if axis is not None]
    if unit.replicate_axis is not None:
        copies = f"{unit.replicate_axis.name}={unit.replicate_axis.size}"
        # A unit that is not sharded is marked as replicated already.
        words.append(f"replicated {copies}" if unit.is_fully_sharded else copies)
    after = unit.reshard_after_forward
    if isinstance(after, bool):
        words.append("reshards after forward" if after else "stays unsharded after forward")
    elif after is not None:
        words.append(f"reshards to {after} ranks after forward")
    precision = unit.precision
    if precision.param_dtype or precision.reduce_dtype:
        dtypes = dict.fromkeys(filter(None, (precision.param_dtype, precision.reduce_dtype)))
        words.append("/".join(dtypes))
    words += ["on host"] if unit.offload else []
    words += ["root"] if unit.is_root else []
    return ", ".join(words)


def placement_words(parameter: ParameterNode) -> str:
    """Where a parameter's parts are: ``Shard(0)@dp``; ``whole on each rank`` without a mesh."""
    parts = ", ".join(f"{entry.text}@{entry.axis}" for entry in parameter.placements)
    return parts or "whole on each rank"


def parameter_words(parameter: ParameterNode) -> str:
    """``weight [64, 64] float32``, with ``frozen`` where it is."""
    frozen = "" if parameter.trainable else " frozen"
    return f"{escape(parameter.name)} {list(parameter.shape)} {parameter.dtype}{frozen}"
