"""All rules about the wrapping of a model, and what they find under the settings of a project."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, cast, get_args

from pytest_fsdp_comm.text.fqn import escape
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks
from pytest_fsdp_comm.text.words import counted, show_nbytes
from pytest_fsdp_comm.tree.finding import THRESHOLDS, Finding, FindingSettings, RuleLevel
from pytest_fsdp_comm.tree.findings.wrapping import (
    GATHERING,
    Case,
    Rule,
    Wrapping,
    gathered_itemsize,
    gathers,
    is_negligible,
    reduced_nbytes,
    reductions,
    rule,
)
from pytest_fsdp_comm.tree.model import ShardTree, ShardUnit

# Padding of more than this share of a unit's all-gather is a finding.
_PADDING_SHARE: Final = 0.1

# What makes training wrong, raises, or defeats FSDP.


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


# What costs more than it needs.


@rule("partly-wrapped", "warning", cure="call fully_shard on each block of the stack")
def partly_wrapped(wrapping: Wrapping) -> Iterator[Case]:
    """Blocks that are no units, unlike others of their stack."""
    # Silent for blocks that would be units too small, for those whose modules are units, and where
    # FSDP1 has frozen blocks apart from trainable ones.
    tree, units_of = wrapping.tree, wrapping.units_of
    own = [0] * len(tree.modules)
    trains = [False] * len(tree.modules)
    for parameter in tree.parameters:
        own[parameter.module] += parameter.nbytes
        trains[parameter.module] |= parameter.trainable
    for index in reversed(range(len(own))):
        parent = tree.modules[index].parent
        if parent is not None:
            trains[parent] |= trains[index]
            own[parent] += 0 if index in units_of else own[index]
    for stack in wrapping.stacks:
        wrapped = [index for index in stack if index in units_of]
        # A block of FSDP2 is comparable with any other.
        comparable = {
            state
            for index in wrapped
            for state in ({trains[index]} if units_of[index][-1].kind == "fsdp1" else (True, False))
        }
        left = [
            index
            for index in stack
            if index not in units_of
            and own[index]
            and trains[index] in comparable
            and not wrapping.is_too_small(own[index])
        ]
        if left:
            reason = (
                f"{len(wrapped)} of {len(stack)} sibling {tree.modules[left[0]].class_name} "
                "modules are units, but these are not: their parameters are gathered with an "
                "enclosing unit, or not at all"
            )
            yield Case(tuple(map(tree.module_fqn, left)), reason, sum(own[at] for at in left))


@rule(
    "large-replicated",
    "warning",
    cure="shard it too: by fully_shard, or in the tensor-parallel plan",
)
def large_replicated(wrapping: Wrapping) -> Iterator[Case]:
    """Large parameters that every rank keeps whole."""
    # Silent where nothing is sharded, for parameters of units that replicate, which someone chose,
    # and for those that `unmanaged-parameter` names.
    tree, unmanaged = wrapping.tree, set(wrapping.unmanaged)
    for index, parameter in enumerate(tree.parameters if tree.is_sharded else ()):
        is_large = parameter.nbytes >= wrapping.settings.replicated_nbytes
        is_replicated = parameter.unit is None and not parameter.is_sharded
        if is_large and is_replicated and index not in unmanaged:
            reason = "every rank keeps all of it, while other parameters are sharded"
            yield Case((tree.parameter_fqn(index),), reason, parameter.nbytes)


@rule("mixed-frozen", "warning", cure="give its large frozen modules units of their own")
def mixed_frozen(wrapping: Wrapping) -> Iterator[Case]:
    """Frozen parameters in one unit with trainable ones, where units of their own would pay."""
    # Only FSDP1 loses by that: it reduces one flat gradient, zeros for frozen parameters included.
    # FSDP2 reduces what has gradients, and gathers as many bytes in one unit as in two. Silent
    # where the zeros are fewer bytes than the further collectives cost, and where one module holds
    # both sorts, which no unit can part.
    for index, unit in wrapping.sharded_units():
        frozen = sum(not parameter.trainable for parameter in wrapping.parameters(unit))
        if unit.kind != "fsdp1" or not 0 < frozen < len(unit.parameters):
            continue
        worth = []
        for parameters in wrapping.frozen_modules(unit):
            saved = sum(reduced_nbytes(entry, unit) for entry in parameters)
            gathered = sum(entry.numel * gathered_itemsize(entry, unit) for entry in parameters)
            if min(saved, gathered) > gathers(unit) * wrapping.settings.small_nbytes:
                worth.append(saved)
        if worth:
            reason = (
                f"{frozen} of its {len(unit.parameters)} parameters are frozen, yet FSDP1 reduces "
                "one gradient of all of them, zeros included, and keeps memory for it; apart, a "
                f"step has {counted(len(worth) * gathers(unit), 'more collective')}"
            )
            yield Case((wrapping.tree.unit_name(index),), reason, sum(worth))


@rule("unit-too-small", "warning", cure="leave it to the enclosing unit")
def unit_too_small(wrapping: Wrapping) -> Iterator[Case]:
    """Units far too small for a collective, which the enclosing unit could manage as well."""
    # Silent if that differs in mesh, precision, element types, offload or divide factor, if it has
    # no parameters to gather, if it is gathered more often, and if FSDP1 would reduce what is
    # frozen.
    for index, unit in wrapping.sharded_units():
        if unit.is_root or not wrapping.is_too_small(unit.nbytes_gathered):
            continue
        units_of = wrapping.units_of
        # What is around it may have several units, one a mesh.
        enclosing = next((units_of[at] for at in wrapping.above(unit) if at in units_of), ())
        around = enclosing[0] if len(enclosing) == 1 else None
        if around is not None and _can_join(wrapping, unit, around):
            trains, trains_around = wrapping.is_trainable(unit), wrapping.is_trainable(around)
            saved = gathers(unit) + (reductions(unit) if trains and trains_around else 0)
            # The first trainable unit that a frozen one takes in brings its reduction along.
            at_least = "at least " if trains and not trains_around else ""
            reason = (
                "its all-gather costs latency, not bandwidth: without it a step has "
                f"{at_least}{counted(saved, 'collective')} fewer and no more bytes; the largest "
                f"unit gathers {show_nbytes(wrapping.largest_gather)}"
            )
            yield Case((wrapping.tree.unit_name(index),), reason, unit.nbytes_gathered)


def _can_join(wrapping: Wrapping, unit: ShardUnit, around: ShardUnit) -> bool:
    dtypes, dtypes_around = (
        {parameter.dtype for parameter in wrapping.parameters(of)} for of in (unit, around)
    )
    is_same_policy = all(
        getattr(unit, name) == getattr(around, name)
        for name in (
            *("kind", "shard_axis", "replicate_axis", "precision", "offload"),
            "gradient_divide_factor",
        )
    )
    # FSDP1 reduces all of a unit where anything is trainable.
    sorts = {wrapping.is_trainable(unit), wrapping.is_trainable(around)}
    reduces_more = unit.kind == "fsdp1" and len(sorts) > 1
    sends_more = reduces_more or gathers(around) > gathers(unit)
    return is_same_policy and dtypes <= dtypes_around and not sends_more


@rule("unit-too-large", "warning", cure="call fully_shard on its blocks first")
def unit_too_large(wrapping: Wrapping) -> Iterator[Case]:
    """Units far too large for a collective; silent if nearly all of one is in a single module."""
    for index, unit in wrapping.sharded_units():
        held: defaultdict[int, int] = defaultdict(int)
        for parameter in wrapping.parameters(unit):
            held[parameter.module] += parameter.numel
        numel, nbytes = sum(held.values()), unit.nbytes_gathered
        is_divisible = not is_negligible(numel - max(held.values()), numel)
        if nbytes > wrapping.settings.large_nbytes and is_divisible:
            reason = f"it gathers {show_nbytes(nbytes)} at once, and nothing overlaps with that"
            yield Case((wrapping.tree.unit_name(index),), reason, nbytes)


@rule(
    "padding",
    "warning",
    cure=(
        "shard another dimension (shard_placement_fn), over fewer ranks (HSDP), or choose sizes "
        "that divide"
    ),
)
def padding(wrapping: Wrapping) -> Iterator[Case]:
    """Units of FSDP2 that gather much padding; FSDP1's little padding is nothing a user shapes."""
    for index, unit in wrapping.sharded_units():
        nbytes = unit.nbytes_padding
        is_much = nbytes > _PADDING_SHARE * unit.nbytes_gathered
        if unit.kind == "fsdp2" and is_much and nbytes >= wrapping.settings.padding_nbytes:
            reason = (
                f"{nbytes / unit.nbytes_gathered:.0%} of what it gathers is padding, since "
                "dimensions are not divisible by "
                f"{unit.shard_axis.size if unit.shard_axis else 1} ranks"
            )
            yield Case((wrapping.tree.unit_name(index),), reason, nbytes)


