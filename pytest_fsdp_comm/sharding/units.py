"""What the readers of FSDP2, FSDP1 and DDP share: modules, axes, placements, units, parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import (
    # Private: FSDP over a dimension that tensor parallelism splits too (same in torch 2.7, 2.13 and
    # 2.15).
    _StridedShard,
)
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.mesh import MeshAxis, axis_of, merge_axes
from pytest_fsdp_comm.errors import RecordingError, printable
from pytest_fsdp_comm.recording.mesh_axes import GroupNames
from pytest_fsdp_comm.recording.owners.module_names import WRAPPER_SEGMENTS, has_forward, parts_of
from pytest_fsdp_comm.text.fqn import ROOT_TEXT
from pytest_fsdp_comm.tree.model import (
    AxisPlacement,
    ModuleNode,
    ParameterNode,
    Precision,
    ShardUnit,
)

Slot = tuple[int, str]
"""Where a parameter is registered: index of the module, and its name there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The modules of one model, by index as in `pytest_fsdp_comm.tree.model.ShardTree.modules`."""

    nodes: tuple[ModuleNode, ...]
    modules: tuple[nn.Module, ...]
    wrappers: tuple[tuple[nn.Module, ...], ...]
    """The wrappers of each node, outermost first."""
    index_of: Mapping[int, int]
    """``id`` of a module or wrapper -> index of its node; aliases lead to the node they repeat."""

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Each wrapper and module with its node's index, outermost first; aliases left out."""
        for index, node in enumerate(self.nodes):
            if node.alias_of is None:
                for layer in (*self.wrappers[index], self.modules[index]):
                    yield index, layer

    def slots(self, registrations: Iterable[tuple[nn.Module, str]]) -> tuple[Slot, ...]:
        """Where parameters are registered; registrations outside the tree are left out."""
        return tuple(
            (self.index_of[id(module)], name)
            for module, name in registrations
            if id(module) in self.index_of
        )

    def ancestors(self, index: int) -> Iterator[int]:
        parent = self.nodes[index].parent
        while parent is not None:
            yield parent
            parent = self.nodes[parent].parent


def visit_modules(model: object) -> Visit:
    """List the modules below `model` in registration order, parents first, part after part."""
    # As `named_modules` does, a module that is registered several times has its children where it
    # comes first; elsewhere it is an alias.
    roots = parts_of(model, given_to="fsdp_tree")
    nodes: list[ModuleNode] = []
    modules: list[nn.Module] = []
    all_wrappers: list[tuple[nn.Module, ...]] = []
    index_of: dict[int, int] = {}
    pending: list[tuple[nn.Module, int | None, str]] = [(root, None, "") for root in roots[::-1]]
    while pending:
        outer, parent, name = pending.pop()
        wrappers, inner = _unwrap(outer)
        missing = [held for held in ("_modules", "_parameters") if held not in vars(inner)]
        if missing:
            raise RecordingError(
                f"fsdp_tree found a half-built module: {name or ROOT_TEXT} ({class_name(inner)}) "
                f"has no {missing[0]}; call super().__init__() first in its __init__"
            )
        index, alias_of = len(nodes), index_of.get(id(inner))
        if alias_of is None:
            index_of.update((id(layer), index) for layer in (*wrappers, inner))
            pending += [(child, index, own) for own, child in reversed(_children(inner))]
        modules.append(inner)
        all_wrappers.append(wrappers)
        nodes.append(
            ModuleNode(
                name=name,
                parent=parent,
                depth=0 if parent is None else nodes[parent].depth + 1,
                class_name=class_name(inner),
                wrappers=tuple(map(class_name, wrappers)),
                alias_of=alias_of,
                has_forward=has_forward(inner),
            )
        )
    return Visit(
        nodes=tuple(nodes), modules=tuple(modules), wrappers=tuple(all_wrappers), index_of=index_of
    )


def class_name(module: nn.Module) -> str:
    """The name of the class that the user wrote."""
    # fully_shard and replicate swap a module's class for one that they make on the fly, as
    # type("FSDP" + name, (FSDPModule, user_class), {}) (same in torch 2.7, 2.13, 2.15).
    cls = type(module)
    while len(cls.__bases__) > 1 and cls.__bases__[0].__module__.startswith("torch.distributed."):
        cls = cls.__bases__[1]
    return printable(cls.__name__)


def _unwrap(module: nn.Module) -> tuple[tuple[nn.Module, ...], nn.Module]:
    wrappers: list[nn.Module] = []
    while True:
        children: dict[str, nn.Module | None] = module.__dict__.get("_modules", {})
        names = ("module",) if isinstance(module, DistributedDataParallel) else WRAPPER_SEGMENTS
        wrapped = next((children[name] for name in names if name in children), None)
        if wrapped is None:
            return tuple(wrappers), module
        wrappers.append(module)
        module = wrapped


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # Not named_children(): it leaves out a child that is registered twice.
    children = module.__dict__.get("_modules", {})
    return [(name, child) for name, child in children.items() if child is not None]


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
