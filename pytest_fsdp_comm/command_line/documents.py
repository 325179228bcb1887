"""What commands read: snapshots, recordings and trees, and the settings of the project."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.comm.json import kind_of_document, load_recordings, parts_of
from pytest_fsdp_comm.comm.profile import CommProfile, fold, merge
from pytest_fsdp_comm.command_line.terminal import SAME
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.documents import Profile, SnapshotText, read_snapshot
from pytest_fsdp_comm.text.codec import CodecError
from pytest_fsdp_comm.text.words import counted, show_nbytes
from pytest_fsdp_comm.tree.model import ShardTree, load_tree
from pytest_fsdp_comm.tree.profile import fold as fold_tree


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
        recordings = sorted(load_recordings(text), key=lambda recording: recording.rank)
    except CodecError as problem:
        raise FsdpCommError(f"{where}: {problem}") from None
    if not recordings:
        raise FsdpCommError(
            f"{where}: expected recordings, got a file that holds none; save one after a block: "
            "comm_mode.save(path)"
        )
    ranks = [recording.rank for recording in recordings]
    sizes = {recording.world_size for recording in recordings}
    if len(sizes) > 1 or len(set(ranks)) < len(ranks):
        raise FsdpCommError(
            f"{where}: expected recordings of different ranks of one world, got ranks "
            f"{', '.join(map(str, ranks))} of world sizes {', '.join(map(str, sorted(sizes)))}"
        )
    return recordings


def describe_problem(problem: FsdpCommError) -> str:
    """What is wrong with a file, without the remedy, which is for tests that fail."""
    return str(problem).partition(". Nothing was overwritten")[0]


def summary_lines(profile: Profile) -> Iterator[str]:
    """A snapshot in a few statements."""
    yield counted(profile.world_size, "rank")
    if isinstance(profile, CommProfile):
        for total in profile.totals():
            of_all = f" of {total.num_ranks} ranks together" if total.num_ranks > 1 else ""
            has_size = total.nbytes or total.unsized
            nbytes = f", {show_nbytes(total.nbytes, total.unsized)}" if has_size else ""
            yield f"{total.count} {total.kind}[{total.axis}]{nbytes}{of_all}"
        if profile.peaks:
            yield f"peak gathered {show_nbytes(max(peak.nbytes for peak in profile.peaks))}"
    elif profile.common is None:
        yield f"{len(profile.trees)} different trees"
    else:
        yield counted(sum(map(len, profile.common.units.values())), "unit")
        yield counted(len(profile.common.parameters), "parameter")


def find_project(start: Path) -> tuple[Path, Path]:
    """The root of the project that an absolute directory is in, and its directory of snapshots."""
    config = _read_settings(start)
    given = config.getini("fsdp_comm_snapshot_dir") or "snapshots"
    return config.rootpath, Path(os.path.normpath(config.rootpath / given))


def find_collected(start: Path) -> tuple[list[Path], Sequence[str]]:
    """The directories and the patterns of files that ``pytest`` without arguments collects."""
    config = _read_settings(start)
    root, names = config.rootpath, config.getini("testpaths")
    places = [root / place for name in names for place in glob.glob(name, root_dir=root)]  # noqa: PTH207  # as pytest, which allows ".."
    places = places or [root / name for name in names if not glob.has_magic(name)]
    found = [Path(os.path.normpath(place)) for place in places if not place.is_file()]
    return found or [root], config.getini("python_files")


class _ReadSettings:
    """A plugin that ends pytest once it has read its settings."""

    config: Any = None

    def pytest_cmdline_main(self, config: Any) -> int:
        self.config = config
        return SAME


def _read_settings(start: Path) -> Any:
    """Pytest's configuration for tests in an absolute directory, which may not exist yet."""
    import pytest  # noqa: PLC0415  # importing it takes longer than most commands run

    plugin = _ReadSettings()
    directory = next(one for one in (start, *start.parents) if one.is_dir())
    # Neither the project's code nor other plugins' options are needed for that.
    quietly = ("--noconftest", "-o", "addopts=")
    pytest.main(["-p", "fsdp_comm", *quietly, str(directory)], plugins=[plugin])
    if plugin.config is None:
        raise FsdpCommError(f"pytest cannot read its settings for {directory}, as it says above")
    return plugin.config
