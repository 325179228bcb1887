"""A sharded model as an immutable value: its modules, parameters and FSDP units."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.codec import dump_document, load_document
from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.tree.finding import Finding, Findings

# Modules, parameters and units refer to each other by index. FQNs are built only on request: for
# 100,000 nested modules, they would take gigabytes.

# The outline indents modules and prints FQNs up to this depth, and only prints names below it.
MAX_INDENT: Final = 40

# Increase this when a change would make older versions misread the JSON of a tree.
JSON_VERSION: Final = 1

UnitKind = Literal["fsdp2", "fsdp1", "replicate", "ddp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """The placement of a tensor on one axis of its device mesh."""

    axis: str
    """The name of the mesh axis, as in `pytest_fsdp_comm.comm.mesh.MeshAxis`."""
    size: int
    """The number of ranks along the axis."""
    kind: Literal["shard", "strided_shard", "flat_shard", "replicate", "partial", "other"]
    """``strided_shard``: FSDP shards a dimension that tensor parallelism over a later mesh axis has
    already sharded. ``flat_shard``: the range of FSDP1's flat parameter on this rank."""
    dim: int | None = None
    """The sharded dimension of the tensor; None for ``flat_shard`` and for unsharded kinds."""
    text: str
    """The printed form: ``Shard(0)``, ``StridedShard(0,2)``, ``FlatShard()``, ``Replicate()``."""

    @property
    def is_sharded(self) -> bool:
        return self.kind in {"shard", "strided_shard", "flat_shard"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """A module at one of the places where the model registers it; see `alias_of`."""

    name: str
    """The module's name in its parent; empty for the root."""
    parent: int | None
    """Index of the parent; None for the root."""
    depth: int
    """The number of ancestors."""
    class_name: str
    """The name of the user's class. It is printed, but never compared."""
    wrappers: tuple[str, ...] = ()
    """Classes of the wrappers around the module, outermost first. FQNs do not include wrappers."""
    alias_of: int | None = None
    """Index of the module's first node, which has the parameters and children; None for the first
    node itself."""
    has_forward: bool = True
    """Whether the module can run and be a unit. ``ModuleList`` and ``ModuleDict`` cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNode:
    """An original parameter (before sharding), and how it is distributed."""

    module: int
    """Index of the module that registers the parameter."""
    name: str
    """The parameter's name in that module."""
    tied: tuple[tuple[int, str], ...] = ()
    """The other places (module, name) where the same parameter is registered."""
    shape: tuple[int, ...]
    """The shape of the unsharded parameter."""
    dtype: str
    """Dtype of the stored tensor, without torch's prefix."""
    itemsize: int
    """The size of one element in bytes."""
    placements: tuple[AxisPlacement, ...] = ()
    """The placement on each axis of the parameter's mesh; empty for a plain tensor."""
    local_numel: int
    """The number of elements on this rank, without padding."""
    trainable: bool
    """Whether the parameter requires gradients."""
    device: str
    """The device type on this rank: ``cpu``, ``cuda``, ``meta``."""
    unit: int | None
    """Index of the unit that manages the parameter; None if no unit does."""
    split_from: int | None = None
    """Index of the first copy, if two units sharded a tied parameter separately, which split it
    in two. Otherwise None; always None in torch 2.7, which does not record the tie."""
    nbytes_unfilled: int = 0
    """Bytes of the shard's storage that neither padding nor any parameter fills. If parameters
    share the storage, the first of them has the bytes. 0 for a plain tensor, or if unknown."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_sharded(self) -> bool:
        """Whether ranks store different parts of the parameter."""
        return any(placement.is_sharded for placement in self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Mixed precision of a unit. Dtypes have no ``torch.`` prefix; None is the original dtype."""

    param_dtype: str | None = None
    """Several dtypes, set by ``param_dtype_override_fn``, are joined with ``+``."""
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    """FSDP2 only."""
    buffer_dtype: str | None = None
    """FSDP1 only."""
    cast_forward_inputs: bool = True
    """Whether the inputs of forward are cast to `param_dtype`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """A unit: parameters that are gathered or reduced together."""

    kind: UnitKind
    modules: tuple[int, ...]
    """Indices of the modules passed to ``fully_shard``, or the index of the wrapped module."""
    parameters: tuple[int, ...]
    """Indices of the parameters, in the order in which collectives pack them."""
    is_root: bool
    """Whether the unit is a root, or will be one once the entire model has run."""
    shard_axis: MeshAxis | None
    """The axis over which the unit is sharded; None if it is not sharded."""
    replicate_axis: MeshAxis | None
    """The axis over which the unit is replicated; None if it is not replicated."""
    reshard_after_forward: bool | int | None
    """Whether parameters are freed after forward, or the number of ranks over which they are then
    resharded; None for units that gather nothing. Until the model runs, the value is predicted."""
    precision: Precision
    offload: bool
    """Whether shards are stored in host memory."""
    forward_prefetch: tuple[int, ...] = ()
    """Indices of the units set by ``set_modules_to_forward_prefetch``; empty without that call."""
    backward_prefetch: tuple[int, ...] = ()
    """Indices of the units set by ``set_modules_to_backward_prefetch``; empty without that call."""
    gradient_divide_factor: float | None = None
    """The divisor of gradients set by ``set_gradient_divide_factor``; None if torch averages
    gradients over all ranks that reduce them."""
    force_sum_reduction: bool = False
    """Whether collectives only sum gradients (``set_force_sum_reduction_for_comms``)."""
    unshard_in_backward: bool = True
    """Whether backward gathers parameters; see FSDP2's ``set_unshard_in_backward``."""
    prefetch: str = ""
    """FSDP1's policy: ``BACKWARD_PRE`` or ``BACKWARD_POST``, and ``FORWARD`` if enabled."""
    precision_overrides: tuple[str, ...] = ()
    """FSDP1: the module's class, if auto-wrap made it a unit only to keep it in full precision."""
    nbytes_gathered: int
    """Bytes of one all-gather's output, with padding; 0 for a unit that gathers nothing."""
    nbytes_padding: int
    """Bytes of padding in `nbytes_gathered`."""
    nbytes_kept: int
    """Bytes that this rank stores between steps, with padding."""

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP gathers the unit, or would if its children did not manage all parameters."""
        return self.shard_axis is not None or (self.kind == "fsdp2" and not self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShardTree:
    """How a model is sharded, as seen by one rank."""

    rank: int
    """The rank that read the tree; 0 without a process group. It is not compared."""
    world_size: int
    """The size of the default group; 1 without a process group."""
    backend: str
    """``gloo``, ``nccl`` or ``fake``; empty without a process group. Printed but not compared."""
    torch_version: str
    """The value of ``torch.__version__``. It is printed, but not compared."""
    mesh_axes: tuple[MeshAxis, ...]
    """The axes over which parameters are sharded or replicated, sorted by name."""
    modules: tuple[ModuleNode, ...]
    """In registration order, parents first. The root has index 0. If the rank runs several parts of
    a model, each part has a root, followed by the part's modules."""
    parameters: tuple[ParameterNode, ...]
    """Each original parameter once, in registration order."""
    units: tuple[ShardUnit, ...]
    """In registration order of their first modules."""
    findings: tuple[Finding, ...] = ()
    """Wrapping mistakes, errors first."""
    notes: tuple[str, ...] = ()
    """Remarks for users, for example that the model is on the meta device."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "findings", Findings(self.findings))

    @property
    def is_sharded(self) -> bool:
        """Whether ranks store different parts of at least one parameter."""
        return any(parameter.is_sharded for parameter in self.parameters)

    @property
    def is_distributed(self) -> bool:
        """Whether the tree has units or DTensor parameters, sharded or replicated."""
        return bool(self.units) or any(parameter.placements for parameter in self.parameters)

    def module_fqn(self, index: int) -> str:
        """Return the FQN of a module; empty for the root."""
        *names, _ = (self.modules[module].name for module in self.list_ancestry(index))
        return ".".join(reversed(names))

    def list_ancestry(self, index: int) -> Iterator[int]:
        """Yield the indices of a module and its ancestors, innermost first."""
        module: int | None = index
        while module is not None:
            yield module
            module = self.modules[module].parent

    def parameter_fqn(self, index: int) -> str:
        """Return the FQN of a parameter; if it is tied, its first FQN in natural order."""
        parameter = self.parameters[index]
        return self._join_fqn(parameter.module, parameter.name)

    def tied_fqns(self, index: int) -> tuple[str, ...]:
        """Return the other FQNs of a tied parameter, in natural order."""
        tied = (self._join_fqn(*slot) for slot in self.parameters[index].tied)
        return tuple(sorted(tied, key=natural_key))

    def _join_fqn(self, module: int, name: str) -> str:
        prefix = self.module_fqn(module)
        return f"{prefix}.{name}" if prefix else name

    def named_parameters(self) -> Iterator[tuple[str, ParameterNode]]:
        """Yield each original parameter with its FQN, in registration order."""
        for index, parameter in enumerate(self.parameters):
            yield self.parameter_fqn(index), parameter

    def units_of(self) -> dict[int, tuple[ShardUnit, ...]]:
        """Return the units of each module, keyed by module index."""
        units: dict[int, tuple[ShardUnit, ...]] = {}
        for unit in self.units:
            for module in unit.modules:
                units[module] = (*units.get(module, ()), unit)
        return units

    def unit_name(self, index: int) -> str:
        """Return the FQNs of a unit's modules, in natural order and joined with ``+``."""
        fqns = (self.module_fqn(module) for module in self.units[index].modules)
        return "+".join(sorted(fqns, key=natural_key))

    @property
    def module_to_fqns(self) -> dict[str, tuple[str, ...]]:
        """FQNs of the original parameters that each unit manages, keyed by the FQN of its module.

        If a unit consists of several modules, each module is listed with the parameters inside it.
        """
        managed: dict[str, list[str]] = {}
        for unit in self.units:
            members = {i: managed.setdefault(self.module_fqn(i), []) for i in unit.modules}
            for index in unit.parameters:
                around = self.list_ancestry(self.parameters[index].module)
                member = next((i for i in around if i in members), unit.modules[0])
                members[member].append(self.parameter_fqn(index))
        return {module: tuple(fqns) for module, fqns in managed.items()}

    def __str__(self) -> str:
        """Return the modules in the format of torch's sharded module tree, then the findings."""
        return "\n".join([*self._list_outline_lines(), *map(str, self.findings)])

    def __repr__(self) -> str:
        """Return a single line, because pytest truncates longer text."""
        return (
            f"<ShardTree of {self.modules[0].class_name}: {len(self.units)} units, "
            f"{len(self.parameters)} parameters>"
        )

    def _list_outline_lines(self) -> Iterator[str]:
        units_of = self.units_of()
        fqns: list[str] = []
        for index, node in enumerate(self.modules):
            if node.depth <= MAX_INDENT:
                parent = fqns[node.depth - 1] if node.depth else ""
                fqns[node.depth :] = [f"{parent}.{node.name}" if parent else node.name]
                line = "    " * node.depth + fqns[node.depth]
            else:
                line = "    " * MAX_INDENT + f"(depth {node.depth}) ...{node.name}"
            line += f"[{node.class_name}]"
            if units := units_of.get(index):
                is_sharded = any(unit.is_fully_sharded for unit in units)
                line += " FULLY SHARDED" if is_sharded else " REPLICATED"
            if node.alias_of is not None:
                line += f" is {self.module_fqn(node.alias_of) or '(root)'}"
            yield printable(line)


def dump_tree(tree: ShardTree) -> str:
    """Return a tree as JSON; its modules, parameters and units refer to each other by index."""
    return dump_document("tree", JSON_VERSION, tree)


def load_tree(text: str) -> ShardTree:
    """Read the JSON of `dump_tree`; raise CodecError if it is invalid."""
    return load_document(ShardTree, "tree", JSON_VERSION, text)
