"""pytest's options and well-known plugins work with distributed tests."""

import re

import pytest
from running import UNSAFE_TO_FORK

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

SOURCE = """
import pytest

pytestmark = pytest.mark.distributed(world_size=2)

@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")

def test_first(directory): pass

@pytest.mark.parametrize("n", [1, 2])
def test_second(n, dist_info):
    assert (n, dist_info.rank) != (2, 1)

def test_third(directory): pass
"""
NAMES = ["test_first", "test_second[1]", "test_second[2]", "test_third"]


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs a source with some of the plugins that are off elsewhere."""

    def run(source, *arguments, plugins=()):
        off = {"asyncio", "randomly", "rerunfailures", "timeout"} - set(plugins)
        monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p no:{name}" for name in sorted(off)))
        pytester.makepyfile(test_it=source)
        return pytester.runpytest_subprocess(*arguments)

    return run


def order(result):
    """The tests in the order in which they ran, from a verbose run."""
    pattern = r"^test_it\.py::(\S+) (?:PASSED|FAILED|RERUN)"
    return re.findall(pattern, result.stdout.str(), re.MULTILINE)


@pytest.mark.release
def test_failed_first_runs_the_failed_test_first(run):
    run(SOURCE).assert_outcomes(passed=3, failed=1)
    result = run(SOURCE, "--ff", "-v")
    result.assert_outcomes(passed=3, failed=1)
    assert order(result) == ["test_second[2]", "test_first", "test_second[1]", "test_third"]


@pytest.mark.release
def test_stepwise_continues_at_the_failed_test(run):
    result = run(SOURCE, "--sw", "-v")
    result.assert_outcomes(passed=2, failed=1)
    assert order(result) == NAMES[:3]
    mended = SOURCE.replace("!= (2, 1)", "!= (3, 1)")
    result = run(mended, "--sw", "-v")
    result.assert_outcomes(passed=2, deselected=2)
    assert order(result) == NAMES[2:]


def test_durations_are_those_of_the_slowest_rank(run):
    source = """
import time
import pytest

@pytest.fixture
def slow(dist_info):
    time.sleep(0.4 * dist_info.rank)
    yield
    time.sleep(0.5 * dist_info.rank)

@pytest.mark.distributed(world_size=2)
def test_it(slow, dist_info):
    time.sleep(0.6 * dist_info.rank)
"""
    result = run(source, "--durations=0", "-vv")
    found = re.findall(r"([\d.]+)s (setup|call|teardown) +test_it", result.stdout.str())
    seconds = {when: float(number) for number, when in found}
    assert set(seconds) == {"setup", "call", "teardown"}
    # Those of the slowest rank.
    assert seconds["setup"] >= 0.4
    assert seconds["call"] >= 0.6
    assert seconds["teardown"] >= 0.5


@pytest.mark.parametrize("option", ["--setup-only", "--setup-plan"])
def test_setup_options_list_fixtures_of_every_rank(run, option):
    result = run(SOURCE, option)
    # The body of one of them would fail.
    result.assert_outcomes()
    for rank in (0, 1):
        result.stdout.fnmatch_lines_random([f"*[[]rank {rank}] *SETUP    M directory*"])
    assert "test_second[2]" in result.stdout.str()
    assert result.ret == pytest.ExitCode.OK


SLOW = """
import time
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2)

@pytest.mark.timeout({limit_s}, method={method!r})
def test_hanging(dist_info):
    if dist_info.rank == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(1000)

def test_after(): pass
"""


@pytest.mark.parametrize("method", ["signal", pytest.param("thread", marks=pytest.mark.release)])
def test_a_timeout_fails_only_its_own_test(run, method):
    limit_s = extend_under_load(3)
    result = run(SLOW.format(method=method, limit_s=limit_s), plugins=["timeout"])
    result.assert_outcomes(passed=1, failed=1)
    shown = result.stdout.str()
    assert f"did not finish within {limit_s:g} s (pytest-timeout); all ranks were stopped." in (
        shown.replace("\n", " ")
    )
    at = r"\(innermost frame first\):\s+\S*test_it.py:\d+ in test_hanging"
    for rank in (0, 1):
        assert re.search(rf"rank {rank} is at {at}", shown)
    # The plugin's own way to end a test.
    assert "+ Timeout +" not in shown


@pytest.mark.release
def test_the_timeout_option_applies_to_each_test(run):
    source = """
import time
import pytest

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("n", range(3))
def test_it(n): time.sleep(LIMIT_S * 0.4)
"""
    limit_s = str(extend_under_load(4))
    arguments = (f"--timeout={limit_s}", "-n", "2", "--rank-slots=2")
    result = run(source.replace("LIMIT_S", limit_s), *arguments, plugins=["timeout"])
    result.assert_outcomes(passed=3)


RANDOM = """
import random
import pytest
import torch
import torch.distributed as dist

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("n", range(6))
def test_it(n):
    drawn = [None, None]
    dist.all_gather_object(drawn, random.random())
    assert drawn[0] == drawn[1]
    print(f"drew {n} {drawn[0]}")

