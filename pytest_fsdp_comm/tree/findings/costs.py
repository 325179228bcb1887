"""Units and parameters that are wrapped in the right place, yet cost more than they need."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.tree.findings.rules import propose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_fsdp_comm.tree.findings.rules import FindingRules
    from pytest_fsdp_comm.tree.model import Finding, ParameterNode, ShardTree, ShardUnit

_GATHERING: Final = ("fsdp2", "fsdp1")
_SMALL_SHARE: Final = 16


def _sharded_units(tree: ShardTree) -> Iterator[tuple[int, ShardUnit]]:
    for index, unit in enumerate(tree.units):
        if unit.kind in _GATHERING and unit.shard_axis is not None and unit.parameters:
            yield index, unit


def find_large_replicated(tree: ShardTree, rules: FindingRules) -> Iterator[Finding]:
    """Large parameters that every rank keeps whole."""
    if not tree.is_sharded:
        return
    for index, parameter in enumerate(tree.parameters):
        if not parameter.is_sharded and parameter.nbytes >= rules.replicated_nbytes:
            yield propose(
                "large-replicated",
                [tree.parameter_fqn(index)],
                f"every rank keeps all {show_nbytes(parameter.nbytes)} of it, while other "
                "parameters are sharded",
                "shard it too: by fully_shard, or in the tensor-parallel plan",
                parameter.nbytes,
            )


def find_mixed_frozen(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """Frozen parameters in one unit with trainable ones."""
    for index, unit in _sharded_units(tree):
        frozen = [p for p in unit.parameters if not tree.parameters[p].trainable]
        if frozen and len(frozen) < len(unit.parameters):
            nbytes = sum(tree.parameters[p].nbytes for p in frozen)
            yield propose(
                "mixed-frozen",
                [tree.unit_name(index)],
                f"{len(frozen)} of its {len(unit.parameters)} parameters are frozen and are "
                f"gathered with the trainable ones, {show_nbytes(nbytes)} each time; FSDP1 refuses "
                "this without use_orig_params, FSDP2 says nothing",
                "give frozen and trainable parameters units of their own",
                nbytes,
            )


def find_frozen_gathered(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """Frozen units that backward gathers again."""
    for index, unit in _sharded_units(tree):
        is_frozen = not any(tree.parameters[p].trainable for p in unit.parameters)
        if is_frozen and unit.reshard_after_forward and unit.unshard_in_backward:
            yield propose(
                "frozen-gathered-in-backward",
                [tree.unit_name(index)],
                "all its parameters are frozen, yet they are gathered again in each backward",
                "reshard_after_forward=False if memory allows; set_unshard_in_backward(False) if "
                "nothing trainable comes before it",
                unit.nbytes_gathered,
            )


def find_unit_sizes(tree: ShardTree, rules: FindingRules) -> Iterator[Finding]:
    """Units far too small or too large for a collective."""
    units = list(_sharded_units(tree))
    largest = max((unit.nbytes_gathered for _, unit in units), default=0)
    for index, unit in units:
        nbytes = unit.nbytes_gathered
        if nbytes < rules.small_nbytes and nbytes * _SMALL_SHARE < largest and not unit.is_root:
            yield propose(
                "unit-too-small",
                [tree.unit_name(index)],
                f"it gathers {show_nbytes(nbytes)}, which costs a collective's latency and no "
                f"bandwidth; the largest unit gathers {show_nbytes(largest)}",
                "leave it to the enclosing unit, or group it: fully_shard([a, b])",
                nbytes,
            )
        if nbytes > rules.large_nbytes:
            yield propose(
                "unit-too-large",
                [tree.unit_name(index)],
                f"it gathers {show_nbytes(nbytes)} at once, and nothing overlaps with that",
                "call fully_shard on its blocks first",
                nbytes,
            )


def find_padding(tree: ShardTree, rules: FindingRules) -> Iterator[Finding]:
    """Units that gather mostly padding."""
    for index, unit in _sharded_units(tree):
        # FSDP1 pads whole units and aligns parameters: little, and nothing that a user shapes.
        is_much = unit.nbytes_padding > rules.padding_share * unit.nbytes_gathered
        if unit.kind == "fsdp2" and is_much and unit.nbytes_padding >= rules.padding_nbytes:
            share = unit.nbytes_padding / unit.nbytes_gathered
            yield propose(
                "padding",
                [tree.unit_name(index)],
                f"{share:.0%} of what it gathers is padding, since dimensions do not divide by "
                f"{unit.shard_axis.size if unit.shard_axis else 1} ranks",
                "shard another dimension (shard_placement_fn), over fewer ranks (HSDP), or choose "
                "sizes that divide",
                unit.nbytes_padding,
            )


def find_short_dimensions(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """Parameters with fewer rows than there are ranks."""
    found: dict[str, list[tuple[str, ParameterNode]]] = defaultdict(list)
    for index, parameter in enumerate(tree.parameters):
        for placement in parameter.placements:
            if placement.dim is not None and 0 < parameter.shape[placement.dim] < placement.size:
                found[f"{placement.axis}={placement.size}"].append(
                    (tree.parameter_fqn(index), parameter)
                )
    for axis, entries in found.items():
        sizes = sorted({str(parameter.shape[0]) for _, parameter in entries})
        yield propose(
            "dim-smaller-than-axis",
            (fqn for fqn, _ in entries),
            f"the split dimension has fewer elements ({', '.join(sizes)}) than the axis {axis} has "
            "ranks: some ranks keep nothing, and what is gathered is mostly padding",
            "shard another dimension (shard_placement_fn) or over fewer ranks",
        )


def find_precision_overrides(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """Units that mixed precision leaves out for their class."""
    for index, unit in enumerate(tree.units):
        if unit.precision_overrides:
            yield propose(
                "precision-override",
                [tree.unit_name(index)],
                f"mixed precision ignores the class {', '.join(unit.precision_overrides)}, so that "
                "auto-wrap made this a unit of its own in full precision",
                "intended for batch norm; else change _module_classes_to_ignore of the policy",
                unit.nbytes_gathered,
            )


def find_mixed_dtypes(tree: ShardTree, _: FindingRules) -> Iterator[Finding]:
    """Units of several element types."""
    for index, unit in _sharded_units(tree):
        dtypes = dict.fromkeys(tree.parameters[p].dtype for p in unit.parameters)
        if len(dtypes) > 1:
            yield propose(
                "mixed-dtypes",
                [tree.unit_name(index)],
                f"its parameters are of {', '.join(dtypes)}: FSDP refuses this for trainable ones "
                "in the first forward, and gathers frozen ones as raw bytes with extra copies",
                "convert them to one dtype, or give each dtype a unit",
            )
