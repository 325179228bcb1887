"""The tables of a page: rows, ranks, costs and modules of both sides, and a list of the order."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, Final, Literal, TypeAlias, TypeVar

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import Cost, PartCost, Volume
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import SUBJECTS, CommProfile, Row, RowKey, restrict
from pytest_fsdp_comm.reports.html.values import Entry, Timeline
from pytest_fsdp_comm.text.fqn import NO_MODULE, ROOT_TEXT, fold_fqns, natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import show_growth, show_nbytes

Mark = Literal["same", "changed", "new", "gone"]
MARKS: Final[dict[Mark, tuple[str, str]]] = {
    "same": ("=", "same"),
    "changed": ("≠", "changed"),
    "new": ("+", "new"),
    "gone": ("\N{MINUS SIGN}", "gone"),
}
"""How marks are shown: a sign, and the word that goes with it."""

TIMES: Final = "\N{MULTIPLICATION SIGN}"

_PHASES: Final = {phase: place for place, phase in enumerate(Phase)}

_Owners: TypeAlias = tuple[str | None, ...]
_Place: TypeAlias = tuple[str | None, RowKey]
"""Owner and key of a row."""
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRow:
    """What one side or both have, for all modules that have it alike, or a line of a text."""

    before: str
    """Empty if the snapshot has nothing of it."""
    after: str
    """Empty if nothing of it was recorded."""
    key: RowKey | None = None
    """None for a line."""
    owners: _Owners = ()
    """In natural order; empty for a line."""

    @property
    def mark(self) -> Mark:
        """How the sides differ."""
        if self.before == self.after:
            return "same"
        return "changed" if self.before and self.after else "new" if self.after else "gone"


def side_rows(old: CommProfile, new: CommProfile) -> list[SideRow]:
    """Put the rows of `comparable` profiles side by side, in each phase first those that differ."""
    before, after = ({at: _amounts(rows) for at, rows in _by_place(s.rows)} for s in (old, new))
    # What is gone comes last among its kind.
    places = sorted(dict.fromkeys((*after, *before)), key=lambda at: SUBJECTS.index(at[1].subject))
    both = {at: (before.get(at, ""), after.get(at, "")) for at in places}
    rows = [
        SideRow(before=was, after=now, key=key, owners=owners)
        for key, owners, (was, now) in _fold_owners(both)
    ]
    rows.sort(key=lambda row: (_PHASES[row.key.phase] if row.key else 0, row.mark == "same"))
    return rows


def line_rows(old: str, new: str) -> list[SideRow]:
    """Put the lines of two snapshots side by side, without those that frame them."""
    before, after = (
        [line for line in text.splitlines() if not line.startswith("#") and line != "end"]
        for text in (old, new)
    )
    matcher = SequenceMatcher(a=before, b=after, autojunk=False)
    return [
        SideRow(before=was, after=now)
        for _, i, to_i, j, to_j in matcher.get_opcodes()
        for was, now in zip_longest(before[i:to_i], after[j:to_j], fillvalue="")
    ]


def differing_modules(rows: Iterable[SideRow]) -> set[str | None]:
    """The modules that do not send and gather what the snapshot says."""
    return {
        owner
        for row in rows
        if row.mark != "same" and row.key and row.key.subject != "redistribution"
        for owner in row.owners
    }


def _by_place(rows: Iterable[Row]) -> Iterable[tuple[_Place, list[Row]]]:
    found: defaultdict[_Place, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.owner, row.key].append(row)
    return found.items()


def _fold_owners(values: Mapping[_Place, _Value]) -> Iterator[tuple[RowKey, _Owners, _Value]]:
    """Each key and value once, with all owners that have it."""
    alike: defaultdict[tuple[RowKey, _Value], list[str | None]] = defaultdict(list)
    for (owner, key), value in values.items():
        alike[key, value].append(owner)
    for (key, value), owners in alike.items():
        owners.sort(key=lambda owner: (owner is None, natural_key(owner or "")))
        yield key, tuple(owners), value


def _amounts(rows: Iterable[Row]) -> str:
    return " / ".join(
        f"{_calls(row)} on {name_ranks(row.ranks)}" if row.ranks else _calls(row) for row in rows
    )


def _calls(row: Row) -> str:
    return ", ".join(map(show_calls, row.calls))


def show_calls(calls: Calls) -> str:
    """As snapshots write it, with bytes for people: ``x2 of 128.0 KiB float32 parameters``."""
    exact = f"of {calls.nbytes:_} B"
    return str(calls).replace(exact, f"of {show_nbytes(calls.nbytes)}").replace("x", TIMES, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """What ranks do differently, for all modules in which they differ in the same way."""

    key: RowKey | None
    """None for the peak of gathered bytes."""
    owners: _Owners
    """In natural order; empty for the peak."""
    amounts: tuple[tuple[str, str], ...]
    """Ranks, and what they do; ranks that are in none do nothing of it."""


def rank_rows(profile: CommProfile) -> list[RankRow]:
    """What not every rank recorded alike; empty if all did."""
    found = {
        place: tuple((name_ranks(row.ranks), _calls(row)) for row in rows)
        for place, rows in _by_place(row for row in profile.rows if row.ranks)
    }
    shown = [
        RankRow(key=key, owners=owners, amounts=amounts)
        for key, owners, amounts in _fold_owners(found)
    ]
    peaks = [(name_ranks(one.ranks), show_nbytes(one.nbytes)) for one in profile.peaks if one.ranks]
    return [*shown, RankRow(key=None, owners=(), amounts=tuple(peaks))] if peaks else shown


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One number before and after."""

    label: str
    before: str
    after: str
    change: str
    """``+63 %``; empty if unchanged."""


