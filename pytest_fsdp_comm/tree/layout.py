"""How many elements of a sharded tensor each rank keeps: the arithmetic of DTensor and FSDP1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """What one axis of the device mesh does to a tensor."""

    axis: str
    """Name of the mesh axis, as in `pytest_fsdp_comm.comm.mesh.MeshAxis`."""
    size: int
    """Ranks along the axis."""
    kind: Literal["shard", "strided_shard", "flat_shard", "replicate", "partial", "other"]
    """``strided_shard`` is FSDP over a dimension that tensor parallelism splits too: the axes to
    the right split first. ``flat_shard`` is FSDP1: a range of the flattened unit."""
    dim: int | None = None
    """The tensor's dimension that is split; None unless `kind` is a shard of a dimension."""
    text: str
    """As people write it: ``Shard(0)``, ``StridedShard(0,2)``, ``FlatShard()``, ``Replicate()``."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank along the axis keeps only a shard."""
        return self.kind in {"shard", "strided_shard", "flat_shard"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRange:
    """Where a parameter lies in the flat parameter of its FSDP1 unit."""

    start: int
    """Elements before it."""
    shard_numel: int
    """Elements of each rank's shard of the flat parameter, padding included."""


def shard_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Splits a dimension as ``torch.chunk`` does, with empty parts where torch returns fewer."""
    chunk = math.ceil(size / parts)
    return tuple(max(0, min(chunk, size - chunk * part)) for part in range(parts))


def local_shape(
    shape: Sequence[int], placements: Sequence[AxisPlacement], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The shape that the rank at one mesh coordinate keeps, without padding.

    Args:
        shape: Global shape.
        placements: One for each axis of the mesh.
        coordinate: The rank's place along each axis.
    """
    sizes = list(shape)
    axes = list(zip(placements, coordinate, strict=True))
    # A strided shard splits what the axes to its right have left of the tensor.
    order = [axis for axis in axes if axis[0].kind != "strided_shard"]
    order += [axis for axis in reversed(axes) if axis[0].kind == "strided_shard"]
    for placement, place in order:
        if placement.dim is not None:
            sizes[placement.dim] = shard_sizes(sizes[placement.dim], placement.size)[place]
    return tuple(sizes)


def local_numels(
    shape: Sequence[int], placements: Sequence[AxisPlacement], flat: FlatRange | None
) -> tuple[int, ...]:
    """Elements that each rank of the mesh keeps, without padding.

    Returns:
        One number for each mesh coordinate, the last axis running fastest; a single one without a
        mesh.
    """
    axes = [range(placement.size) for placement in placements]
    if flat is None:
        return tuple(
            math.prod(local_shape(shape, placements, coordinate)) for coordinate in product(*axes)
        )
    kept = [
        _overlap(flat, math.prod(shape), part)
        for placement in placements
        if placement.kind == "flat_shard"
        for part in range(placement.size)
    ]
    sharded = [place for place, entry in enumerate(placements) if entry.kind == "flat_shard"]
    return tuple(kept[coordinate[sharded[0]]] for coordinate in product(*axes))


def _overlap(flat: FlatRange, numel: int, part: int) -> int:
    first = max(flat.start, part * flat.shard_numel)
    end = min(flat.start + numel, (part + 1) * flat.shard_numel)
    return max(0, end - first)
