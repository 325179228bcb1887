"""The modules as a tree, with the bytes of each over each axis in each phase."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import restrict
from pytest_fsdp_comm.text.fqn import NO_MODULE, ROOT_TEXT, fold_fqns, natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_fsdp_comm.comm.profile import CommProfile

Column: TypeAlias = tuple[str, str]
"""Axis and phase."""

_MAX_ROWS: Final = 250
_MAX_DEPTH: Final = 12
_PHASES: Final = {phase.value: place for place, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCell:
    """What modules send over an axis in a phase, bytes on one rank."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module, or several that are alike."""

    name: str
    """Pattern of its name in the row above; ``(root)`` for the root."""
    depth: int
    count: int
    """How many modules share the row."""
    is_part: bool
    """Whether it is what a module with rows below it sends itself."""
    cells: tuple[ModuleCell | None, ...]
    """For each column, with what is below; None where nothing is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """All modules that send something."""

    columns: tuple[Column, ...]
    axes: tuple[tuple[str, int], ...]
    """Each axis, and how many columns it has."""
    rows: tuple[ModuleRow, ...]
    left_out: int
    """Rows beyond those that are shown."""
    of_rank: str
    """Whose numbers they are; empty if all ranks have the same."""


@dataclass(slots=True)
class _Node:
    cells: dict[Column, list[int]] = field(default_factory=dict)
    """Bytes before and after."""
    children: dict[str, _Node] = field(default_factory=dict)

    def total(self) -> dict[Column, list[int]]:
        sums: defaultdict[Column, list[int]] = defaultdict(lambda: [0, 0])
        parts = [self.cells, *(child.total() for child in self.children.values())]
        for cells in parts:
            for column, (before, after) in cells.items():
                sums[column][0] += before
                sums[column][1] += after
        return sums


def module_table(old: CommProfile, new: CommProfile) -> ModuleTable:
    """Adds up what modules send.

    Args:
        old: The snapshot, as `comm.diff.comparable` leaves it; `new` if there is none.
        new: What was recorded.
    """
    differ = any(row.ranks for profile in (old, new) for row in profile.collectives)
    of_rank = ""
    if differ:
        rank = (new.recorded_ranks or (0,))[0]
        of_rank = name_ranks((rank,))
        old, new = restrict(old, (rank,)), restrict(new, (rank,))
    root = _Node()
    for side, profile in enumerate((old, new)):
        for row in profile.collectives:
            column = (row.axis, row.phase.value)
            _place(root, row.owner).cells.setdefault(column, [0, 0])[side] += row.nbytes
    columns = tuple(sorted(root.total(), key=lambda column: (column[0], _PHASES[column[1]])))
    rows = list(_rows(root, columns))
    counts: defaultdict[str, int] = defaultdict(int)
    for axis, _ in columns:
        counts[axis] += 1
    return ModuleTable(
        columns=columns,
        axes=tuple(counts.items()),
        rows=tuple(rows[:_MAX_ROWS]),
        left_out=max(0, len(rows) - _MAX_ROWS),
        of_rank=of_rank,
    )


def _place(root: _Node, owner: str | None) -> _Node:
    if owner is None:
        return root.children.setdefault(NO_MODULE, _Node())
    # Several modules of one unit have no one place in the tree.
    names = [owner] if "+" in owner else owner.split(".") if owner else []
    for name in names:
        root = root.children.setdefault(name, _Node())
    return root


def _rows(root: _Node, columns: Sequence[Column]) -> Iterator[ModuleRow]:
    pending: list[tuple[str, int, int, _Node, bool]] = [(ROOT_TEXT, 0, 1, root, False)]
    while pending:
        name, depth, count, node, is_part = pending.pop()
        # A module that sends nothing itself, and has a single one below, is no row of its own.
        while not node.cells and depth:
            groups = _alike(node.children)
            if len(groups) != 1:
                break
            ((below, many, node),) = groups
            name, count = f"{name}.{below}", count * many
        yield ModuleRow(
            name=name,
            depth=min(depth, _MAX_DEPTH),
            count=count,
            is_part=is_part,
            cells=tuple(_cells(node.total(), columns, count)),
        )
        parts = [("itself", 1, _Node(cells=node.cells), True)] if node.cells else []
        below_it = [(*group, False) for group in _alike(node.children)]
        if below_it:
            pending += [
                (name, depth + 1, count * many, child, part)
                for name, many, child, part in reversed([*parts, *below_it])
            ]


def _cells(
    total: Mapping[Column, Sequence[int]], columns: Iterable[Column], count: int
) -> Iterator[ModuleCell | None]:
    for column in columns:
        if column in total:
            before, after = total[column]
            yield ModuleCell(before=before * count, after=after * count)
        else:
            yield None


def _alike(children: Mapping[str, _Node]) -> list[tuple[str, int, _Node]]:
    """Numbered siblings that are alike become one."""
    groups: defaultdict[tuple[bool, object], list[str]] = defaultdict(list)
    for name in sorted(children, key=lambda name: (name == NO_MODULE, natural_key(name))):
        is_numbered = name.isdecimal()
        groups[is_numbered, _key(children[name]) if is_numbered else name].append(name)
    return [
        (
            names[0] if names[0] == NO_MODULE else ",".join(fold_fqns(names)),
            len(names),
            children[names[0]],
        )
        for names in groups.values()
    ]


def _key(node: _Node) -> object:
    return (
        tuple(sorted((column, tuple(sides)) for column, sides in node.cells.items())),
        tuple(sorted((name, _key(child)) for name, child in node.children.items())),
    )
