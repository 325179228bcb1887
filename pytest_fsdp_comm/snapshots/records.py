"""The records that both kinds of snapshots have: world, ranks and mesh; folded names; ranks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.mesh import MeshAxis, axis_of, merge_axes
from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import MAX_NAME_TEXT, MAX_RANKS, MAX_WORLD_SIZE, NUMBER
from pytest_fsdp_comm.text.fqn import (
    MAX_NAMES,
    NO_MODULE,
    escape,
    first_name,
    fold_fqns,
    natural_key,
    read_pattern,
    unescape,
)
from pytest_fsdp_comm.text.rank_lists import read_ranks, write_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_fsdp_comm.snapshots.lines import SnapshotLines

RANKS: Final = "ranks "
_WORLD_SIZE: Final = "world_size "
_MESH: Final = "mesh "
_NUMBER: Final = re.compile(NUMBER)
_SHORT_NUMBER: Final = re.compile(r"[1-9][0-9]{0,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What both kinds of snapshots say first."""

    size: int
    """Ranks of the default group."""
    ranks: tuple[int, ...]
    """Those that were recorded, ascending; empty for all ranks."""
    mesh_axes: tuple[MeshAxis, ...]
    """Sorted by name."""
    end: int
    """Number of the first line below."""


def world_lines(world_size: int, ranks: Sequence[int], axes: Iterable[MeshAxis]) -> list[str]:
    """Write world, ranks and mesh; arguments as the fields of `World`."""
    return [
        f"{_WORLD_SIZE}{world_size}",
        *([f"{RANKS}{write_ranks(ranks)}"] if ranks else []),
        *(f"{_MESH}{escape(axis.name)}={axis.layout}" for axis in axes),
    ]


def read_world(lines: SnapshotLines) -> World:
    """Read world, ranks and mesh; the caller checks them by writing them again."""
    size = lines.line(2).removeprefix(_WORLD_SIZE)
    with lines.at(2):
        is_number = _NUMBER.fullmatch(size) and int(size) <= MAX_WORLD_SIZE
        if not is_number or not lines.line(2).startswith(_WORLD_SIZE):
            raise ValueError(f"expected 'world_size <N>' with a number from 1 to {MAX_WORLD_SIZE}")
    number = 3
    ranks: tuple[int, ...] = ()
    if lines.line(number).startswith(RANKS):
        with lines.at(number):
            ranks = _read_some_ranks(lines.line(number).removeprefix(RANKS), int(size))
        number += 1
    axes: list[MeshAxis] = []
    room = MAX_RANKS
    while lines.line(number).startswith(_MESH):
        with lines.at(number):
            axes.append(_read_axis(lines.line(number).removeprefix(_MESH), int(size), room))
            keys = [(axis.name, axis.size, axis.dims) for axis in axes[-2:]]
            if keys != sorted(set(keys)):
                raise ValueError("bad axis: expected each axis and layout once, sorted by name")
        room -= sum(map(len, axes[-1].groups))
        number += 1
    return World(size=int(size), ranks=ranks, mesh_axes=tuple(axes), end=number)


def _read_some_ranks(text: str, world_size: int, recorded: Sequence[int] = ()) -> tuple[int, ...]:
    """Read ranks that stand for some of the recorded ones, which are empty for all ranks."""
    ranks = read_ranks(text, world_size)
    if len(ranks) == world_size or ranks == recorded:
        raise ValueError("it lists all ranks: expected no list, which already means all ranks")
    if recorded and not set(ranks).issubset(recorded):
        raise ValueError(
            f"ranks {quoted_part(text)} were not all recorded: expected some of "
            f"{quoted_part(write_ranks(recorded))}"
        )
    return ranks


def _read_axis(text: str, world_size: int, room: int) -> MeshAxis:
    escaped, _, layout = text.rpartition("=")
    if not escaped:
        raise ValueError(f"bad axis {quoted_part(text)}: expected <axis>=<size> stride <stride>")
    name = unescape(escaped)
    shape, _, how = layout.partition(" ")
    kind, _, rest = how.partition(" ")
    sizes = _read_sizes(shape)
    size = math.prod(sizes)
    axis: MeshAxis | None = None
    if not sizes or size > world_size:
        pass
    elif kind == "ranks" and rest:
        axis = _read_groups(name, size, rest.split(" | "), world_size, room)
    else:
        dims = tuple(zip(sizes, _read_sizes(rest), strict=False))[::-1]
        if bool(dims) == (size > 1) and _are_canonical(dims, world_size):
            axis = MeshAxis(name=name, size=size, dims=dims)
    if axis is None or axis.layout != layout:
        raise ValueError(
            f"bad layout {quoted_part(layout)}: expected '<size> stride <stride>', "
            "'<size>x<size> stride <stride>x<stride>' or '<size> ranks <ranks> | <ranks>', "
            f"with sizes up to {world_size}"
        )
    return axis


