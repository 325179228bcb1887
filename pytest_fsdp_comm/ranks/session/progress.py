"""Shows on the terminal what ranks print, and where they are in a long test."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.options import OPTIONS, SETTINGS
from pytest_fsdp_comm.ranks.hangs.stacks import with_code
from pytest_fsdp_comm.ranks.wire.messages import RankSetSpec
from pytest_fsdp_comm.ranks.wire.results import Activity, Position
from pytest_fsdp_comm.text.rank_lists import name_equal


class Echo:
    """Follows the logs of a rank set."""

    def __init__(self, spec: RankSetSpec) -> None:
        self._spec = spec
        self._offsets: dict[tuple[int, str], int] = {}

    def copy(self) -> None:
        if not self._spec.echoes:
            return
        for rank in self._spec.settings.ranks:
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
            file.seek(offset)
            data = file.read()
        # The rest of the last line is still to come.
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[rank, stream] = offset + len(whole)
        for line in whole.decode("utf-8", "backslashreplace").splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")


class Progress:
    """Writes to the terminal that a test still runs: after a while, then at each doubling."""

    def __init__(self, item: pytest.Item, reporter: Any) -> None:
        self._item = item
        self._reporter = reporter
        self.first_after_s = item.config.stash[OPTIONS].progress_s
        """Seconds after the test's start until the first line."""

    def show(self, positions: Mapping[int, Position], *, after_s: float) -> None:
        """Write one line, given where the ranks are that answered."""
        sites = {
            rank: "done"
            if position.activity is Activity.HAS_ENDED
            else f"at {with_code(position.site, position.code) or 'unknown'}"
            for rank, position in positions.items()
        }
        where = "; ".join(name_equal(sites))
        deadline = self._item.stash[SETTINGS].timeout_s
        self._reporter.ensure_newline()
        self._reporter.write_line(
            f"fsdp-comm: {printable(self._item.nodeid)} is still running after {after_s:.0f} s "
            f"(deadline {deadline:g} s): {where or 'no rank responds'}"
        )


def progress_on_terminal(item: pytest.Item) -> Progress | None:
    """Show a test's progress on the terminal; None where there is none, as in an xdist worker."""
    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(item.config, "workerinput"):
        return None
    return Progress(item, reporter)
