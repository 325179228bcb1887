"""The lines of a snapshot file, alike for both kinds: first and last line, numbers, ranks, errors.

A snapshot is read strictly: what a reader takes is, line by line, what the writer writes, so that
each fault has a line and an error, and no two texts mean the same. Only line ends may be CRLF, and
what the first line says after its kind is free.

What a file may hold is limited, so that a broken one costs less than a second and 200 MB, wherever
it is broken. Nothing is built before all of it is checked, and names are never listed for that:

- `MAX_BYTES` and `MAX_LINES`, far more than anybody reviews;
- `text.fqn.MAX_NAMES` names in all lines together, of `MAX_NAME_TEXT` characters as they are
  written and of `MAX_NUMBERS` numbers each, and as many ranks in all lists together;
- `MAX_WORLD_SIZE` ranks in the world; numbers of at most 18 digits.
"""

from __future__ import annotations

import re
from copy import copy
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import MeshAxis
from pytest_fsdp_comm.errors import SnapshotFormatError, quoted, quoted_part
from pytest_fsdp_comm.text.fqn import (
    MAX_NAMES,
    NO_MODULE,
    Pattern,
    count_numbers,
    first_name,
    natural_key,
    read_pattern,
)
from pytest_fsdp_comm.text.name_patterns import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pytest_fsdp_comm.text.fqn import Ranges

FORMAT_VERSION: Final = 1
"""Rises when an older reader would misread a snapshot."""

MAX_BYTES: Final = 4 << 20
"""The largest snapshot file: eight times what GitHub shows of one file's changes, and room for 200
lists of every other of 8,192 ranks."""
MAX_LINES: Final = 10_000
"""The longest snapshot: half of what GitHub shows of one file's changes. A step of 126 layers of
128 experts takes 60 lines, as layers that are alike share theirs."""
MAX_NAME_TEXT: Final = 1_000_000
"""The most characters that the names of all lines have: 100 for each of the most lines."""
MAX_NUMBERS: Final = 8
"""The most numbers in one name: ``layers.3.experts.7`` has two."""
MAX_WORLD_SIZE: Final = 131_072
"""As `pytest_fsdp_comm.options.MAX_SIMULATED`."""

END: Final = "end"
INDENT: Final = "  "
"""Before the lines of ranks that differ."""

NUMBER: Final = r"[1-9][0-9]{0,17}"
"""A number from 1."""
REMEDY: Final = (
    "Nothing was overwritten: restore the file with `git checkout`, or delete it and record it "
    "anew with --snapshot-update"
)
_LOST_LINE: Final = "; the totals do not fit the records, as a line was lost or edited by hand"
_SHOWN: Final = 60
"""Of two long lines that begin alike, the same part is shown to half of this length."""

_HEADER: Final = re.compile(r"# pytest-fsdp-comm ([1-9][0-9]{0,8}) (comm|tree)(?: \|.*)?")
_CONFLICT: Final = re.compile(r"^(?:<{7}|\|{7}|={7}|>{7})", re.MULTILINE)
_CONTROL: Final = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_NUMBER: Final = re.compile(NUMBER)
_RUN: Final = re.compile(r"(0|[1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")


def header(kind: str, *, torch_version: str, backend: str) -> str:
    """The first line of a snapshot of a kind, ``comm`` or ``tree``."""
    return (
        f"# pytest-fsdp-comm {FORMAT_VERSION} {kind} | torch {torch_version}, {backend} "
        "(not compared)"
    )


def with_plain_ends(text: str) -> str:
    """The same text with LF where it has CRLF, as git or an editor may have left it."""
    return text.replace("\r\n", "\n")


def read_header(text: str, *, where: str) -> str:
    """Checks the frame of a snapshot: its size, its characters, its first line and the last.

    Args:
        text: The whole file.
        where: The file's path, for the error.

    Returns:
        The kind: ``comm`` or ``tree``.

    Raises:
        SnapshotFormatError: It is empty, truncated, in conflict, of a newer format, or no snapshot
            of ours.
    """
    return SnapshotLines(text, where=where).kind


