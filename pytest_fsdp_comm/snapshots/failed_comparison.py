"""What the report of a failed comparison shows besides pytest's explanation of it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_fsdp_comm.reports.coloring import Painter
from pytest_fsdp_comm.reports.explanation import SECTION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedComparison:
    """The last comparison of a test that failed and was explained."""

    first_line: str
    """Of the explanation, by which the failure is recognized that it belongs to."""
    headline: str
    """The difference in one line."""
    below: str
    """What the section below shows; empty for none."""


FAILED_COMPARISON: Final = pytest.StashKey[FailedComparison]()
"""In a test's stash."""

_HEADLINE: Final = "comm_headline"
"""The attribute of a report of a failed comparison: the headline, if the crash's message is that.
pytest sends it along from ranks and workers."""


def add_to_report(item: pytest.Item, report: pytest.TestReport) -> None:
    """Leads the report with the headline, where the test failed by the comparison.

    pytest's summary, ``--tb=line``, JUnit XML and annotations of CI show the crash's message.
    """
    failed = item.stash.get(FAILED_COMPARISON, None)
    longrepr: Any = report.longrepr
    crash = getattr(longrepr, "reprcrash", None)
    if failed is None or crash is None or failed.first_line not in crash.message:
        return
    # A message of the user's own comes first. pytest leaves the class's name out, but not always.
    leads = crash.message.removeprefix("AssertionError: ").startswith("assert ")
    vars(report)[_HEADLINE] = failed.headline if leads else ""
    if leads:
        crash.message = failed.headline
    if failed.below:
        longrepr.addsection(SECTION, failed.below)


def has_headline(report: object) -> bool:
    """Whether the crash's message is a headline, rather than an exception's name and text."""
    return bool(getattr(report, _HEADLINE, ""))


@contextmanager
def painted(reporter: pytest.TerminalReporter) -> Iterator[None]:
    """Has failed comparisons printed in colour, if the terminal has any.

    Only here and now: other plugins write the same reports to files.
    """
    reports: list[Any] = [
        report
        for reports in reporter.stats.values()
        for report in reports
        if hasattr(report, _HEADLINE)
    ]
    for report in reports:
        vars(report)["toterminal"] = partial(_print_painted, report.toterminal)
    try:
        yield
    finally:
        for report in reports:
            del vars(report)["toterminal"]


def _print_painted(print_report: Callable[[Painter], None], writer: Any) -> None:
    print_report(Painter(writer))
