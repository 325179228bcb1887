"""A launched process as its rank: joins rank 0's process and runs what that tells."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest

from pytest_fsdp_comm.launch_environment import LaunchedRank
from pytest_fsdp_comm.ranks.hangs.position import Watchdog
from pytest_fsdp_comm.ranks.launched.ranks import ADDRESS, MEET_TIMEOUT_S
from pytest_fsdp_comm.ranks.rank.context import RankExtension
from pytest_fsdp_comm.ranks.rank.main import RankTemplate, save_coverage
from pytest_fsdp_comm.ranks.rank.process_group import connect_store
from pytest_fsdp_comm.ranks.rank.processes import run_exit_functions, run_finalizers
from pytest_fsdp_comm.ranks.start.ending import (
    HURRIED_S,
    adopt_orphans,
    kill_children,
    remove_directory,
)
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
