"""Bounds what the pytest processes of one session use at once: ranks of tests, and GPUs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_PAUSE_S = 0.02
_TURN = "turn"
_WANTED = "wanted"

# Note [Slots]: a slot is a file in a directory that the processes share, and its user holds its
# lock (fcntl.flock), which the kernel frees when the holder dies. There can be no deadlock: slots
# are only taken in turn, by one process at a time, all of a test's slots together and none before
# all are free; and a process that holds slots never waits for others to end what it runs. Ranks are
# kept for the next test only if that follows at once, and no other process waits. A fork copies
# descriptors, and with them locks: each child closes its copies.


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a rank set may use."""

    files: tuple[Path, ...] = ()
    """The slots' files, for `HeldSlots`."""
    gpus: tuple[str, ...] = ()
    """By the caller's names; empty if none were asked for, or more than there are."""


class Slots:
    """One pytest process's view of the session's slots; see Note [Slots]."""

    def __init__(self, directory: Path, *, ranks: int | None, gpus: Sequence[str]) -> None:
        """Share slots with the session's other processes; `ranks` None sets no limit."""
        self._directory = directory  # made when it is needed
        self._bounds_ranks = ranks is not None
        self._ranks = [directory / f"rank{number}" for number in range(ranks or 0)]
        # A MIG device's name may hold slashes.
        self._gpus = {directory / f"gpu-{urllib.parse.quote(name, safe='')}": name for name in gpus}

    @contextlib.contextmanager
    def turn(self, *, ranks: int, gpus: int) -> Iterator[Grant]:
        """Wait for its turn, and then until enough is free; yield the slots to hold.

        Within the block nobody else takes any, and the user of the slots locks them (`HeldSlots`).
        """
        leased = gpus if gpus <= len(self._gpus) else 0
        bounded = ranks if self._bounds_ranks else 0
        if not leased and not bounded:
            yield Grant()
            return
        # It may have vanished with others of the temporary directory.
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._directory / _TURN), contextlib.ExitStack() as wanting:
            is_waiting = False
            while True:
                free_ranks = [*islice(filter(_is_free, self._ranks), bounded)]
                free_gpus = [*islice(filter(_is_free, self._gpus), leased)]
                if len(free_ranks) == bounded and len(free_gpus) == leased:
                    break
                if not is_waiting:
                    wanting.enter_context(_locked(self._directory / _WANTED))
                    is_waiting = True
                time.sleep(_PAUSE_S)
            wanting.close()
            names = tuple(self._gpus[file] for file in free_gpus)
            yield Grant(files=(*free_ranks, *free_gpus), gpus=names)

    def are_wanted(self) -> bool:
        """Whether another process waits for slots."""
        with contextlib.suppress(FileNotFoundError):  # nobody has taken any
            return not _is_free(self._directory / _WANTED)
        return False


class HeldSlots:
    """Slots in use, until they are released or this process ends."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._descriptors = [_opened(file) for file in files]
        for descriptor in self._descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Free the slots, even where a process forked from this one has copied descriptors."""
        for descriptor in self._descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close a forked child's copies; the parent's own hold stays."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _opened(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_free(file: Path) -> bool:
    descriptor = _opened(file)
    try:
        # Shared, so that processes that look at the same time do not see each other.
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
