"""What costs more than it needs: one declaration for each warning."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_fsdp_comm.text.counts import counted
from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.tree.findings.costs import (
    gain_nbytes,
    gathered_nbytes,
    gathers,
    is_negligible,
    is_too_small,
    is_trainable,
    itemsize,
    largest_gather,
    reduced_nbytes,
    reductions,
)
from pytest_fsdp_comm.tree.findings.rule import Case, rule
from pytest_fsdp_comm.tree.findings.structure import (
    Structure,
    sharded_units,
    unmanaged_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_fsdp_comm.tree.findings.thresholds import Thresholds
    from pytest_fsdp_comm.tree.model import ParameterNode, ShardTree, ShardUnit


@rule("partly-wrapped", "warning", cure="call fully_shard on each block of the stack")
def partly_wrapped(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Blocks that are no units, unlike others of their stack.

    Silent for blocks that would be units too small, for those whose modules are units, and where
    FSDP1 has frozen blocks apart from trainable ones.
    """
    structure, largest = Structure(tree), largest_gather(tree)
    kinds = {module: unit.kind for unit in tree.units for module in unit.modules}
    own = [0] * len(tree.modules)
    trains = [False] * len(tree.modules)
    for parameter in tree.parameters:
        own[parameter.module] += parameter.nbytes
        trains[parameter.module] |= parameter.trainable
    for index in reversed(range(len(own))):
        parent = tree.modules[index].parent
        if parent is not None:
            trains[parent] |= trains[index]
            own[parent] += 0 if index in kinds else own[index]
    for stack in structure.stacks:
        wrapped = [index for index in stack if index in kinds]
        # A block of FSDP2 is comparable with any other.
        comparable = {
            state
            for index in wrapped
            for state in ({trains[index]} if kinds[index] == "fsdp1" else {True, False})
        }
        left = [
            index
            for index in stack
            if index not in kinds
            and own[index]
            and trains[index] in comparable
            and not is_too_small(own[index], largest, thresholds)
        ]
        if left:
            yield Case(
                fqns=tuple(tree.module_fqn(index) for index in left),
                reason=(
                    f"{len(wrapped)} of {len(stack)} sibling {tree.modules[left[0]].class_name} "
                    "modules are units, but these are not: their parameters are gathered with an "
                    "enclosing unit, or not at all"
                ),
                nbytes=sum(own[index] for index in left),
            )


