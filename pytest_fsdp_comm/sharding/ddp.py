"""Read replicated units: ``DistributedDataParallel`` and the ``replicate`` that builds on it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.recording.owners.ddp import replicated_over
from pytest_fsdp_comm.sharding.mesh import replicate
from pytest_fsdp_comm.sharding.units import UNGATHERED, ReadUnit, hold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from pytest_fsdp_comm.sharding.mesh import AxisNames
    from pytest_fsdp_comm.sharding.units import HeldParameter
    from pytest_fsdp_comm.sharding.walk import Slot, Visit


def read_ddp(visit: Visit, axes: AxisNames, taken: set[Slot]) -> Iterator[ReadUnit]:
    """Read the units, in registration order; other units manage the `taken` parameters."""
    for index, layer in visit.layers():
        group = replicated_over(layer)
        if group is not None:
            axis = axes.of_group(group)
            ignored: set[str] = getattr(layer, "parameters_to_ignore", set())
            held = tuple(_read_params(index, visit, axis, taken, ignored))
            kept = sum(entry.node.local_numel * entry.node.itemsize for entry in held)
            unit = replace(UNGATHERED, modules=(index,), replicate_axis=axis, nbytes_kept=kept)
            yield ReadUnit(unit=unit, held=held, state=layer)


def _read_params(
    top: int, visit: Visit, axis: Any, taken: set[Slot], ignored: set[str]
) -> Iterator[HeldParameter]:
    base = {top: ""}
    found: dict[int, tuple[nn.Parameter, list[Slot]]] = {}
    # Parents come before their children, so one pass sees the whole subtree.
    for index, node in enumerate(visit.nodes[top:], start=top):
        if index != top:
            if node.parent not in base or node.alias_of is not None:
                continue
            base[index] = f"{base[node.parent]}{node.name}."
        for name, parameter in visit.modules[index]._parameters.items():
            slot = (index, name)
            if parameter is not None and slot not in taken and base[index] + name not in ignored:
                found.setdefault(id(parameter), (parameter, []))[1].append(slot)
    for parameter, slots in found.values():
        yield hold(parameter, (replicate(axis),), slots=tuple(slots))
