"""Many ranks' reports become those of one test: a table, without any rank."""

import pytest

from pytest_fsdp_comm.ranks.hangs.stacks import parse_dump, show_stack
from pytest_fsdp_comm.ranks.session.verdict import merge_reports
from pytest_fsdp_comm.ranks.wire.results import (
    Activity,
    GroupPosition,
    IssuedCollective,
    PhaseReport,
    Position,
    RankResult,
    SessionExit,
    Stopped,
)
from pytest_fsdp_comm.snapshots.failed_comparison import reason_of

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
            reports = tuple(PhaseReport(report={"phase": phase}) for phase in phases)
            results[rank] = RankResult(rank=rank, reports=reports, payloads=(), **changes)
        return merge_reports(item, results, load, limit="7 s")

    return run


def rank(call=PASSED, text="", at=1.0, *, setup=PASSED, teardown=PASSED, sections=(), **changes):
    if setup is None:
        return [], changes
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


def lines(reports):
    return reports[1].longrepr.splitlines()


@pytest.mark.parametrize(
    ("setup", "teardown", "merged"),
    [
        (PASSED, PASSED, {"setup": PASSED, "call": PASSED, "teardown": PASSED}),
        (PASSED, FAILED, {"setup": PASSED, "call": PASSED, "teardown": FAILED}),
        (FAILED, PASSED, {"setup": FAILED, "teardown": PASSED}),
    ],
)
def test_the_phase_fails_in_which_a_rank_fails(merge, setup, teardown, merged):
    reports = merge(rank(), rank(setup=setup, teardown=teardown, text="no disk"))
    assert outcomes(reports) == merged


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            [rank(FAILED, "the echo", at=5.0), rank(FAILED, "the cause", at=4.0), rank()],
            [
                "the cause",
                "rank 1 failed first",
                "rank 0 failed later: the echo",
                "rank 2 did not fail",
            ],
        ),
        ([rank(FAILED, "same"), rank(FAILED, "same")], ["same"]),
        # An echo may have been noticed before.
        (
            [rank(FAILED, "assert 0", at=4.0), rank(FAILED, "Connection closed by peer", at=3.0)],
            ["assert 0", "rank 0 failed", "rank 1 failed: Connection closed by peer"],
        ),
        (
            [rank(FAILED, "x"), rank(SKIPPED, "Skipped: on"), rank()],
            ["x", "rank 0 failed", "rank 1 skipped the test (on)", "rank 2 did not fail"],
        ),
    ],
)
def test_the_first_failure_leads_and_the_others_follow(merge, ranks, text):
    reports = merge(*ranks)
    assert outcomes(reports)["call"] == FAILED
    assert lines(reports) == text


def test_a_test_is_skipped_only_if_all_ranks_skip_it(merge):
    reports = merge(rank(SKIPPED, "because"), rank(SKIPPED, "because"))
    assert outcomes(reports)["call"] == SKIPPED
    assert reports[1].longrepr == (__file__, 1, "because")
    reports = merge(rank(), rank(SKIPPED, "because"))
    assert reports[1].longrepr.splitlines()[0] == (
        "Ranks disagree about the outcome: rank 0 passed; rank 1 skipped (because)."
    )


def test_all_ranks_that_skip_in_setup_skip_the_test(merge):
    reports = merge(rank(setup=SKIPPED, text="a"), rank(setup=SKIPPED, text="a"))
    assert outcomes(reports) == {"setup": SKIPPED, "teardown": PASSED}


def test_skips_with_different_reasons_agree(merge):
    reports = merge(rank(SKIPPED, "Skipped: a"), rank(setup=SKIPPED, text="Skipped: b"))
    assert outcomes(reports) == {"setup": PASSED, "call": SKIPPED, "teardown": PASSED}
    assert reports[1].longrepr[2] == "Skipped: a"


