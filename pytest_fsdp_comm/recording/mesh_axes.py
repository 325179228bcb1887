"""Name process groups after mesh axes, because torch's group names depend on creation order."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.mesh import MeshAxis, axis_of, is_aligned
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.text.rank_lists import write_ranks

WORLD = "world"
"""The axis name of the default group if no mesh names it."""


class GroupNames:
    """Name a recording's process groups after mesh axes. See Note [Names come last]."""

    def __init__(self) -> None:
        # The axis of each group in a mesh, keyed by torch's name for the group.
        self._axes: dict[str, str] = {}
        # The description and the global ranks of each group, keyed by torch's name for the group.
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._wholes: dict[str, str] = {}  # maps a post-forward group to the unit's shard group
        self._foreign_axes: set[str] = set()  # axes of meshes that this rank is not in
        # Keyed by id. The values keep meshes alive, because a slice of a mesh is often temporary,
        # and a new mesh could reuse its id.
        self._meshes: dict[int, DeviceMesh] = {}

    @contextlib.contextmanager
    def restore_on_exit(self) -> Iterator[None]:
        """Restore this object when the block ends, but keep groups that other threads may use."""
        saved = {name: copy.copy(value) for name, value in vars(self).items()}
        del saved["_groups"]
        try:
            yield
        finally:
            vars(self).update(saved)

    def learn_mesh(self, mesh: DeviceMesh) -> None:
        """Name the groups of a mesh after its axes; a group keeps its first name."""
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

    def learn_meshes_of_parameters(self, modules: Iterable[nn.Module]) -> None:
        """Learn the meshes of the modules' DTensor parameters."""
        # In compiled code, a collective reveals only its group. If a mesh spans all ranks, that is
        # the default group, whose description names no axis. DTensor parameters refer to the mesh.
        tensors: Any = sys.modules.get("torch.distributed.tensor")
        if tensors is None:
            return
        for module in modules:
            for parameter in module._parameters.values():
                if isinstance(parameter, tensors.DTensor):
                    self.learn_mesh(parameter.device_mesh)

    def learn_mesh_of_unit(self, unit: Any) -> None:
        """Learn the mesh of an FSDP2 parameter group. See Note [Reshard after forward]."""
        self.learn_mesh(unit.mesh_info.mesh)
        after = unit.post_forward_mesh_info
        if after is not None:
            shard_group = self.add_group(unit.mesh_info.shard_process_group)
            self._wholes[after.shard_process_group.group_name] = shard_group

    def add_group(self, group: dist.ProcessGroup) -> str:
        """Add a group, unless it is known; return its key for `axis` and `axes`."""
        name: str = group.group_name
        if name not in self._groups:
            self._groups[name] = (group.group_desc, tuple(dist.get_process_group_ranks(group)))
        return name

    def axis(self, key: str) -> MeshAxis:
        description, ranks = self._groups[key]
        shard_group = self._wholes.get(key)
        if shard_group is not None and shard_group != key:
            return axis_of(f"{self.axis(shard_group).name}.post_forward", ranks)
        return axis_of(self._axes.get(key) or _choose_group_name(description, ranks), ranks)

    def is_shape(self, key: str) -> bool:
        """Whether a group's name only describes its shape, so other groups may share the name."""
        description, _ = self._groups[key]
        return not (self._axes.get(key) or self._wholes.get(key) or _parse_axis_name(description))

    def axes(self, keys: Iterable[str], counted: Container[str | None] = ()) -> dict[str, MeshAxis]:
        """Return the axis of each group, with a suffix if different axes have the same name.

        `MeshAxis.num_groups` counts only the groups in `counted`.
        """
        # Compute axes from ranks, not from the mesh's layout: torch 2.13 reports wrong strides for
        # a mesh built from a transposed tensor.
        by_key = {key: self.axis(key) for key in dict.fromkeys(keys)}
        by_key = self._replace_group_counts(by_key, counted)
        layouts: defaultdict[str, set[MeshAxis]] = defaultdict(set)
        for axis in by_key.values():
            layouts[axis.name].add(axis)
        return {
            key: replace(axis, name=f"{axis.name}.{_make_axis_suffix(axis)}")
            if len(layouts[axis.name]) > 1
            else axis
            for key, axis in by_key.items()
        }

    def _replace_group_counts(
        self, axes: Mapping[str, MeshAxis], counted: Container[str | None]
    ) -> dict[str, MeshAxis]:
        """Set `MeshAxis.num_groups` to the number of counted groups with the same ranks."""
        counts: Counter[tuple[MeshAxis, tuple[int, ...]]] = Counter()
        for key, axis in axes.items():
            counts[axis, self._groups[key][1]] += key in counted
        return {
            # FSDP2 itself creates a post-forward group for each unit.
            key: axis
            if key in self._wholes
            else replace(axis, num_groups=max(1, counts[axis, self._groups[key][1]]))
            for key, axis in axes.items()
        }

    def group_members(self, axes: Mapping[str, MeshAxis]) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return `Collective.group_ranks` and `group_number` of each group in `axes`."""
        counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        members = {}
        # torch numbers new groups; a group has the same name on all its ranks.
        for key in sorted(axes, key=natural_key):
            axis, (_, ranks) = axes[key], self._groups[key]
            counts[axis.name, ranks] += 1
            members[key] = () if is_aligned(axis, ranks) else ranks, counts[axis.name, ranks]
        return members

    def groups_and_axes(self, used_keys: Iterable[str]) -> tuple[dict[str, str], frozenset[str]]:
        """Return the axis name of each of this rank's groups, and the names of all axes."""
        # The names include axes of meshes that this rank is not in. `used_keys` are the keys of the
        # groups that collectives used; only their names may have a suffix.
        for group in process_groups():
            self.add_group(group)
        used = {key: axis.name for key, axis in self.axes(used_keys).items()}
        groups = {key: used.get(key) or self.axis(key).name for key in self._groups}
        names = {*groups.values(), *self._axes.values(), *self._foreign_axes}
        # Leave out names that two axes share: each of the two has a suffix instead.
        shared = {self.axis(key).name for key, name in used.items()}.difference(used.values())
        return groups, frozenset(names.difference(shared))


