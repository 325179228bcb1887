"""Collects a text from every rank, equal ones once: on one machine through files, else a store."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import select
import struct
import time
from os import getpid
from typing import TYPE_CHECKING

from pytest_fsdp_comm.errors import FsdpCommError, RanksDivergedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_fsdp_comm.ranks.wire.text_store import TextStore

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.002
# How soon a rank that waits to be woken notices one that never will.
_LEFT_POLL_S = 0.05
_COUNT = struct.Struct("<q")


class RankExchange:
    """One rank's end of an exchange; no collective, which would be recorded, and could hang."""

    def __init__(self, texts: TextStore | TextDirectory, rank: int, ranks: tuple[int, ...]) -> None:
        """Start before the first comparison; `texts` are of one test, `ranks` ascending."""
        self._texts = texts
        self._rank = rank
        self._ranks = ranks
        self._rounds = 0
        self._pid = getpid()
        self.before: Callable[[], None] = lambda: None
        """Called before each comparison."""

    def __call__(self, text: str) -> list[str]:
        """Give this rank's text; return those of all in rank order, equal ones as one object."""
        if getpid() != self._pid:
            raise RanksDivergedError(
                f"a process that rank {self._rank} forked compares comm_mode or fsdp_tree; only "
                "the rank itself can: end the forked process with os._exit before the comparison"
            )
        self.before()
        self._rounds += 1
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        # The digest last: a rank that sees it reads the text.
        self._texts.put(_text_name(self._rounds, self._rank), text)
        digests = self.share(
            str(self._rounds),
            digest,
            f"rank {self._rank} made comparison {self._rounds} of comm_mode or fsdp_tree, but "
            "rank {} ended the test without it; every rank must make the same comparisons in the "
            "same order (is one inside an `if rank == ...`?)",
        )
        texts = {digest: text}
        for rank, other in zip(self._ranks, digests, strict=True):
            if other not in texts:
                texts[other] = self._texts.get(_text_name(self._rounds, rank))
        return [texts[other] for other in digests]

    def meet(self, name: str) -> None:
        """Wait until every rank has come to the same point, as `share` does."""
        self.share(name, "")

    def share(self, name: str, text: str, complaint: str = "") -> list[str]:
        """Give a text at a point, once in a test; return those of all ranks, in rank order.

        `complaint`, for the error that a rank ended the test before, has a ``{}`` for that rank.
        """
        complaint = complaint or f"rank {{}} ended the test before {name}"
        self._texts.put(f"{name}.{self._rank}", text)
        return [self._await(f"{name}.{rank}", rank, complaint.format(rank)) for rank in self._ranks]

    def leave(self) -> None:
        """Announce that this rank makes no more comparisons; do nothing in a forked process."""
        if getpid() == self._pid:
            self._note_left()

    # `hangs.position` reads its name and locals to find which ranks this one waits for.
    def _await(self, name: str, rank: int, complaint: str) -> str:
        pause_s = _FIRST_PAUSE_S
        # No deadline of its own: the supervisor ends the test at its deadline, with all stacks.
        while not self._texts.has(name):
            # Looked at again, since it may have been written just before the rank left.
            if self._has_left(rank) and not self._texts.has(name):
                raise RanksDivergedError(complaint)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._texts.get(name)

    def _note_left(self) -> None:
        self._texts.put(f"left.{self._rank}", "")

    def _has_left(self, rank: int) -> bool:
        return self._texts.has(f"left.{rank}")


def forget(texts: TextStore, rank: int) -> None:
    """Remove from a store what a rank gave in an exchange, once every rank has left."""
    for round_number in itertools.count(1):
        texts.remove(_text_name(round_number, rank))
        if not texts.remove(f"{round_number}.{rank}"):
            return


def _text_name(round_number: int, rank: int) -> str:
    return f"{round_number}.{rank}.text"


