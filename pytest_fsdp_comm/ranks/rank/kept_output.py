"""What is kept of a long text: the first and the last part, in reports and on the disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Note [Kept output]: what a rank prints, what its exceptions say and whatever else its reports hold
# is cut in the rank: what is left out is never sent. A rank writes straight into files, which
# survive whatever becomes of it. Their disk is bounded from outside: the supervisor makes holes
# where nothing is kept, so that offsets in the file stay valid for those who write and read
# meanwhile, and the last words are never at risk. A pipe would need a reader at all times, and
# would lose its last words with that; a limit of the file's size (RLIMIT_FSIZE) ends the rank, and
# whatever else it writes.

KEPT_NBYTES: Final = 256 << 10
"""Kept at either end of a text, such as what a rank writes to a stream in a phase of a test."""
MOST_ON_DISK_NBYTES: Final = 1 << 30
"""More in one file ends the rank: it writes faster than holes are made, or none can be."""

# Freeing less would cost more than the disk does.
_HOLE_NBYTES = 1 << 20
_PAGE_NBYTES = 4096
_PUNCH_HOLE = 0x02 | 0x01  # linux/falloc.h: and the size stays
_BLOCK_NBYTES = 512  # of st_blocks, on every system
# Longer than the note that says how much is left out.
_LONGEST_NOTE = 256


@dataclass(frozen=True, slots=True)
class Kept:
    """The kept parts of bytes that a rank wrote, and how many lie between."""

    head: bytes = b""
    """All of them, if none are left out."""
    nbytes_left_out: int = 0
    tail: bytes = b""

    def __add__(self, later: Kept) -> Kept:
        """The kept parts of the bytes of both."""
        middle = self.tail + later.head
        if not self.nbytes_left_out and not later.nbytes_left_out:
            head = tail = self.head + later.head
            if len(head) <= 2 * KEPT_NBYTES:
                return Kept(head)
        else:
            head = self.head if self.nbytes_left_out else self.head + middle
            tail = later.tail if later.nbytes_left_out else middle
        head, tail = head[:KEPT_NBYTES], tail[-KEPT_NBYTES:]
        return Kept(head, self.nbytes + later.nbytes - len(head) - len(tail), tail)

    def __str__(self) -> str:
        """The text, with a line where bytes are left out that says how many."""
        head, tail = self.head, self.tail
        if not self.nbytes_left_out:
            return _decoded(head)
        if max(len(_decoded(head)), len(_decoded(tail))) > KEPT_NBYTES:
            # A byte that is no text takes four characters.
            head, tail = head[: KEPT_NBYTES // 4], tail[-KEPT_NBYTES // 4 :]
        nbytes = self.nbytes - len(head) - len(tail)
        return f"{_decoded(head)}{_left_out(nbytes, 'bytes')}{_decoded(tail)}"

    @property
    def nbytes(self) -> int:
        """How many were written."""
        return len(self.head) + self.nbytes_left_out + len(self.tail)


def shortened(text: str) -> str:
    """The text, without its middle if it is long; a shortened text stays as it is."""
    left_out = len(text) - 2 * KEPT_NBYTES
    if left_out <= _LONGEST_NOTE:
        return text
    return f"{text[:KEPT_NBYTES]}{_left_out(left_out, 'characters')}{text[-KEPT_NBYTES:]}"


def shortened_texts(data: Any) -> Any:
    """Shorten each text in what pytest serializes; lines of source or of an error are one text."""
    if isinstance(data, str):
        return shortened(data)
    if isinstance(data, dict):
        return {
            name: _shortened_lines(value) if name == "lines" else shortened_texts(value)
            for name, value in data.items()
        }
    return [shortened_texts(value) for value in data] if isinstance(data, (list, tuple)) else data


def _shortened_lines(lines: Sequence[str]) -> Sequence[str]:
    if sum(map(len, lines)) <= 2 * KEPT_NBYTES:
        return lines
    # A traceback in Python's own style has parts that end their lines.
    if lines[0].endswith("\n"):
        return [shortened("".join(lines))]
    return shortened("\n".join(lines)).split("\n")


def read_kept(descriptor: int, start: int) -> tuple[Kept, int]:
    """What is kept of a file from an offset on, and the offset of the file's end."""
    end = os.fstat(descriptor).st_size
    if end <= start:
        return Kept(), start
    head_end, tail_start = _kept(descriptor, start, end)
    head = os.pread(descriptor, head_end - start, start)
    tail = os.pread(descriptor, end - tail_start, tail_start)
    nbytes = tail_start - head_end
    return Kept(head, nbytes, tail) if nbytes else Kept(head + tail), end


