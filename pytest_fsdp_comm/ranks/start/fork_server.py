"""The fork server: one quiet, single-threaded process from which all ranks are forked."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import getpid
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.ranks.rank.processes import flush_streams, fork_quietly
from pytest_fsdp_comm.ranks.start.ending import (
    HURRIED_S,
    PATIENCE_S,
    adopt_orphans,
    end_with_parent,
    is_gone,
    kill,
    kill_children,
    kill_groups,
)
from pytest_fsdp_comm.ranks.start.slots import HeldSlots, SharedDirectory
from pytest_fsdp_comm.ranks.wire.directories import remove_directory
from pytest_fsdp_comm.ranks.wire.messages import (
    EndSet,
    RankExited,
    ServerFailed,
    SetEnded,
    SetStarted,
    StartRank,
    StartSet,
)
from pytest_fsdp_comm.ranks.wire.rank_set import RankSetSpec

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_fsdp_comm.ranks.wire.channel import Channel
    from pytest_fsdp_comm.ranks.wire.messages import ServerRequest

    _Channel: TypeAlias = Channel[ServerRequest]

# Note [Fork server]: it is forked from the pytest process after collection, before any test ran: at
# that moment the process holds the collected items, and no test has yet started a thread, done
# maths or touched CUDA, each of which makes a later fork hang or crash. It has to survive the
# pytest process, and clean up after it: a terminal that is closed sends SIGHUP to the session's
# group, Ctrl-C SIGINT, a launcher SIGTERM, and SIGKILL may be sent to a whole group. So it has a
# group of its own and ignores these signals; the pytest process decides, and ends it by hanging up.
#
# What it holds lives as long as each rank. gc.freeze: without it, a rank's first full collection
# walks through a million objects, and copies their pages. Garbage is frozen too: freed, it would
# leave holes in pages, which ranks would write into and so copy, and its finalizers are the pytest
# process's. The collection after that, of nothing, takes no time and empties the interpreter's free
# lists, as each rank's first one would. While modules are imported, nothing is garbage, and looking
# for some takes a third of the time.

# Imported once here, they cost nothing in a rank: an FSDP2 step in a fresh rank took 1.89 s without
# and 0.18 s with them (torch 2.13, CPU).
PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.distributed.device_mesh",
    "torch.testing._internal.distributed.fake_pg",
)

_HUNG_UP_POLL_S = 0.05

RunRank = Callable[[RankSetSpec, int, tuple[int, int]], NoReturn]
"""What a process does as a rank, given which, and its connection's and watchdog's descriptors."""


def serve(
    channel: _Channel,
    prepare: Callable[[], RunRank],
    directory: Path,
    shared: Path | None,
    *,
    preloaded: Sequence[str],
) -> NoReturn:
    """Fork and reap until the pytest process is gone, and end this process.

    `prepare` does what every rank would do first, and returns what each does after its fork. In the
    end `directory` goes, and so does `shared`, the slots' directory, if no other process uses it.
    """
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    with contextlib.suppress(OSError):  # started as a group of its own
        os.setpgid(0, 0)
    adopts = adopt_orphans()
    server: _Server | None = None
    status = 0
    collects = gc.isenabled()
    try:
        gc.disable()
        for name in preloaded:
            # A test that needs one that fails says so: torch.distributed.tensor.debug, for
            # example, needs numpy, which torch does not.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        ranks_signals = {**before, signal.SIGINT: signal.default_int_handler}
        server = _Server(channel, prepare(), ranks_signals, adopts=adopts)
        gc.freeze()
        gc.collect()
        if collects:
            gc.enable()
        server.run()
    except BaseException as error:  # noqa: BLE001  # nothing may unwind into the copied session
        reason = str(error) if isinstance(error, FsdpCommError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            channel.send(ServerFailed(reason=reason))
        status = 1
    finally:
        try:
            if server is not None:
                server.kill_all()
        finally:
            # Also where the pytest process was killed and could not.
            remove_directory(directory)
            with contextlib.suppress(OSError):
                if shared is not None:
                    SharedDirectory.remove_left(shared)
            os._exit(status)


@dataclass(slots=True, kw_only=True)
class _RankSet:
    spec: RankSetSpec
    slots: HeldSlots
    """Held here: if this process is killed, the kernel frees them, as the ranks die with it."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids of the ranks that are not reaped yet, by rank."""
    groups: dict[int, int] = field(default_factory=dict)
    """The process groups of all ranks, in which others may be left."""


