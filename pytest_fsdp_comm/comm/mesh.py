"""Describe the axes over which ranks communicate, and the ranks of their process groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pytest_fsdp_comm.text.rank_lists import write_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """A set of process groups that partition the ranks, like one axis of a device mesh."""

    name: str
    """The name in the device mesh (``"dp"``), ``"world"`` for the default group, or a description
    of the layout. All ranks and runs use the same name. Unprintable characters are escaped."""
    size: int
    """Number of ranks in each group."""
    dims: tuple[tuple[int, int], ...] = ()
    """Size and stride of each dimension of a group, innermost first: ``((4, 1),)`` for ranks 0 to 3
    or 4 to 7, ``((2, 1), (2, 8))`` for ranks 0, 1, 8 and 9. All groups of a mesh axis have equal
    dims. Empty for a group of one rank, and for ranks that do not form a regular pattern."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The ranks of each recorded group, if `dims` cannot describe them; otherwise empty."""
    num_groups: int = field(default=1, compare=False)
    """The number of process groups with the same ranks that collectives used, at most over all
    ranks. It does not tell one axis from another, so profiles compare it with `group_counts`."""

    @property
    def layout(self) -> str:
        """The layout as text: ``4 stride 1``, ``2x2 stride 8x1`` or ``3 ranks 0,3,5``."""
        if self.groups:
            return f"{self.size} ranks {' | '.join(map(write_ranks, self.groups))}"
        if not self.dims:
            return str(self.size)
        # Outermost dimension first, as torch prints the shape of a tensor.
        sizes, strides = zip(*reversed(self.dims), strict=True)
        return f"{'x'.join(map(str, sizes))} stride {'x'.join(map(str, strides))}"


def axis_of(name: str, ranks: Sequence[int]) -> MeshAxis:
    """Return the axis of a process group; `ranks` must be in group order."""
    dims = dims_of(ranks)
    groups = () if dims is not None else (tuple(ranks),)
    return MeshAxis(name=name, size=len(ranks), dims=dims or (), groups=groups)


def dims_of(ranks: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """Return the `MeshAxis.dims` of ranks in group order; None if they form no regular pattern."""
    # Work outwards from the innermost dimension. The next stride is the distance to the first rank
    # not covered so far; the next size is how often the covered ranks repeat at that distance.
    offsets = [rank - ranks[0] for rank in ranks]
    dims = []
    inner = 1  # number of ranks covered so far
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


def first_rank_of_group(axis: MeshAxis, rank: int) -> int:
    """Return the first rank of the group of `rank`, if the axis divides all ranks into groups."""
    # Not for groups such as ranks 1 and 2, which are not aligned: see `is_aligned`.
    return rank - sum(rank // stride % size * stride for size, stride in axis.dims)


def is_aligned(axis: MeshAxis, ranks: Sequence[int]) -> bool:
    """Return whether `first_rank_of_group` finds the first of these ranks for each of them."""
    return not axis.groups and all(first_rank_of_group(axis, rank) == ranks[0] for rank in ranks)


def merge_axes(axes: Iterable[MeshAxis]) -> tuple[MeshAxis, ...]:
    """Merge equal axes, and axes that differ only in their groups; sort them by name."""
    groups: defaultdict[MeshAxis, set[tuple[int, ...]]] = defaultdict(set)
    counts: defaultdict[MeshAxis, int] = defaultdict(int)
    for axis in axes:
        key = replace(axis, groups=())
        groups[key].update(axis.groups)
        counts[key] = max(counts[key], axis.num_groups)
    merged = (
        replace(axis, groups=tuple(sorted(ranks)), num_groups=counts[axis])
        for axis, ranks in groups.items()
    )
    return tuple(sorted(merged, key=lambda axis: (axis.name, axis.size, axis.dims)))


def group_counts(axes: Iterable[MeshAxis]) -> dict[MeshAxis, int]:
    """Return `MeshAxis.num_groups` of each axis, to compare it."""
    return {axis: axis.num_groups for axis in axes}


def name_mesh_change(old: Iterable[MeshAxis], new: Iterable[MeshAxis]) -> str:
    """Return what changed: the mesh, or, if names differ, perhaps only which axes are used."""
    before, after = ({axis.name for axis in axes} for axes in (old, new))
    return "mesh" if before == after else "mesh axes in use"


def show_mesh(axes: Iterable[MeshAxis]) -> str:
    """Format the axes and their layouts on one line: ``dp=4 stride 2, tp=2 stride 1``."""
    return ", ".join(f"{axis.name}={axis.layout}" for axis in axes) or "none"
