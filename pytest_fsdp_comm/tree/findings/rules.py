"""All rules about how a model is wrapped, and the functions that apply them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, cast, get_args

from pytest_fsdp_comm.text.fqn import escape
from pytest_fsdp_comm.text.rank_lists import group_ranks_by_text, name_ranks
from pytest_fsdp_comm.text.words import show_count, show_nbytes
from pytest_fsdp_comm.tree.finding import THRESHOLDS, Finding, FindingSettings, RuleLevel
from pytest_fsdp_comm.tree.findings.wrapping import (
    GATHERING,
    Case,
    Rule,
    Wrapping,
    count_gathers,
    count_reductions,
    gathered_itemsize,
    is_negligible,
    reduced_nbytes,
    rule,
)
from pytest_fsdp_comm.tree.model import ShardTree, ShardUnit

# Report units whose all-gather has a larger share of padding than this.
_PADDING_SHARE: Final = 0.1

# Errors: training computes wrong results, raises, or gains nothing from FSDP.


@rule("no-root-unit", "error", cure="call fully_shard on the model itself too, after its blocks")
def no_root_unit(wrapping: Wrapping) -> Iterator[Case]:
    """Find blocks of a stack that are units without a common root unit."""
    # Ignore parts of a model that run on their own, such as pipeline stages: parts passed as a
    # list, parts inside a module without a forward, and parts in which units manage all parameters.
    tree = wrapping.tree
    by_part: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for index, unit in enumerate(tree.units):
        if unit.kind in GATHERING and unit.is_root:
            by_part[unit.kind, wrapping.parts[unit.modules[0]]].append(index)
    for (kind, part), roots in sorted(by_part.items(), key=lambda entry: entry[1]):
        lost = _find_units_without_root(wrapping, part, roots)
        if lost:
            roots_kept = [i for i in lost if tree.units[i].reshard_after_forward is False]
            nbytes = sum(tree.units[i].nbytes_gathered for i in roots_kept)
            reason = (
                f"{len(lost)} units have no common root, so each is a root: none prefetches "
                f"another, and {show_nbytes(nbytes)} of parameters stay gathered on each rank "
                "from forward to backward"
            )
            wrap = "wrap the model itself in FullyShardedDataParallel too"
            cure = wrap if kind == "fsdp1" else ""
            yield Case(tuple(map(tree.unit_name, lost)), reason, nbytes, cure)


def _find_units_without_root(wrapping: Wrapping, part: int, roots: Sequence[int]) -> list[int]:
    """Return the roots in one part of a model that should be below a common root."""
    tree = wrapping.tree
    modules = {module for index in roots for module in tree.units[index].modules}
    blocks = {
        module
        for stack in wrapping.stacks
        if len(modules.intersection(stack)) > 1
        # Only a module with a forward can be their common root.
        and any(tree.modules[i].has_forward for i in tree.list_ancestry(stack[0]) if i != stack[0])
        for module in modules.intersection(stack)
    }
    enclosing = {above for unit in tree.units for above in wrapping.list_ancestors(unit)}
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
    cure="shard the whole model with a single API, preferably fully_shard, which is under active "
    "development",
)
def nested_kinds(wrapping: Wrapping) -> Iterator[Case]:
    """Find units inside a unit of another kind; siblings of different kinds are allowed."""
    tree = wrapping.tree
    kinds = {module: units[-1].kind for module, units in wrapping.units_of.items()}
    for index, unit in enumerate(tree.units):
        around = wrapping.list_ancestors(unit)
        outer = next((i for i in around if kinds.get(i, unit.kind) != unit.kind), None)
        if outer is not None:
            reason = (
                f"it has kind {unit.kind} and lies inside {escape(tree.module_fqn(outer))}, a unit "
                f"of kind {kinds[outer]}: neither accounts for the other's gathers and reductions"
            )
            yield Case((tree.unit_name(index),), reason)


@rule("wrapped-after-parent", "error", cure="wrap children before their parents")
def wrapped_after_parent(wrapping: Wrapping) -> Iterator[Case]:
    """Find units that have no parameters, because an enclosing unit was wrapped before them."""
    # Ignore units whose parameters are managed by units inside them.
    tree = wrapping.tree
    empty = {unit.modules[0]: i for i, unit in enumerate(tree.units) if not unit.parameters}
    late: defaultdict[int, dict[int, None]] = defaultdict(dict)
    for parameter in tree.parameters if empty else ():
        inside = next((i for i in tree.list_ancestry(parameter.module) if i in empty), None)
        manager = parameter.unit
        if inside is not None and manager is not None and tree.units[manager].modules[0] < inside:
            late[manager][empty[inside]] = None
    for manager, units in late.items():
        reason = (
            f"{escape(tree.unit_name(manager))} was wrapped first and manages their parameters: it "
            "gathers all of them at once, not block by block"
        )
        yield Case(tuple(map(tree.unit_name, units)), reason, tree.units[manager].nbytes_gathered)


@rule(
    "split-tie",
    "error",
    cure="pass both modules to one call, fully_shard([a, b]), or leave both to the root",
)
def split_tie(wrapping: Wrapping) -> Iterator[Case]:
    """Find tied parameters that two units sharded separately."""
    tree = wrapping.tree
    reason = (
        "they were one parameter, but sharding split it into two: both are gathered, and they "
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
    """Find trainable parameters outside all units."""
    # Ignore models without FSDP units, frozen parameters, and parameters that are DTensors.
    tree, loose = wrapping.tree, wrapping.unmanaged
    if loose:
        reason = (
            "no unit manages these trainable parameters: their gradients are never reduced, "
            "so the ranks drift apart, and every rank stores all of them"
        )
        nbytes = sum(tree.parameters[index].nbytes for index in loose)
        yield Case(tuple(map(tree.parameter_fqn, loose)), reason, nbytes)


@rule("ranks-differ", "error", cure="build and wrap the model identically on all ranks")
def ranks_differ(texts: Mapping[int, str]) -> Iterator[Case]:
    """Find trees that differ between ranks; `texts` are their snapshots, keyed by rank."""
    (ranks, text), *differing = group_ranks_by_text(texts)
    if differing:
        other_ranks, other_text = differing[0]
        lines = set(text.splitlines()) ^ set(other_text.splitlines())
        first = min(lines, key=lambda line: (line.startswith("total"), line))
        reason = (
            f"{name_ranks(ranks)} and {name_ranks(other_ranks)} shard the model differently, "
            f"first in: {first}; their collectives will not match"
        )
        yield Case(("",), reason)


# Warnings: memory, traffic or latency that could be avoided.


@rule("partly-wrapped", "warning", cure="call fully_shard on each block of the stack")
def partly_wrapped(wrapping: Wrapping) -> Iterator[Case]:
    """Find blocks that are not units although other blocks of the same stack are."""
    # Ignore blocks that are too small to be a unit, and blocks whose submodules are units.
    tree, units_of = wrapping.tree, wrapping.units_of
    nbytes = [0] * len(tree.modules)
    trains = [False] * len(tree.modules)
    for parameter in tree.parameters:
        nbytes[parameter.module] += parameter.nbytes
        trains[parameter.module] |= parameter.trainable
    for index in reversed(range(len(nbytes))):
        parent = tree.modules[index].parent
        if parent is not None:
            trains[parent] |= trains[index]
            nbytes[parent] += 0 if index in units_of else nbytes[index]
    for stack in wrapping.stacks:
        wrapped = [index for index in stack if index in units_of]
        # In FSDP1, report a frozen block only if a frozen block is wrapped, and a trainable block
        # only if a trainable one is. FSDP2 units can mix both at no cost, so a single wrapped block
        # means that all blocks should be wrapped.
        comparable = {
            state
            for index in wrapped
            for state in ({trains[index]} if units_of[index][-1].kind == "fsdp1" else (True, False))
        }
        unwrapped = [
            index
            for index in stack
            if index not in units_of
            and nbytes[index]
            and trains[index] in comparable
            and not wrapping.is_too_small(nbytes[index])
        ]
        if unwrapped:
            reason = (
                f"{len(wrapped)} of {len(stack)} sibling {tree.modules[unwrapped[0]].class_name} "
                "modules are units, but these are not: their parameters are gathered with an "
                "enclosing unit, or not at all"
            )
            yield Case(
                tuple(map(tree.module_fqn, unwrapped)), reason, sum(nbytes[i] for i in unwrapped)
            )


@rule(
    "large-replicated",
    "warning",
    cure="shard it too, with fully_shard or in the tensor-parallel plan",
)
def large_replicated(wrapping: Wrapping) -> Iterator[Case]:
    """Find large parameters that are replicated on all ranks."""
    # Ignore models without shards, units that replicate (a deliberate choice), and parameters that
    # `unmanaged-parameter` reports.
    tree, unmanaged = wrapping.tree, set(wrapping.unmanaged)
    for index, parameter in enumerate(tree.parameters if tree.is_sharded else ()):
        is_large = parameter.nbytes >= wrapping.settings.replicated_nbytes
        is_replicated = parameter.unit is None and not parameter.is_sharded
        if is_large and is_replicated and index not in unmanaged:
            reason = "every rank stores all of it, although other parameters are sharded"
            yield Case((tree.parameter_fqn(index),), reason, parameter.nbytes)


@rule("mixed-frozen", "warning", cure="wrap its large frozen modules as separate units")
def mixed_frozen(wrapping: Wrapping) -> Iterator[Case]:
    """Find units that mix frozen and trainable parameters, if separate units would pay off."""
    # Mixing has a cost only in FSDP1, which reduces one flat gradient with zeros for frozen
    # parameters. FSDP2 reduces only existing gradients, and gathers the same bytes in one unit or
    # two. Ignore cases where the additional collectives cost more than the zeros, and modules with
    # both kinds of parameters, because no unit can separate these.
    for index, unit in wrapping.sharded_units():
        frozen = sum(not parameter.trainable for parameter in wrapping.parameters(unit))
        if unit.kind != "fsdp1" or not 0 < frozen < len(unit.parameters):
            continue
        worth = []
        for parameters in wrapping.group_frozen_parameters(unit):
            saved = sum(reduced_nbytes(entry, unit) for entry in parameters)
            gathered = sum(entry.numel * gathered_itemsize(entry, unit) for entry in parameters)
            if min(saved, gathered) > count_gathers(unit) * wrapping.settings.small_nbytes:
                worth.append(saved)
        if worth:
            reason = (
                f"{frozen} of its {len(unit.parameters)} parameters are frozen, but FSDP1 reduces "
                "one flat gradient with zeros for them, and allocates memory for it; separate "
                f"units add {show_count(len(worth) * count_gathers(unit), 'collective')} to a step"
            )
            yield Case((wrapping.tree.unit_name(index),), reason, sum(worth))


@rule("unit-too-small", "warning", cure="leave it to the enclosing unit")
def unit_too_small(wrapping: Wrapping) -> Iterator[Case]:
    """Find units too small for separate collectives, if the enclosing unit could include them."""
    # A unit can be merged into the enclosing unit only if both have the same mesh, precision,
    # offload and divide factor, and if merging does not add a dtype, gather parameters more often,
    # or make FSDP1 reduce gradients of frozen parameters.
    for index, unit in wrapping.sharded_units():
        if unit.is_root or not wrapping.is_too_small(unit.nbytes_gathered):
            continue
        units_of = wrapping.units_of
        # A module may have several units, one for each mesh.
        enclosing = next((units_of[i] for i in wrapping.list_ancestors(unit) if i in units_of), ())
        around = enclosing[0] if len(enclosing) == 1 else None
        if around is not None and _can_merge_into_enclosing(wrapping, unit, around):
            trains, trains_around = wrapping.is_trainable(unit), wrapping.is_trainable(around)
            saved = count_gathers(unit)
            saved += count_reductions(unit) if trains and trains_around else 0
            # If trainable units are merged into a frozen unit, the merged unit must reduce
            # gradients, so one reduction remains for all of them.
            at_least = "at least " if trains and not trains_around else ""
            reason = (
                "its all-gather costs latency, not bandwidth: without this unit, a step has "
                f"{at_least}{show_count(saved, 'fewer collective')} and no more bytes; the largest "
                f"unit gathers {show_nbytes(wrapping.largest_gather)}"
            )
            yield Case((wrapping.tree.unit_name(index),), reason, unit.nbytes_gathered)


def _can_merge_into_enclosing(wrapping: Wrapping, unit: ShardUnit, around: ShardUnit) -> bool:
    dtypes, dtypes_around = (
        {parameter.dtype for parameter in wrapping.parameters(side)} for side in (unit, around)
    )
    is_same_policy = all(
        getattr(unit, name) == getattr(around, name)
        for name in (
            *("kind", "shard_axis", "replicate_axis", "precision", "offload"),
            "gradient_divide_factor",
        )
    )
    # FSDP1 reduces the whole unit if any of its parameters is trainable.
    trains = {wrapping.is_trainable(unit), wrapping.is_trainable(around)}
    reduces_more = unit.kind == "fsdp1" and len(trains) > 1
    sends_more = reduces_more or count_gathers(around) > count_gathers(unit)
    return is_same_policy and dtypes <= dtypes_around and not sends_more


@rule("unit-too-large", "warning", cure="call fully_shard on its blocks first")
def unit_too_large(wrapping: Wrapping) -> Iterator[Case]:
    """Find units too large for one collective, unless most of the bytes are in a single module."""
    for index, unit in wrapping.sharded_units():
        numels: defaultdict[int, int] = defaultdict(int)
        for parameter in wrapping.parameters(unit):
            numels[parameter.module] += parameter.numel
        numel, nbytes = sum(numels.values()), unit.nbytes_gathered
        is_divisible = not is_negligible(numel - max(numels.values()), numel)
        if nbytes > wrapping.settings.large_nbytes and is_divisible:
            reason = f"it gathers {show_nbytes(nbytes)} at once, and nothing can overlap with it"
            yield Case((wrapping.tree.unit_name(index),), reason, nbytes)


@rule(
    "padding",
    "warning",
    cure=(
        "shard another dimension (shard_placement_fn), shard over fewer ranks (HSDP), or choose "
        "divisible sizes"
    ),
)
def padding(wrapping: Wrapping) -> Iterator[Case]:
    """Find FSDP2 units with much padding; FSDP1's padding is small, and users cannot change it."""
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
    "oversized-storage",
    "warning",
    cure="copy the shard before you build the DTensor: DTensor.from_local(shard.clone(), ...)",
)
def oversized_storage(wrapping: Wrapping) -> Iterator[Case]:
    """Find shards that are views of a larger tensor, such as the whole parameter."""
    # Ignore storages that parameters fill together, and FSDP1, whose flat shard is one storage.
    tree = wrapping.tree
    for index, parameter in enumerate(tree.parameters):
        nbytes = parameter.local_numel * parameter.itemsize
        unfilled = parameter.nbytes_unfilled
        is_view = any(entry.is_sharded and entry.dim is not None for entry in parameter.placements)
        is_much = unfilled >= wrapping.settings.padding_nbytes and 2 * unfilled >= nbytes
        if is_view and is_much:
            reason = (
                f"its shard has {show_nbytes(nbytes)}, but is a view of a storage with "
                f"{show_nbytes(unfilled)} that no parameter uses; this rank cannot free them"
            )
            yield Case((tree.parameter_fqn(index),), reason, unfilled)


