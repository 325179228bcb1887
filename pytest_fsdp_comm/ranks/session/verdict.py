"""Merges what the ranks did with one test into the reports of one test.

The worst outcome wins. The failure that leads is the one that happened first: the others are often
only its echo ("connection closed by peer").
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import pytest

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.ranks.hangs.stacks import shortened_code
from pytest_fsdp_comm.ranks.hangs.waiting import explain_mismatch, explain_waiting, list_stacks
from pytest_fsdp_comm.ranks.rank.kept_output import MOST_ON_DISK_NBYTES
from pytest_fsdp_comm.ranks.wire.positions import Activity, Position
from pytest_fsdp_comm.ranks.wire.results import PhaseReport, RankResult, Stopped
from pytest_fsdp_comm.ranks.wire.subtest_reports import is_subtest, name_subtest
from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks

When = Literal["setup", "call", "teardown"]
LoadReport = Callable[[dict[str, Any]], pytest.TestReport]

# A death is noticed after the others have seen its closed connections, under load by this much.
_REAPED_LATE_S = 0.5

# What gloo and NCCL say where they give up; read in torch 2.13.
_GAVE_UP = re.compile(r"Connection (closed|reset) by peer|/gloo/|DistBackendError")
# What libstdc++ prints of the exception that ends a process.
_UNCAUGHT = re.compile(r"^terminate called after .* of '(.+)'\n  what\(\):  (.+)", re.MULTILINE)

_PHASES: tuple[When, ...] = ("setup", "call", "teardown")

_Outcome = tuple[str, str]
"""What a test on one rank came to, and the reason that it gave, if any."""
_SKIPPED = "skipped"
# As pytest has them.
_SKIP_PREFIX = "Skipped: "
_XFAIL_PREFIX = "reason: "
_MOST_REASONS = 3
_LONGEST_REASON = 200


class _Blame(IntEnum):
    """Which failures lead, whenever they happened; the smallest does."""

    LOST = 0
    """The rank's process is gone with the one that should report on it. What other ranks say is an
    echo, however late it was missed."""
    OWN = 1
    """The rank failed or died; the first one leads."""
    DEADLINE = 2
    """The rank only took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """One rank's failure."""

    rank: int
    when: When
    blame: _Blame = _Blame.OWN
    at: float | None
    """`time.time` on the rank; None where it is unknown or does not matter."""
    report: pytest.TestReport | None
    """None if the rank died."""
    text: str
    """What happened to the rank, to be read after its name."""
    text_of_several: str
    """The same, to be read after the names of several ranks."""

    @property
    def order(self) -> tuple[_Blame, float]:
        """Sorts failures: the first one leads."""
        return self.blame, 0.0 if self.at is None else self.at


def merge_reports(
    item: pytest.Item, results: Mapping[int, RankResult], load: LoadReport, *, timeout_s: float
) -> list[pytest.TestReport]:
    """Makes the test's reports: set-up, call unless set-up ended the test, and teardown.

    Those of subtests come before that of the phase that they ran in.

    Args:
        item: The test.
        results: What each rank did.
        load: Makes a report of its serialized form.
        timeout_s: The test's deadline, for the text.

    Returns:
        The reports to log, in order.
    """
    loaded = {rank: _sorted_reports(result, load) for rank, result in results.items()}
    reports = {rank: phases for rank, (phases, _) in loaded.items()}
    failed_reports = [*_failed_reports(reports)]
    subtests = _merged_subtests(
        {rank: own for rank, (_, own) in loaded.items()},
        {
            rank: _unfinished_phase(reports[rank])
            for rank, result in results.items()
            if result.stopped is not None or _has_died(result)
        },
    )
    failures = sorted(
        [
            # Before what came at the same time.
            *_deaths(results, reports, failed_reports),
            *failed_reports,
            *_timeouts(results, reports, timeout_s),
            *_too_much_output(results, reports),
        ],
        key=lambda failure: failure.order,
    )
    main = [failure for failure in failures if failure.when != "teardown"]
    late = [failure for failure in failures if failure.when == "teardown"]
    # Before any report gets the sections of all ranks: a phase that a rank did not end shows those
    # of the phase before.
    sections_of = {when: _sections(reports, results, when) for when in _PHASES}
    merged = []
    for when in _PHASES:
        present = [reports[rank][when].report for rank in sorted(reports) if when in reports[rank]]
        phase = _Phase(item=item, when=when, present=present, sections=sections_of[when])
        blamed = late if when == "teardown" else main
        if blamed and blamed[0].when == when:
            merged.append(_failed(phase, blamed, results, reports))
        elif present:
            merged.append(_unfailed(phase))
    phases = _without_call_after_failed_setup(
        _with_disagreement(item, merged, reports, failures, sections_of["call"])
    )
    return _with_subtests(phases, subtests)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankReport:
    """A rank's report, loaded."""

    report: pytest.TestReport
    made_at: float
    """`time.time` on the rank."""


