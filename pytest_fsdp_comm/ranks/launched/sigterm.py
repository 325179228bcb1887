"""Ends a launched process in order when its launcher sends SIGTERM."""

from __future__ import annotations

import inspect
import signal
import time
import traceback
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import FrameType

SIGTERM_REASON = (
    "the launcher ended this run (SIGTERM): one of its processes failed, or the launcher itself "
    "was stopped"
)


# Note [SIGTERM from the launcher]: a launcher sends it to all of its processes when one of them has
# ended with a failure. Its default would lose rank 0's report, since pytest writes failures at the
# end of a session. So rank 0 finishes the test that runs, counts who does not answer within
# seconds as the one that was gone, and ends its session as a failed one. The others deliver the
# result of their rank, and end once nothing more can come. As they end, every process ignores the
# signal: the first to end with a failure makes the launcher send it to those that still write.


class Termination:
    """Notes SIGTERM; see Note [SIGTERM from the launcher]."""

    def __init__(self, config: pytest.Config, *, defers: bool) -> None:
        """Handle SIGTERM until the session ends, after which a program has its own handler."""
        self.defers = defers
        """Whether the signal is only noted; otherwise it ends the session at once, like Ctrl-C."""
        self.signalled_at: float | None = None
        """When the signal came (`time.monotonic`); None if it did not."""
        self._before = signal.signal(signal.SIGTERM, self._note)
        if not runs_pytest_only():
            config.add_cleanup(self._restore)

    def ignore(self) -> None:
        """Ignore it from now on, since the process ends anyway."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _restore(self) -> None:
        # None for a handler that was not set from Python.
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.signalled_at is None:
            self.signalled_at = time.monotonic()
        if not self.defers:
            self.defers = True
            pytest.exit(SIGTERM_REASON, returncode=pytest.ExitCode.TESTS_FAILED)


def runs_pytest_only() -> bool:
    """Whether this process ends with the session: ``pytest``, not a program that calls it."""
    stack = traceback.walk_stack(inspect.currentframe())
    return any(frame.f_code is pytest.console_main.__code__ for frame, _ in stack)