class SnapshotLines:
    """The records of one snapshot, with the frame checked, and its errors."""

    def __init__(self, text: str, *, where: str, kind: str | None = None) -> None:
        """Checks the frame.

        Args:
            text: The whole file.
            where: The file's path, for errors.
            kind: The kind that it has to be; None for any.

        Raises:
            SnapshotFormatError: See `read_header`.
        """
        self.where = where
        self.before = 0
        """Lines of the file above these."""
        self.lines: list[str] = []
        """From the first, whose number is 1, to the last, which is `END`."""
        text = with_plain_ends(text)
        if not text.strip():
            raise self.problem(1, "the file is empty", "a snapshot")
        lines = 1 + text.count("\n", 0, -1)
        if len(text) > MAX_BYTES or lines > MAX_LINES:
            raise too_large(where, f"{lines} lines and {len(text)} characters")
        self._check_characters(text)
        self.lines = text.split("\n")
        self.kind = self._read_first(self.lines[0])
        if kind not in {None, self.kind}:
            raise self.problem(
                1, f"it is a snapshot of kind {self.kind!r}", f"one of kind {kind!r}"
            )
        if self.lines[-2:] != [END, ""]:
            last = len(self.lines) - (self.lines[-1] == "" and len(self.lines) > 1)
            raise self.problem(
                last,
                f"the file ends with {quoted(self.lines[last - 1])}",
                f"{END!r} as the last line, and a line end after it",
            )
        self.lines.pop()

    def _check_characters(self, text: str) -> None:
        conflict = _CONFLICT.search(text)
        if conflict is not None:
            number = 1 + text.count("\n", 0, conflict.start())
            line = text[conflict.start() :].partition("\n")[0]
            raise SnapshotFormatError(
                f"{self.where}, line {number}: it reads {quoted(line)}, which git wrote into a "
                "merge conflict; expected one side of it. Nothing was overwritten: take either "
                f"side with `git checkout --ours {self.where}` or `git checkout --theirs "
                f"{self.where}`, then run the test; --snapshot-update if the change is intended"
            )
        control = _CONTROL.search(text)
        if control is not None:
            start = control.start()
            character = control[0]
            name = {
                "\ufeff": "a byte order mark",
                "\r": "a carriage return without a line feed",
            }.get(character, f"the control character U+{ord(character):04X}")
            raise self.problem(
                1 + text.count("\n", 0, start),
                f"it has {name} at column {start - text.rfind(chr(10), 0, start)}",
                "plain text",
            )

    def _read_first(self, line: str) -> str:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise self.misread(1, "'# pytest-fsdp-comm <version> comm' or '... tree'", line)
        if int(match[1]) > FORMAT_VERSION:
            raise SnapshotFormatError(
                f"{self.where}, line 1: the snapshot has format {match[1]}, this pytest-fsdp-comm "
                f"reads formats up to {FORMAT_VERSION}; upgrade pytest-fsdp-comm, or restore the "
                "file with `git checkout` if the newer format was a mistake"
            )
        return match[2]

    def problem(self, number: int, came: str, expected: str) -> SnapshotFormatError:
        """The error of a line: what came, what was expected, and the remedy."""
        return SnapshotFormatError(
            f"{self.where}, line {self.before + number}: {came}; expected {expected}. {REMEDY}"
        )

    def misread(self, number: int, expected: str, came: str | None = None) -> SnapshotFormatError:
        """The error of a line that reads otherwise than expected."""
        came = self.lines[number - 1] if came is None else came
        return self.problem(number, f"it reads {quoted(came)}", expected)

    def refused(self, number: int, error: ValueError) -> SnapshotFormatError:
        """The error of a line with a part that ``'<what came>: expected <what>'`` tells."""
        came, _, expected = str(error).partition(": expected ")
        line = quoted(self.lines[number - 1])
        return self.problem(number, f"it reads {line}: {came}", expected)

    def differs(self, number: int, written: str, why: str = "") -> SnapshotFormatError:
        """The error of a line that the writer would write otherwise."""
        read = self.lines[number - 1] if number <= len(self.lines) else ""
        pairs = enumerate(zip_longest(read, written))
        same = next(place for place, pair in pairs if pair[0] != pair[1])
        cut = same - _SHOWN // 2 if same > _SHOWN else 0
        shown = [("..." if cut else "") + text[cut:] for text in (read, written)]
        return self.problem(number, f"it reads {quoted(shown[0])}{why}", quoted(shown[1]))

    def part(self, first: int, last: int) -> SnapshotLines:
        """The indented lines from one to another as lines of their own, below the one before."""
        part = copy(self)
        part.lines = [line.removeprefix(INDENT) for line in self.lines[first - 2 : last]]
        part.before = self.before + first - 2
        return part

    def compare(self, written: Sequence[str]) -> None:
        """Checks that the lines are those that the writer writes for what they say.

        Args:
            written: What the writer writes, from the second line on.

        Raises:
            SnapshotFormatError: They are not; it quotes the first one that differs.
        """
        pairs = enumerate(zip_longest(self.lines[1:], written, fillvalue=""), start=2)
        differing = next(((number, *pair) for number, pair in pairs if pair[0] != pair[1]), None)
        if differing is None:
            return
        number, read, line = differing
        is_total = "total" in (read.partition(" ")[0], line.partition(" ")[0])
        raise self.differs(number, line, _LOST_LINE if is_total else "")


