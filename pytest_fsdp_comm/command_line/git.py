"""Asks git for the snapshots of revisions."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.names import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """A snapshot file that differs between two revisions; paths are relative to the top."""

    old_path: str
    new_path: str
    """As `old_path`, unless the file was renamed."""
    old: bytes | None
    """The content; None if the file was added."""
    new: bytes | Path | None
    """The content, or the file of the working tree; None if the file was removed."""


class Repository:
    """The repository that the working directory is in."""

    def __init__(self) -> None:
        """Find the repository."""
        found = self._find("rev-parse", "--show-toplevel")
        if found is None:
            raise FsdpCommError(
                f"{Path.cwd()} is in no working tree of git; run this command inside of a "
                "repository, or name two files"
            )
        self.top = Path(found)

    def commit(self, revision: str) -> str | None:
        """The id of the commit that a name stands for; None if there is none."""
        options = ("--verify", "--quiet", "--end-of-options")
        return self._find("rev-parse", *options, f"{revision}^{{commit}}")

    def known_commit(self, revision: str) -> str:
        """Like `commit`, but raise FsdpCommError if there is none."""
        commit = self.commit(revision)
        if commit is None:
            raise unknown_revision(revision)
        return commit

    def merge_base(self, old: str, new: str) -> str | None:
        """The id of the commit where two parted; None if they have no common ancestor."""
        return self._find("merge-base", old, new)

    # Note [Contents of revisions]: `git diff --raw -z` names both contents of a file by the ids of
    # their blobs, which one `git cat-file --batch` then gives in the order of the request: one
    # process for all files, instead of two for each. Files on disk have no id, and those that git
    # does not track are in no diff, so they are listed separately.

    def changed_files(self, commits: Sequence[str], paths: Sequence[str]) -> Iterator[ChangedFile]:
        """List snapshots that differ, in git's order; one commit is compared with the disk."""
        is_on_disk = len(commits) == 1
        raw = self._run(
            *("diff", "--raw", "-z", "--no-abbrev", "--no-ext-diff", "--find-renames", *commits),
            *("--", *paths),
        )
        fields = iter(raw.split("\0")[:-1])
        entries = []
        for field in fields:
            _, _, old, new, status = field.split(" ")
            old_path = next(fields)
            new_path = next(fields) if status[0] in "RC" else old_path
            if old_path.endswith(SUFFIX) or new_path.endswith(SUFFIX):
                entries.append((old, "" if is_on_disk else new, status, old_path, new_path))
        # The id of nothing is all zeros.
        contents = self._blobs({blob for one in entries for blob in one[:2] if blob.strip("0")})
        for old, new, status, old_path, new_path in entries:
            on_disk = self.top / new_path if is_on_disk and status != "D" else None
            yield ChangedFile(
                old_path=old_path,
                new_path=new_path,
                old=contents.get(old),
                new=on_disk or contents.get(new),
            )
        if is_on_disk:
            yield from self._untracked(paths)

    def _untracked(self, paths: Sequence[str]) -> Iterator[ChangedFile]:
        listed = self._run(
            *("ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", *paths),
            directory=None if paths else self.top,
        )
        for path in listed.split("\0"):
            if path.endswith(SUFFIX):
                file = self.top / path
                yield ChangedFile(old_path=path, new_path=path, old=None, new=file)

    def _blobs(self, names: Iterable[str]) -> dict[str, bytes]:
        ordered = sorted(names)
        if not ordered:
            return {}
        given = "".join(f"{name}\n" for name in ordered)
        answer = self._start("cat-file", "--batch", given=given).stdout
        contents = {}
        for name in ordered:
            head, _, rest = answer.partition(b"\n")
            size = int(head.split()[2])
            contents[name], answer = rest[:size], rest[size + 1 :]
        return contents

    def _run(self, *arguments: str, directory: Path | None = None) -> str:
        done = self._start(*arguments, directory=directory)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()
            raise FsdpCommError(f"git {arguments[0]} failed: {said}")
        # What is no UTF-8 in a name becomes what opens the same file.
        return done.stdout.decode("utf-8", "surrogateescape")

    def _find(self, *arguments: str) -> str | None:
        """The line that git prints; None if it finds nothing."""
        done = self._start(*arguments)
        return None if done.returncode else os.fsdecode(done.stdout).removesuffix("\n")

    def _start(
        self, *arguments: str, directory: Path | None = None, given: str = ""
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
            raise FsdpCommError(
                "git is not installed, or not on the PATH; without it, name two files"
            ) from None


def unknown_revision(name: str) -> FsdpCommError:
    """Make the error of a name that git does not know."""
    return FsdpCommError(
        f"git knows no revision {name!r}; in a shallow clone, as CI makes them, fetch it first: "
        f"git fetch origin {name}"
    )
