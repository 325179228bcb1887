"""``fsdp-comm accept``: copy received snapshots from CI, and print what changed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pytest_fsdp_comm.command_line.diff import Pair, print_explanations
from pytest_fsdp_comm.command_line.documents import describe_problem, find_project, read_document
from pytest_fsdp_comm.command_line.terminal import print_problems
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.documents import RECEIVED, read_snapshot, write_atomically
from pytest_fsdp_comm.snapshots.names import SUFFIX
from pytest_fsdp_comm.text.words import counted, show_path


def run(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm accept``."""
    _, snapshot_dir = find_project(Path.cwd())
    # Do not create the directory: if the user runs this outside the project, no test would read the
    # accepted files.
    if not snapshot_dir.is_dir():
        raise FsdpCommError(
            f"there is no snapshot directory {show_path(snapshot_dir)}; run this command in the "
            "project directory"
        )
    received = Path(options.directory, RECEIVED)
    if not received.is_dir() or _is_link(received, received.parent):
        raise FsdpCommError(
            f"{options.directory} has no directory {RECEIVED!r}; expected the unpacked output of "
            "pytest --comm-artifacts=DIR, which is empty if no comparison failed"
        )
    changed: list[Pair] = []
    refused: list[str] = []
    for file in sorted(received.rglob(f"*{SUFFIX}")):
        try:
            pair = _copy(file, received, snapshot_dir)
        except FsdpCommError as problem:
            refused.append(f"refused: {describe_problem(problem)}")
        else:
            changed += [pair] if pair.old != pair.new else []
    print_explanations(changed)
    refusals = f", {len(refused)} refused" if refused else ""
    print(f"{counted(len(changed), 'file')} accepted{refusals}")  # noqa: T201  # the program's output
    return print_problems(refused)


def _copy(file: Path, received: Path, snapshot_dir: Path) -> Pair:
    """Copy a received file into the snapshot directory; return its old and new text."""
    # Do not trust `received`: a pull request controls its file names, contents and links.
    target = snapshot_dir / file.relative_to(received)
    for path, below in ((file, received), (target, snapshot_dir)):
        if _is_link(path, below):
            raise FsdpCommError(
                f"{show_path(path)} leads through a symlink to {os.path.realpath(path)}; fsdp-comm "
                "accept does not follow symlinks: replace the symlink with a real file or directory"
            )
    name = show_path(target)
    old = read_snapshot(target, where=name)
    pair = Pair(old=old, new=read_document(file), old_path=name, new_path=name)
    if pair.old != pair.new:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, str(pair.newer))
        except OSError as problem:
            raise FsdpCommError(
                f"cannot write {name} ({problem.strerror or problem}); the snapshot is unchanged"
            ) from None
    return pair


def _is_link(path: Path, below: Path) -> bool:
    """Return whether `path`, or a directory between it and `below`, is a symlink."""
    return Path(os.path.realpath(path)) != below.resolve() / path.relative_to(below)
