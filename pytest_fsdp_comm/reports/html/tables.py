"""Compute the tables of a page: rows before and after, their cost, and bytes per module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import Cost, PartCost
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import SUBJECTS, CommProfile, Row, RowKey, restrict
from pytest_fsdp_comm.text.fqn import NO_MODULE, ROOT_TEXT, fold_fqns, natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import show_growth, show_nbytes

Mark = Literal["same", "changed", "new", "removed"]
MARKS: Final[dict[Mark, tuple[str, str]]] = {
    "same": ("=", "same"),
    "changed": ("≠", "changed"),
    "new": ("+", "new"),
    "removed": ("\N{MINUS SIGN}", "removed"),
}
"""The sign and word that a page shows for each mark."""

_TOTAL: Final = "bytes in all"
_PEAK: Final = "peak gathered"
_PHASES: Final = {phase: index for index, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRow:
    """The calls of one or more modules before and after a change, as text; "" for no calls."""

    before: str
    after: str
    key: RowKey
    owners: tuple[str | None, ...]

    @property
    def mark(self) -> Mark:
        """How `before` and `after` differ."""
        if self.before == self.after:
            return "same"
        return "changed" if self.before and self.after else "new" if self.after else "removed"


def side_rows(
    old: CommProfile, new: CommProfile, snapshot: CommProfile | None = None
) -> list[SideRow]:
    """Pair the rows of two comparable profiles; in each phase, differing rows come first.

    Rows that differ also show in which backwards the `snapshot` that became `old` has the calls.
    """
    complete = {
        (row.owner, row.key, row.ranks): row
        for row in (snapshot or old).rows
        if any(call.backwards for call in row.calls)
    }
    sides: defaultdict[tuple[str | None, RowKey], tuple[list[Row], list[Row]]]
    sides = defaultdict(lambda: ([], []))
    # Add new rows first, so that removed rows come last among the rows of their kind.
    for side, profile in ((1, new), (0, old)):
        for row in profile.rows:
            sides[row.owner, row.key][side].append(row)
    # Modules with the same calls before, and the same calls after, share a row.
    owners_of: defaultdict[tuple[RowKey, str, str], list[str | None]] = defaultdict(list)
    for (owner, key), (before, after) in sides.items():
        was, now = _show_calls_of_rows(before), _show_calls_of_rows(after)
        if was != now:
            was = _show_calls_of_rows(complete.get((owner, key, row.ranks), row) for row in before)
        owners_of[key, was, now].append(owner)
    rows = []
    for (key, was, now), owners in owners_of.items():
        owners.sort(key=lambda owner: (owner is None, natural_key(owner or "")))
        rows.append(SideRow(before=was, after=now, key=key, owners=tuple(owners)))
    rows.sort(
        key=lambda row: (
            _PHASES[row.key.phase],
            row.mark == "same",
            SUBJECTS.index(row.key.subject),
        )
    )
    return rows


def differing_modules(rows: Iterable[SideRow]) -> set[str | None]:
    """Return the modules whose collectives, unshards or reshards differ from the snapshot."""
    return {
        owner
        for row in rows
        if row.mark != "same" and row.key.subject != "redistribution"
        for owner in row.owners
    }


def _show_calls_of_rows(rows: Iterable[Row]) -> str:
    texts = []
    for row in rows:
        calls = ", ".join(map(show_calls, row.calls))
        texts.append(f"{calls} on {name_ranks(row.ranks)}" if row.ranks else calls)
    return " / ".join(texts)


def show_calls(calls: Calls) -> str:
    """Format calls as in a snapshot, but with readable sizes: ``x2 of 128.0 KiB float32``."""
    exact = f"of {calls.nbytes:_} B"
    return str(calls).replace(exact, f"of {show_nbytes(calls.nbytes)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One number of the cost, before and after the change, as text."""

    label: str
    before: str
    after: str
    change: str
    """The relative change, such as ``+63 %``; empty if unchanged."""


def cost_rows(cost: Cost) -> list[CostRow]:
    """Return the calls, bytes and peak memory of one rank, before and after a change."""

    def make_row(label: str, old: int, new: int, before: str, after: str) -> CostRow:
        change = show_growth(old, new) if old != new else ""
        return CostRow(label=label, before=before, after=after, change=change)

    rows = []
    for kind in cost.collectives:
        old, new = (volume.count + volume.unsized for volume in (kind.before, kind.after))
        rows.append(make_row(f"{kind.kind}[{kind.axis}] calls", old, new, f"{old:_}", f"{new:_}"))
    volumes: list[tuple[str, PartCost | Cost]] = [(_TOTAL, cost)]
    if len(cost.axes) > 1:
        volumes[:0] = [(f"bytes on {axis.axis}", axis) for axis in cost.axes]
    for label, part in volumes:
        sides = (show_nbytes(side.nbytes, side.unsized) for side in (part.before, part.after))
        rows.append(make_row(label, part.before.nbytes, part.after.nbytes, *sides))
    sizes = [(_PEAK, cost.peak_before, cost.peak_after)]
    if cost.exposed_before or cost.exposed_after:  # real ranks do not record overlap
        sizes[:0] = [("exposed", cost.exposed_before, cost.exposed_after)]
    rows += [make_row(label, old, new, *map(show_nbytes, (old, new))) for label, old, new in sizes]
    return rows


