"""Names the axes over which a model is sharded or replicated."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pytest_fsdp_comm.comm.events import MeshAxis
from pytest_fsdp_comm.recording.mesh_axes import GroupNames
from pytest_fsdp_comm.tree.layout import AxisPlacement

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class AxisNames:
    """Names the axes of all meshes of one tree, and remembers which were used."""

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        """Learns all axis names first, so that no name depends on the order of the questions.

        Args:
            meshes: All meshes of the model.
        """
        self._groups = GroupNames()
        self._used: set[MeshAxis] = set()
        for mesh in meshes:
            # torch 2.7 answers so for the groups of a mesh that outlived its process group; named
            # axes need no groups.
            with contextlib.suppress(TypeError):
                self._groups.learn_mesh(mesh)

    @property
    def used(self) -> tuple[MeshAxis, ...]:
        """The axes that were used, sorted by name and size."""
        return tuple(sorted(self._used, key=lambda axis: (axis.name, axis.size)))

    def of_mesh(self, mesh: DeviceMesh, dim: int) -> MeshAxis:
        """The axis that a dimension of a mesh is."""
        if mesh.mesh_dim_names:
            axis = MeshAxis(name=mesh.mesh_dim_names[dim], size=mesh.size(dim))
        else:
            axis = self._groups.axis(self._groups.note(mesh.get_group(dim)))
        self._used.add(axis)
        return axis

    def of_group(self, group: dist.ProcessGroup) -> MeshAxis:
        """The axis that a process group is."""
        axis = self._groups.axis(self._groups.note(group))
        self._used.add(axis)
        return axis


def flat_shard(axis: MeshAxis) -> AxisPlacement:
    """FSDP1's placement: a range of the flattened unit."""
    return AxisPlacement(axis=axis.name, size=axis.size, kind="flat_shard", text="FlatShard()")


def replicate(axis: MeshAxis) -> AxisPlacement:
    """Every rank along the axis keeps the same."""
    return AxisPlacement(axis=axis.name, size=axis.size, kind="replicate", text="Replicate()")
