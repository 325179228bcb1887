"""Reads the snapshot of a recording, and says where it is broken."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from pytest_fsdp_comm.comm.events import COLLECTIVE_KINDS, Phase
from pytest_fsdp_comm.comm.profile import (
    CommProfile,
    CommRow,
    RedistributionRow,
    ReshardRow,
    Row,
    sort_rows,
)
from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.comm_writing import (
    COLLECTIVES,
    REDISTRIBUTIONS,
    RESHARDS,
    collective_content,
    comm_lines,
    read_word,
    redistribution_content,
    reshard_content,
)
from pytest_fsdp_comm.snapshots.lines import END, NUMBER, read_mesh, read_world_size
from pytest_fsdp_comm.snapshots.records import Record, RecordReader, fold_pieces
from pytest_fsdp_comm.text.fqn import NO_MODULE, Pattern
from pytest_fsdp_comm.text.rank_lists import list_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_fsdp_comm.snapshots.lines import SnapshotLines
    from pytest_fsdp_comm.text.fqn import Ranges
    from pytest_fsdp_comm.text.name_patterns import Piece, Pieces

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
_NO_NAMES: Final = Pattern(words=(NO_MODULE,), box=())

_Row = TypeVar("_Row", bound=Row)
_Row_co = TypeVar("_Row_co", bound=Row, covariant=True)
_Make = Callable[[str | None, tuple[int, ...]], _Row]
"""Makes the row of one module, for some ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CommRecord(Record, Generic[_Row_co]):
    phase: Phase
    section: int
    what: tuple[str, ...]
    """As `Row.what`."""
    count: int
    nbytes: int
    make: _Make[_Row_co]

    def rows(self, ranks: tuple[int, ...]) -> Iterator[_Row_co]:
        """The rows of all names, for the listed ranks."""
        if self.names is _NO_NAMES:
            yield self.make(None, ranks)
            return
        for fqn in self.names.expand():
            yield self.make(fqn, ranks)