@rule(
    "precision-override",
    "warning",
    cure="leave the class out of _module_classes_to_ignore where it need not be in full precision",
)
def precision_override(wrapping: Wrapping) -> Iterator[Case]:
    """Units that mixed precision leaves out for their class."""
    # Silent for batch norms, which torch leaves out by default.
    for index, unit in enumerate(wrapping.tree.units):
        if unit.precision_overrides:
            reason = (
                f"mixed precision ignores the class {', '.join(unit.precision_overrides)}, so "
                "auto-wrap made this a unit of its own in full precision"
            )
            yield Case((wrapping.tree.unit_name(index),), reason, unit.nbytes_gathered)


# In order of declaration.
RULES: Final = tuple(entry for entry in [*globals().values()] if isinstance(entry, Rule))


def find(tree: ShardTree, settings: FindingSettings) -> tuple[Finding, ...]:
    """Find the wrapping mistakes of one rank's tree, errors first."""
    wrapping = Wrapping(tree, settings)
    found = [
        finding
        for declared in RULES
        if declared is not ranks_differ
        for finding in _apply(declared, wrapping, settings)
    ]
    return tuple(sorted(found, key=lambda finding: finding.level != "error"))


def find_between_ranks(texts: Mapping[int, str], settings: FindingSettings) -> tuple[Finding, ...]:
    """Compare trees of ranks that should be alike, as `tree_text.format_profile` writes them."""
    return _apply(ranks_differ, texts, settings)


