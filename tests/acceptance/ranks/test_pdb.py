"""Debuggers on a chosen rank, driven through a pseudo-terminal as by a user."""

import re
import sys
import time

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

pexpect = pytest.importorskip("pexpect")

PROMPT = r"\(Pdb\) "
SOURCE = """
import os
import time
import pytest
import torch
import torch.distributed as dist

@pytest.mark.distributed(world_size=3)
def test_failing(dist_info):
    print("printed by", dist_info.rank)
    word = "hidden " + str(dist_info.rank)
    dist.barrier()
    assert dist_info.rank > 5, word

@pytest.mark.distributed(world_size=2)
def test_after():
    pass
"""
BREAKPOINT = """
@pytest.mark.distributed(world_size=3, timeout_s={timeout_s})
def test_breakpoint{number}(dist_info):
    print("printed by", dist_info.rank)
    {breakpoint}
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3
"""


def source(*breakpoints, timeout_s=60):
    tests = [
        BREAKPOINT.format(breakpoint=line, number=number or "", timeout_s=timeout_s)
        for number, line in enumerate(breakpoints or ["breakpoint()"])
    ]
    # Before the last test.
    first, mark, last = SOURCE.rpartition("@pytest.mark.distributed")
    return "".join([first, *tests, "\n", mark, last])


@pytest.fixture
def spawn(pytester):
    children = []

    def spawn(arguments, *, breakpoints=(), timeout_s=60):
        pytester.makepyfile(test_it=source(*breakpoints, timeout_s=timeout_s))
        child = pytester.spawn_pytest(
            f"-p no:cacheprovider {arguments}", expect_timeout=extend_under_load(60)
        )
        children.append(child)
        return child

    yield spawn
    for child in children:
        child.close(force=True)


def evaluated(child, expression):
    child.sendline(f"print('<' + str({expression}) + '>')")
    # The terminal echoes the command, too.
    child.expect(r"<((?:(?!' \+).)*)>\r?\n")
    value = child.match[1].decode()
    child.expect(PROMPT)
    return value


def interrupt(child):
    # Python's input misses a signal that comes between the prompt and its wait for a key.
    for _ in range(12):
        child.sendintr()
        if child.expect(["KeyboardInterrupt", pexpect.TIMEOUT], timeout=extend_under_load(5)) == 0:
            return
    pytest.fail("Ctrl-C was not heard")


def rest(child):
    child.expect(pexpect.EOF)
    child.wait()
    return child.before.decode()


def test_pdb_debugs_only_the_chosen_rank(spawn):
    child = spawn("--pdb --pdb-rank 1 -k 'failing or after'")
    child.expect("entering PDB")
    shown = child.before.decode()
    assert "AssertionError: hidden 1" in shown
    assert "printed by 1" in shown
    child.expect(PROMPT)
    # Longer than the others' time after a failure.
    time.sleep(extend_under_load(2))
    assert evaluated(child, "word") == "hidden 1"
    child.sendline("c")
    shown = rest(child)
    assert "1 failed, 1 passed, 1 deselected" in shown
    assert "Pdb" not in shown, "no other rank debugs"


def test_breakpoint_suspends_the_deadline(spawn):
    ways = ("breakpoint()", "import pdb; pdb.set_trace()", "pytest.set_trace()")
    limit_s = extend_under_load(6)
    child = spawn("--pdb-rank 1 -k breakpoint", breakpoints=ways, timeout_s=limit_s)
    for _ in ways:
        child.expect("PDB set_trace")
        child.expect(PROMPT)
        assert evaluated(child, "dist_info.rank") == "1"
        # Beyond the test's deadline; the others are in the collective.
        time.sleep(limit_s + 1)
        assert evaluated(child, "'total' in locals()") == "False"
        # From Python 3.13 on, a debugger stops at the line that calls it, and not after it.
        for _ in range(2 if sys.version_info >= (3, 13) else 1):
            child.sendline("n")
            child.expect(PROMPT)
        assert "all_reduce" in child.before.decode()
        child.sendline("c")
        child.expect("PDB continue")
    shown = rest(child)
    assert "3 passed, 2 deselected" in shown, "the others say nothing of their breakpoints"
    assert "Pdb" not in shown


