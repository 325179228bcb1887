"""Recordings as versioned JSON, for other tools; fields as in `events.Recording`."""

from __future__ import annotations

from typing import Final

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.text.codec import dump_document, load_document

JSON_VERSION: Final = 1
"""Rises when an older reader would misread the document."""

_KIND: Final = "recording"


def dump_recording(recording: Recording) -> str:
    """Writes a recording as JSON."""
    return dump_document(_KIND, JSON_VERSION, recording)


def load_recording(text: str) -> Recording:
    """Reads what `dump_recording` wrote.

    Raises:
        CodecError: The text is not JSON, of another kind or version, or says where it is no
            recording.
    """
    return load_document(Recording, _KIND, JSON_VERSION, text)