_Reports = Mapping[int, Mapping[When, _RankReport]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """One phase of the merged test."""

    item: pytest.Item
    when: When
    present: Sequence[pytest.TestReport]
    """The reports of the ranks that ended it."""
    sections: list[tuple[str, str]]
    """Every rank's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subtest:
    """One rank's report of a subtest."""

    key: tuple[str, int]
    """Its name and arguments, and how often they came before on the rank."""
    when: When
    """The phase that the rank was in."""
    sent: _RankReport


def _sorted_reports(
    result: RankResult, load: LoadReport
) -> tuple[dict[When, _RankReport], list[_Subtest]]:
    """One report for each phase, and those of subtests.

    A plugin may add reports to those of pytest, several of a phase or of a phase of its own: the
    first failed one counts.
    """
    phases: dict[When, _RankReport] = {}
    subtests: list[_Subtest] = []
    counts: Counter[str] = Counter()
    for sent in result.reports:
        report = _loaded(sent, load)
        loaded = _RankReport(report=report, made_at=sent.made_at)
        if is_subtest(report):
            name = name_subtest(report, sent.report)
            key = (name, counts[name])
            counts[name] += 1
            subtests.append(_Subtest(key=key, when=_unfinished_phase(phases), sent=loaded))
        elif report.when in _PHASES:
            if report.when not in phases or not phases[report.when].report.failed:
                phases[report.when] = loaded
        elif report.failed:
            report.when = "teardown" if "call" in phases else "call"
            phases[report.when] = loaded
    return phases, subtests


def _loaded(sent: PhaseReport, load: LoadReport) -> pytest.TestReport:
    report = load(sent.report)
    longrepr: Any = report.longrepr
    if isinstance(longrepr, list):
        # JSON has no tuples; pytest wants one for a skip.
        path, line, reason = longrepr
        report.longrepr = (path, line, reason)
    return report


def _merged_subtests(
    subtests: Mapping[int, Sequence[_Subtest]], died_in: Mapping[int, When]
) -> dict[When, list[pytest.TestReport]]:
    """One report for each subtest that a rank ran, in order, by the phase that it ran in.

    None of one that did not fail, if a rank died, or was ended, before its end.
    """
    by_key: dict[tuple[str, int], dict[int, _Subtest]] = {}
    for rank, own in subtests.items():
        for subtest in own:
            by_key.setdefault(subtest.key, {})[rank] = subtest
    merged: dict[When, list[pytest.TestReport]] = {when: [] for when in _PHASES}
    for on_ranks in sorted(
        by_key.values(), key=lambda subs: min(sub.sent.made_at for sub in subs.values())
    ):
        when = min((sub.when for sub in on_ranks.values()), key=_PHASES.index)
        absent = {rank: died_in.get(rank) == when for rank in subtests if rank not in on_ranks}
        report = _merged_subtest(on_ranks, absent)
        if report.failed or not any(absent.values()):
            merged[when].append(report)
    return merged


def _merged_subtest(
    on_ranks: Mapping[int, _Subtest], absent: Mapping[int, bool]
) -> pytest.TestReport:
    """One report of what ranks did; of the absent it is known whether they may have begun."""
    failures = sorted(
        [
            failure
            for rank, sub in on_ranks.items()
            for failure in _failed_reports({rank: {sub.when: sub.sent}})
        ],
        key=lambda failure: failure.order,
    )
    everyone = [sub.sent.report for sub in on_ranks.values()]
    several = len(on_ranks) + len(absent) > 1
    sections = _folded(
        {rank: sub.sent.report.sections for rank, sub in on_ranks.items()}, several=several
    )
    outcomes = {rank: _outcome([sub.sent]) for rank, sub in on_ranks.items()}
    if failures and failures[0].report is not None:
        story = [*_later(failures)]
        quiet = {r: [sub.sent] for r, sub in on_ranks.items() if not sub.sent.report.failed}
        story += _unfailed_ranks(quiet, skipped="skipped this subtest")
        verbs = {rank: "end" if has_begun else "run" for rank, has_begun in absent.items()}
        for ranks, verb in fold_equal(verbs):
            story.append(f"{name_ranks(ranks)} did not {verb} this subtest")
        report = _with_story(
            failures[0].report, _alike(failures), "\n".join(story), rank_count=len(on_ranks)
        )
    else:
        report = next((report for report in everyone if report.passed), everyone[0])
        if _agree(outcomes):
            _give_reasons([report], outcomes)
        else:
            report.outcome = "failed"
            report.longrepr = _disagreement(outcomes)
    report.sections = sections
    return _timed(report, everyone)


def _with_subtests(
    phases: list[pytest.TestReport], subtests: Mapping[When, list[pytest.TestReport]]
) -> list[pytest.TestReport]:
    """Puts the reports of subtests before that of their phase, which may be missing."""
    left = dict(subtests)
    found: list[pytest.TestReport] = []
    for report in phases:
        for when in _PHASES[: _PHASES.index(report.when) + 1]:
            found += left.pop(when, [])
        found.append(report)
    return [*found, *(report for rest in left.values() for report in rest)]


def _failed_reports(reports: _Reports) -> Iterable[_Failure]:
    for rank, phases in reports.items():
        for when, sent in phases.items():
            if sent.report.failed:
                # The phase's end is when it failed; the report was made and sent later.
                failed_at = getattr(sent.report, "stop", None) or sent.made_at
                text = _crash_line(sent.report)
                yield _Failure(
                    rank=rank,
                    when=when,
                    at=failed_at,
                    report=sent.report,
                    text=text,
                    text_of_several=text,
                )


def _crash_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{crash.message.splitlines()[0]} ({crash.path}:{crash.lineno})"
    text = str(report.longrepr)
    return text.strip().splitlines()[-1] if text.strip() else "failed"


def _deaths(
    results: Mapping[int, RankResult], reports: _Reports, failed: Sequence[_Failure]
) -> Iterable[_Failure]:
    for rank, result in results.items():
        if result.lost is not None:
            # Its phase is unknown.
            yield _Failure(
                rank=rank,
                when="call",
                blame=_Blame.LOST,
                at=None,
                report=None,
                text=result.lost.of_one,
                text_of_several=result.lost.of_several,
            )
            continue
        if result.status is None and result.escaped is None:
            continue
        when = _unfinished_phase(reports[rank])
        was, were, why = "", "", ""
        if result.escaped is not None:
            what = f"left the test with {result.escaped}"
        elif result.status is not None and result.status < 0:
            was, were = "was ", "were "
            what = f"killed by signal {-result.status} ({_signal_name(-result.status)})"
            uncaught = _UNCAUGHT.search(result.unreported.get("stderr", ""))
            if uncaught and result.status == -signal.SIGABRT:
                site = result.position.site if result.position else ""
                why = f"{f' at {site}' if site else ''}: {uncaught[1]}: {uncaught[2]}"
        else:
            what = f"ended with exit status {result.status} (os._exit, or a crash)"
        yield _Failure(
            rank=rank,
            when=when,
            at=_died_at(result, failed),
            report=None,
            text=f"{was}{what} during {when}{why}",
            text_of_several=f"{were}{what} during {when}{why}",
        )


def _died_at(result: RankResult, failed: Iterable[_Failure]) -> float | None:
    """When a rank died at the earliest, as far as that is known."""
    if result.ended_at is None:
        return None
    earliest = result.ended_at - _REAPED_LATE_S
    if result.escaped is None:
        return max(earliest, result.seen_alive_at or earliest)
    # The rank tells the time itself, but may have closed connections as it unwound until then.
    echoes = [one.at for one in failed if one.at is not None and _GAVE_UP.search(_longrepr(one))]
    return min((at for at in echoes if at >= earliest), default=result.ended_at)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _unfinished_phase(phases: Mapping[When, object]) -> When:
    return next((when for when in _PHASES if when not in phases), "teardown")


def _timeouts(
    results: Mapping[int, RankResult], reports: _Reports, timeout_s: float
) -> Iterable[_Failure]:
    late = [rank for rank, result in results.items() if result.stopped is Stopped.AT_DEADLINE]
    if not late:
        return
    limit = results[late[0]].timeout_s
    within = f"{timeout_s:g} s" if limit is None else f"{limit:g} s (pytest-timeout)"
    lines = [f"did not finish within {within}, and every rank was ended."]
    lines += list_stacks(
        {rank: results[rank].stacks for rank in late},
        lambda ranks: (
            f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at (innermost frame first):"
        ),
    )
    finished = [rank for rank in results if rank not in late]
    if finished:
        lines.append(f"{name_ranks(finished)} had finished.")
    unlike = {rank: reports[rank].values() for rank in finished}
    unlike = {rank: own for rank, own in unlike.items() if _outcome(own)[0] != "passed"}
    lines[1:1] = [*_waiting(results, blamed=()), *_unfailed_ranks(unlike)]
    text = "\n".join(lines)
    for rank in late:
        yield _Failure(
            rank=rank,
            when=_unfinished_phase(reports[rank]),
            blame=_Blame.DEADLINE,
            at=None,
            report=None,
            text=text,
            text_of_several=text,
        )


def _too_much_output(results: Mapping[int, RankResult], reports: _Reports) -> Iterable[_Failure]:
    for rank, result in results.items():
        if result.stopped is Stopped.TOO_MUCH_OUTPUT:
            when = _unfinished_phase(reports[rank])
            limit = show_nbytes(MOST_ON_DISK_NBYTES)
            remedy = "Print less, or set TMPDIR to a local disk."
            yield _Failure(
                rank=rank,
                when=when,
                at=result.ended_at,
                report=None,
                text=f"printed so much during {when} that its output took more than {limit} on "
                "disk, and was ended.\nOutput that is not kept is freed as the test runs, but "
                "either the rank prints too fast for that, or the file system of TMPDIR cannot "
                f"free part of a file. {remedy}",
                text_of_several=f"printed so much during {when} that the output of each took more "
                f"than {limit} on disk, and were ended.\nOutput that is not kept is freed as the "
                "test runs, but either the ranks print too fast for that, or the file system of "
                f"TMPDIR cannot free part of a file. {remedy}",
            )


def _waiting(results: Mapping[int, RankResult], *, blamed: Sequence[int]) -> list[str]:
    """Which rank waits for which in a collective.

    Args:
        results: What each rank did.
        blamed: Ranks whose failure the text shows already: that others wait for them is no news.

    Returns:
        Lines; empty if no rank waits, or it is unknown.
    """
    positions = {
        rank: result.position or Position(site="", activity=Activity.SILENT)
        for rank, result in results.items()
        if result.status is None and result.lost is None
    }
    return explain_waiting(positions, blamed=blamed)


def _failed(
    phase: _Phase,
    failures: Sequence[_Failure],
    results: Mapping[int, RankResult],
    reports: _Reports,
) -> pytest.TestReport:
    """The report of a failed phase: the first failure, then what the other ranks did."""
    first = failures[0]
    alike = _alike(failures)
    story = _story(failures, results, reports)
    mismatch = _mismatch(failures, results)
    # What a rank did on its own accord may have been the cause, whatever the backend said first.
    if mismatch and not all(_gave_up(failure, results) for failure in failures):
        mismatch, story = "", f"{mismatch}\n{story}"
    if first.report is None or mismatch:
        what = first.text_of_several if len(alike) > 1 else first.text
        what = what if first.report is None else f"failed: {what}"
        raised = str(first.report.longrepr) if first.report is not None else ""
        lines = [mismatch, f"{name_ranks(alike)} {what}", story, raised]
        text = "\n".join(filter(None, lines))
        failed = _new_report(phase.item, phase.when, text, phase.sections)
        return _timed(failed, phase.present)
    report = _with_story(first.report, alike, story, rank_count=len(results))
    report.sections = phase.sections
    return _timed(report, phase.present)


def _mismatch(failures: Sequence[_Failure], results: Mapping[int, RankResult]) -> str:
    """What ranks called differently, which the backend gave up on; empty if that is not it."""
    if not _gave_up(failures[0], results):
        return ""
    gave_up = {failure.rank for failure in failures if _gave_up(failure, results)}
    own = [failure for failure in failures if failure.blame is not _Blame.DEADLINE]
    if any(failure.report is None and failure.rank not in gave_up for failure in own):
        return ""  # it died by itself
    positions = {rank: result.position for rank, result in results.items() if result.position}
    return explain_mismatch(positions, gave_up)


def _gave_up(failure: _Failure, results: Mapping[int, RankResult]) -> bool:
    """Whether a backend gave up, and so the rank failed."""
    if failure.report is not None:
        return _GAVE_UP.search(_longrepr(failure)) is not None
    # A rank that C++ ended has left its last words.
    position = results[failure.rank].position
    is_aborted = results[failure.rank].status == -signal.SIGABRT
    return is_aborted and position is not None and len(position.groups) > 0


def _longrepr(failure: _Failure) -> str:
    return "" if failure.report is None else str(failure.report.longrepr)


def _with_story(
    report: pytest.TestReport, alike: Sequence[int], story: str, *, rank_count: int
) -> pytest.TestReport:
    """Adds to a rank's failure which ranks failed like it, and what the others did."""
    if not story and len(alike) == rank_count:
        return report
    is_first = story and len(alike) == 1
    story = f"{name_ranks(alike)} failed{' first' if is_first else ''}\n{story}".rstrip()
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection("ranks", story)
    else:
        report.longrepr = f"{longrepr}\n{story}"
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"{name_ranks(alike)}: {crash.message}"
    return report


def _alike(failures: Sequence[_Failure]) -> list[int]:
    return [failure.rank for failure in failures if failure.text == failures[0].text]


def _story(
    failures: Sequence[_Failure], results: Mapping[int, RankResult], reports: _Reports
) -> str:
    """What the ranks did that did not fail like the first; empty if there are none."""
    first = failures[0]
    alike = _alike(failures)
    others = {failure.rank: failure.text for failure in failures if failure.rank not in alike}
    lines = list(_later(failures))
    stopped = [rank for rank, result in results.items() if result.stopped is Stopped.AFTER_FAILURE]
    lines += list_stacks(
        {rank: results[rank].stacks for rank in stopped},
        lambda ranks: (
            f"{name_ranks(ranks)} {_was(ranks)} still running and {_was(ranks)} ended at:"
        ),
    )
    lines += _waiting(results, blamed=[*alike, *others]) if stopped else []
    mentioned = {*alike, *others, *stopped}
    quiet = {
        rank: phases.values()
        for rank, phases in reports.items()
        # That one died before this phase is told there.
        if rank not in mentioned and (first.when in phases or not _has_died(results[rank]))
    }
    if first.blame is not _Blame.DEADLINE:
        lines += _unfailed_ranks(quiet)
    return "\n".join(lines)


def _later(failures: Sequence[_Failure]) -> Iterable[str]:
    """How the ranks failed that failed unlike the first."""
    alike = _alike(failures)
    others = {
        failure.rank: f"{'later' if failure.report is None else 'failed later'}: {failure.text}"
        for failure in failures
        if failure.rank not in alike
    }
    for ranks, text in fold_equal(others):
        yield f"{name_ranks(ranks)} {text.splitlines()[0]}"


def _has_died(result: RankResult) -> bool:
    return (result.status, result.escaped, result.lost) != (None, None, None)


def _unfailed_ranks(
    reports: Mapping[int, Iterable[_RankReport]],
    passed: str = "did not fail",
    skipped: str = "skipped the test",
) -> list[str]:
    """What the ranks came to that did not fail."""
    outcomes = {rank: _outcome(own) for rank, own in reports.items()}
    words = {"passed": passed, _SKIPPED: skipped}
    texts = kinds = {rank: words.get(kind, kind) for rank, (kind, _) in outcomes.items()}
    if len({*outcomes.values()}) <= _MOST_REASONS:
        reasons = {rank: printable(reason, "\n") for rank, (_, reason) in outcomes.items()}
        texts = {
            rank: f"{kinds[rank]}: {shortened_code(reason, _LONGEST_REASON)}"
            if reason
            else kinds[rank]
            for rank, reason in reasons.items()
        }
    return [f"{name_ranks(ranks)} {text}" for ranks, text in fold_equal(texts)]


def _was(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _unfailed(phase: _Phase) -> pytest.TestReport:
    """The report of a phase in which no rank failed: passed unless every rank was skipped."""
    report = next((report for report in phase.present if report.passed), phase.present[0])
    report.sections = phase.sections
    return _timed(report, phase.present)


def _with_disagreement(
    item: pytest.Item,
    merged: list[pytest.TestReport],
    reports: _Reports,
    failures: Sequence[_Failure],
    sections: list[tuple[str, str]],
) -> list[pytest.TestReport]:
    """Adds a failure where no rank failed, but ranks came to different outcomes."""
    if failures:
        return merged
    outcomes = {rank: _outcome(phases.values()) for rank, phases in reports.items()}
    if _agree(outcomes):
        _give_reasons(merged, outcomes)
        return merged
    text = _disagreement(outcomes)
    others = [report for report in merged if report.when != "call"]
    setup = [report for report in others if report.when == "setup"]
    for report in setup:
        report.outcome = "passed"
        report.longrepr = None
    failed = _timed(_new_report(item, "call", text, sections), merged)
    return [*setup, failed, *[report for report in others if report.when == "teardown"]]


def _disagreement(outcomes: Mapping[int, _Outcome]) -> str:
    texts = {
        rank: f"{kind} ({reason})" if kind.startswith(_SKIPPED) else kind
        for rank, (kind, reason) in outcomes.items()
    }
    by_ranks = "; ".join(f"{name_ranks(ranks)} {text}" for ranks, text in fold_equal(texts))
    return (
        f"ranks disagree about the outcome: {by_ranks}.\n"
        "A skip or xfail depends on something that differs between ranks (rank, local files, "
        "time)."
    )


def _outcome(reports: Iterable[_RankReport]) -> _Outcome:
    for report in (sent.report for sent in reports):
        reason = getattr(report, "wasxfail", None)
        where = " in teardown" if report.when == "teardown" else ""
        if report.skipped and reason is None:
            longrepr: Any = report.longrepr
            reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
            return f"{_SKIPPED}{where}", reason.removeprefix(_SKIP_PREFIX)
        if reason is not None:
            how = "failed as expected (xfail)" if report.skipped else "passed unexpectedly (xpass)"
            return f"{how}{where}", reason.removeprefix(_XFAIL_PREFIX)
    return "passed", ""


def _agree(outcomes: Mapping[int, _Outcome]) -> bool:
    """Whether ranks came to the same outcome, for whatever reasons."""
    return len({kind for kind, _ in outcomes.values()}) <= 1


def _give_reasons(merged: Iterable[pytest.TestReport], outcomes: Mapping[int, _Outcome]) -> None:
    """Gives what was skipped, or failed as expected, the reasons of all ranks, each once."""
    folded = fold_equal({rank: reason for rank, (_, reason) in outcomes.items()})
    if len(folded) == 1:
        return
    shown = [f"{reason} ({name_ranks(ranks)})" for ranks, reason in folded[:_MOST_REASONS]]
    more = len(folded) - len(shown)
    text = "; ".join([*shown, f"{more} more"] if more else shown)
    for report in merged:
        if hasattr(report, "wasxfail"):
            report.wasxfail = text
            return
        if report.skipped:
            longrepr: Any = report.longrepr
            text = f"{_SKIP_PREFIX}{text}"
            report.longrepr = (*longrepr[:2], text) if isinstance(longrepr, tuple) else text
            return


def _without_call_after_failed_setup(
    merged: list[pytest.TestReport],
) -> list[pytest.TestReport]:
    # Some ranks may have come to the call while another failed in set-up. A call that failed though
    # the set-up skipped the test is a plugin's doing, and counts.
    if merged and merged[0].when == "setup" and not merged[0].passed:
        counts = merged[0].skipped
        return [report for report in merged if report.when != "call" or (counts and report.failed)]
    return merged


def _sections(
    reports: _Reports, results: Mapping[int, RankResult], when: When
) -> list[tuple[str, str]]:
    """Every rank's output up to and in a phase, equal ones folded."""
    by_rank: dict[int, list[tuple[str, str]]] = {}
    for rank in sorted(reports):
        before = _before(when)
        entry = reports[rank].get(when) or (before and reports[rank].get(before))
        sections = list(entry.report.sections) if entry else []
        if when == _unfinished_phase(reports[rank]):
            unreported = results[rank].unreported.items()
            sections += [(f"Captured {stream} {when}", text) for stream, text in unreported]
        by_rank[rank] = sections
    return _folded(by_rank, several=len(reports) > 1)


def _folded(
    by_rank: Mapping[int, Sequence[tuple[str, str]]], *, several: bool
) -> list[tuple[str, str]]:
    """Sections with the names of their ranks, equal ones once."""
    by_title: dict[str, dict[int, str]] = {}
    for rank in sorted(by_rank):
        for title, content in by_rank[rank]:
            known = by_title.setdefault(title, {})
            known[rank] = known.get(rank, "") + content
    return [
        (f"{title} ({name_ranks(ranks)})" if several else title, content)
        for title, contents in by_title.items()
        for ranks, content in fold_equal(contents)
    ]


def _before(when: When) -> When | None:
    index = _PHASES.index(when)
    return _PHASES[index - 1] if index else None


def _timed(report: pytest.TestReport, present: Sequence[pytest.TestReport]) -> pytest.TestReport:
    """Gives a merged report the time of the slowest rank."""
    report.duration = max((other.duration for other in present), default=0.0)
    return report


def _new_report(
    item: pytest.Item, when: When, text: str, sections: list[tuple[str, str]]
) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when=when,
        sections=sections,
    )
