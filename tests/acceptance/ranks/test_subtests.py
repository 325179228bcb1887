"""Subtests on ranks end, look and count as without ranks, with the ranks named."""

import re
import xml.etree.ElementTree as ET

import pytest
from running import UNSAFE_TO_FORK, stories

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

SOURCE = """
import unittest
import pytest

class Strange:
    def __repr__(self):
        return "<strange>"

@{marker}
def test_mixed(subtests):
    print("before")
    with subtests.test("ok", i=1):
        print("inside")
    with subtests.test("bad", i=(1, 2), s="x", strange=Strange()):
        assert 0, "no"
    with subtests.test(msg="skipped"):
        pytest.skip("later")
    with subtests.test(msg="expected"):
        pytest.xfail("known")
    with subtests.test("bad", i=(1, 2), s="x", strange=Strange()):
        print("inside bad")
        assert 0, "no"
    with subtests.test():
        assert [1] == [2]
    print("after")

@{marker}
def test_passing(subtests):
    for i in range(3):
        with subtests.test(i=i):
            pass

@{marker}
def test_passing_then_failing(subtests):
    with subtests.test("fine"):
        pass
    assert False, "the test itself"

@{marker}
class TestUnittest(unittest.TestCase):
    def test_failing(self):
        for i in range(3):
            with self.subTest("m", i=i):
                self.assertEqual(i, 1)

    def test_passing(self):
        with self.subTest(i=1):
            pass

@{marker}
def test_last():
    pass
"""
MARKER = "pytest.mark.distributed(world_size=2{})"
SUMMARY = "=========================== short test summary info ============================"


def is_builtin():
    return pytest.version_tuple >= (9,)


def shape(path):
    """What a JUnit file says of each test, without the names of ranks and their sections."""
    root = ET.parse(path).getroot()  # noqa: S314  # our own file
    cases = {}
    for case in root.iter("testcase"):
        found = [
            (part.tag, re.sub(r"^ranks? [\d, -]+: ", "", part.get("message") or ""))
            for part in case
            if part.tag not in {"system-out", "system-err", "properties"}
        ]
        cases.setdefault((case.get("classname"), case.get("name")), []).append(found)
    suite = root.find("testsuite")
    return cases, {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}


def lines_of(result):
    """The verbose lines of each outcome, in order, and those of the short summary.

    Without ranks pytest captures the lines of ``subTest`` with the test's own output.
    """
    verbose = [line for line in result.outlines if line.startswith("test_it.py::test_")]
    summary = result.outlines[result.outlines.index(SUMMARY) + 1 : -1]
    return (
        [re.sub(r" +\[ *\d+%\]$", "", line) for line in verbose],
        sorted(re.sub(r" - .*$", "", line) for line in summary),
    )


@pytest.mark.skipif(not is_builtin(), reason="pytest 9 has subtests")
@pytest.mark.parametrize(
    ("marker", "conftest", "arguments"),
    [
        (MARKER.format(""), "", ()),
        (MARKER.format(", scope='module'"), "", ()),
        pytest.param(MARKER.format(""), UNSAFE_TO_FORK, ("-k", "mixed"), marks=pytest.mark.release),
        (MARKER.format(""), "", ("-n", "2")),
    ],
    ids=["forked", "kept", "spawned", "xdist"],
)
def test_subtests_end_as_without_ranks(pytester, marker, conftest, arguments):
    pytester.makeini("[pytest]\nmarkers = plain")
    pytester.makeconftest(conftest)
    told = []
    for mark in ("pytest.mark.plain", marker):
        pytester.makepyfile(test_it=SOURCE.format(marker=mark))
        result = pytester.runpytest_subprocess(
            "-p", "no:cacheprovider", "-rA", "-v", "--junitxml=junit.xml", *arguments
        )
        lines, summary = lines_of(result)
        if "-n" in arguments:
            lines = []  # in the order of two workers
        told.append(
            (result.parseoutcomes(), result.ret, lines, summary, shape(pytester.path / "junit.xml"))
        )
    plain, ours = told
    assert plain[0]["failed"] >= 4, "the test itself is wrong"
    for expected, found in zip(plain, ours, strict=True):
        assert found == expected


