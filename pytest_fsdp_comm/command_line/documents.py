"""What can be shown and compared: snapshots, recordings and trees, from files and from git."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.json import kind_of_document, load_recordings
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.command_line.errors import CommandError
from pytest_fsdp_comm.snapshots.documents import Profile, SnapshotText
from pytest_fsdp_comm.snapshots.files import read_snapshot
from pytest_fsdp_comm.text.codec import CodecError
from pytest_fsdp_comm.tree.json import load_tree
from pytest_fsdp_comm.tree.model import ShardTree
from pytest_fsdp_comm.tree.profile import fold as fold_tree

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_fsdp_comm.comm.events import Recording
    from pytest_fsdp_comm.errors import FsdpCommError

NOWHERE: Final = "/dev/null"
"""What git calls the file of a side that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One side of a comparison."""

    where: str
    """The file, as the user would type it."""
    text: SnapshotText
    """As a snapshot of it would be written."""
    profile: Profile
    """What it says; with call sites where it was recorded."""
    tree: ShardTree | None = None
    """The tree that a test saved as JSON; None for anything else."""

    @property
    def body(self) -> str:
        """What is compared: all but the first line."""
        return self.text.partition("\n")[2]


def read_document(path: Path, *, where: str = "") -> Document:
    """Reads a file.

    Args:
        path: A snapshot, or JSON of a recording, of several, or of a tree.
        where: As `Document.where`; empty for the path itself.

    Raises:
        CommandError: There is no such file, or it is a directory.
        FsdpCommError: It is broken; the text says in which line, and what was expected.
    """
    where = where or str(path)
    if path.is_dir():
        raise CommandError(
            f"{where} is a directory; expected a snapshot (.comm) or a recording (.json)"
        )
    if path.suffix == ".json":
        return _read_json(path, where)
    text = read_snapshot(path, where=where)
    if text is None:
        raise CommandError(f"there is no file {where}")
    return document_of(text, where=where)


def document_of(text: SnapshotText, *, where: str) -> Document:
    """The document that a snapshot is."""
    return Document(where=where, text=text, profile=text.profile)


def read_recordings(path: Path) -> tuple[Recording, ...]:
    """Reads what ``comm_mode.save`` wrote.

    Raises:
        CommandError: There is no such file, or it holds something else.
    """
    return _load_recordings(_read_text(path, str(path)), str(path))


def _load_recordings(text: str, where: str) -> tuple[Recording, ...]:
    try:
        return load_recordings(text)
    except CodecError as problem:
        raise CommandError(f"{where}: {problem}") from None


def _read_text(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CommandError(f"there is no file {where}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise CommandError(f"{where} cannot be read: {problem}") from None


def _read_json(path: Path, where: str) -> Document:
    text = _read_text(path, where)
    if kind_of_document(text) == "tree":
        try:
            tree = load_tree(text)
        except CodecError as problem:
            raise CommandError(f"{where}: {problem}") from None
        return _written(fold_tree(tree), where, tree)
    return _written(merge_recordings(_load_recordings(text, where), where=where), where)


def _written(profile: Profile, where: str, tree: ShardTree | None = None) -> Document:
    text = SnapshotText.of(profile, where=where)
    return Document(where=where, text=text, profile=profile, tree=tree)


def merge_recordings(recordings: Sequence[Recording], *, where: str) -> Profile:
    """The profile of what several ranks recorded.

    Args:
        recordings: One for each rank.
        where: Where they come from, for errors.

    Raises:
        CommandError: They are not of different ranks of one world.
    """
    return merge([fold(recording) for recording in check_ranks(recordings, where=where)])


def check_ranks(recordings: Sequence[Recording], *, where: str) -> list[Recording]:
    """Recordings of one block in the order of their ranks; arguments and errors as above."""
    ordered = sorted(recordings, key=lambda recording: recording.rank)
    ranks = [recording.rank for recording in ordered]
    sizes = {recording.world_size for recording in ordered}
    if not ordered or len(sizes) > 1 or len(set(ranks)) < len(ranks):
        raise CommandError(
            f"{where}: expected recordings of different ranks of one world, got ranks "
            f"{_listed(ranks)} of world sizes {_listed(sorted(sizes))}"
        )
    return ordered


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def describe_problem(problem: FsdpCommError) -> str:
    """What is wrong with a file, without the remedy, which is for tests that fail."""
    return str(problem).partition(". Nothing was overwritten")[0]
