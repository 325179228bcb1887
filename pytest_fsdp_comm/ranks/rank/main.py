"""One rank: runs the whole pytest protocol of a test and reports what happened."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.hangs.watchdog import Watchdog
from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT, RankContext
from pytest_fsdp_comm.ranks.rank.debugger import debug_elsewhere, debug_here, refuse_debuggers
from pytest_fsdp_comm.ranks.rank.forked_children import end_forked_child
from pytest_fsdp_comm.ranks.rank.isolation import isolate_session, leave_to_parent
from pytest_fsdp_comm.ranks.rank.plugin import RankPlugin
from pytest_fsdp_comm.ranks.rank.process_group import (
    BEYOND_DEADLINE_S,
    device_of,
    empty_compiler_caches,
    set_environment,
)
from pytest_fsdp_comm.ranks.rank.terminal import RankTerminal
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.exchange import Departures, DirectoryExchange, StoreExchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from pytest_fsdp_comm.ranks.wire.exchange import RankExchange
    from pytest_fsdp_comm.ranks.wire.extension import RankExtension
    from pytest_fsdp_comm.ranks.wire.launch import Launch

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)


class RankTemplate:
    """What all ranks have in common, made once in the process that they are forked from.

    Each page of memory that a rank writes to is copied for it, and counting references is writing:
    done in each rank, what is done here cost a third of a trivial test's time.
    """

    def __init__(self, session: pytest.Session, extensions: Sequence[RankExtension]) -> None:
        """Takes from this process's session what belongs to its parent."""
        self._session = session
        self._extensions = extensions
        self._terminal = leave_to_parent(session.config)
        for extension in extensions:
            extension.enter_rank(session.config)
        self._plugin = RankPlugin(session.config)
        session.config.pluginmanager.register(self._plugin, "fsdp-comm-rank")
        empty_compiler_caches()
        for item in session.items:
            if SETTINGS in item.stash:
                _ = item.location  # kept by pytest once it is known

    def become_rank(self, launch: Launch, rank: int) -> NoReturn:
        """Runs tests until the supervisor hangs up. Never returns to the caller's frames."""
        session = self._session
        _tie_to_parent()
        _redirect_output(launch, rank)
        # pytest enabled it for the terminal, where a rank's crash would write into the progress
        # line.
        faulthandler.enable(file=2)
        # The handler is C code on its own stack: it answers even where Python code holds the GIL.
        stacks = launch.stacks_path(rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
        set_environment(launch.settings, rank, launch.gpus, launch.part)
        isolate_session(session.config, basetemp=launch.basetemp / f"rank{rank}")
        self._terminal.open(launch.log_path(rank, "terminal"))
        if not launch.terminal:
            refuse_debuggers(session.config)
        elif rank == launch.debugged_rank:
            debug_here(session.config, RankTerminal(launch.terminal))
        else:
            debug_elsewhere(session.config)
        channel = Channel.connect(launch.socket_path)
        channel.send({"rank": rank, "pid": os.getpid()})
        self._plugin.bind(channel, launch, rank)
        self._run_items(launch, rank, channel)
        os._exit(0)

    def _run_items(self, launch: Launch, rank: int, channel: Channel) -> None:
        watchdog = Watchdog(launch.socket_path, rank)
        departures = Departures(launch.departures_path)
        session = self._session
        rank_pid = os.getpid()
        index: int | None = launch.item_index
        number = 0
        while index is not None:
            item = session.items[index]
            context = _context(launch, rank, number, departures)
            watchdog.begin_test()
            session.config.stash[RANK_CONTEXT] = context
            result = _run_item(item, self._extensions)
            # Whatever way it took: a plugin may have caught what should have ended it before.
            end_forked_child(rank_pid, None)
            end = {**result, **self._plugin.take_held()}
            context.exchange.leave()
            save_coverage()
            _flush()
            channel.send({**end, "done": number})
            command = channel.receive()
            index = command["item"] if command else None
            number += 1


def _context(launch: Launch, rank: int, number: int, departures: Departures) -> RankContext:
    settings, part = launch.settings, launch.part
    exchange: RankExchange
    if part:
        from pytest_fsdp_comm.ranks.wire.text_store import (  # noqa: PLC0415  # other ranks need no store
            TextStore,
            connect_store,
        )

        client = connect_store(
            part.store.below(f"test{number}"), timeout_s=settings.timeout_s + BEYOND_DEADLINE_S
        )
        exchange = StoreExchange(TextStore(client), rank, settings.ranks)
    else:
        exchange = DirectoryExchange(
            launch.directory, rank, settings.ranks, number=number, departures=departures
        )
    local_rank = part.local_rank if part else rank
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        local_world_size=part.local_world_size if part else settings.world_size,
        world_size=settings.world_size,
        ranks=settings.ranks,
        backend=settings.backend,
        device=device_of(settings, local_rank),
        timeout_s=settings.timeout_s,
        directory=launch.directory,
        exchange=exchange,
        store=part.store if part else None,
    )


def _run_item(item: pytest.Item, extensions: Sequence[RankExtension]) -> dict[str, Any]:
    """Runs a test's protocol.

    Returns:
        How it ended, to be told with its end.
    """
    try:
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
    except BaseException as error:  # noqa: BLE001  # pytest.exit, KeyboardInterrupt, plugins' errors
        # Without payloads: the verdict is known, and the session's state is not.
        return {"escaped": _describe(error), "escaped_at": time.time()}
    return {"payloads": [extension.rank_payload(item) for extension in extensions]}


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _tie_to_parent() -> None:
    """Makes the kernel end this process when the one that forked it ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)  # the parent died before the line above


def _redirect_output(launch: Launch, rank: int) -> None:
    """Sends descriptors 1 and 2 to files of this rank, which survive a crash."""
    _flush()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        log = os.open(launch.log_path(rank, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, descriptor)
        os.close(log)
        # Python's own buffer would be lost in a crash.
        stream = open(  # noqa: SIM115  # lives as long as the process
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()


def save_coverage() -> None:
    """Saves what coverage.py measured here: a rank ends without running exit handlers."""
    coverage: Any = sys.modules.get("coverage")
    current = coverage.Coverage.current() if coverage else None
    if current is not None:
        # Without stopping it: started again, coverage 7.17 trips over torch's own modules.
        current.save()
