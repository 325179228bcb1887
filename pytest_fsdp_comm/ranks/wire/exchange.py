"""Collects a text from every rank: on one machine through files, else through a store.

Each rank gives a text and its digest. Every rank reads all digests, but each text once: where ranks
have the same, which may be large, it costs the others nothing.
"""

from __future__ import annotations

import abc
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
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_fsdp_comm.ranks.wire.text_store import TextStore

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.002
# How soon a rank that waits to be woken notices one that never will.
_LEFT_POLL_S = 0.05
_COUNT = struct.Struct("<q")


class RankExchange(abc.ABC):
    """One rank's end of an exchange.

    Never a collective: it would be recorded, and would hang for ever beside a rank that failed.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Starts before the first comparison.

        Args:
            rank: This rank.
            ranks: All ranks that take part, ascending.
        """
        self._rank = rank
        self._ranks = ranks
        self._rounds = 0
        self._pid = getpid()

    def __call__(self, text: str) -> list[str]:
        """Gives this rank's text and waits for those of the others.

        Returns:
            The texts in rank order; equal ones are one object.

        Raises:
            RanksDivergedError: Another rank ended the test without coming here as often, or this is
                not the rank, but a process that it forked.
        """
        if getpid() != self._pid:
            raise RanksDivergedError(
                f"a process that rank {self._rank} forked compares comm_mode or fsdp_tree; only "
                "the rank itself can: end the forked process with os._exit before the comparison"
            )
        self._rounds += 1
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        # The digest last: who sees it reads the text.
        self._write(_text_name(self._rounds, self._rank), text)
        self._write(f"{self._rounds}.{self._rank}", digest)
        texts = {digest: text}
        digests = [self._await_digest(rank) for rank in self._ranks]
        for rank, other in zip(self._ranks, digests, strict=True):
            if other not in texts:
                texts[other] = self._read(_text_name(self._rounds, rank))
        return [texts[other] for other in digests]

    def _await_digest(self, rank: int) -> str:
        return self._await(
            f"{self._rounds}.{rank}",
            rank,
            f"rank {self._rank} made comparison {self._rounds} of comm_mode or fsdp_tree, but "
            f"rank {rank} ended the test without it; every rank must make the same "
            "comparisons in the same order (is one inside an `if rank == ...`?)",
        )

    def meet(self, name: str) -> None:
        """Waits until every rank has come to the same point.

        Args:
            name: The point's name; each is used once in a test.

        Raises:
            RanksDivergedError: Another rank ended the test before it.
        """
        self.share(name, "")

    def share(self, name: str, text: str) -> list[str]:
        """Gives this rank's text at a point, and waits until every rank has come there.

        Args:
            name: The point's name; each is used once in a test.
            text: What to give.

        Returns:
            The texts in rank order.

        Raises:
            RanksDivergedError: Another rank ended the test before it.
        """
        self._write(f"{name}.{self._rank}", text)
        return [
            self._await(f"{name}.{rank}", rank, f"rank {rank} ended the test before {name}")
            for rank in self._ranks
        ]

    def leave(self) -> None:
        """Announces that this rank makes no more comparisons; does nothing in a forked process."""
        if getpid() == self._pid:
            self._leave()

    @abc.abstractmethod
    def _leave(self) -> None:
        """Announces that this rank is done."""

    def _await(self, name: str, rank: int, complaint: str) -> str:
        pause_s = _FIRST_PAUSE_S
        # No deadline of its own: the supervisor ends the test at its deadline, with all stacks.
        while not self._has(name):
            # Looked at again, since it may have been written just before the rank left.
            if self._has_left(rank) and not self._has(name):
                raise RanksDivergedError(complaint)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._read(name)

    @abc.abstractmethod
    def _write(self, name: str, text: str) -> None:
        """Makes a whole text visible to all ranks, in one step for readers."""

    @abc.abstractmethod
    def _has(self, name: str) -> bool:
        """Whether a text is visible."""

    @abc.abstractmethod
    def _read(self, name: str) -> str:
        """A text that is visible."""

    @abc.abstractmethod
    def _has_left(self, rank: int) -> bool:
        """Whether a rank is done."""


def _text_name(round_number: int, rank: int) -> str:
    return f"{round_number}.{rank}.text"


