"""Many ranks' reports become those of one test: a table, without any rank."""

import pytest

from pytest_fsdp_comm.ranks.hangs.stacks import parse_dump, show_stack
from pytest_fsdp_comm.ranks.session.verdict import merge_reports
from pytest_fsdp_comm.ranks.wire.results import Loss, PhaseReport, RankResult, Stopped
from pytest_fsdp_comm.text.rank_lists import name_ranks

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@pytest.fixture
def merge(request):
    """Merges phases given as (when, outcome, text, at) for each rank."""
    item = request.node

    def load(data):
        when, outcome, text, at, sections = data["phase"]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome=outcome,
            longrepr=[__file__, 1, text] if outcome == SKIPPED else text,
            when=when,
            sections=sections,
        )
        report.stop = at
        return report

    def run(*ranks):
        results = {}
        for rank, (phases, changes) in enumerate(ranks):
            reports = tuple(
                PhaseReport(report={"phase": phase}, made_at=phase[3]) for phase in phases
            )
            results[rank] = RankResult(rank=rank, reports=reports, payloads=(), **changes)
        return merge_reports(item, results, load, timeout_s=7)

    return run


def rank(call=PASSED, text="", at=1.0, *, setup=PASSED, teardown=PASSED, sections=(), **changes):
    phases = [("setup", setup, text if setup != PASSED else "", at, [])]
    if setup == PASSED and call is not None:
        phases.append(("call", call, text if call != PASSED else "", at, list(sections)))
    if call is not None or setup != PASSED:
        phases.append(
            ("teardown", teardown, text if teardown != PASSED else "", at, list(sections))
        )
    return phases, changes


def outcomes(reports):
    return {report.when: report.outcome for report in reports}


def test_a_test_passes_if_all_ranks_pass(merge):
    assert outcomes(merge(rank(), rank())) == {"setup": PASSED, "call": PASSED, "teardown": PASSED}


def test_the_first_failure_in_time_leads(merge):
    reports = merge(rank(FAILED, "the echo", at=5.0), rank(FAILED, "the cause", at=4.0), rank())
    assert outcomes(reports)["call"] == FAILED
    text = reports[1].longrepr
    assert text.splitlines() == [
        "the cause",
        "rank 1 failed first",
        "rank 0 failed later: the echo",
        "rank 2 did not fail",
    ]


def test_equal_failures_are_told_once(merge):
    reports = merge(rank(FAILED, "same"), rank(FAILED, "same"))
    assert reports[1].longrepr == "same"


def test_a_test_is_skipped_only_if_all_ranks_skip_it(merge):
    reports = merge(rank(SKIPPED, "because"), rank(SKIPPED, "because"))
    assert outcomes(reports)["call"] == SKIPPED
    assert reports[1].longrepr == (__file__, 1, "because")
    reports = merge(rank(), rank(SKIPPED, "because"))
    assert reports[1].longrepr.splitlines()[0] == (
        "ranks disagree about the outcome: rank 0 passed; rank 1 skipped (because)."
    )
    reports = merge(rank(setup=SKIPPED, text="a"), rank(setup=SKIPPED, text="a"))
    assert outcomes(reports) == {"setup": SKIPPED, "teardown": PASSED}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"status": -9}, "rank 0 was killed by signal 9 (SIGKILL) during call"),
        ({"status": -200}, "rank 0 was killed by signal 200 (unknown) during call"),
        ({"status": 3}, "rank 0 ended with exit status 3 (os._exit, or a crash) during call"),
        ({"escaped": "Exit: enough"}, "rank 0 left the test with Exit: enough during call"),
    ],
)
def test_a_dead_rank_leads_and_says_how_it_died(merge, changes, text):
    # Noticed a little after the others have failed of it.
    reports = merge(
        rank(None, ended_at=4.3, unreported={"stdout": "last words\n"}, **changes),
        rank(FAILED, "Connection closed by peer", at=4.0),
    )
    assert outcomes(reports) == {"setup": PASSED, "call": FAILED, "teardown": PASSED}
    assert reports[1].longrepr.splitlines() == [
        text,
        "rank 1 failed later: Connection closed by peer",
    ]
    assert ("Captured stdout call (rank 0)", "last words\n") in reports[1].sections


