"""The wrapping mistakes that torch does not check, one declaration each.

First what makes training wrong or defeats FSDP, then what costs more than it needs.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.text.fqn import escape
from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks
from pytest_fsdp_comm.tree.findings.rule import Case, Rule, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_fsdp_comm.tree.findings.thresholds import Thresholds
    from pytest_fsdp_comm.tree.model import ParameterNode, ShardTree, ShardUnit

_GATHERING: Final = ("fsdp2", "fsdp1")
_SMALL_SHARE: Final = 16


def _sharded_units(tree: ShardTree) -> Iterator[tuple[int, ShardUnit]]:
    for index, unit in enumerate(tree.units):
        if unit.kind in _GATHERING and unit.shard_axis is not None and unit.parameters:
            yield index, unit


@rule(
    "no-root-unit",
    "error",
    cure="call fully_shard on the model itself too, after its blocks",
)
def no_root_unit(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """Several units without a common one around them, which parts of one model need not have."""
    by_part: dict[tuple[str, int], list[tuple[int, ShardUnit]]] = defaultdict(list)
    for index, unit in enumerate(tree.units):
        if unit.kind in _GATHERING and unit.is_root:
            by_part[unit.kind, tree.root_above(unit.modules[0])].append((index, unit))
    for (kind, _part), roots in sorted(by_part.items(), key=lambda entry: entry[0][1]):
        if len({unit.modules for _, unit in roots}) > 1:
            kept = [unit for _, unit in roots if unit.reshard_after_forward is False]
            nbytes = sum(unit.nbytes_gathered for unit in kept)
            yield Case(
                fqns=tuple(tree.unit_name(index) for index, _ in roots),
                reason=(
                    f"{len(roots)} units have no common root, so each becomes one: it gathers for "
                    f"itself without prefetching, and {show_nbytes(nbytes)} of parameters stay "
                    "gathered on each rank from forward to backward"
                ),
                nbytes=nbytes,
                cure="wrap the model itself in FullyShardedDataParallel too"
                if kind == "fsdp1"
                else None,
            )


@rule(
    "grouped-root",
    "error",
    cure="call fully_shard on the model itself too, after its parts",
)
def grouped_root(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """A unit of several modules that has no root around it."""
    for index, unit in enumerate(tree.units):
        if unit.kind == "fsdp2" and unit.is_root and len(unit.modules) > 1:
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=(
                    f"{len(unit.modules)} modules share this unit, nothing encloses them, and a "
                    "root must be a single module: the first forward raises a RuntimeError"
                ),
            )


@rule(
    "nested-kinds",
    "error",
    cure="shard the whole model with one of them; fully_shard is the one under active development",
)
def nested_kinds(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """A unit inside one of another kind."""
    kinds = {module: unit.kind for unit in tree.units for module in unit.modules}
    for index, unit in enumerate(tree.units):
        above = tree.modules[unit.modules[0]].parent
        while above is not None:
            if above in kinds and unit.kind != kinds[above]:
                yield Case(
                    fqns=(tree.unit_name(index),),
                    reason=(
                        f"its kind is {unit.kind}, but it lies inside "
                        f"{escape(tree.module_fqn(above))}, whose kind is {kinds[above]}: neither "
                        "accounts for the other's gathers and reductions"
                    ),
                )
                break
            above = tree.modules[above].parent


@rule("wrapped-after-parent", "error", cure="wrap children before their parents")
def wrapped_after_parent(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """A unit whose parameters its parent had taken already."""
    empty = {unit.modules[0]: i for i, unit in enumerate(tree.units) if not unit.parameters}
    if not empty:
        return
    managers: dict[int, list[int]] = defaultdict(list)
    for parameter in tree.parameters:
        above: int | None = parameter.module
        while above is not None and parameter.unit is not None:
            if above in empty:
                if tree.units[parameter.unit].modules[0] < above:
                    managers[above].append(parameter.unit)
                break
            above = tree.modules[above].parent
    for module, units in managers.items():
        yield Case(
            fqns=(tree.unit_name(empty[module]),),
            reason=(
                f"it has no parameters of its own: {escape(tree.unit_name(units[0]))}, which was "
                "wrapped before it, already manages them, so nothing is gathered block by block"
            ),
            nbytes=sum(tree.units[unit].nbytes_gathered for unit in set(units)),
        )


@rule(
    "split-tie",
    "error",
    cure="pass both modules to one call, fully_shard([a, b]), or leave both to the root",
)
def split_tie(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """Tied parameters that sharding tore apart."""
    for index, parameter in enumerate(tree.parameters):
        if parameter.split_from is not None:
            yield Case(
                fqns=(tree.parameter_fqn(parameter.split_from), tree.parameter_fqn(index)),
                reason=(
                    "they were one parameter, and sharding made two of it: both are gathered, "
                    "and they diverge at the first optimizer step"
                ),
                nbytes=parameter.nbytes,
            )


@rule(
    "unmanaged-parameter",
    "error",
    cure=(
        "call fully_shard on a module around them; if they are ignored on purpose, reduce their "
        "gradients yourself or freeze them"
    ),
)
def unmanaged_parameter(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """Trainable parameters outside every unit."""
    if not any(unit.kind in _GATHERING for unit in tree.units):
        return
    loose = [
        (tree.parameter_fqn(index), parameter)
        for index, parameter in enumerate(tree.parameters)
        if parameter.unit is None and not parameter.placements and parameter.trainable
    ]
    if loose:
        yield Case(
            fqns=tuple(fqn for fqn, _ in loose),
            reason=(
                "no unit manages these trainable parameters: their gradients are never reduced, "
                "so the ranks drift apart, and every rank keeps them whole"
            ),
            nbytes=sum(parameter.nbytes for _, parameter in loose),
        )


@rule("ranks-differ", "error", cure="build and wrap the model alike on all ranks")
def ranks_differ(texts: Mapping[int, str], _: Thresholds) -> Iterator[Case]:
    """Trees that are not the same on all ranks, as their snapshots would be written."""
    (ranks, text), *others = fold_equal(texts)
    if others:
        other_ranks, other_text = others[0]
        lines = set(text.splitlines()) ^ set(other_text.splitlines())
        shown = min(lines, key=lambda line: (line.startswith("total"), line))
        yield Case(
            fqns=("",),
            reason=(
                f"{name_ranks(ranks)} and {name_ranks(other_ranks)} shard the model differently, "
                f"first in: {shown}; their collectives will not match"
            ),
        )


@rule("partly-wrapped", "warning", cure="call fully_shard on each block of the stack")
def partly_wrapped(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
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
            yield Case(
                fqns=tuple(tree.module_fqn(index) for index in left),
                reason=(
                    f"{len(members) - len(left)} of {len(members)} sibling {class_name} "
                    "modules are units, but these are not: their parameters are gathered with an "
                    "enclosing unit, or not at all"
                ),
            )


@rule(
    "large-replicated",
    "warning",
    cure="shard it too: by fully_shard, or in the tensor-parallel plan",
)
def large_replicated(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Large parameters that every rank keeps whole."""
    if not tree.is_sharded:
        return
    for index, parameter in enumerate(tree.parameters):
        if not parameter.is_sharded and parameter.nbytes >= thresholds.replicated_nbytes:
            yield Case(
                fqns=(tree.parameter_fqn(index),),
                reason=(
                    f"every rank keeps all {show_nbytes(parameter.nbytes)} of it, while other "
                    "parameters are sharded"
                ),
                nbytes=parameter.nbytes,
            )


