"""Errors that users can cause.

Each message says what was expected, what was received and where, and suggests a remedy.
"""

from __future__ import annotations

from functools import partial


def printable(text: str, keep: str = "") -> str:
    r"""Escape unprintable characters that are not in `keep`, for example as ``\x1b``."""
    # Every printed name must be escaped, with this function or (in snapshots) `fqn.escape`.
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )


def quoted(text: str, most: int = 100) -> str:
    """Quote a string for an error message, truncated to `most` characters."""
    quote = repr(text[:most])
    is_complete = len(text) <= most and len(quote) <= most
    return quote if is_complete else f"{quote[: most - 4]}...{quote[0]}"


# Quotes part of a line. The limit is lower, because the error may also quote the complete line.
quoted_part = partial(quoted, most=50)


class FsdpCommError(Exception):
    """Base class of this plugin's errors."""

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text, "\n"))


class EmptyRecordingError(FsdpCommError):
    """An empty recording, or a tree without units and DTensors, was compared with a snapshot."""


class IncompleteRecordingError(FsdpCommError):
    """A recording that is known to be incomplete was compared with a snapshot."""


class SnapshotFormatError(FsdpCommError):
    """A snapshot file is corrupted, truncated or empty, or has a newer format."""


class RecordingError(FsdpCommError):
    """The recorder was used in a way that cannot produce a correct recording."""


class UpstreamChangedError(FsdpCommError):
    """The plugin uses a private name of torch, pytest or syrupy that no longer exists."""


class RanksDivergedError(FsdpCommError):
    """The ranks of a test did not make the same comparisons."""


class UnseenCollectivesWarning(UserWarning):
    """A recording lacks communication that happened during its block."""
