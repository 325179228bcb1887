"""Makes pytest-rerunfailures rerun a distributed test on new ranks."""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fsdp_comm.snapshots.failed_comparison import has_headline

# If a single rank reran its test, the collectives would wait for the other ranks. So ranks disable
# pytest-rerunfailures, and the pytest process reruns the test, each time on new ranks. The plugin
# makes each attempt through a global of its module, `runtestprotocol`, so we replace that global.
# The plugin records failures in its wrapper of `pytest_runtest_makereport`, so we call that wrapper
# for each report (checked in pytest-rerunfailures 16.7).

_CRASH = re.compile(
    r"(?:ranks? [\d, -]+: )?(?P<name>[A-Za-z_][\w.]*)(?::\s(?P<text>.*))?", re.DOTALL
)


def run_with_reruns(
    item: pytest.Item, nextitem: pytest.Item | None, attempt: Callable[[], list[pytest.TestReport]]
) -> bool:
    """Let pytest-rerunfailures run and log the attempts of a test; return whether it did."""
    plugin: Any = item.config.pluginmanager.get_plugin("rerunfailures")
    if plugin is None:
        return False

    def run_once(item: pytest.Item, **_: Any) -> list[pytest.TestReport]:
        reports = attempt()
        for report in reports:
            # The wrapper expects the test's exception, but only a rank has it, so rebuild it.
            error = rebuild_error(report)
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


def rebuild_error(report: pytest.TestReport) -> BaseException | None:
    """Rebuild a merged report's exception from its name and message; None if nothing failed."""
    if not report.failed:
        return None
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message if crash is not None else report.longrepr)
    is_error = crash is not None and not has_headline(report)
    match = _CRASH.fullmatch(message) if is_error else None
    # pytest's explanation of a failed `assert` does not name AssertionError, so assume that name.
    name, text = "AssertionError" if crash is not None else "RankFailure", message
    if match and ("." in match["name"] or match["name"][0].isupper()):
        name, text = match["name"].rpartition(".")[2], match["text"] or ""
    base = getattr(builtins, name, Exception)
    if not (isinstance(base, type) and issubclass(base, BaseException)):
        base = Exception
    # --only-rerun and --rerun-except match the name of the class, so create one with that name.
    members = {"__init__": lambda _: None, "__str__": lambda _: text}
    error: BaseException = type(name, (base,), members)()
    return error
