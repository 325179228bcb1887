"""What is compared of a sharded tree: the same on every rank, however the model was built."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.tree.model import Precision, UnitKind

if TYPE_CHECKING:
    from pytest_fsdp_comm.tree.model import ParameterNode, ShardTree, ShardUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """The sharding policy of one unit."""

    kind: UnitKind
    is_root: bool = False
    shard_axis: str | None = None
    """Name of the mesh axis; None if it is not sharded."""
    replicate_axis: str | None = None
    """Name of the mesh axis; None if it is not replicated."""
    reshard_after_forward: bool | int | None = None
    """As in `pytest_fsdp_comm.tree.model.ShardUnit`."""
    precision: Precision = field(default_factory=Precision)
    offload: bool = False
    forward_prefetch: tuple[str, ...] = ()
    """Names of the units that the user asked to gather early."""
    backward_prefetch: tuple[str, ...] = ()
    """As `forward_prefetch`, in backward."""
    prefetch: tuple[str, ...] = ()
    """FSDP1's policies: ``BACKWARD_PRE``, ``FORWARD``."""


def policy_change(old: UnitFacts, new: UnitFacts) -> str:
    """Word what became of a unit's policy after forward; empty if nothing did."""
    # As its author set it: of FSDP1, that is the sharding strategy.
    if old.reshard_after_forward == new.reshard_after_forward:
        return ""
    if "fsdp1" not in {old.kind, new.kind}:
        return f"reshard_after_forward {old.reshard_after_forward} -> {new.reshard_after_forward}"
    return f"sharding_strategy {_strategy(old)} -> {_strategy(new)}"


def _strategy(unit: UnitFacts) -> str:
    if unit.reshard_after_forward is None:
        return "NO_SHARD"
    if unit.replicate_axis is not None:
        return "HYBRID_SHARD" if unit.reshard_after_forward else "_HYBRID_SHARD_ZERO2"
    return "FULL_SHARD" if unit.reshard_after_forward else "SHARD_GRAD_OP"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """How one original parameter is distributed."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """As torch prints it without its prefix."""
    trainable: bool = True
    managed: bool = True
    placements: tuple[tuple[str, str], ...] = ()
    """Mesh axis and placement, in the order of the mesh; empty for a plain tensor."""
    tied: tuple[str, ...] = ()
    """Its further FQNs, in natural order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFacts:
    """All that is compared of one rank's tree."""

    world_size: int
    mesh_axes: tuple[MeshAxis, ...]
    """Sorted by name."""
    units: Mapping[int, Mapping[str, UnitFacts]]
    """By 1, or more where modules have several units; then by their FQNs, joined with ``+``."""
    parameters: Mapping[str, ParameterFacts]
    """By FQN."""


def tree_facts(tree: ShardTree) -> TreeFacts:
    """Select from a tree what is compared."""
    names = [tree.unit_name(index) for index in range(len(tree.units))]
    seen: Counter[str] = Counter()
    units: defaultdict[int, dict[str, UnitFacts]] = defaultdict(dict)
    for name, unit in zip(names, tree.units, strict=True):
        seen[name] += 1
        units[seen[name]][name] = _unit_facts(unit, names)
    parameters = {
        fqn: _parameter_facts(parameter, tree.tied_fqns(index))
        for index, (fqn, parameter) in enumerate(tree.named_parameters())
    }
    return TreeFacts(
        world_size=tree.world_size,
        mesh_axes=tree.mesh_axes,
        units=units,
        parameters=parameters,
    )


def _unit_facts(unit: ShardUnit, names: list[str]) -> UnitFacts:
    return UnitFacts(
        kind=unit.kind,
        is_root=unit.is_root,
        shard_axis=unit.shard_axis.name if unit.shard_axis else None,
        replicate_axis=unit.replicate_axis.name if unit.replicate_axis else None,
        reshard_after_forward=unit.reshard_after_forward,
        precision=unit.precision,
        offload=unit.offload,
        forward_prefetch=tuple(names[index] for index in unit.forward_prefetch),
        backward_prefetch=tuple(names[index] for index in unit.backward_prefetch),
        prefetch=tuple(unit.prefetch.split()),
    )


def _parameter_facts(parameter: ParameterNode, tied: tuple[str, ...]) -> ParameterFacts:
    return ParameterFacts(
        shape=parameter.shape,
        dtype=parameter.dtype,
        trainable=parameter.trainable,
        managed=parameter.unit is not None,
        placements=tuple((entry.axis, entry.text) for entry in parameter.placements),
        tied=tied,
    )
