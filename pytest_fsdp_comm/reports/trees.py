"""Format a sharded tree as a text table, from rows that the HTML pages also use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.fqn import escape, fold_fqns
from pytest_fsdp_comm.text.words import show_nbytes
from pytest_fsdp_comm.tree.model import ParameterNode, ShardTree, ShardUnit

# The deepest level that is indented further than its parent.
MAX_DEPTH: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow:
    """A row about one module, or about several equal siblings, with its units and parameters."""

    name: str
    """Pattern of the modules' names, without the parent's: ``{0..31}``; ``(root)`` for the root."""
    count: int
    depth: int
    class_name: str
    units: tuple[ShardUnit, ...]
    parameters: tuple[ParameterNode, ...]
    """The parameters of one of the modules, without its children's parameters."""
    same_as: str
    """The first FQN of a module that is registered several times; empty in its first row."""

    @property
    def has_parameter_rows(self) -> bool:
        """Whether parameters need separate rows; a single parameter may share the module's row."""
        return len(self.parameters) > 1 or bool(self.units and self.parameters)


def tree_rows(tree: ShardTree) -> Iterator[TreeRow]:
    """Yield the rows of a tree, parents first, in registration order."""
    # `children[None]` lists the roots; there are several if pipeline stages are drawn together.
    children: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, node in enumerate(tree.modules):
        children[node.parent].append(index)
    parameters: defaultdict[int, list[ParameterNode]] = defaultdict(list)
    for parameter in tree.parameters:
        parameters[parameter.module].append(parameter)
    units = tree.units_of()
    content = _number_modules_by_content(tree, children, parameters, units)
    pending: list[list[int]] = [[index] for index in reversed(children[None])]
    while pending:
        siblings = pending.pop()
        index = siblings[0]
        node = tree.modules[index]
        names = [tree.modules[i].name for i in siblings]
        name = escape(names[0]) if len(names) == 1 else ",".join(fold_fqns(names))
        yield TreeRow(
            name=name,
            count=len(siblings),
            depth=node.depth,
            class_name=node.class_name,
            units=units.get(index, ()),
            parameters=tuple(parameters[index]),
            same_as="" if node.alias_of is None else escape(tree.module_fqn(node.alias_of)),
        )
        groups = groupby(children[index], key=lambda i: _sibling_group_key(tree, i, content))
        pending += reversed([list(group) for _, group in groups])


def _sibling_group_key(tree: ShardTree, index: int, content: Sequence[int]) -> tuple[bool, int]:
    # Only numbered siblings, such as the layers of a stack, share a row.
    is_numbered = tree.modules[index].name.isdecimal()
    return (is_numbered, content[index] if is_numbered else index)


def _number_modules_by_content(
    tree: ShardTree,
    children: Mapping[int | None, Sequence[int]],
    parameters: Mapping[int, Sequence[ParameterNode]],
    units: dict[int, tuple[ShardUnit, ...]],
) -> list[int]:
    """Number the modules; modules whose subtrees look the same get equal numbers."""
    numbers: dict[Hashable, int] = {}
    content = [0] * len(tree.modules)
    # Iterate in reverse, so that children are numbered before their parents. To compare modules, it
    # is then enough to compare the numbers of their children, not their entire subtrees.
    for index in reversed(range(len(tree.modules))):
        node = tree.modules[index]
        submodules = tuple(
            (tree.modules[child].name, content[child]) for child in children.get(index, ())
        )
        entries = tuple(
            (entry.name, entry.shape, entry.dtype, entry.placements, entry.trainable, entry.tied)
            for entry in parameters.get(index, ())
        )
        policies = tuple(
            replace(unit, modules=(), parameters=(), forward_prefetch=(), backward_prefetch=())
            for unit in units.get(index, ())
        )
        drawn = (node.class_name, node.wrappers, node.alias_of, entries, submodules, policies)
        content[index] = numbers.setdefault(drawn, len(numbers))
    return content


