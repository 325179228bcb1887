"""Recordings and profiles as versioned JSON, for the way between processes and into reports."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final, TypeVar

from pytest_fsdp_comm.comm.events import (
    Collective,
    HostDeviceCopy,
    MeshAxis,
    Phase,
    Recording,
    Redistribution,
    Reshard,
    Source,
    Timing,
)
from pytest_fsdp_comm.comm.profile import (
    CommProfile,
    CommRow,
    RedistributionRow,
    ReshardRow,
    Site,
)
from pytest_fsdp_comm.errors import FsdpCommError

JSON_VERSION: Final = 1
"""Rises when an older reader would misread the document."""

_Value = TypeVar("_Value")

_PARTS: Final[dict[tuple[str, str], type]] = {
    ("Recording", "mesh_axes"): MeshAxis,
    ("Recording", "collectives"): Collective,
    ("Recording", "reshards"): Reshard,
    ("Recording", "redistributions"): Redistribution,
    ("Recording", "copies"): HostDeviceCopy,
    ("Recording", "timings"): Timing,
    ("CommProfile", "mesh_axes"): MeshAxis,
    ("CommProfile", "rows"): CommRow,
    ("CommProfile", "reshards"): ReshardRow,
    ("CommProfile", "redistributions"): RedistributionRow,
    ("CommRow", "sites"): Site,
}
"""The fields that hold tuples of records."""


def dump_recording(recording: Recording) -> str:
    """Writes a recording as JSON."""
    return _dump("recording", recording)


def load_recording(text: str) -> Recording:
    """Reads what `dump_recording` wrote.

    Raises:
        FsdpCommError: The text is of another kind or version.
    """
    return _load("recording", Recording, text)


def dump_profile(profile: CommProfile) -> str:
    """Writes a profile, sites included, as JSON."""
    return _dump("profile", profile)


def load_profile(text: str) -> CommProfile:
    """Reads what `dump_profile` wrote.

    Raises:
        FsdpCommError: The text is of another kind or version.
    """
    return _load("profile", CommProfile, text)


def _dump(kind: str, value: Any) -> str:
    document = {"version": JSON_VERSION, "kind": kind, kind: dataclasses.asdict(value)}
    return json.dumps(document, separators=(",", ":"))


def _load(kind: str, cls: type[_Value], text: str) -> _Value:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise FsdpCommError(f"expected a {kind} as JSON: {error}") from None
    found = (document.get("version"), document.get("kind")) if isinstance(document, dict) else None
    if found != (JSON_VERSION, kind):
        raise FsdpCommError(
            f"expected a {kind} of JSON version {JSON_VERSION}, got {found}; it was written by "
            "another version of pytest-fsdp-comm: use the same one to read it"
        )
    return _build(cls, document[kind])


def _build(cls: type[_Value], data: dict[str, Any]) -> _Value:
    values = dict(data)
    for name, value in data.items():
        if isinstance(value, list):
            part = _PARTS.get((cls.__name__, name))
            values[name] = tuple(_build(part, entry) if part else entry for entry in value)
        elif name == "phase":
            values[name] = Phase(value)
        elif name == "source":
            values[name] = Source(value)
    return cls(**values)
