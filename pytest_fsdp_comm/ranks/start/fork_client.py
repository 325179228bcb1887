"""The server that starts ranks, seen from the pytest process."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Protocol, TypeVar

from pytest_fsdp_comm.ranks.rank.processes import fork_quietly
from pytest_fsdp_comm.ranks.start.ending import HURRIED_S, PATIENCE_S, await_end, kill, kill_groups
from pytest_fsdp_comm.ranks.start.fork_server import PRELOADED, serve
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.directories import remove_directory
from pytest_fsdp_comm.ranks.wire.messages import (
    FORK_CLIENT,
    FORK_SERVER,
    EndSet,
    RankExited,
    ServerFailed,
    SetEnded,
    SetStarted,
    StartRank,
    StartSet,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from pytest_fsdp_comm.ranks.start.fork_server import RunRank
    from pytest_fsdp_comm.ranks.start.slots import SharedDirectory
    from pytest_fsdp_comm.ranks.wire.messages import ServerReply, ServerRequest
    from pytest_fsdp_comm.ranks.wire.rank_set import RankSetSpec

_Reply = TypeVar("_Reply", SetStarted, SetEnded)

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

    pids: dict[int, int]
    """The processes on this machine that it may signal, by rank; some may have ended."""

    @property
    def has_died(self) -> bool:
        """Whether it ended on its own."""

    def start_ranks(self, spec: RankSetSpec) -> Mapping[int, tuple[Connection, Connection]]:
        """Start a rank set after the end of the last.

        Returns the connections to each rank and its watchdog, which live until `end_ranks`.

        Raises:
            ServerDiedError: The server is gone.
            OSError: The system does not have so many descriptors.
        """

    def end_ranks(
        self, within_s: float, *, running: Collection[int] = (), ending: Collection[int] = ()
    ) -> dict[int, int]:
        """End the rank set, and free its slots; return, by rank, the pids that are left.

        `running` are the ranks that did not finish their test, `ending` those that have not
        answered `EndTests`.
        """

    def exit_statuses(self) -> Mapping[int, int | str]:
        """The ranks that ended: exit status, minus signal number, or what became of the rank.

        Raises:
            ServerDiedError: The server is gone, and with it the ranks.
        """

    def raise_if_failed(self) -> None:
        """Raise `ServerDiedError` if the server has ended, with its last words."""

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
        self._channel = Channel(ours, FORK_CLIENT, stalls_s=_ANSWERED_WITHIN_S)
        self.pids: dict[int, int] = {}
        """The process that each rank is, or was; empty before the first rank set."""
        self._exited: dict[int, int] = {}
        self._connections: list[Connection] = []
        self._status: int | None = None
        self._is_reaped = False

    def start_ranks(self, spec: RankSetSpec) -> dict[int, tuple[Connection, Connection]]:
        self._exited.clear()
        self.pids = {}
        self._send(StartSet(spec=spec))
        connections: dict[int, tuple[Connection, Connection]] = {}
        for rank in spec.settings.ranks:
            try:
                (ours, theirs), (our_watch, their_watch) = Pipe(), Pipe()
            except OSError:
                self.end_ranks(PATIENCE_S)  # those that have started
                raise
            connections[rank] = ours, our_watch
            self._connections += connections[rank]
            with theirs, their_watch:
                self._send(StartRank(rank=rank), theirs, their_watch)
        self.pids = self._await(SetStarted, _PREPARED_WITHIN_S).pids
        return connections

    def _send(self, request: ServerRequest, *ends: Connection) -> None:
        try:
            self._channel.send(request)
            if ends:
                connection = socket.socket(fileno=self._until_exit)
                try:
                    socket.send_fds(connection, [b"."], [end.fileno() for end in ends])
                finally:
                    connection.detach()
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

    def end_ranks(
        self,
        within_s: float,
        *,
        running: Collection[int] = (),  # noqa: ARG002  # of launched ranks
        ending: Collection[int] = (),  # noqa: ARG002  # likewise
    ) -> dict[int, int]:
        """Kill what the ranks left, too."""
        try:
            self._send(EndSet(within_s=within_s))
            return self._await(SetEnded, within_s + _ANSWERED_WITHIN_S).unended
        except ServerDiedError:
            # Its ranks died with it (`end_with_parent`), but not what they had forked.
            kill_groups(self.pids.values())
            return {}
        finally:
            while self._connections:
                self._connections.pop().close()

    def send_signal(self, rank: int, number: int) -> None:
        if rank not in self.exit_statuses():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def exit_statuses(self) -> dict[int, int]:
        self.raise_if_failed()
        return self._exited

    def raise_if_failed(self) -> None:
        """Read what the server has said, last words too; raise `ServerDiedError` if it ended."""
        self._take(self._channel.receive_available())
        if self._channel.is_closed:
            raise ServerDiedError

    def _take(self, replies: Iterable[ServerReply]) -> None:
        for reply in replies:
            if isinstance(reply, ServerFailed):
                raise ServerDiedError(reply.reason)
            if isinstance(reply, RankExited):
                self._exited[reply.rank] = reply.status

    def fileno(self) -> int:
        """The connection, which becomes readable when a rank ended."""
        return self._channel.fileno()

    def kill(self) -> None:
        """End the server immediately, and with it the ranks."""
        if not self.has_died:
            kill([self._pid])

    @property
    def has_died(self) -> bool:
        """Whether it ended on its own."""
        self._reap(0.0)
        return self._is_reaped

    def close(self) -> int | None:
        """End the server and every rank, and remove the directory.

        Returns its exit status, or minus the signal that ended it; None if somebody else took it.
        """
        self._channel.close()
        os.close(self._until_exit)
        self._reap(_CLOSED_WITHIN_S)
        # Before the kill: xdist interrupts a worker 5 s after its session, just about now, if its
        # server still loads torch. Somebody has to be left who removes it.
        remove_directory(self._directory)
        self.kill()
        self._reap(HURRIED_S)
        remove_directory(self._directory)  # what its ranks have written meanwhile
        return self._status

    def _reap(self, within_s: float) -> None:
        if not self._is_reaped:
            try:
                self._status = await_end(self._pid, within_s=within_s)
                self._is_reaped = self._status is not None
            except ChildProcessError:
                self._is_reaped = True  # by a test that waits for any child


def fork_server(
    prepare: Callable[[], RunRank],
    directory: Path,
    users: SharedDirectory | None,
    preloaded: Sequence[str] = (),
) -> ForkServer:
    """Fork the server from this process, to `fork_server.serve`; torch is always preloaded."""

    def start(ours: Connection, theirs: Connection) -> int:
        pid = fork_quietly()
        if pid == 0:
            ours.close()
            if users is not None:
                users.close()
            serve(
                Channel(theirs, FORK_SERVER),
                prepare,
                directory,
                users.path if users else None,
                preloaded=(*PRELOADED, *preloaded),
            )
        return pid

    return ForkServer(start, directory)
