"""Read units that wrap modules: ``FullyShardedDataParallel``, and DDP with its ``replicate``."""

# Note [Private names of FSDP1]
# Run with torch 2.7.1, 2.13.0 and 2.15.0; tests/sharding/test_fsdp1.py fails when one moves.
# FullyShardedDataParallel: _handle, _is_root, _inter_node_pg, process_group; FlatParamHandle:
# flat_param, uses_sharded_strategy, _fwd_bwd_param_dtype, _orig_param_dtype; FlatParameter:
# _param_infos, _shared_param_infos, _shapes, _numels, _shard_param_infos, _sharded_size, _params.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.recording.owners.module_names import replicated_over
from pytest_fsdp_comm.sharding.units import (
    UNGATHERED,
    AxisNames,
    HeldParameter,
    ReadUnit,
    hold,
    private_names,
    replicate,
    shown_dtype,
)
from pytest_fsdp_comm.sharding.walk import Slot, Visit
from pytest_fsdp_comm.tree.model import AxisPlacement, Precision, ShardUnit

_RESHARDING = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def fsdp1_states(visit: Visit) -> list[tuple[int, FullyShardedDataParallel]]:
    """List each wrapper with its node's index, in registration order."""
    return [
        (index, layer)
        for index, layer in visit.layers()
        if isinstance(layer, FullyShardedDataParallel)
    ]


@private_names("FSDP1")
def read_fsdp1(visit: Visit, axes: AxisNames) -> list[ReadUnit]:
    """Read the units, in registration order."""
    states = fsdp1_states(visit)
    # Of nested wrappers around one module the outermost counts as what is above.
    wrappers = dict(reversed(states))
    units: list[ReadUnit] = []
    for index, wrapper in states:
        above = next((wrappers[up] for up in visit.ancestors(index) if up in wrappers), None)
        units.append(_read_unit(index, wrapper, above, visit, axes))
    return units


def _read_unit(index: int, wrapper: Any, above: Any, visit: Visit, axes: AxisNames) -> ReadUnit:
    handle = wrapper._handle
    is_root = above is None if wrapper._is_root is None else bool(wrapper._is_root)
    strategy = wrapper.sharding_strategy
    own = axes.of_group(wrapper.process_group)
    is_sharded = strategy is not ShardingStrategy.NO_SHARD
    shard_axis = own if is_sharded else None
    replicate_axis = None if is_sharded else own
    # Without shards FSDP1 reduces over its own group alone, one of a single rank too.
    if is_sharded and getattr(wrapper, "_inter_node_pg", None) is not None:
        replicate_axis = axes.of_group(wrapper._inter_node_pg)
    placements = [] if replicate_axis is None else [replicate(replicate_axis)]
    if shard_axis is not None:
        placements.append(replace(replicate(shard_axis), kind="flat_shard", text="FlatShard()"))
    held: tuple[HeldParameter, ...] = ()
    gathered = padding = kept = 0
    if handle is not None:
        held = tuple(_read_params(handle, tuple(placements), visit))
        shard_numel = handle.flat_param._sharded_size.numel()
        if shard_axis is not None:
            itemsize = handle._fwd_bwd_param_dtype.itemsize
            gathered = shard_numel * shard_axis.size * itemsize
            padding = gathered - sum(handle.flat_param._numels) * itemsize
        kept = shard_numel * handle._orig_param_dtype.itemsize
    policy, backward = wrapper.mixed_precision, wrapper.backward_prefetch
    prefetch = [] if backward is None else [backward.name]
    prefetch += ["FORWARD"] * wrapper.forward_prefetch
    unit = ShardUnit(
        kind="fsdp1",
        modules=(index,),
        parameters=(),
        is_root=is_root,
        shard_axis=shard_axis,
        replicate_axis=replicate_axis,
        # FSDP1's root keeps its parameters, whatever the strategy: its backward comes at once.
        reshard_after_forward=(strategy in _RESHARDING and not is_root) if is_sharded else None,
        precision=Precision(
            param_dtype=shown_dtype(policy.param_dtype),
            reduce_dtype=shown_dtype(policy.reduce_dtype),
            buffer_dtype=shown_dtype(policy.buffer_dtype),
            cast_forward_inputs=policy.cast_forward_inputs or policy.cast_root_forward_inputs,
        ),
        offload=bool(wrapper.cpu_offload.offload_params),
        prefetch=" ".join(prefetch),
        precision_overrides=_overrides(wrapper, above),
        nbytes_gathered=gathered,
        nbytes_padding=padding,
        nbytes_kept=kept,
    )
    return ReadUnit(unit=unit, held=held, state=wrapper)


def _overrides(wrapper: Any, above: Any) -> tuple[str, ...]:
    """Name the classes for which auto-wrap made a unit without the enclosing mixed precision."""
    # But for those that torch itself leaves out, batch norms: no user chose them.
    if above is None or wrapper.mixed_precision.param_dtype is not None:
        return ()
    policy = above.mixed_precision
    if policy.param_dtype is None:
        return ()
    # Documented in MixedPrecision's docstring.
    ignored = tuple(policy._module_classes_to_ignore)
    by_default = tuple(MixedPrecision()._module_classes_to_ignore)
    is_chosen = isinstance(wrapper.module, ignored) and not isinstance(wrapper.module, by_default)
    return (printable(type(wrapper.module).__name__),) if is_chosen else ()


def _read_params(
    handle: Any, placements: tuple[AxisPlacement, ...], visit: Visit
) -> Iterator[HeldParameter]:
    flat = handle.flat_param
    shared = flat._shared_param_infos
    for number, info in enumerate(flat._param_infos):
        same = [
            (entry.module, entry.param_name)
            for entry in shared
            if entry.prim_module is info.module and entry.prim_param_name == info.param_name
        ]
        shape = tuple(flat._shapes[number])
        is_sharded = handle.uses_sharded_strategy
        own = flat._shard_param_infos[number]
        original = flat if flat._params is None else flat._params[number]
        slots = visit.slots([(info.module, info.param_name), *same])
        held = hold(original, placements, slots=slots)
        node = replace(
            held.node,
            shape=shape,
            dtype=shown_dtype(handle._orig_param_dtype) or "",
            itemsize=handle._orig_param_dtype.itemsize,
            local_numel=(own.numel_in_shard or 0) if is_sharded else math.prod(shape),
            device=flat.device.type,
        )
        yield replace(held, node=node)


def read_ddp(visit: Visit, axes: AxisNames, taken: set[Slot]) -> Iterator[ReadUnit]:
    """Read the units, in registration order; other units manage the `taken` parameters."""
    for index, layer in visit.layers():
        group = replicated_over(layer)
        if group is not None:
            axis = axes.of_group(group)
            ignored: set[str] = getattr(layer, "parameters_to_ignore", set())
            held = tuple(_read_replicated(index, visit, axis, taken, ignored))
            kept = sum(entry.node.local_numel * entry.node.itemsize for entry in held)
            unit = replace(UNGATHERED, modules=(index,), replicate_axis=axis, nbytes_kept=kept)
            yield ReadUnit(unit=unit, held=held, state=layer)


def _read_replicated(
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