class Marks:
    """How many tests each rank has marked, such as those it left: 8 bytes each in one file."""

    def __init__(self, path: Path) -> None:
        """Open the file that the ranks of a rank set share; the first one makes it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def mark(self, rank: int, number: int) -> None:
        """Mark the rank set's test of this number, from 0, and all before it."""
        os.pwrite(self._descriptor, _COUNT.pack(number + 1), rank * _COUNT.size)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def has_marked(self, rank: int, number: int) -> bool:
        """Whether a rank has marked the rank set's test of this number."""
        count = os.pread(self._descriptor, _COUNT.size, rank * _COUNT.size)
        return len(count) == _COUNT.size and _COUNT.unpack(count)[0] > number


class TextDirectory:
    """Texts under names, as in a `TextStore`, in files of ranks that share a machine."""

    def __init__(self, directory: Path, prefix: str) -> None:
        """Use a directory that nobody else shares; each file's name begins with the prefix."""
        self._directory = directory
        self._prefix = prefix

    def path(self, name: str) -> Path:
        """The file of a name."""
        return self._directory / f"{self._prefix}{name}"

    def put(self, name: str, text: str) -> None:
        """Make a whole text visible, in one step for readers: by the rename."""
        unfinished = self.path(f"{name}.unfinished")
        with self.explaining_absence():
            unfinished.write_text(text, encoding="utf-8")
            unfinished.rename(self.path(name))

    def has(self, name: str) -> bool:
        """Whether there is a text."""
        return self.path(name).exists()

    def get(self, name: str) -> str:
        """A text that is there."""
        return self.path(name).read_text(encoding="utf-8")

    @contextlib.contextmanager
    def explaining_absence(self) -> Iterator[None]:
        """Explain a file that the block cannot find: the directory is gone."""
        try:
            yield
        except FileNotFoundError:
            raise FsdpCommError(
                f"the other ranks are out of reach: {self._directory}, through which ranks "
                "exchange what they have, has vanished. Did a test empty the temporary directory "
                "(tempfile.gettempdir()), or a cleaner of it?"
            ) from None


class DirectoryExchange(RankExchange):
    """Through files of ranks that share a machine."""

    _texts: TextDirectory

    def __init__(
        self,
        directory: Path,
        rank: int,
        ranks: tuple[int, ...],
        *,
        number: int,
        departures: Marks,
    ) -> None:
        """Start before the first comparison in the rank set's test of this number, from 0."""
        super().__init__(TextDirectory(directory, f"test{number}."), rank, ranks)
        self._number = number
        self._departures = departures

    def meet(self, name: str) -> None:
        """Wait until every rank has come to the same point: the last one wakes the others."""
        # Note [Last one rings]: each rank of each test waits here once, and looking for files again
        # and again took a tenth of a trivial test's processor time. So arrivals are marks in one
        # file, and the ranks sleep on a pipe by name, the bell. It is opened before this rank is
        # marked, so it keeps what is written from then on; a rank that finds all marks writes; and
        # none reads, so it stays readable for all. The poll is only for ranks that have left.
        path = self._texts.path(name)
        with self._texts.explaining_absence():
            arrivals = Marks(path)
        bell_path = path.with_name(f"{path.name}.bell")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(bell_path, 0o600)
        bell = os.open(bell_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            arrivals.mark(self._rank, 0)
            missing = [rank for rank in self._ranks if not arrivals.has_marked(rank, 0)]
            if not missing:
                os.write(bell, b"!")
            # `hangs.position` reads the local `missing`: the ranks that this one waits for.
            while missing and not select.select([bell], [], [], _LEFT_POLL_S)[0]:
                for rank in missing:
                    # Looked at again, since it may have come just before it left.
                    if self._has_left(rank) and not arrivals.has_marked(rank, 0):
                        raise RanksDivergedError(f"rank {rank} ended the test before {name}")
                missing = [rank for rank in missing if not arrivals.has_marked(rank, 0)]
        finally:
            os.close(bell)
            arrivals.close()

    def _note_left(self) -> None:
        self._departures.mark(self._rank, self._number)

    def _has_left(self, rank: int) -> bool:
        return self._departures.has_marked(rank, self._number)
