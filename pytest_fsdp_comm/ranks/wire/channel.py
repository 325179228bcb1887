"""Messages, each a line of JSON, over a Unix socket between two processes of one machine."""

from __future__ import annotations

import os
import select
import socket
from os import getpid
from typing import TYPE_CHECKING, Generic, TypeVar

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.text.codec import CodecError, dump_tagged, load_tagged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_fsdp_comm.ranks.wire.messages import Message

_Received = TypeVar("_Received")

# Small enough to come from the heap: larger buffers are mapped, and unmapped, for each message.
_CHUNK_NBYTES = 1 << 16
# What Linux sends at once (SCM_MAX_FD).
_MOST_DESCRIPTORS = 253


class Channel(Generic[_Received]):
    """One end of a connection."""

    def __init__(self, connection: socket.socket, receives: Mapping[str, type[_Received]]) -> None:
        """Take over a connected socket; `receives` are the messages that come, by name."""
        self._connection = connection
        self._receives = receives
        self._pid = getpid()
        self._pending = bytearray()
        self._searched_nbytes = 0
        self._descriptors: list[int] = []
        self.is_closed = False
        """The other end is gone and everything it sent has been read."""

    @classmethod
    def inherited(
        cls, descriptor: int, receives: Mapping[str, type[_Received]]
    ) -> Channel[_Received]:
        """Use the socket of a descriptor; programs that this process starts do not inherit it."""
        connection = socket.socket(fileno=descriptor)
        connection.set_inheritable(False)
        return cls(connection, receives)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message, blocking; a forked process sends nothing."""
        if getpid() != self._pid:
            return
        # What JSON cannot carry travels as its repr: a strange user property must not cost the
        # whole report.
        self._connection.sendall(f"{dump_tagged(message)}\n".encode("ascii"))

    def send_descriptors(self, descriptors: Sequence[int]) -> None:
        """Send copies of descriptors, beside messages; a forked process sends nothing."""
        if getpid() == self._pid:
            # With at least one byte: here one that JSON ignores.
            socket.send_fds(self._connection, [b" "], descriptors)

    def take_descriptors(self) -> tuple[int, int] | None:
        """Wait for two descriptors, which the caller is to close; None if a message comes first."""
        while len(self._descriptors) < 2:  # noqa: PLR2004  # as the docstring says
            if self.is_closed or self._has_message():
                self._drop_descriptors()
                return None
            self._read_chunk()
        return self._descriptors.pop(0), self._descriptors.pop(0)

    def _drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def receive(self) -> _Received | None:
        """Wait for one message; return None once the other end is gone."""
        while not self._has_message():
            self._read_chunk()
            if self.is_closed:
                return None
        return self._take()

    def receive_available(self) -> Iterator[_Received]:
        """Read what is there, after a selector found it readable; never wait twice.

        Raises:
            CodecError: The next message is none that this end receives; it is left out.
        """
        self._read_chunk()
        return self.take_pending()

    def take_pending(self) -> Iterator[_Received]:
        """Take the whole messages that were read along with an earlier one."""
        while self._has_message():
            yield self._take()

    def is_hung_up(self) -> bool:
        """Whether the other end is gone, even where something it sent is left; never waits."""
        poll = select.poll()
        poll.register(self._connection, 0)  # hanging up is always told
        return bool(poll.poll(0))

    def settimeout(self, timeout_s: float | None) -> None:
        """Limit every later wait; 0 never waits, None waits for ever."""
        self._connection.settimeout(timeout_s)

    def close(self) -> None:
        """Close this end, and the descriptors that nobody took."""
        self._connection.close()
        self._drop_descriptors()

    def _read_chunk(self) -> None:
        try:
            chunk, descriptors, flags, _ = socket.recv_fds(
                self._connection, _CHUNK_NBYTES, _MOST_DESCRIPTORS
            )
        except ConnectionResetError:
            chunk, descriptors, flags = b"", [], 0  # the other end died with something unread
        self._descriptors += descriptors
        if flags & socket.MSG_CTRUNC:
            raise FsdpCommError(
                "connections of ranks were lost, for the process that starts ranks has too many "
                "open files: raise the limit (ulimit -n), or use fewer ranks"
            )
        self.is_closed = not chunk
        self._pending += chunk

    def _has_message(self) -> bool:
        """Whether a whole message is pending; looks at each byte once, however long it is."""
        end = self._pending.find(b"\n", self._searched_nbytes)
        self._searched_nbytes = len(self._pending) if end < 0 else end
        return end >= 0

    def _take(self) -> _Received:
        line = self._pending[: self._searched_nbytes]
        # Of its front, which moves nothing.
        del self._pending[: self._searched_nbytes + 1]
        self._searched_nbytes = 0
        try:
            text = line.decode("ascii")  # what the codec writes, surrogates included
        except UnicodeDecodeError as problem:
            raise CodecError(f"expected a message as JSON, got other bytes: {problem}") from None
        return load_tagged(self._receives, text)
