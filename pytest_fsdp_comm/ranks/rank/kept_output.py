"""What is kept of what a rank prints: the first and the last part, in reports and on the disk.

A rank writes straight into files, which survive whatever becomes of it. Their disk is bounded from
outside: the supervisor makes holes where nothing is kept, so that offsets in the file stay valid
for those who write and read meanwhile, and the last words are never at risk. A pipe would need a
reader at all times, and would lose its last words with that; a limit of the file's size
(RLIMIT_FSIZE) ends the rank, and whatever else it writes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

KEPT_NBYTES: Final = 256 << 10
"""Kept at either end of what a rank writes to a stream in a phase of a test."""
MOST_ON_DISK_NBYTES: Final = 1 << 30
"""A rank is ended if one of its files occupies more of the disk: it writes faster than holes are
made, or its file system has none."""

# Calls for less would cost more than the disk does.
_HOLE_NBYTES = 1 << 20
_PAGE_NBYTES = 4096
_PUNCH_HOLE = 0x02 | 0x01  # linux/falloc.h: and the size stays
_BLOCK_NBYTES = 512  # of st_blocks, on every system


def shortened(text: str) -> str:
    """A text of which the middle is left out if it is long."""
    nbytes = len(text) - 2 * KEPT_NBYTES
    if nbytes <= 0:
        return text
    return f"{text[:KEPT_NBYTES]}{_left_out(nbytes, 'characters')}{text[-KEPT_NBYTES:]}"


def read_kept(descriptor: int, start: int) -> tuple[str, int]:
    """Reads what is kept of a file from an offset on.

    Returns:
        The text, and the offset of its end.
    """
    end = os.fstat(descriptor).st_size
    if end <= start:
        return "", start
    head_end, tail_start = _kept(descriptor, start, end)
    head = os.pread(descriptor, head_end - start, start).decode("utf-8", "backslashreplace")
    tail = os.pread(descriptor, end - tail_start, tail_start).decode("utf-8", "backslashreplace")
    nbytes = tail_start - head_end
    return f"{head}{_left_out(nbytes, 'bytes')}{tail}" if nbytes else f"{head}{tail}", end


def _kept(descriptor: int, start: int, end: int) -> tuple[int, int]:
    """Where what is kept at the start ends, and what is kept at the end starts, without holes."""
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


def _left_out(nbytes: int, unit: str) -> str:
    kept = KEPT_NBYTES >> 10
    return (
        f"\n[... {nbytes} {unit} left out: only the first and last {kept} KiB of each stream and "
        "phase are kept, see docs/ranks.md of pytest-fsdp-comm ...]\n"
    )


class OutputFile:
    """A file that a rank writes to, whose disk is bounded."""

    def __init__(self, path: Path) -> None:
        """Begins with the whole file kept; it need not exist yet.

        Args:
            path: The file.
        """
        self._path = path
        self._size = 0
        self._free_before = 0
        self._free_middle = 0

    def release(self, start: int) -> int:
        """Frees the disk of what will not be read again.

        Args:
            start: Where the phase starts; what is before it has been read.

        Returns:
            How many bytes of disk the file still occupies.
        """
        try:
            status = os.stat(self._path)  # noqa: PTH116  # 20 times a second for each file
        except FileNotFoundError:
            return 0
        # Not up to the end: the rank may have begun another phase, whose report is still to come.
        end, self._size = min(self._size, status.st_size), status.st_size
        middle = max(start + KEPT_NBYTES, self._free_middle)
        has_middle = end - KEPT_NBYTES - middle > _HOLE_NBYTES
        has_before = start - self._free_before > _HOLE_NBYTES
        if has_middle:
            self._free_middle = self._punch(middle, end - KEPT_NBYTES)
        if has_before:
            self._free_before = self._punch(self._free_before, start)
        if has_middle or has_before:
            status = os.stat(self._path)  # noqa: PTH116  # as above
        return status.st_blocks * _BLOCK_NBYTES

    def _punch(self, start: int, end: int) -> int:
        """Makes a hole of whole pages; returns where the next one may start."""
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
