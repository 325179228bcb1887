"""The session's terminal, which one rank may take over to debug."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.ranks.rank.processes import flush_streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

_STANDARD = (0, 1, 2)


def copied_terminal(config: pytest.Config) -> tuple[int, ...]:
    """Copies of descriptors 0 to 2 as the user gave them, outside of tests; empty under xdist."""
    if hasattr(config, "workerinput"):
        return ()
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    if manager is None:
        return tuple(map(os.dup, _STANDARD))
    # Outside of tests pytest lets go of the output that it captures, but not of the input.
    manager.suspend_global_capture(in_=True)
    try:
        return tuple(map(os.dup, _STANDARD))
    finally:
        manager.resume_global_capture()
        manager.suspend_global_capture(in_=False)


@contextlib.contextmanager
def kept_foreground(terminal: Sequence[int]) -> Iterator[None]:
    """Take the terminal back at the end of the block, even if a rank that had it is dead."""
    has_it = bool(terminal) and _foreground(terminal[0]) == os.getpgrp()
    try:
        yield
    finally:
        if has_it:
            _pass_on(terminal[0], os.getpgrp())


def _foreground(descriptor: int) -> int | None:
    """The process group that Ctrl-C reaches; None if the descriptor is no terminal."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(descriptor)
    return None


def _pass_on(descriptor: int, group: int) -> None:
    # A process that is not in the foreground would be stopped by the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        os.tcsetpgrp(descriptor, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RankTerminal:
    """The terminal in the rank that debugs: its own while a debugger runs, else its logs."""

    def __init__(self, descriptors: Sequence[int], pytests_group: int) -> None:
        """Keep the result of `copied_terminal`, and the pytest process's process group."""
        self._descriptors = tuple(descriptors)
        self._logs: list[int] = []
        self._stdin: Any = None
        self._pytests_group = pytests_group

    def enter(self) -> None:
        """Connect this process's standard descriptors to the terminal."""
        if self._logs:
            return
        flush_streams()
        self._logs = [os.dup(descriptor) for descriptor in _STANDARD]
        for descriptor, target in zip(self._descriptors, _STANDARD, strict=True):
            os.dup2(descriptor, target)
        self._stdin = sys.stdin
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # until `leave`
        # A pytest in the background has no terminal to pass on.
        if _foreground(0) == self._pytests_group:
            _pass_on(0, os.getpgrp())

    def leave(self) -> None:
        """Connect the standard descriptors to the rank's logs again."""
        if not self._logs:
            return
        flush_streams()
        if _foreground(0) == os.getpgrp():
            _pass_on(0, self._pytests_group)
        for descriptor, target in zip(self._logs, _STANDARD, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        self._logs = []
        sys.stdin = self._stdin