def test_skip_in_teardown_is_not_a_skipped_test(merge):
    for other in (rank(SKIPPED, "same"), rank(setup=SKIPPED, text="same"), rank()):
        reports = merge(other, rank(teardown=SKIPPED, text="same"))
        assert outcomes(reports)["call"] == FAILED
        assert "rank 1 skipped in teardown (same)." in reports[1].longrepr
    reports = merge(rank(teardown=SKIPPED, text="a"), rank(teardown=SKIPPED, text="b"))
    assert outcomes(reports) == {"setup": PASSED, "call": PASSED, "teardown": SKIPPED}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"status": -9},
            "rank 0 was killed by signal 9 (SIGKILL) during call, perhaps because memory ran out "
            "(see dmesg)",
        ),
        ({"status": -15}, "rank 0 was killed by signal 15 (SIGTERM) during call"),
        ({"status": -200}, "rank 0 was killed by signal 200 (unknown) during call"),
        ({"status": 3}, "rank 0 exited with status 3 (os._exit, or a crash) during call"),
        ({"escaped": "Odd: enough"}, "rank 0 left the test with Odd: enough during call"),
    ],
)
def test_a_dead_rank_leads_and_says_how_it_died(merge, changes, text):
    # Noticed a little after the others have failed of it.
    reports = merge(
        rank(None, ended_at=4.3, unreported={"stdout": "last words\n"}, **changes),
        rank(FAILED, "Connection closed by peer", at=4.0),
    )
    assert outcomes(reports) == {"setup": PASSED, "call": FAILED, "teardown": PASSED}
    assert lines(reports) == [text, "rank 1 failed later: Connection closed by peer"]
    assert ("Captured stdout call (rank 0)", "last words\n") in reports[1].sections


@pytest.mark.parametrize(
    ("death", "says"),
    [
        ({"status": -11}, "was killed by signal 11 (SIGSEGV)"),
        ({"escaped": "GeneratorExit"}, "left the test with GeneratorExit"),
    ],
)
def test_failure_before_a_death_leads(merge, death, says):
    dead = rank(None, ended_at=4.4, **death)
    echo = rank(FAILED, "Connection closed by peer", at=3.9)
    assert lines(merge(rank(FAILED, "assert 0", at=4.0), dead, echo)) == [
        "assert 0",
        "rank 0 failed",
        f"rank 1 {says} during call",
        "rank 2 failed: Connection closed by peer",
    ]
    assert lines(merge(rank(FAILED, "assert 0", at=4.5), dead, echo))[0].endswith("during call")


def test_teardown_report_omits_ranks_that_died_before(merge):
    dead = rank(None, status=3, ended_at=1.0)
    late = rank(teardown=FAILED, text="late")
    assert merge(late, dead, rank())[-1].longrepr == "late\nrank 0 failed\nrank 2 did not fail"
    # Nobody else came to it.
    assert merge(late, dead)[-1].longrepr == "late\nrank 0 failed"
    # One that died in it did.
    dead = (rank()[0][:2], {"status": 3, "ended_at": 2.0})
    assert "rank 1 exited with status 3" in merge(late, dead)[-1].longrepr


EXIT = SessionExit(status=2, reason="enough")


@pytest.mark.parametrize(
    ("others", "merged"),
    [
        ([rank()], {"setup": PASSED}),
        ([rank(SKIPPED, "because")], {"setup": PASSED}),
        ([rank(None, stopped=Stopped.AFTER_FAILURE)], {"setup": PASSED}),
        ([rank(FAILED, "Connection closed by peer")], {"setup": PASSED}),
        ([rank(FAILED, "assert 0")], {"setup": PASSED, "call": FAILED}),
        ([rank(None, status=-9, ended_at=1.0)], {"setup": PASSED, "call": FAILED}),
    ],
)
def test_exit_leaves_out_what_it_cut_short(merge, others, merged):
    exited = rank(None, session_exit=EXIT, ended_at=1.0)
    assert outcomes(merge(exited, *others)) == merged
    # In the teardown, the call has its report.
    late = ([*rank()[0][:2]], {"session_exit": EXIT, "ended_at": 1.0})
    assert outcomes(merge(late, rank())) == {"setup": PASSED, "call": PASSED}


@pytest.mark.parametrize(
    "unfinished",
    [
        {"stopped": Stopped.AT_DEADLINE},
        {"stopped": Stopped.AFTER_FAILURE},
        {"status": -9},
        {"escaped": "Odd"},
        {"status": "was lost"},
    ],
)
def test_unfinished_phase_lasts_until_the_rank_ended(merge, unfinished):
    times = {"phase_began_at": 2.0, "ended_at": 8.0}
    failed = rank(FAILED, "assert 0", at=3.0)
    for others in ([], [rank()], [failed]) if "after" not in str(unfinished) else ([failed],):
        reports = merge(rank(None, **unfinished, **times), *others)
        assert [one.duration for one in reports if one.when == "call"] == [6.0]
        assert all(one.duration == 0 for one in reports if one.when != "call")


def silent_at(site):
    """Where a rank is that does not answer, but has dumped its stack."""
    return Position(site="", stack=(site,), activity=Activity.SILENT)