def cost_rows(cost: Cost) -> list[CostRow]:
    """What a rank sends and holds, before and after."""

    def row(label: str, before: int, after: int, show: Callable[[int], str]) -> CostRow:
        change = show_growth(before, after) if before != after else ""
        return CostRow(label=label, before=show(before), after=show(after), change=change)

    def sizes(label: str, one: PartCost | Cost) -> CostRow:
        was, now = one.before, one.after
        return replace(
            row(label, was.nbytes, now.nbytes, show_nbytes),
            before=show_nbytes(was.nbytes, was.unsized),
            after=show_nbytes(now.nbytes, now.unsized),
        )

    axes = cost.axes if len(cost.axes) > 1 else ()
    return [
        *(
            row(f"{one.kind}[{one.axis}] calls", _count(one.before), _count(one.after), _grouped)
            for one in cost.collectives
        ),
        *(sizes(f"bytes on {one.axis}", one) for one in axes),
        sizes("bytes in all", cost),
        row("peak gathered", cost.peak_before, cost.peak_after, show_nbytes),
    ]


def _count(volume: Volume) -> int:
    return volume.count + volume.unsized


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


# Axis and phase.
Column: TypeAlias = tuple[str, str]
# Bytes on one rank before and after, and calls of unknown size.
Cell: TypeAlias = tuple[int, ...]


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
    columns = tuple(sorted(root.total, key=lambda column: (column[0], _PHASES[Phase(column[1])])))
    return ModuleTable(columns=columns, rows=tuple(_module_rows(root, columns)), of_rank=of_rank)


def _path(owner: str | None) -> list[str]:
    if owner is None:
        return [NO_MODULE]
    # Several modules of one unit have no one place in the tree.
    return [owner] if "+" in owner else owner.split(".") if owner else []


def _module_rows(root: _Node, columns: tuple[Column, ...]) -> Iterator[ModuleRow]:
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


_LONGEST_PERIOD: Final = 64
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRow:
    """An entry, or entries that repeat, each with another module."""

    entry: Entry
    """The first of them."""
    place: str
    """``12``, or ``12, ... 627`` by its first and last place."""
    times: int
    modules: tuple[str | None, ...]
    """In order of appearance."""
    differs: bool
    """Whether a module of it differs from the snapshot."""
    opens: bool = False
    """Whether a group of entries that repeat together begins with it."""


def list_entries(timeline: Timeline, differing: Collection[str | None] = ()) -> Iterator[ListRow]:
    """List all entries in order, equal stretches folded; marks those of `differing` modules."""
    likeness = _likeness(timeline)
    at = 0
    while at < len(likeness):
        period, times = _repetition(likeness, at)
        for first in range(at, at + period):
            places = range(first, at + period * times, period)
            entries = [timeline.entries[timeline.order[place]] for place in places]
            modules = tuple(dict.fromkeys(entry.module for entry in entries))
            yield ListRow(
                entry=entries[0],
                place=str(first + 1) if times == 1 else f"{first + 1}, ... {places[-1] + 1}",
                times=times,
                modules=modules,
                differs=any(module in differing for module in modules),
                opens=times > 1 and first == at,
            )
        at += period * times


# Note [Folding a timeline]
# Layers and steps repeat, apart from the numbers in their modules' names. From each place on, the
# period that covers most of what follows is folded, unless none repeats; a step within which layers
# repeat is so folded as a whole only where its layers do not cover more. Periods are bounded, so
# that a timeline of any length is listed in a time that grows with its length.


def _likeness(timeline: Timeline) -> list[int]:
    """A number for each place, equal where entries differ at most in numbers of modules."""
    numbers: dict[tuple[Any, ...], int] = {}
    of_entries = []
    for one in timeline.entries:
        words = one.module and _NUMBER.sub("#", one.module)
        like = (one.what, words, one.phase, one.axis, one.nbytes)
        of_entries.append(numbers.setdefault(like, len(numbers)))
    return [of_entries[place] for place in timeline.order]


def _repetition(likeness: Sequence[int], at: int) -> tuple[int, int]:
    """The period that covers most from a place on, and how often it repeats there."""
    best, covered = (1, 1), 1
    for period in range(1, min(_LONGEST_PERIOD, (len(likeness) - at) // 2) + 1):
        if likeness[at] != likeness[at + period]:
            continue
        end = at + period
        while end < len(likeness) and likeness[end] == likeness[end - period]:
            end += 1
        times = (end - at) // period
        if times > 1 and times * period > covered:
            best, covered = (period, times), times * period
    return best
