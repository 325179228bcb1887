"""Looks at all snapshot files of a project: which are broken, and which no collected test has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pytest_fsdp_comm.errors import SnapshotFormatError
from pytest_fsdp_comm.snapshots.files import read_snapshot
from pytest_fsdp_comm.snapshots.lines import OldFormatError
from pytest_fsdp_comm.snapshots.names import SUFFIX, named_module, read_basename
from pytest_fsdp_comm.snapshots.unused import CollectedModule
from pytest_fsdp_comm.text.words import show_path

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT: Final = "--comm-collection"
"""The option by which `collecting` learns the file to write."""

Fault = Literal["broken", "old format", "orphan", "variant"]
"""It cannot be read; is of a format no longer read; has no test; has one at other sizes only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What pytest collected in one session."""

    snapshot_dir: Path
    """Absolute."""
    anchor: Path
    """The directory whose tree the snapshots mirror; absolute."""
    modules: Mapping[str, CollectedModule]
    """By the directory of their snapshots, relative to that of all snapshots."""
    is_full: bool
    """Whether nothing on the command line chose among the tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty:
    """A snapshot file with a fault."""

    path: Path
    fault: Fault
    what: str
    """What is wrong, to be read after the path."""


def snapshot_files(directory: Path) -> list[Path]:
    """All snapshot files, in order."""
    return sorted(path for path in directory.rglob(f"*{SUFFIX}") if not path.is_dir())


def find_faults(collections: Sequence[Collection]) -> list[Faulty]:
    """List faults in order of paths; the collections differ in their default world size alone."""
    known = _Known(collections)
    root = collections[0].snapshot_dir
    files = snapshot_files(root)
    faults = {path: known.faults(path, path.parent.relative_to(root)) for path in files}
    # A link gives a file several names: one that belongs to a test is enough.
    needed = {path.resolve() for path in files if not faults[path]}
    found = []
    for path in files:
        found += _content_fault(path)
        found += faults[path] if path.resolve() not in needed else []
    return found


def _content_fault(path: Path) -> list[Faulty]:
    where = show_path(path)
    try:
        text = read_snapshot(path, where=where)
        _ = text and text.profile
    except SnapshotFormatError as problem:
        fault: Fault = "old format" if isinstance(problem, OldFormatError) else "broken"
        what = str(problem).partition(". Nothing was overwritten")[0].removeprefix(where)
        return [Faulty(path=path, fault=fault, what=what.lstrip(", "))]
    return []


class _Known:
    """The tests of several collections, by where their snapshots are."""

    def __init__(self, collections: Sequence[Collection]) -> None:
        self._anchor = collections[0].anchor
        self._is_full = all(collection.is_full for collection in collections)
        root = collections[0].snapshot_dir.resolve()

        def real(place: str) -> str:
            """The directory that links lead to, if it is another one below the root."""
            path = (root / place).resolve()
            return str(path.relative_to(root)) if path.is_relative_to(root) else place

        self._unknown: set[str] = set()
        self._variants: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(
            lambda: defaultdict(set)
        )
        for collection in collections:
            for place, module in collection.modules.items():
                # The whole module was skipped, for lack of a GPU, say.
                if not (module.tests or module.is_whole):
                    self._unknown.add(real(place))
                for test in module.tests:
                    self._variants[real(place)][test.name].add(test.variant)

    def faults(self, path: Path, place: Path) -> list[Faulty]:
        """The fault that a file's name has, if any; of its content it knows nothing."""
        named, variants = read_basename(path.stem), self._variants.get(str(place))
        fault: Fault = "orphan"
        what = ""
        if named is None:
            what = "its name is not that of a snapshot: <test>.ws<ranks>[.<name>].comm"
        elif str(place) in self._unknown:
            pass
        elif variants is None:
            what = self._without_module(place)
        elif named[0] not in variants:
            # With a selection on the command line, the test may have been left out.
            what = "no such test is collected" if self._is_full else ""
        elif variants[named[0]].isdisjoint({named[1], ""}):
            fault = "variant"
            what = f"its test is collected with {', '.join(sorted(variants[named[0]]))} only"
        return [Faulty(path=path, fault=fault, what=what)] if what else []

    def _without_module(self, place: Path) -> str:
        module = named_module(place, self._anchor)
        shown = show_path(module, self._anchor) if module is not None else str(place)
        if module is not None and not module.exists():
            return f"{shown} does not exist"
        return f"nothing of {shown} is collected" if self._is_full else ""
