"""Runs a session in processes that an outside launcher started, each with one rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE, OWN_RANK_VARIABLE, LaunchedRank
from pytest_fsdp_comm.options import OPTIONS, SETTINGS
from pytest_fsdp_comm.ranks.launched.process import become_rank
from pytest_fsdp_comm.ranks.launched.ranks import LaunchedRanks
from pytest_fsdp_comm.ranks.rank.context import RankExtension
from pytest_fsdp_comm.ranks.rank.processes import fork_quietly
from pytest_fsdp_comm.ranks.session.runner import RankRunner
from pytest_fsdp_comm.ranks.start.ending import end_with_parent
from pytest_fsdp_comm.ranks.start.spawn import arguments_of, reason_to_spawn


def join_session(
    session: pytest.Session,
    extensions: Sequence[RankExtension[Any]],
    launched: LaunchedRank,
    *,
    preloaded: Sequence[str],
) -> Callable[[pytest.Item], RankRunner | None]:
    """Meet the other processes; return on rank 0 only, what chooses the runner of a test.

    A test that does not fit the ranks has none: it is skipped.
    """
    environment = pytest.MonkeyPatch()
    environment.setenv(INSIDE_VARIABLE, "1")
    # A program may run another session.
    session.config.add_cleanup(environment.undo)
    tests = tuple(_planned(item) for item in session.items)
    for item in session.items:
        if SETTINGS in item.stash and not _fits(item, launched):
            size = item.stash[SETTINGS].world_size
            reason = f"needs {size} ranks, {launched.launcher} started {launched.world_size}"
            item.add_marker(pytest.mark.skip(reason=reason))
    if not launched.is_leader:
        become_rank(session, launched, tests, extensions)
    simulated = None
    if any(map(_is_simulated, session.items)):
        simulated = RankRunner(session, extensions, preloaded=preloaded)
        session.config.add_cleanup(simulated.close)
        simulated.start()  # before anything here that a fork does not survive
    own_rank = _start_own_rank(session, launched, tests, extensions)
    ranks = LaunchedRanks(session, launched, own_rank)
    runner = RankRunner(session, extensions, launched=ranks)
    session.config.add_cleanup(runner.close)
    _end_after_sigterm(session)
    runner.start()
    ranks.meet(tests)

    def choose(item: pytest.Item) -> RankRunner | None:
        if _is_simulated(item):
            return simulated
        return runner if _fits(item, launched) else None

    return choose


def _start_own_rank(
    session: pytest.Session,
    launched: LaunchedRank,
    tests: Sequence[str],
    extensions: Sequence[RankExtension[Any]],
) -> int:
    """Start the child of this process that is rank 0; return its process id."""
    if reason_to_spawn(session.config.stash[OPTIONS].start):
        arguments, environment = arguments_of(session.config)
        environment = {**environment, OWN_RANK_VARIABLE: "1"}
        environment.pop(INSIDE_VARIABLE)
        process = subprocess.Popen(  # noqa: S603  # pytest itself
            [sys.executable, "-m", "pytest", *arguments],
            stdin=subprocess.DEVNULL,
            cwd=session.config.invocation_params.dir,
            env=environment,
        )
        process.returncode = 0  # it is waited for by its id, as if it had been forked
        return process.pid
    parent = os.getpid()
    pid = fork_quietly()
    if pid == 0:
        end_with_parent(parent)
        become_rank(session, launched, tests, extensions)
    return pid


def _end_after_sigterm(session: pytest.Session) -> None:
    # A launcher sends it to all processes when one of them has ended with a failure. Its default
    # would lose the report. It ends the other ranks, so the test that runs now ends by itself.
    def note(*_: object) -> None:
        session.shouldfail = session.shouldfail or (
            "the launcher ended this run (SIGTERM): one of its processes failed, or the launcher "
            "itself was stopped"
        )

    def restore() -> None:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, note)
    session.config.add_cleanup(restore)


def _is_simulated(item: pytest.Item) -> bool:
    return SETTINGS in item.stash and item.stash[SETTINGS].backend == "fake"


def _fits(item: pytest.Item, launched: LaunchedRank) -> bool:
    return _is_simulated(item) or item.stash[SETTINGS].world_size == launched.world_size


def _planned(item: pytest.Item) -> str:
    settings = item.stash.get(SETTINGS, None)
    if settings is None:
        return item.nodeid
    device = f", device {settings.device}" if settings.device else ""
    ranks = f"{len(settings.ranks)} of " if len(settings.ranks) < settings.world_size else ""
    return (
        f"{item.nodeid} on {ranks}{settings.world_size} ranks ({settings.backend}, "
        f"scope {settings.scope}, timeout {settings.timeout_s:g} s{device})"
    )
