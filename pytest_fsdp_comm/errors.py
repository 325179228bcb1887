"""Errors that a user can cause, each with what was expected, what came, where, and the remedy."""

from __future__ import annotations

from functools import partial


def printable(text: str, keep: str = "") -> str:
    r"""Replace what steers a terminal or begins a line, unless `keep` has it: ``\x1b``."""
    # Every name passes it that is not written as in a snapshot, where it comes in or where it
    # leaves.
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )


def quoted(text: str, most: int = 100) -> str:
    """Quote what came, cut to so many characters, so that an error stays short."""
    shown = repr(text[:most])
    is_whole = len(text) <= most and len(shown) <= most
    return shown if is_whole else f"{shown[: most - 4]}...{shown[0]}"


# Of a part of a line that may be quoted too.
quoted_part = partial(quoted, most=50)


class FsdpCommError(Exception):
    """Base of every error that this plugin raises on purpose."""

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text, "\n"))


class EmptyRecordingError(FsdpCommError):
    """An empty recording, or a tree without sharded parameters, was compared with a snapshot."""


class IncompleteRecordingError(FsdpCommError):
    """A recording that is known not to be the whole truth was compared with a snapshot."""


class SnapshotFormatError(FsdpCommError):
    """A snapshot file is corrupted, truncated, empty, or of a newer format."""


class RecordingError(FsdpCommError):
    """The recorder was used in a way that cannot give a true recording."""


class UpstreamChangedError(FsdpCommError):
    """A private name of torch, pytest or syrupy that the plugin relies on is missing."""


class RanksDivergedError(FsdpCommError):
    """The ranks of one test did not reach the same comparison."""


class UnseenCollectivesWarning(UserWarning):
    """Something was sent while a recording was under way that it does not have."""
