"""Read the units of FSDP2, FSDP1 and DDP, including ``replicate``."""

# FSDP2 sets some properties only in the first forward: parameter FQNs, which unit is the root, and
# whether the root keeps its parameters after forward. Before that, we derive them as torch would:
# triggering torch's lazy initialization here would change what is recorded later.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.recording.operations import join_dtypes
from pytest_fsdp_comm.recording.owners.fsdp import groups_of_state
from pytest_fsdp_comm.recording.owners.module_names import find_replicating_group
from pytest_fsdp_comm.sharding.units import (
    UNGATHERED,
    AxisNames,
    ReadParameter,
    ReadUnit,
    Slot,
    Visit,
    dtype_name,
    make_replicate_placement,
    read_parameter,
    read_placements,
)
from pytest_fsdp_comm.tree.model import AxisPlacement, Precision, ShardUnit, UnitKind

_RESHARDING = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def _list_fsdp2_states(visit: Visit) -> list[tuple[FSDPModule, Any]]:
    """Return each FSDP2 state with its first module, in registration order."""
    states: dict[int, tuple[FSDPModule, Any]] = {}
    for _, module in visit.layers():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states.setdefault(id(state), (module, state))
    return list(states.values())


@upstream.private_names("FSDP2 that fsdp_tree reads")
def fsdp2_meshes(visit: Visit) -> list[DeviceMesh]:
    """Return the meshes of all FSDP2 units."""
    states = [state for _, state in _list_fsdp2_states(visit)]
    return [group.mesh_info.mesh for state in states for group in groups_of_state(state)]


@upstream.private_names("FSDP2 that fsdp_tree reads")
def read_fsdp2(visit: Visit, axes: AxisNames) -> list[ReadUnit]:
    """Read the units of FSDP2 and of its ``replicate``, in registration order."""
    states: list[tuple[UnitKind, Any, tuple[int, ...]]] = []
    kinds_of: dict[int, set[UnitKind]] = {}
    for module, state in _list_fsdp2_states(visit):
        kind: UnitKind = "replicate" if type(module).__name__.startswith("Replicate") else "fsdp2"
        ids = [id(member) for member in state._modules or (module,)]
        # Skip modules outside the tree.
        inside = dict.fromkeys(visit.index_of[key] for key in ids if key in visit.index_of)
        states.append((kind, state, tuple(inside)))
        for member in inside:
            kinds_of.setdefault(member, set()).add(kind)
    units: list[ReadUnit] = []
    for kind, state, members in states:
        below = any(kind in kinds_of.get(above, ()) for above in visit.ancestors(members[0]))
        is_root = not below if state._is_root is None else bool(state._is_root)
        unit = replace(UNGATHERED, kind=kind, modules=members, is_root=is_root)
        groups = groups_of_state(state)
        units += [_read_fsdp2_group(unit, state, group, visit, axes) for group in groups]
        if not groups:
            units.append(ReadUnit(unit=unit, managed=(), state=state))
    return units


def _read_fsdp2_group(
    unit: ShardUnit, state: Any, group: Any, visit: Visit, axes: AxisNames
) -> ReadUnit:
    info = group.mesh_info
    shard_dim, replicate_dim = info.shard_mesh_dim, info.replicate_mesh_dim
    gathered = whole = 0
    if shard_dim is not None:
        ranks = info.mesh.size(shard_dim)
        for param in group.fsdp_params:
            itemsize = _dtype_when_gathered(param, group).itemsize
            gathered += param.padded_sharded_param_size.numel() * ranks * itemsize
            # Under tensor parallelism, `_orig_size` covers only this rank's part.
            whole += param._orig_size.numel() * itemsize
    # torch 2.7 lacks `gradient_divide_factor` and `force_sum_reduction_for_comms`.
    divides = hasattr(FSDPModule, "set_gradient_divide_factor")
    factor = group.gradient_divide_factor if divides else None
    can_sum = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    unit = replace(
        unit,
        shard_axis=None if shard_dim is None else axes.axis_of_mesh(info.mesh, shard_dim),
        replicate_axis=None
        if replicate_dim is None
        else axes.axis_of_mesh(info.mesh, replicate_dim),
        reshard_after_forward=_read_reshard_after_forward(state, group, unit.is_root),
        precision=_read_precision(group),
        offload=isinstance(group.offload_policy, CPUOffloadPolicy),
        gradient_divide_factor=None if factor is None else float(factor),
        force_sum_reduction=can_sum and group.force_sum_reduction_for_comms,
        unshard_in_backward=group.unshard_in_backward,
        nbytes_gathered=gathered,
        nbytes_padding=gathered - whole,
        nbytes_kept=sum(
            param.padded_sharded_param_size.numel() * param.sharded_param.dtype.itemsize
            for param in group.fsdp_params
        ),
    )
    return ReadUnit(
        unit=unit,
        managed=tuple(_read_fsdp2_parameter(param, visit, axes) for param in group.fsdp_params),
        state=state,
        forward_prefetch=tuple(state._states_to_forward_prefetch),
        backward_prefetch=tuple(state._states_to_backward_prefetch),
    )


