"""Recordings as versioned JSON, for other tools; fields as in `events.Recording`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.text.codec import CodecError, dump_document, load_document
from pytest_fsdp_comm.text.rank_lists import fold_equal

JSON_VERSION: Final = 1
"""Rises when an older reader would misread the document."""

_KIND: Final = "recording"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """What ran when ``fsdp-comm record`` recorded."""

    script: str
    """As it was given: a path, or the name of a module."""
    arguments: tuple[str, ...]
    is_module: bool
    first_step: int
    last_step: int
    local_world_size: int | None = None
    """Ranks per simulated host; None if the script ran as it does without this option."""

    @property
    def steps(self) -> str:
        """``step 3``, or ``steps 3-4``."""
        is_one = self.first_step == self.last_step
        return f"step {self.first_step}" if is_one else f"steps {self.first_step}-{self.last_step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recordings:
    recordings: tuple[Recording, ...]
    ranks_alike: tuple[tuple[int, ...], ...] = ()
    """The further ranks that recorded the same as each of these; empty if no two did."""
    run: ScriptRun | None = None
    """None if a test, or the program itself, recorded."""


def dump_recordings(recordings: Sequence[Recording]) -> str:
    """Write what several ranks recorded in one block as JSON, in the order of their ranks."""
    return dump_document(_KIND, JSON_VERSION, _Recordings(recordings=tuple(recordings)))


def join_recordings(texts: Mapping[int, str], run: ScriptRun | None = None) -> str:
    """Make one document of those of ranks, each of one recording; equal texts become one."""
    folded = fold_equal(texts)
    joined = _Recordings(
        recordings=tuple(
            replace(load_recordings(text)[0], rank=ranks[0]) for ranks, text in folded
        ),
        ranks_alike=tuple(tuple(ranks[1:]) for ranks, _ in folded),
        run=run,
    )
    return dump_document(_KIND, JSON_VERSION, joined)


def load_recordings(text: str) -> tuple[Recording, ...]:
    """Read what is written above; a CodecError says where it is no recording."""
    saved = load_document(_Recordings, _KIND, JSON_VERSION, text)
    alike = saved.ranks_alike or ((),) * len(saved.recordings)
    if len(alike) != len(saved.recordings):
        raise CodecError("recording: expected as many entries of ranks_alike as of recordings")
    return tuple(
        replace(first, rank=rank)
        for first, others in zip(saved.recordings, alike, strict=True)
        for rank in (first.rank, *others)
    )


def load_run(text: str) -> ScriptRun | None:
    """Read which script was recorded; None if none was, and errors as above."""
    return load_document(_Recordings, _KIND, JSON_VERSION, text).run


def parts_of(recording: Recording) -> tuple[int, ...]:
    """Equal for recordings that were read as alike, while they are kept."""
    names = {field.name for field in fields(recording)} - {"rank"}
    return tuple(id(getattr(recording, name)) for name in sorted(names))


def kind_of_document(text: str) -> str | None:
    """The kind that a document of ours says it is; None for any other text."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None
