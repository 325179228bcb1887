"""Files on disk: snapshots, what ``--comm-artifacts`` keeps, and pages of the HTML report."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.lines import MAX_BYTES, line_error, too_large

if TYPE_CHECKING:
    from pytest_fsdp_comm.reports.html.values import Run


def read_snapshot(path: Path, *, where: str) -> SnapshotText | None:
    """Read a snapshot, or raise SnapshotFormatError for its frame; None if there is no file."""
    try:
        raw = _read_regular(path, where)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        came = f"it cannot be read ({error.strerror or error})"
        raise line_error(where, 1, came, "a regular file") from None
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
            raise line_error(where, 1, "it is not a regular file", "a regular file")
        if found.st_size > MAX_BYTES:
            raise too_large(where, found.st_size)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by a whole one: at any time, the old or the new is there; or raise OSError."""
    unfinished = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# Directories of ``--comm-artifacts``, each laid out like that of the snapshots: what was recorded,
# and what it was compared with, which is missing for a new file.
RECEIVED: Final = "received"
EXPECTED: Final = "expected"


def write_report(run: Run, directory: Path) -> None:
    """Write index and pages of an HTML report over those of an earlier run, or raise OSError."""
    from pytest_fsdp_comm.reports.html.pages import render_pages  # noqa: PLC0415  # loads jinja2

    (directory / "tests").mkdir(parents=True, exist_ok=True)
    pages = render_pages(run, lambda text: SnapshotText(text, where="the recording").profile)
    for name, page in pages:
        write_atomically(directory / name, page)
