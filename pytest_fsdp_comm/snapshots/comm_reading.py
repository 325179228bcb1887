"""Reads the snapshot of a recording, and says where it is broken."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import COLLECTIVE_KINDS, Phase, Role
from pytest_fsdp_comm.comm.profile import (
    Calls,
    CommProfile,
    GatheredPeak,
    Row,
    sort_rows,
    sum_up,
)
from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.comm_writing import (
    ASYNC_UNKNOWN,
    PEAK,
    TOTAL,
    UNSIZED,
    comm_lines,
    limit_lines,
    row_content,
)
from pytest_fsdp_comm.snapshots.lines import NUMBER, RANKS, WorldReader, world_lines
from pytest_fsdp_comm.snapshots.records import Record, RecordReader, fold_pieces
from pytest_fsdp_comm.text.fqn import NO_MODULE, Pattern, read_word, unescape
from pytest_fsdp_comm.text.rank_lists import RANKS_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_fsdp_comm.comm.profile import RowKey, Subject
    from pytest_fsdp_comm.snapshots.lines import SnapshotLines

_NBYTES: Final = r"(?P<nbytes>[0-9_]{1,23}) B"

_RECORD: Final = re.compile(
    rf"(?P<phase>{'|'.join(Phase)}) (?P<names>[^ ]+) "
    r"(?:(?P<kind>[^ \[]+)\[(?P<axis>[^ ]*)\] (?P<calls>x.+?)|"
    rf"(?:(?P<action>unshard|reshard)|redistribute (?P<change>[^ ]+)) x(?P<count>{NUMBER}))"
    rf"(?: {RANKS}(?P<ranks>{RANKS_PATTERN}))?"
)
_ROLES: Final = "|".join(Role)
_NO_DTYPE: Final = rf"(?:ahead|async|peer|root|{_ROLES})(?![^ ,])"
_CALLS: Final = re.compile(
    rf"x(?P<count>{NUMBER})"
    rf"(?: of(?: (?P<objects>objects)| {_NBYTES})?(?: (?!{_NO_DTYPE})(?P<dtype>[^ ,]+))?)?"
    rf"(?: (?P<role>{_ROLES}))?"
    r"(?: ahead (?P<ahead>[1-9][0-9]{0,5}))?(?P<is_async> async)?"
    r"(?: peer (?P<peer>[+-][1-9][0-9]{0,5}))?(?: root (?P<root>0|[1-9][0-9]{0,5}))?"
)
_PEAK: Final = re.compile(rf"{PEAK}{_NBYTES}(?: {RANKS}(?P<ranks>{RANKS_PATTERN}))?")
_SHAPES: Final = (
    "'<phase> <module> <collective>[<axis>] x<count> of <bytes> B <dtype>', '<phase> <module> "
    "unshard x<count>' or the like"
)
_NO_NAMES: Final = Pattern(words=(NO_MODULE,), box=())


@dataclass(frozen=True, slots=True, kw_only=True)
class _CommRecord(Record):
    row: Row
    """That of no module, for all ranks."""

    def rows(self, ranks: tuple[int, ...]) -> Iterator[Row]:
        """The rows of all names, for the listed ranks."""
        names = (None,) if self.names is _NO_NAMES else self.names.expand()
        for fqn in names:
            yield replace(self.row, owner=fqn, ranks=ranks)


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
        world = WorldReader(lines)
        self._world = world
        body = lines.lines[:-1]
        first = world.end
        self._shows_async = body[first - 1 : first] != [ASYNC_UNKNOWN]
        first += not self._shows_async
        self._sizes_activations = body[first - 1 : first] != [UNSIZED]
        first += not self._sizes_activations
        self._records: list[_CommRecord] = []
        self._peaks: list[tuple[int, str]] = []
        self._peak_ranks: set[int] = set()
        for number, line in enumerate(body[first - 1 :], start=first):
            if line.startswith(TOTAL):
                break
            if line.startswith(PEAK):
                self._read_peak(number, line)
                continue
            self._records.append(self._read(number, line))
        self._check()

    def profile(self) -> CommProfile:
        """What the document holds."""
        return CommProfile(
            world_size=self._world.size,
            mesh_axes=self._world.mesh_axes,
            rows=sort_rows(
                row for record in self._records for row in record.rows(self._ranks(record.ranks))
            ),
            peaks=tuple(
                GatheredPeak(nbytes=nbytes, ranks=self._ranks(ranks))
                for nbytes, ranks in self._peaks
            ),
            recorded_ranks=self._world.ranks,
            shows_async=self._shows_async,
            sizes_activations=self._sizes_activations,
        )

    def _read(self, number: int, line: str) -> _CommRecord:
        match = _RECORD.fullmatch(line)
        if match is None:
            is_phase = line.partition(" ")[0] in tuple(Phase)
            raise self.lines.misread(
                number, _SHAPES if is_phase else f"a phase first: {', '.join(Phase)}"
            )
        try:
            row, ranks = self._read_row(match), match["ranks"] or ""
            self._ranks(ranks)
            is_nameless = match["names"] == NO_MODULE
            record = _CommRecord(
                number=number,
                names=_NO_NAMES if is_nameless else self._reader.pattern(match["names"]),
                content=row_content(row),
                ranks=ranks,
                row=row,
            )
        except ValueError as error:
            raise self.lines.refused(number, error) from None
        written = f"{match['phase']} {match['names']} {record.words}"
        if written != line:
            raise self.lines.differs(number, written)
        return record

    def _read_row(self, match: re.Match[str]) -> Row:
        """Reads the row of no module, for all ranks."""
        phase = Phase(match["phase"])
        if match["kind"] is None:
            subject: Subject = "reshard" if match["action"] else "redistribution"
            what = match["action"] or read_word(match["change"])
            count = (Calls(count=int(match["count"])),)
            return Row(subject=subject, phase=phase, owner=None, what=what, calls=count)
        kind = unescape(match["kind"])
        if kind not in COLLECTIVE_KINDS and not re.fullmatch(r"unknown:.+", kind):
            raise ValueError(
                f"unknown collective {quoted_part(kind)}: expected one of "
                f"{', '.join(COLLECTIVE_KINDS)} or unknown:<operation>"
            )
        calls = _read_calls(match["calls"], sizes_activations=self._sizes_activations)
        _check_calls(kind, calls)
        axis = unescape(match["axis"]) if match["axis"] else ""
        return Row(phase=phase, owner=None, what=kind, axis=axis, calls=calls)

    def _ranks(self, text: str) -> tuple[int, ...]:
        return self._reader.ranks(text, self._world)

    def _read_peak(self, number: int, line: str) -> None:
        match = _PEAK.fullmatch(line)
        if match is None:
            raise self.lines.misread(number, f"'{PEAK}<bytes> B'")
        text = match["ranks"] or ""
        try:
            ranks = self._ranks(text)
        except ValueError as error:
            raise self.lines.refused(number, error) from None
        before = self._ranks(self._peaks[-1][1]) if self._peaks else ()
        is_next = not self._peaks or (before and ranks > before)
        nbytes = _read_nbytes(match)
        if not nbytes or not is_next or not self._peak_ranks.isdisjoint(ranks):
            raise self.lines.misread(number, "each rank once, in order, and no peak of 0 bytes")
        self._peaks.append((nbytes, text))
        self._peak_ranks.update(ranks)

    def _check_axes(self) -> None:
        """Checks that the axes are those of the records."""
        used = {record.row.axis for record in self._records} - {""}
        for place, axis in enumerate(self._world.mesh_axes):
            if axis.name not in used:
                first = self._world.end - len(self._world.mesh_axes)
                raise self.lines.misread(first + place, "only axes that a record below has")
        missing = used.difference(axis.name for axis in self._world.mesh_axes)
        for record in self._records:
            if record.row.axis in missing:
                raise self.lines.misread(record.number, "an axis that has a 'mesh' line above")

    def _check(self) -> None:
        """Checks that the lines are folded, ordered and summed up as they would be written."""
        groups: defaultdict[RowKey, list[_CommRecord]] = defaultdict(list)
        for record in self._records:
            groups[record.row.key].append(record)
        folded: defaultdict[tuple[Phase, Subject], dict[str, list[str]]] = defaultdict(dict)
        for key, records in groups.items():
            pieces = self._reader.cut(
                self.lines,
                records,
                once="each row once, with all of its ranks",
            )
            folded[key.phase, key.subject].update(fold_pieces(records, pieces))
        world = self._world
        self._check_axes()
        totals = sum_up(
            (
                (record.row, record.names.size, len(self._ranks(record.ranks)))
                for record in self._records
                if record.row.subject == "collective"
            ),
            len(world.ranks) or world.size,
        )
        self.lines.compare(
            comm_lines(
                world=[
                    *world_lines(world.size, world.ranks, world.mesh_axes),
                    *limit_lines(
                        shows_async=self._shows_async, sizes_activations=self._sizes_activations
                    ),
                ],
                records=folded,
                peaks=self._peaks,
                totals=totals,
            )
        )


def _read_calls(text: str, *, sizes_activations: bool) -> tuple[Calls, ...]:
    calls: list[Calls] = []
    for part in text.split(", "):
        match = _CALLS.fullmatch(part)
        is_unsized = (
            match is not None
            and not sizes_activations
            and match["role"] == Role.ACTIVATIONS
            and not match["objects"]
        )
        if match is None or (match["dtype"] and not match["nbytes"] and not is_unsized):
            raise ValueError(
                f"bad calls {quoted_part(part)}: expected such as 'x2 of 64 B float32 parameters', "
                "with 'ahead 1', 'async', 'peer +1' or 'root 0' after it"
            )
        calls.append(
            Calls(
                nbytes=_read_nbytes(match) if match["nbytes"] and not is_unsized else 0,
                dtype=read_word(match["dtype"] or ""),
                role=match["role"] or "",
                is_object=match["objects"] is not None,
                is_unsized=is_unsized,
                ahead=int(match["ahead"] or 0),
                is_async=match["is_async"] is not None,
                peer=int(match["peer"] or 0),
                root_rank=int(match["root"] or -1),
                count=int(match["count"]),
            )
        )
    kinds = [replace(one, count=0) for one in calls]
    if kinds != sorted(set(kinds)):
        raise ValueError(
            f"calls {quoted_part(text)} out of order: expected each kind of call once, by size"
        )
    return tuple(calls)


def _check_calls(kind: str, calls: Iterable[Calls]) -> None:
    """Raises ValueError for what no call of a kind has."""
    if kind not in COLLECTIVE_KINDS:
        return
    for one in calls:
        for word, is_there, kinds in (
            ("ahead", one.ahead, {"all_gather"}),
            ("peer", one.peer, {"send", "recv"}),
            ("root", one.root_rank >= 0, {"broadcast", "scatter", "reduce", "gather"}),
        ):
            if is_there and kind not in kinds:
                raise ValueError(f"{kind} has {word!r}: expected it of {', '.join(sorted(kinds))}")


def _read_nbytes(match: re.Match[str]) -> int:
    return int(match["nbytes"].replace("_", "") or "0")
