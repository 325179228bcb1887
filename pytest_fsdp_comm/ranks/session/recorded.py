"""Merges the user properties and warnings of all ranks."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from pytest_fsdp_comm.ranks.wire.results import RankResult, WarningSeen
from pytest_fsdp_comm.text.rank_lists import group_ranks_by_text, name_ranks

_Property = tuple[str, Any]


def merge_user_properties(
    reports: Iterable[pytest.TestReport], results: Mapping[int, RankResult]
) -> None:
    """Add the user properties of all ranks to each merged report."""
    for report in reports:
        by_rank = {
            rank: [(name, value) for name, value in phase.report.get("user_properties", ())]
            for rank, result in results.items()
            for phase in result.reports
            if phase.report.get("when") == report.when and not phase.is_subtest
        }
        if by_rank:
            report.user_properties = merge_properties(by_rank)


def merge_properties(by_rank: Mapping[int, Sequence[_Property]]) -> list[_Property]:
    """Merge properties in order; if values differ between ranks, add the ranks to the name."""
    names = dict.fromkeys(name for properties in by_rank.values() for name, _ in properties)
    merged: list[_Property] = []
    for name in names:
        values = {
            rank: [value for property_name, value in properties if property_name == name]
            for rank, properties in by_rank.items()
        }
        folded = list(
            group_ranks_by_text({rank: repr(texts) for rank, texts in values.items() if texts})
        )
        for ranks, _ in folded:
            label = name if len(folded) == 1 else f"{name} ({name_ranks(ranks)})"
            merged += [(label, value) for value in values[ranks[0]]]
    return merged


def replay_warnings(config: pytest.Config, results: Iterable[RankResult]) -> None:
    """Report each warning to pytest once, even if several ranks raised it."""
    for warning in dict.fromkeys(warning for result in results for warning in result.warnings):
        config.hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": _rebuild(warning),
                "when": warning.when,
                "nodeid": warning.nodeid,
                "location": warning.location,
            }
        )


def _rebuild(warning: WarningSeen) -> warnings.WarningMessage:
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