def summary_words(tree: ShardTree) -> str:
    """Return ``4 ranks, dp=4; 33 units; 33 parameters, 128.0 KiB in all, 32.0 KiB on rank 0``."""
    nbytes = sum(parameter.nbytes for parameter in tree.parameters)
    local_nbytes = sum(parameter.local_numel * parameter.itemsize for parameter in tree.parameters)
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in tree.mesh_axes) or "no mesh"
    return (
        f"{tree.world_size} ranks, {axes}; {len(tree.units)} units; {len(tree.parameters)} "
        f"parameters, {show_nbytes(nbytes)} in all, {show_nbytes(local_nbytes)} on rank {tree.rank}"
    )


def relation_words(row: TreeRow) -> str:
    """Return `` same as layers.0``, to print after the class; empty for most modules."""
    return f" same as {row.same_as}" if row.same_as else ""


def mark(unit: ShardUnit) -> str:
    """Return ``FULLY SHARDED`` or ``REPLICATED``."""
    return "FULLY SHARDED" if unit.is_fully_sharded else "REPLICATED"


def policy_words(unit: ShardUnit) -> str:
    """Describe a unit's policy: ``dp=4, stays unsharded after forward, bfloat16``."""
    words = [f"{axis.name}={axis.size}" for axis in (unit.shard_axis,) if axis is not None]
    if unit.replicate_axis is not None:
        copies = f"{unit.replicate_axis.name}={unit.replicate_axis.size}"
        # For a unit without shards, `mark` already says that it is replicated.
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
    words += ["offloaded to host"] if unit.offload else []
    factor = unit.gradient_divide_factor
    words += [] if factor is None else [f"gradients divided by {factor:g}"]
    words += ["gradients summed, not averaged"] if unit.force_sum_reduction else []
    words += ["root"] if unit.is_root else []
    return ", ".join(words)


def placement_words(parameter: ParameterNode) -> str:
    """Describe a parameter's placements: ``Shard(0)@dp``, or ``full copy on each rank``."""
    parts = ", ".join(f"{entry.text}@{entry.axis}" for entry in parameter.placements)
    return parts or "full copy on each rank"


def parameter_words(parameter: ParameterNode) -> str:
    """Describe a parameter: ``weight [64, 64] float32 frozen``."""
    frozen = "" if parameter.trainable else " frozen"
    return f"{escape(parameter.name)} {list(parameter.shape)} {parameter.dtype}{frozen}"


# A line of the table: one string for each column of `_HEADINGS`.
_Line = tuple[str, str, str, str]

_HEADINGS: Final[_Line] = ("module", "policy or placement", "gathered", "kept")


def render_tree(tree: ShardTree) -> str:
    """Format modules and parameters as a text table, with policies, placements and bytes."""
    lines = [_HEADINGS, *(line for row in tree_rows(tree) for line in _format_row_lines(row))]
    first, second, third, fourth = (max(map(len, column)) for column in zip(*lines, strict=True))
    drawn = []
    for module, policy, gathered, sharded in lines:
        row = f"{module:{first}}  {policy:{second}}  {gathered:>{third}}  {sharded:>{fourth}}"
        drawn.append(row.rstrip())
    for finding in tree.findings:
        drawn += ["", str(finding)]
    return printable("\n".join([summary_words(tree), "", *drawn]), "\n")


def _format_row_lines(row: TreeRow) -> Iterator[_Line]:
    indent = "  " * min(row.depth, MAX_DEPTH)
    count = f" x{row.count}" if row.count > 1 else ""
    label = f"{indent}{row.name}{count} [{row.class_name}]{relation_words(row)}"
    for unit in row.units:
        gathered = show_nbytes(unit.nbytes_gathered) if unit.nbytes_gathered else ""
        policy = f"{mark(unit)} {policy_words(unit)}"
        yield (label, policy, gathered, show_nbytes(unit.nbytes_kept))
        label = indent
    if not row.has_parameter_rows and row.parameters:
        yield _format_parameter_line(f"{label} ", row.parameters[0])
        return
    if not row.units:
        yield (label, "", "", "")
    for parameter in row.parameters:
        yield _format_parameter_line(f"{indent}  . ", parameter)


def _format_parameter_line(label: str, parameter: ParameterNode) -> _Line:
    return (label + parameter_words(parameter), placement_words(parameter), "", "")
