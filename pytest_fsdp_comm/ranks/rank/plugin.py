"""The hooks that a rank adds: its process group, output sections, reports and warnings."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT
from pytest_fsdp_comm.ranks.rank.forked_children import end_forked_child
from pytest_fsdp_comm.ranks.rank.kept_output import read_kept, shortened
from pytest_fsdp_comm.ranks.rank.process_group import join_group
from pytest_fsdp_comm.ranks.wire.subtest_reports import capture_subtests, is_subtest

if TYPE_CHECKING:
    import warnings
    from collections.abc import Generator, Iterator
    from pathlib import Path
    from types import SimpleNamespace

    from pytest_fsdp_comm.ranks.wire.channel import Channel
    from pytest_fsdp_comm.ranks.wire.launch import Launch


class RankPlugin:
    """Registered in the process that ranks are forked from, and of use in a rank, once bound."""

    _channel: Channel
    _pid: int

    def __init__(self, config: pytest.Config) -> None:
        """Knows of no rank yet."""
        self._config = config
        self._logs: list[_Log] = []
        self._held: dict[str, Any] = {}
        self._has_group = False
        self._has_failed_subtest = False
        capture_subtests(self._output_of_subtest)

    def bind(self, channel: Channel, launch: Launch, rank: int) -> None:
        """Becomes a rank's: reads its logs from where they are now."""
        self._channel = channel
        self._pid = os.getpid()
        self._logs = [_Log(name, launch.log_path(rank, name)) for name in ("stdout", "stderr")]

    # The skip marks are evaluated by a tryfirst hook, so that a skipped test makes no group; the
    # fixtures are set up by a hook that was registered before this one, and so runs after it.
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Makes the process group before the first fixture."""
        if not self._has_group:
            join_group(item.config.stash[RANK_CONTEXT])
            self._has_group = True

    # Innermost: a process that the phase forked must not go further. Not when a report is made:
    # subtests make some within the call.
    @pytest.hookimpl(wrapper=True, trylast=True, specname="pytest_runtest_setup")
    def pytest_take_output_of_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Adds what the phase wrote to the item, before a report is made of it."""
        with self._output_of(item, "setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """As for the set-up."""
        with self._output_of(item, "call"):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """As for the set-up."""
        with self._output_of(item, "teardown"):
            return (yield)

    @contextlib.contextmanager
    def _output_of(self, item: pytest.Item, when: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            end_forked_child(self._pid, error)
            raise
        else:
            end_forked_child(self._pid, None)
        finally:
            for log in self._logs:
                text = log.end_phase()
                if text:
                    item.add_report_section(when, log.name, text)

    @contextlib.contextmanager
    def _output_of_subtest(self, captured: SimpleNamespace) -> Iterator[None]:
        for log in self._logs:
            log.begin_part()
        try:
            yield
        finally:
            captured.out, captured.err = (log.end_part() for log in self._logs)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sends a phase's report at once: the rank may die in the next phase."""
        if is_subtest(report):
            self._has_failed_subtest |= report.failed
        elif self._has_failed_subtest and report.passed:
            # As the terminal does: here pytest 9 fails a test that contains failed subtests.
            self._config.hook.pytest_report_teststatus(report=report, config=self._config)
        message = {
            "report": _serializable(self._config, report),
            "at": time.time(),
            "is_subtest": is_subtest(report),
            # A debugger is to follow: the others have to wait from here on.
            "debugs": report.failed and self._config.pluginmanager.has_plugin("pdbinvoke"),
            # What comes after these places dies with the rank, unless the parent reads it.
            "read": {log.name: log.nbytes_reported for log in self._logs},
        }
        if report.when == "teardown" and report.passed:
            self._held = message  # nothing follows but the end
        else:
            self._channel.send(message)

    def take_held(self) -> dict[str, Any]:
        """What is still to be sent, along with the test's end."""
        held, self._held = self._held, {}
        self._has_failed_subtest = False
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
    # Also what others than the rank's files hold: captured logs, and the test's own capturing.
    data["sections"] = [(title, shortened(text)) for title, text in data.get("sections", ())]
    return data


class _Log:
    """One of the rank's two output files."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._file = path.open("rb", buffering=0)
        self._nbytes_read = 0
        self.nbytes_reported = 0
        """Up to the last phase that ended."""
        # The phase's text, then that of the subtests that are within each other.
        self._parts = [""]

    def begin_part(self) -> None:
        self._parts[-1] = shortened(self._parts[-1] + self._read_new())
        self._parts.append("")

    def end_part(self) -> str:
        return shortened(self._parts.pop() + self._read_new())

    def end_phase(self) -> str:
        text = shortened("".join(self._parts) + self._read_new())
        self._parts = [""]
        self.nbytes_reported = self._nbytes_read
        return text

    def _read_new(self) -> str:
        with contextlib.suppress(ValueError, OSError, AttributeError):
            getattr(sys, self.name).flush()
        text, self._nbytes_read = read_kept(self._file.fileno(), self._nbytes_read)
        return text
