"""Snapshot files on disk, and what ``--comm-artifacts`` keeps of failed comparisons."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pytest_fsdp_comm.errors import SnapshotFormatError
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.lines import MAX_BYTES, line_error, too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FILE_TYPES: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def read_snapshot(path: Path, *, where: str) -> SnapshotText | None:
    """Read a snapshot, or raise SnapshotFormatError for its frame; None if there is no file."""
    try:
        raw = _read_regular(path, where)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _no_file(path, where, error.strerror or str(error)) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        came = f"it cannot be read as UTF-8 text ({error.reason})"
        raise line_error(where, line, came, "a snapshot") from None
    return SnapshotText(text, where=where)


def _read_regular(path: Path, where: str) -> bytes:
    # Neither wait for the other end of a FIFO, nor make a terminal the controlling one.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _no_file(path, where, "")
        if found.st_size > MAX_BYTES:
            raise too_large(where, found.st_size)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)


def _no_file(path: Path, where: str, reason: str) -> SnapshotFormatError:
    try:
        mode = path.stat().st_mode
    except OSError:
        mode = stat.S_IFREG
    file_type = next((name for is_type, name in _FILE_TYPES if is_type(mode)), "")
    came = f"it is {file_type}" if file_type else f"it cannot be read ({reason})"
    return SnapshotFormatError(
        f"{where}, line 1: {came}; expected a regular file. Nothing was overwritten: move it away "
        "or make it readable, then restore the file with `git checkout`, or record it again with "
        "--snapshot-update"
    )


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by a whole one: at any time, the old or the new is there; or raise OSError."""
    unfinished = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# Note [Kept files]: each directory is laid out like that of the snapshots.
#
#     received/tests/test_step/test_step.ws4.comm   what was recorded
#     expected/tests/test_step/test_step.ws4.comm   what it was compared with; none for a new file
#     stories/tests/test_step/test_step.ws4.txt     how they differ, and the code that sends
#
# The received file is written last: where it is, the others are complete.
RECEIVED: Final = "received"
EXPECTED: Final = "expected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """The files that are kept of one comparison (see Note [Kept files])."""

    received: Path
    expected: Path
    story: Path

    @classmethod
    def of(cls, directory: Path, snapshot: Path) -> Self:
        """Where they are, for a snapshot's path relative to the directory of all snapshots."""
        return cls(
            received=directory / RECEIVED / snapshot,
            expected=directory / EXPECTED / snapshot,
            story=directory / "stories" / snapshot.with_suffix(".txt"),
        )

    def keep(self, *, received: str, expected: str | None, story: Sequence[str]) -> None:
        """Replace an earlier run's, or raise OSError; `expected` is None for a new snapshot."""
        text = "\n".join(story) + "\n"
        contents = ((self.story, text), (self.expected, expected), (self.received, received))
        for path, content in contents:
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, content)

    def forget(self) -> None:
        """Remove those of an earlier run, which would bring its state back."""
        for path in (self.received, self.expected, self.story):
            path.unlink(missing_ok=True)