class CommDocument:
    """The snapshot of a recording, checked."""

    def __init__(self, lines: SnapshotLines) -> None:
        """Reads and checks the lines, and builds nothing.

        Args:
            lines: Of the whole file.

        Raises:
            SnapshotFormatError: A line is not as `comm_lines` writes it.
        """
        self.lines = lines
        self._reader = RecordReader()
        body = lines.lines[1:-1]
        self._world_size = read_world_size(lines, 2, body[0] if body else END)
        self._everyone: Ranges = ((0, self._world_size - 1),)
        self._mesh_axes = read_mesh(
            lines,
            3,
            body[1] if len(body) > 1 else END,
            world_size=self._world_size,
            read_name=read_word,
        )
        if len({axis.name for axis in self._mesh_axes}) < len(self._mesh_axes):
            raise lines.misread(3, "each axis once")
        self._collectives: list[_CommRecord[CommRow]] = []
        self._reshards: list[_CommRecord[ReshardRow]] = []
        self._redistributions: list[_CommRecord[RedistributionRow]] = []
        groups: defaultdict[tuple[Phase, int, tuple[str, ...]], list[_CommRecord[Row]]]
        groups = defaultdict(list)
        for number, line in enumerate(body[2:], start=4):
            if line.startswith("total "):
                break
            record = self._read(number, line)
            groups[record.phase, record.section, record.what].append(record)
        self._check(groups.values())

    def profile(self) -> CommProfile:
        """What the document holds."""
        return CommProfile(
            world_size=self._world_size,
            mesh_axes=self._mesh_axes,
            rows=_rows(self._collectives),
            reshards=_rows(self._reshards),
            redistributions=_rows(self._redistributions),
        )

    def _read(self, number: int, line: str) -> _CommRecord[Row]:
        match = _RECORD.fullmatch(line)
        if match is None:
            is_phase = line.partition(" ")[0] in tuple(Phase)
            raise self.lines.misread(
                number, _SHAPES if is_phase else f"a phase first: {', '.join(Phase)}"
            )
        read: Callable[[int, re.Match[str]], _CommRecord[Row]] = (
            self._read_collective
            if match["kind"]
            else self._read_reshard
            if match["action"]
            else self._read_redistribution
        )
        try:
            record = read(number, match)
        except ValueError as error:
            raise self.lines.refused(number, error) from None
        written = f"{match['phase']} {match['names']} {record.words}"
        if written != line:
            raise self.lines.differs(number, written)
        return record

    def _read_collective(self, number: int, match: re.Match[str]) -> _CommRecord[CommRow]:
        phase, kind, axis = (
            Phase(match["phase"]),
            read_word(match["kind"]),
            read_word(match["axis"]),
        )
        if kind not in COLLECTIVE_KINDS and not re.fullmatch(r"unknown:.+", kind):
            raise ValueError(
                f"unknown collective {quoted_part(kind)}: expected one of "
                f"{', '.join(COLLECTIVE_KINDS)} or unknown:<operation>"
            )
        count, nbytes = int(match["calls"]), int(match["nbytes"].replace("_", "") or "0")

        def make(owner: str | None, ranks: tuple[int, ...]) -> CommRow:
            return CommRow(
                phase=phase,
                owner=owner,
                kind=kind,
                axis=axis,
                count=count,
                nbytes=nbytes,
                ranks=ranks,
            )

        record = self._record(number, match, COLLECTIVES, make, collective_content)
        self._collectives.append(record)
        return record

    def _read_reshard(self, number: int, match: re.Match[str]) -> _CommRecord[ReshardRow]:
        phase, action, count = Phase(match["phase"]), match["action"], int(match["count"])

        def make(module: str | None, ranks: tuple[int, ...]) -> ReshardRow:
            return ReshardRow(phase=phase, module=module, action=action, count=count, ranks=ranks)

        record = self._record(number, match, RESHARDS, make, reshard_content)
        self._reshards.append(record)
        return record

    def _read_redistribution(
        self, number: int, match: re.Match[str]
    ) -> _CommRecord[RedistributionRow]:
        phase, change, count = (
            Phase(match["phase"]),
            read_word(match["change"]),
            int(match["count"]),
        )

        def make(owner: str | None, ranks: tuple[int, ...]) -> RedistributionRow:
            return RedistributionRow(
                phase=phase, owner=owner, change=change, count=count, ranks=ranks
            )

        record = self._record(number, match, REDISTRIBUTIONS, make, redistribution_content)
        self._redistributions.append(record)
        return record

    def _record(
        self,
        number: int,
        match: re.Match[str],
        section: int,
        make: _Make[_Row],
        write: Callable[[_Row], str],
    ) -> _CommRecord[_Row]:
        ranks = self._reader.ranks(match["ranks"], self._world_size) if match["ranks"] else ()
        if ranks == self._everyone:
            raise ValueError("it lists all ranks: expected no list, which already means all ranks")
        row = make(None, ())
        is_nameless = match["names"] == NO_MODULE
        return _CommRecord(
            number=number,
            names=_NO_NAMES if is_nameless else self._reader.pattern(match["names"]),
            content=write(row),
            ranks=ranks,
            phase=row.phase,
            section=section,
            what=row.what,
            count=row.count,
            nbytes=row.nbytes,
            make=make,
        )

    def _check(self, groups: Iterable[Sequence[_CommRecord[Row]]]) -> None:
        """Checks that the lines are folded, ordered and summed up as they would be written."""
        folded: defaultdict[tuple[Phase, int], dict[str, list[str]]] = defaultdict(dict)
        counted: list[CommRow] = []
        for records in groups:
            pieces = self._reader.cut(
                self.lines,
                records,
                everyone=self._everyone,
                once="each row once, with all of its ranks",
            )
            first = records[0]
            folded[first.phase, first.section].update(fold_pieces(records, pieces))
            if first.section == COLLECTIVES:
                counted.append(_counted(records, pieces))
        totals = CommProfile(world_size=1, mesh_axes=(), rows=tuple(counted)).totals()
        self.lines.compare(
            comm_lines(
                world_size=self._world_size,
                mesh_axes=self._mesh_axes,
                records=folded,
                totals=totals,
            )
        )


def _rows(records: Sequence[_CommRecord[_Row]]) -> tuple[_Row, ...]:
    # One list for all rows that have it: they may be long.
    listed = {ranges: list_ranks(ranges) for ranges in {record.ranks for record in records}}
    return sort_rows(row for record in records for row in record.rows(listed[record.ranks]))


def _counted(records: Sequence[_CommRecord[Row]], pieces: Pieces) -> CommRow:
    """One row that counts as much as all rows of some lines, each name's on its lowest rank."""
    first: dict[Piece, _CommRecord[Row]] = {}
    for place, record in sorted(enumerate(records), key=lambda entry: entry[1].ranks):
        for piece in pieces.of[place]:
            first.setdefault(piece, record)
    sizes = [(pieces.size(piece), record) for piece, record in first.items()]
    kind, axis = records[0].what
    return CommRow(
        phase=records[0].phase,
        owner=None,
        kind=kind,
        axis=axis,
        count=sum(size * record.count for size, record in sizes),
        nbytes=sum(size * record.nbytes for size, record in sizes),
    )
