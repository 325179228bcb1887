"""The frame of a snapshot file, alike for both kinds: first and last line, size, errors."""

from __future__ import annotations

import re
from contextlib import contextmanager
from copy import copy
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.errors import SnapshotFormatError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Note [Strict reading]: a reader takes a line apart, writes it again and compares, and does the
# same with the whole file. So it accepts only what the writer writes: each fault has a line and an
# error, no two texts mean the same, and a reader need not check what writing again shows. Only line
# ends may be CRLF, and what the first line says after its kind is free.

# Note [Limits of a file]: a broken file costs two seconds and 200 MB at most, wherever it is broken
# (tests/unit/snapshots/test_limits.py). It has at most `MAX_BYTES` and `MAX_LINES`;
# `text.fqn.MAX_NAMES` names in all lines together, in `MAX_NAME_TEXT` characters as they are
# written; `MAX_RANKS` ranks in all lists together, and as many in the groups of all axes;
# `MAX_WORLD_SIZE` ranks in the world; numbers of at most 18 digits.

FORMAT_VERSION: Final = 2
"""Rises when an older reader would misread a snapshot."""

MAX_BYTES: Final = 4 << 20
"""The largest snapshot file: eight times what GitHub shows of one file's changes."""
MAX_LINES: Final = 10_000
"""Half of what GitHub shows of a file's changes; 126 layers of 128 experts have 60 lines."""
MAX_RANKS: Final = 1_000_000
MAX_WORLD_SIZE: Final = 131_072
"""As `pytest_fsdp_comm.options.MAX_SIMULATED`."""
MAX_NAME_TEXT: Final = 1_000_000
"""100 characters for each of the most lines."""

END: Final = "end"
INDENT: Final = "  "
"""Before the lines of ranks that differ."""

NUMBER: Final = r"[1-9][0-9]{0,17}"
REMEDY: Final = (
    "Nothing was overwritten: restore the file with `git checkout`, or delete it and record it "
    "again with --snapshot-update"
)
# Of what two long lines have in common, half of this length is shown.
_SHOWN: Final = 60

_HEADER: Final = re.compile(r"# pytest-fsdp-comm ([1-9][0-9]{0,8}) (comm|tree)(?: \|(.*))?")
_TORCH: Final = re.compile(r" torch ([0-9][0-9A-Za-z.+-]{0,39}),")
_CONFLICT: Final = re.compile(r"^(?:<{7}|\|{7}|={7}|>{7})", re.MULTILINE)
_CONTROL: Final = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")


def header(kind: str, *, torch_version: str, backend: str) -> str:
    """The first line of a snapshot of a kind, ``comm`` or ``tree``."""
    return (
        f"# pytest-fsdp-comm {FORMAT_VERSION} {kind} | torch {torch_version}, {backend} "
        "(not compared)"
    )


class OldFormatError(SnapshotFormatError):
    """A snapshot of a format that is no longer read; an update may replace it."""


def line_error(where: str, number: int, came: str, expected: str) -> SnapshotFormatError:
    """The error of a line of a file, with the remedy."""
    return SnapshotFormatError(f"{where}, line {number}: {came}; expected {expected}. {REMEDY}")


def too_large(where: str, size: str) -> SnapshotFormatError:
    """The error of a file that nobody wrote as a snapshot."""
    expected = f"a snapshot of at most {MAX_LINES} lines and {MAX_BYTES} bytes"
    return line_error(where, 1, f"the file has {size}", expected)


class SnapshotLines:
    """The lines of one snapshot, with the frame checked, and their errors."""

    def __init__(self, text: str, *, where: str) -> None:
        """Check the frame of a whole file: size, characters, first line and last."""
        self.where = where
        self.before = 0
        """Lines of the file above these."""
        if not text.strip():
            raise self.error(1, "the file is empty", "a snapshot")
        lines = 1 + text.count("\n", 0, -1)
        if len(text) > MAX_BYTES or lines > MAX_LINES:
            raise too_large(where, f"{lines} lines and {len(text)} characters")
        self._check_characters(text)
        self.lines: list[str] = text.split("\n")
        """From the first, whose number is 1, to the last, which is `END`."""
        self.torch_version = ""
        """That of the recording, as ``torch.__version__``; empty where the first line has none."""
        self.kind = self._read_first(self.lines[0])
        """``comm`` or ``tree``."""
        if self.lines[-2:] != [END, ""]:
            last = len(self.lines) - (self.lines[-1] == "" and len(self.lines) > 1)
            raise self.error(
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
            raise self.error(
                1 + text.count("\n", 0, start),
                f"it contains {name} at column {start - text.rfind(chr(10), 0, start)}",
                "plain text",
            )

    def _read_first(self, line: str) -> str:
        match = _HEADER.fullmatch(line)
        if match is None:
            with self.at(1):
                raise ValueError("expected '# pytest-fsdp-comm <version> comm' or '... tree'")
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

    def line(self, number: int) -> str:
        """One line; empty beyond the last."""
        return self.lines[number - 1] if number <= len(self.lines) else ""

    def section(self, first: int, last: int) -> SnapshotLines:
        """The indented lines from one to another as lines of their own, below the one before."""
        section = copy(self)
        section.lines = [line.removeprefix(INDENT) for line in self.lines[first - 2 : last]]
        section.before = self.before + first - 2
        return section

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Turn a ValueError ``[<what came>: ]expected <what>`` into a SnapshotFormatError."""
        try:
            yield
        except ValueError as error:
            came, _, expected = f": {error}".partition(": expected ")
            line = quoted(self.line(number))
            raise self.error(number, f"it reads {line}{came}", expected) from None

    def error(self, number: int, came: str, expected: str) -> SnapshotFormatError:
        """As `line_error`."""
        return line_error(self.where, self.before + number, came, expected)

    def check(self, number: int, written: str, why: str = "") -> None:
        """Check that a line is what the writer writes; `why` follows what it reads."""
        read = self.line(number)
        if read == written:
            return
        pairs = enumerate(zip_longest(read, written))
        same = next(place for place, pair in pairs if pair[0] != pair[1])
        cut = same - _SHOWN // 2 if same > _SHOWN else 0
        shown = [("..." if cut else "") + text[cut:] for text in (read, written)]
        raise self.error(number, f"it reads {quoted(shown[0])}{why}", quoted(shown[1]))

    def check_all(self, written: Sequence[str]) -> None:
        """As `check`, of all lines from the second on."""
        pairs = enumerate(zip_longest(self.lines[1:], written, fillvalue=""), start=2)
        for number, (read, line) in pairs:
            if read != line:
                is_total = "total" in (read.partition(" ")[0], line.partition(" ")[0])
                lost = "; the totals do not match the records: a line was lost or edited by hand"
                self.check(number, line, lost if is_total else "")