def test_a_deadline_shows_where_each_rank_is(merge):
    late = {"stopped": Stopped.AT_DEADLINE}
    reports = merge(
        rank(None, position=silent_at("a.py:1 in f"), **late),
        rank(None, position=silent_at("a.py:1 in f"), **late),
        rank(None, position=silent_at("b.py:2 in g"), **late),
        rank(),
    )
    assert reports[1].longrepr.splitlines() == [
        "ranks 0-2 did not finish within 7 s; all ranks were stopped.",
        "ranks 0-1 are at (innermost frame first):",
        "    a.py:1 in f",
        "rank 2 is at (innermost frame first):",
        "    b.py:2 in g",
        "rank 3 had finished.",
    ]


STARTING = {
    "is_starting": True,
    "phase_began_at": 2.0,
    "ended_at": 302.0,
    "position": Position(site="", stack=("c.py:3 in <module>",), activity=Activity.STARTS),
}


def test_rank_that_never_began_leads_at_the_deadline(merge):
    waiting = {"stopped": Stopped.AT_DEADLINE, "position": Position(site="", stack=("wait",))}
    report = merge(
        rank(None, **waiting),
        rank(None, setup=None, stopped=Stopped.AT_DEADLINE, **STARTING),
    )[0]
    assert report.longrepr.splitlines() == [
        "rank 1 did not begin the test within 300 s; all ranks were stopped.",
        "rank 1 is still importing or collecting, at (innermost frame first):",
        "    c.py:3 in <module>",
        "rank 0 is at (innermost frame first):",
        "    wait",
        "rank 0 had not finished.",
    ]


def test_rank_that_dies_while_others_start(merge):
    starting = rank(None, setup=None, stopped=Stopped.AFTER_FAILURE, **STARTING)
    died = rank(None, setup=None, status=4, is_starting=True)
    assert merge(starting, died)[0].longrepr.splitlines() == [
        "rank 1 exited with status 4 (os._exit, or a crash) before it began the test",
        "rank 0 was still importing or collecting when the test was stopped, at:",
        "    c.py:3 in <module>",
    ]


def waits_at(site, seq):
    """Where a rank is that waits in a barrier; that has not come to it without a number."""
    one = IssuedCollective(seq=seq, kind="barrier", nbytes=0, is_done=False, is_waited_in=True)
    group = GroupPosition(
        name="0", axis="dp", is_shape=False, ranks=(0, 1), collectives=(one,) if seq else ()
    )
    return Position(site=site, groups=(group,))


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        # Rank 1 has not come to the barrier; it has finished the test; nobody waits.
        ([waits_at("a.py:1 in f", 1), waits_at("b c.py:2 in g", 0)], "b c.py:2"),
        ([waits_at("a.py:1 in f", 1), None], "a.py:1"),
        ([Position(site="a.py:1 in f", stack=("a.py:1 in f: x()",)), None], "a.py:1"),
        ([Position(site=""), None], ""),
    ],
)
def test_hang_is_at_the_first_place_that_is_named(merge, ranks, place):
    late = {"stopped": Stopped.AT_DEADLINE}
    hung = merge(*(rank(None, position=at, **late) if at else rank() for at in ranks))[1]
    assert (hung.comm_hangs_at, reason_of(hung).count("\n") > 1) == (place, bool(place))


def test_ranks_that_fail_or_die_hang_nowhere(merge):
    at = waits_at("a.py:1 in f", 1)
    for other in (rank(FAILED, "why"), rank(None, status=1)):
        stopped = rank(None, position=at, stopped=Stopped.AFTER_FAILURE)
        assert not getattr(merge(other, stopped)[1], "comm_hangs_at", "")


def test_stranded_ranks_name_those_they_waited_for(merge):
    stopped = {"stopped": Stopped.AT_DEADLINE, "position": silent_at("a.py:1 in f")}
    stranded = rank(None, waited_for=(1, 3), **stopped)
    skipped = rank(SKIPPED, "Skipped: only me")
    assert lines(merge(rank(None, **stopped), skipped, stranded, rank(), stranded)) == [
        "ranks 2, 4 waited for rank 1, which had already skipped the test (only me) and rank 3, "
        "which had already finished the test; all ranks were stopped.",
        "rank 1 skipped the test (only me)",
        "ranks 0, 2, 4 are at (innermost frame first):",
        "    a.py:1 in f",
        "ranks 1, 3 had finished.",
        "rank 0 had not finished.",
    ]


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


DUMP = """\
Stack (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 8 in wrapper
  File "/home/me/test_it.py", line 24 in test_hang
  File "/v/lib/python3.11/site-packages/_pytest/python.py", line 7 in pytest_pyfunc_call
  File "/v/lib/python3.11/site-packages/pluggy/_callers.py", line 6 in _multicall
  File "/v/bin/pytest", line 8 in <module>
"""


def test_stacks_omit_pytest_and_start_with_user_code():
    assert show_stack(parse_dump(DUMP)) == (
        "/home/me/test_it.py:24 in test_hang",
        "inside barrier (/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:9)",
    )
    assert show_stack(parse_dump("")) == ()


