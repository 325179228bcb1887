"""Limits how many ranks and GPUs the pytest processes of one session use at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

_PAUSE_S = 0.02
_TURN = "turn"
_WANTED = "wanted"

# Note [Slots]: a slot is a permit to run one rank or to use one GPU. It is a file that all pytest
# processes of the session share. A process that uses a slot locks the file (fcntl.flock); the
# kernel frees the lock when the process dies. This cannot deadlock: only one process at a time
# takes slots, it takes all slots of a test at once, and a process that has slots never waits for
# more. Ranks keep their slots for the next test only if that test follows immediately and no other
# process is waiting for slots. A forked child inherits the locks, so it has to close its copies.


class Slots:
    """Gives one pytest process access to the slots of its session; see Note [Slots]."""

    def __init__(self, directory: Path, *, ranks: int | None, gpus: Sequence[str]) -> None:
        """Use one slot for each GPU, and `ranks` slots for ranks (None: do not limit ranks)."""
        self._directory = directory  # created on first use
        self._bounds_ranks = ranks is not None
        self._ranks = [directory / f"rank{number}" for number in range(ranks or 0)]
        # The name of a MIG device can contain slashes, so quote it for use as a file name.
        self._gpus = {directory / f"gpu-{urllib.parse.quote(name, safe='')}": name for name in gpus}

    @contextlib.contextmanager
    def wait_for_free_slots(
        self, *, ranks: int, gpus: int
    ) -> Iterator[tuple[tuple[Path, ...], tuple[str, ...]]]:
        """Wait until enough slots are free; yield their files, and the names of the GPUs.

        The block has to lock the files with `HeldSlots`. There are no names if the test needs no
        GPUs, or more than exist.
        """
        leased = gpus if gpus <= len(self._gpus) else 0
        bounded = ranks if self._bounds_ranks else 0
        if not leased and not bounded:
            yield (), ()
            return
        # pytest may have removed the directory together with old temporary directories.
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _hold_lock(self._directory / _TURN), contextlib.ExitStack() as wanting:
            is_waiting = False
            while True:
                free_ranks = [*islice(filter(_is_free, self._ranks), bounded)]
                free_gpus = [*islice(filter(_is_free, self._gpus), leased)]
                if len(free_ranks) == bounded and len(free_gpus) == leased:
                    break
                if not is_waiting:
                    wanting.enter_context(_hold_lock(self._directory / _WANTED))
                    is_waiting = True
                time.sleep(_PAUSE_S)
            wanting.close()
            names = tuple(self._gpus[file] for file in free_gpus)
            yield (*free_ranks, *free_gpus), names

    def are_wanted(self) -> bool:
        """Return whether another process is waiting for slots."""
        with contextlib.suppress(FileNotFoundError):  # no slots have been taken yet
            return not _is_free(self._directory / _WANTED)
        return False


class HeldSlots:
    """Locked slots; the locks last until `release`, or until this process ends."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._descriptors = [_open_lock_file(file) for file in files]
        for descriptor in self._descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Unlock the slots, even if a forked process still has copies of the descriptors."""
        for descriptor in self._descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the descriptors in a forked child, without unlocking the parent's slots."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _open_lock_file(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_free(file: Path) -> bool:
    descriptor = _open_lock_file(file)
    try:
        # Use a shared lock, so that two processes can check at the same time.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _hold_lock(file: Path) -> contextlib.closing[HeldSlots]:
    return contextlib.closing(HeldSlots([file]))
