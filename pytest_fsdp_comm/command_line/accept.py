"""``fsdp-comm accept``: copy received snapshots from CI, and print what changed."""

from __future__ import annotations

import argparse
import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pytest_fsdp_comm.command_line.diff import Pair, print_explanations
from pytest_fsdp_comm.command_line.documents import find_project, read_document
from pytest_fsdp_comm.command_line.terminal import describe_problem, print_problems
from pytest_fsdp_comm.errors import FsdpCommError, printable, quote_text
from pytest_fsdp_comm.snapshots.documents import body, read_snapshot
from pytest_fsdp_comm.snapshots.names import SUFFIX, escape_test_name
from pytest_fsdp_comm.text.files import EXPECTED, RECEIVED, write_atomically
from pytest_fsdp_comm.text.words import join_first, show_count, show_path

_MAX_LISTED = 2  # received snapshots in an error
# The end of a test's id that names its world size, such as "[ws4]" or "-ws4]".
_SIZE = re.compile(r"(?:\[|-(?=ws\d+(\])$))ws(\d+)\]$")


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
    if not received.is_dir() or _has_symlink_between(received, received.parent):
        raise FsdpCommError(
            f"{options.directory} has no directory {RECEIVED!r}; expected the unpacked output of "
            "pytest --comm-artifacts=DIR, which is empty if no comparison failed"
        )
    changed: list[Pair] = []
    refused: list[str] = []
    files = [path.relative_to(received) for path in sorted(received.rglob(f"*{SUFFIX}"))]
    for file in _choose_files(files, options.names):
        try:
            pair = _copy_received_file(file, Path(options.directory), snapshot_dir)
        except FsdpCommError as problem:
            refused.append(f"refused: {describe_problem(problem)}")
        else:
            changed += [pair] if pair.old != pair.new else []
    _, failures = print_explanations(changed)
    num_breaking = sum(failure.severity == "breaks training" for failure in failures)
    breaks = f", {num_breaking} of them although the change breaks training" if num_breaking else ""
    refusals = f", {len(refused)} refused" if refused else ""
    print(f"{show_count(len(changed), 'file')} accepted{breaks}{refusals}")  # noqa: T201  # the program's output
    return print_problems(refused)


def _choose_files(files: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    """Return the files that match a pattern; all files if there are no patterns."""
    if not patterns:
        return [*files]
    matches = {key: [file for file in files if _is_match(file, key)] for key in patterns}
    unknown = [pattern for pattern, paths in matches.items() if not paths]
    if unknown:
        names = ", ".join(map(quote_text, unknown))
        listed = [printable(file.as_posix()) for file in files]
        raise FsdpCommError(
            f"expected names or patterns of received snapshots, got {names}, which match none of "
            f"{join_first(listed, _MAX_LISTED) or '0 files'}"
        )
    return sorted({file for paths in matches.values() for file in paths})


def _is_match(file: Path, pattern: str) -> bool:
    """Whether a pattern is the end of a path, with wildcards, or the test's name or node id."""
    module, separator, test = pattern.rpartition(".py::")
    test = test.replace("::", ".")
    size = _SIZE.search(test)
    name = escape_test_name(f"{test[: size.start()]}{size[1] or ''}" if size else test)
    name = f"{module}{separator and '/'}{name}{f'.ws{size[2]}' if size else ''}"
    literal = glob.escape(pattern)
    test = glob.escape(name)
    # A name without parameters stands for all of its tests.
    patterns = (pattern, literal, f"{literal}.*", f"{test}.*", f"{test}[[]*")
    return bool(pattern) and any(map(file.match, patterns))


def _copy_received_file(file: Path, artifacts: Path, snapshot_dir: Path) -> Pair:
    """Copy a received file into the snapshot directory; return its old and new text."""
    # Do not trust `artifacts`: a pull request controls its file names, contents and links.
    received, expected = (artifacts / side / file for side in (RECEIVED, EXPECTED))
    target = snapshot_dir / file
    for path, directory in ((received, artifacts), (expected, artifacts), (target, snapshot_dir)):
        if _has_symlink_between(path, directory):
            raise FsdpCommError(
                f"{show_path(path)} leads through a symlink to {os.path.realpath(path)}; fsdp-comm "
                "accept does not follow symlinks: replace the symlink with a real file or directory"
            )
    name = show_path(target)
    old = read_snapshot(target, where=name)
    pair = Pair(old=old, new=read_document(received), old_path=name, new_path=name)
    if pair.old != pair.new:
        _check_unchanged_since_failure(pair, expected)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, str(pair.newer))
        except OSError as problem:
            raise FsdpCommError(
                f"cannot write {name} ({problem.strerror or problem}); the snapshot is unchanged"
            ) from None
    return pair


def _check_unchanged_since_failure(pair: Pair, expected: Path) -> None:
    """Raise an error if the snapshot is not the one that the failed test compared with."""
    name = show_path(expected)
    compared = read_snapshot(expected, where=name)
    if pair.old is None or compared is None:
        is_unchanged, change = pair.old is compared, f"was removed, but {name} exists"
        change = f"exists, but {name} does not" if pair.old else change
    else:
        is_unchanged, change = body(pair.old) == body(compared), f"differs from {name}"
    if not is_unchanged:
        raise FsdpCommError(
            f"{pair.new_path} {change}: it has changed since the test failed. Run the tests again "
            "with --comm-artifacts, and accept the new files"
        )


def _has_symlink_between(path: Path, directory: Path) -> bool:
    """Return whether `path`, or a directory between it and `directory`, is a symlink."""
    return Path(os.path.realpath(path)) != directory.resolve() / path.relative_to(directory)
