"""Holds back what a launched process that does not report would write to the terminal.

Private names of pytest 8.4 to 9.2 are used here and nowhere else: ``TerminalWriter._file``;
tests/unit/ranks/test_isolation.py fails when it moves.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Final, TextIO

import pytest

from pytest_fsdp_comm import upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A terminal that nothing is written to for now."""

    terminal: TextIO
    text: io.StringIO


_HELD: Final = pytest.StashKey[_Held]()


def hold_terminal(config: pytest.Config) -> None:
    """Keeps from the terminal what pytest writes there from now on.

    Raises:
        UpstreamChangedError: pytest has moved a private name.
    """
    writer = _writer(config)
    if writer is None:
        return
    if not hasattr(writer, "_file"):
        raise upstream.moved(
            "pytest",
            "TerminalWriter._file",
            "keeping all but one of the launched processes quiet relies on",
        )
    terminal = writer._file
    config.stash[_HELD] = held = _Held(terminal=terminal, text=io.StringIO())
    writer._file = held.text


def release_terminal(config: pytest.Config) -> None:
    """Writes what was held back, and stops holding."""
    held = config.stash.get(_HELD, None)
    if held is None:
        return
    del config.stash[_HELD]
    held.terminal.write(held.text.getvalue())
    held.terminal.flush()
    writer = _writer(config)
    if writer is not None:
        writer._file = held.terminal


def _writer(config: pytest.Config) -> Any:
    return (
        config.get_terminal_writer()
        if config.pluginmanager.has_plugin("terminalreporter")
        else None
    )