def test_a_lost_rank_leads_whatever_the_others_report(merge):
    was, were = (f"{verb} lost on host1: nothing was heard for 15 s" for verb in ("was", "were"))
    lost = {"status": was}
    failed = rank(FAILED, "Connection closed by peer", at=1.0)
    reports = merge(failed, ([], lost))
    assert [report.when for report in reports] == ["setup", "call", "teardown"]
    assert reports[1].failed
    assert reports[1].longrepr.startswith(f"rank 1 {was}\nrank 0 failed later: Connection closed")
    assert merge(failed, ([], lost), ([], lost))[1].longrepr.startswith(f"ranks 1-2 {were}\n")


CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
UNCAUGHT = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  op.preamble.length <= op.nbytes. 8 vs 4.
Fatal Python error: Aborted
"""


def reduced(numel):
    """Where a rank is that has called an all-reduce."""
    issued = IssuedCollective(
        seq=1,
        kind="all_reduce",
        nbytes=4 * numel,
        sent=f"{numel} float32",
        is_done=False,
        is_last=True,
    )
    group = GroupPosition(
        name="0", axis="dp", is_shape=False, ranks=(0, 1, 2), collectives=(issued,)
    )
    return {"position": Position(site="a.py:1 in f", stack=("a.py:1 in f",), groups=(group,))}


ABORTED = {"status": -6, "ended_at": 4.3, "unreported": {"stderr": UNCAUGHT}}
WHY = ": gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 8 vs 4."
MISMATCH = (
    "rank 2 called all_reduce of 8 float32, ranks 0-1 of 4 float32: mismatch in #1 of dp at "
    "a.py:1 in f"
)


def test_mismatch_comes_before_an_aborted_rank(merge):
    ranks = [
        rank(None, **ABORTED, **reduced(4)),
        rank(FAILED, CLOSED, at=4.1, **reduced(4)),
        rank(None, stopped=Stopped.AFTER_FAILURE, **reduced(8)),
    ]
    aborted = f"rank 0 was killed by signal 6 (SIGABRT) during call{WHY}"
    assert lines(merge(*ranks))[:3] == [MISMATCH, aborted, f"rank 1 failed later: {CLOSED}"]
    # A failure of its own may have been the cause.
    ranks[1] = rank(FAILED, "assert 1 == 2", at=4.1, **reduced(4))
    assert lines(merge(*ranks))[0] == "assert 1 == 2"
    assert MISMATCH not in lines(merge(*ranks))


def test_mismatch_comes_before_a_backend_error(merge):
    raised = f"Traceback of a rank\n{CLOSED}"
    ranks = [
        rank(FAILED, raised, at=2.0, **reduced(4)),
        rank(FAILED, raised, at=1.0, **reduced(4)),
        rank(**reduced(8)),
    ]
    found = merge(*ranks)
    assert lines(found) == [
        MISMATCH,
        f"ranks 0-1 failed: {CLOSED}",
        "rank 2 did not fail",
        *raised.splitlines(),
    ]
    assert found[1].when == "call"
    # Where all sent the same, the connection broke of something else.
    ranks[2] = rank(**reduced(4))
    assert lines(merge(*ranks))[0] == "Traceback of a rank"
    assert not any(" called " in line for line in lines(merge(*ranks)))


@pytest.mark.parametrize(
    "died",
    [
        {"status": -9, "ended_at": 3.0},
        {"status": 3, "ended_at": 3.0},
        # `os.abort()`: no last words.
        {"status": -6, "ended_at": 3.0},
        {"escaped": "Odd: enough", "ended_at": 3.0},
        {"status": "was lost"},
        # Later than what others say of it.
        {"status": -9, "ended_at": 9.0},
    ],
)
def test_mismatch_is_omitted_if_a_rank_was_killed(merge, died):
    failed = rank(FAILED, CLOSED, at=5.0, **reduced(4))
    reports = merge(failed, rank(None, **died), rank(FAILED, CLOSED, at=5.0, **reduced(8)))
    text = "\n".join(str(report.longrepr) for report in reports)
    assert CLOSED in text
    assert " called " not in text


def test_uncaught_exception_needs_an_aborted_process(merge):
    printed = {"unreported": {"stderr": UNCAUGHT}, "ended_at": 1.0}
    assert lines(merge(rank(None, status=-9, **printed)))[0] == (
        "rank 0 was killed by signal 9 (SIGKILL) during call, perhaps because memory ran out "
        "(see dmesg)"
    )
    assert lines(merge(rank(None, status=-6, **printed)))[0].endswith(f"(SIGABRT) during call{WHY}")