@rule(
    "mixed-frozen",
    "warning",
    cure="give frozen and trainable parameters units of their own",
)
def mixed_frozen(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """Frozen parameters in one unit with trainable ones."""
    for index, unit in _sharded_units(tree):
        frozen = [p for p in unit.parameters if not tree.parameters[p].trainable]
        if frozen and len(frozen) < len(unit.parameters):
            nbytes = sum(tree.parameters[p].nbytes for p in frozen)
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=(
                    f"{len(frozen)} of its {len(unit.parameters)} parameters are frozen and are "
                    f"gathered with the trainable ones, {show_nbytes(nbytes)} each time; FSDP1 "
                    "rejects this without use_orig_params, FSDP2 accepts it silently"
                ),
                nbytes=nbytes,
            )


@rule(
    "frozen-gathered-in-backward",
    "warning",
    cure=(
        "reshard_after_forward=False if memory allows; set_unshard_in_backward(False) if nothing "
        "trainable comes before it"
    ),
)
def frozen_gathered_in_backward(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """Frozen units that backward gathers again."""
    for index, unit in _sharded_units(tree):
        is_frozen = not any(tree.parameters[p].trainable for p in unit.parameters)
        if is_frozen and unit.reshard_after_forward and unit.unshard_in_backward:
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=(
                    "all its parameters are frozen, yet they are gathered again in each backward"
                ),
                nbytes=unit.nbytes_gathered,
            )


