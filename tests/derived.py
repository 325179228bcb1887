"""Derive from FSDP2's rules and the sizes of units what it sends, as `oracle.owned_lines`."""

from collections.abc import Mapping
from typing import Final

from torch.distributed.fsdp import MixedPrecisionPolicy

REDUCES_IN_OWN_TYPE: Final = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")
"""Whether gradients without a ``reduce_dtype`` are reduced in the dtype of the sharded parameter,
and partial gradients over other axes are cast first. True since torch 2.15, which also added
`param_dtype_override_fn`."""


def fsdp_lines(
    units: Mapping[str, int],
    *,
    axis: str,
    kept: str,
    replicate: tuple[str, int] | None = None,
    unreduced_batches: int = 0,
) -> list[str]:
    """Return the lines of one step: each unit is gathered in both phases, and reduced once.

    Args:
        units: Bytes by unit.
        axis: The axis of the shards.
        kept: The unit that stays gathered between forward and backward.
        replicate: The axis of the replicas, and the number of shards.
        unreduced_batches: Number of micro-batches whose gradients are only accumulated.
    """
    lines = []
    for unit, nbytes in units.items():
        batch = [f"forward {unit} all_gather[{axis}] {nbytes}"]
        if unit != kept:
            batch.append(f"backward {unit} all_gather[{axis}] {nbytes}")
        lines += batch * (1 + unreduced_batches)
        lines.append(f"backward {unit} reduce_scatter[{axis}] {nbytes}")
        if replicate:
            lines.append(f"backward {unit} all_reduce[{replicate[0]}] {nbytes // replicate[1]}")
    return lines
