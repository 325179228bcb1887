"""Names process groups by the mesh axis that they are, never by torch's counters."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.mesh import MeshAxis, axis_of
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.rank_lists import write_ranks

WORLD = "world"
"""The default group, unless a mesh gives it an axis name."""


class GroupNames:
    """Collect what is known of a recording's groups. See Note [Names come last]."""

    def __init__(self) -> None:
        # By name of the group:
        self._axes: dict[str, str] = {}  # its axis in a mesh
        # Its description by torch, and its ranks of the default group.
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._wholes: dict[str, str] = {}  # of a post-forward group, the whole shard group
        self._foreign_axes: set[str] = set()  # of meshes that this rank is outside of
        # By identity, and kept alive: a slice of a mesh is often a temporary, whose identity the
        # next one would take over.
        self._meshes: dict[int, DeviceMesh] = {}

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Forget afterwards what is learned in the block, but the groups that there are."""
        # Another thread may use one for the first time meanwhile.
        before = {name: copy.copy(known) for name, known in vars(self).items()}
        del before["_groups"]
        try:
            yield
        finally:
            vars(self).update(before)

    def learn_mesh(self, mesh: DeviceMesh) -> None:
        """Name the groups of a mesh after its axes; the first name of a group stays."""
        if id(mesh) in self._meshes or not mesh.mesh_dim_names:
            return
        self._meshes[id(mesh)] = mesh
        for dim, axis in enumerate(map(printable, mesh.mesh_dim_names)):
            try:
                group = mesh.get_group(dim)
            except RuntimeError:  # this rank is outside the mesh
                self._foreign_axes.add(axis)
                continue
            self._axes.setdefault(group.group_name, axis)

    def learn_parameters(self, modules: Iterable[nn.Module]) -> None:
        """Learn the meshes over which the modules' own parameters are distributed."""
        # Compiled code sends without a trace of its mesh, and torch gives the default group to a
        # mesh over all ranks, whose description names no axis.
        tensors: Any = sys.modules.get("torch.distributed.tensor")
        if tensors is None:
            return
        for module in modules:
            for parameter in module._parameters.values():
                if isinstance(parameter, tensors.DTensor):
                    self.learn_mesh(parameter.device_mesh)

    def learn_unit(self, unit: Any) -> None:
        """Learn the groups of a parameter group of FSDP2. See Note [Reshard after forward]."""
        self.learn_mesh(unit.mesh_info.mesh)
        after = unit.post_forward_mesh_info
        if after is not None:
            whole = self.note(unit.mesh_info.shard_process_group)
            self._wholes[after.shard_process_group.group_name] = whole

    def note(self, group: dist.ProcessGroup) -> str:
        """Remember a group that was used; returns the key that gives its axis later."""
        name: str = group.group_name
        if name not in self._groups:
            self._groups[name] = (group.group_desc, tuple(dist.get_process_group_ranks(group)))
        return name

    def axis(self, key: str) -> MeshAxis:
        description, ranks = self._groups[key]
        whole = self._wholes.get(key)
        if whole is not None and whole != key:
            return axis_of(f"{self.axis(whole).name}.post_forward", ranks)
        return axis_of(self._axes.get(key) or _name_of(description, ranks), ranks)

    def is_shape(self, key: str) -> bool:
        """Whether nothing names a group, so that other groups may share what its axis is called."""
        description, _ = self._groups[key]
        return not (self._axes.get(key) or self._wholes.get(key) or _described(description))

    def axes(self, keys: Iterable[str]) -> dict[str, MeshAxis]:
        """The axes of all groups of a recording, distinguished where two of one name differ."""
        # Not the mesh's own layout: of one made from a transposed tensor, torch 2.13 names strides
        # that its groups do not have.
        found = {key: self.axis(key) for key in dict.fromkeys(keys)}
        layouts: defaultdict[str, set[MeshAxis]] = defaultdict(set)
        for axis in found.values():
            layouts[axis.name].add(axis)
        return {
            key: replace(axis, name=f"{axis.name}.{_distinction(axis)}")
            if len(layouts[axis.name]) > 1
            else axis
            for key, axis in found.items()
        }

    def known(self, used_keys: Iterable[str]) -> tuple[dict[str, str], frozenset[str]]:
        """What this rank could have sent over, given the keys of the groups over which it did.

        First the axis of each process group by the group's name, then the names of all axes, also
        of other ranks' meshes; without second names of a group, under which nothing is recorded.
        """
        for group in process_groups():
            self.note(group)
        used = {key: axis.name for key, axis in self.axes(used_keys).items()}
        groups = {key: used.get(key) or self.axis(key).name for key in self._groups}
        names = {*groups.values(), *self._axes.values(), *self._foreign_axes}
        # A name that two groups share is none of theirs.
        shared = {self.axis(key).name for key, name in used.items()}.difference(used.values())
        return groups, frozenset(names.difference(shared))


