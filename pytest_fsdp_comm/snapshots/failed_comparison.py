"""Add the headline, snapshot files and cost of a failed comparison to pytest's report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.reports.explanation import SECTION
from pytest_fsdp_comm.text.codec import from_json, to_json
from pytest_fsdp_comm.text.words import first_of

if TYPE_CHECKING:
    from pytest_fsdp_comm.reports.ci.outcomes import Comparisons


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedComparison:
    """The explanation of a test's failed comparison, or the last one if several failed."""

    first_line: str
    """The first line of the explanation, which pytest's failure report contains."""
    comparisons: Comparisons
    """The differences, without `files`, which are known only when the test ends."""
    below: str
    """Text to print in a section below the traceback; empty for no section."""
    lines: tuple[str, ...] = ()
    """The explanation, if pytest does not print it; otherwise empty."""


FAILED_COMPARISON: Final = pytest.StashKey[FailedComparison]()
UNEXPLAINED: Final = pytest.StashKey[Any]()
"""Stash key of a copy of the `CommSnapshot` whose comparison failed first in a test. Deleted when a
failed comparison is explained, so if the key remains, the test ignored the result."""
COMPARED: Final = pytest.StashKey[dict[str, None]]()
"""Stash key of the files that a test compared with ``comm_snapshot``, relative to pytest's root."""

# Names of attributes of test reports. Ranks and xdist workers send the attributes with the reports.
# The headline of a failed comparison, if it is the crash message.
_HEADLINE: Final = "comm_headline"
# The first line of a failed comparison, which is identical on all ranks.
DIFFERS: Final = "comm_differs"
# Whether this rank explains the failed comparison; only one rank does.
EXPLAINS: Final = "comm_explains"
# Where a test hangs, as ``path:line``: in the rank that others wait for, or else in a waiting rank.
HANGS_AT: Final = "comm_hangs_at"
# The test's `Comparisons` as JSON.
_COMPARISONS: Final = "comm_comparisons"

# Number of lines to keep of a hang report. These lines say that the test hangs, which rank waits
# for which, and where.
_HANG_LINES: Final = 4
# Maximum number of tests to list below a change that they share.
_MOST_TESTS: Final = 10
# Names of the properties that the plugin adds to a test in JUnit XML.
_PROPERTIES: Final = ("comm_snapshot", "comm_headline", "comm_change", "comm_cost")


def reason_of(report: pytest.TestReport) -> str:
    """Return the first line of a failure's message, or the first lines of a hang report."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    # Skip the line in which xdist names the worker.
    lines = (line.strip() for line in text.splitlines() if not line.startswith("[gw"))
    most = _HANG_LINES if getattr(report, HANGS_AT, "") else 1
    return "\n".join(islice(filter(None, lines), most))


def add_to_report(item: pytest.Item, report: pytest.TestReport) -> None:
    """If a comparison made the test fail, make its headline the report's crash message."""
    # pytest's summary, --tb=line, JUnit XML and annotations in CI print the crash message.
    failed = item.stash.get(FAILED_COMPARISON, None)
    longrepr: Any = report.longrepr
    crash = getattr(longrepr, "reprcrash", None)
    message = report.longreprtext if crash is None else crash.message
    is_cause = failed is not None and (
        failed.first_line in message or (crash is not None and bool(failed.lines))
    )
    _add_comparisons(item, report, failed if is_cause else None)
    if failed is None or not is_cause:
        return
    vars(report)[EXPLAINS] = bool(failed.comparisons.headline)
    if crash is None:
        # `fail_unasserted` failed the test, without a traceback.
        vars(report)[DIFFERS] = failed.first_line
        return
    # Keep the user's assert message, if any, as the first line. pytest usually drops the prefix
    # "AssertionError: ", so accept the message with or without it.
    leads = bool(failed.lines) or crash.message.removeprefix("AssertionError: ").startswith(
        "assert "
    )
    vars(report)[DIFFERS] = failed.first_line if leads else crash.message.partition("\n")[0]
    vars(report)[_HEADLINE] = failed.comparisons.headline if leads else ""
    if leads and failed.comparisons.headline:
        crash.message = failed.comparisons.headline
    below = "\n".join((*failed.lines, *filter(None, [failed.below])))
    if below:
        longrepr.addsection(SECTION, below)


def _add_comparisons(
    item: pytest.Item, report: pytest.TestReport, failed: FailedComparison | None
) -> None:
    if report.when != "call" or not item.stash.get(COMPARED, None):
        return
    from pytest_fsdp_comm.reports.ci.outcomes import Comparisons  # noqa: PLC0415  # few sessions need it

    compared = item.stash[COMPARED]
    files = tuple(compared)
    comparisons = replace(failed.comparisons if failed else Comparisons(files=()), files=files)
    vars(report)[_COMPARISONS] = to_json(comparisons)
    properties = [
        *(("comm_snapshot", file) for file in files),
        *([("comm_headline", comparisons.headline)] if comparisons.headline else []),
        *(("comm_change", line) for line in comparisons.summaries if line != comparisons.headline),
        *(("comm_cost", line) for line in comparisons.cost),
    ]
    # JUnit XML reads the properties of the teardown's report, which pytest copies from the item, so
    # set them on the item. If a test is rerun, the item still has the old properties.
    user_properties = [pair for pair in item.user_properties if pair[0] not in _PROPERTIES]
    item.user_properties[:] = [*user_properties, *properties]
    report.user_properties = list(item.user_properties)


def comparisons_of(report: object) -> Comparisons | None:
    """Return the comparisons that a report contains; only reports of the call phase have any."""
    data = getattr(report, _COMPARISONS, None)
    if data is None:
        return None
    from pytest_fsdp_comm.reports.ci.outcomes import Comparisons  # noqa: PLC0415  # see above

    return from_json(Comparisons, data)


def has_headline(report: object) -> bool:
    """Return whether the crash message is a headline, not an exception's name and text."""
    return bool(getattr(report, _HEADLINE, ""))


def print_shared_changes(reporter: pytest.TerminalReporter) -> None:
    """Print each change that made several tests fail, and one command that accepts all of them."""
    failed = {report.nodeid: comparisons_of(report) for report in reporter.stats.get("failed", ())}
    differing = {nodeid: tests for nodeid, tests in failed.items() if tests and tests.headline}
    if not differing:
        return
    from pytest_fsdp_comm.reports.ci.outcomes import (  # noqa: PLC0415  # needed only after failures
        accept_all,
        group_changes,
        has_other_amounts,
    )

    shared = [nodeids for nodeids in group_changes(differing) if len(nodeids) > 1]
    if shared:
        reporter.write_sep("-", "communication changes that failed several tests")
    for nodeids in shared:
        differ = has_other_amounts(differing[nodeid] for nodeid in nodeids)
        amounts = " (numbers of the first test)" if differ else ""
        summary = f"{differing[nodeids[0]].summary}{amounts}"
        reporter.write_line(f"{len(nodeids)} tests: {summary}", red=True)
        listed, more = first_of(nodeids, _MOST_TESTS)
        for line in (*map(printable, listed), *[f"and {more} more"] * bool(more)):
            reporter.write_line(f"  {line}")
        accept = accept_all([differing[nodeid] for nodeid in nodeids])
        reporter.write_line(f"accept these {len(nodeids)}: {accept}")
