"""Unix sockets in directories of any depth.

The address of such a socket holds a path of 107 bytes (103 on macOS), while TMPDIR may be as long
as a path can be.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fsdp_comm.errors import FsdpCommError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 107 if sys.platform == "linux" else 103
_DESCRIPTORS = Path("/proc/self/fd")
_PAUSE_S = 0.02


def listen(path: Path, backlog: int) -> socket.socket:
    """Makes a socket at a path, and listens there.

    Raises:
        FsdpCommError: The path is too long for this system.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address_of(path) as address:
            listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(path: Path, *, within_s: float = 0.0) -> socket.socket:
    """Connects to the socket at a path.

    Args:
        path: Where somebody listens.
        within_s: How long to try again where nobody does, or more wait to be accepted than the
            system allows: a busy machine may take long.

    Raises:
        FsdpCommError: The path is too long for this system.
    """
    until = time.monotonic() + within_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address_of(path) as address:
                connection.connect(address)
        except (ConnectionRefusedError, BlockingIOError):
            connection.close()
            if time.monotonic() >= until:
                raise
            time.sleep(_PAUSE_S)
        except BaseException:
            connection.close()
            raise
        else:
            return connection


def check_path(path: Path) -> None:
    """Checks early what `listen` and `connect` would find later.

    Raises:
        FsdpCommError: The path is too long for this system.
    """
    with contextlib.suppress(FileNotFoundError), _address_of(path):
        pass


@contextlib.contextmanager
def _address_of(path: Path) -> Iterator[str]:
    """A name for a path that is short enough, while the block lasts."""
    nbytes = len(os.fsencode(path))
    if nbytes <= _LONGEST:
        yield str(path)
        return
    if not _DESCRIPTORS.is_dir():
        raise FsdpCommError(
            "ranks connect through a socket in the temporary directory, whose path is "
            f"{nbytes} bytes long ({path}); without {_DESCRIPTORS}, this system "
            f"allows only {_LONGEST}. Set TMPDIR to a directory with a shorter path, such as /tmp"
        )
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield str(_DESCRIPTORS / str(directory) / path.name)
    finally:
        os.close(directory)
