"""What units cost in a step, and from when on it pays to have more of them, or fewer.

A collective costs its latency however little it carries: as much as the bytes that the link carries
in that time, latency times bandwidth. `Thresholds.small_nbytes` is this number of bytes; a change
pays if it saves more bytes than the collectives that it adds would cost.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pytest_fsdp_comm.tree.findings.thresholds import Thresholds
    from pytest_fsdp_comm.tree.model import ParameterNode, ShardTree, ShardUnit

_SMALL_SHARE: Final = 16


def is_negligible(nbytes: int, among: int) -> bool:
    """Whether something is less than a sixteenth of the largest that it stands beside."""
    return nbytes * _SMALL_SHARE < among


def is_too_small(nbytes: int, largest: int, thresholds: Thresholds) -> bool:
    """Whether a unit that gathers so much costs latency, not bandwidth.

    Args:
        nbytes: What it gathers.
        largest: What the largest unit of the tree gathers: beside small ones none is too small.
        thresholds: As the project sets them.
    """
    return nbytes < thresholds.small_nbytes and is_negligible(nbytes, largest)


def gain_nbytes(saved_nbytes: int, collectives: int, thresholds: Thresholds) -> int:
    """What is left of bytes saved in a step for what the collectives that this adds cost."""
    return saved_nbytes - collectives * thresholds.small_nbytes


def largest_gather(tree: ShardTree) -> int:
    """Bytes of the largest all-gather."""
    return max((unit.nbytes_gathered for unit in tree.units), default=0)


def is_trainable(tree: ShardTree, unit: ShardUnit) -> bool:
    """Whether any parameter of a unit is."""
    return any(tree.parameters[index].trainable for index in unit.parameters)


def gathers(unit: ShardUnit) -> int:
    """How often a step gathers a unit: in forward, and again in backward if it is freed between."""
    return 2 if unit.reshard_after_forward and unit.unshard_in_backward else 1


def reductions(unit: ShardUnit) -> int:
    """How many collectives reduce a unit's gradients: one more where copies of it exist."""
    return 1 if unit.replicate_axis is None else 2


def itemsize(dtype: str) -> int:
    """Bytes of one element, from the number in the name of its type: ``bfloat16``."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def gathered_nbytes(parameter: ParameterNode, unit: ShardUnit) -> int:
    """Bytes that gathering a parameter once takes, padding not counted."""
    return parameter.numel * itemsize(unit.precision.param_dtype or parameter.dtype)


def reduced_nbytes(parameter: ParameterNode, unit: ShardUnit) -> int:
    """Bytes that reducing a parameter's gradient takes, padding not counted."""
    precision = unit.precision
    dtype = precision.reduce_dtype or precision.param_dtype or parameter.dtype
    return parameter.numel * itemsize(dtype)
