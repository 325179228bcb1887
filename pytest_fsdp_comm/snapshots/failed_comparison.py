"""What the report of a failed comparison shows besides pytest's explanation of it."""

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
    """The last comparison of a test that failed and was explained."""

    first_line: str
    """Of the explanation, by which the failure is recognized that it belongs to."""
    comparisons: Comparisons
    """What differs; the files are added to the report of the whole test."""
    below: str
    """What the section below shows; empty for none."""
    lines: tuple[str, ...] = ()
    """The explanation, where pytest does not show it; empty where it does."""


FAILED_COMPARISON: Final = pytest.StashKey[FailedComparison]()
UNEXPLAINED: Final = pytest.StashKey[Any]()
"""In a test's stash: the first assertion whose comparison failed, until one is explained."""
COMPARED: Final = pytest.StashKey[dict[str, None]]()
"""In the stash of a test with ``comm_snapshot``: the files that it compared, relative to pytest's
root directory."""

# The attribute of a failed comparison's report with the headline, if the crash's message is one.
# pytest sends attributes along from ranks and workers.
_HEADLINE: Final = "comm_headline"

# The attribute of a failed comparison's report with what all ranks say of it, though one explains.
DIFFERS: Final = "comm_differs"
# The attribute of the one that explains it.
EXPLAINS: Final = "comm_explains"

# The attribute of a hung test's report with the first place that it names, as ``path:line``: that
# of the rank that others wait for, or else of one that waits.
HANGS_AT: Final = "comm_hangs_at"
# That it hangs, who waits for whom, and where.
_HANG_LINES: Final = 4

# So many of the tests with the same change are named.
_MOST_TESTS: Final = 10

# The attribute of a report that has what the test compared: `Comparisons` as JSON.
_COMPARISONS: Final = "comm_comparisons"
# The test's properties in JUnit XML.
_PROPERTIES: Final = ("comm_snapshot", "comm_headline", "comm_change", "comm_cost")


def reason_of(report: pytest.TestReport) -> str:
    """What a failure is about, in its own words: one line, of a hang several; empty for none."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    # xdist says first which worker it was.
    lines = (line.strip() for line in text.splitlines() if not line.startswith("[gw"))
    most = _HANG_LINES if getattr(report, HANGS_AT, "") else 1
    return "\n".join(islice(filter(None, lines), most))


def add_to_report(item: pytest.Item, report: pytest.TestReport) -> None:
    """Lead the report with the headline, where the test failed by the comparison."""
    # pytest's summary, --tb=line, JUnit XML and annotations of CI show the crash's message.
    failed = item.stash.get(FAILED_COMPARISON, None)
    longrepr: Any = report.longrepr
    crash = getattr(longrepr, "reprcrash", None)
    message = report.longreprtext if crash is None else crash.message
    is_told = failed is not None and (
        failed.first_line in message or (crash is not None and bool(failed.lines))
    )
    _add_comparisons(item, report, failed if is_told else None)
    if failed is None or not is_told:
        return
    if crash is None:
        # It was not asserted, so the message is all there is.
        vars(report)[DIFFERS] = failed.first_line
        vars(report)[EXPLAINS] = bool(failed.comparisons.headline)
        return
    # A message of the user's own comes first. pytest leaves the class's name out, but not always.
    leads = bool(failed.lines) or crash.message.removeprefix("AssertionError: ").startswith(
        "assert "
    )
    vars(report)[DIFFERS] = failed.first_line if leads else crash.message.partition("\n")[0]
    vars(report)[EXPLAINS] = bool(failed.comparisons.headline)
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
    from pytest_fsdp_comm.reports.ci.outcomes import Comparisons  # noqa: PLC0415  # other sessions need none

    compared = item.stash[COMPARED]
    files = tuple(compared)
    comparisons = replace(failed.comparisons if failed else Comparisons(files=()), files=files)
    vars(report)[_COMPARISONS] = to_json(comparisons)
    properties = [
        *(("comm_snapshot", file) for file in files),
        *([("comm_headline", comparisons.headline)] if comparisons.headline else []),
        *(("comm_change", line) for line in comparisons.told if line != comparisons.headline),
        *(("comm_cost", line) for line in comparisons.cost),
    ]
    # The report of the teardown, made from the test, is the one that JUnit XML reads. A test that
    # runs again may have those of the run before.
    kept = [pair for pair in item.user_properties if pair[0] not in _PROPERTIES]
    item.user_properties[:] = [*kept, *properties]
    report.user_properties = list(item.user_properties)


def comparisons_of(report: object) -> Comparisons | None:
    """What the test of a report compared; None for nothing, or of another phase."""
    data = getattr(report, _COMPARISONS, None)
    if data is None:
        return None
    from pytest_fsdp_comm.reports.ci.outcomes import Comparisons  # noqa: PLC0415  # as above

    return from_json(Comparisons, data)


def has_headline(report: object) -> bool:
    """Whether the crash's message is a headline, rather than an exception's name and text."""
    return bool(getattr(report, _HEADLINE, ""))


def print_shared_changes(reporter: pytest.TerminalReporter) -> None:
    """Print each change that failed several tests once, with one command that accepts it."""
    found = ((report.nodeid, comparisons_of(report)) for report in reporter.stats.get("failed", ()))
    differing = {nodeid: one for nodeid, one in found if one and one.headline}
    if not differing:
        return
    from pytest_fsdp_comm.reports.ci.outcomes import (  # noqa: PLC0415  # on failure only
        accept_all,
        group_changes,
        has_other_amounts,
    )

    shared = [nodeids for nodeids in group_changes(differing) if len(nodeids) > 1]
    if shared:
        reporter.write_sep("-", "the same change of communication in several tests")
    for nodeids in shared:
        amounts = ""
        if has_other_amounts(differing[nodeid] for nodeid in nodeids):
            amounts = " (amounts of the first test)"
        summary = f"{differing[nodeids[0]].summary}{amounts}"
        reporter.write_line(f"{len(nodeids)} tests: {summary}", red=True)
        shown, more = first_of(nodeids, _MOST_TESTS)
        for line in (*map(printable, shown), *[f"and {more} more"] * bool(more)):
            reporter.write_line(f"  {line}")
        accept = accept_all([differing[nodeid] for nodeid in nodeids])
        reporter.write_line(f"accept all: {accept}")
