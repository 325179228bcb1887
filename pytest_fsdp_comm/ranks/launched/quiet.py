"""Holds back what a launched process that does not report would write to the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final

import pytest

from pytest_fsdp_comm import upstream

_RELEASE: Final = pytest.StashKey[Callable[[], None]]()


def hold_terminal(config: pytest.Config) -> None:
    """Keep from the terminal what pytest writes there from now on."""
    if not config.pluginmanager.has_plugin("terminalreporter"):
        return
    writer: Any = config.get_terminal_writer()
    # Private in pytest 8.4 to 9.2, with a contract test in tests/unit/ranks/test_isolation.py.
    if not hasattr(writer, "_file"):
        raise upstream.moved_error(
            "pytest",
            "TerminalWriter._file",
            "keeping all but one of the launched processes quiet relies on",
        )
    terminal, held = writer._file, io.StringIO()

    def release() -> None:
        terminal.write(held.getvalue())
        terminal.flush()
        writer._file = terminal

    writer._file = held
    config.stash[_RELEASE] = release


def release_terminal(config: pytest.Config) -> None:
    """Write what was held back, if anything was, and hold nothing back from now on."""
    release = config.stash.get(_RELEASE, None)
    if release is not None:
        del config.stash[_RELEASE]
        release()
