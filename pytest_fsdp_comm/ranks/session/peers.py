"""What a session needs of the processes that have a test's other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    import pytest

    from pytest_fsdp_comm.ranks.wire.rank_set import LocalRank
    from pytest_fsdp_comm.ranks.wire.results import RankResult


class Peers(Protocol):
    """The processes that have a test's other ranks, seen from one of them."""

    def basetemp(self) -> Path:
        """Where temporary directories are, the same for every process."""

    def can_run(self, item: pytest.Item) -> bool:
        """Whether a distributed test fits the ranks that were launched."""

    def begin(self, index: int, *, reuses_ranks: bool) -> bool:
        """Begins a test in every process.

        Args:
            index: The test's index in the session's items.
            reuses_ranks: Whether ranks that were kept here could run it.

        Returns:
            Whether kept ranks run it: the leader decides.
        """

    def local_rank(self) -> LocalRank:
        """The rank to start here for the test that began."""

    def has_failed_elsewhere(self, has_failed: bool) -> bool:
        """Reports whether this process's rank has failed; whether another one has."""

    def without_thread(self) -> AbstractContextManager[None]:
        """Within the block this process has no thread but its main one, so that it can fork."""

    def share(
        self, results: Mapping[int, RankResult], *, can_keep: bool
    ) -> tuple[dict[int, RankResult], bool]:
        """Waits until every rank is done with the test.

        Args:
            results: What this process's rank did.
            can_keep: Whether it could run another test.

        Returns:
            What all ranks did on the leader, elsewhere this process's; and whether all ranks are
            kept for another test.
        """

    def close(self) -> None:
        """Leaves the other processes."""
