"""With ``scope="module"`` ranks live on, until something goes wrong, and nothing leaks."""

SOURCE = """
import os
import pathlib
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.distributed(world_size=2, scope="module", timeout_s=60)

def note(name, dist_info):
    with open(f"pids{dist_info.rank}", "a") as file:
        print(name, os.getpid(), file=file)

def step(mesh, mode):
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with mode(model):
        model(torch.ones(1, 4)).sum().backward()
    return mode.counts()

def test_first(dist_info, device_mesh, comm_mode, tmp_path, monkeypatch):
    note("first", dist_info)
    assert step(device_mesh(), comm_mode) == 2
    monkeypatch.setenv("LEFT_BEHIND", "1")
    print("printed by first")

def test_second(dist_info, device_mesh, comm_mode, tmp_path, capfd):
    note("second", dist_info)
    assert "LEFT_BEHIND" not in os.environ
    assert capfd.readouterr().out == ""
    assert step(device_mesh(), comm_mode) == 2
    assert not list(tmp_path.iterdir())

def test_failing(dist_info):
    note("failing", dist_info)
    print("printed by failing")
    assert dist_info.rank == 0

def test_after_failure(dist_info, device_mesh, comm_mode):
    note("after", dist_info)
    assert step(device_mesh(), comm_mode) == 2

@pytest.mark.distributed(world_size=3, scope="module", timeout_s=60)
def test_other_settings(dist_info):
    note("other", dist_info)
    assert dist.get_world_size() == 3
"""

FIXTURES = """
import atexit
import unittest
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, scope="module", timeout_s=60)

def note(text):
    with open(f"notes{dist.get_rank()}", "a") as file:
        print(text, file=file)

@pytest.fixture(scope="module")
def kept(dist_info):
    note("up")
    yield
    # Every rank comes here, whichever of them failed.
    dist.barrier()
    note("down")
    assert dist_info.rank == 0 or "failing" not in tests, "failed at the end"

tests = []

@pytest.fixture
def noted(kept, request):
    tests.append(request.node.name.removeprefix("test_"))
    note(tests[-1])

def test_first(noted): atexit.register(note, "exit")

@pytest.mark.distributed(world_size=1)
def test_on_others(): pass

def test_before(noted): pass

class TestMethods(unittest.TestCase):
    @classmethod
    def setUpClass(cls): note("class up")
    @classmethod
    def tearDownClass(cls): note("class down")
    def test_method(self): note("method")
    def test_next_method(self): note("next method")

def test_failing(noted): assert dist.get_rank() == 0

def test_after(noted): pass
"""
STOPPED = """
import pytest

kept_ranks = pytest.mark.distributed(world_size=2, scope="module", timeout_s=60)

@pytest.fixture(scope="module")
def kept(dist_info):
    yield
    assert dist_info.rank == 0, "failed too late"

@kept_ranks
def test_kept(kept): pass

def test_that_stops(request): request.session.shouldstop = "enough"

@kept_ranks
def test_that_never_runs(kept): pass
"""


def test_ranks_live_until_a_failure_or_other_settings(pytester):
    pytester.makepyfile(test_it=SOURCE, test_its_fixtures=FIXTURES, test_stopped=STOPPED)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v")
    # The error is that of the fixture in the test that failed.
    result.assert_outcomes(passed=4 + 6 + 2, failed=2, errors=1)
    shown = result.stdout.str()
    # Fixtures of wider scope live as long as the ranks of their tests, and end on all ranks.
    notes = [
        *("up", "first", "down", "exit"),
        *("up", "before", "class up", "method", "next method", "class down", "failing", "down"),
        *("up", "after", "down"),
    ]
    for rank in (0, 1):
        assert (pytester.path / f"notes{rank}").read_text().splitlines() == notes
    story = shown.partition("ERROR at teardown of test_failing")[2]
    assert "AssertionError: failed at the end" in story
    assert "rank 1 failed\nrank 0 did not fail" in story
    # Where no test is left that could fail.
    assert (
        "fsdp-comm: rank 1: teardown failed in a fixture of test_stopped.py::test_kept or a later "
        "test of its module:\nAssertionError: failed too late"
    ) in result.stderr.str()
    assert "printed by failing" in shown
    assert "printed by first" not in shown
    for rank in (0, 1):
        lines = (pytester.path / f"pids{rank}").read_text().splitlines()
        pids = dict(line.split() for line in lines)
        assert list(pids) == ["first", "second", "failing", "after", "other"]
        assert pids["first"] == pids["second"] == pids["failing"]
        assert len({pids["failing"], pids["after"], pids["other"]}) == 3


def test_each_test_of_kept_ranks_has_its_own_snapshot(pytester):
    pytester.makepyfile(
        SOURCE.split("def test_first", maxsplit=1)[0]
        + "\n".join(
            f"def test_{n}(device_mesh, comm_mode, comm_snapshot):\n"
            "    step(device_mesh(), comm_mode)\n"
            "    assert comm_mode == comm_snapshot\n"
            for n in range(3)
        )
    )
    arguments = ("-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(*arguments, "--snapshot-update")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["3 snapshots generated."])
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["3 snapshots passed."])


def test_kept_ranks_open_their_store_once(pytester):
    """A new client of a file store reads the whole file, so 400 tests took 5 times as long."""
    pytester.makepyfile(
        SOURCE.split("def note", maxsplit=1)[0]
        + "from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT\n"
        "STORES = []\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "def test_store(number, request):\n"
        "    STORES.append(request.config.stash[RANK_CONTEXT].store)\n"
        "    assert [store is STORES[0] for store in STORES] == [True] * (number + 1)\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=3)