def test_ctrl_c_stays_in_the_debugger(spawn):
    child = spawn("-k 'breakpoint or after'")
    child.expect(PROMPT)
    interrupt(child)
    child.expect(PROMPT)
    child.sendline("c")
    assert "2 passed, 1 deselected" in rest(child)


@pytest.mark.release
def test_trace_debugs_the_chosen_rank(spawn):
    child = spawn("--trace --pdb-rank 1 -k after")
    child.expect(PROMPT)
    assert evaluated(child, "os.environ['RANK']") == "1"
    child.sendline("c")
    assert "1 passed, 2 deselected" in rest(child)


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        pytest.param("--pdb -k 'failing or after'", "1 failed, 1 deselected", id="post_mortem"),
        pytest.param(
            "-k 'breakpoint or after'", "1 deselected", id="breakpoint", marks=pytest.mark.release
        ),
    ],
)
def test_quitting_ends_the_session(spawn, arguments, outcome):
    child = spawn(arguments)
    child.expect(PROMPT)
    child.sendline("q")
    shown = rest(child)
    assert "Exit: rank 0: Quitting debugger" in shown
    assert re.search(rf"= {outcome} in", re.sub(r"\x1b\[\d*m", "", shown)), shown
    assert child.exitstatus == pytest.ExitCode.INTERRUPTED


@pytest.mark.release
def test_rank_that_dies_in_pdb_fails_only_its_test(spawn):
    child = spawn("-k 'breakpoint or after'")
    child.expect(PROMPT)
    child.sendline("os._exit(7)")
    shown = rest(child)
    assert "rank 0 exited with status 7" in shown
    assert "1 failed, 1 passed, 1 deselected" in shown


@pytest.mark.release
def test_a_breakpoint_works_in_a_spawned_rank(spawn):
    child = spawn("--pdb-rank 1 -k breakpoint -o fsdp_comm_start=spawn")
    child.expect("ranks are new processes")
    child.expect("PDB set_trace")
    assert "so forking is not safe" not in child.before.decode()
    child.expect(PROMPT)
    assert evaluated(child, "dist_info.rank") == "1"
    child.sendline("c")
    assert "1 passed, 2 deselected" in rest(child)


def test_without_a_terminal_the_debugger_reads_the_end(pytester):
    pytester.makepyfile(test_it=source())
    result = pytester.runpytest_subprocess("-k", "breakpoint or after", "-p", "no:cacheprovider")
    # As without this plugin.
    result.assert_outcomes(failed=1, passed=1, deselected=1)
    assert "FAILED test_it.py::test_breakpoint - rank 0: bdb.BdbQuit" in result.stdout.str()


@pytest.mark.parametrize("argument", ["-1", "first", "2.5"])
def test_a_pdb_rank_that_is_no_rank_is_refused(pytester, argument):
    result = pytester.runpytest_subprocess(f"--pdb-rank={argument}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"--pdb-rank: expected a rank, 0 or greater, got {argument!r}" in result.stderr.str()


def test_pdb_rank_outside_the_test_is_an_error(pytester):
    pytester.makepyfile(test_it=source())
    result = pytester.runpytest_subprocess("--pdb", "--pdb-rank=2", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "test_it.py::test_after: @pytest.mark.distributed: --pdb-rank 2 is not a rank of this "
        "test, which runs on ranks 0-1: choose one of these, or select other tests"
    ) in result.stderr.str()
    assert "test_failing" not in result.stderr.str()


def test_debugging_under_xdist_is_refused(pytester):
    pytest.importorskip("xdist")
    pytester.makepyfile(test_it=source())
    result = pytester.runpytest_subprocess("-n", "2", "--pdb-rank", "1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "--pdb-rank is incompatible with distributing tests; try using -n0 or -nno"
    ) in result.stderr.str()
    result = pytester.runpytest_subprocess("-n", "2", "-k", "breakpoint", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    assert (
        "a debugger needs a terminal, which pytest-xdist workers do not have; run this test "
        "with -n 0"
    ) in result.stdout.str()
