"""Recordings as versioned JSON, for other tools; fields as in `events.Recording`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.text.codec import dump_document, load_document

if TYPE_CHECKING:
    from collections.abc import Sequence

JSON_VERSION: Final = 1
"""Rises when an older reader would misread the document."""

_KIND: Final = "recording"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recordings:
    recordings: tuple[Recording, ...]


def dump_recordings(recordings: Sequence[Recording]) -> str:
    """Write what several ranks recorded in one block as JSON, in the order of their ranks."""
    return dump_document(_KIND, JSON_VERSION, _Recordings(recordings=tuple(recordings)))


def load_recordings(text: str) -> tuple[Recording, ...]:
    """Read what `dump_recordings` wrote; a CodecError says where it is no recording."""
    return load_document(_Recordings, _KIND, JSON_VERSION, text).recordings


def kind_of_document(text: str) -> str | None:
    """The kind that a document of ours says it is; None for any other text."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None
