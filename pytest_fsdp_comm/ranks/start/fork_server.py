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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe
from os import getpid
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.ranks.rank import processes
from pytest_fsdp_comm.ranks.start import ending
from pytest_fsdp_comm.ranks.start.slots import HeldSlots
from pytest_fsdp_comm.ranks.wire import messages
from pytest_fsdp_comm.ranks.wire.channel import Channel

# Note [Fork server]: it is forked from the pytest process after collection, before any test could
# start a thread, do maths or touch CUDA, each of which makes a later fork hang or crash. It has to
# survive the pytest process, and clean up after it. So it has a group of its own and ignores what a
# closed terminal (SIGHUP), Ctrl-C (SIGINT) and launchers (SIGTERM) send; it ends by a hang-up.

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

RunRank = Callable[[messages.RankSetSpec, int, tuple[int, int]], NoReturn]
"""What a process does as a rank, given which, and its connection's and watchdog's descriptors."""


def serve(
    channel: Channel[messages.ServerRequest],
    prepare: Callable[[], RunRank],
    directory: Path,
    *,
    preloaded: Sequence[str],
    is_lazy: bool = False,
) -> NoReturn:
    """Fork and reap until the pytest process is gone, and end this process.

    `prepare` does what every rank would do first, and returns what each does after its fork. In the
    end `directory` goes. If `is_lazy`, nothing is imported before the first request.
    """
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    with contextlib.suppress(OSError):  # started as a group of its own
        os.setpgid(0, 0)
    adopts = ending.adopt_orphans()
    server: _Server | None = None
    status = 0
    collects = gc.isenabled()
    try:
        if is_lazy:
            select.select([channel], [], [])
            preloaded = () if channel.is_hung_up() else preloaded
        gc.disable()  # nothing is garbage yet, and looking for some takes a third of the time
        for name in preloaded:
            # A test that needs one that fails says so: torch.distributed.tensor.debug, for
            # example, needs numpy, which torch does not.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        ranks_signals = {**before, signal.SIGINT: signal.default_int_handler}
        server = _Server(channel, prepare(), ranks_signals, adopts=adopts)
        if collects:
            gc.enable()
        server.run()
    except BaseException as error:  # noqa: BLE001  # nothing may unwind into the copied session
        reason = str(error) if isinstance(error, FsdpCommError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            channel.send(messages.ServerFailed(reason=reason))
        status = 1
    finally:
        try:
            if server is not None:
                server.kill_all()
        finally:
            # Also where the pytest process was killed and could not.
            ending.remove_directory(directory)
            os._exit(status)


@dataclass(slots=True, kw_only=True)
class _RankSet:
    spec: messages.RankSetSpec
    slots: HeldSlots
    """Held here: if this process is killed, the kernel frees them, as the ranks die with it."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids of the ranks that are not reaped yet, by rank."""
    groups: dict[int, int] = field(default_factory=dict)
    """The process groups of all ranks, in which others may be left."""


class _Server:
    def __init__(
        self,
        channel: Channel[messages.ServerRequest],
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
                match request:
                    case messages.RankSetSpec():
                        # Before any fork: a child closes its copies of the slots.
                        self._set = _RankSet(spec=request, slots=HeldSlots(request.slots))
                    case messages.StartRank():
                        self._start_rank(request.rank)
                    case messages.EndSet():
                        unended = self._end_set(within_s=request.within_s)
                        self._channel.send(messages.SetEnded(unended=unended))

    def kill_all(self) -> None:
        self._end_set(within_s=ending.PATIENCE_S)
        ending.kill_children(self._unended, within_s=self._patience_s())

    def _patience_s(self) -> float:
        """How long to wait for ends once there is no pytest process, or it waits for this one."""
        return ending.HURRIED_S if os.getppid() == self._parent else ending.PATIENCE_S

    def _start_rank(self, rank: int) -> None:
        started = self._set
        if started is None:
            raise RuntimeError("RankSetSpec comes before StartRank")
        byte, ends, *_ = socket.recv_fds(self._socket, 1, 2)
        if not byte:
            raise EOFError
        descriptors = (ends[0], ends[1])
        processes.flush_streams()
        pid = processes.fork_quietly()
        if pid == 0:
            self._run_forked(partial(self._run_rank, started.spec, rank, descriptors))
        # Also done by the child itself; whichever comes first, a kill of the group finds it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        # Before the next fork, so that a rank alone has its ends: see Note [Connections].
        for descriptor in descriptors:
            os.close(descriptor)
        started.pids[rank] = started.groups[rank] = pid
        if len(started.groups) == len(started.spec.settings.ranks):
            self._channel.send(messages.SetStarted(pids=dict(started.groups)))

    def _run_forked(self, run: Callable[[], NoReturn]) -> NoReturn:
        try:
            ending.end_with_parent(self._pid)
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
                self._channel.send(
                    messages.RankExited(rank=rank, status=os.waitstatus_to_exitcode(status))
                )

    def _end_set(self, *, within_s: float) -> dict[int, int]:
        """Kill what the ranks left; return pids still there; see Note [Ending a process tree]."""
        ended, self._set = self._set, None
        if ended is None:
            return {}
        ending.kill(ended.pids.values())
        unended = self._await_ends(ended.pids, within_s)
        if unended or not self._adopts:
            # Of ranks that ended too: what a test started must not outlive it.
            ending.kill(-group for group in ended.groups.values())
        self._unended += unended.values()
        self._unended += ending.kill_children(self._unended, within_s=self._patience_s())
        ended.slots.release()
        return unended

    def _await_ends(self, pids: Mapping[int, int], within_s: float) -> dict[int, int]:
        began_at = time.monotonic()
        while True:
            left = {rank: pid for rank, pid in pids.items() if ending.await_end(pid) is None}
            # Each time: one that is killed closes its files a moment before its children lose it.
            limit_s = self._patience_s() if self._channel.is_hung_up() else within_s
            if not left or time.monotonic() > began_at + min(limit_s, within_s):
                return left
            if select.select([self._wakeup], [], [], _HUNG_UP_POLL_S)[0]:
                self._wakeup.recv(4096)


_Reply = TypeVar("_Reply", messages.SetStarted, messages.SetEnded)

# The first answer comes after torch has been loaded, perhaps from a busy file server.
_PREPARED_WITHIN_S = 300.0
# Of a process that does nothing but answer.
_ANSWERED_WITHIN_S = 15.0
# It kills its ranks (`ending.HURRIED_S`) and removes a directory.
_CLOSED_WITHIN_S = 5.0

# Note [Connections]: each rank and its watchdog have a connection with the pytest process, which
# makes them all, sends the ranks' ends after each `StartRank`, and closes its copies. The server
# passes each rank its own and closes its copies before it forks the next one. So neither has
# more open files than it needs, and the pytest process alone has its ends: when it dies, each rank
# reads an end of file. A rank's end may stay open after the rank, in what its test forked; so that
# a rank has died only the server tells.


class ServerDiedError(Exception):
    """The fork server died, and every rank; the text says why it ended itself, empty if killed."""


class RankServer(Protocol):
    """What starts and ends ranks, as their supervisor sees it."""

    @property
    def has_died(self) -> bool:
        """Whether it ended on its own."""

    def start_ranks(
        self, spec: messages.RankSetSpec
    ) -> Mapping[int, tuple[Connection, Connection]]:
        """Start ranks; return the connections to each and its watchdog, until `end_ranks`.

        An OSError says that the system does not have so many descriptors.
        """

    def end_ranks(
        self, within_s: float, *, running: Collection[int] = (), unanswered: Collection[int] = ()
    ) -> dict[int, int]:
        """End the rank set, and free its slots; return, by rank, the pids that are left.

        `running` did not finish their test, `unanswered` have not answered `EndTests`.
        """

    def exit_statuses(self) -> Mapping[int, int | str]:
        """The ranks that ended: exit status, minus signal number, or what became of the rank.

        Raises `ServerDiedError`, with its last words, if the server is gone.
        """

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank on this machine, if it still lives."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when a rank ended."""

    def close(self) -> int | None:
        """End every rank; return how the server itself ended, None if that is unknown."""


class ForkServer:
    """The fork server, or the process that starts ranks, with the rank set that it has."""

    def __init__(self, start: Callable[[Connection, Connection], int], directory: Path) -> None:
        """Start the server with `start(ours, theirs)`, ends of a connection; it returns the pid.

        The server removes `directory` in the end, unless it is killed.
        """
        self._directory = directory
        ours, theirs = Pipe()
        self._pid = start(ours, theirs)
        theirs.close()
        # The server goes on cleaning up after this process only once that has really ended: the
        # interpreter closes sockets before it ends, but no descriptors.
        self._until_exit = os.dup(ours.fileno())
        self._channel: Channel[messages.ServerReply] = Channel(ours, stalls_s=_ANSWERED_WITHIN_S)
        self.pids: dict[int, int] = {}
        """The process that each rank is, or was; empty before the first rank set."""
        self._exited: dict[int, int] = {}
        self._connections: list[Connection] = []
        self._status: int | None = None

    def start_ranks(self, spec: messages.RankSetSpec) -> dict[int, tuple[Connection, Connection]]:
        self._exited.clear()
        self.pids = {}
        self._send(spec)
        connections: dict[int, tuple[Connection, Connection]] = {}
        for rank in spec.settings.ranks:
            try:
                (ours, theirs), (our_watch, their_watch) = Pipe(), Pipe()
            except OSError:
                self.end_ranks(ending.PATIENCE_S)  # those that have started
                raise
            connections[rank] = ours, our_watch
            self._connections += connections[rank]
            with theirs, their_watch:
                self._send(messages.StartRank(rank=rank), theirs, their_watch)
        self.pids = self._await(messages.SetStarted, _PREPARED_WITHIN_S).pids
        return connections

    def _send(self, request: messages.ServerRequest, *ends: Connection) -> None:
        try:
            self._channel.send(request)
            if ends:
                connection = socket.socket(fileno=self._until_exit)
                try:
                    socket.send_fds(connection, [b"."], [end.fileno() for end in ends])
                finally:
                    connection.detach()  # no copy: the last descriptors may be in use
        except BlockingIOError:
            self.kill()  # it reads nothing
            raise ServerDiedError from None
        except ConnectionError:
            self._take(self._channel.receive_available())
            raise ServerDiedError from None

    def _await(self, cls: type[_Reply], within_s: float) -> _Reply:
        until = time.monotonic() + within_s
        while True:
            try:
                reply = self._channel.receive(within_s=until - time.monotonic())
            except (TimeoutError, BlockingIOError):
                self.kill()
                raise ServerDiedError from None
            if reply is None:
                raise ServerDiedError
            self._take([reply])
            if isinstance(reply, cls):
                return reply

    def end_ranks(self, within_s: float, **_: Collection[int]) -> dict[int, int]:
        try:
            self._send(messages.EndSet(within_s=within_s))
            return self._await(messages.SetEnded, within_s + _ANSWERED_WITHIN_S).unended
        except ServerDiedError:
            # Its ranks died with it (`end_with_parent`), but not what they had forked.
            ending.kill(-pid for pid in self.pids.values())
            return {}
        finally:
            while self._connections:
                self._connections.pop().close()

    def send_signal(self, rank: int, number: int) -> None:
        if rank not in self.exit_statuses():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def exit_statuses(self) -> dict[int, int]:
        self._take(self._channel.receive_available())
        if self._channel.is_closed:
            raise ServerDiedError
        return self._exited

    def _take(self, replies: Iterable[messages.ServerReply]) -> None:
        for reply in replies:
            if isinstance(reply, messages.ServerFailed):
                raise ServerDiedError(reply.reason)
            if isinstance(reply, messages.RankExited):
                self._exited[reply.rank] = reply.status

    def fileno(self) -> int:
        return self._channel.fileno()

    def kill(self) -> None:
        if not self.has_died:
            ending.kill([self._pid])

    @property
    def has_died(self) -> bool:
        self._reap(0.0)
        return self._status is not None

    def close(self) -> int | None:
        """End the server and every rank, and remove the directory; return what `await_end` did."""
        self._channel.close()
        os.close(self._until_exit)
        self._reap(_CLOSED_WITHIN_S)
        # Before the kill: xdist interrupts a worker 5 s after its session, just about now, if its
        # server still loads torch. Somebody has to be left who removes it.
        ending.remove_directory(self._directory)
        self.kill()
        self._reap(ending.HURRIED_S)
        ending.remove_directory(self._directory)  # what its ranks have written meanwhile
        return self._status

    def _reap(self, within_s: float) -> None:
        if self._status is None:
            self._status = ending.await_end(self._pid, within_s=within_s)


def fork_server(
    prepare: Callable[[], RunRank],
    directory: Path,
    preloaded: Sequence[str] = (),
    *,
    is_lazy: bool = False,
) -> ForkServer:
    """Fork the server from this process, to `fork_server.serve`; torch is always preloaded."""

    def start(ours: Connection, theirs: Connection) -> int:
        pid = processes.fork_quietly()
        if pid == 0:
            ours.close()
            serve(
                Channel(theirs),
                prepare,
                directory,
                preloaded=(*PRELOADED, *preloaded),
                is_lazy=is_lazy,
            )
        return pid

    return ForkServer(start, directory)
