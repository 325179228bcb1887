"""Records in the pytest process the warnings of ranks."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_fsdp_comm.ranks.wire.results import RankResult, WarningSeen


def replay_warnings(config: pytest.Config, results: Iterable[RankResult]) -> None:
    """Record each warning once, however many ranks gave it."""
    for seen in dict.fromkeys(warning for result in results for warning in result.warnings):
        _record(config, _rebuilt(seen), seen.when, seen.nodeid, seen.location)


def warn_of_test(item: pytest.Item, text: str) -> None:
    """Record a warning about a test, past the filters, which could make it an error."""
    path, lineno, _ = item.location
    message = warnings.WarningMessage(
        message=pytest.PytestWarning(text),
        category=pytest.PytestWarning,
        filename=path,
        lineno=(lineno or 0) + 1,
    )
    _record(item.config, message, "runtest", item.nodeid)


def _record(
    config: pytest.Config,
    message: warnings.WarningMessage,
    when: str,
    nodeid: str,
    location: tuple[str, int, str] | None = None,
) -> None:
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={
            "warning_message": message,
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
    )


def _rebuilt(warning: WarningSeen) -> warnings.WarningMessage:
    try:
        category = getattr(importlib.import_module(warning.category_module), warning.category_name)
    except (ImportError, AttributeError):
        category = UserWarning
    try:
        message = category(warning.text)
    except TypeError:
        message = warning.text
    return warnings.WarningMessage(
        message=message, category=category, filename=warning.filename, lineno=warning.lineno
    )
