"""What a rule is, and one rank's tree as rules see it: enclosing units, order, cost of a step."""

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

# Kinds of units that shard their parameters and gather them.
GATHERING: Final = ("fsdp2", "fsdp1")

_SMALL_SHARE: Final = 16


@dataclass(frozen=True)
class Wrapping:
    """A tree and the settings it is judged by; what several rules need is worked out once."""

    tree: ShardTree
    settings: FindingSettings

    @cached_property
    def parts(self) -> list[int]:
        """For each module, the root that it is or is below: its part of the model."""
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
        """Numbered siblings of one class that hold a parameter: blocks, not alike by chance."""
        holding: set[int] = set()
        for parameter in self.tree.parameters:
            # Only as far as no other parameter went: a model may be 100,000 modules deep.
            for module in self.tree.around(parameter.module):
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
        """The trainable parameters that nothing reduces, although units gather others."""
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

    def above(self, unit: ShardUnit) -> Iterator[int]:
        return islice(self.tree.around(unit.modules[0]), 1, None)

    def frozen_modules(self, unit: ShardUnit) -> Iterable[list[ParameterNode]]:
        """The frozen parameters that a unit of their own could have, by the modules to wrap."""
        # A parameter whose module holds a trainable one too is in none.
        trainable: set[int] = set()
        for parameter in self.parameters(unit):
            if parameter.trainable:
                trainable.update(self.tree.around(parameter.module))
        found: defaultdict[int, list[ParameterNode]] = defaultdict(list)
        for parameter in self.parameters(unit):
            pure = [
                module
                for module in self.tree.around(parameter.module)
                if module > unit.modules[0]
                and module not in trainable
                and self.tree.modules[module].has_forward
            ]
            if pure:
                found[pure[-1]].append(parameter)
        return found.values()

    # Note [What a collective costs]: its latency, however little it carries, which is as much as
    # the bytes that the link carries in that time. `FindingSettings.small_nbytes` is this number of
    # bytes. So a change pays if it saves more bytes than the collectives that it adds would cost,
    # and a unit is too small if it gathers fewer bytes; but beside small units none is too small.

    def is_too_small(self, nbytes: int) -> bool:
        """Whether a unit that gathers so much costs latency (Note [What a collective costs])."""
        is_small = nbytes < self.settings.small_nbytes
        return is_small and is_negligible(nbytes, self.largest_gather)


def is_negligible(nbytes: int, among: int) -> bool:
    """Whether something is less than a sixteenth of the largest beside it."""
    return nbytes * _SMALL_SHARE < among


def gathers(unit: ShardUnit) -> int:
    """How often a step gathers a unit: in forward, and again in backward if freed between."""
    return 2 if unit.reshard_after_forward and unit.unshard_in_backward else 1


def reductions(unit: ShardUnit) -> int:
    """How many collectives reduce a unit's gradients: one more where copies of it exist."""
    return 1 if unit.replicate_axis is None else 2


def gathered_itemsize(parameter: ParameterNode, unit: ShardUnit) -> int:
    """Bytes of each element that gathering a parameter sends."""
    return itemsize(unit.precision.param_dtype or parameter.dtype)


def reduced_nbytes(parameter: ParameterNode, unit: ShardUnit) -> int:
    """Bytes that FSDP1 sends to reduce a parameter's gradient, padding not counted."""
    precision = unit.precision
    # FSDP2 falls back to the parameter's own type since torch 2.15.
    dtype = precision.reduce_dtype or precision.param_dtype or parameter.dtype
    return parameter.numel * itemsize(dtype)


class Case(NamedTuple):
    """One thing that breaks a rule: what differs between the rule's findings."""

    fqns: tuple[str, ...]
    """The modules or parameters concerned, in any order."""
    reason: str
    nbytes: int | None = None
    """As in `Finding`."""
    cure: str = ""
    """What to write instead here; empty for the rule's cure."""


class Rule(NamedTuple):
    """A sort of finding."""

    code: str
    """A short name, such as ``no-root-unit``."""
    level: Level
    """The default. Errors make training wrong or defeat FSDP; warnings cost time or memory."""
    cure: str
    """What to write instead."""
    cases: Callable[[Any], Iterator[Case]]
    """Yields what breaks the rule: in a `Wrapping`, or in texts of ranks."""

    def findings(self, subject: object, level: Level) -> Iterator[Finding]:
        """Yield a finding for each group of cases that differ in nothing but names."""
        alike: dict[tuple[str, str, int | None], list[Case]] = {}
        for case in self.cases(subject):
            key = (case.reason, case.cure or self.cure, case.nbytes)
            alike.setdefault(key, []).append(case)
        for (reason, cure, nbytes), cases in alike.items():
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
    """Make a `Rule` of a function that yields its cases."""
    return lambda cases: Rule(code, level, cure, cases)
