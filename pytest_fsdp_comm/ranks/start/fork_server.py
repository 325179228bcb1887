"""The fork server: a single-threaded process from which all ranks are forked."""

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
from pytest_fsdp_comm.ranks.wire.load import extend_under_load

# The server is forked from the pytest process after collection, before any test can start a thread,
# use OpenMP or touch CUDA, each of which can make a later fork hang or crash. The server must
# outlive the pytest process to clean up after it, so it leads a new process group and ignores the
# signals that a closed terminal (SIGHUP), Ctrl-C (SIGINT) and launchers (SIGTERM) send. It ends
# when its connection to the pytest process closes.

# The server imports these modules once, so that ranks do not have to: an FSDP2 step in a new rank
# took 0.18 s after these imports, and 1.89 s without them (torch 2.13, CPU).
PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.distributed.device_mesh",
    "torch.testing._internal.distributed.fake_pg",
)

# The server also imports the modules of these fixtures, if a test requests them.
FIXTURE_MODULES = {
    "comm_mode": "pytest_fsdp_comm.recording.comm_mode",
    "fsdp_tree": "pytest_fsdp_comm.fsdp_tree",
}

_HUNG_UP_POLL_S = 0.05

RunRank = Callable[[messages.RankSetSpec, int, tuple[int, int]], NoReturn]
"""Runs this process as a rank; takes the descriptors of the rank's and watchdog's connections."""


