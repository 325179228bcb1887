"""Distinguishes a launched process that is gone from one that is busy."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pytest_fsdp_comm.ranks.wire.text_store import StoreLostError

if TYPE_CHECKING:
    from pytest_fsdp_comm.ranks.wire.text_store import TextStore

BEAT_S = 1.0


def _name(rank: int) -> str:
    return f"beat/{rank}"


# Note [A thread that no fork meets]: the heartbeat is a thread, since the main one may be busy for
# long with a test or with loading modules. A process with threads must not be forked, so it starts
# after the fork server was forked, and stops while another one is (`Meeting.without_thread`). It
# ends before the interpreter does: a thread that is inside the store then crashes the process. And
# it has a client of its own, since no two threads may use one.


class Heartbeat:
    """Puts the time on the store, again and again; see Note [A thread that no fork meets]."""

    def __init__(self, store: TextStore, rank: int) -> None:
        """Start the thread, with a client of the store for it alone."""
        self._store = store
        self._rank = rank
        self._has_ended = threading.Event()
        self._beat()
        self._thread = threading.Thread(
            target=self._run, name="pytest-fsdp-comm heartbeat", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(BEAT_S):
            try:
                self._beat()
            except StoreLostError:
                return  # the main thread will report it

    def _beat(self) -> None:
        self._store.put(_name(self._rank), str(time.monotonic_ns()))


class Pulse:
    """Listens to another process's heartbeat."""

    def __init__(self, store: TextStore, rank: int) -> None:
        """Listen from now on, with the calling thread's client of the store."""
        self._store = store
        self._rank = rank
        self._beat: str | None = None
        self._changed_at = self._looked_at = time.monotonic()

    def silence_s(self) -> float:
        """Seconds since the last beat, of those in which this was called."""
        now = time.monotonic()
        if now < self._looked_at + BEAT_S:
            return self._looked_at - self._changed_at
        if now > self._looked_at + 5 * BEAT_S:
            # Nobody listened meanwhile.
            self._changed_at = now
        self._looked_at = now
        name = _name(self._rank)
        beat = self._store.get(name) if self._store.has(name) else None
        if beat != self._beat:
            self._beat, self._changed_at = beat, now
        return now - self._changed_at
