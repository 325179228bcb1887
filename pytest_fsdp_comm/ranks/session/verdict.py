"""Merges the reports of all ranks into reports of the test, which fails if any rank failed."""

from __future__ import annotations

import json
import math
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.ranks.hangs.waiting import explain_mismatch, explain_waiting, format_stacks
from pytest_fsdp_comm.ranks.wire.results import Activity, Position, RankResult, Stopped
from pytest_fsdp_comm.snapshots.failed_comparison import DIFFERS, EXPLAINS, HANGS_AT
from pytest_fsdp_comm.text.rank_lists import (
    group_ranks_by_text,
    name_ranks,
    prefix_texts_with_ranks,
)

When = Literal["setup", "call", "teardown"]
LoadReport = Callable[..., pytest.TestReport]

# Note [First failure leads]: if several ranks fail, the first failure is usually the cause, and the
# others are often only echoes ("connection closed by peer"). So failures are sorted by time, but
# echoes come after other failures. When a rank dies, its peers notice it before the supervisor
# does, so the report must not say that the peers failed first. A rank that was lost with its fork
# server or machine comes first, and a rank that only ran out of time comes last.

# Matches errors of gloo and NCCL when a peer is gone or a call fails (checked in torch 2.13).
_BACKEND_ERROR = re.compile(r"Connection (closed|reset) by peer|/gloo/|DistBackendError")
# The message that libstdc++ prints when an uncaught exception ends the process.
_UNCAUGHT = re.compile(r"^terminate called after .* of '(.+)'\n  what\(\):  (.+)", re.MULTILINE)

_OUT_OF_MEMORY = ", perhaps because memory ran out (see dmesg)"
# Titles of stacks. The second title of a pair is for ranks that are importing or collecting.
_IS_AT = (
    "{ranks} {is} at (innermost frame first):",
    "{ranks} {is} still importing or collecting, at (innermost frame first):",
)
_WAS_RUNNING = (
    "{ranks} {was} still running when the test was stopped, at:",
    "{ranks} {was} still importing or collecting when the test was stopped, at:",
)
_WAS_AT = "{ranks} {was} at (innermost frame first):"
_WAS_REPORTING = "{ranks} {was} stopped while formatting {its} failure report; {its} failure is at:"

# The key of ``msg`` and ``kwargs`` in a subtest's report, as pytest 8.4 to 9.2 serializes it.
_CONTEXT = "_subtest.context"

_PHASES: tuple[When, ...] = ("setup", "call", "teardown")

_Outcome = tuple[str, str]
"""The outcome of a test on one rank, and the reason if the rank skipped the test."""
_SKIPPED = "skipped"

