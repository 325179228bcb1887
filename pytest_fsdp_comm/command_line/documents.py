"""Read snapshots, recordings, trees and the project's pytest settings."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_fsdp_comm.comm.divergence import find_divergence_of
from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.comm.json import kind_of_document, load_recordings, make_sharing_key
from pytest_fsdp_comm.comm.profile import CommProfile, fold, merge
from pytest_fsdp_comm.command_line.terminal import SAME
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.documents import Profile, SnapshotText, read_snapshot
from pytest_fsdp_comm.text.codec import CodecError
from pytest_fsdp_comm.text.words import show_count, show_nbytes
from pytest_fsdp_comm.tree.model import ShardTree, load_tree
from pytest_fsdp_comm.tree.profile import fold as fold_tree


def read_document(path: Path, *, where: str = "") -> SnapshotText:
    """Read a snapshot, or convert a JSON recording or tree into a snapshot.

    The profile of a converted recording also has call sites, which snapshots omit. In errors,
    the file is called `where`, which defaults to its path.
    """
    where = where or str(path)
    if path.is_dir():
        raise FsdpCommError(
            f"{where} is a directory; expected a snapshot (.comm) or a recording (.json)"
        )
    if path.suffix == ".json":
        saved = read_json(path, where=where)
        if isinstance(saved, ShardTree):
            return SnapshotText.from_profile(fold_tree(saved), where=where)
        return SnapshotText.from_profile(merge_recordings(saved), where=where)
    text = read_snapshot(path, where=where)
    if text is None:
        raise FsdpCommError(f"there is no file {where}")
    return text


def merge_recordings(recordings: Sequence[Recording]) -> CommProfile:
    """Merge the recordings of several ranks into one profile."""
    # Ranks often have identical recordings, so fold each distinct recording only once.
    distinct = {make_sharing_key(recording): recording for recording in recordings}
    profiles = {parts: fold(recording) for parts, recording in distinct.items()}
    merged = merge(
        [profiles[make_sharing_key(recording)] for recording in recordings],
        ranks=[recording.rank for recording in recordings],
    )
    return replace(merged, divergence=find_divergence_of(recordings))


def read_json(path: Path, *, where: str) -> ShardTree | list[Recording]:
    """Read a saved tree, or the recordings that all ranks made of one block, sorted by rank."""
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
        raise FsdpCommError(f"{where} has no recordings; call comm_mode.save(path) after a block")
    ranks = [recording.rank for recording in recordings]
    sizes = {recording.world_size for recording in recordings}
    if len(sizes) > 1 or len(set(ranks)) < len(ranks):
        raise FsdpCommError(
            f"{where}: expected one recording per rank, all with the same world size; got ranks "
            f"{', '.join(map(str, ranks))} with world sizes {', '.join(map(str, sorted(sizes)))}"
        )
    return recordings


def summary_lines(profile: Profile) -> Iterator[str]:
    """Yield a few phrases that summarize a snapshot."""
    yield show_count(profile.world_size, "rank")
    if isinstance(profile, CommProfile):
        for total in profile.totals():
            of_all = f" on {total.num_ranks} ranks together" if total.num_ranks > 1 else ""
            has_size = total.nbytes or total.unsized
            nbytes = f", {show_nbytes(total.nbytes, total.unsized)}" if has_size else ""
            yield f"{total.count} {total.kind}[{total.axis}]{nbytes}{of_all}"
        if profile.peaks:
            yield f"peak gathered {show_nbytes(max(peak.nbytes for peak in profile.peaks))}"
    elif profile.common is None:
        yield f"{len(profile.trees)} different trees"
    else:
        yield show_count(sum(map(len, profile.common.units.values())), "unit")
        yield show_count(len(profile.common.parameters), "parameter")


def find_project(start: Path) -> tuple[Path, Path]:
    """Return the root and snapshot directories that pytest would use in an absolute path."""
    config = _read_pytest_config(start)
    snapshot_dir = config.getini("fsdp_comm_snapshot_dir") or "snapshots"
    return config.rootpath, Path(os.path.normpath(config.rootpath / snapshot_dir))


def find_collected(start: Path) -> tuple[list[Path], Sequence[str]]:
    """Return the directories and file patterns that ``pytest`` without arguments searches."""
    config = _read_pytest_config(start)
    root, names = config.rootpath, config.getini("testpaths")
    paths = [root / path for name in names for path in glob.glob(name, root_dir=root)]  # noqa: PTH207  # as in pytest, names may contain ".."
    paths = paths or [root / name for name in names if not glob.has_magic(name)]
    directories = [Path(os.path.normpath(path)) for path in paths if not path.is_file()]
    return directories or [root], config.getini("python_files")


class _ConfigReader:
    """A pytest plugin that stores the configuration and then ends the session."""

    config: Any = None

    def pytest_cmdline_main(self, config: Any) -> int:
        self.config = config
        return SAME


def _read_pytest_config(start: Path) -> Any:
    """Return pytest's configuration for an absolute directory, which need not exist yet."""
    import pytest  # noqa: PLC0415  # its import takes longer than most commands

    plugin = _ConfigReader()
    directory = next(path for path in (start, *start.parents) if path.is_dir())
    # Ignore the project's conftest files and `addopts`, because they can require other plugins, and
    # settings that turn warnings, or settings that a conftest file declares, into errors.
    settings = ("addopts=", "filterwarnings=", "strict_config=false")
    arguments = [argument for setting in settings for argument in ("-o", setting)]
    arguments += ["-W", "ignore", "--noconftest", str(directory)]
    pytest.main(["-p", "fsdp_comm", *arguments], plugins=[plugin])
    if plugin.config is None:
        raise FsdpCommError(
            f"pytest could not read its configuration for {directory}; see the error above"
        )
    return plugin.config
