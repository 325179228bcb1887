"""What FSDP2 sends, derived from its rules and the sizes of units; as `oracle.owned_lines`."""

from collections.abc import Mapping
from typing import Final

from torch.distributed.fsdp import MixedPrecisionPolicy

REDUCES_IN_OWN_TYPE: Final = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")
"""Whether gradients without a ``reduce_dtype`` are reduced in the sharded parameter's own type, and
partial ones over other axes are cast before: since torch 2.15, where the other name is new too."""


def fsdp_lines(
    units: Mapping[str, int],
    *,
    axis: str,
    kept: str,
    replicate: tuple[str, int] | None = None,
    unreduced_batches: int = 0,
) -> list[str]:
    """Of one step: a gather in each phase, and a reduction.

    Args:
        units: Bytes of each.
        axis: Over which they are sharded.
        kept: The unit that stays gathered between forward and backward.
        replicate: The axis over which reduced gradients are reduced again, and its shards, between
            which a unit is divided.
        unreduced_batches: Micro-batches before, whose gradients are only accumulated.
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
