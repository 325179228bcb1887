"""Reads the snapshot of a recording, and says where it is broken."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.calls import CALL_WORDS, Calls
from pytest_fsdp_comm.comm.events import COLLECTIVE_KINDS, Phase, Role
from pytest_fsdp_comm.comm.profile import CommProfile, GatheredPeak, Row, sort_rows
from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.comm_text import (
    ASYNC_UNKNOWN,
    PEAK,
    TOTAL,
    UNSIZED,
    comm_lines,
    row_content,
)
from pytest_fsdp_comm.snapshots.lines import MAX_RANKS, NUMBER, RANKS, WorldReader
from pytest_fsdp_comm.snapshots.records import RecordReader, with_ranks
from pytest_fsdp_comm.text.fqn import NO_MODULE, read_word, unescape
from pytest_fsdp_comm.text.rank_lists import RANKS_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterable

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
_NO_DTYPE: Final = rf"(?:{'|'.join(word.name for word in CALL_WORDS.values())}|{_ROLES})(?![^ ,])"
_CALLS: Final = re.compile(
    rf"x(?P<count>{NUMBER})"
    rf"(?: of(?: (?P<objects>objects)| {_NBYTES})?(?: (?!{_NO_DTYPE})(?P<dtype>[^ ,]+))?)?"
    rf"(?: (?P<role>{_ROLES}))?"
    + "".join(
        f"(?: {word.pattern.replace('(', f'(?P<{name}>', 1)})?" for name, word in CALL_WORDS.items()
    )
)
_PEAK: Final = re.compile(rf"{PEAK}{_NBYTES}(?: {RANKS}(?P<ranks>{RANKS_PATTERN}))?")
_SHAPES: Final = (
    "'<phase> <module> <collective>[<axis>] x<count> of <bytes> B <dtype>', '<phase> <module> "
    "unshard x<count>' or the like"
)


def read_comm(lines: SnapshotLines) -> CommProfile:
    """Reads the snapshot of a recording, and checks it by writing it again.

    Args:
        lines: Of the whole file.

    Raises:
        SnapshotFormatError: A line is not as `comm_text.comm_lines` writes it.
    """
    return _CommReader(lines).profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A line that was read: the same row for each of some names."""

    number: int
    """The line's."""
    names: Sequence[str | None]
    """None stands for no module."""
    row: Row
    """That of no module."""
    ranks: str
    """As they are written; empty for all ranks."""


class _CommReader:
    def __init__(self, lines: SnapshotLines) -> None:
        self._lines = lines
        self._reader = RecordReader()
        self._world = world = WorldReader(lines)
        body = lines.lines[:-1]
        first = world.end
        shows_async = body[first - 1 : first] != [ASYNC_UNKNOWN]
        first += not shows_async
        self._sizes_activations = body[first - 1 : first] != [UNSIZED]
        first += not self._sizes_activations
        self._peaks: list[GatheredPeak] = []
        self._peak_ranks: set[int] = set()
        records: list[_Record] = []
        for number, line in enumerate(body[first - 1 :], start=first):
            if line.startswith(TOTAL):
                break
            if line.startswith(PEAK):
                self._read_peak(number, line)
            else:
                records.append(self._read(number, line))
        self._check_once(records)
        self._check_axes(records)
        self.profile = CommProfile(
            world_size=world.size,
            mesh_axes=world.mesh_axes,
            rows=sort_rows(
                replace(record.row, owner=name) for record in records for name in record.names
            ),
            peaks=tuple(self._peaks),
            recorded_ranks=world.ranks,
            shows_async=shows_async,
            sizes_activations=self._sizes_activations,
            torch_version=lines.torch_version,
        )
        lines.compare(comm_lines(self.profile))

    def _read(self, number: int, line: str) -> _Record:
        match = _RECORD.fullmatch(line)
        if match is None:
            is_phase = line.partition(" ")[0] in tuple(Phase)
            raise self._lines.misread_error(
                number, _SHAPES if is_phase else f"a phase first: {', '.join(Phase)}"
            )
        pattern, ranks = match["names"], match["ranks"] or ""
        try:
            row = replace(self._read_row(match), ranks=self._reader.ranks(ranks, self._world))
            names = (None,) if pattern == NO_MODULE else self._reader.names(pattern)
        except ValueError as error:
            raise self._lines.refused_error(number, error) from None
        written = f"{row.phase} {pattern} {with_ranks(row_content(row), ranks)}"
        if written != line:
            raise self._lines.differs_error(number, written)
        return _Record(number=number, names=names, row=row, ranks=ranks)

    def _read_row(self, match: re.Match[str]) -> Row:
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

    def _read_peak(self, number: int, line: str) -> None:
        match = _PEAK.fullmatch(line)
        if match is None:
            raise self._lines.misread_error(number, f"'{PEAK}<bytes> B'")
        try:
            ranks = self._reader.ranks(match["ranks"] or "", self._world)
        except ValueError as error:
            raise self._lines.refused_error(number, error) from None
        before = self._peaks[-1].ranks if self._peaks else ()
        is_next = not self._peaks or (before and ranks > before)
        nbytes = _read_nbytes(match)
        if not nbytes or not is_next or not self._peak_ranks.isdisjoint(ranks):
            raise self._lines.misread_error(
                number, "each rank once, in order, and no peak of 0 bytes"
            )
        self._peaks.append(GatheredPeak(nbytes=nbytes, ranks=ranks))
        self._peak_ranks.update(ranks)

    def _check_once(self, records: Iterable[_Record]) -> None:
        """Checks that no two records have one row on one rank, nor the same on several lists."""
        classes_of = self._reader.classes_of_ranks()
        # The classes of ranks that have a row; none of them stands for all ranks.
        seen: dict[tuple[RowKey, str | None], frozenset[int]] = {}
        contents: set[tuple[RowKey, str | None, tuple[Calls, ...]]] = set()
        steps = 0
        for record in records:
            key, calls, classes = record.row.key, record.row.calls, classes_of[record.ranks]
            steps += len(record.names) * (1 + len(classes))
            if steps > MAX_RANKS:
                raise self._lines.misread_error(
                    record.number, "lines whose ranks overlap in fewer ways"
                )
            for name in record.names:
                held = seen.get((key, name))
                if held is not None and (
                    not (held and classes)
                    or not classes.isdisjoint(held)
                    or (key, name, calls) in contents
                ):
                    raise self._lines.misread_error(
                        record.number, "each row once, with all of its ranks"
                    )
                seen[key, name] = held | classes if held else classes
                if classes:
                    contents.add((key, name, calls))

    def _check_axes(self, records: Sequence[_Record]) -> None:
        """Checks that the axes are those of the records."""
        axes = [axis.name for axis in self._world.mesh_axes]
        used = {record.row.axis for record in records}
        for place, axis in enumerate(axes):
            if axis not in used:
                first = self._world.end - len(axes)
                raise self._lines.misread_error(first + place, "only axes that a record below has")
        for record in records:
            if record.row.axis not in {"", *axes}:
                raise self._lines.misread_error(
                    record.number, "an axis that has a 'mesh' line above"
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
                count=int(match["count"]),
                **{
                    name: word.read(match[name])
                    for name, word in CALL_WORDS.items()
                    if match[name] is not None
                },
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
        for name, _ in one.told():
            word = CALL_WORDS[name]
            if word.kinds and kind not in word.kinds:
                raise ValueError(
                    f"{kind} has {word.name!r}: expected it of {', '.join(sorted(word.kinds))}"
                )


def _read_nbytes(match: re.Match[str]) -> int:
    return int(match["nbytes"].replace("_", "") or "0")
