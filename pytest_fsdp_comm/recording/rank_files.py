"""Collects a text from every rank of a program through files: no group of the program is used."""

# Note [Files of ranks]
# Ranks mostly write the same, so a text is named by its digest and written once, and an empty file
# says which rank has it: `rank7.<digest>`. Whoever collects lists one directory, and reads a few
# files, of however many ranks. Files of an earlier run are gone once rank 0 has begun; a rank that
# ends its block before that loses its own, and the collection says that it is missing.

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.text.rank_lists import name_ranks

_LONGEST_PAUSE_S: Final = 1.0


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
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
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