def find_axes() -> Iterator[tuple[str, str]]:
    """Yield each mesh axis with torch's name for this rank's group on it; empty without a group."""
    world = dist.group.WORLD
    if world is None:
        return
    yield WORLD, world.group_name
    for mesh in _find_meshes():
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            group = ""
            # torch raises RuntimeError if this rank is outside the mesh, and other errors if the
            # groups of the mesh were destroyed. In both cases, yield no group.
            with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
                group = mesh.get_group(dim).group_name
            yield printable(name), group


def axes_of_groups() -> dict[str, tuple[str, bool]]:
    """Return each group's axis name and `is_shape`, keyed by torch's name for the group."""
    names = GroupNames()
    # Sort, because a group keeps its first name, and gc lists meshes in arbitrary order.
    for mesh in sorted(_find_meshes(), key=lambda mesh: mesh.mesh_dim_names or ()):
        names.learn_mesh(mesh)
    # The class is private: if torch has moved it, no units are found.
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    for unit in list_instances(getattr(module, "FSDPParamGroup", None)):
        if hasattr(unit, "post_forward_mesh_info"):  # otherwise it is still being built
            names.learn_mesh_of_unit(unit)
    groups, _ = names.groups_and_axes(())
    return {key: (name, names.is_shape(key)) for key, name in groups.items()}


def _find_meshes() -> list[DeviceMesh]:
    # A mesh that is still being built does not have the attribute yet.
    return [mesh for mesh in list_instances(DeviceMesh) if hasattr(mesh, "mesh_dim_names")]


def list_instances(cls: type | None) -> list[Any]:
    """List the existing objects of a class and of its direct subclasses; none if `cls` is None."""
    # torch keeps no list of its meshes and units. Searching all objects is slow, so do it only for
    # errors and for tests that hang.
    if cls is None:
        return []
    # Objects refer to their class. Not gc.get_objects(): while another thread builds a tuple from a
    # generator, nothing else may refer to the tuple, or that thread raises SystemError (bpo-15108).
    entries = gc.get_referrers(cls, *cls.__subclasses__())
    # Not isinstance(): it reads `__class__`, which runs the code of proxies.
    return [entry for entry in entries if issubclass(type(entry), cls)]


def process_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that this rank is in."""
    if not dist.is_initialized():
        return []
    # Private, but the only list of all groups (checked in torch 2.7 to 2.15, and by a test).
    world = getattr(dist.distributed_c10d, "_world", None)
    groups = getattr(world, "pg_group_ranks", None)
    if groups is None:
        moved = "torch.distributed.distributed_c10d._world.pg_group_ranks"
        raise upstream.moved_error("torch", moved)
    # Skip the numbers in this list: they represent groups that this rank is not in.
    return [group for group in groups if isinstance(group, dist.ProcessGroup)]


def rank_size_and_backend() -> tuple[int, int, str]:
    """Return the rank, world size and backend; 0, 1 and "" without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1, ""
    return dist.get_rank(), dist.get_world_size(), str(dist.get_backend())


def _choose_group_name(description: str, ranks: Sequence[int]) -> str:
    if described := _parse_axis_name(description):
        return described
    # Name the group after its shape, so that all groups along one axis of a mesh share a name.
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    return f"size{len(ranks)}.stride{steps.pop()}" if len(steps) == 1 else f"size{len(ranks)}"


def _parse_axis_name(description: str) -> str:
    """Return the axis name in torch's description of a group; empty if it has none."""
    if description == "default_pg":
        return WORLD
    return "" if description == "undefined" else printable(description.removeprefix("mesh_"))


def _make_axis_suffix(axis: MeshAxis) -> str:
    """Return a suffix for an axis with an ambiguous name; if possible, the same on all ranks."""
    if axis.groups:
        return f"ranks{write_ranks(axis.groups[0])}"
    return f"size{axis.layout.replace(' ', '.').replace('stride.', 'stride')}"