def serve(
    channel: Channel[messages.ServerRequest],
    prepare: Callable[[], RunRank],
    directory: Path,
    *,
    preloaded: Sequence[str],
    is_lazy: bool = False,
) -> NoReturn:
    """Fork and reap ranks until the pytest process is gone; then remove `directory` and exit.

    `prepare` does the work that all ranks share, and returns the function to run in each rank. With
    `is_lazy`, the server imports the `preloaded` modules only when the first request arrives.
    """
    server = _Server(channel)
    status = 0
    collects = gc.isenabled()
    try:
        if is_lazy:
            select.select([channel], [], [])
            preloaded = () if channel.is_hung_up() else preloaded
        gc.disable()  # imports create no garbage, but collections would take a third of their time
        for name in preloaded:
            # Ignore failed imports: torch.distributed.tensor.debug, for example, needs numpy. A
            # test that needs the module will fail with the same error.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        run_rank = prepare()
        if collects:
            gc.enable()
        server.run(run_rank)
    except BaseException as error:  # noqa: BLE001  # must not reach the copied pytest session
        reason = str(error) if isinstance(error, FsdpCommError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            channel.send(messages.ServerFailed(reason=reason))
        status = 1
    finally:
        try:
            server.kill_all()
        finally:
            # The pytest process removes the directory, too, but it may have been killed.
            ending.remove_directory(directory)
            os._exit(status)


@dataclass(slots=True, kw_only=True)
class _RankSet:
    spec: messages.RankSetSpec
    slots: HeldSlots
    """The slots that the set uses. If the server dies, the kernel frees its locks on the slots."""
    pids: dict[int, int] = field(default_factory=dict)
    """Maps each rank that has not been reaped to its pid."""
    groups: dict[int, int] = field(default_factory=dict)
    """Maps every rank to its Unix process group, where processes that a test started may remain."""


class _Server:
    def __init__(self, channel: Channel[messages.ServerRequest]) -> None:
        self._pid = getpid()
        self._parent = os.getppid()
        self._channel = channel
        self._set: _RankSet | None = None
        self._unended: list[int] = []  # pids that SIGKILL did not end
        self._ranks_signals: dict[int, Any] = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
        }
        self._ranks_signals |= {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGCHLD: signal.SIG_DFL,
        }
        with contextlib.suppress(OSError):  # this process may already lead its own process group
            os.setpgid(0, 0)
        self._adopts = ending.adopt_orphans()

    def run(self, run_rank: RunRank) -> None:
        self._run_rank = run_rank
        self._socket = socket.socket(fileno=os.dup(self._channel.fileno()))
        self._wakeup, self._write_end = socket.socketpair()
        for end in (self._wakeup, self._write_end):
            end.settimeout(0.0)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        while True:
            ends: list[Any] = [self._channel, self._wakeup]
            readable, _, _ = select.select(ends, [], [])
            if self._wakeup in readable:
                self._wakeup.recv(4096)
                self._reap_ranks()
            if self._channel in readable:
                request = self._channel.receive()
                if request is None or self._channel.is_hung_up():
                    return  # pytest has ended or closed the connection
                match request:
                    case messages.RankSetSpec():
                        # Lock slots before any fork. A child closes its copies of the locks.
                        self._set = _RankSet(spec=request, slots=HeldSlots(request.slots))
                    case messages.StartRank():
                        self._start_rank(request.rank)
                    case messages.EndSet():
                        unended = self._end_rank_set(within_s=request.within_s)
                        self._channel.send(messages.SetEnded(unended=unended))

    def kill_all(self) -> None:
        self._end_rank_set(within_s=ending.PATIENCE_S)
        ending.kill_children(self._unended, within_s=self._patience_s())

    def _patience_s(self) -> float:
        """Return how long to wait for killed processes: only briefly while pytest is waiting."""
        return ending.HURRIED_S if os.getppid() == self._parent else ending.PATIENCE_S

    def _start_rank(self, rank: int) -> None:
        rank_set = self._set
        if rank_set is None:
            raise RuntimeError("expected RankSetSpec before StartRank")
        byte, ends, *_ = socket.recv_fds(self._socket, 1, 2)
        if not byte:
            raise EOFError
        descriptors = (ends[0], ends[1])
        pid = processes.fork_quietly()
        if pid == 0:
            self._run_in_forked_child(partial(self._run_rank, rank_set.spec, rank, descriptors))
        # The child makes the same call, so the group exists regardless of which process runs first.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        # Close these before the next fork, so that only this rank has them: see Note [Connections].
        for descriptor in descriptors:
            os.close(descriptor)
        rank_set.pids[rank] = rank_set.groups[rank] = pid
        if len(rank_set.groups) == len(rank_set.spec.settings.ranks):
            self._channel.send(messages.SetStarted(pids=dict(rank_set.groups)))

    def _run_in_forked_child(self, run: Callable[[], NoReturn]) -> NoReturn:
        try:
            ending.end_with_parent(self._pid)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number, handler in self._ranks_signals.items():
                signal.signal(number, handler or signal.SIG_DFL)
            # If the child kept these open, pytest would not notice the death of the server.
            for end in (self._channel, self._socket, self._wakeup, self._write_end):
                end.close()
            if self._set is not None:
                self._set.slots.close()
            run()
        except BaseException:  # noqa: BLE001  # must not reach the copied pytest session
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _reap_ranks(self) -> None:
        pids = self._set.pids if self._set is not None else {}
        for rank, pid in list(pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del pids[rank]
                self._channel.send(
                    messages.RankExited(rank=rank, status=os.waitstatus_to_exitcode(status))
                )

    def _end_rank_set(self, *, within_s: float) -> dict[int, int]:
        """Kill ranks and descendants; return pids that remain. See Note [Ending a process tree]."""
        rank_set, self._set = self._set, None
        if rank_set is None:
            return {}
        ending.kill(rank_set.pids.values())
        unended = self._await_ends(rank_set.pids, within_s)
        if unended or not self._adopts:
            # Also kill the groups of finished ranks, because no process may outlive its test.
            ending.kill(-group for group in rank_set.groups.values())
        self._unended += unended.values()
        self._unended += ending.kill_children(self._unended, within_s=self._patience_s())
        rank_set.slots.release()
        return unended

    def _await_ends(self, pids: Mapping[int, int], within_s: float) -> dict[int, int]:
        began_at = time.monotonic()
        while True:
            remaining = {rank: pid for rank, pid in pids.items() if ending.await_end(pid) is None}
            # Recheck the parent each time, because a killed pytest closes its socket slightly
            # before the kernel gives this process another parent.
            limit_s = self._patience_s() if self._channel.is_hung_up() else within_s
            if not remaining or time.monotonic() > began_at + min(limit_s, within_s):
                return remaining
            if select.select([self._wakeup], [], [], _HUNG_UP_POLL_S)[0]:
                self._wakeup.recv(4096)


_Reply = TypeVar("_Reply", messages.SetStarted, messages.SetEnded)

# Time limit for the server's first reply. The server imports torch before it replies, which can be
# slow on a busy network file system.
_PREPARED_WITHIN_S = 300.0
# Time limit for later replies, which the server sends without delay.
_ANSWERED_WITHIN_S = 15.0
# Long enough for the server to kill its ranks (`ending.HURRIED_S`) and remove the directory.
_CLOSED_WITHIN_S = 5.0

# Note [Connections]: each rank has a connection to the pytest process, and its watchdog has
# another. The pytest process creates both. After each `StartRank`, it sends the rank's two ends to
# the server, and closes its copies. The server passes the ends to the rank, and closes its
# copies before it forks the next rank, so no process has more open files than it needs. Only the
# pytest process has the opposite ends, so when it dies, each rank reads an end of file. The reverse
# does not hold: a dead rank's children can keep its ends open, so only the server knows whether a
# rank is alive.


class ServerDiedError(Exception):
    """Raised if the fork server, and with it all ranks, died; the message says why, if known."""


class RankServer(Protocol):
    """Starts and ends ranks on behalf of their supervisor."""

    pids: dict[int, int]
    """Maps ranks of the last rank set that this process may signal to their pids."""

    @property
    def has_died(self) -> bool:
        """Whether the server has ended although nobody closed it."""

    def start_ranks(
        self, spec: messages.RankSetSpec
    ) -> Mapping[int, tuple[Connection, Connection]]:
        """Start ranks; return the connections to each rank and its watchdog.

        `end_ranks` closes the connections. Raises OSError if there are too few file descriptors.
        """

    def end_ranks(
        self, within_s: float, *, running: Collection[int] = (), unanswered: Collection[int] = ()
    ) -> dict[int, int]:
        """End the rank set and free its slots; return the pids of surviving ranks, keyed by rank.

        `running` ranks have not finished their test; `unanswered` ranks did not answer `EndTests`.
        """

    def exit_statuses(self) -> Mapping[int, int | str]:
        """Return the exit status of each rank that has ended, or minus the signal that killed it.

        For a rank whose connection was lost, return a text that describes the loss instead. Raise
        `ServerDiedError` if the server is gone.
        """

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a rank ends."""

    def close(self) -> int | None:
        """End all ranks and the server; return the server's exit status, None if unknown."""


class ForkServer:
    """The pytest process's handle to the fork server, or to the process that spawns ranks."""

    def __init__(self, start: Callable[[Connection, Connection], int], directory: Path) -> None:
        """Start a server: `start` takes both ends of a connection, and returns the server's pid."""
        self._directory = directory
        ours, theirs = Pipe()
        self._pid = start(ours, theirs)
        theirs.close()
        # At exit, the interpreter closes connections early, but it never closes this descriptor. So
        # the server does not see a hang-up until this process has ended.
        self._until_exit = os.dup(ours.fileno())
        self._channel: Channel[messages.ServerReply] = Channel(
            ours, stalls_s=extend_under_load(_ANSWERED_WITHIN_S)
        )
        self.pids: dict[int, int] = {}
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
                self.end_ranks(ending.PATIENCE_S)  # some ranks may have started
                raise
            connections[rank] = ours, our_watch
            self._connections += connections[rank]
            with theirs, their_watch:
                self._send(messages.StartRank(rank=rank), theirs, their_watch)
        self.pids = self._await_reply(
            messages.SetStarted, extend_under_load(_PREPARED_WITHIN_S)
        ).pids
        return connections

    def _send(self, request: messages.ServerRequest, *ends: Connection) -> None:
        try:
            self._channel.send(request)
            if ends:
                connection = socket.socket(fileno=self._until_exit)
                try:
                    socket.send_fds(connection, [b"."], [end.fileno() for end in ends])
                finally:
                    connection.detach()  # avoids a dup, which fails if too many files are open
        except BlockingIOError:
            self.kill()  # the server has stopped reading
            raise ServerDiedError from None
        except ConnectionError:
            self._process_replies(self._channel.receive_available())
            raise ServerDiedError from None

    def _await_reply(self, cls: type[_Reply], within_s: float) -> _Reply:
        until = time.monotonic() + within_s
        while True:
            try:
                reply = self._channel.receive(within_s=until - time.monotonic())
            except (TimeoutError, BlockingIOError):
                self.kill()
                raise ServerDiedError from None
            if reply is None:
                raise ServerDiedError
            self._process_replies([reply])
            if isinstance(reply, cls):
                return reply

    def end_ranks(self, within_s: float, **_: Collection[int]) -> dict[int, int]:
        try:
            self._send(messages.EndSet(within_s=within_s))
            answered_within_s = within_s + extend_under_load(_ANSWERED_WITHIN_S)
            return self._await_reply(messages.SetEnded, answered_within_s).unended
        except ServerDiedError:
            # The ranks died with their server (`end_with_parent`), but their children may be alive.
            ending.kill(-pid for pid in self.pids.values())
            return {}
        finally:
            while self._connections:
                self._connections.pop().close()

    def exit_statuses(self) -> dict[int, int]:
        self._process_replies(self._channel.receive_available())
        if self._channel.is_closed:
            raise ServerDiedError
        return self._exited

    def _process_replies(self, replies: Iterable[messages.ServerReply]) -> None:
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
        self._reap_server(0.0)
        return self._status is not None

    def close(self) -> int | None:
        self._channel.close()
        os.close(self._until_exit)
        self._reap_server(_CLOSED_WITHIN_S)
        # A server that is killed while it imports torch does not remove the directory. Remove it
        # before the kill, because xdist may interrupt this worker now (5 s after its session).
        ending.remove_directory(self._directory)
        self.kill()
        self._reap_server(ending.HURRIED_S)
        return self._status

    def _reap_server(self, within_s: float) -> None:
        if self._status is None:
            self._status = ending.await_end(self._pid, within_s=within_s)


def fork_server(
    prepare: Callable[[], RunRank],
    directory: Path,
    preloaded: Sequence[str] = (),
    *,
    is_lazy: bool = False,
) -> ForkServer:
    """Fork a server that runs `serve`, and preloads the modules `PRELOADED` and `preloaded`."""

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
