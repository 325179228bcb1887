"""What the readers of FSDP2, FSDP1 and DDP share: names of axes, placements, units, parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import (
    # Private: FSDP over a dimension that tensor parallelism splits too (same in torch 2.7, 2.13 and
    # 2.15).
    _StridedShard,
)

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.mesh import MeshAxis, axis_of, merge_axes
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.recording.mesh_axes import GroupNames
from pytest_fsdp_comm.sharding.walk import Slot, Visit
from pytest_fsdp_comm.tree.model import AxisPlacement, ParameterNode, Precision, ShardUnit


class AxisNames:
    """Name the axes of all meshes of one tree, and remember which were used."""

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        """Learn all axis names first, so that no name depends on the order of their use."""
        self._groups = GroupNames()
        self._used: set[MeshAxis] = set()
        for mesh in meshes:
            # torch 2.7 answers so for the groups of a mesh that outlived its process group; named
            # axes need no groups.
            with contextlib.suppress(TypeError):
                self._groups.learn_mesh(mesh)

    @property
    def used(self) -> tuple[MeshAxis, ...]:
        return merge_axes(self._used)

    def of_mesh(self, mesh: DeviceMesh, dim: int) -> MeshAxis:
        if not mesh.mesh_dim_names:
            return self.of_group(mesh.get_group(dim))
        axis = axis_of(printable(mesh.mesh_dim_names[dim]), _ranks_along(mesh, dim))
        self._used.add(axis)
        return axis

    def of_group(self, group: dist.ProcessGroup) -> MeshAxis:
        axis = self._groups.axis(self._groups.note(group))
        self._used.add(axis)
        return axis


def _ranks_along(mesh: DeviceMesh, dim: int) -> Sequence[int]:
    # RuntimeError: this rank is outside the mesh. The others: the mesh outlived its groups.
    with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
        return dist.get_process_group_ranks(mesh.get_group(dim))
    # Groups keep their ranks in ascending order, whatever the order in the mesh.
    return sorted(mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))[0].tolist())


def replicate(axis: MeshAxis) -> AxisPlacement:
    """Every rank along the axis keeps the same."""
    return AxisPlacement(axis=axis.name, size=axis.size, kind="replicate", text="Replicate()")


def dtensor_meshes(visit: Visit) -> Iterator[DeviceMesh]:
    """The meshes of all parameters that are DTensors."""
    for _, module in visit.layers():
        own: Iterable[Any] = module._parameters.values()  # parameters() enters children
        for parameter in own:
            if isinstance(parameter, DTensor):
                yield parameter.device_mesh


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """One original parameter, held by a unit or by none."""

    node: ParameterNode
    """Without the place where it is registered, and without its unit."""
    slots: tuple[Slot, ...] = ()
    """Where it is registered, the unit's own choice first; empty if no unit holds it."""
    origin: object = None
    """Equal for parameters that were one tensor before sharding; None where torch forgets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadUnit:
    """One unit, with torch's own objects where the tree has indices."""

    unit: ShardUnit
    """Without its parameters, and without the units that it prefetches."""
    held: tuple[HeldParameter, ...]
    state: object
    """Identifies the unit where another prefetches it."""
    forward_prefetch: tuple[object, ...] = ()
    backward_prefetch: tuple[object, ...] = ()


UNGATHERED: Final = ShardUnit(
    kind="ddp",
    modules=(),
    parameters=(),
    is_root=True,
    shard_axis=None,
    replicate_axis=None,
    reshard_after_forward=None,
    precision=Precision(),
    offload=False,
    nbytes_gathered=0,
    nbytes_padding=0,
    nbytes_kept=0,
)


def hold(
    tensor: torch.Tensor,
    placements: tuple[AxisPlacement, ...] = (),
    *,
    slots: tuple[Slot, ...] = (),
    origin: object = None,
) -> HeldParameter:
    """Describe a parameter that is a plain tensor or a DTensor."""
    # The public to_local() dispatches a view, which a recorder that is running would see. Private,
    # the same in torch 2.7, 2.13 and 2.15.
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    node = ParameterNode(
        module=0,
        name="",
        shape=tuple(tensor.shape),
        dtype=shown_dtype(tensor.dtype) or "",
        itemsize=tensor.dtype.itemsize,
        placements=placements,
        local_numel=local.numel(),
        trainable=tensor.requires_grad,
        device=local.device.type,
        unit=None,
    )
    return HeldParameter(node=node, slots=slots, origin=origin)


@contextlib.contextmanager
def private_names(what: str) -> Iterator[None]:
    """Raise UpstreamChangedError, which names `what`, where an attribute is missing."""
    try:
        yield
    except AttributeError as missing:
        raise upstream.misread_error("torch", f"{what} that fsdp_tree reads", missing) from missing


def shown_dtype(dtype: torch.dtype | None) -> str | None:
    """As torch prints it without its prefix; None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