def too_large(where: str, size: str) -> SnapshotFormatError:
    """The error of a file that nobody wrote as a snapshot."""
    return SnapshotFormatError(
        f"{where}, line 1: the file has {size}; expected a snapshot of at most {MAX_LINES} lines "
        f"and {MAX_BYTES} bytes. {REMEDY}"
    )


class RecordReader:
    """Reads the parts of records that both kinds have, within the limits of the whole file.

    Its methods raise ValueError with what came and what was expected; the caller knows the line.
    """

    def __init__(self) -> None:
        """Has read nothing yet."""
        self.steps = Steps()
        self._name_text = 0
        self._names = 0
        self._ranks = 0
        self._rank_lists: dict[str, Ranges] = {}

    def pattern(self, text: str) -> Pattern:
        """Reads names, which count for the whole file."""
        self._name_text += len(text)
        if self._name_text > MAX_NAME_TEXT:
            raise ValueError(f"too long: expected at most {MAX_NAME_TEXT} characters in all names")
        pattern = read_pattern(text)
        if len(pattern.box) > MAX_NUMBERS:
            raise ValueError(
                f"too many numbers in {quoted_part(text)}: expected at most {MAX_NUMBERS}"
            )
        self._names += pattern.size
        if self._names > MAX_NAMES:
            raise ValueError(f"too many names: expected at most {MAX_NAMES} in all lines together")
        return pattern

    def ranks(self, text: str, world_size: int) -> Ranges:
        """Reads a list of ranks such as ``0,2-3``."""
        if text not in self._rank_lists:
            self._rank_lists[text] = ranges = read_ranks(text, world_size)
            self._ranks += count_numbers(ranges)
            if self._ranks > MAX_NAMES:
                raise ValueError(
                    f"too many ranks: expected at most {MAX_NAMES} in all lists together"
                )
        return self._rank_lists[text]


def read_world_size(lines: SnapshotLines, number: int, line: str) -> int:
    """Reads ``world_size 4``."""
    word, _, rest = line.partition(" ")
    if word != "world_size" or not _NUMBER.fullmatch(rest) or int(rest) > MAX_WORLD_SIZE:
        raise lines.misread(number, f"'world_size <N>' with a number from 1 to {MAX_WORLD_SIZE}")
    return int(rest)


def read_mesh(
    lines: SnapshotLines, number: int, line: str, *, world_size: int, name: Callable[[str], str]
) -> tuple[MeshAxis, ...]:
    """Reads ``mesh dp=2 tp=2``.

    Args:
        lines: The snapshot.
        number: The line's number.
        line: The line.
        world_size: The most ranks that an axis can have.
        name: Reads an axis' name; raises ValueError.
    """
    word, *words = line.split(" ")
    axes = []
    for text in words:
        escaped, _, size = text.rpartition("=")
        try:
            is_good = bool(_NUMBER.fullmatch(size)) and int(size) <= world_size
            axes.append(
                MeshAxis(name=name(escaped) if is_good else "", size=int(size) if is_good else 0)
            )
        except ValueError as error:
            raise lines.refused(number, error) from None
    keys = [(axis.name, axis.size) for axis in axes]
    if word != "mesh" or any(axis.size < 1 for axis in axes) or keys != sorted(set(keys)):
        raise lines.misread(
            number, f"'mesh <axis>=<size> ...', each axis once, by name, sizes up to {world_size}"
        )
    return tuple(axes)


def read_ranks(text: str, world_size: int) -> Ranges:
    """Reads ranks such as ``0,2-3``.

    Raises:
        ValueError: `write_ranks` does not write such a text.
    """
    ranges: list[tuple[int, int]] = []
    for run in text.split(","):
        match = _RUN.fullmatch(run)
        first = int(match[1]) if match else -1
        last = int(match[2]) if match and match[2] else first
        is_run = last > first if match and match[2] else match is not None
        if not is_run or last >= world_size or (ranges and first <= ranges[-1][1] + 1):
            raise ValueError(
                f"bad ranks {quoted_part(text)}: expected ranks from 0 to {world_size - 1} in "
                "ascending order, such as 0,2-3"
            )
        ranges.append((first, last))
    return tuple(ranges)


def write_ranks(ranks: Iterable[int]) -> str:
    """Writes ascending ranks as ``0,2-3``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def sort_folded(patterns_of: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Puts lines into order: naturally by their first names, those of no module last.

    Args:
        patterns_of: The patterns of each content.

    Returns:
        Pattern and content of each line.
    """

    def key(line: tuple[str, str]) -> tuple[object, ...]:
        pattern, content = line
        if pattern == NO_MODULE:
            return (True, natural_key(""), content)
        return (False, natural_key(first_name(pattern)), content)

    lines = [(pattern, content) for content, found in patterns_of.items() for pattern in found]
    return sorted(lines, key=key)
