"""Bounds what the pytest processes of one session use at once: ranks of tests, and GPUs.

A slot is a file in a directory that these processes share, and whoever uses it holds its lock
(`fcntl.flock`), which the kernel frees when the holder dies. Nobody can deadlock: slots are only
taken in turn, by one process at a time, all of a test's slots together and none before all are
free; and a process that holds slots never waits for others to end what it runs. Ranks that are kept
for a later test run nothing, and give up their slots when these are wanted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PAUSE_S = 0.02
_TURN = "turn"
_WANTED = "wanted"
_USERS = "users"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a rank set may use."""

    files: tuple[Path, ...] = ()
    """The slots' files, for `HeldSlots`."""
    gpus: tuple[str, ...] = ()
    """The GPUs among them, by the names of the caller's visible list; empty if none were asked for,
    or more than there are."""


class SharedDirectory:
    """The slots' directory, where several processes share it: the last one to leave removes it.

    Whoever uses it holds a lock on a file in it, which the kernel frees when the holder dies.
    """

    def __init__(self, path: Path) -> None:
        """Makes the directory unless it is there, and uses it from now on."""
        self._path = path
        while True:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._descriptor = _opened(path / _USERS)
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)
                # The last user may just have removed it.
                if os.fstat(self._descriptor).st_nlink:
                    return
                os.close(self._descriptor)

    def leave(self) -> None:
        """Ends the use of it, and removes it if nobody else uses it."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._descriptor)

    def forget(self) -> None:
        """Closes a forked child's copy, which would count as a use by its parent."""
        os.close(self._descriptor)


class Slots:
    """One pytest process's view of the session's slots."""

    def __init__(self, directory: Path, *, ranks: int | None, gpus: Sequence[str]) -> None:
        """Shares slots with the session's other processes.

        Args:
            directory: What they share, and no other session; made when it is needed.
            ranks: How many ranks may live at once; None sets no limit.
            gpus: The GPUs that this process may use, by names that mean the same everywhere.
        """
        self._directory = directory
        self._ranks = ranks
        self._gpus = tuple(gpus)

    @contextlib.contextmanager
    def turn(self, *, ranks: int, gpus: int) -> Iterator[Grant]:
        """Waits for its turn, and then until enough is free.

        Nobody else can take slots before the block ends, so that large tests are not overtaken by
        small ones for ever. Within it, whoever is to use the slots must hold them.

        Args:
            ranks: How many ranks will run; at most as many as there are slots.
            gpus: How many GPUs they need together.

        Yields:
            The slots to hold.
        """
        leased = gpus if gpus <= len(self._gpus) else 0
        bounded = 0 if self._ranks is None else ranks
        if not leased and not bounded:
            yield Grant()
            return
        # It may have vanished with others of the temporary directory.
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        rank_files = {self._directory / f"rank{n}": "" for n in range(self._ranks or 0)}
        gpu_files = {self._directory / f"gpu-{_quoted(name)}": name for name in self._gpus}
        with _locked(self._directory / _TURN), contextlib.ExitStack() as wanting:
            is_waiting = False
            while True:
                free_ranks = _free(rank_files, bounded)
                free_gpus = _free(gpu_files, leased)
                if len(free_ranks) == bounded and len(free_gpus) == leased:
                    break
                if not is_waiting:
                    wanting.enter_context(_locked(self._directory / _WANTED))
                    is_waiting = True
                time.sleep(_PAUSE_S)
            wanting.close()
            yield Grant(
                files=(*free_ranks, *free_gpus), gpus=tuple(gpu_files[file] for file in free_gpus)
            )


class HeldSlots:
    """Slots in use, until they are released or this process ends."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Locks slots that were granted, within the turn.

        Args:
            files: As `Grant.files`.
        """
        self._files = tuple(files)
        self._descriptors = [_opened(file) for file in files]
        for descriptor in self._descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_EX)

    @property
    def holds_any(self) -> bool:
        """Whether there are slots here."""
        return bool(self._files)

    @property
    def are_wanted(self) -> bool:
        """Whether another process waits for slots, and there are some here."""
        with contextlib.suppress(FileNotFoundError):  # those who wait do so in another directory
            return self.holds_any and not _is_free(self._files[0].parent / _WANTED)
        return False

    def release(self) -> None:
        """Frees the slots, even where a process forked from this one has copied descriptors."""
        for descriptor in self._descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Closes a forked child's copies, which would keep the slots from being freed by a death.

        The parent's own hold stays.
        """
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _free(files: Sequence[Path] | dict[Path, str], count: int) -> list[Path]:
    """The first free files, at most `count`."""
    found: list[Path] = []
    for file in files:
        if len(found) == count:
            break
        if _is_free(file):
            found.append(file)
    return found


def _opened(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_free(file: Path) -> bool:
    descriptor = _opened(file)
    try:
        # Shared, so that those who look at the same time do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    descriptor = _opened(file)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _quoted(name: str) -> str:
    # A MIG device's name may hold slashes.
    return urllib.parse.quote(name, safe="")