def existing_axes() -> Iterator[tuple[str, str]]:
    """List each axis that exists, with its group's name: empty if it has none on this rank."""
    world = dist.group.WORLD
    if world is None:
        return
    yield WORLD, world.group_name
    for mesh in _existing_meshes():
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            group = ""
            # RuntimeError: this rank is outside the mesh. The others: the mesh outlived its groups.
            with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
                group = mesh.get_group(dim).group_name
            yield printable(name), group


def axes_of_groups() -> dict[str, tuple[str, bool]]:
    """Axis of each group of this rank by the group's name, and whether it only gives its shape."""
    names = GroupNames()
    # A group keeps the first name that it is given, which must not depend on the order of objects.
    for mesh in sorted(_existing_meshes(), key=lambda mesh: mesh.mesh_dim_names or ()):
        names.learn_mesh(mesh)
    # Private, so that where torch has moved them there are none.
    units = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    for unit in _existing(units, "FSDPParamGroup", with_attribute="post_forward_mesh_info"):
        names.learn_unit(unit)
    groups, _ = names.known(())
    return {key: (name, names.is_shape(key)) for key, name in groups.items()}


def _existing_meshes() -> Iterator[DeviceMesh]:
    # One that is only half built has no names yet.
    return _existing("torch.distributed.device_mesh", "DeviceMesh", with_attribute="mesh_dim_names")


def _existing(module: str, name: str, *, with_attribute: str) -> Iterator[Any]:
    """All objects of a class that is looked for in a module, if that is loaded."""
    # torch keeps no list of them, and to look at all objects is slow: only on the way to an error,
    # or where a test hangs.
    cls = getattr(sys.modules.get(module), name, None)
    if cls is None:
        return
    for found in gc.get_objects():
        # Never isinstance(): it reads the class of proxies, which runs their code.
        if issubclass(type(found), cls) and hasattr(found, with_attribute):
            yield found


def process_groups() -> list[dist.ProcessGroup]:
    """List the process groups that this rank is in."""
    if not dist.is_initialized():
        return []
    # Private, but the only list of all groups (read in torch 2.6 to 2.15); a tested contract.
    world = getattr(dist.distributed_c10d, "_world", None)
    groups = getattr(world, "pg_group_ranks", None)
    if groups is None:
        moved = "torch.distributed.distributed_c10d._world.pg_group_ranks"
        raise upstream.moved_error("torch", moved)
    # Groups that this rank is not in are numbers there.
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


def current_world() -> tuple[int, int, str]:
    """This rank, the number of ranks and the backend; 0, 1 and empty without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1, ""
    return dist.get_rank(), dist.get_world_size(), str(dist.get_backend())


def _name_of(description: str, ranks: Sequence[int]) -> str:
    if described := _described(description):
        return described
    # The shape is equal on every rank whose group is a shifted copy, as those of a mesh are.
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    return f"size{len(ranks)}.stride{steps.pop()}" if len(steps) == 1 else f"size{len(ranks)}"


def _described(description: str) -> str:
    """The name in torch's description of a group; empty without one."""
    if description == "default_pg":
        return WORLD
    return "" if description == "undefined" else printable(description.removeprefix("mesh_"))


def _distinction(axis: MeshAxis) -> str:
    """What distinguishes an axis from another one of its name: equal on all ranks, if it can be."""
    if axis.groups:
        return f"ranks{write_ranks(axis.groups[0])}"
    return f"size{axis.layout.replace(' ', '.').replace('stride.', 'stride')}"