def test_plain():
    print("drew plain", random.random())
"""


def test_randomly_shuffles_and_seeds_all_ranks_alike(run):
    def drawn(seed):
        result = run(RANDOM, "-v", "-rP", f"--randomly-seed={seed}", plugins=["randomly"])
        result.assert_outcomes(passed=7)
        return order(result), sorted(set(re.findall(r"drew .*", result.stdout.str())))

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]
    assert len(first[1]) == 7, "equal output of ranks is folded"


@pytest.mark.release
def test_randomly_seeds_spawned_ranks_alike(run, pytester):
    pytester.makeconftest(UNSAFE_TO_FORK)
    result = run(RANDOM, "-k", "1", plugins=["randomly"])
    result.assert_outcomes(passed=1, deselected=6)
    assert "start as new pytest processes" in result.stdout.str()


FLAKY = """
import os
from pathlib import Path
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2)

def attempt(name, rank):
    with open(f"{name}.{rank}", "a") as file:
        file.write(f"{os.getpid()}\\n")
    dist.barrier()
    return len(Path(f"{name}.{rank}").read_text().split())

@pytest.mark.flaky(reruns=2)
def test_mended(dist_info):
    # Only one rank fails, and only at first.
    assert attempt("mended", dist_info.rank) > 1 or dist_info.rank == 0
    dist.all_reduce(torch.ones(1))

@pytest.mark.flaky(reruns=2)
def test_hopeless(dist_info):
    assert attempt("hopeless", dist_info.rank) > 5

@pytest.mark.flaky(reruns=1)
def test_dying(dist_info):
    if attempt("dying", dist_info.rank) == 1 and dist_info.rank == 1:
        os._exit(3)

@pytest.mark.flaky(reruns=1, only_rerun="ValueError: .*odd")
def test_wrong_error(dist_info):
    attempt("wrong", dist_info.rank)
    raise ValueError("even")

@pytest.mark.flaky(reruns=1, only_rerun="ValueError: .*odd")
def test_right_error(dist_info):
    if attempt("right", dist_info.rank) == 1:
        raise ValueError("very odd")

@pytest.fixture
def setting_up(dist_info):
    if attempt("setting_up", dist_info.rank) == 1:
        raise OSError("not yet")

@pytest.mark.flaky(reruns=1)
def test_set_up(setting_up): pass

def test_without_mark(dist_info):
    attempt("unmarked", dist_info.rank)
    assert False
"""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="alone", marks=pytest.mark.release),
        pytest.param(("-n", "2"), id="xdist"),
    ],
)
def test_rerunfailures_starts_fresh_ranks(run, pytester, arguments):
    result = run(FLAKY, "-v", "-rR", *arguments, plugins=["rerunfailures"])
    shown = result.stdout.str()
    result.stdout.fnmatch_lines(["*3 failed, 4 passed, 6 rerun in*"])
    assert "so forking is not safe" not in shown
    if not arguments:
        assert order(result).count("test_mended") == 2
        assert "test_it.py::test_mended RERUN" in shown
        assert "test_it.py::test_mended PASSED" in shown
    tries = {"mended": 2, "hopeless": 3, "dying": 2, "wrong": 1, "right": 2, "unmarked": 1}
    for name, count in {**tries, "setting_up": 2}.items():
        for rank in (0, 1):
            pids = (pytester.path / f"{name}.{rank}").read_text().split()
            assert len(pids) == len(set(pids)) == count, name


ASYNC = """
import asyncio
import pytest
import torch
import torch.distributed as dist
{imports}

pytestmark = [pytest.mark.distributed(world_size=2), pytest.mark.{mark}]

@pytest.fixture
def anyio_backend():
    return "asyncio"

@{fixture}
async def summed(anyio_backend):
    await asyncio.sleep(0)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    yield tensor.item()
    await asyncio.sleep(0)
    dist.barrier()

async def test_it(summed, comm_mode):
    await asyncio.sleep(0)
    with comm_mode:
        dist.all_reduce(torch.ones(1))
    assert summed == 2
    assert comm_mode.counts("all_reduce") == 1

async def test_failing(summed, dist_info):
    await asyncio.sleep(0)
    assert dist_info.rank != 1, "rank one is out"
"""


@pytest.mark.parametrize(
    ("mark", "imports", "fixture"),
    [
        ("asyncio", "import pytest_asyncio", "pytest_asyncio.fixture"),
        ("anyio", "", "pytest.fixture"),
    ],
    ids=["asyncio", "anyio"],
)
def test_async_tests_run_on_every_rank(run, mark, imports, fixture):
    source = ASYNC.format(mark=mark, imports=imports, fixture=fixture)
    scope = ("-o", "asyncio_default_fixture_loop_scope=function") if mark == "asyncio" else ()
    result = run(source, "-W", "error", *scope, plugins=[mark] if scope else [])
    result.assert_outcomes(passed=1, failed=1)
    shown = result.stdout.str()
    assert "AssertionError: rank one is out" in shown
    assert "rank 1 failed\nrank 0 did not fail" in shown
