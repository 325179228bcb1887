"""Define `Rule`, and values of a tree that several rules need: enclosing units, stacks, costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.text.words import itemsize
from pytest_fsdp_comm.tree.finding import Finding, FindingSettings, Level
from pytest_fsdp_comm.tree.model import ParameterNode, ShardTree, ShardUnit

# The kinds of units that shard and gather their parameters.
GATHERING: Final = ("fsdp2", "fsdp1")

_SMALL_SHARE: Final = 16


@dataclass(frozen=True)
class Wrapping:
    """A sharded model, the settings for its findings, and values that several rules need."""

    tree: ShardTree
    settings: FindingSettings

    @cached_property
    def parts(self) -> list[int]:
        """The index of each module's topmost ancestor, which identifies its part of the model."""
        parts: list[int] = []
        for index, node in enumerate(self.tree.modules):
            parts.append(index if node.parent is None else parts[node.parent])
        return parts

    @cached_property
    def units_of(self) -> dict[int, tuple[ShardUnit, ...]]:
        return self.tree.units_of()

    @cached_property
    def largest_gather(self) -> int:
        return max((unit.nbytes_gathered for unit in self.tree.units), default=0)

    @cached_property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The stacks: numbered siblings of one class that have parameters, such as ``layers.*``."""
        holding: set[int] = set()
        for parameter in self.tree.parameters:
            # Stop at the first module already added, because a model may be 100,000 modules deep.
            for module in self.tree.list_ancestry(parameter.module):
                if module in holding:
                    break
                holding.add(module)
        siblings: defaultdict[tuple[int | None, str], list[int]] = defaultdict(list)
        for index, node in enumerate(self.tree.modules):
            if node.name.isdecimal() and node.alias_of is None and index in holding:
                siblings[node.parent, node.class_name].append(index)
        return tuple(map(tuple, siblings.values()))

    @cached_property
    def unmanaged(self) -> list[int]:
        """Trainable parameters outside all units; empty if the model has no FSDP units."""
        if not any(unit.kind in GATHERING for unit in self.tree.units):
            return []
        return [
            index
            for index, parameter in enumerate(self.tree.parameters)
            if parameter.unit is None and not parameter.placements and parameter.trainable
        ]

    def sharded_units(self) -> Iterator[tuple[int, ShardUnit]]:
        """Yield the units that gather parameters, with their indices."""
        for index, unit in enumerate(self.tree.units):
            if unit.kind in GATHERING and unit.shard_axis is not None and unit.parameters:
                yield index, unit

    def parameters(self, unit: ShardUnit) -> list[ParameterNode]:
        return [self.tree.parameters[index] for index in unit.parameters]

    def is_trainable(self, unit: ShardUnit) -> bool:
        return any(parameter.trainable for parameter in self.parameters(unit))

    def list_ancestors(self, unit: ShardUnit) -> Iterator[int]:
        return islice(self.tree.list_ancestry(unit.modules[0]), 1, None)

    def group_frozen_parameters(self, unit: ShardUnit) -> Iterable[list[ParameterNode]]:
        """Return the frozen parameters that separate units could manage, one list for each unit."""
        # Skip a parameter whose module has trainable parameters too: no unit can separate them.
        trainable: set[int] = set()
        for parameter in self.parameters(unit):
            if parameter.trainable:
                trainable.update(self.tree.list_ancestry(parameter.module))
        by_module: defaultdict[int, list[ParameterNode]] = defaultdict(list)
        for parameter in self.parameters(unit):
            pure = [
                module
                for module in self.tree.list_ancestry(parameter.module)
                if module > unit.modules[0]
                and module not in trainable
                and self.tree.modules[module].has_forward
            ]
            if pure:
                by_module[pure[-1]].append(parameter)
        return by_module.values()

    def is_too_small(self, nbytes: int) -> bool:
        """Whether gathering `nbytes` is mostly latency, and the largest unit gathers far more."""
        # During the latency of a collective, the link could transfer
        # `FindingSettings.small_nbytes`. If all units of a model are small, do not report any.
        is_small = nbytes < self.settings.small_nbytes
        return is_small and is_negligible(nbytes, self.largest_gather)


def is_negligible(nbytes: int, largest: int) -> bool:
    """Whether `nbytes` is less than a sixteenth of `largest`."""
    return nbytes * _SMALL_SHARE < largest


def count_gathers(unit: ShardUnit) -> int:
    """Return how often a step gathers a unit: in forward, and for backward if it is resharded."""
    return 2 if unit.reshard_after_forward and unit.unshard_in_backward else 1


def count_reductions(unit: ShardUnit) -> int:
    """Return how many collectives reduce a unit's gradients: two for HSDP, else one."""
    return 1 if unit.replicate_axis is None else 2


def gathered_itemsize(parameter: ParameterNode, unit: ShardUnit) -> int:
    """Return the bytes of one element of a parameter when it is gathered."""
    return itemsize(unit.precision.param_dtype or parameter.dtype)


def reduced_nbytes(parameter: ParameterNode, unit: ShardUnit) -> int:
    """Return the bytes that FSDP1 sends to reduce a parameter's gradient, without padding."""
    precision = unit.precision
    dtype = precision.reduce_dtype or precision.param_dtype or parameter.dtype
    return parameter.numel * itemsize(dtype)


class Case(NamedTuple):
    """One violation of a rule; the rule adds the code, level and cure."""

    fqns: tuple[str, ...]
    """The affected modules or parameters, in any order."""
    reason: str
    nbytes: int | None = None
    cure: str = ""
    """The cure for this case; empty to use the cure of the rule."""


class Rule(NamedTuple):
    """A check for one kind of wrapping mistake; `Finding` explains most of the fields."""

    code: str
    level: Level
    """The default level. Errors break training or defeat FSDP; warnings cost time or memory."""
    cure: str
    cases: Callable[[Any], Iterator[Case]]
    """Yields the violations in a `Wrapping`, or in the ranks' snapshots."""

    def findings(self, subject: object, level: Level) -> Iterator[Finding]:
        """Yield one finding for each group of cases that differ only in names."""
        equal: dict[tuple[str, str, int | None], list[Case]] = {}
        for case in self.cases(subject):
            key = (case.reason, case.cure or self.cure, case.nbytes)
            equal.setdefault(key, []).append(case)
        for (reason, cure, nbytes), cases in equal.items():
            fqns = chain.from_iterable(case.fqns for case in cases)
            yield Finding(
                code=self.code,
                level=level,
                fqns=tuple(sorted(fqns, key=natural_key)),
                reason=reason,
                cure=cure,
                nbytes=None if nbytes is None else nbytes * len(cases),
                count=len(cases),
            )


def rule(
    code: str, level: Level, *, cure: str
) -> Callable[[Callable[[Any], Iterator[Case]]], Rule]:
    """Return a decorator that turns a generator of cases into a `Rule`."""
    return lambda cases: Rule(code, level, cure, cases)
