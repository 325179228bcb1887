"""The hooks that a rank adds: its process group, output sections, reports and warnings."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm.ranks.context import RANK_CONTEXT
from pytest_fsdp_comm.ranks.group import join_group

if TYPE_CHECKING:
    import warnings
    from collections.abc import Generator
    from pathlib import Path

    from pytest_fsdp_comm.ranks.channel import Channel
    from pytest_fsdp_comm.ranks.launch import Launch


class RankPlugin:
    """Registered in the process that ranks are forked from, and of use in a rank, once bound."""

    _channel: Channel

    def __init__(self, config: pytest.Config) -> None:
        """Knows of no rank yet."""
        self._config = config
        self._logs: list[_Log] = []
        self._held: dict[str, Any] = {}
        self._has_group = False

    def bind(self, channel: Channel, launch: Launch, rank: int) -> None:
        """Becomes a rank's: reads its logs from where they are now."""
        self._channel = channel
        self._logs = [_Log(name, launch.log_path(rank, name)) for name in ("stdout", "stderr")]

    # The skip marks are evaluated by a tryfirst hook, so that a skipped test makes no group; the
    # fixtures are set up by a hook that was registered before this one, and so runs after it.
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Makes the process group before the first fixture."""
        if not self._has_group:
            join_group(item.config.stash[RANK_CONTEXT])
            self._has_group = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Adds the phase's output to the item before the report is made of it."""
        for log in self._logs:
            text = log.read_new()
            if text:
                item.add_report_section(call.when, log.name, text)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sends a phase's report at once: the rank may die in the next phase."""
        message = {
            "report": _serializable(self._config, report),
            "at": time.time(),
            # A debugger is to follow: the others have to wait from here on.
            "debugs": report.failed and self._config.pluginmanager.has_plugin("pdbinvoke"),
            # What comes after these places dies with the rank, unless the parent reads it.
            "read": {log.name: log.nbytes_read for log in self._logs},
        }
        if report.when == "teardown" and report.passed:
            self._held = message  # nothing follows but the end
        else:
            self._channel.send(message)

    def take_held(self) -> dict[str, Any]:
        """What is still to be sent, along with the test's end."""
        held, self._held = self._held, {}
        return held

    # A rank waits in collectives, where the signals of pytest-timeout find no Python code to
    # interrupt, and its threads end the process without a word about the other ranks.
    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> bool:
        """Leaves the timeout of pytest-timeout to the supervisor, which knows every rank."""
        self._channel.send({"timer_s": settings.timeout, "at": time.monotonic()})
        return True

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        """Says that what had a timeout has ended."""
        self._channel.send({"timer_s": None})
        return True

    def pytest_enter_pdb(self) -> None:
        """Says that a human is at work, who takes time."""
        self._channel.send({"debugs": True})

    def pytest_leave_pdb(self) -> None:
        """Says that the test goes on."""
        self._channel.send({"debugs": False})

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """Sends a warning."""
        if when != "runtest":
            # Of collection: the pytest process has it, and pytest tells it to every new plugin.
            return
        category = warning_message.category
        self._channel.send(
            {
                "warning": {
                    "text": str(warning_message.message),
                    "category": [category.__module__, category.__qualname__],
                    "filename": warning_message.filename,
                    "lineno": warning_message.lineno,
                    "when": when,
                    "nodeid": nodeid,
                    "location": location,
                }
            }
        )


def _serializable(config: pytest.Config, report: pytest.TestReport) -> dict[str, Any]:
    data: dict[str, Any] = config.hook.pytest_report_to_serializable(config=config, report=report)
    return data


class _Log:
    """One of the rank's two output files."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._file = path.open("rb", buffering=0)
        self.nbytes_read = 0

    def read_new(self) -> str:
        with contextlib.suppress(ValueError, OSError, AttributeError):
            getattr(sys, self.name).flush()
        if os.fstat(self._file.fileno()).st_size <= self.nbytes_read:
            return ""  # as after nearly every phase
        new = self._file.read()
        self.nbytes_read += len(new)
        return new.decode("utf-8", "backslashreplace")
