"""What the readers of FSDP2, FSDP1 and DDP hand over: units and the parameters that they hold."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.distributed.tensor import DTensor

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.sharding.dtensor import local_tensor
from pytest_fsdp_comm.tree.layout import AxisPlacement, FlatRange
from pytest_fsdp_comm.tree.model import Precision, ShardUnit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

Slot = tuple[int, str]
"""Where a parameter is registered: index of the module, and its name there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """How a unit holds one original parameter."""

    slots: tuple[Slot, ...]
    """Where it is registered, the unit's own choice first."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    placements: tuple[AxisPlacement, ...]
    local_numel: int
    device: str
    flat: FlatRange | None = None
    origin: object = None
    """Equal for parameters that were one tensor before sharding; None where torch forgets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadUnit:
    """One unit, with torch's own objects where the tree has indices."""

    unit: ShardUnit
    """Without its parameters, and without the units that it prefetches."""
    held: tuple[HeldParameter, ...]
    state: object
    """Identifies the unit where another prefetches it."""
    forward_prefetch: tuple[object, ...] = ()
    """States of other units."""
    backward_prefetch: tuple[object, ...] = ()
    """States of other units."""


UNGATHERED: Final = ShardUnit(
    kind="ddp",
    modules=(),
    parameters=(),
    is_root=True,
    shard_axis=None,
    replicate_axis=None,
    reshard_after_forward=None,
    precision=Precision(),
    offload=False,
    nbytes_gathered=0,
    nbytes_padding=0,
    nbytes_kept=0,
)
"""What units that gather nothing have in common."""


def hold(
    tensor: torch.Tensor,
    placements: tuple[AxisPlacement, ...] = (),
    *,
    slots: tuple[Slot, ...] = (),
    origin: object = None,
) -> HeldParameter:
    """Describe a parameter that is a plain tensor or a DTensor.

    Args:
        tensor: What is registered.
        placements: One for each axis of its mesh.
        slots: As in `HeldParameter`, like `origin`.
        origin: Likewise.
    """
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return HeldParameter(
        slots=slots,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        trainable=tensor.requires_grad,
        placements=placements,
        local_numel=local.numel(),
        device=local.device.type,
        origin=origin,
    )


@contextlib.contextmanager
def private_names(what: str) -> Iterator[None]:
    """Turn an attribute that is missing in the block into an error that names `what` is read.

    Raises:
        UpstreamChangedError: An attribute was missing.
    """
    try:
        yield
    except AttributeError as missing:
        raise upstream.misread("torch", f"{what} that fsdp_tree reads", missing) from missing


def shown_dtype(dtype: torch.dtype | None) -> str | None:
    """As torch prints it without its prefix; None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def member_indices(modules: tuple[nn.Module, ...], index_of: Mapping[int, int]) -> tuple[int, ...]:
    """The nodes of a unit's modules; those outside the tree are left out."""
    return tuple(dict.fromkeys(index_of[id(m)] for m in modules if id(m) in index_of))
