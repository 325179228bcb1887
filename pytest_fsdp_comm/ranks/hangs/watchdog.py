"""A thread of a rank that reports where the rank is, while the main thread may be stuck."""

from __future__ import annotations

import _thread
import signal
import time
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.ranks.hangs.position import read_position
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.messages import WATCHDOG, PositionAnswer, WatchdogHello
from pytest_fsdp_comm.ranks.wire.positions import Position

if TYPE_CHECKING:
    from pathlib import Path


# Made once in the process that ranks are forked from: it is an enumeration of 62 members.
_ALL_SIGNALS: Final = signal.valid_signals()


class Watchdog:
    """Answers the supervisor's questions over a connection of its own."""

    def __init__(self, socket_path: Path, rank: int) -> None:
        """Connects and starts the thread.

        Args:
            socket_path: Where the supervisor listens.
            rank: This rank.
        """
        self._began_ns = time.time_ns()
        self._channel = Channel.connect(socket_path, WATCHDOG)
        self._channel.send(WatchdogHello(rank=rank))
        # The thread inherits the mask: signals are for the main thread, whose stack is asked for.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        try:
            # Not threading's: its start waits for the thread, which costs each rank 3 ms, and tests
            # that look at the threads would find it.
            _thread.start_new_thread(self._answer, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def begin_test(self) -> None:
        """Leaves out the collectives of an earlier test from now on."""
        self._began_ns = time.time_ns()

    def _answer(self) -> None:
        # Until the supervisor hangs up.
        while (question := self._channel.receive()) is not None:
            try:
                position = read_position(self._began_ns, with_groups=question.with_groups)
            except Exception:  # noqa: BLE001  # an explanation must not cost the verdict
                position = Position(site="")
            self._channel.send(PositionAnswer(number=question.number, position=position))
