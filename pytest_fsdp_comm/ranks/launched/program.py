"""Ends a launched session in a program that runs more than one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from types import FrameType


def runs_pytest_only() -> bool:
    """Whether this process ends with the session: ``pytest``, not a program that calls it."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  # documented, and the only way
    while frame is not None:
        if frame.f_code is pytest.console_main.__code__:
            return True
        frame = frame.f_back
    return False


def leave_session(config: pytest.Config, status: int) -> NoReturn:
    """Makes `pytest.main` return a status, without what plugins do at a session's end."""
    manager = config.pluginmanager
    capture: Any = manager.get_plugin("capturemanager")
    if capture is not None and capture.is_globally_capturing():
        capture.read_global_capture()  # which the end of capturing would write
    for plugin in manager.get_plugins():
        manager.unregister(plugin)
    pytest.exit("this process only follows rank 0's", returncode=status)
