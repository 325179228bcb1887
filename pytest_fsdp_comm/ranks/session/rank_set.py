"""The rank set that runs a test now, or is kept for the next one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_fsdp_comm.options import DistributedSettings
from pytest_fsdp_comm.ranks.session.supervision import Supervision
from pytest_fsdp_comm.ranks.start.ending import start_time
from pytest_fsdp_comm.ranks.wire.directories import remove_directory
from pytest_fsdp_comm.ranks.wire.rank_set import RankProcesses
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks

if TYPE_CHECKING:
    from pytest_fsdp_comm.ranks.wire.results import PhaseReport


@dataclass(frozen=True, slots=True, kw_only=True)
class UnendedRank:
    """A rank whose process was killed, and did not go."""

    name: str
    """The rank and its test."""
    pid: int
    started: str
    """As `start_time` gives it."""
    killed_at: float
    """`time.monotonic`."""

    def is_there(self) -> bool:
        """Whether the process still exists."""
        return start_time(self.pid) == self.started

    def describe(self, what: str) -> str:
        """Says it, to be read by those who can find out why.

        Args:
            what: What is to be said of the rank.
        """
        after_s = time.monotonic() - self.killed_at
        return (
            f"{self.name} {what}: its process {self.pid} still exists {after_s:.0f} s after "
            "SIGKILL.\n"
            f"Is a driver or a file server not responding? /proc/{self.pid}/stack (readable as "
            "root) shows what it waits for."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """Ranks that live, with what belongs to them."""

    module: pytest.Module | None
    """The module of their tests."""
    settings: DistributedSettings
    """How their tests run."""
    nodeid: str
    """Their first test."""
    directory: Path
    """Removed with them."""
    supervision: Supervision
    processes: RankProcesses

    def suits(self, item: pytest.Item, settings: DistributedSettings) -> bool:
        """Whether another test runs on the same ranks as those before."""
        return self.module is item.getparent(pytest.Module) and self.settings == settings

    def end(self, within_s: float) -> tuple[list[str], list[UnendedRank]]:
        """Kills the ranks and removes what they shared.

        Args:
            within_s: How long to wait until they are gone.

        Returns:
            A problem for what failed in fixtures that were kept for a test which did not follow,
            and the ranks that are not gone in time.
        """
        late = self.supervision.late_failures()
        killed_at = time.monotonic()
        unended = self.supervision.end(within_s)
        remove_directory(self.directory)
        problems = [
            f"{name_ranks(ranks)}: a fixture that {self.nodeid} or a later test of its module "
            f"had set up failed at its end:\n{text}"
            for ranks, text in fold_equal(
                {rank: _crash_text(report) for rank, report in late.items()}
            )
        ]
        # Some may have ended just now.
        there = {
            rank: (pid, started) for rank, pid in unended.items() if (started := start_time(pid))
        }
        return problems, [
            UnendedRank(
                name=f"rank {rank} of {self.nodeid}", pid=pid, started=started, killed_at=killed_at
            )
            for rank, (pid, started) in there.items()
        ]


def _crash_text(sent: PhaseReport) -> str:
    longrepr = sent.report["longrepr"]
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    return str(crash["message"] if crash else longrepr)
