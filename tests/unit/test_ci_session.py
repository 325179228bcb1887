"""Tests of CiSession: reported failures and their lines."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_fsdp_comm.ci_session import CiSession
from pytest_fsdp_comm.options import OPTIONS
from pytest_fsdp_comm.reports.ci.outcomes import Origin
from pytest_fsdp_comm.reports.ci.review import annotate, render_summary

GITHUB = {
    "GITHUB_ACTIONS": "true",
    "GITHUB_STEP_SUMMARY": "/runner/summary",
    "GITHUB_WORKSPACE": "/checkout",
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "o/r",
    "GITHUB_SHA": "abc",
}


def config(*, summary=None, artifacts=None, report=None):
    options = {"summary_file": summary, "artifacts_dir": artifacts, "report_dir": report}
    return SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin=lambda _: None),
        stash={OPTIONS: SimpleNamespace(**options)},
        rootpath=Path("/checkout/sub"),
        invocation_params=SimpleNamespace(dir=Path("/checkout/sub")),
    )


# A session inside a test must not write to the outer session's summary.
INNER = {**GITHUB, "PYTEST_CURRENT_TEST": "t.py::x (call)"}


@pytest.mark.parametrize("environment", [{}, INNER, {"GITHUB_ACTIONS": "false"}])
def test_outside_ci_nothing_is_reported(environment):
    session = CiSession(config(), environment)
    assert (session.summary, session.step_summary, session.annotates) == (None, None, False)


def test_github_and_summary_file_are_independent():
    session = CiSession(config(), GITHUB)
    assert (session.step_summary, session.summary) == (Path("/runner/summary"), None)
    assert session.annotates
    session = CiSession(config(summary=Path("s.md")), {"PYTEST_CURRENT_TEST": "x"})
    assert (session.step_summary, session.summary) == (None, Path("s.md"))
    assert not session.annotates


def report(when="call", outcome="failed", *, headline=None, keywords=("distributed",), path=None):
    crash = SimpleNamespace(path=path or "/checkout/sub/t.py", lineno=7, message="assert 1\nmore")
    test_report = SimpleNamespace(
        nodeid="t.py::x", when=when, outcome=outcome, failed=outcome == "failed",
        keywords=dict.fromkeys(keywords, 1), location=("t.py", 4, "x"),
        longrepr=SimpleNamespace(reprcrash=crash),
    )  # fmt: skip
    if headline is not None:
        test_report.comm_files = ["a.comm"]
    if headline:
        change = {"severity": "change", "text": headline}
        test_report.comm_failure = {"head": "differs", "statements": [change]}
    return test_report


def outcomes_of(*reports):
    session = CiSession(config(), GITHUB)
    for phase_report in reports:
        session.pytest_runtest_logreport(phase_report)
    state = SimpleNamespace(shouldfail="", shouldstop="")
    return session._make_outcomes(state, pytest.ExitCode.TESTS_FAILED)


@pytest.mark.parametrize(
    ("given", "report", "artifacts"),
    [
        ({}, "", ""),
        ({"report": Path("/checkout/sub/out"), "artifacts": Path("/x")}, "out/index.html", "/x"),
        ({"report": Path("/checkout/sub/report.html")}, "report.html", ""),
    ],
)
def test_saved_directories_are_reported_as_a_user_writes_them(given, report, artifacts):
    state = SimpleNamespace(shouldfail="", shouldstop="")
    outcomes = CiSession(config(**given), GITHUB)._make_outcomes(state, pytest.ExitCode.OK)
    assert (outcomes.report, outcomes.artifacts) == (report, artifacts)
    assert outcomes.directory == "sub"


def test_passing_rerun_removes_the_failure():
    again = [report("setup", "passed"), report(headline="a: +1")]
    assert len(outcomes_of(*again).failed) == 1
    rerun = [report("setup", "passed"), report(outcome="passed", headline="")]
    assert outcomes_of(*again, *rerun).failed == ()


def test_failed_comparison_replaces_earlier_failure():
    (failed,) = outcomes_of(report(), report("teardown")).failed
    assert (failed.reason, failed.failure) == ("assert 1", None)
    # The report of the test includes comparisons of its subtests.
    (failed,) = outcomes_of(report(), report(headline="a: +1")).failed
    assert failed.reason == "a: +1"


def test_other_tests_failures_are_not_reported():
    assert outcomes_of(report(keywords=())).failed == ()
    outcomes = outcomes_of(report(outcome="passed", headline="", keywords=()))
    assert (outcomes.compared_tests, outcomes.compared_files, outcomes.failed) == (1, 1, ())


def test_failure_outside_checkout_is_placed_at_test():
    (failed,) = outcomes_of(report(path="/checkout/.venv/lib/site-packages/torch/x.py")).failed
    assert (failed.location.path, failed.location.line) == ("sub/t.py", 5)
    (failed,) = outcomes_of(report(path="/elsewhere/x.py")).failed
    assert failed.location.path == "sub/t.py"
    (failed,) = outcomes_of(report()).failed
    assert (failed.location.path, failed.location.line) == ("sub/t.py", 7)


def test_call_sites_outside_checkout_are_dropped():
    sites = ("/usr/lib/x.py:9", "../../x.py:1", "src/train.py:7", "/checkout/lib.py:8")
    differing = report(headline="a: +1")
    differing.comm_failure["statements"][0]["sites"] = list(sites)
    (failed,) = outcomes_of(differing).failed
    annotations = [(place.path, place.line, text) for place, text in failed.sent]
    # A change has one annotation, whose text lists all lines.
    assert annotations == [("sub/src/train.py", 7, "a: +1")]


def test_worst_change_without_a_line_is_annotated_at_the_assertion():
    differing = report(headline="gradients are lost")
    minor = {"severity": "change", "text": "a: +1", "sites": ["src/train.py:7"]}
    differing.comm_failure["statements"].append(minor)
    (failed,) = outcomes_of(differing).failed
    annotations = [(place.path, text) for place, text in failed.sent]
    assert annotations == [
        ("sub/t.py", "gradients are lost, 1 more change"),
        ("sub/src/train.py", "a: +1"),
    ]


@pytest.mark.parametrize("site", ["src/train.py:7", "", "/usr/lib/x.py:9"])
def test_hang_is_annotated_where_a_rank_waits(site):
    hung = report()
    hung.comm_hangs_at, hung.longrepr = site, "[gw0] linux"
    hung.longreprtext = "[gw0] linux\nranks 0-1 did not finish\nall wait for rank 3\nb\nc\nd"
    (failed,) = outcomes_of(hung).failed
    lines = "ranks 0-1 did not finish\nall wait for rank 3\nb\nc"
    assert failed.reason == (lines if site else "ranks 0-1 did not finish")
    is_here = site.startswith("src")
    annotations = [(place.path, place.line, text) for place, text in failed.sent]
    assert annotations == [("sub/src/train.py", 7, lines)] * is_here
    outcomes = outcomes_of(hung)
    title = "::error file=sub/src/train.py,line=7,title=ranks 0-1 did not finish::ranks 0-1 did"
    annotations = [line[: len(title)] for line in annotate(outcomes) if "%0Aall wait for" in line]
    assert annotations == [title] * is_here
    summary = render_summary(outcomes, Origin())
    assert ("finish<br>all wait for rank 3<br>b<br>c |" in summary) == bool(site)


def test_early_session_end_is_reported():
    session = CiSession(config(), GITHUB)
    stopped = SimpleNamespace(shouldfail="stopping after 1 failures", shouldstop="")
    assert session._make_outcomes(stopped, pytest.ExitCode.TESTS_FAILED).ended_early == (
        "The session ended early (stopping after 1 failures): not all tests ran."
    )
    stopped = SimpleNamespace(shouldfail="", shouldstop="")
    ended = session._make_outcomes(stopped, pytest.ExitCode.INTERRUPTED).ended_early
    assert "(exit status 2)" in ended
