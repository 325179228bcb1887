"""JSON messages, one a line, over a Unix socket between a rank and its supervisor."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.ranks.wire.socket_paths import connect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Small enough to come from the heap: larger buffers are mapped, and unmapped, for each message.
_CHUNK_NBYTES = 1 << 16


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes over a connected socket."""
        self._connection = connection
        self._pid = os.getpid()
        self._pending = b""
        self.is_closed = False
        """The other end is gone and everything it sent has been read."""

    @classmethod
    def connect(cls, path: Path) -> Channel:
        """Connects to a listening supervisor."""
        return cls(connect(path))

    @property
    def nbytes_pending(self) -> int:
        """Bytes of a message of which the end has not come."""
        return len(self._pending)

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message; blocks while the other end is busy.

        What JSON cannot carry travels as its ``repr``: a strange user property must not cost the
        whole report. Nothing is sent by a process that was forked from the channel's own.
        """
        if os.getpid() != self._pid:
            return
        line = json.dumps(message, default=repr, separators=(",", ":"))
        self._connection.sendall(line.encode("utf-8", "surrogatepass") + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Waits for one message.

        Returns:
            The message; None once the other end is gone.
        """
        while b"\n" not in self._pending:
            self._read_chunk()
            if self.is_closed:
                return None
        return self._take()

    def receive_available(self) -> Iterator[dict[str, Any]]:
        """Reads what is there, after a selector said so; never waits twice."""
        self._read_chunk()
        return self.take_pending()

    def take_pending(self) -> Iterator[dict[str, Any]]:
        """Takes the whole messages that were read along with an earlier one."""
        while b"\n" in self._pending:
            yield self._take()

    def is_hung_up(self) -> bool:
        """Whether the other end is gone and everything it sent has been read; never waits."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def settimeout(self, timeout_s: float | None) -> None:
        """Limits every later wait; 0 never waits, None waits for ever."""
        self._connection.settimeout(timeout_s)

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()

    def _read_chunk(self) -> None:
        try:
            chunk = self._connection.recv(_CHUNK_NBYTES)
        except ConnectionResetError:
            chunk = b""  # the other end died with something unread
        self.is_closed = not chunk
        self._pending += chunk

    def _take(self) -> dict[str, Any]:
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        return message
