"""Name the axes over which a model is sharded or replicated."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch.distributed as dist

from pytest_fsdp_comm.comm.mesh import MeshAxis, axis_of, merge_axes
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.recording.mesh_axes import GroupNames
from pytest_fsdp_comm.tree.layout import AxisPlacement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh


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
        """The axes that were used, sorted by name."""
        return merge_axes(self._used)

    def of_mesh(self, mesh: DeviceMesh, dim: int) -> MeshAxis:
        """The axis that a dimension of a mesh is."""
        if not mesh.mesh_dim_names:
            return self.of_group(mesh.get_group(dim))
        axis = axis_of(printable(mesh.mesh_dim_names[dim]), _ranks_along(mesh, dim))
        self._used.add(axis)
        return axis

    def of_group(self, group: dist.ProcessGroup) -> MeshAxis:
        """The axis that a process group is."""
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