@rule(
    "large-replicated",
    "warning",
    cure="shard it too: by fully_shard, or in the tensor-parallel plan",
)
def large_replicated(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Large parameters that every rank keeps whole.

    Silent where nothing is sharded, for parameters of units that replicate, which someone chose,
    and for those of which ``unmanaged-parameter`` speaks.
    """
    if not tree.is_sharded:
        return
    unmanaged = set(unmanaged_parameters(tree))
    for index, parameter in enumerate(tree.parameters):
        is_large = parameter.nbytes >= thresholds.replicated_nbytes
        is_replicated = parameter.unit is None and not parameter.is_sharded
        if is_large and is_replicated and index not in unmanaged:
            yield Case(
                fqns=(tree.parameter_fqn(index),),
                reason="every rank keeps all of it, while other parameters are sharded",
                nbytes=parameter.nbytes,
            )


@rule("mixed-frozen", "warning", cure="give its frozen modules units of their own")
def mixed_frozen(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Frozen parameters in one unit with trainable ones, where units of their own would pay.

    Only FSDP1 loses by that: it reduces one flat gradient, zeros for frozen parameters included.
    FSDP2 reduces what has gradients, and gathers as many bytes in one unit as in two. Silent where
    the zeros are fewer bytes than the further collectives cost, and where one module holds both
    sorts, which no unit can part.
    """
    structure = Structure(tree)
    for index, unit in sharded_units(tree):
        frozen = [at for at in unit.parameters if not tree.parameters[at].trainable]
        if unit.kind == "fsdp1" and 0 < len(frozen) < len(unit.parameters):
            ways = [
                _parting_trainable(tree, structure, unit, frozen),
                _parting_frozen(tree, structure, unit, thresholds),
            ]
            way = max(ways, key=lambda way: way.gain(thresholds))
            if way.gain(thresholds) > 0:
                collectives = counted(way.collectives, "more collective")
                yield Case(
                    fqns=(tree.unit_name(index),),
                    reason=(
                        f"{len(frozen)} of its {len(unit.parameters)} parameters are frozen, yet "
                        "FSDP1 reduces one gradient of all of them, zeros included, and keeps "
                        f"memory for it; apart, a step has {collectives}"
                    ),
                    nbytes=way.saved_nbytes,
                    cure=f"give its {way.sort} module a unit of its own"
                    if way.count == 1
                    else f"give its {way.count} {way.sort} modules units of their own",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parting:
    """A way to part frozen from trainable parameters."""

    count: int
    """How many modules become units."""
    sort: str
    """``frozen`` or ``trainable``, as those are."""
    saved_nbytes: int
    """What a step no longer sends."""
    collectives: int
    """How many more a step has."""

    def gain(self, thresholds: Thresholds) -> int:
        """What is left of the bytes saved for what the further collectives cost."""
        return gain_nbytes(self.saved_nbytes, self.collectives, thresholds)


def _parting_trainable(
    tree: ShardTree, structure: Structure, unit: ShardUnit, frozen: Sequence[int]
) -> _Parting:
    """All trainable parameters in units of their own, if modules allow it."""
    modules = structure.separable(unit, trainable=True)
    is_complete = sum(map(len, modules.values())) == len(unit.parameters) - len(frozen)
    return _Parting(
        count=len(modules),
        sort="trainable",
        saved_nbytes=sum(reduced_nbytes(tree.parameters[at], unit) for at in frozen)
        if is_complete
        else 0,
        # Each gathers and reduces for itself, and what is left gathers only.
        collectives=len(modules) * (gathers(unit) + reductions(unit)) - reductions(unit),
    )


def _parting_frozen(
    tree: ShardTree, structure: Structure, unit: ShardUnit, thresholds: Thresholds
) -> _Parting:
    """The frozen modules that are large enough in units of their own."""
    worth = []
    for members in structure.separable(unit, trainable=False).values():
        parameters = [tree.parameters[at] for at in members]
        saved = sum(reduced_nbytes(parameter, unit) for parameter in parameters)
        gathered = sum(gathered_nbytes(parameter, unit) for parameter in parameters)
        if gain_nbytes(min(saved, gathered), gathers(unit), thresholds) > 0:
            worth.append(saved)
    return _Parting(
        count=len(worth),
        sort="frozen",
        saved_nbytes=sum(worth),
        collectives=len(worth) * gathers(unit),
    )


@rule(
    "frozen-gathered-in-backward",
    "warning",
    cure="call set_unshard_in_backward(False) on it, if nothing trainable runs before it either",
)
def frozen_gathered_in_backward(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """A frozen unit of FSDP2 that backward gathers, although no gradient passes it.

    Backward does not reach what runs before anything trainable; but of these units, the last one
    is prefetched for the one after it. Silent for frozen units that backward reaches: it needs
    their parameters, and keeping them gathered would take the same memory as of any other unit.
    """
    structure = Structure(tree)
    parts: defaultdict[int, list[tuple[int, ShardUnit]]] = defaultdict(list)
    for index, unit in structure.in_order_of_forward():
        parts[structure.parts[unit.modules[0]]].append((index, unit))
    for part, units in parts.items():
        first_trainable = min(
            (
                parameter.module
                for parameter in tree.parameters
                if parameter.trainable and structure.parts[parameter.module] == part
            ),
            default=len(tree.modules),
        )
        for (index, unit), after in pairwise(units):
            following = after[1]
            is_last_unreached = structure.end(unit) <= first_trainable < structure.end(following)
            is_prefetched = index in (following.backward_prefetch or (index,))
            if (
                unit.kind == following.kind == "fsdp2"
                and is_last_unreached
                and is_prefetched
                and gathers(unit) > 1
            ):
                yield Case(
                    fqns=(tree.unit_name(index),),
                    reason=(
                        "all its parameters are frozen, and nothing trainable is registered before "
                        "it, so backward needs none of them, yet FSDP2 prefetches them there"
                    ),
                    nbytes=unit.nbytes_gathered,
                )


@rule("unit-too-small", "warning", cure="leave it to the enclosing unit")
def unit_too_small(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Units far too small for a collective, which the enclosing unit could manage as well.

    Silent if that differs in mesh, precision, element types or offload, if it has no parameters to
    gather, if it is gathered more often, and if FSDP1 would reduce what is frozen.
    """
    structure, largest = Structure(tree), largest_gather(tree)
    for index, unit in sharded_units(tree):
        around = structure.enclosing_unit(unit)
        if (
            not unit.is_root
            and is_too_small(unit.nbytes_gathered, largest, thresholds)
            and around is not None
            and _can_join(tree, unit, around)
        ):
            trains, trains_around = is_trainable(tree, unit), is_trainable(tree, around)
            saved = gathers(unit) + (reductions(unit) if trains and trains_around else 0)
            # The first trainable unit that a frozen one takes in brings its reduction along.
            at_least = "at least " if trains and not trains_around else ""
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=(
                    "its all-gather costs latency, not bandwidth: without it a step has "
                    f"{at_least}{counted(saved, 'collective')} fewer and no more bytes; the "
                    f"largest unit gathers {show_nbytes(largest)}"
                ),
                nbytes=unit.nbytes_gathered,
            )


def _can_join(tree: ShardTree, unit: ShardUnit, around: ShardUnit) -> bool:
    """Whether a unit's parameters could as well be in the unit around it."""

    def policy(of: ShardUnit) -> tuple[object, ...]:
        return (of.kind, of.shard_axis, of.replicate_axis, of.precision, of.offload)

    dtypes, dtypes_around = (
        {tree.parameters[index].dtype for index in of.parameters} for of in (unit, around)
    )
    # FSDP1 reduces all of a unit of which anything is trainable.
    reduces_more = unit.kind == "fsdp1" and is_trainable(tree, unit) != is_trainable(tree, around)
    sends_more = reduces_more or gathers(around) > gathers(unit)
    return policy(unit) == policy(around) and dtypes <= dtypes_around and not sends_more


@rule("unit-too-large", "warning", cure="call fully_shard on its blocks first")
def unit_too_large(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Units far too large for a collective; silent if nearly all of one is in a single module."""
    for index, unit in sharded_units(tree):
        nbytes = unit.nbytes_gathered
        held: defaultdict[int, int] = defaultdict(int)
        for parameter in (tree.parameters[at] for at in unit.parameters):
            held[parameter.module] += parameter.numel
        rest = sum(held.values()) - max(held.values())
        if nbytes > thresholds.large_nbytes and not is_negligible(rest, sum(held.values())):
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
    """Units of FSDP2 that gather much padding; FSDP1's little padding is nothing a user shapes.

    Silent for the padding of which ``dim-smaller-than-axis`` speaks.
    """
    for index, unit in sharded_units(tree):
        of_short = sum(nbytes for *_, nbytes in _short_parameters(tree, index, thresholds))
        nbytes = unit.nbytes_padding - of_short
        is_much = nbytes > thresholds.padding_share * unit.nbytes_gathered
        if unit.kind == "fsdp2" and is_much and nbytes >= thresholds.padding_nbytes:
            share = nbytes / unit.nbytes_gathered
            yield Case(
                fqns=(tree.unit_name(index),),
                reason=(
                    f"{share:.0%} of what it gathers is padding, since dimensions are not "
                    f"divisible by {unit.shard_axis.size if unit.shard_axis else 1} ranks"
                ),
                nbytes=nbytes,
            )


@rule(
    "dim-smaller-than-axis",
    "warning",
    cure="shard another dimension (shard_placement_fn) or over fewer ranks",
)
def dim_smaller_than_axis(tree: ShardTree, thresholds: Thresholds) -> Iterator[Case]:
    """Parameters with fewer rows than there are ranks.

    Silent for those of FSDP2 that this pads by little, and for those of FSDP1, which are ranges of
    one flat parameter.
    """
    found: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for number, unit in sharded_units(tree):
        for index, rows, nbytes in _short_parameters(tree, number, thresholds):
            axis = unit.shard_axis
            found["" if axis is None else f"{axis.name}={axis.size}", rows][index] = nbytes
    for index, parameter in enumerate(tree.parameters):
        unit_axis = None if parameter.unit is None else tree.units[parameter.unit].shard_axis
        for placement in parameter.placements:
            is_fsdp = unit_axis is not None and placement.axis == unit_axis.name
            rows = 0 if placement.dim is None or is_fsdp else parameter.shape[placement.dim]
            if 0 < rows < placement.size:
                found[f"{placement.axis}={placement.size}", rows][index] = 0
    for (axis_name, rows), padded in found.items():
        nbytes = sum(padded.values())
        yield Case(
            fqns=tuple(map(tree.parameter_fqn, padded)),
            reason=(
                f"the split dimension has {counted(rows, 'element')}, fewer than the axis "
                f"{axis_name} has ranks: some ranks keep nothing"
                + (", and what is gathered is mostly padding" if nbytes else "")
            ),
            nbytes=nbytes or None,
        )


def _short_parameters(
    tree: ShardTree, number: int, thresholds: Thresholds
) -> Iterator[tuple[int, int, int]]:
    """Parameters of a unit with fewer rows than ranks; their rows, and bytes of their padding."""
    unit = tree.units[number]
    axis = unit.shard_axis
    for index in unit.parameters:
        parameter = tree.parameters[index]
        dim = _fsdp_dim(parameter, unit)
        if dim is None or axis is None or not parameter.numel:
            continue
        rows, width = parameter.shape[dim], parameter.numel // parameter.shape[dim]
        # FSDP splits what tensor parallelism has left.
        for placement in parameter.placements:
            if placement.axis != axis.name and placement.dim == dim:
                rows = -(-rows // placement.size)
            elif placement.axis != axis.name and placement.dim is not None:
                width //= placement.size
        dtype = unit.precision.param_dtype or parameter.dtype
        nbytes = (axis.size - rows) * width * itemsize(dtype)
        if rows < axis.size and nbytes >= thresholds.padding_nbytes:
            yield index, rows, nbytes


def _fsdp_dim(parameter: ParameterNode, unit: ShardUnit) -> int | None:
    """The dimension that FSDP2 splits."""
    axis = unit.shard_axis.name if unit.kind == "fsdp2" and unit.shard_axis else None
    return next((entry.dim for entry in parameter.placements if entry.axis == axis), None)


@rule(
    "precision-override",
    "warning",
    cure="leave the class out of _module_classes_to_ignore where it need not be in full precision",
)
def precision_override(tree: ShardTree, _: Thresholds) -> Iterator[Case]:
    """Units that mixed precision leaves out for their class.

    Silent for batch norms, which torch leaves out by default.
    """
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