@rule(
    "precision-override",
    "warning",
    cure="remove the class from _module_classes_to_ignore unless it needs full precision",
)
def precision_override(wrapping: Wrapping) -> Iterator[Case]:
    """Find units, except batch norms, whose class is excluded from mixed precision."""
    for index, unit in enumerate(wrapping.tree.units):
        if unit.precision_overrides:
            reason = (
                f"mixed precision ignores the class {', '.join(unit.precision_overrides)}, so "
                "auto-wrap made it a separate unit in full precision"
            )
            yield Case((wrapping.tree.unit_name(index),), reason, unit.nbytes_gathered)


RULES: Final = tuple(entry for entry in [*globals().values()] if isinstance(entry, Rule))


def find(tree: ShardTree, settings: FindingSettings) -> tuple[Finding, ...]:
    """Find the wrapping mistakes in one rank's tree, errors first."""
    wrapping = Wrapping(tree, settings)
    findings = [
        finding
        for declared in RULES
        if declared is not ranks_differ
        for finding in _apply_rule(declared, wrapping, settings)
    ]
    return tuple(sorted(findings, key=lambda finding: finding.level != "error"))


def find_between_ranks(texts: Mapping[int, str], settings: FindingSettings) -> tuple[Finding, ...]:
    """Find trees that differ between ranks; `texts` come from `tree_text.format_profile`."""
    return _apply_rule(ranks_differ, texts, settings)


def _apply_rule(declared: Rule, subject: object, settings: FindingSettings) -> tuple[Finding, ...]:
    level = settings.levels.get(declared.code, declared.level)
    return () if level == "off" else tuple(declared.findings(subject, level))


def parse_settings(lines: Iterable[str]) -> FindingSettings:
    """Read the ini option ``fsdp_comm_findings``; raise ValueError for an invalid line."""
    # A line sets a threshold, or the level of one code or of `all` codes; later lines win.
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
                "or '<threshold> = <bytes>', such as small_nbytes = 4096. Codes: all, "
                f"{', '.join(codes)}. Thresholds: {', '.join(THRESHOLDS)}"
            )
    return FindingSettings(levels=levels, **thresholds)