def _kept(descriptor: int, start: int, end: int) -> tuple[int, int]:
    """Where the kept head ends and the kept tail starts; neither has holes."""
    first_hole = _seek(descriptor, start, "SEEK_HOLE", end)
    if end - start <= 2 * KEPT_NBYTES and first_hole >= end:
        return end, end
    tail = max(start, end - KEPT_NBYTES)
    head_end = min(start + KEPT_NBYTES, first_hole, tail)
    return head_end, max(head_end, _seek(descriptor, tail, "SEEK_DATA", tail))


def _seek(descriptor: int, offset: int, how: str, otherwise: int) -> int:
    if not hasattr(os, how):
        return otherwise
    try:
        return os.lseek(descriptor, offset, getattr(os, how))
    except OSError as error:
        # Nothing but a hole up to the end, or a file system that knows no holes.
        return otherwise if error.errno != errno.ENXIO else os.fstat(descriptor).st_size


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _left_out(count: int, unit: str) -> str:
    return (
        f"\n[... {count:,} {unit} left out: only the first and last {KEPT_NBYTES >> 10} KiB are "
        "kept, see docs/ranks.md of pytest-fsdp-comm ...]\n"
    )


class OutputFile:
    """A file that a rank writes to, whose disk is bounded; see Note [Kept output]."""

    def __init__(self, path: Path) -> None:
        """Begin with the whole file kept; it need not exist yet."""
        self._path = path
        self._size = 0
        # Where the holes made so far end: before the phase, and in its middle.
        self._free = [0, 0]

    def release(self, start: int) -> int:
        """Free what no report needs of the phase from `start` and before; return bytes on disk."""
        with contextlib.suppress(FileNotFoundError):  # it may vanish at any moment
            status = os.stat(self._path)  # noqa: PTH116  # 20 times a second for each file
            # Not up to the end: the rank may have begun another phase, whose report is still to
            # come.
            end, self._size = min(self._size, status.st_size), status.st_size
            begins = (self._free[0], max(start + KEPT_NBYTES, self._free[1]))
            for which, hole in enumerate(zip(begins, (start, end - KEPT_NBYTES), strict=True)):
                if hole[1] - hole[0] > _HOLE_NBYTES:
                    self._free[which] = self._punch(*hole)
                    status = os.stat(self._path)  # noqa: PTH116  # as above
            return status.st_blocks * _BLOCK_NBYTES
        return 0

    def _punch(self, start: int, end: int) -> int:
        """Make a hole of whole pages; return where the next one may start."""
        start = -(-start // _PAGE_NBYTES) * _PAGE_NBYTES
        end = end // _PAGE_NBYTES * _PAGE_NBYTES
        if _FALLOCATE is not None:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                # An error is no matter: the caller sees what the file still occupies.
                _FALLOCATE(descriptor, _PUNCH_HOLE, start, end - start)
            finally:
                os.close(descriptor)
        return end


def _find_fallocate() -> Any:
    if sys.platform != "linux":
        return None
    function: Any = getattr(ctypes.CDLL(None), "fallocate64", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function


_FALLOCATE = _find_fallocate()
