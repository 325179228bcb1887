"""The axes over which ranks communicate, and how their groups lie among all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_fsdp_comm.text.rank_lists import write_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """A set of process groups that partition the ranks, as one axis of a device mesh does."""

    name: str
    """The axis of the device mesh (``"dp"``), ``"world"`` for the default group, or a description
    by shape that is equal on every rank and in every run. Never a counter. What was recorded is
    `printable`."""
    size: int
    """How many ranks take part."""
    dims: tuple[tuple[int, int], ...] = ()
    """How the ranks of a group lie among all ranks: size and stride of each dimension, innermost
    first. ``((4, 1),)`` is ranks 0 to 3 or 4 to 7, ``((2, 1), (2, 8))`` is 0, 1, 8, 9. Equal on
    every rank for the axes of a mesh. Empty for a group of one rank, and if they lie irregularly.
    """
    groups: tuple[tuple[int, ...], ...] = ()
    """The ranks of each group that was recorded, if they lie irregularly; otherwise empty."""

    @property
    def layout(self) -> str:
        """Size and how the ranks lie: ``4 stride 1``, ``2x2 stride 8x1``, ``3 ranks 0,3,5``."""
        if self.groups:
            return f"{self.size} ranks {' | '.join(map(write_ranks, self.groups))}"
        if not self.dims:
            return str(self.size)
        # As of a tensor, which names its outermost dimension first.
        sizes, strides = zip(*reversed(self.dims), strict=True)
        return f"{'x'.join(map(str, sizes))} stride {'x'.join(map(str, strides))}"


def axis_of(name: str, ranks: Sequence[int]) -> MeshAxis:
    """The axis of a group, by its ranks in the order of the group."""
    dims = dims_of(ranks)
    groups = () if dims is not None else (tuple(ranks),)
    return MeshAxis(name=name, size=len(ranks), dims=dims or (), groups=groups)


def dims_of(ranks: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """Find `MeshAxis.dims` of a group's ranks, in its order; None if they lie irregularly."""
    # From the innermost dimension outwards: the distance to the first rank that is not explained
    # yet is the next stride, and its size is how often all found so far repeats at that distance.
    offsets = [rank - ranks[0] for rank in ranks]
    dims = []
    inner = 1  # ranks in the dimensions found so far, which the next one repeats
    while inner < len(offsets):
        stride, size = offsets[inner], 1
        while offsets[size * inner : (size + 1) * inner] == [
            offset + size * stride for offset in offsets[:inner]
        ]:
            size += 1
        if size == 1:
            return None
        dims.append((size, stride))
        inner *= size
    return tuple(dims)


def merge_axes(axes: Iterable[MeshAxis]) -> tuple[MeshAxis, ...]:
    """Make one of equal axes, sorted by name, and one of those that lie irregularly."""
    groups: defaultdict[MeshAxis, set[tuple[int, ...]]] = defaultdict(set)
    for axis in axes:
        groups[replace(axis, groups=())].update(axis.groups)
    merged = (replace(axis, groups=tuple(sorted(found))) for axis, found in groups.items())
    return tuple(sorted(merged, key=lambda axis: (axis.name, axis.size, axis.dims)))


def show_mesh(axes: Iterable[MeshAxis]) -> str:
    """Axes with their layouts in one line: ``dp=4 stride 2, tp=2 stride 1``."""
    return ", ".join(f"{axis.name}={axis.layout}" for axis in axes) or "none"
