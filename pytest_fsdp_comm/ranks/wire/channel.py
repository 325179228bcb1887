"""Sends messages as JSON over a `multiprocessing.connection` between two processes."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from os import getpid
from typing import Final, Generic, TypeVar

from pytest_fsdp_comm.ranks.wire.messages import BY_NAME, Message
from pytest_fsdp_comm.text.codec import dump_tagged, load_tagged

_Received = TypeVar("_Received")

# Each message is preceded by its length. If a test writes text to the file descriptor by mistake,
# the first characters of the text are read as a length, and that length exceeds this limit.
_MOST_NBYTES: Final = 1 << 29
_TIMEVAL: Final = struct.Struct("@ll")
_HANG_UP: Final = getattr(select, "POLLRDHUP", 0)


def keep_alive(connected: socket.socket) -> None:
    """Make the kernel detect within a minute that the other machine is gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class Channel(Generic[_Received]):
    """One end of a connection; sends messages as JSON, whereas `Connection` would pickle them."""

    def __init__(self, connection: Connection, *, stalls_s: float | None = None) -> None:
        """Take over a connection.

        `stalls_s` limits pauses in the middle of a message (None: no limit): the other process may
        have died mid-message, while one of its children keeps the connection open.
        """
        self.connection = connection
        self._pid = getpid()
        self.is_closed = False
        """Whether the other process has closed its end, and all messages from it have been read."""
        if stalls_s is not None:
            limit = _TIMEVAL.pack(int(stalls_s), int(stalls_s % 1 * 1e6))
            with socket.socket(fileno=os.dup(connection.fileno())) as copy:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @classmethod
    def inherit(cls, descriptor: int) -> Channel[_Received]:
        """Use an inherited descriptor; programs that this process starts will not inherit it."""
        os.set_inheritable(descriptor, False)  # noqa: FBT003  # the function takes no keywords
        return cls(Connection(descriptor))

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message and wait until it is sent; do nothing in a forked child."""
        if getpid() == self._pid:
            # Values that JSON cannot represent are sent as their repr, because an unusual user
            # property should not keep a report from being sent.
            self.connection.send_bytes(dump_tagged(message).encode("ascii"))

    def receive(self, *, within_s: float | None = None) -> _Received | None:
        """Wait for a message and return it; return None once the other end is closed.

        Raises:
            TimeoutError: No message began to arrive within `within_s`.
            CodecError: The other process sent something that is not a message.
        """
        if within_s is not None and not self.connection.poll(max(within_s, 0.0)):
            raise TimeoutError
        try:
            data = self.connection.recv_bytes(_MOST_NBYTES)
        except (EOFError, ConnectionResetError):
            self.is_closed = True
            return None
        except OSError as error:
            # An error without errno: the connection ended mid-message, or the message is too long.
            if error.errno is None and self.is_hung_up():
                self.is_closed = True
                return None
            raise
        message: _Received = load_tagged(BY_NAME, data)
        return message

    def receive_available(self) -> Iterator[_Received]:
        """Yield the messages that have arrived already; do not wait for more."""
        while not self.is_closed and self.connection.poll(0):
            message = self.receive()
            if message is not None:
                yield message

    def is_hung_up(self) -> bool:
        """Return whether the other end is closed; some of its messages may still be unread."""
        poll = select.poll()
        poll.register(self.connection, _HANG_UP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.connection.close()
