"""Exchange strings and values between ranks; this is cheap if all ranks send the same value."""

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
from pytest_fsdp_comm.text.files import write_atomically
from pytest_fsdp_comm.text.rank_lists import name_ranks

_Value = TypeVar("_Value")

# Send longer strings in chunks of this size, because a TCP store drops a client that sends 8 MiB or
# more at once (torch 2.13, libuv).
_CHUNK_NBYTES: Final = 4 << 20
_FIRST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.004
# Longest pause between two checks for the files of other ranks.
_LONGEST_WAIT_S: Final = 1.0


class TextStore:
    """Stores strings of any length in a torch store; each name must be written only once."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, name: str, text: str) -> None:
        """Write a string; readers do not see it until it is complete."""
        data = text.encode("utf-8", "surrogatepass")
        chunks = [
            data[offset : offset + _CHUNK_NBYTES]
            for offset in range(0, max(len(data), 1), _CHUNK_NBYTES)
        ]
        for number, chunk in enumerate(chunks[1:], 1):
            self._store.set(f"{name}@{number}", chunk)
        self._store.set(name, b"%d " % len(chunks) + chunks[0])

    def has(self, name: str) -> bool:
        """Return whether a string has been written under this name, without waiting for it."""
        return bool(self._store.check([name]))

    def get(self, name: str) -> str:
        """Return a string; wait until it has been written, up to the store's timeout."""
        num_chunks, _, data = self._store.get(name).partition(b" ")
        later = [self._store.get(f"{name}@{number}") for number in range(1, int(num_chunks))]
        return b"".join([data, *later]).decode("utf-8", "surrogatepass")


class Exchange:
    """Exchanges strings between a test's ranks. Uses no collectives, because they could hang."""

    def __init__(self, texts: TextStore, rank: int, ranks: Sequence[int]) -> None:
        self._texts = texts
        self._rank = rank
        self._ranks = ranks
        self._rounds = 0
        self._pid = os.getpid()
        self.before: Callable[[], None] = lambda: None
        """A callback that runs before each comparison."""

    def __call__(self, text: str) -> list[str]:
        """Send this rank's string, and return all ranks' strings; equal strings are one object."""
        if os.getpid() != self._pid:
            raise RanksDivergedError(
                f"a process that rank {self._rank} forked compared comm_mode or fsdp_tree, but "
                "only the rank itself may; end the forked process with os._exit before the "
                "comparison"
            )
        self.before()
        self._rounds += 1
        complaint = (
            f"rank {self._rank} made comparison {self._rounds} of comm_mode or fsdp_tree, but rank "
            "{} ended the test without it; every rank must make the same comparisons in the same "
            "order (is one inside an `if rank == ...`?)"
        )
        own_digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        digests = self.share(str(self._rounds), own_digest, complaint)
        # The lowest rank that has a string sends it to the ranks whose string is different.
        senders = dict(zip(reversed(digests), reversed(self._ranks), strict=True))
        texts = {own_digest: text}
        if len(senders) > 1 and senders[own_digest] == self._rank:
            self._texts.put(f"{self._rounds}.text.{self._rank}", text)
        for digest, rank in senders.items():
            if digest != own_digest:
                name = f"{self._rounds}.text.{rank}"
                texts[digest] = self._wait_for_text(name, rank, complaint.format(rank))
        return [texts[digest] for digest in digests]

    def share(self, name: str, text: str = "", complaint: str = "") -> list[str]:
        """Send this rank's string, and return all ranks' strings; use each name once per test.

        `complaint` is the error message if a rank ends the test without sending; ``{}`` in the
        message is replaced by that rank.
        """
        complaint = complaint or f"rank {{}} ended the test before {name}"
        self._texts.put(f"{name}.{self._rank}", text)
        return [
            self._wait_for_text(f"{name}.{rank}", rank, complaint.format(rank))
            for rank in self._ranks
        ]

    def leave(self) -> None:
        """Announce that this rank will make no more comparisons; do nothing in a forked process."""
        if os.getpid() == self._pid:
            with contextlib.suppress(FsdpCommError):
                self._texts.put(f"left.{self._rank}", "")

    # `ranks.hangs.position` looks for this function in stacks, to find ranks that are waiting here.
    def _wait_for_text(self, name: str, rank: int, complaint: str) -> str:
        pause_s = _FIRST_PAUSE_S
        # No timeout is needed here: at the test's deadline, the supervisor reports all stacks.
        while not self._texts.has(name):
            # Check for the string again, because the rank may have written it just before leaving.
            if self._texts.has(f"left.{rank}") and not self._texts.has(name):
                raise RanksDivergedError(complaint)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._texts.get(name)


def gather_values(gather: Callable[[str], list[str]], label: str, value: _Value) -> list[_Value]:
    """Return every rank's value (equal values as one object); raise if the ranks' labels differ."""
    texts = gather(json.dumps([label, to_json(value)], separators=(",", ":")))
    decoded = {text: json.loads(text) for text in dict.fromkeys(texts)}
    other_labels = sorted({rank_label for rank_label, _ in decoded.values()} - {label})
    if other_labels:
        raise RanksDivergedError(
            f"this rank reached {label}, but another rank reached "
            f"{', '.join(other_labels)}; every rank must make the same comparisons in the same "
            "order (is one inside an `if rank == ...`?)"
        )
    values = {text: from_json(type(value), data) for text, (_, data) in decoded.items()}
    return [values[text] for text in texts]


# Most ranks write equal texts, so each distinct text is stored once, in a file named after its
# digest, and the empty file `rank7.<digest>` records that rank 7 wrote it. The rank that collects
# the texts only has to list one directory and read a few files. When rank 0 starts, it removes the
# files of an earlier run. If another rank has already written its file by then, the file is lost,
# and `collect` reports that the rank's recording is missing.


class RankFiles:
    """A directory next to the output file, in which all ranks of a script write recordings."""

    def __init__(self, path: Path) -> None:
        self._directory = path.with_name(f".{path.name[:200]}.ranks")

    def clear(self) -> None:
        """Delete the directory, because an earlier run may have left files in it."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def publish(self, rank: int, text: str) -> None:
        """Write the text of one rank, for the rank that calls `collect`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        file = self._directory / digest
        if not file.exists():
            write_atomically(file, text)
        (self._directory / f"rank{rank}.{digest}").touch()

    def collect(self, num_ranks: int, *, timeout_s: float) -> dict[int, str]:
        """Wait until all ranks have written, delete the directory, and return each rank's text.

        Equal texts are returned as one object.

        Raises:
            RecordingError: A rank has written nothing after `timeout_s`.
        """
        deadline, pause_s = time.monotonic() + timeout_s, 0.01
        while len(digests := self._find_digests_of_rank_files()) < num_ranks:
            if time.monotonic() > deadline:
                missing = sorted({*range(num_ranks)} - digests.keys())
                raise RecordingError(
                    f"expected the recordings of {num_ranks} ranks in {self._directory}, but after "
                    f"{timeout_s:g} s {name_ranks(missing)} had written none; the directory must "
                    "be on a file system that all machines share, and every rank must record"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
        texts = {
            digest: (self._directory / digest).read_text(encoding="utf-8")
            for digest in {*digests.values()}
        }
        self.clear()
        return {rank: texts[digest] for rank, digest in sorted(digests.items())}

    def _find_digests_of_rank_files(self) -> dict[int, str]:
        names = (file.name.removeprefix("rank") for file in self._directory.glob("rank*.*"))
        pairs = (name.partition(".") for name in names)
        return {int(rank): digest for rank, _, digest in pairs}
