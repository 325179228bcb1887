"""Runs a session in processes that an outside launcher started, each with one rank."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE, OWN_RANK_VARIABLE, LaunchedRank
from pytest_fsdp_comm.options import OPTIONS, SETTINGS
from pytest_fsdp_comm.ranks.hangs.position import Watchdog
from pytest_fsdp_comm.ranks.launched.ranks import ADDRESS, MEET_TIMEOUT_S, LaunchedRanks
from pytest_fsdp_comm.ranks.rank.context import RankExtension
from pytest_fsdp_comm.ranks.rank.main import RankTemplate, save_coverage
from pytest_fsdp_comm.ranks.rank.process_group import connect_store
from pytest_fsdp_comm.ranks.rank.processes import fork_quietly, run_exit_functions, run_finalizers
from pytest_fsdp_comm.ranks.session.runner import RankRunner
from pytest_fsdp_comm.ranks.start.ending import (
    HURRIED_S,
    adopt_orphans,
    end_with_parent,
    kill_children,
    remove_directory,
)
from pytest_fsdp_comm.ranks.start.spawn import arguments_of, reason_to_spawn
from pytest_fsdp_comm.ranks.wire.channel import Channel, keep_alive
from pytest_fsdp_comm.ranks.wire.messages import (
    RANK,
    WATCHDOG,
    EndSession,
    Joined,
    RankCommand,
    RankSetSpec,
    Welcome,
)


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


# A launched process as its rank: joins rank 0's process and runs what that tells.


class _EndedError(Exception):
    """This process must end before the session does; the text says why."""


def become_rank(
    session: pytest.Session,
    launched: LaunchedRank,
    tests: Sequence[str],
    extensions: Sequence[RankExtension[Any]],
) -> NoReturn:
    """Run this process's rank until rank 0's process ends the session, and end the process."""
    # The rest of pytest's session, with its reports, caches and snapshots, is rank 0's alone.
    name = f"rank {launched.rank} on {socket.gethostname()}"
    status = int(pytest.ExitCode.TESTS_FAILED)
    capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        stderr = os.dup(2)
    try:
        adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0's process ends this one
        _run(session, launched, tests, extensions)
        status = 0
    except _EndedError as error:
        os.write(stderr, f"fsdp-comm: {name}: {error}\n".encode())
    except BaseException:  # noqa: BLE001  # nothing may unwind into pytest's report
        os.write(stderr, f"fsdp-comm: {name}:\n{traceback.format_exc()}".encode())
    finally:
        with suppress(BaseException):
            save_coverage()
            kill_children([], within_s=HURRIED_S)  # what tests have left
        os._exit(status)


def _run(
    session: pytest.Session,
    launched: LaunchedRank,
    tests: Sequence[str],
    extensions: Sequence[RankExtension[Any]],
) -> None:
    channel, watchdog_channel = _join(session, launched, tests)
    command: RankCommand | None = channel.receive()
    if isinstance(command, Welcome):
        items = session.items
        items[:] = [items[place] for place in command.order]
        if command.randomly_seed is not None:
            # pytest-randomly chose another one in each process.
            session.config.option.randomly_seed = command.randomly_seed
        template = RankTemplate(session, extensions)
        # As the fork server does: what is here now lives as long as the rank.
        gc.freeze()
        watchdog = Watchdog(watchdog_channel, ends_process=True)
        command, spec = channel.receive(), None
        while isinstance(command, RankSetSpec):
            spec = command
            spec.directory.mkdir(parents=True, exist_ok=True)  # on another machine
            command = template.run_set(spec, launched.rank, channel, watchdog, launched)
        run_exit_functions()
        run_finalizers()
        if spec is not None:
            remove_directory(spec.directory.parent)  # likewise
    if not isinstance(command, EndSession):
        raise _EndedError("rank 0's process is gone, or has ended this one")


def _join(
    session: pytest.Session, launched: LaunchedRank, tests: Sequence[str]
) -> tuple[Channel[RankCommand], Channel[Any]]:
    try:
        store = connect_store(launched, timeout_s=MEET_TIMEOUT_S)
        port, token = json.loads(store.get(ADDRESS))
        sockets = [
            socket.create_connection((launched.host, port), timeout=MEET_TIMEOUT_S)
            for _ in range(2)
        ]
    except (OSError, RuntimeError) as error:
        raise _EndedError(
            f"cannot reach rank 0 at {launched.host}:{launched.port} (MASTER_ADDR, MASTER_PORT): "
            f"{str(error).partition(chr(10))[0]}"
        ) from None
    for connected in sockets:
        connected.settimeout(None)
        keep_alive(connected)
    channel = Channel(Connection(sockets[0].detach()), RANK)
    watchdog = Channel(Connection(sockets[1].detach()), WATCHDOG)
    problem = ""
    if session.testsfailed:
        problem = (
            f"could not collect all tests ({session.testsfailed} errors); run `pytest "
            "--collect-only` there to see them"
        )
    host = socket.gethostname()
    joined = Joined(token=token, rank=launched.rank, host=host, tests=tuple(tests), problem=problem)
    channel.send(joined)
    watchdog.send(Joined(token=token, rank=launched.rank, host=host, tests=None))
    return channel, watchdog