def total_cost_rows(cost: Cost) -> list[CostRow]:
    """Return only the rows of the total bytes and of the peak."""
    return [row for row in cost_rows(cost) if row.label in {_TOTAL, _PEAK}]


# A column of the table: an axis and a phase.
Column: TypeAlias = tuple[str, str]
# The bytes on one rank before and after, and the calls of unknown size before and after.
Cell: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """The bytes of a module, or of several modules with equal communication."""

    name: str
    """Pattern of the modules' names, relative to the parent row; ``(root)`` for the root."""
    depth: int
    count: int
    is_part: bool
    """Whether the row shows only the module's direct calls, without its submodules' calls."""
    cells: tuple[Cell | None, ...]
    """One cell per column, summed over the row's modules (and submodules, unless `is_part`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """The bytes that each module sends, for each axis and phase."""

    columns: tuple[Column, ...]
    rows: tuple[ModuleRow, ...]
    of_rank: str
    """The rank that sends the bytes, such as ``rank 0``; empty if all ranks send the same."""


def _make_zero_cells() -> defaultdict[Column, list[int]]:
    return defaultdict(lambda: [0, 0, 0, 0])


@dataclass(slots=True)
class _Node:
    direct: defaultdict[Column, list[int]] = field(default_factory=_make_zero_cells)
    """One `Cell` per column, for the calls of the module but not of its submodules."""
    total: defaultdict[Column, list[int]] = field(default_factory=_make_zero_cells)
    children: dict[str, _Node] = field(default_factory=dict)

    def make_key(self) -> object:
        """Return a key that is equal for modules with equal communication, including submodules."""
        cells = sorted((column, *sides) for column, sides in self.direct.items())
        submodules = sorted((name, child.make_key()) for name, child in self.children.items())
        return tuple(cells), tuple(submodules)


def module_table(old: CommProfile, new: CommProfile) -> ModuleTable:
    """Sum the bytes of each module and its submodules; without a snapshot, pass `new` twice."""
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
            for name in _split_owner_name(row.owner):
                node = node.children.setdefault(name, _Node())
                cells.append(node.total[column])
            for cell in (*cells, node.direct[column]):
                cell[side] += row.nbytes
                cell[2 + side] += row.unsized
    columns = tuple(sorted(root.total, key=lambda column: (column[0], _PHASES[Phase(column[1])])))
    rows = tuple(_make_module_rows(root, columns))
    return ModuleTable(columns=columns, rows=rows, of_rank=of_rank)


def _split_owner_name(owner: str | None) -> list[str]:
    if owner is None:
        return [NO_MODULE]
    # A unit of several modules has no single place in the hierarchy, so put it below the root.
    return [owner] if "+" in owner else owner.split(".") if owner else []


def _make_module_rows(root: _Node, columns: tuple[Column, ...]) -> Iterator[ModuleRow]:
    pending: list[tuple[str, int, int, _Node, bool]] = [(ROOT_TEXT, 0, 1, root, False)]
    while pending:
        name, depth, count, node, is_part = pending.pop()
        groups = _group_equal_children(node.children)
        # Merge a module without direct calls into one row with its only child: ``layers.{0..3}``.
        while depth and not node.direct and len(groups) == 1:
            ((label, many, node),) = groups
            name, count = f"{name}.{label}", count * many
            groups = _group_equal_children(node.children)
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
            (label, depth + 1, count * many, child, False)
            for label, many, child in reversed(groups)
        ]
        if groups and node.direct:
            itself = _Node(direct=node.direct, total=node.direct)
            pending.append(("itself", depth + 1, count, itself, True))


def _group_equal_children(children: Mapping[str, _Node]) -> list[tuple[str, int, _Node]]:
    """Group numbered children that are equal; return each group's name pattern, size and node."""
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for name in sorted(children, key=lambda name: (name == NO_MODULE, natural_key(name))):
        groups[children[name].make_key() if name.isdecimal() else name].append(name)
    return [
        (
            names[0] if names[0] == NO_MODULE else ",".join(fold_fqns(names)),
            len(names),
            children[names[0]],
        )
        for names in groups.values()
    ]
