"""Suggest an existing snapshot file if the one that a test needs is missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest

from pytest_fsdp_comm.marker import snapshot_test_name
from pytest_fsdp_comm.options import OPTIONS
from pytest_fsdp_comm.snapshots.names import (
    SUFFIX,
    directory_to_module,
    escape_test_name,
    module_to_directory,
    read_basename,
    strip_test_parameters,
)
from pytest_fsdp_comm.text.words import shell_word, show_count, show_path

MISSING: Final = "there is no snapshot "
"""Begins the error of a comparison without a snapshot."""

# Stash key; the value has all tests of the collected modules, including deselected ones. Not set if
# only some tests of a module were collected.
COLLECTED: Final = pytest.StashKey[Sequence[pytest.Item]]()


def list_snapshot_files(root: Path) -> list[Path]:
    """Return all snapshot files below a directory, sorted."""
    return sorted(path for path in root.rglob(f"*{SUFFIX}") if path.is_file())


def path_from(config: pytest.Config, path: Path) -> str:
    """Return a path relative to the directory that pytest was started in."""
    return os.path.relpath(path, config.invocation_params.dir)


def describe_neighbour(item: pytest.Item, missing: Path, text: str) -> str:
    """Return a hint about an existing file that the user may have meant instead of `missing`.

    The hint is empty if no file fits. `text` is the snapshot that would be written to `missing`.
    """
    if nested := _describe_nested_project(item, missing):
        return nested
    # Suggest the test's file for a different world size, or a file of a test that no longer exists,
    # because that test was probably renamed.
    name, variant = read_basename(missing.stem) or ("", "")
    index = missing.stem.removeprefix(f"{name}.{variant}")
    orphans: list[Path] = []
    for path in list_snapshot_files(item.config.stash[OPTIONS].snapshot_dir):
        test, size = read_basename(path.stem) or ("", "")
        if path.stem != f"{test}.{size}{index}":
            continue
        if path.parent == missing.parent and test == name:
            ranks = show_count(int(size.removeprefix("ws")), "rank")
            return f"there is a snapshot for {ranks}: {show_path(path, item.config.rootpath)}"
        if size == variant and _is_test_gone(item, path, test):
            orphans.append(path)
    # Prefer a test of the same name in a different module, then a test of the same module; among
    # these, one with the same function and parameters, whose class was renamed.
    function = name.rpartition(".")[2]
    orphans.sort(
        key=lambda path: (
            path.name != missing.name,
            path.parent != missing.parent,
            not path.name.endswith(f".{function}{missing.stem[len(name) :]}{SUFFIX}"),
        )
    )
    content = text.partition("\n")[2]
    same = [path for path in orphans if read_text_or_empty(path).partition("\n")[2] == content]
    near = [path for path in orphans if missing.name == path.name or missing.parent == path.parent]
    if not same and len(near) != 1:
        return ""
    lead = "the snapshot of a removed test is identical:" if same else "was the test renamed?"
    paths = (missing.parent, (same or near)[0], missing)
    directory, old, new = (shell_word(path_from(item.config, path)) for path in paths)
    # mv does not create directories. git mv would refuse files that are not committed yet.
    mkdir = "" if missing.parent.is_dir() else f"mkdir -p {directory} && "
    return f"{lead} {mkdir}mv -n {old} {new}"


def _describe_nested_project(item: pytest.Item, missing: Path) -> str:
    """Return a hint if a project around the test, below pytest's root, has the snapshot."""
    root = item.config.rootpath
    name = os.path.relpath(item.config.stash[OPTIONS].snapshot_dir, root)
    for directory in item.path.parents:
        if not directory.is_relative_to(root) or directory == root:
            return ""
        path = directory / name / module_to_directory(item.path, directory) / missing.name
        if path.is_file():
            project = shell_word(path_from(item.config, directory))
            return f"{show_path(path, root)} exists: start pytest in {project}"
    return ""


def _is_test_gone(item: pytest.Item, path: Path, name: str) -> bool:
    """Return whether a test is gone; if not all tests were collected, search its module's text."""
    directory = path.parent.relative_to(item.config.stash[OPTIONS].snapshot_dir)
    module = directory_to_module(directory, item.config.rootpath)
    collected = item.config.stash.get(COLLECTED, None)
    if module == item.path and collected is not None:
        tests = [test for test in collected if test.path == module]
        return name not in {escape_test_name(snapshot_test_name(test)) for test in tests}
    return unquote(strip_test_parameters(name)).rpartition(".")[2] not in read_text_or_empty(module)


def read_text_or_empty(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
