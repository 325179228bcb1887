"""Shows what ranks print while they run, each line under its rank's name."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from pytest_fsdp_comm.ranks.rank.kept_output import KEPT_NBYTES, read_kept

if TYPE_CHECKING:
    from pytest_fsdp_comm.ranks.wire.rank_set import RankSetSpec


class Echo:
    """Follows the logs of a rank set."""

    def __init__(self, spec: RankSetSpec) -> None:
        """Follow the streams in `RankSetSpec.echoes` from their start."""
        self._spec = spec
        self._offsets: dict[tuple[int, str], int] = {}

    def copy(self) -> None:
        """Write the new lines."""
        if not self._spec.echoes:
            return
        for rank in self._spec.ranks:
            for stream in self._spec.echoes:
                with contextlib.suppress(FileNotFoundError):  # not yet, or no longer
                    self._copy_one(rank, stream)
        sys.stdout.flush()

    def _copy_one(self, rank: int, stream: str) -> None:
        path = self._spec.log_path(rank, stream)
        offset = self._offsets.get((rank, stream), 0)
        if path.stat().st_size <= offset:
            return
        with path.open("rb") as file:
            end = path.stat().st_size
            if end - offset > KEPT_NBYTES:
                # Shown text takes no room, so that only its speed is limited.
                text = read_kept(file.fileno(), [(offset, end)])
            else:
                file.seek(offset)
                data = file.read()
                # The rest of the last line is still to come.
                whole = data[: data.rfind(b"\n") + 1]
                text, end = whole.decode("utf-8", "backslashreplace"), offset + len(whole)
        self._offsets[rank, stream] = end
        for line in text.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
