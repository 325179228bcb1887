"""Units that are wrapped in the wrong place, in the wrong order, or not at all."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.tree.findings.rules import propose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_fsdp_comm.tree.findings.rules import FindingRules
    from pytest_fsdp_comm.tree.model import Finding, ShardTree

_GATHERING: Final = ("fsdp2", "fsdp1")


def find_no_root_unit(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """Several units without a common one around them."""
    for kind in _GATHERING:
        units = [unit for unit in tree.units if unit.kind == kind]
        roots = [(index, unit) for index, unit in enumerate(tree.units) if unit in units]
        roots = [(index, unit) for index, unit in roots if unit.is_root]
        if len({unit.modules for _, unit in roots}) > 1:
            kept = [unit for _, unit in roots if unit.reshard_after_forward is False]
            nbytes = sum(unit.nbytes_gathered for unit in kept)
            yield propose(
                "no-root-unit",
                (tree.unit_name(index) for index, _ in roots),
                f"{len(roots)} units have no common root, so each becomes one: it gathers for "
                f"itself without prefetching, and {show_nbytes(nbytes)} of parameters stay "
                "gathered on each rank from forward to backward",
                "call fully_shard on the model itself too, after its blocks"
                if kind == "fsdp2"
                else "wrap the model itself in FullyShardedDataParallel too",
                nbytes,
            )


def find_grouped_root(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """A unit of several modules that has no root around it."""
    for index, unit in enumerate(tree.units):
        if unit.kind == "fsdp2" and unit.is_root and len(unit.modules) > 1:
            yield propose(
                "grouped-root",
                [tree.unit_name(index)],
                f"{len(unit.modules)} modules share this unit, nothing encloses them, and a root "
                "has to be a single module: the first forward raises a RuntimeError",
                "call fully_shard on the model itself too, after its parts",
            )


def find_nested_kinds(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """A unit inside one of another kind."""
    kinds = {module: unit.kind for unit in tree.units for module in unit.modules}
    for index, unit in enumerate(tree.units):
        above = tree.modules[unit.modules[0]].parent
        while above is not None:
            if above in kinds and unit.kind != kinds[above]:
                outer = tree.module_fqn(above) or "(root)"
                yield propose(
                    "nested-kinds",
                    [tree.unit_name(index)],
                    f"a unit of {unit.kind} lies inside {outer}, a unit of {kinds[above]}: the two "
                    "do not know of each other's gathering and reduction",
                    "shard the whole model with one of them; fully_shard is the one that torch "
                    "develops",
                )
                break
            above = tree.modules[above].parent


def find_wrapped_after_parent(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """A unit whose parameters its parent had taken already."""
    empty = {unit.modules[0]: i for i, unit in enumerate(tree.units) if not unit.parameters}
    if not empty:
        return
    taken: dict[int, list[int]] = defaultdict(list)
    for parameter in tree.parameters:
        at: int | None = parameter.module
        while at is not None and parameter.unit is not None:
            if at in empty:
                if not tree.units[parameter.unit].modules[0] >= at:
                    taken[at].append(parameter.unit)
                break
            at = tree.modules[at].parent
    for module, units in taken.items():
        yield propose(
            "wrapped-after-parent",
            [tree.unit_name(empty[module])],
            f"it has no parameters of its own: {tree.unit_name(units[0]) or '(root)'}, which was "
            "wrapped before it, already manages them, so nothing is gathered block by block",
            "wrap children before their parents",
            sum(tree.units[unit].nbytes_gathered for unit in set(units)),
        )


def find_split_tie(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """Tied parameters that sharding tore apart."""
    for index, parameter in enumerate(tree.parameters):
        if parameter.split_from is not None:
            yield propose(
                "split-tie",
                [tree.parameter_fqn(parameter.split_from), tree.parameter_fqn(index)],
                "they were one parameter, and sharding made two of it: they are gathered twice, "
                "and the first optimizer step tears them apart",
                "pass both modules to one call, fully_shard([a, b]), or leave both to the root",
                parameter.nbytes,
            )


def find_unmanaged(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """Trainable parameters outside every unit."""
    if not any(unit.kind in _GATHERING for unit in tree.units):
        return
    loose = [
        (tree.parameter_fqn(index), parameter)
        for index, parameter in enumerate(tree.parameters)
        if parameter.unit is None and not parameter.placements and parameter.trainable
    ]
    if loose:
        yield propose(
            "unmanaged-parameter",
            (fqn for fqn, _ in loose),
            "no unit manages these trainable parameters: their gradients are never reduced, so the "
            "ranks drift apart, and every rank keeps them whole",
            "call fully_shard on a module around them; if they are ignored on purpose, reduce "
            "their gradients yourself or freeze them",
            sum(parameter.nbytes for _, parameter in loose),
        )


def find_partly_wrapped(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """A stack of blocks of which some are units and some are not."""
    wrapped = {module for unit in tree.units for module in unit.modules}
    holding: set[int] = set()
    for parameter in tree.parameters:
        above: int | None = parameter.module
        while above is not None and above not in holding:
            holding.add(above)
            above = tree.modules[above].parent
    siblings: dict[tuple[int | None, str], list[int]] = defaultdict(list)
    for index, node in enumerate(tree.modules):
        # Numbered siblings are the blocks of a stack; others share a class by chance.
        if node.name.isdecimal() and node.alias_of is None and index in holding:
            siblings[node.parent, node.class_name].append(index)
    for (_parent, class_name), members in siblings.items():
        left = [index for index in members if index not in wrapped]
        if left and len(left) < len(members):
            yield propose(
                "partly-wrapped",
                map(tree.module_fqn, left),
                f"{len(members) - len(left)} of {len(members)} {class_name} blocks beside each "
                "other are units, these are not: their parameters are gathered with an enclosing "
                "unit, or by none",
                "call fully_shard on each block of the stack",
            )