def test_a_deadline_shows_where_each_rank_is(merge):
    late = {"stopped": Stopped.AT_DEADLINE}
    reports = merge(
        rank(None, stacks="a.py:1 in f", **late),
        rank(None, stacks="a.py:1 in f", **late),
        rank(None, stacks="b.py:2 in g", **late),
        rank(),
    )
    assert reports[1].longrepr.splitlines() == [
        "ranks 0-2 did not finish within 7 s, and every rank was ended.",
        "ranks 0-1 are at (innermost frame first):",
        "    a.py:1 in f",
        "rank 2 is at (innermost frame first):",
        "    b.py:2 in g",
        "rank 3 had finished.",
    ]


def test_a_late_failure_is_an_error_of_teardown(merge):
    reports = merge(rank(), rank(teardown=FAILED, text="late"))
    assert outcomes(reports) == {"setup": PASSED, "call": PASSED, "teardown": FAILED}


def test_a_failed_setup_ends_the_test(merge):
    reports = merge(rank(), rank(setup=FAILED, text="no disk"))
    assert outcomes(reports) == {"setup": FAILED, "teardown": PASSED}


def test_output_of_every_rank_is_shown_and_folded(merge):
    title = "Captured stdout call"
    reports = merge(
        rank(FAILED, "x", sections=[(title, "same\n")]),
        rank(FAILED, "x", sections=[(title, "same\n")]),
        rank(FAILED, "x", sections=[(title, "other\n")]),
    )
    assert reports[1].sections == [
        (f"{title} (ranks 0-1)", "same\n"),
        (f"{title} (rank 2)", "other\n"),
    ]


@pytest.mark.parametrize(
    ("ranks", "name"), [([2], "rank 2"), ([0, 1, 2], "ranks 0-2"), ([0, 2, 3], "ranks 0, 2-3")]
)
def test_consecutive_ranks_are_named_as_a_range(ranks, name):
    assert name_ranks(ranks) == name


DUMP = """\
Stack (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 8 in wrapper
  File "/home/me/test_it.py", line 24 in test_hang
  File "/v/lib/python3.11/site-packages/_pytest/python.py", line 7 in pytest_pyfunc_call
  File "/v/lib/python3.11/site-packages/pluggy/_callers.py", line 6 in _multicall
  File "/v/bin/pytest", line 8 in <module>
"""


def test_stacks_show_user_code_first_and_none_of_pytest():
    assert show_stack(parse_dump(DUMP)) == (
        "/home/me/test_it.py:24 in test_hang",
        "inside barrier (/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:9)",
    )
    assert show_stack(parse_dump("")) == ()


def test_a_lost_rank_leads_whatever_the_others_say(merge):
    was, were = (f"on host1 {verb} lost: nothing was heard for 15 s" for verb in ("was", "were"))
    lost = {"lost": Loss(of_one=was, of_several=were)}
    failed = rank(FAILED, "Connection closed by peer", at=1.0)
    reports = merge(failed, ([], lost))
    assert [report.when for report in reports] == ["setup", "call", "teardown"]
    assert reports[1].failed
    assert reports[1].longrepr.startswith(f"rank 1 {was}\nrank 0 failed later: Connection closed")
    assert merge(failed, ([], lost), ([], lost))[1].longrepr.startswith(f"ranks 1-2 {were}\n")


def test_a_result_moves_onto_another_clock():
    result = RankResult(
        rank=3,
        reports=(
            PhaseReport(report={"when": "setup", "start": 1.0, "stop": 2.0}, made_at=3.0),
            PhaseReport(report={"when": "call", "start": None}, made_at=4.0),
        ),
        status=-9,
        ended_at=5.0,
        stopped=Stopped.AT_DEADLINE,
    )
    assert result.shifted(0.0) == result
    late = result.shifted(100.0)
    assert late.reports == (
        PhaseReport(report={"when": "setup", "start": 101.0, "stop": 102.0}, made_at=103.0),
        PhaseReport(report={"when": "call", "start": None}, made_at=104.0),
    )
    assert late.ended_at == 105.0
    assert (late.rank, late.status, late.stopped) == (3, -9, Stopped.AT_DEADLINE)
