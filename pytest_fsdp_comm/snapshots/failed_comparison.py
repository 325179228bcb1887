"""Add the headline, snapshot files and cost of a failed comparison to pytest's report."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import pytest

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.reports.explanation import (
    SECTION,
    Failure,
    summarize_changes,
    write_headline,
)
from pytest_fsdp_comm.text.codec import from_json, to_json
from pytest_fsdp_comm.text.words import take_first


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedComparison:
    """A test's failed comparison, or the last one if several failed, and how pytest prints it."""

    failure: Failure
    is_explained: bool
    """Whether this rank explains the failure; the other ranks have only its first line."""
    below: tuple[str, ...] = ()
    """Lines of a section below the traceback; empty for no section."""
    is_bare: bool = False
    """Whether `below` contains the explanation, because pytest does not print it."""


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
# The snapshot files that the test compared, relative to pytest's root, without duplicates.
_FILES: Final = "comm_files"
# The test's `Failure` as JSON; missing if no comparison differed.
_FAILURE: Final = "comm_failure"

# Number of lines to keep of a hang report. These lines say that the test hangs, which rank waits
# for which, and where.
_HANG_LINES: Final = 4
# Maximum number of tests to list below a change that they share.
_MOST_TESTS: Final = 10
# Names of the properties that the plugin adds to a test in JUnit XML.
_PROPERTIES: Final = (
    *("comm_snapshot", "comm_headline", "comm_severity", "comm_change", "comm_cost"),
)


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
        failed.failure.head in message or (crash is not None and failed.is_bare)
    )
    explained = failed.failure if failed and is_cause and failed.is_explained else None
    _add_comparisons_to_report(item, report, explained)
    if failed is None or not is_cause:
        return
    vars(report)[EXPLAINS] = failed.is_explained
    if crash is None:
        # `fail_unasserted` failed the test, without a traceback.
        vars(report)[DIFFERS] = failed.failure.head
        return
    # Keep the user's assert message, if any, as the first line. pytest usually drops the prefix
    # "AssertionError: ", so accept the message with or without it.
    leads = failed.is_bare or crash.message.removeprefix("AssertionError: ").startswith("assert ")
    headline = write_headline(explained) if explained and leads else ""
    vars(report)[DIFFERS] = failed.failure.head if leads else crash.message.partition("\n")[0]
    vars(report)[_HEADLINE] = headline
    crash.message = headline or crash.message
    if failed.below:
        longrepr.addsection(SECTION, "\n".join(failed.below))


def _add_comparisons_to_report(
    item: pytest.Item, report: pytest.TestReport, failure: Failure | None
) -> None:
    if report.when != "call" or not item.stash.get(COMPARED, None):
        return
    files = [*item.stash[COMPARED]]
    vars(report)[_FILES] = files
    properties = [("comm_snapshot", file) for file in files]
    if failure is not None:
        vars(report)[_FAILURE] = to_json(failure)
        headline = write_headline(failure)
        lines = [line for line in summarize_changes(failure) if line != headline]
        properties += [
            ("comm_headline", headline),
            ("comm_severity", failure.severity),
            *(("comm_change", line) for line in lines),
            *(("comm_cost", cost.text) for cost in failure.select("cost")),
        ]
    # JUnit XML reads the properties of the teardown's report, which pytest copies from the item, so
    # set them on the item. If a test is rerun, the item still has the old properties.
    user_properties = [pair for pair in item.user_properties if pair[0] not in _PROPERTIES]
    item.user_properties[:] = [*user_properties, *properties]
    report.user_properties = list(item.user_properties)


def compared_files(report: object) -> tuple[str, ...] | None:
    """Return the files that a test compared; None if the report is not of a test that compared."""
    files = getattr(report, _FILES, None)
    return None if files is None else tuple(files)


def failure_of(report: object) -> Failure | None:
    """Return the failed comparison that made a test fail; None if it failed for another reason."""
    data = getattr(report, _FAILURE, None)
    return None if data is None else from_json(Failure, data)


def has_headline(report: object) -> bool:
    """Return whether the crash message is a headline, not an exception's name and text."""
    return bool(getattr(report, _HEADLINE, ""))


def print_shared_changes(reporter: pytest.TerminalReporter) -> None:
    """Print each change that made several tests fail, and one command that accepts all of them."""
    failed = {report.nodeid: failure_of(report) for report in reporter.stats.get("failed", ())}
    failures = {nodeid: failure for nodeid, failure in failed.items() if failure}
    if not failures:
        return
    from pytest_fsdp_comm.reports.ci.outcomes import (  # noqa: PLC0415  # needed only after failures
        group_changes,
        has_other_amounts,
        make_joint_accept_command,
        summarize_group,
    )

    shared = [nodeids for nodeids in group_changes(failures) if len(nodeids) > 1]
    if shared:
        reporter.write_sep("-", "communication changes that failed several tests")
    for nodeids in shared:
        first = failures[nodeids[0]]
        differ = has_other_amounts(failures[nodeid] for nodeid in nodeids)
        amounts = " (numbers of the first test)" if differ else ""
        summary = f"{summarize_group(first)}{amounts}"
        reporter.write_line(f"{len(nodeids)} tests: {summary}", red=True)
        listed, more = take_first(nodeids, _MOST_TESTS)
        for line in (*map(printable, listed), *([f"and {more} more"] if more else [])):
            reporter.write_line(f"  {line}")
        accept = make_joint_accept_command([failures[nodeid] for nodeid in nodeids])
        reporter.write_line(f"accept these {len(nodeids)}{first.although}: {accept}")
