"""Explain how two snapshots differ, for failed tests, the command line and reviews."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Literal

from pytest_fsdp_comm.comm import diff as comm_diff
from pytest_fsdp_comm.comm.explanation.evidence import Evidence, count_carried_elements
from pytest_fsdp_comm.comm.profile import CommProfile
from pytest_fsdp_comm.reports.changes import render_comparison, render_tree_changes
from pytest_fsdp_comm.reports.explanation import Failure, Statement
from pytest_fsdp_comm.snapshots.documents import Profile, divergence_of
from pytest_fsdp_comm.tree import diff as tree_diff
from pytest_fsdp_comm.tree.profile import (
    ParameterFacts,
    TreeFacts,
    TreeProfile,
    lost_root,
    new_roots,
    policy_change,
)


def explain_profiles(
    sides: tuple[Profile, Profile], *, where: str, evidence: Evidence | None = None
) -> Failure:
    """Explain how a reviewed and a recorded profile differ."""
    failure = make_failure_head(sides, where=where)
    match sides:
        case CommProfile() as old, CommProfile() as new:
            comparison = comm_diff.compare(old, new, evidence)
            reviewed = {answer.note for answer in new.answers if answer in old.answers}
            notes = [note for note in new.notes if note not in reviewed]
            statements = render_comparison(comparison, notes=notes).statements
        case TreeProfile() as old, TreeProfile() as new:
            carried_elements = 0 if evidence is None else evidence.carried_elements
            changes = tree_diff.compare(old, new, carried_elements=carried_elements)
            statements = render_tree_changes(changes).statements
        case old, new:
            text = f"the snapshot's kind is {kind_of(old)!r}, but {kind_of(new)!r} was recorded"
            statements = (Statement(severity="change", text=text),)
    return replace(failure, statements=(*failure.statements, *statements))


def make_failure_head(sides: tuple[Profile, Profile], *, where: str) -> Failure:
    """Return the first line of `explain_profiles`, which is the same on all ranks, and a fix."""
    old, new = sides
    compared = "comm_mode" if isinstance(new, CommProfile) else "fsdp_tree"
    scopes: list[str] = []
    fixes: list[str] = []
    if isinstance(old, CommProfile) and isinstance(new, CommProfile):
        scopes, fixes = _explain_uncompared_sizes(old, new)
    versions = [profile.torch_version.partition("+")[0] for profile in sides]
    if kind_of(old) == kind_of(new) and all(versions) and versions[0] != versions[1]:
        scopes.append(f"recorded with torch {versions[0]}, this is {versions[1]}")
    statements = [Statement(severity="fix", text=fix) for fix in fixes]
    head = f"{compared} differs from {where}"
    if diverged := divergence_of(new):
        head = f"{compared} compared with {where}: its ranks diverge"
        statements.append(Statement(severity="ranks diverge", text=diverged))
    return Failure(
        head=", ".join((head, *scopes)),
        compared=compared,
        snapshot=where,
        scope=", ".join(scopes),
        statements=tuple(statements),
    )


def kind_of(profile: Profile) -> Literal["comm", "tree"]:
    """Return the kind of a snapshot, as named in its first line."""
    return "comm" if isinstance(profile, CommProfile) else "tree"


def evidence_of(pairs: Collection[tuple[Profile, Profile]]) -> Evidence | None:
    """Return evidence from the first pair of trees and all recordings; None without trees."""
    carried_elements = sum(
        count_carried_elements(old, new).total()
        for old, new in pairs
        if isinstance(old, CommProfile) and isinstance(new, CommProfile)
    )
    for old, new in pairs:
        if isinstance(old, TreeProfile) and isinstance(new, TreeProfile):
            # Stages of a pipeline have different trees, which are evidence for their own modules.
            old_tree, new_tree = old.union(), new.union()
            if old_tree is not None and new_tree is not None:
                return replace(tree_evidence(old_tree, new_tree), carried_elements=carried_elements)
    return None


def _explain_uncompared_sizes(old: CommProfile, new: CommProfile) -> tuple[list[str], list[str]]:
    """Say whether activation sizes are compared, and how to compare them, unless both have them."""
    option = "activation_nbytes=False"
    if old.sizes_activations and new.sizes_activations:
        return [], []
    if not (old.sizes_activations or new.sizes_activations):
        return [f"activation sizes not compared ({option})"], []
    written, compared = ("with", "without") if new.sizes_activations else ("without", "with")
    fix = f"with comm_snapshot({option})" if new.sizes_activations else f"without {option}"
    scope = f"which was recorded {written} {option} and is compared {compared} it"
    return [scope], [f"compare as the file was recorded, {fix}"]


def tree_evidence(old: TreeFacts, new: TreeFacts) -> Evidence:
    """Return changes to the units that exist in both trees, as evidence for likely causes."""
    before, after = old.units.get(1, {}), new.units.get(1, {})
    units = frozenset(before) & frozenset(after)
    unit_axes = {axis for unit in after.values() for axis in (unit.shard_axis, unit.replicate_axis)}
    parameters = _pair_parameters_by_unit(units, old.parameters, new.parameters)
    frozen: set[str] = set()
    partly_frozen: set[str] = set()
    thawed: set[str] = set()
    for unit, pairs in parameters.items():
        if any(was.trainable and not now.trainable for was, now in pairs):
            still_trains = any(now.trainable for _, now in pairs)
            (partly_frozen if still_trains else frozen).add(unit)
        if any(now.trainable and not was.trainable for was, now in pairs):
            thawed.add(unit)
    return Evidence(
        units=units,
        emptied=frozenset(
            unit for unit in units if before[unit].has_parameters and not after[unit].has_parameters
        ),
        frozen=frozenset(frozen),
        partly_frozen=frozenset(partly_frozen),
        thawed=frozenset(thawed),
        trainable=frozenset(_list_trainable_modules_and_units({*before, *after}, new.parameters)),
        old_modules=frozenset(
            prefix
            for name in old.parameters
            for prefix in accumulate(name.split("."), "{}.{}".format)
        ),
        placed_axes=frozenset(
            axis for facts in new.parameters.values() for axis, _ in facts.placements
        )
        - unit_axes,
        split_axes=_find_split_axes_by_module(old.parameters, new.parameters, unit_axes),
        resharded=frozenset(
            name.rpartition(".")[0]
            for name in old.parameters.keys() & new.parameters.keys()
            if _list_shard_axes(old.parameters[name]) != _list_shard_axes(new.parameters[name])
        ),
        unmanaged=frozenset(
            name.rpartition(".")[0]
            for name, facts in new.parameters.items()
            if facts.trainable and not facts.managed
        ),
        policies={
            unit: policy
            for unit in units
            for policy in [policy_change(before[unit], after[unit])]
            if policy
        },
        new_roots=new_roots(old, new),
        lost_root=lost_root(old, new),
        prefetching={
            name: any(getattr(before[unit], name) for unit in units)
            for name in ("forward_prefetch", "backward_prefetch", "prefetch")
            if any(getattr(before[unit], name) != getattr(after[unit], name) for unit in units)
        },
        is_other_dtype=any(
            was.dtype != now.dtype for pairs in parameters.values() for was, now in pairs
        ),
        is_other_policy=any(before[unit].precision != after[unit].precision for unit in units),
        is_other_shape={name: facts.shape for name, facts in old.parameters.items()}
        != {name: facts.shape for name, facts in new.parameters.items()},
        is_reduce_dtype_unset=all(
            facts.kind == "fsdp2" and facts.precision.reduce_dtype is None
            for unit in units
            for facts in (before[unit], after[unit])
            if facts.precision.param_dtype is not None
        ),
    )


def _find_split_axes_by_module(
    old: Mapping[str, ParameterFacts],
    new: Mapping[str, ParameterFacts],
    unit_axes: set[str | None],
) -> dict[str, frozenset[str]]:
    """Return the axes over which both trees split the work of a module in the same way."""
    # Units gather their parameters before use, so their axes split no work.
    axes: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
    for name in old.keys() & new.keys():
        same = _list_shard_axes(old[name]) & _list_shard_axes(new[name])
        axes[name.rpartition(".")[0]] |= {axis for axis, _ in same} - unit_axes
    return axes


def _list_shard_axes(facts: ParameterFacts) -> set[tuple[str, str]]:
    """Return the axes over which a parameter is sharded, with the placements."""
    return {(axis, how) for axis, how in facts.placements if how.startswith("Shard")}


def _list_trainable_modules_and_units(
    units: set[str], parameters: Mapping[str, ParameterFacts]
) -> Iterator[str]:
    """Yield the module and the unit of each trainable parameter."""
    unit_of = {module: unit for unit in units for module in unit.split("+")}
    for name in (name for name, facts in parameters.items() if facts.trainable):
        yield name.rpartition(".")[0]
        yield _find_enclosing_unit(name, unit_of) or ""


def _find_enclosing_unit(name: str, unit_of: Mapping[str, str]) -> str | None:
    """Return the innermost unit that contains a parameter; None if no unit contains it."""
    while name and name not in unit_of:
        name = name.rpartition(".")[0]
    return unit_of.get(name)


def _pair_parameters_by_unit(
    units: frozenset[str], old: Mapping[str, ParameterFacts], new: Mapping[str, ParameterFacts]
) -> dict[str, list[tuple[ParameterFacts, ParameterFacts]]]:
    unit_of = {module: unit for unit in units for module in unit.split("+")}
    pairs: defaultdict[str, list[tuple[ParameterFacts, ParameterFacts]]] = defaultdict(list)
    for name in old.keys() & new.keys():
        unit = _find_enclosing_unit(name, unit_of)
        pairs[name.rpartition(".")[0] if unit is None else unit].append((old[name], new[name]))
    return pairs
