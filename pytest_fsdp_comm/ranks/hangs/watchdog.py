"""A thread of a rank that reports where the rank is, while the main thread may be stuck."""

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
from pytest_fsdp_comm.ranks.wire.messages import LAST_WORDS, PositionAnswer, PositionQuestion
from pytest_fsdp_comm.ranks.wire.positions import Position

if TYPE_CHECKING:
    from pytest_fsdp_comm.ranks.wire.channel import Channel

# Note [Quiet watchdog]: a test must not notice the thread. It is not one of threading's, whose
# start waits for it, which costs each rank 3 ms, and which tests that list the threads would find.
# Its mask, inherited, blocks every signal: they are for the main thread, whose stack a signal
# dumps.
#
# A position is also a rank's last word where C++ ends it (gloo does, on a message of another size):
# std::terminate calls our handler on the thread with the exception that nothing catches, while the
# main thread has released the GIL in its collective. The handler before ours names the exception on
# stderr, and does not return. Without libstdc++, or before torch has loaded it, there is no word.

# Made once in the process that ranks are forked from: it is an enumeration of 62 members.
_ALL_SIGNALS: Final = signal.valid_signals()
_HANDLER: Final = ctypes.CFUNCTYPE(None)


class Watchdog:
    """Answers the supervisor's questions over its own connection; see Note [Quiet watchdog]."""

    def __init__(self, channel: Channel[PositionQuestion]) -> None:
        """Start the thread."""
        self._began_ns = time.time_ns()
        self._pid = getpid()
        self._lock = _thread.allocate_lock()
        self._channel = channel
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            _thread.start_new_thread(self._answer, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with contextlib.suppress(OSError, AttributeError):
            # Not loaded here: torch chooses which one.
            library = ctypes.CDLL("libstdc++.so.6", mode=os.RTLD_NOLOAD)
            set_terminate = library["_ZSt13set_terminatePFvvE"]  # std::set_terminate
            set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [_HANDLER]
            # Kept, since C++ does not keep it alive.
            self._speak_last = _HANDLER(self._on_terminate)
            self._terminate: Any = _HANDLER(set_terminate(self._speak_last))

    def begin_test(self) -> None:
        """Leave out the collectives of an earlier test from now on."""
        self._began_ns = time.time_ns()

    def _answer(self) -> None:
        # Until the supervisor hangs up.
        while (question := self._channel.receive()) is not None:
            self._send_position(question.number, with_groups=question.with_groups)

    def _send_position(self, number: int, *, with_groups: bool) -> None:
        with self._lock:
            try:
                position = read_position(self._began_ns, with_groups=with_groups)
            except Exception:  # noqa: BLE001  # an explanation must not cost the verdict
                position = Position(site="")
            self._channel.send(PositionAnswer(number=number, position=position))

    def _on_terminate(self) -> None:
        if getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._send_position(LAST_WORDS, with_groups=True)
        self._terminate()
