"""A thread of a rank that reports where the rank is, while the main thread may be stuck.

And the rank's last words, where C++ ends it: gloo's own thread, say, on a message of another size.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import time
from os import getpid
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.ranks.hangs.position import read_position
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.messages import (
    LAST_WORDS,
    WATCHDOG,
    Handshake,
    PositionAnswer,
)
from pytest_fsdp_comm.ranks.wire.positions import Position

if TYPE_CHECKING:
    from pathlib import Path


# Made once in the process that ranks are forked from: it is an enumeration of 62 members.
_ALL_SIGNALS: Final = signal.valid_signals()
_HANDLER: Final = ctypes.CFUNCTYPE(None)


class Watchdog:
    """Answers the supervisor's questions over a connection of its own."""

    def __init__(self, socket_path: Path, rank: int, *, within_s: float) -> None:
        """Connects and starts the thread.

        Args:
            socket_path: Where the supervisor listens.
            rank: This rank.
            within_s: How long to try.
        """
        self._began_ns = time.time_ns()
        self._pid = getpid()
        self._lock = _thread.allocate_lock()
        self._channel = Channel.connect(socket_path, WATCHDOG, within_s=within_s)
        self._channel.send(Handshake(rank=rank, is_watchdog=True))
        # The thread inherits the mask: signals are for the main thread, whose stack is asked for.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            # Not threading's: its start waits for the thread, which costs each rank 3 ms, and tests
            # that look at the threads would find it.
            _thread.start_new_thread(self._answer, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        self._terminate: Any = None
        with contextlib.suppress(OSError, AttributeError):  # another C++ library, or no torch yet
            # Not loaded here: torch is to choose which one.
            library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD)
            set_terminate = library["_ZSt13set_terminatePFvvE"]  # std::set_terminate
            set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [_HANDLER]
            # Kept, since C++ does not keep it alive.
            self._speak_last = _HANDLER(self._on_terminate)
            self._terminate = _HANDLER(set_terminate(self._speak_last))

    def begin_test(self) -> None:
        """Leaves out the collectives of an earlier test from now on."""
        self._began_ns = time.time_ns()

    def _answer(self) -> None:
        # Until the supervisor hangs up.
        while (question := self._channel.receive()) is not None:
            self._say_position(question.number, with_groups=question.with_groups)

    def _say_position(self, number: int, *, with_groups: bool) -> None:
        with self._lock:
            try:
                position = read_position(self._began_ns, with_groups=with_groups)
            except Exception:  # noqa: BLE001  # an explanation must not cost the verdict
                position = Position(site="")
            self._channel.send(PositionAnswer(number=number, position=position))

    def _on_terminate(self) -> None:
        """Called on the thread with the exception that nothing catches, before the process aborts.

        The main thread has released the GIL in the collective that it waits in.
        """
        if getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._say_position(LAST_WORDS, with_groups=True)
        self._terminate()  # names the exception on stderr, and does not return
