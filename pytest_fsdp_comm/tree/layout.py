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


def local_numels(
    shape: Sequence[int], placements: Sequence[AxisPlacement], flat: FlatRange | None
) -> tuple[int, ...]:
    """Elements that each rank keeps, without padding; the last axis runs fastest."""
    coordinates = product(*(range(placement.size) for placement in placements))
    if flat is None:
        return tuple(_local_numel(shape, placements, place) for place in coordinates)
    end = flat.start + math.prod(shape)
    axis = [placement.kind for placement in placements].index("flat_shard")
    shards = [(place[axis] * flat.shard_numel, flat.shard_numel) for place in coordinates]
    return tuple(
        max(0, min(end, first + numel) - max(flat.start, first)) for first, numel in shards
    )


def _local_numel(
    shape: Sequence[int], placements: Sequence[AxisPlacement], coordinate: Sequence[int]
) -> int:
    sizes = list(shape)
    axes = list(zip(placements, coordinate, strict=True))
    # A strided shard splits what the axes to its right have left of the tensor.
    order = [axis for axis in axes if axis[0].kind != "strided_shard"]
    order += [axis for axis in reversed(axes) if axis[0].kind == "strided_shard"]
    for placement, place in order:
        if placement.dim is not None:
            # As torch.chunk splits, with empty parts where it returns fewer.
            size = sizes[placement.dim]
            chunk = math.ceil(size / placement.size)
            sizes[placement.dim] = max(0, min(chunk, size - chunk * place))
    return math.prod(sizes)
