"""The lines of a tree's snapshot, for the writer, and for the reader to check itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.snapshots.lines import END
from pytest_fsdp_comm.snapshots.records import sort_folded
from pytest_fsdp_comm.text.fqn import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_fsdp_comm.tree.facts import ParameterFacts, UnitFacts

PRECISION_WORDS: Final = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
"""The element types of a `Precision`, each a word of a unit's line where it is not None."""


def tree_lines(
    *,
    world: Sequence[str],
    units: Mapping[int, Mapping[str, Iterable[str]]],
    parameters: Mapping[str, Iterable[str]],
    totals: tuple[int, int],
) -> list[str]:
    """All lines of one tree but the first.

    Args:
        world: As `lines.world_lines`.
        units: Folded names of each content, by `TreeFacts.units`' number.
        parameters: Folded names of each content.
        totals: How many units and parameters there are, so that a lost line is noticed.
    """
    return [
        *world,
        *(
            f"unit {pattern} {words}"
            for number in sorted(units)
            for pattern, words in sort_folded(units[number])
        ),
        *(f"parameter {pattern} {words}" for pattern, words in sort_folded(parameters)),
        f"total {totals[0]} units, {totals[1]} parameters",
        END,
    ]


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
