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

Bytes are not written: they follow from shapes, element types and policies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pytest_fsdp_comm.document import END, header
from pytest_fsdp_comm.fqn import escape, expand, fold_fqns, natural_key
from pytest_fsdp_comm.tree_facts import ParameterFacts, TreeFacts, UnitFacts, tree_facts
from pytest_fsdp_comm.tree_reading import PRECISION_WORDS, TreeReader, total_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_fsdp_comm.tree import ShardTree

_Content = TypeVar("_Content")


def format_tree(tree: ShardTree) -> str:
    """Writes what a snapshot holds of a tree, with a first line that is not compared."""
    first = header("tree", torch_version=tree.torch_version, backend=tree.backend)
    return "\n".join([first, *_fact_lines(tree_facts(tree))]) + "\n"


def _fact_lines(facts: TreeFacts) -> Iterator[str]:
    yield f"world_size {facts.world_size}"
    yield " ".join(["mesh", *(f"{escape(axis.name)}={axis.size}" for axis in facts.mesh_axes)])
    units = {
        (name, number): _unit_words(unit, number) for (name, number), unit in facts.units.items()
    }
    for number in sorted({number for _, number in units}):
        same = {name: words for (name, at), words in units.items() if at == number}
        yield from (f"unit {pattern} {words}" for pattern, words in _folded(same))
    parameters = {fqn: _parameter_words(entry) for fqn, entry in facts.parameters.items()}
    yield from (f"parameter {pattern} {words}" for pattern, words in _folded(parameters))
    yield f"total {total_text(len(facts.units), len(facts.parameters))}"
    yield END


def _folded(contents: Mapping[str, _Content]) -> Iterator[tuple[str, _Content]]:
    """Folds the names of equal content, in natural order of the first name of each line."""
    names_of: dict[_Content, list[str]] = {}
    for name, content in contents.items():
        names_of.setdefault(content, []).append(name)
    lines = [
        (pattern, content) for content, names in names_of.items() for pattern in fold_fqns(names)
    ]
    yield from sorted(lines, key=lambda line: natural_key(next(iter(expand(line[0])))))


def _unit_words(unit: UnitFacts, number: int) -> str:
    words: list[str] = [unit.kind]
    words += [f"group={number}"] if number > 1 else []
    words += ["root"] if unit.is_root else []
    if unit.shard_axis is not None:
        words.append(f"shard={escape(unit.shard_axis)}")
    if unit.replicate_axis is not None:
        words.append(f"replicate={escape(unit.replicate_axis)}")
    if unit.reshard_after_forward is not None:
        words.append(f"reshard_after_forward={str(unit.reshard_after_forward).lower()}")
    for name in PRECISION_WORDS:
        dtype = getattr(unit.precision, name)
        words += [] if dtype is None else [f"{name}={dtype}"]
    words += [] if unit.precision.cast_forward_inputs else ["cast_forward_inputs=false"]
    words += ["offload"] if unit.offload else []
    for name in ("forward_prefetch", "backward_prefetch"):
        units = getattr(unit, name)
        words += [f"{name}={','.join(map(escape, units))}"] if units else []
    words += [f"prefetch={','.join(unit.prefetch)}"] if unit.prefetch else []
    return " ".join(words)


def _parameter_words(parameter: ParameterFacts) -> str:
    words = [f"{parameter.dtype}[{','.join(map(str, parameter.shape))}]"]
    words += [] if parameter.trainable else ["frozen"]
    words += [] if parameter.managed else ["unmanaged"]
    words += [f"{escape(axis)}={placement}" for axis, placement in parameter.placements]
    words += [f"tied={','.join(map(escape, parameter.tied))}"] if parameter.tied else []
    return " ".join(words)


def parse_tree(text: str, *, where: str = "snapshot") -> TreeFacts:
    """Reads what `format_tree` wrote; the first line counts for its format only.

    Args:
        text: The whole document.
        where: The file, as the errors shall name it.

    Raises:
        SnapshotFormatError: The text is empty, truncated, corrupted, or of another format version.
    """
    return TreeReader(where).read(text)
