"""Debuggers in ranks: one rank gets the terminal, and the other ranks skip breakpoints."""

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
from pytest_fsdp_comm.ranks.rank.isolation import capture_manager, require_private_names
from pytest_fsdp_comm.ranks.rank.processes import flush_streams

_STANDARD = (0, 1, 2)


def copy_terminal(config: pytest.Config) -> tuple[int, ...]:
    """Return duplicates of stdin, stdout and stderr, or () under xdist; call this between tests."""
    if hasattr(config, "workerinput"):
        return ()
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    if manager is None:
        return tuple(map(os.dup, _STANDARD))
    # Between tests, pytest has suspended output capture, but not input capture.
    manager.suspend_global_capture(in_=True)
    try:
        return tuple(map(os.dup, _STANDARD))
    finally:
        manager.resume_global_capture()
        manager.suspend_global_capture(in_=False)


@contextlib.contextmanager
def keep_foreground(terminal: Sequence[int]) -> Iterator[None]:
    """After the block, return the terminal to pytest, even if a rank died in a debugger."""
    is_foreground = bool(terminal) and _get_foreground_group(terminal[0]) == os.getpgrp()
    try:
        yield
    finally:
        if is_foreground:
            _set_foreground_group(terminal[0], os.getpgrp())


def _get_foreground_group(descriptor: int) -> int | None:
    """Return the foreground process group of a terminal; None if `descriptor` is not a terminal."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(descriptor)
    return None


def _set_foreground_group(descriptor: int, group: int) -> None:
    # Block SIGTTOU: if this process is in the background, tcsetpgrp stops it with this signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        os.tcsetpgrp(descriptor, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RankTerminal:
    """Connects a rank to the terminal while a debugger is running, and to its logs otherwise."""

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
        # If pytest runs in the background, another program has the terminal, so do not take it.
        if _get_foreground_group(0) == self._pytests_group:
            _set_foreground_group(0, os.getpgrp())

    def leave(self) -> None:
        if not self._logs:
            return
        flush_streams()
        if _get_foreground_group(0) == os.getpgrp():
            _set_foreground_group(0, self._pytests_group)
        for descriptor, target in zip(self._logs, _STANDARD, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        self._logs = []
        sys.stdin = self._stdin


# Note [Debugging a rank]: pytest creates every debugger in pytestPDB._init_pdb. While a debugger is
# running, pytest suspends its capture of output and input. So the debugged rank has a special
# capture object: it captures nothing, but connects the rank to the terminal while it is suspended.
# In other ranks, _init_pdb returns a debugger that continues at once.


class _SuspendedCapture(MultiCapture[str]):
    """Captures nothing, but connects the terminal while a debugger is running."""

    def __init__(self, config: pytest.Config, terminal: RankTerminal) -> None:
        super().__init__(in_=None, out=None, err=None)
        self._config = config
        self._terminal = terminal
        self._reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        self._log_writer = self._reporter._tw

    def suspend_capturing(self, in_: bool = False) -> None:
        super().suspend_capturing(in_)
        # If pytest suspends only output, it is about to print a line, and lines belong in the logs.
        if in_:
            self._terminal.enter()
            # pytest prints the failure with this writer before it starts the debugger.
            self._reporter._tw = create_terminal_writer(self._config)

    def resume_capturing(self) -> None:
        self._terminal.leave()
        self._reporter._tw = self._log_writer
        super().resume_capturing()


def allow_debuggers(config: pytest.Config, terminal: RankTerminal) -> None:
    """Connect this rank to the terminal whenever pytest enters a debugger."""
    manager = capture_manager(config)
    if manager is None:
        # pytest captures nothing, so it does not suspend anything around a debugger. Connect the
        # terminal until the rank ends.
        terminal.enter()
        return
    manager._global_capturing = _SuspendedCapture(config, terminal)
    manager._global_capturing.start_capturing()
    # With the method "no", pytest would not resume the capture after a debugger.
    manager._method = "fd"


def ignore_debuggers(config: pytest.Config) -> None:
    """Ignore breakpoints and --pdb: no debugger opens in this rank."""
    _replace_debuggers(config, lambda *_, **__: SimpleNamespace(set_trace=lambda _: None))


def refuse_debuggers(config: pytest.Config) -> None:
    """Make breakpoints raise an error, and ignore --pdb, because there is no terminal."""

    def refuse(*_: object, **__: object) -> None:
        __tracebackhide__ = True
        raise FsdpCommError(
            "a debugger needs a terminal, which pytest-xdist workers do not have; run this test "
            "with -n 0"
        )

    _replace_debuggers(config, refuse)


def _replace_debuggers(config: pytest.Config, init: Callable[..., object]) -> None:
    for name in ("pdbinvoke", "pdbtrace"):
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    require_private_names(pytestPDB, "pytestPDB", "_init_pdb")
    pytestPDB._init_pdb = staticmethod(init)  # type: ignore[method-assign]  # see Note [Debugging a rank]
