"""Subtests of pytest 9, pytest-subtests and ``unittest``, by private names used only here.

Read in pytest 8.4 to 9.2 and pytest-subtests 0.15: ``_subtest.context`` of serialized reports, with
``msg`` and ``kwargs``, and ``capturing_output(request)``, a ``Captured`` with ``out`` and ``err``.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from pytest_fsdp_comm import upstream

_CONTEXT = "_subtest.context"
# pytest's own, and the plugin's for earlier versions.
_MODULES = ("_pytest.subtests", "pytest_subtests.plugin")


def is_subtest(report: pytest.TestReport) -> bool:
    """Whether a report is a subtest's, after which the test goes on."""
    return type(report).__name__.lower() == "subtestreport"


def name_subtest(report: pytest.TestReport, data: Mapping[str, Any]) -> str:
    """Return a text that identifies a subtest, loaded from `data`, among those of its test.

    Gives the report the arguments as the rank sent them: loading a report quotes them again.
    """
    context: Any = getattr(report, "context", None)
    if _CONTEXT not in data or not {"msg", "kwargs"} <= data[_CONTEXT].keys() or context is None:
        raise upstream.moved_error(
            "pytest", "SubtestReport.context of msg and kwargs", "running ranks relies on"
        )
    # Frozen, and right about it, but nobody has seen it yet.
    object.__setattr__(context, "kwargs", dict(data[_CONTEXT]["kwargs"]))
    return json.dumps([data[_CONTEXT]["msg"], data[_CONTEXT]["kwargs"]], default=repr)


def capture_subtests(capture: Callable[[Any], Any]) -> None:
    """Make subtests take their output from this rank's logs, which survive a crash.

    A context manager of `capture` gives its argument ``out`` and ``err``.
    """
    for name in _MODULES:
        module: Any = sys.modules.get(name)
        if module is None:
            continue
        for needed in ("capturing_output", "Captured"):
            if not hasattr(module, needed):
                raise upstream.moved_error("pytest", f"{name}.{needed}", "running ranks relies on")
        module.capturing_output = _capturing_output(module.Captured, capture)


def _capturing_output(make_captured: Callable[[], Any], capture: Callable[[Any], Any]) -> Any:
    @contextlib.contextmanager
    def capturing_output(request: pytest.FixtureRequest) -> Iterator[Any]:
        captured = make_captured()
        manager: Any = request.config.pluginmanager.getplugin("capturemanager")
        test_captures = getattr(manager, "_capture_fixture", None) is not None
        if request.config.getoption("capture", "no") == "no" or test_captures:
            yield captured
        else:
            with capture(captured):
                yield captured

    return capturing_output
