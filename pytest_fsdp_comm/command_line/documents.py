"""What can be shown and compared: snapshots, and the recordings and trees that tests save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.json import kind_of_document, load_recordings, parts_of
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.files import read_snapshot
from pytest_fsdp_comm.text.codec import CodecError
from pytest_fsdp_comm.tree.model import ShardTree, load_tree
from pytest_fsdp_comm.tree.profile import fold as fold_tree

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_fsdp_comm.comm.events import Recording
    from pytest_fsdp_comm.comm.profile import CommProfile

# What git calls the file of a side that has none.
NOWHERE: Final = "/dev/null"


def read_document(path: Path, *, where: str = "") -> SnapshotText:
    """Read a snapshot, or JSON as the snapshot that it would be."""
    # The profile of JSON has call sites. `where` is the file as the user would type it; empty for
    # the path itself.
    where = where or str(path)
    if path.is_dir():
        raise FsdpCommError(
            f"{where} is a directory; expected a snapshot (.comm) or a recording (.json)"
        )
    if path.suffix == ".json":
        saved = read_json(path, where=where)
        if isinstance(saved, ShardTree):
            return SnapshotText.of(fold_tree(saved), where=where)
        return SnapshotText.of(merge_recordings(saved), where=where)
    text = read_snapshot(path, where=where)
    if text is None:
        raise FsdpCommError(f"there is no file {where}")
    return text


def merge_recordings(recordings: Sequence[Recording]) -> CommProfile:
    """Make one profile of what several ranks recorded; those that are alike are counted once."""
    folded = {parts_of(one): one for one in recordings}
    profiles = {parts: fold(one) for parts, one in folded.items()}
    return merge(
        [profiles[parts_of(one)] for one in recordings], ranks=[one.rank for one in recordings]
    )


def read_json(path: Path, *, where: str) -> ShardTree | list[Recording]:
    """Read a tree as tests save it, or recordings of one block in the order of their ranks."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FsdpCommError(f"there is no file {where}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise FsdpCommError(f"{where} cannot be read: {problem}") from None
    try:
        if kind_of_document(text) == "tree":
            return load_tree(text)
        recordings = load_recordings(text)
    except CodecError as problem:
        raise FsdpCommError(f"{where}: {problem}") from None
    return sort_ranks(recordings, where=where)


def sort_ranks(recordings: Sequence[Recording], *, where: str) -> list[Recording]:
    """Sort recordings of one block by rank; refuse any others."""
    if not recordings:
        raise FsdpCommError(
            f"{where}: expected recordings, got a file that holds none; save one after a block: "
            "comm_mode.save(path)"
        )
    ordered = sorted(recordings, key=lambda recording: recording.rank)
    ranks = [recording.rank for recording in ordered]
    sizes = {recording.world_size for recording in ordered}
    if len(sizes) > 1 or len(set(ranks)) < len(ranks):
        raise FsdpCommError(
            f"{where}: expected recordings of different ranks of one world, got ranks "
            f"{', '.join(map(str, ranks))} of world sizes {', '.join(map(str, sorted(sizes)))}"
        )
    return ordered


def describe_problem(problem: FsdpCommError) -> str:
    """What is wrong with a file, without the remedy, which is for tests that fail."""
    return str(problem).partition(". Nothing was overwritten")[0]
