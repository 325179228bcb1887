"""Merges what ranks recorded beside their outcomes: properties and warnings."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from pytest_fsdp_comm.ranks.wire.results import RankResult, WarningSeen
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks

_Property = tuple[str, Any]


def merge_user_properties(
    reports: Iterable[pytest.TestReport], results: Mapping[int, RankResult]
) -> None:
    """Give each merged report of a phase the properties that every rank recorded."""
    for report in reports:
        by_rank = {
            rank: [(name, value) for name, value in sent.report.get("user_properties", ())]
            for rank, result in results.items()
            for sent in result.reports
            if sent.report.get("when") == report.when and not sent.is_subtest
        }
        if by_rank:
            report.user_properties = merged_properties(by_rank)


def merged_properties(by_rank: Mapping[int, Sequence[_Property]]) -> list[_Property]:
    """The properties of several ranks in order; a name whose values differ names the ranks, too."""
    names = dict.fromkeys(name for recorded in by_rank.values() for name, _ in recorded)
    merged: list[_Property] = []
    for name in names:
        values = {
            rank: [value for recorded_name, value in recorded if recorded_name == name]
            for rank, recorded in by_rank.items()
        }
        folded = list(fold_equal({rank: repr(own) for rank, own in values.items() if own}))
        for ranks, _ in folded:
            label = name if len(folded) == 1 else f"{name} ({name_ranks(ranks)})"
            merged += [(label, value) for value in values[ranks[0]]]
    return merged


def replay_warnings(config: pytest.Config, results: Iterable[RankResult]) -> None:
    """Record each warning once, however many ranks gave it."""
    for seen in dict.fromkeys(warning for result in results for warning in result.warnings):
        config.hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": _rebuilt(seen),
                "when": seen.when,
                "nodeid": seen.nodeid,
                "location": seen.location,
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
