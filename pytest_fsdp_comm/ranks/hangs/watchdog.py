"""A thread of a rank that reports where the rank is, while the main thread may be stuck."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.ranks.hangs.position import read_position
from pytest_fsdp_comm.ranks.wire.messages import PositionAnswer, PositionQuestion
from pytest_fsdp_comm.ranks.wire.positions import Position

if TYPE_CHECKING:
    from pytest_fsdp_comm.ranks.wire.channel import Channel

# Made once in the process that ranks are forked from: it is an enumeration of 62 members.
_ALL_SIGNALS: Final = signal.valid_signals()
_LAST_S: Final = 1.0


class Watchdog:
    """Answers the supervisor's questions over its own connection, from a thread of its own."""

    def __init__(self, channel: Channel[PositionQuestion], *, ends_process: bool = False) -> None:
        """Start the thread; `ends_process` where only it can when the supervisor is gone."""
        self._ends_process = ends_process
        self._began_ns = time.time_ns()
        self._channel = channel
        # A test must not notice the thread. It is not one of threading's, whose start takes 3 ms,
        # and which tests that list the threads would find. It inherits a mask that blocks every
        # signal: they are for the main thread, whose stack a signal dumps.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            _thread.start_new_thread(self._answer, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def begin_test(self) -> None:
        """Leave out the collectives of an earlier test from now on."""
        self._began_ns = time.time_ns()

    def _answer(self) -> None:
        # Until the supervisor hangs up.
        with contextlib.suppress(OSError):
            while (question := self._channel.receive()) is not None:
                try:
                    position = read_position(self._began_ns, with_groups=question.with_groups)
                except Exception:  # noqa: BLE001  # an explanation must not cost the verdict
                    position = Position(site="")
                self._channel.send(PositionAnswer(number=question.number, position=position))
        if self._ends_process:
            time.sleep(_LAST_S)  # a main thread that reads the end itself says why
            os._exit(1)
