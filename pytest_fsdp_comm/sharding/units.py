"""Read modules, mesh axes, placements and parameters, for the readers of FSDP2, FSDP1 and DDP."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import (
    # Private: the placement of FSDP over a dimension that tensor parallelism also splits (the same
    # in torch 2.7, 2.13 and 2.15).
    _StridedShard,
)
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_comm.comm.mesh import MeshAxis, axis_of, merge_axes
from pytest_fsdp_comm.errors import RecordingError, printable
from pytest_fsdp_comm.recording.mesh_axes import GroupNames
from pytest_fsdp_comm.recording.owners.module_names import (
    WRAPPER_SEGMENTS,
    has_forward,
    read_model_parts,
)
from pytest_fsdp_comm.text.fqn import ROOT_TEXT
from pytest_fsdp_comm.tree.model import (
    AxisPlacement,
    ModuleNode,
    ParameterNode,
    Precision,
    ShardUnit,
)

Slot = tuple[int, str]
"""Where a parameter is registered: the module's index, and the parameter's name there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The modules of a model, with the indices that they have in a `ShardTree`."""

    nodes: tuple[ModuleNode, ...]
    modules: tuple[nn.Module, ...]
    wrappers: tuple[tuple[nn.Module, ...], ...]
    """The wrappers of each node, outermost first."""
    index_of: Mapping[int, int]
    """Maps the ids of modules and wrappers to the index of their (first) node."""

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield each wrapper and module, outermost first, with its node's index; skip aliases."""
        for index, node in enumerate(self.nodes):
            if node.alias_of is None:
                for layer in (*self.wrappers[index], self.modules[index]):
                    yield index, layer

    def slots(self, registrations: Iterable[tuple[nn.Module, str]]) -> tuple[Slot, ...]:
        """Convert pairs of module and parameter name to slots; skip modules outside the tree."""
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
    """Return the modules of `model`, or of its parts, in registration order, parents first."""
    # As in `named_modules`, a module that is registered several times has its children only at its
    # first place; its other places are aliases.
    roots = read_model_parts(model, given_to="fsdp_tree")
    nodes: list[ModuleNode] = []
    modules: list[nn.Module] = []
    all_wrappers: list[tuple[nn.Module, ...]] = []
    index_of: dict[int, int] = {}
    pending: list[tuple[nn.Module, int | None, str]] = [(root, None, "") for root in roots[::-1]]
    while pending:
        outer, parent, name = pending.pop()
        wrappers, inner = _split_off_wrapper_modules(outer)
        missing = [attr for attr in ("_modules", "_parameters") if attr not in vars(inner)]
        if missing:
            raise RecordingError(
                f"fsdp_tree found an uninitialized module: {name or ROOT_TEXT} "
                f"({class_name(inner)}) has no {missing[0]}; call super().__init__() first in "
                "its __init__"
            )
        index, alias_of = len(nodes), index_of.get(id(inner))
        if alias_of is None:
            index_of.update((id(layer), index) for layer in (*wrappers, inner))
            # Avoid named_children(), which skips further places of a child.
            children = reversed([*inner._modules.items()])
            pending += [(child, index, key) for key, child in children if child is not None]
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
    """Return the name of the class that the user wrote."""
    # fully_shard and replicate set a module's class to a new one,
    # type("FSDP" + name, (FSDPModule, user_class), {}) (the same in torch 2.7, 2.13, 2.15).
    cls = type(module)
    while len(cls.__bases__) > 1 and cls.__bases__[0].__module__.startswith("torch.distributed."):
        cls = cls.__bases__[1]
    return printable(cls.__name__)


def _split_off_wrapper_modules(module: nn.Module) -> tuple[tuple[nn.Module, ...], nn.Module]:
    wrappers: list[nn.Module] = []
    while True:
        children: dict[str, nn.Module | None] = module.__dict__.get("_modules", {})
        names = ("module",) if isinstance(module, DistributedDataParallel) else WRAPPER_SEGMENTS
        wrapped = next((children[name] for name in names if name in children), None)
        if wrapped is None:
            return tuple(wrappers), module
        wrappers.append(module)
        module = wrapped


class AxisNames:
    """Name the mesh axes of one tree, and collect the axes that the tree uses."""

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        """Read all meshes now, so that names do not depend on the order in which axes are used."""
        self._groups = GroupNames()
        self._used: set[MeshAxis] = set()
        # Keyed by the id of the mesh, which is kept alive, and the dimension.
        self._axes_of_meshes: dict[tuple[int, int], tuple[DeviceMesh, MeshAxis]] = {}
        for mesh in meshes:
            # torch 2.7 raises TypeError if the mesh's groups were destroyed. Ignore it: named axes
            # need no groups.
            with contextlib.suppress(TypeError):
                self._groups.learn_mesh(mesh)

    @property
    def used(self) -> tuple[MeshAxis, ...]:
        return merge_axes(self._used)

    def axis_of_mesh(self, mesh: DeviceMesh, dim: int) -> MeshAxis:
        if not mesh.mesh_dim_names:
            return self.axis_of_group(mesh.get_group(dim))
        key = id(mesh), dim
        if key not in self._axes_of_meshes:
            # Do this once, not for each parameter: for 8,192 ranks, torch 2.7 needs seconds.
            axis = axis_of(printable(mesh.mesh_dim_names[dim]), _ranks_along(mesh, dim))
            self._axes_of_meshes[key] = mesh, axis
        _, axis = self._axes_of_meshes[key]
        self._used.add(axis)
        return axis

    def axis_of_group(self, group: dist.ProcessGroup) -> MeshAxis:
        axis = self._groups.axis(self._groups.add_group(group))
        self._used.add(axis)
        return axis


