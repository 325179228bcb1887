"""The snapshot of a sharded tree: one record a line, siblings of equal content folded.

::

    # pytest-fsdp-comm 2 tree | torch 2.13.0, gloo (not compared)
    world_size 4
    mesh dp=4 stride 1
    unit (root) fsdp2 root shard=dp reshard_after_forward=false
    unit layers.{0..3} fsdp2 shard=dp reshard_after_forward=true param_dtype=bfloat16
    parameter embed.weight float32[512,64] dp=Shard(0) tied=head.weight
    parameter layers.{0..3}.mlp.weight float32[64,64] dp=Shard(0)
    total 5 units, 5 parameters
    end

Bytes are not written: they follow from shapes, element types and policies. Where the ranks' trees
differ, each tree is indented below a line ``ranks 0,2-3``; where they do not, such a line below the
world's size says which were recorded, if not all were.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_fsdp_comm.snapshots.lines import END, INDENT, RANKS, SnapshotLines, header, world_lines
from pytest_fsdp_comm.snapshots.records import fold_names
from pytest_fsdp_comm.snapshots.tree_reading import TreeDocument
from pytest_fsdp_comm.snapshots.tree_writing import parameter_content, tree_lines, unit_content
from pytest_fsdp_comm.text.rank_lists import write_ranks
from pytest_fsdp_comm.tree.profile import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_fsdp_comm.tree.facts import TreeFacts
    from pytest_fsdp_comm.tree.model import ShardTree
    from pytest_fsdp_comm.tree.profile import TreeProfile


def format_tree(tree: ShardTree) -> str:
    """Writes one rank's tree as a snapshot."""
    return format_profile(fold(tree))


def format_profile(profile: TreeProfile) -> str:
    """Writes a profile as a snapshot; `parse_profile` reads it."""
    lines = [header("tree", torch_version=profile.torch_version, backend=profile.backend)]
    for ranks, facts in profile.trees.items():
        if not ranks:
            return "\n".join([*lines, *_fact_lines(facts, profile.recorded_ranks)]) + "\n"
        lines.append(RANKS + write_ranks(ranks))
        lines += [INDENT + line for line in _fact_lines(facts)]
    return "\n".join([*lines, END]) + "\n"


def _fact_lines(facts: TreeFacts, recorded: Sequence[int] = ()) -> list[str]:
    return tree_lines(
        world=world_lines(facts.world_size, recorded, facts.mesh_axes),
        units={
            number: _folded((name, unit_content(unit, number)) for name, unit in units.items())
            for number, units in facts.units.items()
        },
        parameters=_folded(
            (fqn, parameter_content(parameter)) for fqn, parameter in facts.parameters.items()
        ),
        totals=(sum(map(len, facts.units.values())), len(facts.parameters)),
    )


def _folded(contents: Iterable[tuple[str, str]]) -> Mapping[str, Iterable[str]]:
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for name, content in contents:
        names_of[content].append(name)
    return fold_names(names_of)


def parse_profile(text: str, *, where: str = "snapshot") -> TreeProfile:
    """Reads what `format_profile` wrote.

    Args:
        text: The whole file.
        where: The file's path, for errors.

    Raises:
        SnapshotFormatError: A line is not as `format_profile` writes it; the text says which.
    """
    return TreeDocument(SnapshotLines(text, where=where, kind="tree")).profile()


def parse_tree(text: str, *, where: str = "snapshot") -> TreeFacts:
    """Reads what `format_tree` wrote.

    Args:
        text: The whole file.
        where: The file's path, for errors.

    Raises:
        SnapshotFormatError: As `parse_profile`, or the ranks have different trees.
    """
    lines = SnapshotLines(text, where=where, kind="tree")
    tree = TreeDocument(lines).profile().common
    if tree is None:
        raise lines.misread(2, "one tree for all ranks")
    return tree
