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
    from collections.abc import Iterator, Mapping

    from pytest_fsdp_comm.comm.profile import CommProfile

# Axis and phase.
Column: TypeAlias = tuple[str, str]
# Bytes on one rank before and after, and calls of unknown size.
Cell: TypeAlias = tuple[int, ...]

_PHASES: Final = {phase.value: place for place, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module, or several that are alike."""

    name: str
    """Pattern of its name in the row above; ``(root)`` for the root."""
    depth: int
    count: int
    is_part: bool
    """Whether it is what a module with rows below it sends itself."""
    cells: tuple[Cell | None, ...]
    """For each column, with what is below; None where nothing is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """All modules that send something."""

    columns: tuple[Column, ...]
    """By axis, then by phase."""
    rows: tuple[ModuleRow, ...]
    of_rank: str
    """Whose numbers they are; empty if all ranks have the same."""


def _cells() -> defaultdict[Column, list[int]]:
    return defaultdict(lambda: [0, 0, 0, 0])


@dataclass(slots=True)
class _Node:
    own: defaultdict[Column, list[int]] = field(default_factory=_cells)
    """As a `Cell`, what the module sends itself."""
    total: defaultdict[Column, list[int]] = field(default_factory=_cells)
    children: dict[str, _Node] = field(default_factory=dict)

    def key(self) -> object:
        """Equal for modules that send the same, in all that is below them too."""
        cells = sorted((column, *sides) for column, sides in self.own.items())
        below = sorted((name, child.key()) for name, child in self.children.items())
        return tuple(cells), tuple(below)


def module_table(old: CommProfile, new: CommProfile) -> ModuleTable:
    """Add up what modules send; `old` is `new` where there is no snapshot."""
    of_rank = ""
    if any(row.ranks for profile in (old, new) for row in profile.collectives):
        rank = (new.recorded_ranks or (0,))[0]
        of_rank = name_ranks((rank,))
        old, new = restrict(old, (rank,)), restrict(new, (rank,))
    root = _Node()
    for side, profile in enumerate((old, new)):
        for row in profile.collectives:
            column = (row.axis, row.phase.value)
            node, cells = root, [root.total[column]]
            for name in _path(row.owner):
                node = node.children.setdefault(name, _Node())
                cells.append(node.total[column])
            for cell in (*cells, node.own[column]):
                cell[side] += row.nbytes
                cell[2 + side] += row.unsized
    columns = tuple(sorted(root.total, key=lambda column: (column[0], _PHASES[column[1]])))
    return ModuleTable(columns=columns, rows=tuple(_rows(root, columns)), of_rank=of_rank)


def _path(owner: str | None) -> list[str]:
    if owner is None:
        return [NO_MODULE]
    # Several modules of one unit have no one place in the tree.
    return [owner] if "+" in owner else owner.split(".") if owner else []


def _rows(root: _Node, columns: tuple[Column, ...]) -> Iterator[ModuleRow]:
    pending: list[tuple[str, int, int, _Node, bool]] = [(ROOT_TEXT, 0, 1, root, False)]
    while pending:
        name, depth, count, node, is_part = pending.pop()
        groups = _alike(node.children)
        # A module that sends nothing itself, and has a single one below, is no row of its own.
        while depth and not node.own and len(groups) == 1:
            ((below, many, node),) = groups
            name, count = f"{name}.{below}", count * many
            groups = _alike(node.children)
        yield ModuleRow(
            name=name,
            depth=depth,
            count=count,
            is_part=is_part,
            cells=tuple(
                tuple(number * count for number in node.total[column])
                if column in node.total
                else None
                for column in columns
            ),
        )
        pending += [
            (below, depth + 1, count * many, child, False)
            for below, many, child in reversed(groups)
        ]
        if groups and node.own:
            itself = _Node(own=node.own, total=node.own)
            pending.append(("itself", depth + 1, count, itself, True))


def _alike(children: Mapping[str, _Node]) -> list[tuple[str, int, _Node]]:
    """The children by name, with their number; numbered ones that are alike become one."""
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for name in sorted(children, key=lambda name: (name == NO_MODULE, natural_key(name))):
        groups[children[name].key() if name.isdecimal() else name].append(name)
    return [
        (
            names[0] if names[0] == NO_MODULE else ",".join(fold_fqns(names)),
            len(names),
            children[names[0]],
        )
        for names in groups.values()
    ]
