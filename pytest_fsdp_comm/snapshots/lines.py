"""The frame of a snapshot file, alike for both kinds: first and last lines, world, limits, errors.

A snapshot is read strictly: a reader accepts, line by line, only what the writer writes, so that
each fault has a line and an error, and no two texts mean the same. Only line ends may be CRLF, and
what the first line says after its kind is free. It reads, builds, writes again and compares.

What a file may hold is limited, so that a broken one costs two seconds and 200 MB at most,
wherever it is broken:

- `MAX_BYTES` and `MAX_LINES`, far more than anybody reviews;
- `text.fqn.MAX_NAMES` names in all lines together, of `records.MAX_NAME_TEXT` characters as they
  are written and of `records.MAX_NUMBERS` numbers each;
- `MAX_RANKS` ranks in all lists together, and as many in the groups of all axes;
- `MAX_WORLD_SIZE` ranks in the world; numbers of at most 18 digits.
"""

from __future__ import annotations

import math
import re
from copy import copy
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.mesh import MeshAxis, axis_of, merge_axes
from pytest_fsdp_comm.errors import SnapshotFormatError, quoted, quoted_part
from pytest_fsdp_comm.text.fqn import escape, unescape
from pytest_fsdp_comm.text.rank_lists import read_ranks, write_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FORMAT_VERSION: Final = 2
"""Rises when an older reader would misread a snapshot."""

MAX_BYTES: Final = 4 << 20
"""The largest snapshot file: eight times what GitHub shows of one file's changes."""
MAX_LINES: Final = 10_000
"""The longest snapshot: half of what GitHub shows of one file's changes. A step of 126 layers of
128 experts has 60 lines, as layers that are alike share theirs."""
MAX_RANKS: Final = 1_000_000
"""The most ranks in all lists together, and in the groups of all axes."""
MAX_WORLD_SIZE: Final = 131_072
"""As `pytest_fsdp_comm.options.MAX_SIMULATED`."""

END: Final = "end"
INDENT: Final = "  "
"""Before the lines of ranks that differ."""

NUMBER: Final = r"[1-9][0-9]{0,17}"
"""A number from 1."""
REMEDY: Final = (
    "Nothing was overwritten: restore the file with `git checkout`, or delete it and record it "
    "again with --snapshot-update"
)
_LOST_LINE: Final = "; the totals do not match the records: a line was lost or edited by hand"
_SHOWN: Final = 60
"""Of what two long lines have in common, half of this length is shown."""

_HEADER: Final = re.compile(r"# pytest-fsdp-comm ([1-9][0-9]{0,8}) (comm|tree)(?: \|(.*))?")
_TORCH: Final = re.compile(r" torch ([0-9][0-9A-Za-z.+-]{0,39}),")
_CONFLICT: Final = re.compile(r"^(?:<{7}|\|{7}|={7}|>{7})", re.MULTILINE)
_CONTROL: Final = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
_NUMBER: Final = re.compile(NUMBER)
_SHORT_NUMBER: Final = re.compile(r"[1-9][0-9]{0,5}")

RANKS: Final = "ranks "
"""Before a list of ranks."""
MESH: Final = "mesh "
"""Before an axis."""


def header(kind: str, *, torch_version: str, backend: str) -> str:
    """The first line of a snapshot of a kind, ``comm`` or ``tree``."""
    return (
        f"# pytest-fsdp-comm {FORMAT_VERSION} {kind} | torch {torch_version}, {backend} "
        "(not compared)"
    )


def world_lines(world_size: int, ranks: Sequence[int], axes: Iterable[MeshAxis]) -> list[str]:
    """The lines of world, ranks and mesh, which `WorldReader` reads.

    Args:
        world_size: Ranks of the default group.
        ranks: Those that were recorded, ascending; empty for all ranks.
        axes: Sorted by name.
    """
    return [
        f"world_size {world_size}",
        *([f"{RANKS}{write_ranks(ranks)}"] if ranks else []),
        *(f"{MESH}{escape(axis.name)}={axis.layout}" for axis in axes),
    ]


def with_plain_ends(text: str) -> str:
    """The same text with LF where it has CRLF, as git or an editor may have left it."""
    return text.replace("\r\n", "\n")


class OldFormatError(SnapshotFormatError):
    """A snapshot of a format that is no longer read; an update may replace it."""


