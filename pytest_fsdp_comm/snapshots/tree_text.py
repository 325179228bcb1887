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
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.snapshots.lines import END, INDENT, RANKS, header, world_lines
from pytest_fsdp_comm.snapshots.records import folded_lines
from pytest_fsdp_comm.text.fqn import escape
from pytest_fsdp_comm.text.rank_lists import write_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_fsdp_comm.tree.facts import ParameterFacts, TreeFacts, UnitFacts
    from pytest_fsdp_comm.tree.profile import TreeProfile

PRECISION_WORDS: Final = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
"""The element types of a `Precision`, each a word of a unit's line where it is not None."""


def format_profile(profile: TreeProfile) -> str:
    """Writes a profile as a snapshot; `tree_reading.read_tree` reads it."""
    lines = [header("tree", torch_version=profile.torch_version, backend=profile.backend)]
    for ranks, facts in profile.trees.items():
        if not ranks:
            return "\n".join([*lines, *tree_lines(facts, profile.recorded_ranks)]) + "\n"
        lines.append(RANKS + write_ranks(ranks))
        lines += [INDENT + line for line in tree_lines(facts)]
    return "\n".join([*lines, END]) + "\n"


def tree_lines(facts: TreeFacts, recorded: Sequence[int] = ()) -> list[str]:
    """All lines of one tree but the first.

    Args:
        facts: The tree.
        recorded: The ranks that were recorded, ascending; empty for all ranks, and where each tree
            stands below its own.
    """
    units = (
        line
        for number in sorted(facts.units)
        for line in _folded(
            (name, unit_content(unit, number)) for name, unit in facts.units[number].items()
        )
    )
    parameters = _folded((fqn, parameter_content(one)) for fqn, one in facts.parameters.items())
    # So that a lost line is noticed.
    totals = sum(map(len, facts.units.values())), len(facts.parameters)
    return [
        *world_lines(facts.world_size, recorded, facts.mesh_axes),
        *(f"unit {line}" for line in units),
        *(f"parameter {line}" for line in parameters),
        f"total {totals[0]} units, {totals[1]} parameters",
        END,
    ]


def _folded(contents: Iterable[tuple[str, str]]) -> list[str]:
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for name, content in contents:
        names_of[content].append(name)
    return folded_lines(names_of)


def unit_content(unit: UnitFacts, number: int) -> str:
    """What a line says of a unit, the given one of those of its modules."""
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


def parameter_content(parameter: ParameterFacts) -> str:
    """What a line says of a parameter."""
    words = [f"{parameter.dtype}[{','.join(map(str, parameter.shape))}]"]
    words += [] if parameter.trainable else ["frozen"]
    words += [] if parameter.managed else ["unmanaged"]
    words += [f"{escape(axis)}={placement}" for axis, placement in parameter.placements]
    words += [f"tied={','.join(map(escape, parameter.tied))}"] if parameter.tied else []
    return " ".join(words)
