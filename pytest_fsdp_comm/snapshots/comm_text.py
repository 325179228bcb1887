"""The text of a communication snapshot: one record a line, for people and for ``git diff``.

::

    # pytest-fsdp-comm 1 comm | torch 2.13.0, gloo (not compared)
    world_size 4
    mesh dp=4
    forward layers.{0..3} all_gather[dp] x1 524_288 B
    backward layers.{0..3} unshard x1
    total all_gather[dp] x4 2_097_152 B
    end

Siblings with equal content share a line, with the numbers of one of them. No line depends on the
width of another, so that a change touches the lines that changed and no others. A line that not all
ranks share ends with ``ranks 0,2-3``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.comm.events import COLLECTIVE_KINDS, Phase
from pytest_fsdp_comm.comm.profile import (
    CommProfile,
    CommRow,
    RedistributionRow,
    ReshardRow,
    sort_rows,
)
from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import (
    END,
    NUMBER,
    RecordReader,
    SnapshotLines,
    header,
    read_mesh,
    read_world_size,
    sort_folded,
    write_ranks,
)
from pytest_fsdp_comm.text.fqn import NO_MODULE, Pattern, Ranges, fold_fqns
from pytest_fsdp_comm.text.name_patterns import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_fsdp_comm.comm.events import MeshAxis

_BYTE: Final = 0xFF

_SECTIONS: Final = (CommRow, ReshardRow, RedistributionRow)
"""The sorts of rows, in the order of their lines within a phase."""
_RECORD: Final = re.compile(
    rf"(?P<phase>{'|'.join(Phase)}) (?P<names>[^ ]+) "
    rf"(?P<content>(?:(?P<kind>[^ \[]+)\[(?P<axis>[^ ]*)\] x(?P<calls>{NUMBER}) "
    r"(?P<nbytes>[0-9_]{1,23}) B|"
    rf"(?:(?P<action>unshard|reshard)|redistribute (?P<change>[^ ]+)) x(?P<count>{NUMBER})))"
    r"(?: ranks (?P<ranks>[0-9,-]+))?"
)
_SHAPES: Final = (
    "'<phase> <module> <collective>[<axis>] x<count> <bytes> B', '<phase> <module> unshard "
    "x<count>' or the like"
)
# All that ends a word, or is no text that a file may hold.
_UNSAFE: Final = re.compile("[\\s\\[\\]%\x00-\x1f\x7f-\x9f\ud800-\udfff\ufeff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One line: a row for each of some names."""

    number: int
    """The line's."""
    phase: Phase
    section: int
    """Place of the row's sort in `_SECTIONS`."""
    content: str
    """The line from the collective on, ranks included."""
    what: tuple[str, ...]
    """What tells rows of one name apart: kind and axis, action, or change."""
    row: Any
    """The row, of no name and for all ranks."""
    names: Pattern
    ranks: Ranges
    """Empty for all ranks."""

    def rows(self, ranks: tuple[int, ...]) -> Iterable[Any]:
        """The rows of all names, for the listed ranks."""
        if self.names is _NO_NAMES:
            yield replace(self.row, ranks=ranks)
            return
        name = "module" if isinstance(self.row, ReshardRow) else "owner"
        for fqn in self.names.expand():
            yield replace(self.row, **{name: fqn, "ranks": ranks})


_NO_NAMES: Final = Pattern(words=(NO_MODULE,), box=())


def format_profile(profile: CommProfile) -> str:
    """Writes a profile as a snapshot; `parse_profile` reads it."""
    names_of: defaultdict[tuple[Phase, int], defaultdict[str, list[str | None]]] = defaultdict(
        lambda: defaultdict(list)
    )
    sections: tuple[Sequence[Any], ...] = (
        profile.rows,
        profile.reshards,
        profile.redistributions,
    )
    for section, rows in enumerate(sections):
        for row in rows:
            ranks = f" ranks {write_ranks(row.ranks)}" if row.ranks else ""
            names_of[row.phase, section][_content(row) + ranks].append(row.key[1])
    folded = {
        place: {content: _fold(names) for content, names in contents.items()}
        for place, contents in names_of.items()
    }
    first = header("comm", torch_version=profile.torch_version, backend=profile.backend)
    lines = _lines(profile.world_size, profile.mesh_axes, folded, profile.totals())
    return "\n".join([first, *lines]) + "\n"


