"""Runs a session in processes that an outside launcher started, each with one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE
from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.launched.follower import Follower, follow
from pytest_fsdp_comm.ranks.launched.leader import Leader
from pytest_fsdp_comm.ranks.launched.meeting import fits
from pytest_fsdp_comm.ranks.session.runner import RankRunner
from pytest_fsdp_comm.ranks.wire.messages import PlannedTest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.wire.extension import RankExtension

# Note [Launched ranks]: every process collects the same tests. For each distributed test each of
# them starts its own rank from a fork server, as without a launcher, so that a rank that dies,
# hangs or fails costs that test only. The ranks find each other, and the processes exchange what
# happened, through the launcher's store. Rank 0's process alone runs the tests without ranks,
# reports, and writes.


def join_session(
    session: pytest.Session,
    extensions: Sequence[RankExtension[Any]],
    launched: LaunchedRank,
    *,
    preloaded: Sequence[str],
) -> RankRunner:
    """Meet the other processes; return on rank 0 only, the runner of the session's tests."""
    environment = pytest.MonkeyPatch()
    environment.setenv(INSIDE_VARIABLE, "1")
    # A program may run another session.
    session.config.add_cleanup(environment.undo)
    tests = tuple(_planned(item) for item in session.items)
    _skip_what_does_not_fit(session.items, launched)
    if not launched.is_leader:
        follow(Follower(session, launched), tests, extensions, preloaded=preloaded)
    # Cleanups run from the last to the first: the leader's, which restores the handler of SIGTERM,
    # comes after that of the runner, whose end ignores the signal.
    leader = Leader(session, launched)
    session.config.pluginmanager.register(leader, "fsdp-comm-leader")
    runner = RankRunner(session, extensions, leader, preloaded=preloaded)
    session.config.add_cleanup(runner.close)
    # Before `meet`: see Note [A thread that no fork meets].
    runner.start()
    leader.meet(tests)
    return runner


def _planned(item: pytest.Item) -> PlannedTest:
    settings = item.stash.get(SETTINGS, None)
    if settings is None:
        return PlannedTest(nodeid=item.nodeid, settings="")
    device = f", device {settings.device}" if settings.device else ""
    ranks = f"{len(settings.ranks)} of " if len(settings.ranks) < settings.world_size else ""
    text = (
        f"{ranks}{settings.world_size} ranks ({settings.backend}, scope {settings.scope}, "
        f"timeout {settings.timeout_s:g} s{device})"
    )
    return PlannedTest(nodeid=item.nodeid, settings=text)


def _skip_what_does_not_fit(items: Sequence[pytest.Item], launched: LaunchedRank) -> None:
    for item in items:
        if SETTINGS in item.stash and not fits(item, launched):
            size = item.stash[SETTINGS].world_size
            item.add_marker(
                pytest.mark.skip(
                    reason=f"needs {size} ranks, {launched.launcher} started {launched.world_size}"
                )
            )
