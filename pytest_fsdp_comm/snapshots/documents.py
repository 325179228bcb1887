"""A snapshot of either kind: its text and what it says; and the files that hold snapshots."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Final, Self, TypeAlias

from pytest_fsdp_comm.comm import profile as comm
from pytest_fsdp_comm.comm.profile import CommProfile
from pytest_fsdp_comm.snapshots import comm_text, tree_text
from pytest_fsdp_comm.snapshots.lines import MAX_BYTES, SnapshotLines, line_error, too_large
from pytest_fsdp_comm.tree import profile as tree
from pytest_fsdp_comm.tree.profile import TreeProfile

Profile: TypeAlias = CommProfile | TreeProfile


class SnapshotText(str):
    """The text of a snapshot, and what it says, in the one value that syrupy passes on as text."""

    __slots__ = ("__dict__", "lines")

    lines: SnapshotLines

    def __new__(cls, text: str, *, where: str) -> Self:
        """Check the frame of a text, or raise SnapshotFormatError; `profile` checks the rest."""
        # git or an editor may have made LF into CRLF.
        snapshot = super().__new__(cls, text.replace("\r\n", "\n"))
        snapshot.lines = SnapshotLines(str(snapshot), where=where)
        return snapshot

    @classmethod
    def of(cls, profile: Profile, *, where: str) -> Self:
        """Write a profile, which the text holds with what is not written; refuse a large one."""
        if isinstance(profile, CommProfile):
            snapshot = cls(comm_text.format_profile(profile), where=where)
        else:
            snapshot = cls(tree_text.format_profile(profile), where=where)
        snapshot.profile = profile
        return snapshot

    @cached_property
    def profile(self) -> Profile:
        """What the text says, read on first use: most texts are equal to the one beside them."""
        read = comm_text.read_comm if self.lines.kind == "comm" else tree_text.read_tree
        return read(self.lines)


def has_further_ranks(profile: Profile, other: Profile) -> bool:
    """Whether a profile has ranks that another one lacks, which thus must not replace it."""
    one, two = (set(side.recorded_ranks or range(side.world_size)) for side in (profile, other))
    return not one <= two


def body(text: str) -> str:
    """All of a snapshot but its first line, which names versions and is not compared."""
    return text.partition("\n")[2]


def differs(old: SnapshotText, new: SnapshotText) -> bool:
    """Decide whether anything that is compared differs, without asking why."""
    if body(old) == body(new):
        return False
    match old.profile, new.profile:
        case CommProfile() as was, CommProfile() as now:
            is_same_scope = was.sizes_activations == now.sizes_activations
            was, now = comm.comparable(was, now)
            return not is_same_scope or was != now
        case TreeProfile() as before, TreeProfile() as after:
            return tree.comparable(before, after) != after
    return True


def read_snapshot(path: Path, *, where: str) -> SnapshotText | None:
    """Read a snapshot, or raise SnapshotFormatError for its frame; None if there is no file."""
    try:
        # Opening a FIFO would wait for its other end.
        if path.exists() and not path.is_file():
            raise line_error(where, 1, "it is not a regular file", "a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise too_large(where, os.fstat(file.fileno()).st_size)
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
