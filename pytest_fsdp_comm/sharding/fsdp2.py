"""Read FSDP2's units (``fully_shard``, and the ``replicate`` that builds on it)."""

# Note [Before the first forward]
# FSDP2 settles some facts in the first forward only: parameter FQNs, which unit is the root, and
# that the root keeps its parameters after forward. They are derived here by the same rules instead,
# since that lazy initialisation would change what a later recording sees.

# Note [Private names of FSDP2]
# Run with torch 2.7.1, 2.13.0 and 2.15.0; tests/sharding/test_fsdp1.py fails when one moves.
# FSDPModule: _get_fsdp_state; FSDPState: _modules, _is_root, _auto_reshard_after_forward,
# _states_to_forward_prefetch, _states_to_backward_prefetch; FSDPParamGroup: fsdp_params,
# mesh_info, post_forward_mesh_info, mp_policy, offload_policy, unshard_in_backward,
# gradient_divide_factor and force_sum_reduction_for_comms (not in 2.7); FSDPParam: _module_info,
# sharded_param, sharded_state, _orig_size, padded_sharded_param_size, _orig_param_uid (not in
# 2.7).

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from pytest_fsdp_comm.recording.operations import joined_dtypes
from pytest_fsdp_comm.recording.owners.fsdp import groups_of_state
from pytest_fsdp_comm.sharding.units import (
    UNGATHERED,
    AxisNames,
    HeldParameter,
    ReadUnit,
    hold,
    private_names,
    read_placements,
    shown_dtype,
)
from pytest_fsdp_comm.sharding.walk import Visit
from pytest_fsdp_comm.tree.model import Precision, ShardUnit, UnitKind


@private_names("FSDP2")
def fsdp2_states(visit: Visit) -> list[tuple[FSDPModule, Any]]:
    """Each state with the first module that has it, in registration order."""
    found: dict[int, tuple[FSDPModule, Any]] = {}
    for _, module in visit.layers():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.setdefault(id(state), (module, state))
    return list(found.values())


@private_names("FSDP2")
def fsdp2_meshes(visit: Visit) -> list[DeviceMesh]:
    """The meshes of all units."""
    states = [state for _, state in fsdp2_states(visit)]
    return [group.mesh_info.mesh for state in states for group in groups_of_state(state)]


@private_names("FSDP2")
def read_fsdp2(visit: Visit, axes: AxisNames) -> list[ReadUnit]:
    """Read the units, in registration order."""
    found: list[tuple[UnitKind, Any, tuple[int, ...]]] = []
    own: dict[int, set[UnitKind]] = {}
    for module, state in fsdp2_states(visit):
        kind: UnitKind = "replicate" if type(module).__name__.startswith("Replicate") else "fsdp2"
        given = [id(member) for member in getattr(state, "_modules", ()) or (module,)]
        # Those outside the tree are left out.
        inside = dict.fromkeys(visit.index_of[one] for one in given if one in visit.index_of)
        found.append((kind, state, tuple(inside)))
        for member in inside:
            own.setdefault(member, set()).add(kind)
    units: list[ReadUnit] = []
    for kind, state, members in found:
        below = any(kind in own.get(above, ()) for above in visit.ancestors(members[0]))
        is_root = not below if state._is_root is None else bool(state._is_root)
        unit = replace(UNGATHERED, kind=kind, modules=members, is_root=is_root)
        groups = groups_of_state(state)
        units += [_read_group(unit, state, group, visit, axes) for group in groups]
        if not groups:
            units.append(ReadUnit(unit=unit, held=(), state=state))
    return units


def _read_group(unit: ShardUnit, state: Any, group: Any, visit: Visit, axes: AxisNames) -> ReadUnit:
    info = group.mesh_info
    shard_dim, replicate_dim = info.shard_mesh_dim, info.replicate_mesh_dim
    gathered = whole = 0
    if shard_dim is not None:
        ranks = info.mesh.size(shard_dim)
        for param in group.fsdp_params:
            itemsize = _gather_dtype(param, group).itemsize
            gathered += param.padded_sharded_param_size.numel() * ranks * itemsize
            # Of the tensor that FSDP was given: under tensor parallelism that is this rank's part.
            whole += param._orig_size.numel() * itemsize
    # Settings that torch 2.7 does not have.
    divides = hasattr(FSDPModule, "set_gradient_divide_factor")
    factor = group.gradient_divide_factor if divides else None
    can_sum = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    unit = replace(
        unit,
        shard_axis=None if shard_dim is None else axes.of_mesh(info.mesh, shard_dim),
        replicate_axis=None if replicate_dim is None else axes.of_mesh(info.mesh, replicate_dim),
        reshard_after_forward=_reshard_after_forward(state, group, unit.is_root),
        precision=_precision(group),
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
        held=tuple(_read_param(param, visit, axes) for param in group.fsdp_params),
        state=state,
        forward_prefetch=tuple(state._states_to_forward_prefetch),
        backward_prefetch=tuple(state._states_to_backward_prefetch),
    )


def _reshard_after_forward(state: Any, group: Any, is_root: bool) -> bool | int | None:
    if group.mesh_info.shard_mesh_dim is None:
        return None
    target = group.post_forward_mesh_info
    # In torch 2.7 a root always keeps its parameters; later only where the user left it to torch.
    settles_later = state._is_root is None and is_root
    if target is None or (settles_later and getattr(state, "_auto_reshard_after_forward", True)):
        return False
    if target.shard_mesh_size == group.mesh_info.shard_mesh_size:
        return True
    return int(target.shard_mesh_size)


def _precision(group: Any) -> Precision:
    policies = [_policy(param, group) for param in group.fsdp_params]
    # Of torch 2.15's param_dtype_override_fn a policy has only what it said of the parameter.
    policy = policies[0]
    dtype = shown_dtype(policy.param_dtype)
    if any(own.param_dtype != policy.param_dtype for own in policies):
        dtype = joined_dtypes(_gather_dtype(param, group) for param in group.fsdp_params)
    return Precision(
        param_dtype=dtype,
        reduce_dtype=shown_dtype(policy.reduce_dtype),
        output_dtype=shown_dtype(policy.output_dtype),
        cast_forward_inputs=policy.cast_forward_inputs,
    )


def _policy(param: Any, group: Any) -> Any:
    """The mixed-precision policy, which torch 2.15 moved from the group to its parameters."""
    return getattr(param, "mp_policy", None) or group.mp_policy


def _gather_dtype(param: Any, group: Any) -> torch.dtype:
    original: torch.dtype = param.sharded_param.dtype
    policy = _policy(param, group)
    return (policy.param_dtype if original.is_floating_point else None) or original


def _read_param(param: Any, visit: Visit, axes: AxisNames) -> HeldParameter:
    info = param._module_info
    registrations = [
        (info.module, info.param_name),
        *zip(info.shared_modules, info.shared_param_names, strict=True),
    ]
    # Unless sharded, the module registers a gathered tensor. Sharded, it may hold a newer one than
    # the unit knows of: model.to(), which the unit notices in its first forward only. Not read by
    # getattr, which would run a property of the user.
    registered = info.module._parameters.get(info.param_name)
    is_sharded = param.sharded_state.name == "SHARDED"
    tensor = registered if is_sharded and registered is not None else param.sharded_param
    origin = getattr(param, "_orig_param_uid", None)
    placements = read_placements(tensor, axes)
    return hold(tensor, placements, slots=visit.slots(registrations), origin=origin)
