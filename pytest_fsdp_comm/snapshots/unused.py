"""The one rule of removal: which snapshot files tests no longer need.

A file is unused if

- its test was selected, passed, and did not compare it, or
- its test no longer exists, its module was collected whole (nothing of it was deselected, nor left
  out by a node id), and tests of this world size were collected, or
- its module no longer exists, and the run was full: it selected nothing, and its directories hold
  the place of every module that has snapshots.

Everything else stays. Nothing is unused in a session that did not come to its end, nor what is not
as it was when the session began, nor what a link leads to, nor of a module whose source changed
since it was collected. Where that source may define the test in a branch that this run did not
take, the file stays too, and is named (see `sources`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pytest_fsdp_comm.snapshots.names import SUFFIX, function_of, module_exists, read_basename

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    TestVariant = tuple[str, str]
    """A test as `snapshot_names.written_test` writes it, and the variant that is collected."""


Stamp: TypeAlias = tuple[int, ...]
"""Equal for a file that nobody wrote or replaced in between; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedModule:
    """What was collected of a test module that has snapshots."""

    tests: frozenset[TestVariant]
    """All of its tests, selected or not."""
    passed: frozenset[TestVariant]
    """The tests that ran to their end and passed."""
    is_whole: bool
    """Every test that there is was collected and selected."""
    doubts: Mapping[str, str]
    """What may define tests that were not collected, by test; empty where the source does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedSnapshot:
    """A file that no test needs."""

    path: Path
    reason: str
    """To be read after the path."""
    doubt: str = ""
    """What may still define its test, for which it stays; empty if nothing can."""


def stamp_of(file: Path | os.DirEntry[str]) -> Stamp:
    """What a regular file is now."""
    try:
        status = file.stat()
    except OSError:
        return ()
    is_file = stat.S_ISREG(status.st_mode)
    return (status.st_ino, status.st_ctime_ns, status.st_size) if is_file else ()


def find_removable(root: Path) -> dict[Path, Stamp]:
    """The snapshot files that may be removed, as they are now: those with one name.

    By a link, in the directory and to it, another module may have the same file.

    Args:
        root: Directory of all snapshots, which may be a link itself.
    """
    found: dict[Path, Stamp] = {}
    linked: set[str] = set()
    pending = [str(root)]
    while pending:
        try:
            entries = [*os.scandir(pending.pop())]
        except OSError:
            continue
        for entry in entries:
            if entry.is_symlink():
                linked.add(os.path.realpath(entry.path))
            elif entry.is_dir():
                pending.append(entry.path)
            elif entry.name.endswith(SUFFIX) and (stamp := stamp_of(entry)):
                found[Path(entry.path)] = stamp
    if linked:
        for path in [*found]:
            real = Path(os.path.realpath(path))
            if not linked.isdisjoint(map(str, (real, *real.parents))):
                del found[path]
    return found


def find_unused(
    root: Path,
    modules: Mapping[Path, CollectedModule],
    *,
    removable: Iterable[Path],
    full_anchor: Path | None,
) -> list[UnusedSnapshot]:
    """Applies the rule to the snapshot files on disk.

    Args:
        root: Directory of all snapshots.
        modules: What was collected, by the directory of its snapshots relative to `root`.
        removable: The files below `root` that may be removed, which no test compared or wrote.
        full_anchor: If the run was full, the directory whose tree `root` mirrors; None if not.

    Returns:
        In order of their paths.
    """
    found: list[UnusedSnapshot] = []
    variants = {variant for module in modules.values() for _, variant in module.tests}
    for path in sorted(removable):
        place = path.parent.relative_to(root)
        module, test = modules.get(place), read_basename(path.stem)
        if test is None:
            continue
        if module is not None:
            found += _judge(path, test, module, variants)
        elif full_anchor is not None and not module_exists(place, full_anchor):
            reason = f"{place}.py no longer exists"
            found.append(UnusedSnapshot(path=path, reason=reason))
    return found


def _judge(
    path: Path, test: TestVariant, module: CollectedModule, variants: AbstractSet[str]
) -> Iterator[UnusedSnapshot]:
    if test in module.passed:
        yield UnusedSnapshot(path=path, reason="its test passed without comparing it")
        return
    name, variant = test
    is_collected = name in {collected for collected, _ in module.tests}
    doubt = module.doubts.get(name)
    # What an option or a hook leaves out is still there.
    if is_collected or not module.is_whole or variant not in variants or doubt == "":
        return
    siblings = {entry for entry in module.tests if function_of(entry[0]) == function_of(name)}
    # A test that is skipped for want of parameters, say, has not lost those that it had.
    if siblings <= module.passed:
        what = "has these parameters" if siblings else "exists"
        yield UnusedSnapshot(path=path, reason=f"its test no longer {what}", doubt=doubt or "")


def snapshot_places(root: Path) -> list[Path]:
    """The directories that hold snapshots, relative to that of all snapshots, in order."""
    places = {
        path.parent.relative_to(root)
        for path in root.rglob(f"*{SUFFIX}")
        if path.is_file() and read_basename(path.stem) is not None
    }
    return sorted(places)


def remove(root: Path, paths: Iterable[Path]) -> None:
    """Deletes snapshot files, and the directories that this leaves empty.

    Args:
        root: Directory of all snapshots, which stays.
        paths: Files below it.
    """
    for path in paths:
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == root:
                break
            try:
                parent.rmdir()
            except OSError:  # not empty
                break
