"""The trees of all ranks of a test: what is compared with a snapshot."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from pytest_fsdp_comm.text.rank_lists import ranks_or_empty_if_all
from pytest_fsdp_comm.tree.facts import TreeFacts, tree_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.tree.model import ShardTree


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeProfile:
    """All that is compared of how a test's ranks shard a model, and what is shown beside it."""

    trees: Mapping[tuple[int, ...], TreeFacts]
    """By the ranks that have it, ascending, lowest first; by no ranks if all have the same."""
    recorded_ranks: tuple[int, ...] = ()
    """The ranks that were recorded, ascending; empty for all ranks."""
    backend: str = field(default="", compare=False)
    """E.g. ``gloo``."""
    torch_version: str = field(default="", compare=False)
    """As ``torch.__version__``."""

    @property
    def common(self) -> TreeFacts | None:
        """The tree that all ranks have; None if they differ."""
        return self.trees.get(())

    @property
    def world_size(self) -> int:
        """Ranks of the default group."""
        return next(iter(self.trees.values())).world_size

    def restricted(self, ranks: Sequence[int]) -> TreeProfile:
        """Make the profile as if only some of its ranks had been recorded, which ascend."""
        kept = frozenset(ranks)
        trees = [
            (tuple(filter(kept.__contains__, held or ranks)), facts)
            for held, facts in self.trees.items()
        ]
        return replace(
            self,
            trees={
                ranks_or_empty_if_all(held, len(ranks)): facts
                for held, facts in sorted(trees, key=lambda tree: tree[0])
                if held
            },
            recorded_ranks=ranks_or_empty_if_all(ranks, self.world_size),
        )


def fold(tree: ShardTree) -> TreeProfile:
    """Select from one rank's tree what is compared."""
    return merge(
        {tree.rank: tree_facts(tree)}, backend=tree.backend, torch_version=tree.torch_version
    )


def merge(
    trees: Mapping[int, TreeFacts], *, backend: str = "", torch_version: str = ""
) -> TreeProfile:
    """Merge the trees of the recorded ranks, which ascend; equal ones become one."""
    # Ranks with the same tree may share one object, which is then looked at once.
    contents = {key: _content(facts) for key, facts in _distinct(trees).items()}
    groups: dict[Hashable, tuple[TreeFacts, list[int]]] = {}
    for rank, facts in trees.items():
        groups.setdefault(contents[id(facts)], (facts, []))[1].append(rank)
    return TreeProfile(
        trees={ranks_or_empty_if_all(ranks, len(trees)): facts for facts, ranks in groups.values()},
        recorded_ranks=ranks_or_empty_if_all(tuple(trees), next(iter(trees.values())).world_size),
        backend=backend,
        torch_version=torch_version,
    )


def _distinct(trees: Mapping[int, TreeFacts]) -> dict[int, TreeFacts]:
    """Each object once, by its id."""
    return {id(facts): facts for facts in trees.values()}


def _content(facts: TreeFacts) -> Hashable:
    """Equal for equal trees: many are told apart without comparing each with each."""
    return (
        facts.world_size,
        facts.mesh_axes,
        frozenset((number, frozenset(units.items())) for number, units in facts.units.items()),
        frozenset(facts.parameters.items()),
    )


def ranks_of_stages(trees: Mapping[int, TreeFacts]) -> list[list[int]]:
    """Group ranks by the pipeline stage that they run; without a pipeline there is one group."""
    # Ranks of a stage have a parameter name in common, or are linked by others that do. Both ranks
    # and groups ascend.
    names_of = {key: frozenset(facts.parameters) for key, facts in _distinct(trees).items()}
    alike: dict[frozenset[str], list[int]] = {}
    for rank, facts in trees.items():
        alike.setdefault(names_of[id(facts)], []).append(rank)
    stages: list[tuple[frozenset[str], list[int]]] = []
    for names, ranks in alike.items():
        linked = [stage for stage in stages if not stage[0].isdisjoint(names)]
        stages = [stage for stage in stages if stage not in linked]
        all_names = names.union(*(own for own, _ in linked))
        stages.append((all_names, sorted(chain(ranks, *(own for _, own in linked)))))
    return sorted(ranks for _, ranks in stages)
