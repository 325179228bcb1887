"""Errors that users can cause.

Each message says what was expected, what was received and where, and suggests a remedy.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

# Matches the beginning of a command to CI. GitHub runs `::command::` at the start of a line, after
# any spaces, and `##[command]` anywhere in a line; Azure Pipelines runs `##vso[command]`.
_CI_COMMAND: Final = re.compile(r"^\s*:(?=:)|#(?=#\w*\[)", re.MULTILINE)


def printable(text: str, keep: str = "") -> str:
    r"""Escape commands to CI, and unprintable characters that are not in `keep`, as ``\x1b``.

    Every name must pass this function before it is printed, because the author of a fork chooses
    the names in its snapshots, recordings and artifacts. Pass complete lines: a command may consist
    of a name and the text around it.
    """
    if not text.isprintable():
        text = "".join(
            character if character.isprintable() or character in keep else ascii(character)[1:-1]
            for character in text
        )
    if "::" in text or "##" in text:
        text = _CI_COMMAND.sub(lambda match: f"{match[0][:-1]}\\x{ord(match[0][-1]):02x}", text)
    return text


def quote_text(text: str, most: int = 100) -> str:
    """Quote a string for an error message, truncated to `most` characters."""
    quote = repr(text[:most])
    is_complete = len(text) <= most and len(quote) <= most
    return quote if is_complete else f"{quote[: most - 4]}...{quote[0]}"


# Quotes part of a line. The limit is lower, because the error may also quote the complete line.
quoted_part = partial(quote_text, most=50)


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
