"""A snapshot of either kind: its text, and beside it what the text says."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from pytest_fsdp_comm.comm.profile import CommProfile
from pytest_fsdp_comm.snapshots import comm_text, tree_text
from pytest_fsdp_comm.snapshots.comm_reading import CommDocument
from pytest_fsdp_comm.snapshots.lines import SnapshotLines
from pytest_fsdp_comm.snapshots.tree_reading import TreeDocument
from pytest_fsdp_comm.tree.profile import TreeProfile

if TYPE_CHECKING:
    from collections.abc import Mapping

Profile: TypeAlias = CommProfile | TreeProfile

_DOCUMENTS: Final[Mapping[str, type[CommDocument | TreeDocument]]] = {
    "comm": CommDocument,
    "tree": TreeDocument,
}


class SnapshotText(str):
    """A text that was checked to be a snapshot, and knows what it says.

    syrupy passes one value from reading or serializing on to comparing and reporting, and treats it
    as text.
    """

    __slots__ = ("__dict__", "_document")

    _document: CommDocument | TreeDocument

    def __new__(cls, text: str, *, where: str, profile: Profile | None = None) -> Self:
        """Checks a text, and builds nothing.

        Args:
            text: The whole text, with LF at the ends of its lines.
            where: The file's path, for errors.
            profile: What the text was written from, with what is not written; None if it was read.

        Raises:
            SnapshotFormatError: A line is not as it would be written.
        """
        lines = SnapshotLines(text, where=where)
        snapshot = super().__new__(cls, text)
        snapshot._document = _DOCUMENTS[lines.kind](lines)
        if profile is not None:
            snapshot.profile = profile
        return snapshot

    @classmethod
    def of(cls, profile: Profile, *, where: str) -> Self:
        """Writes a profile.

        Raises:
            SnapshotFormatError: It is beyond what a snapshot may hold.
        """
        match profile:
            case CommProfile():
                text = comm_text.format_profile(profile)
            case TreeProfile():
                text = tree_text.format_profile(profile)
        return cls(text, where=where, profile=profile)

    @cached_property
    def profile(self) -> Profile:
        """What the text says, built on first use: most texts are equal to the one beside them."""
        return self._document.profile()

    @property
    def lines(self) -> SnapshotLines:
        """The text's lines, for errors."""
        return self._document.lines
