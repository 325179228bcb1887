"""What makes training wrong, raises, or defeats FSDP: one declaration for each error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pytest_fsdp_comm.text.fqn import escape
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks
from pytest_fsdp_comm.text.words import show_nbytes
from pytest_fsdp_comm.tree.findings.wrapping import GATHERING, Case, Wrapping, rule


@rule("no-root-unit", "error", cure="call fully_shard on the model itself too, after its blocks")
def no_root_unit(wrapping: Wrapping) -> Iterator[Case]:
    """Blocks of a stack that are units, without a common one around them."""
    # Silent for parts of a model that run by themselves, such as stages of a pipeline: those passed
    # as a list, those in a module that cannot run, and those that have units inside and nothing
    # beside them.
    tree = wrapping.tree
    by_part: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for index, unit in enumerate(tree.units):
        if unit.kind in GATHERING and unit.is_root:
            by_part[unit.kind, wrapping.parts[unit.modules[0]]].append(index)
    for (kind, part), roots in sorted(by_part.items(), key=lambda entry: entry[1]):
        lost = _without_root(wrapping, part, roots)
        if lost:
            kept = [tree.units[i] for i in lost if tree.units[i].reshard_after_forward is False]
            nbytes = sum(unit.nbytes_gathered for unit in kept)
            reason = (
                f"{len(lost)} units have no common root, so each becomes one: it gathers for "
                f"itself without prefetching, and {show_nbytes(nbytes)} of parameters stay "
                "gathered on each rank from forward to backward"
            )
            wrap = "wrap the model itself in FullyShardedDataParallel too"
            cure = wrap if kind == "fsdp1" else ""
            yield Case(tuple(map(tree.unit_name, lost)), reason, nbytes, cure)


def _without_root(wrapping: Wrapping, part: int, roots: Sequence[int]) -> list[int]:
    """The roots in one part of a model that should have a root around them."""
    tree = wrapping.tree
    modules = {module for index in roots for module in tree.units[index].modules}
    blocks = {
        module
        for stack in wrapping.stacks
        if len(modules.intersection(stack)) > 1
        # Something around them has to run, or nothing could be their root.
        and any(tree.modules[at].has_forward for at in tree.around(stack[0]) if at != stack[0])
        for module in modules.intersection(stack)
    }
    enclosing = {above for unit in tree.units for above in wrapping.above(unit)}
    lost = [
        index
        for index in roots
        if blocks.intersection(tree.units[index].modules)
        or enclosing.isdisjoint(tree.units[index].modules)
    ]
    are_blocks = all(blocks.issuperset(tree.units[index].modules) for index in lost)
    holds_more = any(
        parameter.unit is None and wrapping.parts[parameter.module] == part
        for parameter in tree.parameters
    )
    runs_by_parts = are_blocks and blocks <= enclosing and not holds_more
    return lost if blocks and len(lost) > 1 and not runs_by_parts else []


@rule("grouped-root", "error", cure="call fully_shard on the model itself too, after its parts")
def grouped_root(wrapping: Wrapping) -> Iterator[Case]:
    """A unit of several modules that has no root around it; silent for one that has."""
    for index, unit in enumerate(wrapping.tree.units):
        if unit.kind == "fsdp2" and unit.is_root and len(unit.modules) > 1:
            reason = (
                f"{len(unit.modules)} modules share this unit, nothing encloses them, and a "
                "root must be a single module: the first forward raises a RuntimeError"
            )
            yield Case((wrapping.tree.unit_name(index),), reason)


@rule(
    "nested-kinds",
    "error",
    cure="shard the whole model with one of them; fully_shard is the one under active development",
)
def nested_kinds(wrapping: Wrapping) -> Iterator[Case]:
    """A unit inside one of another kind; silent for kinds side by side."""
    tree = wrapping.tree
    kinds = {module: units[-1].kind for module, units in wrapping.units_of.items()}
    for index, unit in enumerate(tree.units):
        around = wrapping.above(unit)
        other = next((at for at in around if kinds.get(at, unit.kind) != unit.kind), None)
        if other is not None:
            reason = (
                f"its kind is {unit.kind}, but it lies inside {escape(tree.module_fqn(other))}, "
                f"whose kind is {kinds[other]}: neither accounts for the other's gathers and "
                "reductions"
            )
            yield Case((tree.unit_name(index),), reason)


@rule("wrapped-after-parent", "error", cure="wrap children before their parents")
def wrapped_after_parent(wrapping: Wrapping) -> Iterator[Case]:
    """Units whose parameters their parent had taken already."""
    # Silent for a unit that has none because its children are units.
    tree = wrapping.tree
    empty = {unit.modules[0]: i for i, unit in enumerate(tree.units) if not unit.parameters}
    late: defaultdict[int, dict[int, None]] = defaultdict(dict)
    for parameter in tree.parameters if empty else ():
        inside = next((at for at in tree.around(parameter.module) if at in empty), None)
        manager = parameter.unit
        if inside is not None and manager is not None and tree.units[manager].modules[0] < inside:
            late[manager][empty[inside]] = None
    for manager, units in late.items():
        reason = (
            f"{escape(tree.unit_name(manager))}, which was wrapped first, already manages their "
            "parameters and gathers all of them at once, so nothing is gathered block by block"
        )
        yield Case(tuple(map(tree.unit_name, units)), reason, tree.units[manager].nbytes_gathered)


@rule(
    "split-tie",
    "error",
    cure="pass both modules to one call, fully_shard([a, b]), or leave both to the root",
)
def split_tie(wrapping: Wrapping) -> Iterator[Case]:
    """Tied parameters that sharding tore apart; silent for those that one unit manages."""
    tree = wrapping.tree
    reason = (
        "they were one parameter, and sharding made two of it: both are gathered, and they "
        "diverge at the first optimizer step"
    )
    for index, parameter in enumerate(tree.parameters):
        if parameter.split_from is not None:
            fqns = (tree.parameter_fqn(parameter.split_from), tree.parameter_fqn(index))
            yield Case(fqns, reason, parameter.nbytes)


@rule(
    "unmanaged-parameter",
    "error",
    cure=(
        "call fully_shard on a module around them; if they are ignored on purpose, reduce their "
        "gradients yourself or freeze them"
    ),
)
def unmanaged_parameter(wrapping: Wrapping) -> Iterator[Case]:
    """Trainable parameters outside every unit."""
    # Silent where nothing is gathered, and for frozen parameters and those that a mesh holds.
    tree, loose = wrapping.tree, wrapping.unmanaged
    if loose:
        reason = (
            "no unit manages these trainable parameters: their gradients are never reduced, "
            "so the ranks drift apart, and every rank keeps them whole"
        )
        nbytes = sum(tree.parameters[index].nbytes for index in loose)
        yield Case(tuple(map(tree.parameter_fqn, loose)), reason, nbytes)


@rule(
    "mixed-dtypes",
    "error",
    cure="convert them to one dtype, or give the modules of each dtype units of their own",
)
def mixed_dtypes(wrapping: Wrapping) -> Iterator[Case]:
    """Trainable parameters of several element types in one unit."""
    # Silent for frozen ones of another type, such as quantized weights beside adapters.
    for index, unit in wrapping.sharded_units():
        trainable = (entry for entry in wrapping.parameters(unit) if entry.trainable)
        dtypes = dict.fromkeys(entry.dtype for entry in trainable)
        if unit.kind == "fsdp2" and len(dtypes) > 1:
            reason = (
                f"its trainable parameters have several dtypes ({', '.join(dtypes)}), which "
                "FSDP2 rejects: the first forward raises an AssertionError"
            )
            yield Case((wrapping.tree.unit_name(index),), reason)


@rule("ranks-differ", "error", cure="build and wrap the model alike on all ranks")
def ranks_differ(texts: Mapping[int, str]) -> Iterator[Case]:
    """Trees that are not the same on all ranks, as their snapshots would be written."""
    (ranks, text), *others = fold_equal(texts)
    if others:
        other_ranks, other_text = others[0]
        lines = set(text.splitlines()) ^ set(other_text.splitlines())
        shown = min(lines, key=lambda line: (line.startswith("total"), line))
        reason = (
            f"{name_ranks(ranks)} and {name_ranks(other_ranks)} shard the model differently, "
            f"first in: {shown}; their collectives will not match"
        )
        yield Case(("",), reason)
