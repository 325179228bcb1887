"""What the readers of FSDP2, FSDP1 and DDP hand over: units and the parameters that they hold."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.tree.layout import AxisPlacement, FlatRange
from pytest_fsdp_comm.tree.model import Precision, UnitKind

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
    """One unit: a `pytest_fsdp_comm.tree.model.ShardUnit`, but with torch's own objects."""

    kind: UnitKind
    modules: tuple[int, ...]
    """Indices of the nodes."""
    held: tuple[HeldParameter, ...]
    state: object
    """Identifies the unit where another prefetches it."""
    is_root: bool
    shard_axis: MeshAxis | None
    replicate_axis: MeshAxis | None
    reshard_after_forward: bool | int | None
    precision: Precision = field(default_factory=Precision)
    offload: bool = False
    forward_prefetch: tuple[object, ...] = ()
    """States of other units."""
    backward_prefetch: tuple[object, ...] = ()
    """States of other units."""
    unshard_in_backward: bool = True
    prefetch: str = ""
    precision_overrides: tuple[str, ...] = ()
    nbytes_gathered: int = 0
    nbytes_padding: int = 0
    nbytes_kept: int = 0


@contextlib.contextmanager
def private_names(what: str) -> Iterator[None]:
    """Turns the absence of a private name into an error that says so.

    Args:
        what: What is read, as the error names it.

    Raises:
        UpstreamChangedError: An attribute was missing in the block.
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
