"""Lets pytest-rerunfailures run a distributed test again, on fresh ranks."""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fsdp_comm.snapshots.failed_comparison import has_headline

# Note [Reruns]: a rank that ran its test again on its own would meet collectives of ranks that did
# not. So the plugin is off in ranks, and its protocol runs in the pytest process, where one attempt
# is one set of ranks. It runs an attempt by its global name `runtestprotocol`, and keeps what it
# knows of a failure in its wrapper of `pytest_runtest_makereport` (read in 16.7).

_CRASH = re.compile(
    r"(?:ranks? [\d, -]+: )?(?P<name>[A-Za-z_][\w.]*)(?::\s(?P<text>.*))?", re.DOTALL
)


def run_with_reruns(
    item: pytest.Item, nextitem: pytest.Item | None, attempt: Callable[[], list[pytest.TestReport]]
) -> bool:
    """Run and log a test by its attempts as the plugin decides; False if it leaves the test."""
    plugin: Any = item.config.pluginmanager.get_plugin("rerunfailures")
    if plugin is None:
        return False

    def run_once(item: pytest.Item, **_: Any) -> list[pytest.TestReport]:
        reports = attempt()
        for report in reports:
            # As if pytest had made it here.
            error = rebuilt_error(report)
            excinfo = error and SimpleNamespace(value=error)
            wrapper = plugin.pytest_runtest_makereport(
                item, SimpleNamespace(excinfo=excinfo, when=report.when)
            )
            next(wrapper)
            with contextlib.suppress(StopIteration):
                wrapper.send(report)
        return reports

    original = plugin.runtestprotocol
    plugin.runtestprotocol = run_once
    try:
        return bool(plugin.pytest_runtest_protocol(item, nextitem))
    finally:
        plugin.runtestprotocol = original


def rebuilt_error(report: pytest.TestReport) -> BaseException | None:
    """A stand-in for the exception that a merged report shows; None if nothing failed."""
    if not report.failed:
        return None
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message if crash is not None else report.longrepr)
    is_error = crash is not None and not has_headline(report)
    found = _CRASH.fullmatch(message) if is_error else None
    # pytest leaves out the name of an AssertionError that it explains.
    name, text = "AssertionError" if crash is not None else "RankFailure", message
    if found and ("." in found["name"] or found["name"][0].isupper()):
        name, text = found["name"].rpartition(".")[2], found["text"] or ""
    base = getattr(builtins, name, Exception)
    if not (isinstance(base, type) and issubclass(base, BaseException)):
        base = Exception
    # A class made for it, since the plugin matches the name of the error's class.
    members = {"__init__": lambda _: None, "__str__": lambda _: text}
    error: BaseException = type(name, (base,), members)()
    return error
