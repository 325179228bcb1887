"""Convert recordings to and from versioned JSON; `events.Recording` describes the fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.text.codec import CodecError, dump_document, load_document
from pytest_fsdp_comm.text.rank_lists import group_ranks_by_text

JSON_VERSION: Final = 1
"""Increase this when a change would make older versions misread new documents."""

_KIND: Final = "recording"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """The script and the steps that ``fsdp-comm record`` recorded."""

    script: str
    """The path or module name from the command line."""
    arguments: tuple[str, ...]
    is_module: bool
    first_step: int
    last_step: int
    local_world_size: int | None = None
    """Number of ranks on each simulated host; None without `--local-world-size`."""

    @property
    def steps(self) -> str:
        is_one = self.first_step == self.last_step
        return f"step {self.first_step}" if is_one else f"steps {self.first_step}-{self.last_step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recordings:
    recordings: tuple[Recording, ...]
    ranks_alike: tuple[tuple[int, ...], ...] = ()
    """For each recording, the other ranks that recorded the same; empty if all ranks differ."""
    run: ScriptRun | None = None
    """None if the recordings come from a test, or from a `comm_mode` block in a script."""


def dump_recordings(recordings: Sequence[Recording]) -> str:
    """Return the recordings of all ranks in one `comm_mode` block as JSON, in rank order."""
    return dump_document(_KIND, JSON_VERSION, _Recordings(recordings=tuple(recordings)))


def join_recordings(texts: Mapping[int, str], run: ScriptRun | None = None) -> str:
    """Join single-rank documents, keyed by rank, into one document; store equal recordings once."""
    folded = group_ranks_by_text(texts)
    joined = _Recordings(
        recordings=tuple(
            replace(load_recordings(text)[0], rank=ranks[0]) for ranks, text in folded
        ),
        ranks_alike=tuple(tuple(ranks[1:]) for ranks, _ in folded),
        run=run,
    )
    return dump_document(_KIND, JSON_VERSION, joined)


def load_recordings(text: str) -> tuple[Recording, ...]:
    """Read the recordings of all ranks, or raise a CodecError that says where the text is wrong."""
    saved = load_document(_Recordings, _KIND, JSON_VERSION, text)
    further_ranks = saved.ranks_alike or ((),) * len(saved.recordings)
    if len(further_ranks) != len(saved.recordings):
        raise CodecError("recording: expected one entry of ranks_alike for each recording")
    return tuple(
        replace(first, rank=rank)
        for first, further in zip(saved.recordings, further_ranks, strict=True)
        for rank in (first.rank, *further)
    )


def load_run(text: str) -> ScriptRun | None:
    """Return the script run that ``fsdp-comm record`` recorded; None for other recordings."""
    return load_document(_Recordings, _KIND, JSON_VERSION, text).run


def make_sharing_key(recording: Recording) -> tuple[int, ...]:
    """Return a key that is equal for ranks that share one recording in a JSON document."""
    # The key consists of object ids, so it is valid only as long as the recording exists.
    names = {field.name for field in fields(recording)} - {"rank"}
    return tuple(id(getattr(recording, name)) for name in sorted(names))


def kind_of_document(text: str) -> str | None:
    """Return the ``kind`` field of a JSON document; None if there is none."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None
