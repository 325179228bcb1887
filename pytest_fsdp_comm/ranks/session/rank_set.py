"""The rank set that runs a test now, or is kept for the next one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_fsdp_comm.options import DistributedSettings
from pytest_fsdp_comm.ranks.session.supervision import Supervision
from pytest_fsdp_comm.ranks.wire.directories import remove_directory
from pytest_fsdp_comm.ranks.wire.rank_set import RankProcesses
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_fsdp_comm.ranks.wire.results import PhaseReport


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

    def end(self, within_s: float) -> list[str]:
        """Kills the ranks and removes what they shared.

        Args:
            within_s: How long to wait until they are gone.

        Returns:
            A problem for each rank that is not gone in time, and for what failed in fixtures that
            were kept for a test which did not follow.
        """
        late = self.supervision.late_failures()
        unended = self.supervision.end(within_s)
        remove_directory(self.directory)
        return [
            *(
                f"{name_ranks(ranks)}: a fixture that {self.nodeid} or a later test of its module "
                f"had set up failed at its end:\n{text}"
                for ranks, text in fold_equal(
                    {rank: _crash_text(report) for rank, report in late.items()}
                )
            ),
            *self._left(unended, within_s),
        ]

    def _left(self, unended: Mapping[int, int], within_s: float) -> list[str]:
        return [
            f"rank {rank} of {self.nodeid} could not be killed: its process {pid} still exists "
            f"{within_s:g} s after SIGKILL.\n"
            f"Is a driver or a file server not responding? /proc/{pid}/stack (readable as root) "
            "shows what it waits for. Later tests get new ranks."
            for rank, pid in unended.items()
        ]


def _crash_text(sent: PhaseReport) -> str:
    longrepr = sent.report["longrepr"]
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    return str(crash["message"] if crash else longrepr)
