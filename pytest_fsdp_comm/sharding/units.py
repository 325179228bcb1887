"""What the readers of FSDP2, FSDP1 and DDP hand over: units and the parameters that they hold."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch.distributed.tensor import DTensor

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.sharding.dtensor import local_tensor
from pytest_fsdp_comm.sharding.walk import Slot
from pytest_fsdp_comm.tree.model import ParameterNode, Precision, ShardUnit

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_fsdp_comm.tree.layout import AxisPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """One original parameter, held by a unit or by none."""

    node: ParameterNode
    """Without the place where it is registered, and without its unit."""
    slots: tuple[Slot, ...] = ()
    """Where it is registered, the unit's own choice first; empty if no unit holds it."""
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
    backward_prefetch: tuple[object, ...] = ()


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


def hold(
    tensor: torch.Tensor,
    placements: tuple[AxisPlacement, ...] = (),
    *,
    slots: tuple[Slot, ...] = (),
    origin: object = None,
) -> HeldParameter:
    """Describe a parameter that is a plain tensor or a DTensor."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    node = ParameterNode(
        module=0,
        name="",
        shape=tuple(tensor.shape),
        dtype=shown_dtype(tensor.dtype) or "",
        itemsize=tensor.dtype.itemsize,
        placements=placements,
        local_numel=local.numel(),
        trainable=tensor.requires_grad,
        device=local.device.type,
        unit=None,
    )
    return HeldParameter(node=node, slots=slots, origin=origin)


@contextlib.contextmanager
def private_names(what: str) -> Iterator[None]:
    """Raise UpstreamChangedError, which names `what`, where an attribute is missing."""
    try:
        yield
    except AttributeError as missing:
        raise upstream.misread_error("torch", f"{what} that fsdp_tree reads", missing) from missing


def shown_dtype(dtype: torch.dtype | None) -> str | None:
    """As torch prints it without its prefix; None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
