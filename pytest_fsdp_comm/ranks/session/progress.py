"""Shows on the terminal what ranks print, and where they are in a long test."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.hangs.stacks import with_code
from pytest_fsdp_comm.ranks.wire.messages import RankSetSpec
from pytest_fsdp_comm.ranks.wire.results import Activity, Position
from pytest_fsdp_comm.text.rank_lists import name_equal


class Echo:
    """Follows the logs of a rank set."""

    def __init__(self, spec: RankSetSpec, config: pytest.Config) -> None:
        self._spec = spec
        self._reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._offsets: Counter[tuple[int, str]] = Counter()

    def copy(self) -> None:
        for rank, stream in itertools.product(self._spec.settings.ranks, self._spec.echoes):
            with (
                contextlib.suppress(FileNotFoundError),  # not yet, or no longer
                self._spec.log_path(rank, stream).open("rb") as file,
            ):
                file.seek(self._offsets[rank, stream])
                data = file.read()
                # The rest of the last line is still to come.
                whole = data[: data.rfind(b"\n") + 1]
                self._offsets[rank, stream] += len(whole)
                if whole and self._reporter is not None:
                    self._reporter.ensure_newline()
                for line in whole.decode("utf-8", "backslashreplace").splitlines():
                    sys.stdout.write(f"[rank {rank}] {line}\n")
                sys.stdout.flush()


def show_progress(
    item: pytest.Item, locate: Callable[[], Mapping[int, Position]], after_s: float
) -> None:
    """Write that a test still runs, and where its ranks are that answered."""
    reporter: Any = item.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(item.config, "workerinput"):  # an xdist worker has no terminal
        return
    sites = {
        rank: "done"
        if position.activity is Activity.HAS_ENDED
        else f"at {with_code(position.site, position.code) or 'unknown'}"
        for rank, position in locate().items()
    }
    where = "; ".join(name_equal(sites))
    reporter.ensure_newline()
    reporter.write_line(
        f"fsdp-comm: {printable(item.nodeid)} is still running after {after_s:.0f} s "
        f"(deadline {item.stash[SETTINGS].timeout_s:g} s): {where or 'no rank responds'}"
    )