class SnapshotLines:
    """The records of one snapshot, with the frame checked, and its errors."""

    def __init__(self, text: str, *, where: str, kind: str | None = None) -> None:
        """Checks the frame: size, characters, first line and last.

        Args:
            text: The whole file.
            where: The file's path, for errors.
            kind: The kind that it must be; None for any.

        Raises:
            SnapshotFormatError: The text is empty, truncated, in conflict, of a newer format or of
                another kind, or no snapshot of ours.
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
        self.torch_version = ""
        """That of the recording, as ``torch.__version__``; empty where the first line has none."""
        self.kind = self._read_first(self.lines[0])
        """``comm`` or ``tree``."""
        if kind not in {None, self.kind}:
            raise self.other_kind_error(kind)
        if self.lines[-2:] != [END, ""]:
            last = len(self.lines) - (self.lines[-1] == "" and len(self.lines) > 1)
            raise self.problem(
                last,
                f"the file ends with {quoted(self.lines[last - 1])}",
                f"{END!r} as the last line, with a newline after it",
            )
        self.lines.pop()

    def _check_characters(self, text: str) -> None:
        conflict = _CONFLICT.search(text)
        if conflict is not None:
            number = 1 + text.count("\n", 0, conflict.start())
            line = text[conflict.start() :].partition("\n")[0]
            raise SnapshotFormatError(
                f"{self.where}, line {number}: it reads {quoted(line)}, a marker of a merge "
                "conflict; expected one side of the conflict. Nothing was overwritten: take either "
                f"side with `git checkout --ours {self.where}` or `git checkout --theirs "
                f"{self.where}` (if the markers were committed, from the commit that had it right: "
                f"`git checkout COMMIT -- {self.where}`), then run the test; --snapshot-update if "
                "the change is intended"
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
                f"it contains {name} at column {start - text.rfind(chr(10), 0, start)}",
                "plain text",
            )

    def _read_first(self, line: str) -> str:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise self.misread_error(1, "'# pytest-fsdp-comm <version> comm' or '... tree'", line)
        if int(match[1]) < FORMAT_VERSION:
            raise OldFormatError(
                f"{self.where}, line 1: the snapshot has format {match[1]}, this pytest-fsdp-comm "
                f"reads format {FORMAT_VERSION}, which holds more; record it again with "
                "--snapshot-update, and review it as a new file"
            )
        if int(match[1]) > FORMAT_VERSION:
            raise SnapshotFormatError(
                f"{self.where}, line 1: the snapshot has format {match[1]}, this pytest-fsdp-comm "
                f"reads format {FORMAT_VERSION}; upgrade pytest-fsdp-comm, or restore the "
                "file with `git checkout` if the newer format was a mistake"
            )
        version = _TORCH.match(match[3] or "")
        self.torch_version = version[1] if version else ""
        return match[2]

    def problem(self, number: int, came: str, expected: str) -> SnapshotFormatError:
        """The error of a line: what came, what was expected, and the remedy."""
        return SnapshotFormatError(
            f"{self.where}, line {self.before + number}: {came}; expected {expected}. {REMEDY}"
        )

    def other_kind_error(self, kind: str | None) -> SnapshotFormatError:
        """The error of a snapshot where one of another kind is needed."""
        return self.problem(1, f"it is a snapshot of kind {self.kind!r}", f"one of kind {kind!r}")

    def misread_error(
        self, number: int, expected: str, came: str | None = None
    ) -> SnapshotFormatError:
        """The error of a line that reads otherwise than expected."""
        came = self.lines[number - 1] if came is None else came
        return self.problem(number, f"it reads {quoted(came)}", expected)

    def refused_error(self, number: int, error: ValueError) -> SnapshotFormatError:
        """The error of a line of which something was refused: ``<what came>: expected <what>``."""
        came, _, expected = str(error).partition(": expected ")
        line = quoted(self.lines[number - 1])
        return self.problem(number, f"it reads {line}: {came}", expected)

    def differs_error(self, number: int, written: str, why: str = "") -> SnapshotFormatError:
        """The error of a line that the writer would write otherwise."""
        read = self.lines[number - 1] if number <= len(self.lines) else ""
        pairs = enumerate(zip_longest(read, written))
        same = next(place for place, pair in pairs if pair[0] != pair[1])
        cut = same - _SHOWN // 2 if same > _SHOWN else 0
        shown = [("..." if cut else "") + text[cut:] for text in (read, written)]
        return self.problem(number, f"it reads {quoted(shown[0])}{why}", quoted(shown[1]))

    def section(self, first: int, last: int) -> SnapshotLines:
        """The indented lines from one to another as lines of their own, below the one before."""
        section = copy(self)
        section.lines = [line.removeprefix(INDENT) for line in self.lines[first - 2 : last]]
        section.before = self.before + first - 2
        return section

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
        raise self.differs_error(number, line, _LOST_LINE if is_total else "")


def too_large(where: str, size: str) -> SnapshotFormatError:
    """The error of a file that nobody wrote as a snapshot."""
    return SnapshotFormatError(
        f"{where}, line 1: the file has {size}; expected a snapshot of at most {MAX_LINES} lines "
        f"and {MAX_BYTES} bytes. {REMEDY}"
    )


def read_some_ranks(text: str, world_size: int, recorded: Sequence[int] = ()) -> tuple[int, ...]:
    """Reads ranks that stand for some of the recorded ones.

    Args:
        text: ``0,2-3``.
        world_size: Ranks of the default group.
        recorded: Those that were recorded; empty for all ranks.

    Raises:
        ValueError: As `text.rank_lists.read_ranks`, or they are all that were recorded, or not all
            of them were.
    """
    ranks = read_ranks(text, world_size)
    if len(ranks) == world_size or ranks == recorded:
        raise ValueError("it lists all ranks: expected no list, which already means all ranks")
    if recorded and not set(ranks).issubset(recorded):
        raise ValueError(
            f"ranks {quoted_part(text)} were not all recorded: expected some of "
            f"{quoted_part(write_ranks(recorded))}"
        )
    return ranks


def _is_found(dims: Sequence[tuple[int, int]], world_size: int) -> bool:
    """Whether `comm.mesh.dims_of` finds these dimensions in a group of such a world.

    Without listing its ranks, of which there may be many.
    """
    last = 0  # the largest rank so far
    for place, (size, stride) in enumerate(dims):
        # One that goes on where the inner one ends is a part of that.
        is_part = place > 0 and stride == dims[place - 1][0] * dims[place - 1][1]
        if size == 1 or stride <= last or is_part:
            return False
        last += (size - 1) * stride
    return last < world_size


class WorldReader:
    """Reads the lines of world, ranks and mesh, with which both kinds of snapshots begin."""

    def __init__(self, lines: SnapshotLines) -> None:
        """Reads the lines; the caller checks them by writing them again.

        Args:
            lines: Of the whole file.

        Raises:
            SnapshotFormatError: A line is not as `world_lines` writes it.
        """
        self._lines = lines
        self.size = self._read_size()
        """Ranks of the default group."""
        self.ranks: tuple[int, ...] = ()
        """Those that were recorded; empty for all ranks."""
        self.end = 3
        """Number of the first line after these."""
        try:
            if self._line.startswith(RANKS):
                self.ranks = read_some_ranks(self._line.removeprefix(RANKS), self.size)
                self.end += 1
            self.mesh_axes = self._read_mesh()
            """Sorted by name."""
        except ValueError as error:
            raise lines.refused_error(self.end, error) from None

    @property
    def _line(self) -> str:
        return self._lines.lines[self.end - 1]

    def _read_size(self) -> int:
        line = self._lines.lines[1]
        word, _, rest = line.partition(" ")
        if word != "world_size" or not _NUMBER.fullmatch(rest) or int(rest) > MAX_WORLD_SIZE:
            raise self._lines.misread_error(
                2, f"'world_size <N>' with a number from 1 to {MAX_WORLD_SIZE}"
            )
        return int(rest)

    def _read_mesh(self) -> tuple[MeshAxis, ...]:
        axes: list[MeshAxis] = []
        room = MAX_RANKS
        while self._line.startswith(MESH):
            written = self._line.removeprefix(MESH)
            escaped, _, layout = written.rpartition("=")
            if not escaped:
                raise ValueError(
                    f"bad axis {quoted_part(written)}: expected <axis>=<size> stride <stride>"
                )
            axes.append(self._read_axis(unescape(escaped), layout, room))
            room -= sum(map(len, axes[-1].groups))
            keys = [(axis.name, axis.size, axis.dims) for axis in axes[-2:]]
            if keys != sorted(set(keys)):
                raise ValueError("bad axis: expected each axis and layout once, sorted by name")
            self.end += 1
        return tuple(axes)

    def _read_axis(self, name: str, text: str, room: int) -> MeshAxis:
        shape, word, rest = text.partition(" ")
        kind, _, rest = rest.partition(" ")
        sizes = shape.split("x")
        axis: MeshAxis | None = None
        if all(map(_SHORT_NUMBER.fullmatch, sizes)):
            size = math.prod(map(int, sizes))
            strides = rest.split("x") if kind == "stride" else []
            if not 1 <= size <= self.size:
                pass
            elif kind == "ranks" and rest:
                axis = self._read_groups(name, size, rest.split(" | "), room)
            elif all(map(_SHORT_NUMBER.fullmatch, strides)):
                pairs = zip(map(int, sizes), map(int, strides), strict=False)
                dims = tuple(pairs)[::-1]
                if bool(dims) == (size > 1) and _is_found(dims, self.size):
                    axis = MeshAxis(name=name, size=size, dims=dims)
        if axis is None or axis.layout != text or bool(word) is not bool(kind and rest):
            raise ValueError(
                f"bad layout {quoted_part(text)}: expected '<size> stride <stride>', "
                "'<size>x<size> stride <stride>x<stride>' or '<size> ranks <ranks> | <ranks>', "
                f"with sizes up to {self.size}"
            )
        return axis

    def _read_groups(
        self, name: str, size: int, texts: Sequence[str], room: int
    ) -> MeshAxis | None:
        """An axis whose groups lie irregularly; None if one does not, or has another size."""
        if len(texts) * size > room:
            raise ValueError(
                f"too many ranks: expected at most {MAX_RANKS} in the groups of all axes together"
            )
        groups = []
        for text in texts:
            group = axis_of(name, read_ranks(text, self.size))
            # At the first one: to list all ranks for each text would take for ever.
            if not group.groups or group.size != size:
                return None
            groups.append(group)
        (axis,) = merge_axes(groups)
        return axis
