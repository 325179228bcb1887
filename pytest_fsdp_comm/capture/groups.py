"""Names process groups by the mesh axis that they are, never by torch's counters."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pytest_fsdp_comm.events import MeshAxis

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

WORLD = "world"
"""The default group, unless a mesh gives it an axis name."""


class GroupNames:
    """Collects what is known of the groups of one recording; names them at its end.

    At the end, since a mesh that names the default group may show up after its first use.
    """

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._axes: dict[str, str] = {}  # group name -> axis, from meshes
        self._groups: dict[
            str, tuple[str, int, tuple[int, ...]]
        ] = {}  # -> description, size, ranks
        self._wholes: dict[str, str] = {}  # post-forward group -> the whole shard group
        # By identity, and kept alive: a slice of a mesh is often a temporary, whose identity the
        # next one would take over.
        self._meshes: dict[int, DeviceMesh] = {}

    def learn_mesh(self, mesh: DeviceMesh) -> None:
        """Takes the axis names of a mesh for its groups; the first name of a group stays."""
        if id(mesh) in self._meshes or not mesh.mesh_dim_names:
            return
        self._meshes[id(mesh)] = mesh
        for place, axis in enumerate(mesh.mesh_dim_names):
            try:
                group = mesh.get_group(place)
            except RuntimeError:  # this rank is outside the mesh
                continue
            self._axes.setdefault(group.group_name, axis)

    def learn_parameters(self, roots: Iterable[nn.Module]) -> None:
        """Takes the axis names of the meshes over which parameters are distributed.

        Compiled code sends without a trace of its mesh, and torch gives the default group to a mesh
        over all ranks, whose description names no axis.

        Args:
            roots: As the recorder found them.
        """
        tensors: Any = sys.modules.get("torch.distributed.tensor")
        if tensors is None:
            return
        for root in roots:
            for parameter in root.parameters():
                if isinstance(parameter, tensors.DTensor):
                    self.learn_mesh(parameter.device_mesh)

    def learn_post_forward(self, group: dist.ProcessGroup, shard_group: dist.ProcessGroup) -> None:
        """Takes the smaller group over which an FSDP unit is sharded between forward and backward.

        torch makes its mesh without names (``reshard_after_forward`` given as an int), so it is
        named after the axis that it is a part of.

        Args:
            group: The smaller one.
            shard_group: The one over which the unit is sharded otherwise.
        """
        self._wholes[group.group_name] = self.note(shard_group)

    def note(self, group: dist.ProcessGroup) -> str:
        """Remembers a group that was used.

        Returns:
            The key to ask for its axis with, later.
        """
        name: str = group.group_name
        if name not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups[name] = (group.group_desc, len(ranks), ranks)
        return name

    def axis(self, key: str) -> MeshAxis:
        """The axis of a group that `note` has seen."""
        description, size, ranks = self._groups[key]
        whole = self._wholes.get(key)
        if whole is not None and whole != key:
            return MeshAxis(name=f"{self.axis(whole).name}.post_forward", size=size)
        return MeshAxis(name=self._axes.get(key) or _named(description, ranks), size=size)


def group_of(bound: dict[str, Any]) -> dist.ProcessGroup | None:
    """Finds the group among a call's arguments.

    Returns:
        The group; None if the operation has none that is known here.
    """
    boxed = bound.get("process_group")
    if boxed is not None:
        unboxed: dist.ProcessGroup = (
            boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)
        )
        return unboxed
    name = bound.get("group_name")
    if isinstance(name, dist.ProcessGroup):
        return name
    if name is None:
        return None
    # Private, but what torch's own functional collectives call (read in torch 2.6 to 2.13).
    from torch.distributed import distributed_c10d  # noqa: PLC0415  # absent without torch.distributed

    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]  # noqa: SLF001  # see above
    return group


def _named(description: str, ranks: tuple[int, ...]) -> str:
    """A name from torch's description or, without one, from the group's shape.

    The shape is equal on every rank whose group is a shifted copy, as those of a mesh are.
    """
    if description == "default_pg":
        return WORLD
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    if description and description != "undefined":
        return description
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    return f"size{len(ranks)}.stride{steps.pop()}" if len(steps) == 1 else f"size{len(ranks)}"
