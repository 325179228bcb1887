"""Read DTensors: their meshes, their placements and what this rank keeps of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import (
    # Private: FSDP over a dimension that tensor parallelism splits too (same in torch 2.7, 2.13 and
    # 2.15).
    _StridedShard,
)

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.sharding.mesh import replicate
from pytest_fsdp_comm.tree.layout import AxisPlacement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    from pytest_fsdp_comm.comm.mesh import MeshAxis
    from pytest_fsdp_comm.sharding.mesh import AxisNames
    from pytest_fsdp_comm.sharding.walk import Visit


def dtensor_meshes(visit: Visit) -> Iterator[DeviceMesh]:
    """The meshes of all parameters that are DTensors."""
    for _, module in visit.layers():
        own: Iterable[Any] = module._parameters.values()  # parameters() enters children
        for parameter in own:
            if isinstance(parameter, DTensor):
                yield parameter.device_mesh


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """What this rank keeps of a DTensor."""
    # The public to_local() dispatches a view, which a recorder that is running would see. Private,
    # the same in torch 2.7, 2.13 and 2.15.
    return tensor._local_tensor


def read_placements(tensor: DTensor, axes: AxisNames) -> tuple[AxisPlacement, ...]:
    """What each axis of a DTensor's mesh does to it."""
    mesh = tensor.device_mesh
    return tuple(
        _axis_placement(placement, axes.of_mesh(mesh, dim), tensor.ndim)
        for dim, placement in enumerate(tensor.placements)
    )


def _axis_placement(placement: Placement, axis: MeshAxis, ndim: int) -> AxisPlacement:
    # Written out by hand: torch's own texts differ between versions ("Shard(dim=0)", "S(0)").
    kind: Literal["shard", "strided_shard", "partial", "other"]
    dim = None
    if isinstance(placement, _StridedShard):  # first: a subclass of Shard in torch 2.7
        kind, dim = "strided_shard", placement.dim % ndim
        text = f"StridedShard({dim},{placement.split_factor})"
    elif isinstance(placement, Shard):
        kind, dim = "shard", placement.dim % ndim
        text = f"Shard({dim})"
    elif isinstance(placement, Replicate):
        return replicate(axis)
    elif isinstance(placement, Partial):
        kind, text = "partial", f"Partial({placement.reduce_op})"
    else:
        kind, text = "other", f"{printable(type(placement).__name__)}()"
    return AxisPlacement(axis=axis.name, size=axis.size, kind=kind, dim=dim, text=text)
