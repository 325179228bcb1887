"""The one rule of removal: which snapshot files tests no longer need."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pytest_fsdp_comm.snapshots.names import SUFFIX, function_of, module_exists, read_basename

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet


# Note [Rule of removal]: a file is unused if
# - its test was selected, passed, and did not compare it, or
# - its test no longer exists, its module was collected whole (nothing of it was deselected) by a
#   run that named no single tests, and tests of this world size were collected, or
# - its module no longer exists, and the run was full: it selected nothing, and its directories hold
#   the place of every module that has snapshots.
# Everything else stays: all files of a session that did not come to its end, what is not as it was
# when the session began, what a link leads to, and what belongs to a module whose source changed
# since it was collected. Where that source may define the test in a branch that this run did not
# take, the file stays too, and is named (see Note [Doubt]).

Stamp: TypeAlias = tuple[int, ...]
"""Equal for a file that nobody wrote or replaced in between; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedTest:
    """A test that was collected, selected or not."""

    name: str
    """As `names.written_test` writes it."""
    variant: str
    """E.g. ``ws4``; empty if it was deselected, so that its world size is not known."""
    nodeid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedModule:
    """What was collected of a test module that has snapshots."""

    path: Path
    stamp: Stamp
    """Of its source, before it was imported."""
    tests: tuple[CollectedTest, ...]
    """All of its tests, selected or not."""
    is_whole: bool
    """Whether every test that there is was collected and selected."""
    doubts: Mapping[str, str]
    """What may define tests that were not collected, by test; empty where the source does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedSnapshot:
    """A file that no test needs."""

    path: Path
    reason: str
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
    """The snapshot files that may be removed, as they are now: those with one name."""
    # A link in the directory, or to it, may give another module the same file. The directory itself
    # may be a link.
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
    modules: Mapping[str, CollectedModule],
    passed: AbstractSet[str],
    *,
    removable: Iterable[Path],
    full_anchor: Path | None,
) -> list[UnusedSnapshot]:
    """Apply the rule to the removable files, which no test compared or wrote, in order of paths.

    `modules` are by the directory of their snapshots, relative to `root`; `passed` has the node ids
    of tests that ran to their end; `full_anchor`, whose tree `root` mirrors, is None if not full.
    """
    found: list[UnusedSnapshot] = []
    variants = {test.variant for module in modules.values() for test in module.tests}
    for path in sorted(removable):
        place = path.parent.relative_to(root)
        module, named = modules.get(str(place)), read_basename(path.stem)
        reason: str | None = None
        doubt = ""
        if named is None:
            continue
        if module is None:
            if full_anchor is not None and not module_exists(place, full_anchor):
                reason = f"{place}.py no longer exists"
        # What ran says nothing about a source that was replaced meanwhile.
        elif module.stamp == stamp_of(module.path):
            name, variant = named
            reason = _reason(name, variant, module, passed, is_run=variant in variants)
            doubt = module.doubts.get(name, "")
        if reason is not None:
            found.append(UnusedSnapshot(path=path, reason=reason, doubt=doubt))
    return found


def _reason(
    name: str, variant: str, module: CollectedModule, passed: AbstractSet[str], *, is_run: bool
) -> str | None:
    """Why a file of a module is unused; None if it is not."""
    alike = [test for test in module.tests if test.name == name]
    if any(test.variant == variant and test.nodeid in passed for test in alike):
        return "its test passed without comparing it"
    # A test that an option or a hook leaves out still exists.
    if alike or not module.is_whole or not is_run or module.doubts.get(name) == "":
        return None
    siblings = [test for test in module.tests if function_of(test.name) == function_of(name)]
    # A test that is skipped for want of parameters, say, has not lost those that it had.
    if not all(test.nodeid in passed for test in siblings):
        return None
    return f"its test no longer {'has these parameters' if siblings else 'exists'}"


def remove(root: Path, paths: Iterable[Path]) -> None:
    """Delete snapshot files below `root`, and the directories that this leaves empty."""
    for path in paths:
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == root:
                break
            try:
                parent.rmdir()
            except OSError:  # not empty
                break
