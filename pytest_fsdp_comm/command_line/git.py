"""Asks git for the snapshots of revisions."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.command_line.errors import CommandError
from pytest_fsdp_comm.snapshots.names import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_RANGE: Final = re.compile(r"(?P<old>.*?)(?P<dots>\.{2,3})(?P<new>.*)")
_HEAD: Final = "HEAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revisions:
    """The two sides of a comparison in git."""

    old: str
    """The id of a commit."""
    new: str
    """The id of a commit; empty for the files on disk."""
    shown: tuple[str, str]
    """Both, as the user named them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """A snapshot file that differs between two revisions; paths are relative to the top."""

    old_path: str
    new_path: str
    """As `old_path`, unless the file was renamed."""
    old: bytes | None
    """The content; None if the file was added."""
    new: bytes | None
    """The content; None if the file was removed, or is one on disk."""
    is_on_disk: bool
    """Whether the new side is a file of the working tree."""


class Repository:
    """The repository that a directory is in."""

    def __init__(self, directory: Path) -> None:
        """Looks for the repository.

        Args:
            directory: Usually the working directory; names of files are relative to it.

        Raises:
            CommandError: There is none, or git is not installed.
        """
        self._directory = directory
        found = self._run("rev-parse", "--show-toplevel", may_fail=True)
        if found is None:
            raise CommandError(
                f"{directory} is in no working tree of git; run this command inside of a "
                "repository, or name two files"
            )
        self.top = Path(found.removesuffix("\n"))

    def commit(self, revision: str) -> str | None:
        """The id of the commit that a name stands for; None if there is none."""
        found = self._run(
            *("rev-parse", "--verify", "--quiet", "--end-of-options"),
            f"{revision}^{{commit}}",
            may_fail=True,
        )
        return found.strip() if found else None

    def revisions(self, text: str) -> Revisions | None:
        """The sides that ``main..HEAD`` or ``main...HEAD`` names; None if a text has no dots.

        Raises:
            CommandError: There is no such revision, or the two have no common ancestor.
        """
        match = _RANGE.fullmatch(text)
        if match is None:
            return None
        names = (match["old"] or _HEAD, match["new"] or _HEAD)
        old, new = map(self._known_commit, names)
        if match["dots"] == "...":
            base = self._run("merge-base", old, new, may_fail=True)
            if base is None:
                raise CommandError(f"{names[0]} and {names[1]} have no common ancestor in git")
            old = base.strip()
        return Revisions(old=old, new=new, shown=names)

    def _known_commit(self, name: str) -> str:
        commit = self.commit(name)
        if commit is None:
            raise CommandError(unknown_revision(name))
        return commit

    def changed_files(self, revisions: Revisions, paths: Sequence[str]) -> list[ChangedFile]:
        """The snapshot files that differ, in git's order.

        Args:
            revisions: The two sides.
            paths: Files and directories to look at; none for all.
        """
        sides = [revisions.old, *([revisions.new] if revisions.new else [])]
        raw = self._run(
            *("diff", "--raw", "-z", "--no-abbrev", "--no-ext-diff", "--find-renames", *sides),
            *("--", *paths),
        )
        entries = [
            entry
            for entry in _raw_entries(raw or "")
            if entry.old_path.endswith(SUFFIX) or entry.new_path.endswith(SUFFIX)
        ]
        contents = self._blobs({blob for one in entries for blob in (one.old, one.new) if blob})
        changed = [
            ChangedFile(
                old_path=one.old_path,
                new_path=one.new_path,
                old=contents[one.old] if one.old else None,
                new=contents[one.new] if one.new else None,
                is_on_disk=not revisions.new and one.letter != "D",
            )
            for one in entries
        ]
        return changed if revisions.new else [*changed, *self._untracked(paths)]

    def _untracked(self, paths: Sequence[str]) -> Iterator[ChangedFile]:
        top = self.top if not paths else self._directory
        listed = self._run(
            *("ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", *paths),
            directory=top,
        )
        for path in filter(None, (listed or "").split("\0")):
            if path.endswith(SUFFIX):
                yield ChangedFile(old_path=path, new_path=path, old=None, new=None, is_on_disk=True)

    def _blobs(self, names: Iterable[str]) -> dict[str, bytes]:
        ordered = sorted(names)
        if not ordered:
            return {}
        answer = self._process(
            ["cat-file", "--batch"], self._directory, "".join(f"{name}\n" for name in ordered)
        ).stdout
        contents = {}
        for name in ordered:
            head, _, rest = answer.partition(b"\n")
            size = int(head.split()[2])
            contents[name], answer = rest[:size], rest[size + 1 :]
        return contents

    def _run(
        self, *arguments: str, may_fail: bool = False, directory: Path | None = None
    ) -> str | None:
        done = self._process(list(arguments), directory or self._directory)
        if done.returncode == 0:
            # What is no UTF-8 in a name becomes what opens the same file.
            return done.stdout.decode("utf-8", "surrogateescape")
        if may_fail:
            return None
        said = done.stderr.decode("utf-8", "replace").strip()
        raise CommandError(f"git {arguments[0]} failed: {said}")

    def _process(
        self, arguments: list[str], directory: Path, given: str = ""
    ) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(  # noqa: S603  # no shell; revisions follow --end-of-options
                ["git", *arguments],  # noqa: S607  # the user's git
                cwd=directory,
                input=given.encode(),
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            raise CommandError(
                "git is not installed, or not on the PATH; without it, name two files"
            ) from None


def unknown_revision(name: str) -> str:
    """The error of a name that git does not know."""
    return (
        f"git knows no revision {name!r}; in a shallow clone, as CI makes them, fetch it first: "
        f"git fetch origin {name}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RawEntry:
    """A line of ``git diff --raw``."""

    old: str
    """The id of the content; empty for none."""
    new: str
    """As `old`; empty also for what is on disk."""
    letter: str
    """How it changed: ``A``, ``D``, ``M``, ``R`` and others."""
    old_path: str
    new_path: str


def _raw_entries(raw: str) -> Iterator[_RawEntry]:
    fields = iter(raw.split("\0"))
    for field in fields:
        if not field:
            continue
        _, _, old, new, status = field.split(" ")
        old_path = next(fields)
        is_moved = status[0] in "RC"
        yield _RawEntry(
            old=old if old.strip("0") else "",
            new=new if new.strip("0") else "",
            letter=status[0],
            old_path=old_path,
            new_path=next(fields) if is_moved else old_path,
        )