def _read_reshard_after_forward(state: Any, group: Any, is_root: bool) -> bool | int | None:
    if group.mesh_info.shard_mesh_dim is None:
        return None
    target = group.post_forward_mesh_info
    # In torch 2.7, a root always keeps its parameters; newer versions do so only if
    # reshard_after_forward was not set explicitly.
    is_decided_later = state._is_root is None and is_root
    if target is None or (is_decided_later and getattr(state, "_auto_reshard_after_forward", True)):
        return False
    if target.shard_mesh_size == group.mesh_info.shard_mesh_size:
        return True
    return int(target.shard_mesh_size)


def _read_precision(group: Any) -> Precision:
    policies = [_find_precision_policy(param, group) for param in group.fsdp_params]
    # torch 2.15's param_dtype_override_fn may choose a different param_dtype for each parameter.
    policy = policies[0]
    dtype = dtype_name(policy.param_dtype)
    if any(other_policy.param_dtype != policy.param_dtype for other_policy in policies):
        dtype = join_dtypes(_dtype_when_gathered(param, group) for param in group.fsdp_params)
    return Precision(
        param_dtype=dtype,
        reduce_dtype=dtype_name(policy.reduce_dtype),
        output_dtype=dtype_name(policy.output_dtype),
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def _find_precision_policy(param: torch.Tensor, group: Any) -> Any:
    """Return the mixed-precision policy; torch 2.15 moved it from the group to its parameters."""
    return getattr(param, "mp_policy", None) or group.mp_policy


def _dtype_when_gathered(param: Any, group: object) -> torch.dtype:
    original: torch.dtype = param.sharded_param.dtype
    policy = _find_precision_policy(param, group)
    return (policy.param_dtype if original.is_floating_point else None) or original


def _read_fsdp2_parameter(param: Any, visit: Visit, axes: AxisNames) -> ReadParameter:
    info = param._module_info
    registrations = [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]
    # While a unit is gathered, its module registers a different tensor, so read the unit's tensor.
    # While it is sharded, the module's tensor may be newer: after model.to(), the unit updates its
    # reference only in the first forward. Avoid getattr(), which could run a property of user code.
    registered = info.module._parameters.get(info.param_name)
    is_sharded = param.sharded_state.name == "SHARDED"
    tensor = registered if is_sharded and registered is not None else param.sharded_param
    origin = getattr(param, "_orig_param_uid", None)
    placements = read_placements(tensor, axes)
    return read_parameter(tensor, placements, slots=visit.slots(registrations), origin=origin)


@upstream.private_names("FSDP1 that fsdp_tree reads")
def read_fsdp1(visit: Visit, axes: AxisNames) -> list[ReadUnit]:
    """Read the units of FSDP1, in registration order."""
    states = [layer for layer in visit.layers() if isinstance(layer[1], FullyShardedDataParallel)]
    # If a module has several wrappers, only the outermost can be `above` another unit.
    wrappers = dict(reversed(states))
    units: list[ReadUnit] = []
    for index, wrapper in states:
        above = next((wrappers[up] for up in visit.ancestors(index) if up in wrappers), None)
        units.append(_read_fsdp1_unit(index, wrapper, above, visit, axes))
    return units


def _read_fsdp1_unit(
    index: int, wrapper: Any, above: object, visit: Visit, axes: AxisNames
) -> ReadUnit:
    handle = wrapper._handle
    is_root = above is None if wrapper._is_root is None else bool(wrapper._is_root)
    strategy = wrapper.sharding_strategy
    axis = axes.axis_of_group(wrapper.process_group)
    is_sharded = strategy is not ShardingStrategy.NO_SHARD
    shard_axis = axis if is_sharded else None
    replicate_axis = None if is_sharded else axis
    # With NO_SHARD, FSDP1 reduces only over `process_group`, and ignores `_inter_node_pg`.
    if is_sharded and getattr(wrapper, "_inter_node_pg", None) is not None:
        replicate_axis = axes.axis_of_group(wrapper._inter_node_pg)
    placements = [] if replicate_axis is None else [make_replicate_placement(replicate_axis)]
    if shard_axis is not None:
        placement = make_replicate_placement(shard_axis)
        placements.append(replace(placement, kind="flat_shard", text="FlatShard()"))
    managed: tuple[ReadParameter, ...] = ()
    gathered = padding = nbytes_kept = 0
    if handle is not None:
        managed = tuple(_read_fsdp1_parameters(handle, tuple(placements), visit))
        shard_numel = handle.flat_param._sharded_size.numel()
        if shard_axis is not None:
            itemsize = handle._fwd_bwd_param_dtype.itemsize
            gathered = shard_numel * shard_axis.size * itemsize
            padding = gathered - sum(handle.flat_param._numels) * itemsize
        nbytes_kept = shard_numel * handle._orig_param_dtype.itemsize
    policy, backward = wrapper.mixed_precision, wrapper.backward_prefetch
    forward = ["FORWARD"] if wrapper.forward_prefetch else []
    prefetch = [*([] if backward is None else [backward.name]), *forward]
    unit = ShardUnit(
        kind="fsdp1",
        modules=(index,),
        parameters=(),
        is_root=is_root,
        shard_axis=shard_axis,
        replicate_axis=replicate_axis,
        # FSDP1's root always keeps its parameters, because backward uses them right after forward.
        reshard_after_forward=(strategy in _RESHARDING and not is_root) if is_sharded else None,
        precision=Precision(
            param_dtype=dtype_name(policy.param_dtype),
            reduce_dtype=dtype_name(policy.reduce_dtype),
            buffer_dtype=dtype_name(policy.buffer_dtype),
            cast_forward_inputs=policy.cast_forward_inputs or policy.cast_root_forward_inputs,
        ),
        offload=bool(wrapper.cpu_offload.offload_params),
        prefetch=" ".join(prefetch),
        precision_overrides=_list_precision_overrides(wrapper, above),
        nbytes_gathered=gathered,
        nbytes_padding=padding,
        nbytes_kept=nbytes_kept,
    )
    return ReadUnit(unit=unit, managed=managed, state=wrapper)


def _list_precision_overrides(wrapper: Any, above: Any) -> tuple[str, ...]:
    """Return a module's class if auto-wrap made it a unit only to keep it in full precision."""
    # Ignore batch norms, because torch excludes them by default.
    if above is None or wrapper.mixed_precision.param_dtype is not None:
        return ()
    policy = above.mixed_precision
    if policy.param_dtype is None:
        return ()
    # The attribute looks private, but MixedPrecision's docstring documents it.
    ignored = tuple(policy._module_classes_to_ignore)
    by_default = tuple(MixedPrecision()._module_classes_to_ignore)
    is_chosen = isinstance(wrapper.module, ignored) and not isinstance(wrapper.module, by_default)
    return (printable(type(wrapper.module).__name__),) if is_chosen else ()


def _read_fsdp1_parameters(
    handle: Any, placements: tuple[AxisPlacement, ...], visit: Visit
) -> Iterator[ReadParameter]:
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
        shard = flat._shard_param_infos[number]
        original = flat if flat._params is None else flat._params[number]
        slots = visit.slots([(info.module, info.param_name), *same])
        entry = read_parameter(original, placements, slots=slots)
        node = replace(
            entry.node,
            shape=shape,
            dtype=dtype_name(handle._orig_param_dtype) or "",
            itemsize=handle._orig_param_dtype.itemsize,
            local_numel=(shard.numel_in_shard or 0) if is_sharded else math.prod(shape),
            device=flat.device.type,
        )
        yield replace(entry, node=node)


def read_ddp(visit: Visit, axes: AxisNames, managed: set[Slot]) -> Iterator[ReadUnit]:
    """Yield a unit for each replicated module, without the parameters that `managed` contains."""
    for index, layer in visit.layers():
        group = find_replicating_group(layer)
        if group is not None:
            axis = axes.axis_of_group(group)
            entries = tuple(_read_replicated_parameters(index, layer, visit, axis, managed))
            nbytes = sum(entry.node.local_numel * entry.node.itemsize for entry in entries)
            unit = replace(UNGATHERED, modules=(index,), replicate_axis=axis, nbytes_kept=nbytes)
            yield ReadUnit(unit=unit, managed=entries, state=layer)


def _read_replicated_parameters(
    top: int, layer: nn.Module, visit: Visit, axis: Any, managed: set[Slot]
) -> Iterator[ReadParameter]:
    ignored: set[str] = getattr(layer, "parameters_to_ignore", set())
    # The reducer ignores parameters whose reduction is delayed, but DDP reduces them.
    delayed = {id(value) for value in getattr(layer, "_delay_all_reduce_params", ())}
    base = {top: ""}
    slots_of: dict[int, tuple[nn.Parameter, list[Slot]]] = {}
    # Parents come before their children, so a single pass covers the subtree.
    for index, node in enumerate(visit.nodes[top:], start=top):
        if index != top:
            if node.parent not in base or node.alias_of is not None:
                continue
            base[index] = f"{base[node.parent]}{node.name}."
        for name, parameter in visit.modules[index]._parameters.items():
            slot = (index, name)
            if parameter is None or slot in managed:
                continue
            if base[index] + name not in ignored or id(parameter) in delayed:
                slots_of.setdefault(id(parameter), (parameter, []))[1].append(slot)
    for parameter, slots in slots_of.values():
        yield read_parameter(parameter, (make_replicate_placement(axis),), slots=tuple(slots))