@rule(
    "unit-too-small",
    "warning",
    cure="leave it to the enclosing unit, or group it: fully_shard([a, b])",
)
def unit_too_small(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Units far too small for a collective."""
    units = list(_sharded_units(tree))
    largest = max((unit.nbytes_gathered for _, unit in units), default=0)
    for index, unit in units:
        nbytes = unit.nbytes_gathered
        is_small = nbytes < thresholds.small_nbytes and nbytes * _SMALL_SHARE < largest
        if is_small and not unit.is_root:
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=(
                    f"it gathers {show_nbytes(nbytes)}, so its all-gather costs latency, not "
                    f"bandwidth; the largest unit gathers {show_nbytes(largest)}"
                ),
                nbytes=nbytes,
            )


@rule("unit-too-large", "warning", cure="call fully_shard on its blocks first")
def unit_too_large(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Units far too large for a collective."""
    for index, unit in _sharded_units(tree):
        nbytes = unit.nbytes_gathered
        if nbytes > thresholds.large_nbytes:
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=f"it gathers {show_nbytes(nbytes)} at once, and nothing overlaps with that",
                nbytes=nbytes,
            )


@rule(
    "padding",
    "warning",
    cure=(
        "shard another dimension (shard_placement_fn), over fewer ranks (HSDP), or choose sizes "
        "that divide"
    ),
)
def padding(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Units that gather much padding."""
    for index, unit in _sharded_units(tree):
        # FSDP1 pads whole units and aligns parameters: little, and nothing that a user shapes.
        is_much = unit.nbytes_padding > thresholds.padding_share * unit.nbytes_gathered
        if unit.kind == "fsdp2" and is_much and unit.nbytes_padding >= thresholds.padding_nbytes:
            share = unit.nbytes_padding / unit.nbytes_gathered
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=(
                    f"{share:.0%} of what it gathers is padding, since dimensions are not "
                    f"divisible by {unit.shard_axis.size if unit.shard_axis else 1} ranks"
                ),
                nbytes=unit.nbytes_padding,
            )


@rule(
    "dim-smaller-than-axis",
    "warning",
    cure="shard another dimension (shard_placement_fn) or over fewer ranks",
)
def dim_smaller_than_axis(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
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
        yield Case(
            fqns=tuple(fqn for fqn, _ in entries),
            reason=(
                f"the split dimension has fewer elements ({', '.join(sizes)}) than the axis {axis} "
                "has ranks: some ranks keep nothing, and what is gathered is mostly padding"
            ),
        )


@rule(
    "precision-override",
    "warning",
    cure="intended for batch norm; otherwise change _module_classes_to_ignore of the policy",
)
def precision_override(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """Units that mixed precision leaves out for their class."""
    for index, unit in enumerate(tree.units):
        if unit.precision_overrides:
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=(
                    f"mixed precision ignores the class {', '.join(unit.precision_overrides)}, so "
                    "auto-wrap made this a unit of its own in full precision"
                ),
                nbytes=unit.nbytes_gathered,
            )


@rule(
    "mixed-dtypes",
    "warning",
    cure="convert them to one dtype, or give each dtype a unit",
)
def mixed_dtypes(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """Units of several element types."""
    for index, unit in _sharded_units(tree):
        dtypes = dict.fromkeys(tree.parameters[p].dtype for p in unit.parameters)
        if len(dtypes) > 1:
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=(
                    f"its parameters have several dtypes ({', '.join(dtypes)}): FSDP rejects this "
                    "for trainable ones in the first forward, and gathers frozen ones as raw "
                    "bytes with extra copies"
                ),
            )


RULES: Final[tuple[Rule[Any], ...]] = tuple(
    declared for declared in list(globals().values()) if isinstance(declared, Rule)
)
"""Every rule, in the order of declaration."""

TREE_RULES: Final[tuple[Rule[ShardTree], ...]] = tuple(
    declared for declared in RULES if declared is not ranks_differ
)
"""Those that look at the tree of one rank."""
