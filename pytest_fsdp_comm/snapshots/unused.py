"""The one rule of removal: which snapshot files tests no longer need.

A file is unused if

- its test was selected, passed, and did not compare it, or
- its test no longer exists, its module was collected whole (nothing of it was deselected, nor left
  out by a node id), and tests of this world size were collected, or
- its module no longer exists, and the run was full: it selected nothing, and its directories hold
  the place of every module that has snapshots.

Everything else stays. Nothing is unused in a session that did not come to its end.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fsdp_comm.snapshots.names import SUFFIX, named_module, read_basename

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    TestVariant = tuple[str, str]
    """A test as `snapshot_names.written_test` writes it, and the variant that is collected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedModule:
    """What was collected of a test module that has snapshots."""

    tests: frozenset[TestVariant]
    """All of its tests, selected or not."""
    passed: frozenset[TestVariant]
    """The tests that ran to their end and passed."""
    is_whole: bool
    """Every test that there is was collected and selected."""

    defines: frozenset[str]
    """The functions and classes that its source defines, collected or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedSnapshot:
    """A file that no test needs."""

    path: Path
    reason: str
    """To be read after the path."""


def find_unused(
    root: Path,
    modules: Mapping[Path, CollectedModule],
    *,
    compared: AbstractSet[Path],
    full_anchor: Path | None,
) -> list[UnusedSnapshot]:
    """Applies the rule to the snapshot files on disk.

    Args:
        root: Directory of all snapshots.
        modules: What was collected, by the directory of its snapshots relative to `root`.
        compared: Absolute paths of the files that tests compared, or wrote.
        full_anchor: If the run was full, the directory whose tree `root` mirrors; None if not.

    Returns:
        In order of their paths.
    """
    found: list[UnusedSnapshot] = []
    variants = {variant for module in modules.values() for _, variant in module.tests}
    for place, module in modules.items():
        for path in _files(root / place):
            reason = "" if path in compared else _reason(path, module, variants)
            if reason:
                found.append(UnusedSnapshot(path=path, reason=reason))
    if full_anchor is not None:
        for place in snapshot_places(root):
            named = named_module(place, full_anchor)
            if place in modules or named is None or _is_there(named):
                continue
            reason = f"{named.relative_to(full_anchor)} no longer exists"
            found += (
                UnusedSnapshot(path=path, reason=reason)
                for path in _files(root / place)
                if path not in compared
            )
    return sorted(found, key=lambda unused: unused.path)


def _reason(path: Path, module: CollectedModule, variants: AbstractSet[str]) -> str:
    test = read_basename(path.stem)
    if test is None:
        return ""
    if test in module.passed:
        return "its test passed without comparing it"
    name, variant = test
    if not module.is_whole or variant not in variants:
        return ""
    if name in {collected for collected, _ in module.tests}:
        return ""
    function = name.partition("[")[0]
    siblings = {entry for entry in module.tests if entry[0].partition("[")[0] == function}
    if siblings:
        # A test that is skipped for want of parameters, say, has not lost those that it had.
        return "its test no longer has these parameters" if siblings <= module.passed else ""
    # What an option or a hook leaves out is still there.
    is_there = all(part in module.defines for part in function.split("."))
    return "" if is_there else "its test no longer exists"


def snapshot_places(root: Path) -> list[Path]:
    """The directories that hold snapshots, relative to that of all snapshots, in order."""
    places = {
        path.parent.relative_to(root)
        for path in _files_below(root)
        if read_basename(path.stem) is not None
    }
    return sorted(places)


def _is_there(module: Path) -> bool:
    # Whatever else has that name may hold the tests now: a notebook, a compiled module.
    return any(module.parent.glob(f"{glob.escape(module.stem)}.*"))


def _files_below(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob(f"*{SUFFIX}") if path.is_file())


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.glob(f"*{SUFFIX}") if path.is_file())


def remove(root: Path, paths: Iterable[Path]) -> None:
    """Deletes snapshot files, and the directories that this leaves empty.

    Args:
        root: Directory of all snapshots, which stays.
        paths: Files below it.
    """
    for path in paths:
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == root or any(parent.iterdir()):
                break
            parent.rmdir()
