"""What a session asks of the processes that have a test's other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pytest

    from pytest_fsdp_comm.ranks.wire.launch import LaunchedPart
    from pytest_fsdp_comm.ranks.wire.results import RankResult


class Peers(Protocol):
    """The processes that have a test's other ranks, seen from one of them."""

    def basetemp(self) -> Path:
        """Where temporary directories are, the same for every process."""

    def takes(self, item: pytest.Item) -> bool:
        """Whether a distributed test fits the ranks that were launched."""

    def begin(self, index: int, *, continues: bool) -> bool:
        """Begins a test in every process.

        Args:
            index: The test's place in the session's items.
            continues: Whether ranks that were kept here would run it.

        Returns:
            Whether kept ranks run it: the leader decides.
        """

    def part(self) -> LaunchedPart:
        """The rank to start here for the test that began."""

    def has_failed_elsewhere(self, has_failed: bool) -> bool:
        """Says whether this process's rank has failed, and asks for the others."""

    def share(
        self, results: Mapping[int, RankResult], *, keeps: bool
    ) -> tuple[dict[int, RankResult], bool]:
        """Waits until every rank has done with the test.

        Args:
            results: What this process's rank did.
            keeps: Whether it could run another test.

        Returns:
            On the leader what all ranks did, elsewhere as given; and whether all are kept.
        """

    def close(self) -> None:
        """Says goodbye."""
