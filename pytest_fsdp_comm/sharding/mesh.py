"""Reads device meshes and DTensor placements into values."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Literal

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import (
    # Private: FSDP over a dimension that tensor parallelism splits too (same in torch 2.7, 2.13 and
    # 2.15).
    _StridedShard,
)

from pytest_fsdp_comm.comm.events import MeshAxis
from pytest_fsdp_comm.recording.mesh_axes import GroupNames
from pytest_fsdp_comm.tree.layout import AxisPlacement

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


class AxisNames:
    """Names the axes of all meshes of one tree, and remembers which were asked for."""

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        """Learns the axis names first, so that no result depends on the order of the questions."""
        self._groups = GroupNames()
        self._used: set[MeshAxis] = set()
        for mesh in meshes:
            # torch 2.7 answers so for the groups of a mesh that outlived its process group; named
            # axes need no groups.
            with contextlib.suppress(TypeError):
                self._groups.learn_mesh(mesh)

    @property
    def used(self) -> tuple[MeshAxis, ...]:
        """The axes that were asked for, sorted by name and size."""
        return tuple(sorted(self._used, key=lambda axis: (axis.name, axis.size)))

    def of_mesh(self, mesh: DeviceMesh, place: int) -> MeshAxis:
        """One axis of a mesh."""
        if mesh.mesh_dim_names:
            axis = MeshAxis(name=mesh.mesh_dim_names[place], size=mesh.size(place))
        else:
            axis = self._groups.axis(self._groups.note(mesh.get_group(place)))
        self._used.add(axis)
        return axis

    def of_group(self, group: dist.ProcessGroup) -> MeshAxis:
        """The axis that a process group is."""
        axis = self._groups.axis(self._groups.note(group))
        self._used.add(axis)
        return axis

    def placements(self, tensor: DTensor) -> tuple[AxisPlacement, ...]:
        """What each axis of a DTensor's mesh does to it."""
        mesh = tensor.device_mesh
        return tuple(
            _axis_placement(placement, self.of_mesh(mesh, place), tensor.ndim)
            for place, placement in enumerate(tensor.placements)
        )


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """What this rank keeps of a DTensor.

    The public ``to_local()`` dispatches a view, which a recorder that is running would see.
    ``_local_tensor`` is in torch 2.7, 2.13 and 2.15.
    """
    return tensor._local_tensor  # noqa: SLF001  # see above


def flat_shard(axis: MeshAxis) -> AxisPlacement:
    """FSDP1's placement: a range of the flattened unit."""
    return AxisPlacement(axis=axis.name, size=axis.size, kind="flat_shard", text="FlatShard()")


def replicate(axis: MeshAxis) -> AxisPlacement:
    """Every rank along the axis keeps the same."""
    return AxisPlacement(axis=axis.name, size=axis.size, kind="replicate", text="Replicate()")


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
        kind, text = "other", f"{type(placement).__name__}()"
    return AxisPlacement(axis=axis.name, size=axis.size, kind=kind, dim=dim, text=text)
