"""Exchanges texts among ranks, and values of which most are equal."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pytest_fsdp_comm.errors import FsdpCommError, RanksDivergedError, RecordingError
from pytest_fsdp_comm.text.codec import from_json, to_json
from pytest_fsdp_comm.text.rank_lists import name_ranks

_Value = TypeVar("_Value")

# A TCP store drops a client that sends 8 MiB or more at once (torch 2.13, libuv).
_CHUNK_NBYTES: Final = 4 << 20
_FIRST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.004
# Between looks at files, which other machines write.
_LONGEST_WAIT_S: Final = 1.0


class TextStore:
    """Texts of any length under names, on a store of torch; each is written once."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, name: str, text: str) -> None:
        """Make a whole text visible, in one step for readers."""
        data = text.encode("utf-8", "surrogatepass")
        chunks = [
            data[offset : offset + _CHUNK_NBYTES]
            for offset in range(0, max(len(data), 1), _CHUNK_NBYTES)
        ]
        for number, chunk in enumerate(chunks[1:], 1):
            self._store.set(f"{name}@{number}", chunk)
        self._store.set(name, b"%d " % len(chunks) + chunks[0])

    def has(self, name: str) -> bool:
        """Whether there is a text; never waits."""
        return bool(self._store.check([name]))

    def get(self, name: str) -> str:
        """Wait for a text, as long as the store's own timeout."""
        num_chunks, _, data = self._store.get(name).partition(b" ")
        rest = [self._store.get(f"{name}@{number}") for number in range(1, int(num_chunks))]
        return b"".join([data, *rest]).decode("utf-8", "surrogatepass")


class Exchange:
    """One rank's end of an exchange; no collective, which would be recorded, and could hang."""

    def __init__(self, texts: TextStore, rank: int, ranks: Sequence[int]) -> None:
        """Start before the first comparison; `texts` are of one test, `ranks` ascending."""
        self._texts = texts
        self._rank = rank
        self._ranks = ranks
        self._rounds = 0
        self._pid = os.getpid()
        self.before: Callable[[], None] = lambda: None
        """Called before each comparison."""

    def __call__(self, text: str) -> list[str]:
        """Give this rank's text; return those of all in rank order, equal ones as one object."""
        if os.getpid() != self._pid:
            raise RanksDivergedError(
                f"a process that rank {self._rank} forked compares comm_mode or fsdp_tree; only "
                "the rank itself can: end the forked process with os._exit before the comparison"
            )
        self.before()
        self._rounds += 1
        complaint = (
            f"rank {self._rank} made comparison {self._rounds} of comm_mode or fsdp_tree, but rank "
            "{} ended the test without it; every rank must make the same comparisons in the same "
            "order (is one inside an `if rank == ...`?)"
        )
        own = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        digests = self.share(str(self._rounds), own, complaint)
        # The first rank that has a text gives it to those that have another.
        givers = dict(zip(reversed(digests), reversed(self._ranks), strict=True))
        texts = {own: text}
        if len(givers) > 1 and givers[own] == self._rank:
            self._texts.put(f"{self._rounds}.text.{self._rank}", text)
        for digest, rank in givers.items():
            if digest != own:
                name = f"{self._rounds}.text.{rank}"
                texts[digest] = self._await(name, rank, complaint.format(rank))
        return [texts[digest] for digest in digests]

    def share(self, name: str, text: str = "", complaint: str = "") -> list[str]:
        """Give a text at a point, once in a test; return those of all ranks, in rank order.

        `complaint`, for the error that a rank ended the test before, has a ``{}`` for that rank.
        """
        complaint = complaint or f"rank {{}} ended the test before {name}"
        self._texts.put(f"{name}.{self._rank}", text)
        return [self._await(f"{name}.{rank}", rank, complaint.format(rank)) for rank in self._ranks]

    def leave(self) -> None:
        """Announce that this rank makes no more comparisons; do nothing in a forked process."""
        if os.getpid() == self._pid:
            with contextlib.suppress(FsdpCommError):
                self._texts.put(f"left.{self._rank}", "")

    # `ranks.hangs.position` looks for its code to tell whether a rank waits for others.
    def _await(self, name: str, rank: int, complaint: str) -> str:
        pause_s = _FIRST_PAUSE_S
        # No deadline of its own: the supervisor ends the test at its deadline, with all stacks.
        while not self._texts.has(name):
            # Looked at again, since it may have been written just before the rank left.
            if self._texts.has(f"left.{rank}") and not self._texts.has(name):
                raise RanksDivergedError(complaint)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._texts.get(name)


def gather_alike(gather: Callable[[str], list[str]], label: str, value: _Value) -> list[_Value]:
    """Exchange values of one class, in rank order; raise RanksDivergedError if labels differ."""
    texts = gather(json.dumps([label, to_json(value)], separators=(",", ":")))
    # Most ranks give the same text: each is read once, and equal ones become one object.
    read = {text: json.loads(text) for text in dict.fromkeys(texts)}
    others = sorted({found for found, _ in read.values()} - {label})
    if others:
        raise RanksDivergedError(
            f"this rank compared {label} with a snapshot, another rank compared "
            f"{', '.join(others)}; every rank must make the same comparisons in the same order "
            "(is one inside an `if rank == ...`?)"
        )
    values = {text: from_json(type(value), data) for text, (_, data) in read.items()}
    return [values[text] for text in texts]


# Note [Files of ranks]
# Ranks mostly write the same, so a text is named by its digest and written once, and an empty file
# says which rank has it: `rank7.<digest>`. Whoever collects lists one directory, and reads a few
# files, of however many ranks. Files of an earlier run are gone once rank 0 has begun; a rank that
# ends its block before that loses its own, and the collection says that it is missing.


class RankFiles:
    """The directory in which the ranks of one program leave what they recorded."""

    def __init__(self, path: Path) -> None:
        """Ranks meet beside the file that one of them will write."""
        self._directory = path.with_name(f".{path.name[:200]}.ranks")

    def clear(self) -> None:
        """Remove what is there: one rank does, before the others can have written."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def publish(self, rank: int, text: str) -> None:
        """Leave the text of one rank."""
        self._directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        whole = self._directory / digest
        if not whole.exists():
            unfinished = self._directory / f"unfinished.{rank}"
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(whole)
        (self._directory / f"rank{rank}.{digest}").touch()

    def collect(self, num_ranks: int, *, timeout_s: float) -> dict[int, str]:
        """Wait for the texts of all ranks, and remove them; equal ones are one object.

        Raises:
            RecordingError: Some rank left none in time.
        """
        until, pause_s = time.monotonic() + timeout_s, 0.01
        while len(found := self._found()) < num_ranks:
            if time.monotonic() > until:
                missing = sorted({*range(num_ranks)} - found.keys())
                raise RecordingError(
                    f"expected what all {num_ranks} ranks recorded in {self._directory}, and after "
                    f"{timeout_s:g} s nothing came from {name_ranks(missing)}; the directory must "
                    "be on a file system that all machines share, and every rank must record"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        texts = {
            digest: (self._directory / digest).read_text(encoding="utf-8")
            for digest in {*found.values()}
        }
        self.clear()
        return {rank: texts[digest] for rank, digest in sorted(found.items())}

    def _found(self) -> dict[int, str]:
        names = (file.name.removeprefix("rank") for file in self._directory.glob("rank*.*"))
        pairs = (name.partition(".") for name in names)
        return {int(rank): digest for rank, _, digest in pairs}
