"""A snapshot of either kind: its text, and beside it what the text says."""

from __future__ import annotations

from functools import cached_property
from typing import Self, TypeAlias

from pytest_fsdp_comm.comm import profile as comm
from pytest_fsdp_comm.comm.profile import CommProfile
from pytest_fsdp_comm.snapshots import comm_text, tree_text
from pytest_fsdp_comm.snapshots.lines import SnapshotLines
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
