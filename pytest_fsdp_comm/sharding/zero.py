"""Read parameters that stage 3 of DeepSpeed's ZeRO has partitioned."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pytest_fsdp_comm.sharding.mesh import replicate
from pytest_fsdp_comm.sharding.units import HeldParameter, hold, private_names
from pytest_fsdp_comm.tree.layout import FlatRange, local_numels

if TYPE_CHECKING:
    from pytest_fsdp_comm.sharding.mesh import AxisNames


def is_partitioned(tensor: Any) -> bool:
    """Whether a parameter is one of ZeRO's."""
    return getattr(tensor, "ds_tensor", None) is not None


def read_partitioned(tensor: Any, axes: AxisNames) -> HeldParameter:
    """Describe a parameter of which each rank keeps an equal part, as it is between steps."""
    # The parameter itself is empty until it is gathered. Read in DeepSpeed 0.19.8.
    with private_names("DeepSpeed's parameters", "deepspeed"):
        shape, part, group = tuple(tensor.ds_shape), tensor.ds_tensor, tensor.ds_process_group
        # Small ones stay whole (stage3_param_persistence_threshold).
        is_whole, part_numel = tensor.ds_persist, part.ds_numel
    placement, flat = replicate(axes.of_group(group)), None
    if not is_whole:
        placement = replace(placement, kind="flat_shard", text="FlatShard()")
        flat = FlatRange(start=0, shard_numel=part_numel)
    node = replace(
        hold(tensor, (placement,)).node,
        shape=shape,
        flat=flat,
        local_numel=local_numels(shape, (placement,), flat)[dist.get_rank(group)],
        device=part.device.type,
    )
    return HeldParameter(node=node)
