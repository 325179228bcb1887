"""What several rules ask of a tree: what lies inside what, and in which order units run."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_fsdp_comm.tree.model import ShardTree, ShardUnit

GATHERING: Final = ("fsdp2", "fsdp1")
"""Kinds of units that shard their parameters and gather them."""


def sharded_units(tree: ShardTree) -> Iterator[tuple[int, ShardUnit]]:
    """The units that gather parameters, with their indices."""
    for index, unit in enumerate(tree.units):
        if unit.kind in GATHERING and unit.shard_axis is not None and unit.parameters:
            yield index, unit


def unmanaged_parameters(tree: ShardTree) -> list[int]:
    """The trainable parameters that nothing reduces, although units gather others."""
    if not any(unit.kind in GATHERING for unit in tree.units):
        return []
    return [
        index
        for index, parameter in enumerate(tree.parameters)
        if parameter.unit is None and not parameter.placements and parameter.trainable
    ]


class Structure:
    """The modules and units of a tree, by how they enclose each other."""

    def __init__(self, tree: ShardTree) -> None:
        """Keeps the tree; what is asked about it is worked out once, when it is asked.

        Args:
            tree: Of one rank.
        """
        self._tree = tree

    @cached_property
    def ends(self) -> list[int]:
        """For each module, the index of the first one after it that is not inside it."""
        modules = self._tree.modules
        ends = list(range(1, len(modules) + 1))
        # Children come after their parents, and the last of them ends where its parent does.
        for index in reversed(range(len(modules))):
            parent = modules[index].parent
            if parent is not None:
                ends[parent] = max(ends[parent], ends[index])
        return ends

    @cached_property
    def parts(self) -> list[int]:
        """For each module, the root that it is or is below: the part of the model that it is in."""
        parts: list[int] = []
        for index, node in enumerate(self._tree.modules):
            parts.append(index if node.parent is None else parts[node.parent])
        return parts

    def above(self, module: int) -> Iterator[int]:
        """The modules around one, nearest first."""
        parent = self._tree.modules[module].parent
        while parent is not None:
            yield parent
            parent = self._tree.modules[parent].parent

    def at_and_above(self, module: int) -> Iterator[int]:
        """A module and those around it, nearest first."""
        yield module
        yield from self.above(module)

    @cached_property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The modules that are numbered siblings of one class: blocks; others are alike by chance.

        Those without a parameter inside are left out.
        """
        holding: set[int] = set()
        for parameter in self._tree.parameters:
            # Only as far as no other parameter went: a model may be 100,000 modules deep.
            for module in self.at_and_above(parameter.module):
                if module in holding:
                    break
                holding.add(module)
        siblings: defaultdict[tuple[int | None, str], list[int]] = defaultdict(list)
        for index, node in enumerate(self._tree.modules):
            if node.name.isdecimal() and node.alias_of is None and index in holding:
                siblings[node.parent, node.class_name].append(index)
        return tuple(map(tuple, siblings.values()))

    def enclosing_unit(self, unit: ShardUnit) -> ShardUnit | None:
        """The unit that would manage a unit's parameters if that were none.

        None if nothing is around it, or if that has several units, one a mesh.
        """
        units = self._units_of
        around = next((units[at] for at in self.above(unit.modules[0]) if at in units), ())
        return around[0] if len(around) == 1 else None

    @cached_property
    def _units_of(self) -> dict[int, tuple[ShardUnit, ...]]:
        return self._tree.units_of()

    def end(self, unit: ShardUnit) -> int:
        """The index of the first module after a unit's last that is not inside it."""
        return max(self.ends[at] for at in unit.modules)

    def in_order_of_forward(self) -> Iterator[tuple[int, ShardUnit]]:
        """The units with parameters, with their indices, as their forwards end.

        As far as modules run in the order of their registration.
        """

        def end_of_forward(entry: tuple[int, ShardUnit]) -> tuple[int, int]:
            # What ends together is nested, and the inner one ends first.
            return self.end(entry[1]), -entry[1].modules[0]

        units = [(i, unit) for i, unit in enumerate(self._tree.units) if unit.parameters]
        yield from sorted(units, key=end_of_forward)

    def separable(self, unit: ShardUnit, *, trainable: bool) -> dict[int, list[int]]:
        """Modules below a unit's that could be units of one sort of its parameters.

        Args:
            unit: Of one module.
            trainable: The sort: trainable or frozen.

        Returns:
            The fewest modules, each with its parameters. Left out are parameters whose module holds
            some of the other sort too.
        """
        tree = self._tree
        sorts: defaultdict[int, set[bool]] = defaultdict(set)
        for parameter in (tree.parameters[index] for index in unit.parameters):
            for module in self.at_and_above(parameter.module):
                sorts[module].add(parameter.trainable)
        found: defaultdict[int, list[int]] = defaultdict(list)
        for index in unit.parameters:
            pure = [
                module
                for module in self.at_and_above(tree.parameters[index].module)
                if module > unit.modules[0]
                and sorts[module] == {trainable}
                and tree.modules[module].has_forward
            ]
            if pure:
                found[pure[-1]].append(index)
        return found
