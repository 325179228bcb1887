"""The facts about a sharded model that are compared, for one rank and merged over all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.text.rank_lists import ranks_or_empty_if_all
from pytest_fsdp_comm.tree.model import Precision, ShardTree, ShardUnit, UnitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """The compared facts about a `ShardUnit`; they refer to axes and other units by name."""

    kind: UnitKind
    is_root: bool = False
    shard_axis: str | None = None
    replicate_axis: str | None = None
    reshard_after_forward: bool | int | None = None
    precision: Precision = field(default_factory=Precision)
    offload: bool = False
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()
    prefetch: tuple[str, ...] = ()

    @property
    def has_parameters(self) -> bool:
        """Whether the unit manages parameters; only then, it has axes."""
        return bool(self.shard_axis or self.replicate_axis)


def policy_change(old: UnitFacts, new: UnitFacts) -> str:
    """Describe how a unit's resharding after forward changed; empty if it did not."""
    # Use each API's term. In FSDP1, the sharding strategy decides whether a unit reshards.
    if old.reshard_after_forward == new.reshard_after_forward:
        return ""
    if "fsdp1" not in {old.kind, new.kind}:
        return f"reshard_after_forward {old.reshard_after_forward} -> {new.reshard_after_forward}"
    return f"sharding_strategy {_sharding_strategy_name(old)} -> {_sharding_strategy_name(new)}"


def lost_root(old: TreeFacts, new: TreeFacts) -> str:
    """Return the likely reason why units below the root became roots; empty if no unit did."""
    before, after = old.units.get(1, {}), new.units.get(1, {})
    roots = new_roots(old, new)
    if "" not in before or not roots:
        return ""
    rest = "each unit below becomes a root"
    if "" in after:
        return f"the root's forward is not called, so {rest}"
    if any(not new.parameters.get(name, was).managed for name, was in old.parameters.items()):
        rest = f"its parameters are not sharded, FSDP does not reduce their gradients, and {rest}"
    elif any(policy_change(before[name], after[name]) for name in roots):
        rest += " and keeps its parameters after forward"
    call = "FullyShardedDataParallel" if before[""].kind == "fsdp1" else "fully_shard"
    return f"{call} on the root is missing: {rest}"


def new_roots(old: TreeFacts, new: TreeFacts) -> frozenset[str]:
    """Return the units that are in both trees, but are roots only in the new one."""
    before, after = old.units.get(1, {}), new.units.get(1, {})
    return frozenset(
        name
        for name in before.keys() & after.keys()
        if after[name].is_root > before[name].is_root and after[name].kind == before[name].kind
    )


def _sharding_strategy_name(unit: UnitFacts) -> str:
    if unit.reshard_after_forward is None:
        return "NO_SHARD"
    if unit.replicate_axis is not None:
        return "HYBRID_SHARD" if unit.reshard_after_forward else "_HYBRID_SHARD_ZERO2"
    return "FULL_SHARD" if unit.reshard_after_forward else "SHARD_GRAD_OP"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """The compared facts about a `ParameterNode`."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    managed: bool = True
    placements: tuple[tuple[str, str], ...] = ()
    """Each mesh axis and the placement on it, in mesh order; empty for a plain tensor."""
    tied: tuple[str, ...] = ()
    """The other FQNs of a tied parameter, in natural order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFacts:
    """The compared facts of one rank's tree."""

    world_size: int
    mesh_axes: tuple[MeshAxis, ...]
    units: Mapping[int, Mapping[str, UnitFacts]]
    """Units, keyed by number, then by name. The units of one module are numbered from 1."""
    parameters: Mapping[str, ParameterFacts]
    """Parameters, keyed by FQN."""

    @property
    def is_distributed(self) -> bool:
        """Whether the tree has units or DTensor parameters, sharded or replicated."""
        return bool(self.units) or any(one.placements for one in self.parameters.values())


def tree_facts(tree: ShardTree) -> TreeFacts:
    """Return the compared facts of a tree."""
    names = [tree.unit_name(index) for index in range(len(tree.units))]
    counts: Counter[str] = Counter()
    units: defaultdict[int, dict[str, UnitFacts]] = defaultdict(dict)
    for name, unit in zip(names, tree.units, strict=True):
        counts[name] += 1
        units[counts[name]][name] = _make_unit_facts(unit, names)
    parameters = {
        fqn: ParameterFacts(
            shape=parameter.shape,
            dtype=parameter.dtype,
            trainable=parameter.trainable,
            managed=parameter.unit is not None,
            placements=tuple((entry.axis, entry.text) for entry in parameter.placements),
            tied=tree.tied_fqns(index),
        )
        for index, (fqn, parameter) in enumerate(tree.named_parameters())
    }
    return TreeFacts(
        world_size=tree.world_size, mesh_axes=tree.mesh_axes, units=units, parameters=parameters
    )