def _ranks_along(mesh: DeviceMesh, dim: int) -> Sequence[int]:
    # If torch raises, compute the ranks from the mesh. A RuntimeError means that this rank is
    # outside the mesh; the other errors mean that the groups of the mesh were destroyed.
    with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
        return dist.get_process_group_ranks(mesh.get_group(dim))
    # Sort the ranks, because groups list them in ascending order, whatever their order in the mesh.
    return sorted(mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))[0].tolist())


def make_replicate_placement(axis: MeshAxis) -> AxisPlacement:
    """Return the placement of a tensor that is replicated over an axis."""
    return AxisPlacement(axis=axis.name, size=axis.size, kind="replicate", text="Replicate()")


def dtensor_meshes(visit: Visit) -> Iterator[DeviceMesh]:
    """Yield the meshes of all DTensor parameters."""
    for _, module in visit.layers():
        parameters: Iterable[Any] = module._parameters.values()  # parameters() includes children's
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                yield parameter.device_mesh


def read_placements(tensor: DTensor, axes: AxisNames) -> tuple[AxisPlacement, ...]:
    """Return the placement of a DTensor on each axis of its mesh."""
    mesh = tensor.device_mesh
    return tuple(
        _make_axis_placement(placement, axes.axis_of_mesh(mesh, dim), tensor.ndim)
        for dim, placement in enumerate(tensor.placements)
    )


def _make_axis_placement(placement: Placement, axis: MeshAxis, ndim: int) -> AxisPlacement:
    # Avoid str(placement), which differs between versions of torch ("Shard(dim=0)", "S(0)").
    kind: Literal["shard", "strided_shard", "partial", "other"]
    dim = None
    if isinstance(placement, _StridedShard):  # check first: in torch 2.7 it is also a Shard
        kind, dim = "strided_shard", placement.dim % ndim
        text = f"StridedShard({dim},{placement.split_factor})"
    elif isinstance(placement, Shard):
        kind, dim = "shard", placement.dim % ndim
        text = f"Shard({dim})"
    elif isinstance(placement, Replicate):
        return make_replicate_placement(axis)
    elif isinstance(placement, Partial):
        kind, text = "partial", f"Partial({placement.reduce_op})"
    else:
        kind, text = "other", f"{printable(type(placement).__name__)}()"
    return AxisPlacement(axis=axis.name, size=axis.size, kind=kind, dim=dim, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadParameter:
    """One original parameter, whether or not a unit manages it."""

    node: ParameterNode
    """Its module, name and unit are placeholders until `capture.py` replaces them."""
    slots: tuple[Slot, ...] = ()
    """The parameter's slots, starting with the one that its unit uses; empty without a unit."""
    origin: object = None
    """A key shared by parameters that were one tensor before sharding; None if unknown."""
    storage: torch.UntypedStorage | None = None
    """The storage of the local tensor; None if it is no ordinary tensor."""
    nbytes_filled: int = 0
    """Bytes of the storage that the parameter fills, with padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadUnit:
    """One unit, with references to torch's objects; `capture.py` replaces them with indices."""

    unit: ShardUnit
    """Its parameters and prefetched units are empty until `capture.py` sets them."""
    managed: tuple[ReadParameter, ...]
    state: object
    """torch's object for the unit; prefetch lists of other units refer to it."""
    forward_prefetch: tuple[object, ...] = ()
    backward_prefetch: tuple[object, ...] = ()


# A unit that gathers nothing; the readers replace the fields that differ.
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


def read_parameter(
    tensor: torch.Tensor,
    placements: tuple[AxisPlacement, ...] = (),
    *,
    slots: tuple[Slot, ...] = (),
    origin: object = None,
) -> ReadParameter:
    """Read the properties of a parameter that is a plain tensor or a DTensor."""
    # Do not call the public to_local(): it creates a view, which a running recording would see. The
    # private attribute is the same in torch 2.7, 2.13 and 2.15.
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    node = ParameterNode(
        module=0,
        name="",
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype) or "",
        itemsize=tensor.dtype.itemsize,
        placements=placements,
        local_numel=local.numel(),
        trainable=tensor.requires_grad,
        device=local.device.type,
        unit=None,
    )
    # A tensor subclass may keep its data in other tensors.
    is_plain = type(local) in {torch.Tensor, nn.Parameter} and local.layout is torch.strided
    return ReadParameter(
        node=node,
        slots=slots,
        origin=origin,
        storage=local.untyped_storage() if is_plain else None,
        nbytes_filled=max(local.numel(), _largest_shard_numel(node)) * tensor.dtype.itemsize,
    )


def _largest_shard_numel(node: ParameterNode) -> int:
    """Return the number of elements of the largest shard, to which FSDP2 pads the others."""
    sizes = [*node.shape]
    for placement in node.placements:
        if placement.is_sharded and placement.dim is not None:
            sizes[placement.dim] = -(-sizes[placement.dim] // placement.size)
    return math.prod(sizes) if node.is_sharded else 0


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """Return a dtype's name without torch's prefix, or None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