def _apply(declared: Rule, subject: object, settings: FindingSettings) -> tuple[Finding, ...]:
    level = settings.levels.get(declared.code, declared.level)
    return () if level == "off" else tuple(declared.findings(subject, level))


def parse_settings(lines: Iterable[str]) -> FindingSettings:
    """Read the lines of ini ``fsdp_comm_findings``; ValueError says what is allowed."""
    # A line sets the level of a code, or of `all`, or a threshold; later lines win.
    codes = [declared.code for declared in RULES]
    levels: dict[str, RuleLevel] = {}
    thresholds: dict[str, int] = {}
    for line in filter(None, map(str.strip, lines)):
        name, equals, value = (word.strip() for word in line.partition("="))
        if equals and name in THRESHOLDS:
            if not value.isdecimal():
                raise ValueError(
                    f"fsdp_comm_findings: {name}: expected a whole number of bytes, got {value!r}"
                )
            thresholds[name] = int(value)
        elif equals and name in (*codes, "all"):
            if value not in get_args(RuleLevel):
                raise ValueError(
                    f"fsdp_comm_findings: {name}: expected one of {', '.join(get_args(RuleLevel))},"
                    f" got {value!r}"
                )
            chosen = codes if name == "all" else [name]
            levels.update(dict.fromkeys(chosen, cast("RuleLevel", value)))
        else:
            raise ValueError(
                f"fsdp_comm_findings: cannot read {line!r}; expected '<code> = error|warning|off' "
                f"with a code of {', '.join(codes)}, or all; or a threshold of "
                f"{', '.join(THRESHOLDS)}, such as small_nbytes = 4096"
            )
    return FindingSettings(levels=levels, **thresholds)
