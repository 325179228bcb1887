"""What the trees of a test say about its communication."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_fsdp_comm.comm.evidence import Evidence
from pytest_fsdp_comm.tree.profile import policy_change

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_fsdp_comm.tree.profile import ParameterFacts, TreeFacts


def tree_evidence(old: TreeFacts, new: TreeFacts) -> Evidence:
    """Compare the units that the snapshot's tree and the recorded one have in common."""
    before, after = old.units.get(1, {}), new.units.get(1, {})
    units = frozenset(before) & frozenset(after)
    held = _parameters_of(units, old.parameters, new.parameters)
    frozen: set[str] = set()
    partly_frozen: set[str] = set()
    thawed: set[str] = set()
    for unit, pairs in held.items():
        if any(was.trainable and not now.trainable for was, now in pairs):
            still_trains = any(now.trainable for _, now in pairs)
            (partly_frozen if still_trains else frozen).add(unit)
        if any(now.trainable and not was.trainable for was, now in pairs):
            thawed.add(unit)
    return Evidence(
        units=units,
        frozen=frozenset(frozen),
        partly_frozen=frozenset(partly_frozen),
        thawed=frozenset(thawed),
        policies={
            unit: policy
            for unit in units
            for policy in [policy_change(before[unit], after[unit])]
            if policy
        },
        new_roots=frozenset(
            unit for unit in units if after[unit].is_root and not before[unit].is_root
        ),
        is_other_dtype=any(was.dtype != now.dtype for pairs in held.values() for was, now in pairs),
        is_other_policy=any(before[unit].precision != after[unit].precision for unit in units),
        is_reduce_dtype_unset=all(
            facts.kind == "fsdp2" and facts.precision.reduce_dtype is None
            for unit in units
            for facts in (before[unit], after[unit])
            if facts.precision.param_dtype is not None
        ),
    )


def _parameters_of(
    units: frozenset[str],
    old: Mapping[str, ParameterFacts],
    new: Mapping[str, ParameterFacts],
) -> dict[str, list[tuple[ParameterFacts, ParameterFacts]]]:
    unit_of = {module: unit for unit in units for module in unit.split("+")}
    found: defaultdict[str, list[tuple[ParameterFacts, ParameterFacts]]] = defaultdict(list)
    for name in old.keys() & new.keys():
        module = name
        while module and module not in unit_of:
            module = module.rpartition(".")[0]
        if module in unit_of:
            found[unit_of[module]].append((old[name], new[name]))
    return found
