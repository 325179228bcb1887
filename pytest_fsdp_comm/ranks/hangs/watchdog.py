"""A thread of a rank that says where the rank is, while the main thread may be stuck."""

from __future__ import annotations

import _thread
import signal
import time
from typing import TYPE_CHECKING

from pytest_fsdp_comm.ranks.hangs.position import read_position
from pytest_fsdp_comm.ranks.wire.channel import Channel

if TYPE_CHECKING:
    from pathlib import Path


class Watchdog:
    """Answers the supervisor's questions over a connection of its own."""

    def __init__(self, socket_path: Path, rank: int) -> None:
        """Connects and starts the thread.

        Args:
            socket_path: Where the supervisor listens.
            rank: This rank.
        """
        self._began_ns = time.time_ns()
        self._channel = Channel.connect(socket_path)
        self._channel.send({"rank": rank, "watchdog": True})
        # The thread inherits the mask: signals are for the main thread, whose stack is asked for.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            # Not threading's: its start waits for the thread, which costs each rank 3 ms, and tests
            # that look at the threads would find it.
            _thread.start_new_thread(self._answer, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def begin_test(self) -> None:
        """Forgets what an earlier test of the same ranks sent."""
        self._began_ns = time.time_ns()

    def _answer(self) -> None:
        # Until the supervisor hangs up. There is only one question, told apart by its number.
        while (question := self._channel.receive()) is not None:
            try:
                position = read_position(self._began_ns)
            except Exception as error:  # noqa: BLE001  # an explanation must not cost the verdict
                position = {"site": "", "module": "", "groups": [], "error": repr(error)}
            self._channel.send({"position": position, "number": question["number"]})
