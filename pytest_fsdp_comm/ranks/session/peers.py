"""What a session needs of the processes that have a test's other ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pytest_fsdp_comm.ranks.rank.isolation import resolve_basetemp

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    import pytest

    from pytest_fsdp_comm.ranks.wire.rank_set import LocalRank
    from pytest_fsdp_comm.ranks.wire.results import RankResult


class Peers:
    """The other processes with ranks of a test: none here, a launcher's in `ranks.launched`."""

    is_launched = False

    def __init__(self, session: pytest.Session) -> None:
        """Store the session."""
        self.session = session

    def basetemp(self) -> Path:
        """Where temporary directories are, the same for every process."""
        return resolve_basetemp(self.session.config)

    def can_run(self, item: pytest.Item) -> bool:  # noqa: ARG002  # of subclasses
        """Whether a distributed test fits the ranks that there are."""
        return True

    def begin(self, index: int, *, reuses_ranks: bool) -> bool:  # noqa: ARG002  # of subclasses
        """Begin the test of an index in every process; return whether kept ranks run it.

        The leader decides; `reuses_ranks` says whether those kept here could.
        """
        return reuses_ranks

    def local_rank(self) -> LocalRank | None:
        """The only rank to start here for the test that began; None if all are."""
        return None

    def has_failed_elsewhere(self, has_failed: bool) -> bool:  # noqa: ARG002  # of subclasses
        """Send whether a rank of this process has failed; return whether any other has."""
        return False

    def without_thread(self) -> AbstractContextManager[None]:
        """Within the block this process has no thread but its main one, so that it can fork."""
        return contextlib.nullcontext()

    def share(
        self, results: Mapping[int, RankResult], *, can_keep: bool
    ) -> tuple[dict[int, RankResult], bool]:
        """Wait until every rank is done with the test, given what this process's did.

        Returns all results on the leader, elsewhere this process's; and whether all ranks are kept.
        """
        return dict(results), can_keep

    def close(self) -> None:
        """Leave the other processes."""