def _fold(names: Sequence[str | None]) -> list[str]:
    named = [name for name in names if name is not None]
    return [*fold_fqns(named), *([NO_MODULE] if len(named) < len(names) else ())]


def _lines(
    world_size: int,
    axes: Iterable[MeshAxis],
    folded: Mapping[tuple[Phase, int], Mapping[str, Iterable[str]]],
    totals: Iterable[CommRow],
) -> list[str]:
    """All lines but the first."""
    lines = [
        f"world_size {world_size}",
        " ".join(("mesh", *(f"{_word(axis.name)}={axis.size}" for axis in axes))),
    ]
    for phase in Phase:
        for section in range(len(_SECTIONS)):
            found = sort_folded(folded.get((phase, section), {}))
            lines += [f"{phase} {pattern} {content}" for pattern, content in found]
    return [*lines, *(f"total {_content(row)}" for row in totals), END]


def _content(row: Any) -> str:
    if isinstance(row, CommRow):
        return f"{_word(row.kind)}[{_word(row.axis)}] x{row.count} {row.nbytes:_} B"
    if isinstance(row, ReshardRow):
        return f"{row.action} x{row.count}"
    return f"redistribute {_word(row.change)} x{row.count}"


def _word(text: str) -> str:
    """Keeps a name from a user's mesh in one word of a line."""
    return _UNSAFE.sub(
        lambda match: (
            f"%{ord(match[0]):02X}" if ord(match[0]) <= _BYTE else f"%u{ord(match[0]):04X}"
        ),
        text,
    )


def _unword(text: str) -> str:
    return re.sub(
        r"%(?:u([0-9A-F]{4})|([0-9A-F]{2}))",
        lambda match: chr(int(match[1] or match[2], 16)),
        text,
    )


def parse_profile(text: str, *, where: str = "snapshot") -> CommProfile:
    """Reads what `format_profile` wrote.

    Args:
        text: The whole file.
        where: The file's path, for errors.

    Raises:
        SnapshotFormatError: A line is not as `format_profile` writes it; the text says which.
    """
    document = _Document(SnapshotLines(text, where=where, kind="comm"))
    sections: tuple[list[Any], ...] = ([], [], [])
    # One list for all rows that have it: they may be long.
    listed = {
        ranges: tuple(rank for first, last in ranges for rank in range(first, last + 1))
        for ranges in {record.ranks for record in document.records}
    }
    for record in document.records:
        sections[record.section].extend(record.rows(listed[record.ranks]))
    return CommProfile(
        world_size=document.world_size,
        mesh_axes=document.mesh_axes,
        rows=sort_rows(sections[0]),
        reshards=sort_rows(sections[1]),
        redistributions=sort_rows(sections[2]),
    )


def check_profile(lines: SnapshotLines) -> None:
    """Checks what `parse_profile` checks, and builds nothing.

    Raises:
        SnapshotFormatError: As there.
    """
    _Document(lines)


