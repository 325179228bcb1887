"""The snapshot of a sharded tree: one record a line, siblings of equal content folded.

::

    # pytest-fsdp-comm 1 tree | torch 2.13.0, gloo (not compared)
    world_size 4
    mesh dp=4
    unit (root) fsdp2 root shard=dp reshard_after_forward=false
    unit layers.{0..3} fsdp2 shard=dp reshard_after_forward=true param_dtype=bfloat16
    parameter embed.weight float32[512,64] dp=Shard(0) tied=head.weight
    parameter layers.{0..3}.mlp.weight float32[64,64] dp=Shard(0)
    total 5 units, 5 parameters
    end

Bytes are not written: they follow from shapes, element types and policies. Where the ranks' trees
differ, each tree is indented below a line ``ranks 0,2-3``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_fsdp_comm.snapshots.lines import END, INDENT, SnapshotLines, header, write_ranks
from pytest_fsdp_comm.snapshots.tree_reading import read_trees
from pytest_fsdp_comm.snapshots.tree_writing import parameter_words, tree_lines, unit_words
from pytest_fsdp_comm.text.fqn import fold_fqns
from pytest_fsdp_comm.tree.facts import TreeFacts, tree_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_fsdp_comm.tree.model import ShardTree


def format_tree(tree: ShardTree) -> str:
    """Writes what a snapshot holds of a tree, with a first line that is not compared."""
    first = header("tree", torch_version=tree.torch_version, backend=tree.backend)
    return "\n".join([first, *_fact_lines(tree_facts(tree))]) + "\n"


def _fact_lines(facts: TreeFacts) -> list[str]:
    units: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for (name, number), unit in facts.units.items():
        units[number][name] = unit_words(unit, number)
    parameters = {fqn: parameter_words(entry) for fqn, entry in facts.parameters.items()}
    return tree_lines(
        world_size=facts.world_size,
        mesh_axes=facts.mesh_axes,
        units={number: _folded(contents) for number, contents in units.items()},
        parameters=_folded(parameters),
        totals=(len(facts.units), len(facts.parameters)),
    )


def _folded(contents: Mapping[str, str]) -> dict[str, Iterable[str]]:
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for name, content in contents.items():
        names_of[content].append(name)
    return {content: fold_fqns(names) for content, names in names_of.items()}


def merge_tree_texts(texts: Mapping[int, str]) -> str:
    """One text if the ranks' trees are equal; otherwise each, below the ranks that have it.

    Args:
        texts: What `format_tree` writes, by rank, ascending.
    """
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, text in texts.items():
        ranks_of[text].append(rank)
    first = next(iter(ranks_of))
    if len(ranks_of) == 1:
        return first
    lines = [first.partition("\n")[0]]
    for text, ranks in ranks_of.items():
        lines.append(f"ranks {write_ranks(ranks)}")
        lines += [INDENT + line for line in text.partition("\n")[2].split("\n")[:-1]]
    return "\n".join([*lines, END]) + "\n"


def parse_tree(text: str, *, where: str = "snapshot") -> TreeFacts:
    """Reads what `format_tree` wrote; the first line counts for its format only.

    Args:
        text: The whole document.
        where: The file, as the errors shall name it.

    Raises:
        SnapshotFormatError: The text is empty, truncated, corrupted, of another format version, or
            tells the trees of ranks apart.
    """
    lines = SnapshotLines(text, where=where, kind="tree")
    trees = read_trees(lines)
    if () not in trees:
        raise lines.misread(2, "one tree for all ranks")
    return trees[()].facts()


def parse_tree_ranks(text: str, *, where: str = "snapshot") -> dict[tuple[int, ...], TreeFacts]:
    """Reads what `merge_tree_texts` wrote.

    Returns:
        The trees by the ranks that have them; by no ranks if all ranks have the same.

    Raises:
        SnapshotFormatError: The text is empty, truncated, corrupted, or of another format version.
    """
    trees = read_trees(SnapshotLines(text, where=where, kind="tree"))
    return {ranks: tree.facts() for ranks, tree in trees.items()}


def check_tree(lines: SnapshotLines) -> None:
    """Checks what `parse_tree_ranks` checks, and builds nothing.

    Raises:
        SnapshotFormatError: As there.
    """
    read_trees(lines)