DIFFERENT = """
import time
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=3, timeout_s=60)

def test_one_rank_fails(subtests, dist_info):
    print("outside of", dist_info.rank)
    for i in range(2):
        with subtests.test("layer", i=i):
            print("inside of", dist_info.rank)
            assert dist_info.rank != 1 or i == 0, "rank one is out"
    time.sleep(1.5)  # longer than the others have after a failure
    dist.barrier()

def test_one_rank_alone(subtests, dist_info):
    if dist_info.rank == 2:
        with subtests.test("alone"):
            assert False, "only here"

def test_one_rank_alone_and_well(subtests, dist_info):
    with subtests.test(rank=dist_info.rank):
        pass

def test_two_outcomes(subtests, dist_info):
    with subtests.test("picky"):
        if dist_info.rank == 0:
            pytest.skip("not me")

def test_dies_in_a_subtest(subtests, dist_info):
    with subtests.test("first"):
        assert dist_info.rank != 1, "before the end"
    print("between")
    with subtests.test("second"):
        print("last words")
        if dist_info.rank == 0:
            import os, signal
            os.kill(os.getpid(), signal.SIGSEGV)
        assert False, "after a failure"

def test_dies_alone_in_a_subtest(subtests, dist_info):
    for name in ("before", "within", "after"):
        with subtests.test(name):
            if dist_info.rank == 1 and name == "within":
                import os
                os._exit(3)
"""


def story(result, title):
    (found,) = stories(result.stdout.str(), title)
    return found


@pytest.mark.skipif(not is_builtin(), reason="pytest 9 has subtests")
def test_ranks_that_differ_are_named(pytester):
    pytester.makepyfile(test_it=DIFFERENT)
    result = pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "-v", timeout=extend_under_load(100)
    )
    assert result.parseoutcomes() == {"failed": 9, "passed": 2, "subtests": 5}

    failed = story(result, "test_one_rank_fails [layer] (i=1)")
    assert "AssertionError: rank one is out" in failed
    assert "rank 1 failed\nranks 0, 2 did not fail" in failed
    assert "Captured stdout call (rank 1) -----" in failed
    assert "inside of 1" in failed
    assert "outside of 1" not in failed
    whole = story(result, "test_one_rank_fails")
    assert "contains 1 failed subtest\nrank 1 failed\nranks 0, 2 did not fail" in whole
    assert "still running" not in whole
    assert "outside of 2" in whole
    assert "inside of" not in whole
    alone = story(result, "test_one_rank_alone [alone]")
    assert "rank 2 failed\nranks 0-1 did not finish this subtest" in alone
    picky = story(result, "test_two_outcomes [picky]")
    assert "Ranks disagree about the outcome: rank 0 skipped (not me); ranks 1-2 passed." in picky
    death = story(result, "test_dies_in_a_subtest")
    assert "rank 0 was killed by signal 11 (SIGSEGV) during call" in death
    assert "last words" in death
    assert "between" in death
    assert "Fatal Python error: Segmentation fault" in death
    second = story(result, "test_dies_in_a_subtest [second]")
    assert "ranks 1-2 failed\nrank 0 did not finish this subtest" in second
    # Whether the others passed what the dead rank did not end says nothing.
    assert "SUBPASSED[before]" in result.stdout.str()
    assert "SUBPASSED[within]" not in result.stdout.str()
    assert "SUBPASSED[after]" not in result.stdout.str()


EXTRA = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if "extra" in item.name:
        for when, outcome in {extra}:
            report = pytest.TestReport(
                item.nodeid, item.location, {{}}, outcome, "told by a plugin", when
            )
            item.ihook.pytest_runtest_logreport(report=report)
"""


@pytest.fixture
def extra(pytester):
    """A project with a plugin that reports more of one of two tests."""
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.distributed(world_size=2)

        def test_extra():
            pass

        def test_other():
            pass
        """
    )
    return lambda reports: pytester.makeconftest(EXTRA.format(extra=reports))


@pytest.mark.parametrize("when", ["setup", "call", "teardown", "check"])
def test_a_failure_that_a_plugin_reports_counts(pytester, extra, when):
    extra([(when, "failed"), (when, "passed")])
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*test_other PASSED*", "told by a plugin"])
    outcomes = result.parseoutcomes()
    assert outcomes.get("failed", 0) + outcomes.get("errors", 0) == 1


def test_additional_passed_reports_change_nothing(pytester, extra):
    extra([("setup", "passed"), ("call", "passed"), ("check", "skipped"), ("check", "passed")])
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.OK


def test_pytest_subtests_reports_each_subtest_by_rank(pytester):
    pytest.importorskip("pytest_subtests")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.distributed(world_size=2)
        def test_it(subtests, dist_info):
            with subtests.test("a", i=1):
                assert dist_info.rank == 0
        """
    )
    result = pytester.runpytest_subprocess("-v")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*[[]a[]] (i=1)*", "*rank 1 failed*"])
