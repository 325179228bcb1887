"""What a test forks in a rank is not the rank, whatever it does."""

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

SOURCE = """
import multiprocessing, os, signal, sys, time
import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.distributed(world_size=2, timeout_s=60{more}),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

def fork(then):
    pid = os.fork()
    if pid == 0:
        then()
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def square(number):
    return number * number

def test_child_returns():
    pid = os.fork()
    if pid == 0:
        return
    assert ended(pid) == 0
    assert 0, "the parent goes on"

def test_child_returns_later():
    if (pid := os.fork()) == 0:
        time.sleep(0.5)
        return
    assert 0, "the parent goes on"

def test_child_fails():
    if (pid := os.fork()) == 0:
        raise LookupError("in the child")
    assert ended(pid) == 1

def test_child_exits():
    if (pid := os.fork()) == 0:
        sys.exit(7)
    assert ended(pid) == 7

@pytest.fixture
def forks(tmp_path):
    pid = os.fork()
    if pid:
        assert ended(pid) == 0
    yield pid
    if pid:
        (tmp_path / "torn down").touch(exist_ok=False)
        assert ended(os.fork() or os._exit(3)) == 3

def test_fixture_forks(forks, tmp_path):
    dist.barrier()

def test_child_compares(comm_mode, comm_snapshot, dist_info):
    with comm_mode:
        dist.all_reduce(torch.ones(1))
    if (pid := os.fork()) == 0:
        assert comm_mode == comm_snapshot
    assert ended(pid) == 1
    assert 0, "the parent goes on"

def test_children_of_multiprocessing():
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(square, [1, 2, 3]) == [1, 4, 9]
    process = context.Process(target=square, args=(2,))
    process.start()
    process.join()
    assert process.exitcode == 0

def test_after():
    dist.barrier()
"""


@pytest.mark.parametrize("more", ["", ", scope='module'"], ids=["forked", "kept"])
def test_a_forked_child_never_reports_for_its_rank(pytester, more):
    pytester.makepyfile(SOURCE.replace("{more}", more))
    arguments = ("-p", "no:cacheprovider", "-v", "-rA")
    result = pytester.runpytest_subprocess(*arguments, timeout=extend_under_load(300))
    result.assert_outcomes(passed=5, failed=3)
    result.stdout.fnmatch_lines(
        [
            "*::test_child_returns FAILED*",
            "*::test_child_returns_later FAILED*",
            "*::test_child_fails PASSED*",
            "*::test_child_exits PASSED*",
            "*::test_fixture_forks PASSED*",
            "*::test_child_compares FAILED*",
            "*::test_children_of_multiprocessing PASSED*",
            "*::test_after PASSED*",
            "*AssertionError: the parent goes on",
            "*AssertionError: the parent goes on",
            "*LookupError: in the child",
        ]
    )
    compared = result.stdout.str().partition(" test_child_compares ")[2]
    assert "a process that rank 0 forked compared comm_mode or fsdp_tree" in compared
    assert "AssertionError: the parent goes on" in compared
