"""Debuggers in ranks: one rank has the session's terminal, the others go on without."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.capture import MultiCapture
from _pytest.config import create_terminal_writer
from _pytest.debugging import pytestPDB

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.ranks.rank.isolation import capture_manager, require
from pytest_fsdp_comm.ranks.rank.processes import flush_streams

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
        self._descriptors = tuple(descriptors)
        self._logs: list[int] = []
        self._stdin: Any = None
        self._pytests_group = pytests_group

    def enter(self) -> None:
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


# Note [Debugging a rank]: every way into a debugger makes it by pytestPDB._init_pdb, and pytest
# suspends its capture before and resumes it after one, input included. So the rank that debugs has
# a capture that does nothing but take the terminal meanwhile; in the others, what makes a debugger
# makes one that goes on. Private names of pytest 8.4 to 9.2, beside those in `isolation`;
# tests/unit/ranks/test_isolation.py fails when one moves.


class _SuspendedCapture(MultiCapture[str]):
    """No capture, but it connects the terminal while a debugger runs."""

    def __init__(self, config: pytest.Config, terminal: RankTerminal) -> None:
        super().__init__(in_=None, out=None, err=None)
        self._config = config
        self._terminal = terminal
        self._reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        self._log_writer = self._reporter._tw

    def suspend_capturing(self, in_: bool = False) -> None:
        super().suspend_capturing(in_)
        # Without the input it is suspended to write a line, which belongs into the logs.
        if in_:
            self._terminal.enter()
            # Where pytest shows the failure before it debugs it.
            self._reporter._tw = create_terminal_writer(self._config)

    def resume_capturing(self) -> None:
        self._terminal.leave()
        self._reporter._tw = self._log_writer
        super().resume_capturing()


def debug_here(config: pytest.Config, terminal: RankTerminal) -> None:
    """Give this rank the terminal whenever pytest enters a debugger."""
    manager = capture_manager(config)
    if manager is None:
        # Then pytest suspends nothing for a debugger; the rank keeps the terminal while it lives.
        terminal.enter()
        return
    manager._global_capturing = _SuspendedCapture(config, terminal)
    manager._global_capturing.start_capturing()
    # With "no", pytest would not resume what it suspended.
    manager._method = "fd"


def debug_elsewhere(config: pytest.Config) -> None:
    """Make every way into a debugger go on instead."""
    _without_debuggers(config, lambda *_, **__: SimpleNamespace(set_trace=lambda _: None))


def refuse_debuggers(config: pytest.Config) -> None:
    """Make every way into a debugger fail, in a session that has no terminal."""

    def refuse(*_: Any, **__: Any) -> None:
        raise FsdpCommError(
            "a debugger needs a terminal, which pytest-xdist workers do not have; run this test "
            "with -n 0"
        )

    _without_debuggers(config, refuse)


def _without_debuggers(config: pytest.Config, init: Callable[..., Any]) -> None:
    for name in ("pdbinvoke", "pdbtrace"):
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    require(pytestPDB, "pytestPDB", "_init_pdb")
    pytestPDB._init_pdb = staticmethod(init)  # type: ignore[method-assign]  # see Note [Debugging a rank]