_Subtest = tuple[When, pytest.TestReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    result: RankResult
    phases: dict[When, pytest.TestReport] = field(default_factory=dict)
    subtests: dict[tuple[str, int], _Subtest] = field(default_factory=dict)
    """Keyed by the subtest's name and how many subtests with that name the rank had run before."""

    @property
    def unfinished(self) -> When:
        """The phase that the rank did not finish; teardown if it finished all phases."""
        if isinstance(self.result.status, str):
            return "call"  # the rank was lost; its phase is unknown
        return next((when for when in _PHASES if when not in self.phases), "teardown")

    @property
    def outcome(self) -> _Outcome:
        return _read_outcome(self.phases.values())


_Ranks = Mapping[int, _Ran]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    rank: int
    when: When
    at: float
    """`time.time` when the rank failed; -inf if it was lost, inf if it ran out of time. See
    Note [First failure leads]."""
    report: pytest.TestReport | None = None
    """None if the rank died or ran out of time."""
    text: str
    """What happened to the rank, in words that the report prints after the rank's name."""
    hangs_at: str = ""
    """``path:line`` where a rank hangs, for `HANGS_AT`; empty if unknown, or if no rank hangs."""
    is_echo: bool = False
    """Whether this is a backend error that another rank's failure caused."""


def merge_reports(
    item: pytest.Item, results: Mapping[int, RankResult], load: LoadReport, *, limit: str
) -> list[pytest.TestReport]:
    """Merge the reports of all ranks into the reports that pytest logs for the test.

    Return a report for each phase that ran, preceded by the reports of its subtests. `limit` is the
    time limit in words, such as ``120 s``.
    """
    ranks = {rank: _load_reports(result, load) for rank, result in sorted(results.items())}
    subtests = _merge_subtests(ranks)
    raised = [
        _make_failure(rank, when, report)
        for rank, ran in ranks.items()
        for when, report in ran.phases.items()
        if report.failed
    ]
    failures = sorted(
        # Deaths are listed first and the sort is stable, so a death precedes simultaneous failures.
        [*_find_deaths(ranks), *raised, *_find_timeouts(ranks, limit)],
        key=lambda failure: (
            failure.at == math.inf,
            failure.is_echo,
            failure.is_echo and failure.report is not None,
            failure.at,
        ),
    )
    failures = _put_explaining_first(failures)
    exited = [ran for ran in ranks.values() if ran.result.session_exit is not None]
    if exited and all(failure.is_echo for failure in failures):
        failures = []
    # Collect the sections of all phases first: the sections of a phase can come from the report of
    # the previous phase, which `_set_sections_and_duration` changes.
    sections = {when: _merge_output_sections(ranks, when) for when in _PHASES}
    merged: dict[When, pytest.TestReport] = {}
    for when in _PHASES:
        reports = [ran.phases[when] for ran in ranks.values() if when in ran.phases]
        is_teardown = when == "teardown"
        blamed = [failure for failure in failures if (failure.when == "teardown") == is_teardown]
        if blamed and blamed[0].when == when:
            report = _make_failure_report(item, blamed, ranks)
        elif reports:
            # A phase counts as skipped only if every rank skipped it.
            report = next((report for report in reports if report.passed), reports[0])
        else:
            continue
        unfinished = [ran.result.unfinished_s for ran in ranks.values() if ran.unfinished == when]
        merged[when] = _set_sections_and_duration(report, reports, sections[when], unfinished)
    if exited:
        # As in pytest, neither the phase that called pytest.exit nor a later phase gets a report.
        cut = _PHASES[min(_PHASES.index(ran.unfinished) for ran in exited) :]
        merged = {
            when: report
            for when, report in merged.items()
            if when not in cut or (failures and report.failed)
        }
    elif not failures:
        _fail_if_outcomes_differ(item, merged, ranks, sections["call"])
    setup, call = merged.get("setup"), merged.get("call")
    # If setup failed on a rank, drop the call report of the other ranks. If setup was skipped but
    # the call failed, a plugin made the call fail, so keep its report.
    if setup and call and (setup.failed or (setup.skipped and not call.failed)):
        del merged["call"]
    return [
        report
        for when in _PHASES
        for report in (*subtests[when], *([merged[when]] if when in merged else []))
    ]


def merge_user_properties(
    reports: Iterable[pytest.TestReport], results: Mapping[int, RankResult]
) -> None:
    """Add the user properties of all ranks to each merged report."""
    for report in reports:
        by_rank = {
            rank: phase.report.get("user_properties", ())
            for rank, result in results.items()
            for phase in result.reports
            if phase.report.get("when") == report.when and not phase.is_subtest
        }
        if by_rank:
            report.user_properties = merge_properties(by_rank)


def merge_properties(by_rank: Mapping[int, Iterable[tuple[str, Any]]]) -> list[tuple[str, Any]]:
    """Merge properties in order; if values differ between ranks, add the ranks to the name."""
    by_name: defaultdict[str, defaultdict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for rank, properties in by_rank.items():
        for name, value in properties:
            by_name[name][rank].append(value)
    merged: list[tuple[str, Any]] = []
    for name, values in by_name.items():
        folded = group_ranks_by_text({rank: repr(texts) for rank, texts in values.items()})
        for ranks, _ in folded:
            label = name if len(folded) == 1 else f"{name} ({name_ranks(ranks)})"
            merged += [(label, value) for value in values[ranks[0]]]
    return merged


def _load_reports(result: RankResult, load: LoadReport) -> _Ran:
    # Plugins can add further reports for a phase, and reports for phases that pytest does not have.
    # If a phase has several reports, use the first that failed.
    ran = _Ran(result=result)
    counts: Counter[str] = Counter()
    for phase in result.reports:
        report = load(data=phase.report)
        longrepr: Any = report.longrepr
        if isinstance(longrepr, list):
            # For a skip, pytest expects a tuple, which JSON turned into a list.
            path, line, reason = longrepr
            report.longrepr = (path, line, reason)
        if phase.is_subtest:
            name = restore_and_name_subtest(report, phase.report)
            ran.subtests[name, counts[name]] = (ran.unfinished, report)
            counts[name] += 1
        elif report.when in _PHASES:
            if report.when not in ran.phases or not ran.phases[report.when].failed:
                ran.phases[report.when] = report
        elif report.failed:
            report.when = "teardown" if "call" in ran.phases else "call"
            ran.phases[report.when] = report
    return ran


def restore_and_name_subtest(report: pytest.TestReport, data: Mapping[str, Any]) -> str:
    """Return a string that identifies a subtest.

    Also restore the subtest's ``kwargs``: some versions of pytest replace each value with its repr
    once more when they load the report.
    """
    context: Any = getattr(report, "context", None)
    if _CONTEXT not in data or not {"msg", "kwargs"} <= data[_CONTEXT].keys() or context is None:
        raise upstream.moved_error(
            "pytest", "SubtestReport.context of msg and kwargs", "running ranks relies on"
        )
    # The context is frozen, but nothing has read it yet, so changing it is safe.
    object.__setattr__(context, "kwargs", dict(data[_CONTEXT]["kwargs"]))
    return json.dumps([data[_CONTEXT]["msg"], data[_CONTEXT]["kwargs"]], default=repr)


def _merge_subtests(ranks: _Ranks) -> dict[When, list[pytest.TestReport]]:
    """Return merged subtest reports by phase; omit subtests that a rank may not have finished."""
    by_key: dict[tuple[str, int], dict[int, _Subtest]] = {}
    for rank, ran in ranks.items():
        for key, subtest in ran.subtests.items():
            by_key.setdefault(key, {})[rank] = subtest
    merged: dict[When, list[pytest.TestReport]] = {when: [] for when in _PHASES}
    for on_ranks in sorted(
        by_key.values(), key=lambda subs: min(report.stop for _, report in subs.values())
    ):
        when = min((when for when, _ in on_ranks.values()), key=_PHASES.index)
        may_have_begun = {
            rank: ran.unfinished == when and (ran.result.stopped is not None or ran.result.has_died)
            for rank, ran in ranks.items()
            if rank not in on_ranks
        }
        report = _merge_subtest(on_ranks, may_have_begun)
        if report.failed or not any(may_have_begun.values()):
            merged[when].append(report)
    return merged


def _merge_subtest(on_ranks: Mapping[int, _Subtest], others: Collection[int]) -> pytest.TestReport:
    """Merge the reports of one subtest; `others` are the ranks that did not finish it."""
    reports = {rank: report for rank, (_, report) in on_ranks.items()}
    failures = sorted(
        [
            _make_failure(rank, when, report)
            for rank, (when, report) in on_ranks.items()
            if report.failed
        ],
        key=lambda failure: failure.at,
    )
    failures = _put_explaining_first(failures)
    sections = _merge_sections(
        {rank: report.sections for rank, report in reports.items()},
        several=len(on_ranks) + len(others) > 1,
    )
    outcomes = {rank: _read_outcome([report]) for rank, report in reports.items()}
    if failures and failures[0].report is not None:
        lines = _describe_other_failures(failures)
        unfailed = {rank: outcomes[rank] for rank, report in reports.items() if not report.failed}
        lines += _describe_unfailed_ranks(unfailed, skipped="skipped this subtest")
        lines += prefix_texts_with_ranks(dict.fromkeys(others, "did not finish this subtest"))
        report = _append_summary(
            failures[0].report,
            _list_ranks_failing_like_first(failures),
            "\n".join(lines),
            rank_count=len(on_ranks),
            is_first=len(failures) > 1,
        )
    else:
        merged = [*reports.values()]
        report = next((report for report in merged if report.passed), merged[0])
        if not _has_single_outcome(outcomes):
            report.outcome = "failed"
            report.longrepr = _describe_disagreement(outcomes)
    return _set_sections_and_duration(report, [*reports.values()], sections)


def _make_failure(rank: int, when: When, report: pytest.TestReport) -> _Failure:
    crash = getattr(report.longrepr, "reprcrash", None)
    # If a comparison failed, only one rank's crash message explains the diff. So prefer `DIFFERS`,
    # the first line of the failure, which is equal on all ranks that failed in the same way.
    text = getattr(report, DIFFERS, "")
    if crash is not None:
        text = f"{text or crash.message.splitlines()[0]} ({crash.path}:{crash.lineno})"
    elif not text:
        text = (str(report.longrepr).strip().splitlines() or ["failed"])[-1]
    is_echo = _BACKEND_ERROR.search(str(report.longrepr)) is not None
    return _Failure(rank=rank, when=when, at=report.stop, report=report, text=text, is_echo=is_echo)


def _put_explaining_first(failures: Sequence[_Failure]) -> list[_Failure]:
    """Put a failure that explains a snapshot diff first, if its text equals the first failure's."""
    return sorted(
        failures,
        key=lambda each: each.text != failures[0].text or not getattr(each.report, EXPLAINS, False),
    )


def _find_deaths(ranks: _Ranks) -> Iterable[_Failure]:
    for rank, ran in ranks.items():
        result, when = ran.result, ran.unfinished
        if isinstance(result.status, str):
            yield _Failure(rank=rank, when=when, at=-math.inf, text=result.status)
        elif result.has_died and result.session_exit is None:
            uncaught = _describe_cpp_exception(result)
            during = "before it began the test" if result.is_starting else f"during {when}"
            yield _Failure(
                rank=rank,
                when=when,
                at=result.ended_at or 0.0,
                # Linux kills a large process with SIGKILL when memory runs out.
                text=f"{_describe_death(result)} {during}{uncaught}"
                + (_OUT_OF_MEMORY if result.status == -signal.SIGKILL else ""),
                # gloo aborts a rank that receives a message of an unexpected size from a peer.
                is_echo="gloo::" in uncaught,
            )


def _describe_death(result: RankResult) -> str:
    if result.escaped is not None:
        return f"left the test with {result.escaped}"
    status = result.status
    if not isinstance(status, int) or status >= 0:
        return f"exited with status {status} (os._exit, or a crash)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-status} ({name})"


def _describe_cpp_exception(result: RankResult) -> str:
    """Return the uncaught C++ exception that aborted a rank, in words; "" if there was none."""
    uncaught = _UNCAUGHT.search(result.unreported.get("stderr", ""))
    if uncaught is None or result.escaped is not None or result.status != -signal.SIGABRT:
        return ""
    return f": {uncaught[1]}: {uncaught[2]}"


def _find_timeouts(ranks: _Ranks, limit: str) -> Iterable[_Failure]:
    late = _list_stopped_ranks(ranks, Stopped.AT_DEADLINE)
    if not late:
        return
    finished = [rank for rank in ranks if rank not in late]
    text = "\n".join(_describe_hang(ranks, late, finished))
    sites = {ran.result.position.site for ran in ranks.values() if ran.result.position} - {""}
    first = min(filter(text.__contains__, sites), key=text.index, default="")
    has_stranded = any(ranks[rank].result.waited_for for rank in late)
    is_starting = any(ranks[rank].result.is_starting for rank in late)
    for rank in sorted(
        late, key=lambda rank: not (ranks[rank].result.waited_for or ranks[rank].result.is_starting)
    ):
        result = ranks[rank].result
        absent = _describe_awaited_ranks(ranks, result.waited_for)
        title = "had not finished."
        if result.is_starting:
            title = f"did not begin the test within {result.unfinished_s:.0f} s; "
            title += "all ranks were stopped."
        elif absent or not (has_stranded or is_starting):
            did = f"waited for {absent}" if absent else f"did not finish within {limit}"
            title = f"{did}; all ranks were stopped."
        yield _Failure(
            rank=rank,
            when=ranks[rank].unfinished,
            at=math.inf,
            text=f"{title}\n{text}",
            hangs_at=first.rpartition(" in ")[0],
        )


def describe_positions(results: Mapping[int, RankResult]) -> list[str]:
    """Describe who is waiting for whom and where each rank is, as in the report of a hang."""
    ranks = {rank: _Ran(result=result) for rank, result in sorted(results.items())}
    running = [rank for rank, ran in ranks.items() if not ran.result.is_over]
    finished = [rank for rank, ran in ranks.items() if ran.result.is_done]
    return _describe_hang(ranks, running, finished)


def _describe_hang(ranks: _Ranks, running: Collection[int], finished: Sequence[int]) -> list[str]:
    outcomes = {rank: ranks[rank].outcome for rank in finished}
    return [
        *_explain_waiting(ranks, blamed=()),
        *_describe_unfailed_ranks(
            {rank: how for rank, how in outcomes.items() if how[0] != "passed"}
        ),
        *_format_running_stacks(ranks, running, _IS_AT),
        *([f"{name_ranks(finished)} had finished."] if finished else []),
    ]


def _format_running_stacks(
    ranks: _Ranks, running: Collection[int], titles: tuple[str, str]
) -> list[str]:
    """List the stacks of ranks that are importing or collecting, then those of the other ranks."""
    positions = [(rank, ranks[rank].result.position) for rank in running]
    starting = [rank for rank, place in positions if place and place.activity is Activity.STARTS]
    begun = [rank for rank in running if rank not in starting]
    return _format_stacks(ranks, starting, titles[1]) + _format_stacks(ranks, begun, titles[0])


def _describe_awaited_ranks(ranks: _Ranks, absent: Iterable[int]) -> str:
    """Describe how ranks left the test: ``rank 1, which had already skipped the test``."""
    outcomes = {rank: ranks[rank].outcome for rank in absent}
    did = {
        rank: _describe_outcome(how, passed="finished the test") for rank, how in outcomes.items()
    }
    for rank in outcomes:
        position = ranks[rank].result.position
        if position is not None and position.activity is Activity.COMPARES:
            did[rank] = "reached a line that waits for all ranks"
    parts = [
        f"{name_ranks(same)}, which had already {text}" for same, text in group_ranks_by_text(did)
    ]
    return " and ".join(parts)


def _list_stopped_ranks(ranks: _Ranks, why: Stopped) -> list[int]:
    return [rank for rank, ran in ranks.items() if ran.result.stopped is why]


def _format_stacks(ranks: _Ranks, listed: Iterable[int], title: str) -> list[str]:
    positions = [(rank, ranks[rank].result.position) for rank in listed]
    stacks = {rank: "\n".join(place.stack) if place else "" for rank, place in positions}
    return format_stacks(stacks, title)


def _explain_waiting(ranks: _Ranks, *, blamed: Sequence[int]) -> list[str]:
    positions = {
        rank: ran.result.position or Position(site="", activity=Activity.SILENT)
        for rank, ran in ranks.items()
        if ran.result.status is None
    }
    return explain_waiting(positions, blamed=blamed)


def _make_failure_report(
    item: pytest.Item, failures: Sequence[_Failure], ranks: _Ranks
) -> pytest.TestReport:
    """Return the report of a failed phase: the first failure, then a summary of the other ranks."""
    first = failures[0]
    failing = _list_ranks_failing_like_first(failures)
    others = _describe_other_ranks(failures, ranks)
    mismatch = ""
    if first.is_echo:
        known = {rank: ran.result.position for rank, ran in ranks.items() if ran.result.position}
        mismatch = explain_mismatch(known, {other.rank for other in failures if other.is_echo})
    if first.report is not None and not mismatch:
        is_first = all(failure.report and failure.at >= first.at for failure in failures)
        is_first &= len(failures) > 1 or bool(_list_stopped_ranks(ranks, Stopped.AFTER_FAILURE))
        count = len(ranks)
        return _append_summary(first.report, failing, others, rank_count=count, is_first=is_first)
    text = first.text if first.report is None else f"failed: {first.text}"
    if len(failing) > 1 and text.startswith("was "):
        text = f"were {text.removeprefix('was ')}"
    raised = "" if first.report is None else str(first.report.longrepr)
    died = [rank for rank, ran in ranks.items() if ran.result.status and ran.result.position]
    died_at = "\n".join(_format_stacks(ranks, died, _WAS_AT))
    lines = [mismatch, f"{name_ranks(failing)} {text}", others, died_at, raised]
    report = _make_failed_report_from_text(item, first.when, "\n".join(filter(None, lines)))
    vars(report)[HANGS_AT] = first.hangs_at
    return report


def _append_summary(
    report: pytest.TestReport,
    failing: Sequence[int],
    others: str,
    *,
    rank_count: int,
    is_first: bool,
) -> pytest.TestReport:
    """Append the names of the failing ranks, and the text `others`, to a report."""
    if not others and len(failing) == rank_count:
        return report
    how = "failed first" if is_first and len(failing) == 1 else "failed"
    text = f"{name_ranks(failing)} {how}\n{others}".rstrip()
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection("ranks", text)
    else:
        report.longrepr = f"{longrepr}\n{text}"
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"{name_ranks(failing)}: {crash.message}"
    return report


def _list_ranks_failing_like_first(failures: Sequence[_Failure]) -> list[int]:
    return [failure.rank for failure in failures if failure.text == failures[0].text]


def _describe_other_ranks(failures: Sequence[_Failure], ranks: _Ranks) -> str:
    """Describe the ranks that did not fail in the same way as the first; "" if there are none."""
    first = failures[0]
    failed = {failure.rank for failure in failures}
    lines = _describe_other_failures(failures)
    stopped = _list_stopped_ranks(ranks, Stopped.AFTER_FAILURE)
    positions = {rank: ranks[rank].result.position or Position(site="") for rank in stopped}
    reporting = [rank for rank in stopped if positions[rank].activity is Activity.REPORTS]
    running = [rank for rank in stopped if rank not in reporting]
    lines += _format_running_stacks(ranks, running, _WAS_RUNNING)
    lines += _format_stacks(ranks, reporting, _WAS_REPORTING)
    lines += _explain_waiting(ranks, blamed=[*failed]) if stopped else []
    if first.at < math.inf:
        lines += _describe_unfailed_ranks(
            {
                rank: ran.outcome
                for rank, ran in ranks.items()
                if rank not in failed
                and rank not in stopped
                # If a rank died in an earlier phase, the report of that phase describes it.
                and (first.when in ran.phases or not ran.result.has_died)
            }
        )
    return "\n".join(lines)


def _describe_other_failures(failures: Sequence[_Failure]) -> list[str]:
    """Describe the failures that differ from the first, one line for each."""
    first = failures[0]
    texts = {}
    for failure in failures:
        # If the first failure is a death, the others are later, even if they were noticed earlier.
        is_later = first.report is None or failure.at >= first.at
        how = "failed later: " if is_later else "failed: "
        if failure.text != first.text:
            texts[failure.rank] = f"{how if failure.report else ''}{failure.text}"
    return [text.splitlines()[0] for text in prefix_texts_with_ranks(texts)]


def _describe_unfailed_ranks(
    outcomes: Mapping[int, _Outcome], *, skipped: str = "skipped the test"
) -> list[str]:
    return prefix_texts_with_ranks(
        {rank: _describe_outcome(how, skipped=skipped) for rank, how in outcomes.items()}
    )


def _describe_outcome(
    outcome: _Outcome, *, passed: str = "did not fail", skipped: str = "skipped the test"
) -> str:
    kind, reason = outcome
    text = {"passed": passed, _SKIPPED: skipped}.get(kind, kind)
    return f"{text} ({reason})" if reason else text


def _fail_if_outcomes_differ(
    item: pytest.Item,
    merged: dict[When, pytest.TestReport],
    ranks: _Ranks,
    sections: list[tuple[str, str]],
) -> None:
    """Fail the test if its outcome differs between ranks, although no rank failed it."""
    outcomes = {rank: ran.outcome for rank, ran in ranks.items()}
    if _has_single_outcome(outcomes):
        return
    if setup := merged.get("setup"):
        setup.outcome = "passed"
        setup.longrepr = None
    failed = _make_failed_report_from_text(item, "call", _describe_disagreement(outcomes))
    merged["call"] = _set_sections_and_duration(failed, [*merged.values()], sections)


def _describe_disagreement(outcomes: Mapping[int, _Outcome]) -> str:
    texts = {
        rank: _describe_outcome(how, passed="passed", skipped=_SKIPPED)
        for rank, how in outcomes.items()
    }
    return (
        f"Ranks disagree about the outcome: {'; '.join(prefix_texts_with_ranks(texts))}.\n"
        "A skip or xfail probably depends on something that differs between ranks (rank, local "
        "files, time)."
    )


def _read_outcome(reports: Iterable[pytest.TestReport]) -> _Outcome:
    for report in reports:
        where = " in teardown" if report.when == "teardown" else ""
        if hasattr(report, "wasxfail"):
            how = "failed as expected (xfail)" if report.skipped else "passed unexpectedly (xpass)"
            return f"{how}{where}", ""
        if report.skipped:
            longrepr: Any = report.longrepr
            reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
            return f"{_SKIPPED}{where}", reason.removeprefix("Skipped: ")
    return "passed", ""


def _has_single_outcome(outcomes: Mapping[int, _Outcome]) -> bool:
    return len({kind for kind, _ in outcomes.values()}) <= 1


def _merge_output_sections(ranks: _Ranks, when: When) -> list[tuple[str, str]]:
    """Return the output sections of all ranks up to the end of a phase, without duplicates."""
    by_rank = {}
    before = _PHASES[max(_PHASES.index(when) - 1, 0)]
    for rank, ran in ranks.items():
        report = ran.phases.get(when) or ran.phases.get(before)
        sections = list(report.sections) if report else []
        if when == ran.unfinished:
            unreported = ran.result.unreported.items()
            sections += [(f"Captured {stream} {when}", text) for stream, text in unreported]
        by_rank[rank] = sections
    return _merge_sections(by_rank, several=len(ranks) > 1)


def _merge_sections(
    by_rank: Mapping[int, Sequence[tuple[str, str]]], *, several: bool
) -> list[tuple[str, str]]:
    """Merge equal sections of different ranks; if `several`, each title names the ranks."""
    by_title: dict[str, dict[int, str]] = {}
    for rank in sorted(by_rank):
        for title, content in by_rank[rank]:
            contents = by_title.setdefault(title, {})
            contents[rank] = contents.get(rank, "") + content
    return [
        (f"{title} ({name_ranks(ranks)})" if several else title, content)
        for title, contents in by_title.items()
        for ranks, content in group_ranks_by_text(contents)
    ]


def _set_sections_and_duration(
    report: pytest.TestReport,
    reports: Iterable[pytest.TestReport],
    sections: list[tuple[str, str]],
    unfinished_s: Iterable[float] = (),
) -> pytest.TestReport:
    """Set the sections of a merged report, and set its duration to the longest of all ranks."""
    report.sections = sections
    report.duration = max([*unfinished_s, *(other.duration for other in reports)])
    return report


def _make_failed_report_from_text(item: pytest.Item, when: When, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when=when,
    )
