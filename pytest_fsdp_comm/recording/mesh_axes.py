"""Names process groups by the mesh axis that they are, never by torch's counters."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.events import MeshAxis

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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

    def known(self) -> tuple[dict[str, str], frozenset[str]]:
        """What this rank could have sent over, whether it did or not.

        Returns:
            The axis of each process group by the group's name, and the names of all axes, those of
            meshes that this rank is outside of included.
        """
        for group in process_groups():
            self.note(group)
        groups = {key: self.axis(key).name for key in self._groups}
        of_meshes = {name for mesh in self._meshes.values() for name in mesh.mesh_dim_names or ()}
        return groups, frozenset({*groups.values(), *of_meshes})


def living_axes() -> Iterator[tuple[str, str]]:
    """The axis names that this process has now, of meshes that no recording met too.

    torch keeps no list of meshes, so that this looks at all objects: for the way to an error only.

    Yields:
        The name of an axis, and the name of the process group that it is; empty if this rank is in
        none, or it is gone.
    """
    world = dist.group.WORLD
    if world is None:
        return
    yield WORLD, world.group_name
    module: Any = sys.modules.get("torch.distributed.device_mesh")
    if module is None:
        return
    for found in gc.get_objects():
        # Never isinstance(): it asks proxies for their class, which runs their code.
        if not issubclass(type(found), module.DeviceMesh):
            continue
        for place, name in enumerate(getattr(found, "mesh_dim_names", None) or ()):
            yield name, _group_name(found, place)


def _group_name(mesh: DeviceMesh, place: int) -> str:
    # RuntimeError: this rank is outside the mesh. The others: the mesh outlived its groups.
    with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
        name: str = mesh.get_group(place).group_name
        return name
    return ""


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups that this rank is in."""
    if not dist.is_initialized():
        return []
    # Private, but the only list of all groups (read in torch 2.6 to 2.15); a tested contract.
    world = getattr(dist.distributed_c10d, "_world", None)
    groups = getattr(world, "pg_group_ranks", None)
    if groups is None:
        raise upstream.moved(
            "torch",
            "torch.distributed.distributed_c10d._world.pg_group_ranks",
            "the recorder relies on to know the axes that can be asked for",
        )
    # Groups that this rank is not in stand there as a number.
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


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