class _Server:
    def __init__(
        self,
        channel: _Channel,
        run_rank: RunRank,
        ranks_signals: Mapping[int, Any],
        *,
        adopts: bool,
    ) -> None:
        self._pid = getpid()
        self._parent = os.getppid()
        self._channel = channel
        self._socket = socket.socket(fileno=os.dup(channel.fileno()))
        self._run_rank = run_rank
        self._ranks_signals = {signal.SIGCHLD: signal.SIG_DFL, **ranks_signals}
        self._adopts = adopts
        self._set: _RankSet | None = None
        self._unended: list[int] = []  # killed in vain, by process id
        self._wakeup, self._write_end = socket.socketpair()
        for end in (self._wakeup, self._write_end):
            end.settimeout(0.0)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        while True:
            ends: list[Any] = [self._channel, self._wakeup]
            readable, _, _ = select.select(ends, [], [])
            if self._wakeup in readable:
                self._wakeup.recv(4096)
                self._reap()
            if self._channel in readable:
                request = self._channel.receive()
                if request is None or self._channel.is_hung_up():
                    return  # before ranks start that nobody waits for
                self._handle(request)

    def kill_all(self) -> None:
        self._end_set(within_s=PATIENCE_S)
        kill_children(self._unended, within_s=self._patience_s())

    def _patience_s(self) -> float:
        """How long to wait for ends once there is no pytest process, or it waits for this one."""
        return HURRIED_S if os.getppid() == self._parent else PATIENCE_S

    def _handle(self, request: ServerRequest) -> None:
        match request:
            case StartSet():
                # Before any fork: a child closes its copies of the slots.
                self._set = _RankSet(spec=request.spec, slots=HeldSlots(request.spec.slots))
            case StartRank():
                self._start_rank(request.rank)
            case EndSet():
                unended = self._end_set(within_s=request.within_s)
                self._channel.send(SetEnded(unended=unended))

    def _start_rank(self, rank: int) -> None:
        started = self._set
        if started is None:
            raise RuntimeError("StartSet comes before StartRank")
        descriptors = self._take_ends()
        try:
            run = partial(self._run_rank, started.spec, rank, descriptors)
            started.pids[rank] = self._fork(run)
        finally:
            # Before the next fork, so that a rank alone has its ends: see Note [Connections].
            for descriptor in descriptors:
                os.close(descriptor)
        started.groups[rank] = started.pids[rank]
        if len(started.groups) == len(started.spec.settings.ranks):
            self._channel.send(SetStarted(pids=dict(started.groups)))

    def _take_ends(self) -> tuple[int, int]:
        byte, ends, *_ = socket.recv_fds(self._socket, 1, 2)
        if not byte:
            raise EOFError
        if len(ends) != 2:  # noqa: PLR2004  # as the function returns
            raise FsdpCommError(
                "connections of ranks were lost, for the process that starts ranks has too many "
                "open files: raise the limit (ulimit -n), or use fewer ranks"
            )
        return ends[0], ends[1]

    def _fork(self, run: Callable[[], NoReturn]) -> int:
        flush_streams()
        pid = fork_quietly()
        if pid == 0:
            self._run_forked(run)
        # Also done by the child itself; whichever comes first, a kill of the group finds it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid

    def _run_forked(self, run: Callable[[], NoReturn]) -> NoReturn:
        try:
            end_with_parent(self._pid)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number, handler in self._ranks_signals.items():
                signal.signal(number, handler or signal.SIG_DFL)
            # A descriptor of the pytest process's end would keep it from seeing the server's death.
            for own in (self._channel, self._socket, self._wakeup, self._write_end):
                own.close()
            if self._set is not None:
                self._set.slots.close()
            run()
        except BaseException:  # noqa: BLE001  # nothing may unwind into the copied pytest session
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _reap(self) -> None:
        pids = self._set.pids if self._set is not None else {}
        for rank, pid in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del pids[rank]
                self._channel.send(RankExited(rank=rank, status=os.waitstatus_to_exitcode(status)))

    def _end_set(self, *, within_s: float) -> dict[int, int]:
        """Kill what the ranks left; return pids still there; see Note [Ending a process tree]."""
        ended, self._set = self._set, None
        if ended is None:
            return {}
        kill(ended.pids.values())
        unended = self._await_ends(ended.pids, within_s)
        if unended or not self._adopts:
            # Of ranks that ended too: what a test started must not outlive it.
            kill_groups(ended.groups.values())
        self._unended += unended.values()
        self._unended += kill_children(self._unended, within_s=self._patience_s())
        ended.slots.release()
        return unended

    def _await_ends(self, pids: Mapping[int, int], within_s: float) -> dict[int, int]:
        began_at = time.monotonic()
        while True:
            left = {rank: pid for rank, pid in pids.items() if not is_gone(pid)}
            # Each time: one that is killed closes its files a moment before its children lose it.
            limit_s = self._patience_s() if self._channel.is_hung_up() else within_s
            if not left or time.monotonic() > began_at + min(limit_s, within_s):
                return left
            if select.select([self._wakeup], [], [], _HUNG_UP_POLL_S)[0]:
                self._wakeup.recv(4096)