def _read_sizes(text: str) -> list[int]:
    """``2x2`` as numbers; empty if it is something else."""
    parts = text.split("x")
    return [*map(int, parts)] if all(map(_SHORT_NUMBER.fullmatch, parts)) else []


def _read_groups(
    name: str, size: int, texts: Sequence[str], world_size: int, room: int
) -> MeshAxis | None:
    """An axis whose groups lie irregularly; None if one does not, or has another size."""
    if len(texts) * size > room:
        raise ValueError(
            f"too many ranks: expected at most {MAX_RANKS} in the groups of all axes together"
        )
    groups = []
    for text in texts:
        group = axis_of(name, read_ranks(text, world_size))
        # Stop at the first: listing all ranks of each text could take minutes.
        if not group.groups or group.size != size:
            return None
        groups.append(group)
    (axis,) = merge_axes(groups)
    return axis


def _are_canonical(dims: Sequence[tuple[int, int]], world_size: int) -> bool:
    """Whether `comm.mesh.dims_of` would find these dimensions, without listing all ranks."""
    last = 0  # the largest rank so far
    for place, (size, stride) in enumerate(dims):
        # A dimension that continues the inner one is part of that.
        is_part = place > 0 and stride == dims[place - 1][0] * dims[place - 1][1]
        if size == 1 or stride <= last or is_part:
            return False
        last += (size - 1) * stride
    return last < world_size


def with_ranks(content: str, ranks: str) -> str:
    """A line's content with the ranks that share it, as they are written; empty for all ranks."""
    return f"{content} {RANKS}{ranks}" if ranks else content


def folded_lines(names_of: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Fold the names of each content, sorted naturally; None, for no module, comes last."""
    lines: list[tuple[tuple[object, ...], str]] = []
    for content, names in names_of.items():
        for pattern in fold_fqns(name for name in names if name is not None):
            key = (False, natural_key(first_name(pattern)), content)
            lines.append((key, f"{pattern} {content}"))
        if None in names:
            lines.append(((True, natural_key(""), content), f"{NO_MODULE} {content}"))
    return [line for _, line in sorted(lines)]


class RecordReader:
    """Reads names and ranks, or raises ValueError; see Note [Limits of a file]."""

    def __init__(self) -> None:
        """Count from zero: one reader for each file."""
        self._name_text = 0
        self._names = 0
        self._ranks = 0
        self._rank_lists: dict[str, tuple[int, ...]] = {"": ()}

    def names(self, text: str) -> tuple[str, ...]:
        """Read a pattern, whose names count for the whole file."""
        self._name_text += len(text)
        if self._name_text > MAX_NAME_TEXT:
            raise ValueError(f"too long: expected at most {MAX_NAME_TEXT} characters in all names")
        pattern = read_pattern(text)
        self._names += pattern.size
        if self._names > MAX_NAMES:
            raise ValueError(f"too many names: expected at most {MAX_NAMES} in all lines together")
        return pattern.expand()

    def ranks(self, text: str, world: World) -> tuple[int, ...]:
        """Read some of the recorded ranks; empty for all. Equal texts share a tuple."""
        if text not in self._rank_lists:
            self._rank_lists[text] = ranks = _read_some_ranks(text, world.size, world.ranks)
            self._ranks += len(ranks)
            if self._ranks > MAX_RANKS:
                raise ValueError(
                    f"too many ranks: expected at most {MAX_RANKS} in all lists together"
                )
        return self._rank_lists[text]

    def classes_of_ranks(self) -> Mapping[str, frozenset[int]]:
        """The ranks of each list as classes: those of one class are in the same of the lists."""
        # A file has few classes even where its lists have many ranks.
        class_of: dict[int, int] = {}
        made = 0
        for ranks in self._rank_lists.values():
            parts: dict[int | None, int] = {}
            for rank in ranks:
                old = class_of.get(rank)
                if old not in parts:
                    parts[old] = made
                    made += 1
                class_of[rank] = parts[old]
        return {
            text: frozenset(class_of[rank] for rank in ranks)
            for text, ranks in self._rank_lists.items()
        }
