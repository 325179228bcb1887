"""How a model is sharded: its modules, parameters and FSDP units, as one immutable value."""

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

# Note [Indices instead of names]: modules, parameters and units refer to each other by their index
# in the tree. FQNs are put together on request: in a chain of 100,000 modules they would take
# gigabytes.

# Levels that the outline indents and writes full FQNs for; deeper ones show their own name.
MAX_INDENT: Final = 40

# Rises when an older reader would misread the JSON of a tree.
JSON_VERSION: Final = 1

UnitKind = Literal["fsdp2", "fsdp1", "replicate", "ddp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """What one axis of the device mesh does to a tensor."""

    axis: str
    """Name of the mesh axis, as in `pytest_fsdp_comm.comm.mesh.MeshAxis`."""
    size: int
    """Ranks along the axis."""
    kind: Literal["shard", "strided_shard", "flat_shard", "replicate", "partial", "other"]
    """``strided_shard`` is FSDP over a dimension that tensor parallelism splits too: the axes to
    the right split first. ``flat_shard`` is FSDP1: a range of the flattened unit."""
    dim: int | None = None
    """The tensor's dimension that is split; None unless `kind` is a shard of a dimension."""
    text: str
    """As people write it: ``Shard(0)``, ``StridedShard(0,2)``, ``FlatShard()``, ``Replicate()``."""

    @property
    def is_sharded(self) -> bool:
        return self.kind in {"shard", "strided_shard", "flat_shard"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """A module, at the first place where it is registered."""

    name: str
    """Its name in its parent; empty for the root."""
    parent: int | None
    """Index of the parent; None for the root."""
    depth: int
    """Modules above it."""
    class_name: str
    """Name of the class that the user wrote. Shown, never compared."""
    wrappers: tuple[str, ...] = ()
    """Classes of the wrappers around it, outermost first, which are not in its FQN."""
    alias_of: int | None = None
    """Index of the node of the same module, if it is registered at several places; its parameters
    and children are listed there. None otherwise."""
    has_forward: bool = True
    """Whether it can run, and so be a unit: ``ModuleList`` and ``ModuleDict`` cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNode:
    """An original parameter, as its module defines it, and how it is distributed."""

    module: int
    """Index of the module that registers it."""
    name: str
    """Its name in that module."""
    tied: tuple[tuple[int, str], ...] = ()
    """Further places (module, name) that hold the same parameter."""
    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Element type that is kept, as torch prints it without its prefix."""
    itemsize: int
    """Bytes of one element."""
    placements: tuple[AxisPlacement, ...] = ()
    """One for each axis of its device mesh; empty for a tensor that every rank holds whole."""
    local_numel: int
    """Elements that this rank keeps, without padding."""
    trainable: bool
    """Whether it requires gradients."""
    device: str
    """``cpu``, ``cuda``, ``meta``, where this rank keeps it."""
    unit: int | None
    """Index of the unit that manages it; None if none does."""
    split_from: int | None = None
    """Index of the parameter that was the same tensor until two units sharded it apart; None
    otherwise, and where torch does not remember (2.7)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_sharded(self) -> bool:
        """Whether ranks keep different parts of it."""
        return any(placement.is_sharded for placement in self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Mixed precision of a unit: element types as torch prints them; None keeps the original."""

    param_dtype: str | None = None
    """Several, of parameters that ``param_dtype_override_fn`` excepts, are joined with ``+``."""
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    """FSDP2 only."""
    buffer_dtype: str | None = None
    """FSDP1 only."""
    cast_forward_inputs: bool = True
    """Whether inputs of the forward are cast to `param_dtype`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """Parameters that are gathered, or reduced, together."""

    kind: UnitKind
    modules: tuple[int, ...]
    """Indices of the modules that were passed to ``fully_shard``, or of the one that is wrapped."""
    parameters: tuple[int, ...]
    """Indices of the parameters, in the order of the collective."""
    is_root: bool
    """Whether it is a root, or will be one once the whole model has run."""
    shard_axis: MeshAxis | None
    """Over which it is sharded; None if every rank keeps all of it."""
    replicate_axis: MeshAxis | None
    """Over which it is replicated; None if over none."""
    reshard_after_forward: bool | int | None
    """What holds when the model runs: whether parameters are freed after forward, or the number of
    ranks to which they are resharded; None where nothing is gathered."""
    precision: Precision
    offload: bool
    """Whether shards are kept in host memory."""
    forward_prefetch: tuple[int, ...] = ()
    """Indices of the units that the user asked to gather early; empty where torch decides."""
    backward_prefetch: tuple[int, ...] = ()
    """As `forward_prefetch`, in backward."""
    gradient_divide_factor: float | None = None
    """What gradients are divided by, as ``set_gradient_divide_factor`` set it; None where torch
    averages over all ranks that reduce them."""
    force_sum_reduction: bool = False
    """Whether collectives only sum gradients (``set_force_sum_reduction_for_comms``)."""
    unshard_in_backward: bool = True
    """False where the user said that backward does not need the parameters."""
    prefetch: str = ""
    """FSDP1's policy: ``BACKWARD_PRE``, ``BACKWARD_POST``, with ``FORWARD`` where that is on."""
    precision_overrides: tuple[str, ...] = ()
    """FSDP1: names of module classes that auto-wrap puts into units without mixed precision."""
    nbytes_gathered: int
    """Bytes of one all-gather's output, padding included; 0 where nothing is gathered."""
    nbytes_padding: int
    """Bytes of `nbytes_gathered` that hold no parameter."""
    nbytes_kept: int
    """Bytes that this rank keeps between steps, padding included."""

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP gathers its parameters, or would if its children left it any."""
        return self.shard_axis is not None or (self.kind == "fsdp2" and not self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShardTree:
    """How a model is sharded, as one rank sees it."""

    rank: int
    """This rank, from 0; 0 without a process group. Not compared."""
    world_size: int
    """Ranks of the default group; 1 without a process group."""
    backend: str
    """``gloo``, ``nccl``, ``fake``; empty without a process group. Shown, not compared."""
    torch_version: str
    """As ``torch.__version__``. Shown, not compared."""
    mesh_axes: tuple[MeshAxis, ...]
    """The axes over which something is sharded or replicated, sorted by name."""
    modules: tuple[ModuleNode, ...]
    """In registration order, parents first. One root, at index 0; or several, where a rank runs
    several parts of one model, each followed by the modules below it."""
    parameters: tuple[ParameterNode, ...]
    """In registration order; each original parameter once."""
    units: tuple[ShardUnit, ...]
    """In registration order of their first modules."""
    findings: tuple[Finding, ...] = ()
    """Wrapping mistakes, errors first."""
    notes: tuple[str, ...] = ()
    """What a reader must know of the circumstances, e.g. that the model is on the meta device."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "findings", Findings(self.findings))

    @property
    def is_sharded(self) -> bool:
        """Whether ranks keep different parts of at least one parameter."""
        return any(parameter.is_sharded for parameter in self.parameters)

    @property
    def is_distributed(self) -> bool:
        """Whether a wrapper or a device mesh holds any of it, sharded or replicated."""
        return bool(self.units) or any(parameter.placements for parameter in self.parameters)

    def module_fqn(self, index: int) -> str:
        """The FQN of a module; empty for the root."""
        *names, _ = (self.modules[at].name for at in self.around(index))
        return ".".join(reversed(names))

    def around(self, index: int) -> Iterator[int]:
        """A module and those above it, from inside."""
        at: int | None = index
        while at is not None:
            yield at
            at = self.modules[at].parent

    def parameter_fqn(self, index: int) -> str:
        """The FQN of a parameter, where it is registered first in natural order."""
        parameter = self.parameters[index]
        return self._slot_fqn(parameter.module, parameter.name)

    def tied_fqns(self, index: int) -> tuple[str, ...]:
        """The further FQNs of a parameter, in natural order."""
        tied = (self._slot_fqn(*slot) for slot in self.parameters[index].tied)
        return tuple(sorted(tied, key=natural_key))

    def _slot_fqn(self, module: int, name: str) -> str:
        prefix = self.module_fqn(module)
        return f"{prefix}.{name}" if prefix else name

    def named_parameters(self) -> Iterator[tuple[str, ParameterNode]]:
        """Each original parameter with its FQN, in registration order."""
        for index, parameter in enumerate(self.parameters):
            yield self.parameter_fqn(index), parameter

    def units_of(self) -> dict[int, tuple[ShardUnit, ...]]:
        """The units of each module that has any, by the module's index."""
        found: dict[int, tuple[ShardUnit, ...]] = {}
        for unit in self.units:
            for module in unit.modules:
                found[module] = (*found.get(module, ()), unit)
        return found

    def unit_name(self, index: int) -> str:
        """The FQNs of a unit's modules, joined with ``+`` in natural order, as in recordings."""
        fqns = (self.module_fqn(module) for module in self.units[index].modules)
        return "+".join(sorted(fqns, key=natural_key))

    @property
    def module_to_fqns(self) -> dict[str, tuple[str, ...]]:
        """FQN of each unit's module -> FQNs of the original parameters that the unit manages.

        A unit of several modules lists each parameter under the module that it is in.
        """
        found: dict[str, list[str]] = {}
        for unit in self.units:
            members = {at: found.setdefault(self.module_fqn(at), []) for at in unit.modules}
            for index in unit.parameters:
                around = self.around(self.parameters[index].module)
                member = next((at for at in around if at in members), unit.modules[0])
                members[member].append(self.parameter_fqn(index))
        return {module: tuple(fqns) for module, fqns in found.items()}

    def __str__(self) -> str:
        """The modules as torch's sharded module tree writes them, then the findings.

        Returns:
            One line a module: ``layers.0[Block] FULLY SHARDED``, indented by four spaces a level.
        """
        return "\n".join([*self._outline(), *map(str, self.findings)])

    def __repr__(self) -> str:
        """One line, since pytest cuts off what is longer."""
        return (
            f"<ShardTree of {self.modules[0].class_name}: {len(self.units)} units, "
            f"{len(self.parameters)} parameters>"
        )

    def _outline(self) -> Iterator[str]:
        units_of = self.units_of()
        fqns: list[str] = []
        for index, node in enumerate(self.modules):
            if node.depth <= MAX_INDENT:
                parent = fqns[node.depth - 1] if node.depth else ""
                fqns[node.depth :] = [f"{parent}.{node.name}" if parent else node.name]
                shown = "    " * node.depth + fqns[node.depth]
            else:
                shown = "    " * MAX_INDENT + f"(depth {node.depth}) ...{node.name}"
            shown += f"[{node.class_name}]"
            if units := units_of.get(index):
                is_sharded = any(unit.is_fully_sharded for unit in units)
                shown += " FULLY SHARDED" if is_sharded else " REPLICATED"
            if node.alias_of is not None:
                shown += f" is {self.module_fqn(node.alias_of) or '(root)'}"
            yield printable(shown)


def dump_tree(tree: ShardTree) -> str:
    """Write a tree as JSON; its modules, parameters and units refer to each other by index."""
    return dump_document("tree", JSON_VERSION, tree)


def load_tree(text: str) -> ShardTree:
    """Read what `dump_tree` wrote, or raise CodecError."""
    return load_document(ShardTree, "tree", JSON_VERSION, text)