def _make_unit_facts(unit: ShardUnit, names: list[str]) -> UnitFacts:
    return UnitFacts(
        kind=unit.kind,
        is_root=unit.is_root,
        shard_axis=unit.shard_axis.name if unit.shard_axis else None,
        replicate_axis=unit.replicate_axis.name if unit.replicate_axis else None,
        reshard_after_forward=unit.reshard_after_forward,
        precision=unit.precision,
        offload=unit.offload,
        gradient_divide_factor=unit.gradient_divide_factor,
        force_sum_reduction=unit.force_sum_reduction,
        forward_prefetch=tuple(names[index] for index in unit.forward_prefetch),
        backward_prefetch=tuple(names[index] for index in unit.backward_prefetch),
        prefetch=tuple(unit.prefetch.split()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeProfile:
    """The compared facts of a test's ranks; the backend and the torch version are only printed."""

    trees: Mapping[tuple[int, ...], TreeFacts]
    """Each distinct tree, keyed by the ranks that have it, ascending, or by ``()`` if all ranks
    have the same tree. Sorted by lowest rank."""
    recorded_ranks: tuple[int, ...] = ()
    """The ranks that were recorded, ascending; empty for all ranks."""
    backend: str = field(default="", compare=False)
    torch_version: str = field(default="", compare=False)

    @property
    def common(self) -> TreeFacts | None:
        """The tree that all ranks have; None if ranks have different trees."""
        return self.trees.get(())

    def union(self) -> TreeFacts | None:
        """Return one tree with the units and parameters of all ranks; None if ranks disagree."""
        first, *others = self.trees.values()
        units: dict[int, dict[str, UnitFacts]] = {}
        parameters: dict[str, ParameterFacts] = {}
        for facts in (first, *others):
            for number, named_units in facts.units.items():
                units[number] = {**named_units, **units.get(number, {})}
            parameters = {**facts.parameters, **parameters}
        for facts in others:
            shares_units = all(
                units[number].items() >= named_units.items()
                for number, named_units in facts.units.items()
            )
            if not (shares_units and parameters.items() >= facts.parameters.items()):
                return None
        return replace(first, units=units, parameters=parameters)

    @property
    def world_size(self) -> int:
        return next(iter(self.trees.values())).world_size

    def restrict(self, ranks: Sequence[int]) -> TreeProfile:
        """Return the profile of only these ranks, which must be in ascending order."""
        subset = frozenset(ranks)
        trees = [
            (tuple(filter(subset.__contains__, having or ranks)), facts)
            for having, facts in self.trees.items()
        ]
        return replace(
            self,
            trees={
                ranks_or_empty_if_all(having, len(ranks)): facts
                for having, facts in sorted(trees, key=lambda tree: tree[0])
                if having
            },
            recorded_ranks=ranks_or_empty_if_all(ranks, self.world_size),
        )


def restrict_to_ranks_of(old: TreeProfile, new: TreeProfile) -> TreeProfile:
    """Return `old`; if only `new` is limited to some ranks, restrict `old` to these ranks."""
    is_part = new.recorded_ranks and not old.recorded_ranks
    return old.restrict(new.recorded_ranks) if is_part else old


def fold(tree: ShardTree) -> TreeProfile:
    """Return the profile of a single rank's tree."""
    return merge(
        {tree.rank: tree_facts(tree)}, backend=tree.backend, torch_version=tree.torch_version
    )


def merge(
    trees: Mapping[int, TreeFacts], *, backend: str = "", torch_version: str = ""
) -> TreeProfile:
    """Merge the trees of all recorded ranks; `trees` is keyed by rank, in ascending order."""
    # Ranks with equal trees often share one object, so compute its content only once.
    distinct = {id(facts): facts for facts in trees.values()}
    contents = {key: _make_content_key(facts) for key, facts in distinct.items()}
    groups: dict[Hashable, tuple[TreeFacts, list[int]]] = {}
    for rank, facts in trees.items():
        groups.setdefault(contents[id(facts)], (facts, []))[1].append(rank)
    return TreeProfile(
        trees={ranks_or_empty_if_all(ranks, len(trees)): facts for facts, ranks in groups.values()},
        recorded_ranks=ranks_or_empty_if_all(tuple(trees), next(iter(trees.values())).world_size),
        backend=backend,
        torch_version=torch_version,
    )


def _make_content_key(facts: TreeFacts) -> Hashable:
    """Return a dictionary key that is the same for equal trees."""
    return (
        facts.world_size,
        facts.mesh_axes,
        frozenset((number, frozenset(units.items())) for number, units in facts.units.items()),
        frozenset(facts.parameters.items()),
    )


def ranks_of_stages(trees: Mapping[int, TreeFacts]) -> list[list[int]]:
    """Group ranks by the pipeline stage that they run; without a pipeline, return one group."""
    # Two ranks run the same stage if they share a parameter name, directly or through other ranks.
    # Ranks and groups are in ascending order.
    distinct = {id(facts): facts for facts in trees.values()}
    names_of = {key: frozenset(facts.parameters) for key, facts in distinct.items()}
    by_names: dict[frozenset[str], list[int]] = {}
    for rank, facts in trees.items():
        by_names.setdefault(names_of[id(facts)], []).append(rank)
    stages: list[tuple[frozenset[str], list[int]]] = []
    for names, ranks in by_names.items():
        linked = [stage for stage in stages if not stage[0].isdisjoint(names)]
        stages = [stage for stage in stages if stage not in linked]
        all_names = names.union(*(stage_names for stage_names, _ in linked))
        all_ranks = chain(ranks, *(stage_ranks for _, stage_ranks in linked))
        stages.append((all_names, sorted(all_ranks)))
    return sorted(ranks for _, ranks in stages)
