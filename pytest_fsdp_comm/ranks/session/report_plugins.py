"""Shows other plugins' reports what the ranks of a test did, as one test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.ranks.session.reruns import drive, stand_in_call

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import pytest

# pytest-html and JUnit files read pytest's own reports. allure-pytest and pytest-json-report listen
# to the hooks of a test's phases, which run in ranks alone (read in 2.16 and 1.5). There allure is
# off: each rank would write a result of its own.
_WRAPPERS = ("pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_teardown")


def show_report_plugins(item: pytest.Item, reports: Sequence[pytest.TestReport]) -> None:
    """Give the session's plugins what they would have from the hooks of the test's phases."""
    _show_allure(item, reports)
    for report in reports:
        extra: Any = getattr(report, "_json_report_extra", None)
        if extra:
            # So far it has the output of one rank only.
            extra.setdefault(report.when, {}).update(_streams(report))


def _streams(report: pytest.TestReport) -> dict[str, str]:
    """Output of the ranks in the report's phase, by ``stdout`` and ``stderr``."""
    found = {}
    for stream in ("stdout", "stderr"):
        title = f"Captured {stream} {report.when}"
        parts = [
            (t.removeprefix(title), text) for t, text in report.sections if t.startswith(title)
        ]
        if len(parts) == 1:
            found[stream] = parts[0][1]
        elif parts:
            found[stream] = "\n".join(f"{ranks.strip()}:\n{text}" for ranks, text in parts)
    return found


def _show_allure(item: pytest.Item, reports: Sequence[pytest.TestReport]) -> None:
    listener: Any = item.config.pluginmanager.get_plugin("allure_listener")
    if listener is None or not all(hasattr(listener, name) for name in _WRAPPERS):
        return
    _drive(listener.pytest_runtest_setup(item), None)
    for report in reports:
        if report.when == "call":
            _drive(listener.pytest_runtest_call(item), None)
        if report.when == "teardown":
            _drive(listener.pytest_runtest_teardown(item), None)
        _drive(listener.pytest_runtest_makereport(item, stand_in_call(report)), report)


def _drive(wrapper: Generator[None, Any, None], result: object) -> None:
    """As `drive`, for a wrapper of pluggy's old style."""
    drive(wrapper, SimpleNamespace(get_result=lambda: result))