class Marks:
    """How many tests each rank has marked, such as those that it has left, in 8 bytes each.

    Unlike a file for each test and rank it costs nothing to make or to remove.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file that the ranks of a rank set share; the first one makes it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def mark(self, rank: int, number: int) -> None:
        """Marks the rank set's test of this number, from 0, and all before it."""
        os.pwrite(self._descriptor, _COUNT.pack(number + 1), rank * _COUNT.size)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def has_marked(self, rank: int, number: int) -> bool:
        """Whether a rank has marked the rank set's test of this number."""
        count = os.pread(self._descriptor, _COUNT.size, rank * _COUNT.size)
        return len(count) == _COUNT.size and _COUNT.unpack(count)[0] > number


class DirectoryExchange(RankExchange):
    """Through files of ranks that share a machine."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        ranks: tuple[int, ...],
        *,
        number: int,
        departures: Marks,
    ) -> None:
        """Starts before the first comparison.

        Args:
            directory: What the ranks of one rank set share, and nobody else.
            rank: This rank.
            ranks: All ranks that take part, ascending.
            number: Of the rank set's test, from 0.
            departures: Which tests the rank set's ranks have left.
        """
        super().__init__(rank, ranks)
        self._directory = directory
        self._number = number
        self._departures = departures

    def _leave(self) -> None:
        self._departures.mark(self._rank, self._number)

    def meet(self, name: str) -> None:
        """Waits until every rank has come to the same point: the last one wakes the others.

        Each rank of each test waits here once, and looking again and again took a tenth of a
        trivial test's processor time.

        Args:
            name: The point's name; each is used once in a test.

        Raises:
            RanksDivergedError: Another rank ended the test before it.
        """
        path = self._path(name)
        with self._explaining_absence():
            arrivals = Marks(path)
        # Whoever comes first makes it. Opened before this rank is marked, it keeps what is written.
        bell_path = path.with_name(f"{path.name}.bell")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(bell_path, 0o600)
        bell = os.open(bell_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            arrivals.mark(self._rank, 0)
            missing = [rank for rank in self._ranks if not arrivals.has_marked(rank, 0)]
            if not missing:
                # Nobody reads it: it stays readable for all.
                os.write(bell, b"!")
            # Read by name in `hangs.position`: whom this rank waits for.
            while missing and not select.select([bell], [], [], _LEFT_POLL_S)[0]:
                for rank in missing:
                    # Looked at again, since it may have come just before it left.
                    if self._has_left(rank) and not arrivals.has_marked(rank, 0):
                        raise RanksDivergedError(f"rank {rank} ended the test before {name}")
                missing = [rank for rank in missing if not arrivals.has_marked(rank, 0)]
        finally:
            os.close(bell)
            arrivals.close()

    def _write(self, name: str, text: str) -> None:
        # The rename makes the whole text visible at once.
        unfinished = self._path(f"{name}.unfinished")
        with self._explaining_absence():
            unfinished.write_text(text, encoding="utf-8")
            unfinished.rename(self._path(name))

    @contextlib.contextmanager
    def _explaining_absence(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise FsdpCommError(
                f"rank {self._rank} cannot reach the other ranks: {self._directory}, through which "
                "they exchange what they have, has vanished. Did a test empty the temporary "
                "directory (tempfile.gettempdir()), or a cleaner of it?"
            ) from None

    def _has(self, name: str) -> bool:
        return self._path(name).exists()

    def _read(self, name: str) -> str:
        return self._path(name).read_text(encoding="utf-8")

    def _has_left(self, rank: int) -> bool:
        return self._departures.has_marked(rank, self._number)

    def _path(self, name: str) -> Path:
        return self._directory / f"test{self._number}.{name}"


class StoreExchange(RankExchange):
    """Through a store that ranks of many machines reach."""

    def __init__(self, store: TextStore, rank: int, ranks: tuple[int, ...]) -> None:
        """Starts before the first comparison.

        Args:
            store: A store that the ranks of one test share, and nobody else.
            rank: This rank.
            ranks: All ranks that take part, ascending.
        """
        super().__init__(rank, ranks)
        self._store = store

    def _leave(self) -> None:
        self._store.put(f"left.{self._rank}", "")

    def forget(self) -> None:
        """Removes what this rank gave, once every rank has left."""
        for round_number in itertools.count(1):
            self._store.remove(_text_name(round_number, self._rank))
            if not self._store.remove(f"{round_number}.{self._rank}"):
                return

    def _write(self, name: str, text: str) -> None:
        self._store.put(name, text)

    def _has(self, name: str) -> bool:
        return self._store.has(name)

    def _read(self, name: str) -> str:
        return self._store.get(name)

    def _has_left(self, rank: int) -> bool:
        return self._store.has(f"left.{rank}")
