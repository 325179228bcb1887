"""Read, write and compare snapshots of recordings and trees."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Self, TypeAlias

from pytest_fsdp_comm.comm import profile as comm
from pytest_fsdp_comm.comm.mesh import group_counts
from pytest_fsdp_comm.comm.profile import CommProfile
from pytest_fsdp_comm.snapshots import comm_text, tree_text
from pytest_fsdp_comm.snapshots.lines import MAX_BYTES, SnapshotLines, line_error, too_large
from pytest_fsdp_comm.tree import profile as tree
from pytest_fsdp_comm.tree.profile import TreeProfile

Profile: TypeAlias = CommProfile | TreeProfile


class SnapshotText(str):
    """A snapshot's text and its parsed content; a str, because syrupy accepts only strings."""

    __slots__ = ("__dict__", "lines")

    lines: SnapshotLines

    def __new__(cls, text: str, *, where: str) -> Self:
        """Raise SnapshotFormatError for a bad first or last line; `profile` checks the rest."""
        # git or an editor may have converted LF to CRLF.
        snapshot = super().__new__(cls, text.replace("\r\n", "\n"))
        snapshot.lines = SnapshotLines(str(snapshot), where=where)
        return snapshot

    @classmethod
    def from_profile(cls, profile: Profile, *, where: str) -> Self:
        """Format a profile as text, and attach the profile, because the text omits some facts."""
        if isinstance(profile, CommProfile):
            snapshot = cls(comm_text.format_profile(profile), where=where)
        else:
            snapshot = cls(tree_text.format_profile(profile), where=where)
        snapshot.profile = profile
        return snapshot

    @cached_property
    def profile(self) -> Profile:
        """The profile, parsed only when needed, because the compared texts are usually equal."""
        read = comm_text.read_comm if self.lines.kind == "comm" else tree_text.read_tree
        return read(self.lines)


def has_lost_ranks(old: Profile, new: Profile) -> bool:
    """Return whether an update would lose ranks that only the old profile has."""
    before, after = (set(side.recorded_ranks or range(side.world_size)) for side in (old, new))
    return not before <= after


def divergence_of(profile: Profile) -> str:
    """Return where the ranks of a recording diverge; an empty string if they do not."""
    divergence = profile.divergence if isinstance(profile, CommProfile) else None
    return "" if divergence is None else str(divergence)


def body(text: str) -> str:
    """Return a snapshot without its first line, which names versions and is not compared."""
    return text.partition("\n")[2]


def differs(old: SnapshotText, new: SnapshotText) -> bool:
    """Return whether any compared fact differs."""
    if body(old) == body(new):
        return False
    match old.profile, new.profile:
        case CommProfile() as was, CommProfile() as now:
            is_same_scope = was.sizes_activations == now.sizes_activations
            was, now = comm.make_comparable(was, now)
            counts, new_counts = group_counts(was.mesh_axes), group_counts(now.mesh_axes)
            return not is_same_scope or was != now or counts != new_counts
        case TreeProfile() as before, TreeProfile() as after:
            return tree.restrict_to_ranks_of(before, after) != after
    return True


def read_snapshot(path: Path, *, where: str) -> SnapshotText | None:
    """Read a snapshot, or raise SnapshotFormatError; return None if there is no file."""
    try:
        # Check this before opening: a FIFO would block until its other end is opened.
        if path.exists() and not path.is_file():
            raise line_error(where, 1, "it is not a regular file", "a snapshot")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise too_large(where, os.fstat(file.fileno()).st_size)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
        raise line_error(where, 1, problem, "a readable file") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        problem = f"it cannot be read as UTF-8 text ({error.reason})"
        raise line_error(where, line, problem, "a snapshot") from None
    return SnapshotText(text, where=where)