class _Document:
    """The records of one file, checked."""

    def __init__(self, lines: SnapshotLines) -> None:
        self._lines = lines
        self._reader = RecordReader()
        body = lines.lines[1:-1]
        self.world_size = read_world_size(lines, 2, body[0] if body else END)
        self._everyone: Ranges = ((0, self.world_size - 1),)
        self.mesh_axes = read_mesh(
            lines, 3, body[1] if len(body) > 1 else END, world_size=self.world_size, name=_unword
        )
        if len({axis.name for axis in self.mesh_axes}) < len(self.mesh_axes):
            raise lines.misread(3, "each axis once")
        totals = next(
            (place for place, line in enumerate(body) if line.startswith("total ")), len(body)
        )
        self.records = [
            self._read(number, line) for number, line in enumerate(body[2:totals], start=4)
        ]
        folded, counted = self._fold()
        totals_of = CommProfile(world_size=1, mesh_axes=(), rows=tuple(counted)).totals()
        lines.compare(_lines(self.world_size, self.mesh_axes, folded, totals_of))

    def _read(self, number: int, line: str) -> _Record:
        match = _RECORD.fullmatch(line)
        if match is None:
            is_phase = line.partition(" ")[0] in tuple(Phase)
            raise self._lines.misread(
                number, _SHAPES if is_phase else f"a phase first: {', '.join(Phase)}"
            )
        try:
            record = self._record(number, match)
        except ValueError as error:
            raise self._lines.refused(number, error) from None
        written = f"{match['phase']} {match['names']} {record.content}"
        if written != line:
            raise self._lines.differs(number, written)
        return record

    def _record(self, number: int, match: re.Match[str]) -> _Record:
        phase = Phase(match["phase"])
        row: Any
        what: tuple[str, ...]
        if match["kind"]:
            kind = _unword(match["kind"])
            if kind not in COLLECTIVE_KINDS and not re.fullmatch(r"unknown:.+", kind):
                raise ValueError(
                    f"unknown collective {quoted_part(kind)}: expected one of "
                    f"{', '.join(COLLECTIVE_KINDS)} or unknown:<operation>"
                )
            section, axis = 0, _unword(match["axis"])
            what = (kind, axis)
            row = CommRow(
                phase=phase,
                owner=None,
                kind=kind,
                axis=axis,
                count=int(match["calls"]),
                nbytes=int(match["nbytes"].replace("_", "") or "0"),
            )
        elif match["action"]:
            if match["names"] == NO_MODULE:
                raise ValueError(f"{NO_MODULE} has no parameters: expected a module")
            section, what = 1, (match["action"],)
            row = ReshardRow(
                phase=phase, module="", action=match["action"], count=int(match["count"])
            )
        else:
            section, what = 2, (_unword(match["change"]),)
            row = RedistributionRow(
                phase=phase, owner=None, change=what[0], count=int(match["count"])
            )
        ranks = self._reader.ranks(match["ranks"], self.world_size) if match["ranks"] else ()
        if ranks == self._everyone:
            raise ValueError("it lists all ranks: expected no list, as other lines have")
        is_nameless = match["names"] == NO_MODULE
        return _Record(
            number=number,
            phase=phase,
            section=section,
            content=_content(row) + (f" ranks {match['ranks']}" if match["ranks"] else ""),
            what=what,
            row=row,
            names=_NO_NAMES if is_nameless else self._reader.pattern(match["names"]),
            ranks=ranks,
        )

    def _fold(self) -> tuple[dict[tuple[Phase, int], dict[str, list[str]]], list[CommRow]]:
        """How the lines would be folded, and what they sum up to.

        Returns:
            The patterns of each content, by phase and section; and rows of the same totals.
        """
        groups: defaultdict[Any, list[_Record]] = defaultdict(list)
        for record in self.records:
            groups[record.phase, record.section, record.what].append(record)
        folded: defaultdict[tuple[Phase, int], dict[str, list[str]]] = defaultdict(dict)
        counted: list[CommRow] = []
        for (phase, section, _), records in groups.items():
            try:
                pieces = self._cut(records)
            except ValueError as error:
                raise self._lines.refused(records[0].number, error) from None
            places_of: defaultdict[str, list[int]] = defaultdict(list)
            for place, record in enumerate(records):
                places_of[record.content].append(place)
            folded[phase, section].update(
                {content: pieces.fold(places) for content, places in places_of.items()}
            )
            if section == 0:
                counted.append(_counted(records, pieces))
        return folded, counted

    def _cut(self, records: Sequence[_Record]) -> Pieces:
        """The pieces of lines that differ in their amounts only; no rank has two of a name."""
        pieces = Pieces([record.names for record in records], self._reader.steps)
        by_rank = pieces
        if any(record.ranks for record in records):
            by_rank = Pieces(
                [
                    Pattern(
                        words=(*record.names.words, ""),
                        box=(*record.names.box, record.ranks or self._everyone),
                    )
                    for record in records
                ],
                self._reader.steps,
            )
        seen: set[Any] = set()
        for place, record in enumerate(records):
            held: list[Any] = [*by_rank.of[place]]
            if by_rank is not pieces:
                held += [(*piece, _content(record.row)) for piece in pieces.of[place]]
            if not seen.isdisjoint(held):
                raise self._lines.misread(record.number, "each row once, with all of its ranks")
            seen.update(held)
        return pieces


def _counted(records: Sequence[_Record], pieces: Pieces) -> CommRow:
    """One row that counts as much as all rows of some lines, each name's on its lowest rank."""
    first: dict[Any, _Record] = {}
    for place, record in sorted(enumerate(records), key=lambda entry: entry[1].ranks):
        for piece in pieces.of[place]:
            first.setdefault(piece, record)
    sizes = [(pieces.size(piece), record.row) for piece, record in first.items()]
    row: CommRow = records[0].row
    return replace(
        row,
        count=sum(size * row.count for size, row in sizes),
        nbytes=sum(size * row.nbytes for size, row in sizes),
    )
