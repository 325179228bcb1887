"""xdist: modes of distribution, limited ranks, leased GPUs, and workers that die."""

import os
import signal
from itertools import combinations

import pytest
from running import wait_for

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

pytest.importorskip("xdist")

TIMED = """
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from pytest_fsdp_comm.ranks.wire.load import extend_under_load

@contextmanager
def noted(name, n_ranks, seconds=0.5):
    began = time.time()
    time.sleep(seconds)
    yield
    worker = os.environ["PYTEST_XDIST_WORKER"]
    line = f"{name} {worker} {os.environ.get('RANK', '-')} {n_ranks} {os.getpid()} {began} "
    with open(Path(os.environ["NOTES"]), "a") as file:
        file.write(f"{line}{time.time()}\\n")
"""

MANY = (
    TIMED
    + """
@pytest.mark.parametrize("n", range(3))
@pytest.mark.distributed(world_size=[1, 2])
def test_fresh(n, dist_info):
    with noted(f"fresh{n}", dist_info.world_size): pass

@pytest.mark.parametrize("n", range(3))
@pytest.mark.distributed(world_size=2, scope="module")
def test_kept(n, dist_info):
    with noted(f"kept{n}", dist_info.world_size): pass
"""
)


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs a source in two workers, and reads what its tests noted."""
    notes = pytester.path / "notes"

    def run(source, *arguments):
        monkeypatch.setenv("NOTES", str(notes))
        notes.write_text("")
        pytester.makepyfile(test_it=source)
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "2", *arguments)
        return result, [line.split() for line in notes.read_text().splitlines()]

    return run


def most_at_once(notes):
    """The largest number of ranks that ran at one time."""
    changes = [(float(note[5]), 1) for note in notes] + [(float(note[6]), -1) for note in notes]
    living = most = 0
    for _, change in sorted(changes):
        living += change
        most = max(most, living)
    return most


def test_ranks_are_bounded_over_all_workers(run):
    result, notes = run(MANY, "--rank-slots", "2")
    result.assert_outcomes(passed=9)
    assert len(notes) == 3 * (1 + 2 + 2)
    assert most_at_once(notes) == 2
    assert len({note[1] for note in notes}) == 2, "both workers ran some"


def test_without_a_bound_workers_do_not_wait(run):
    result, notes = run(MANY)
    result.assert_outcomes(passed=9)
    assert most_at_once(notes) > 2


KEPT = (
    TIMED
    + """
kept = pytest.mark.distributed(world_size=2, scope="module")

@kept
def test_before(dist_info):
    with noted("before", 2): pass

def test_plain():
    deadline = time.monotonic() + extend_under_load(60)
    while "other" not in Path(os.environ["NOTES"]).read_text():
        assert time.monotonic() < deadline, "kept ranks without a test held their slots"
        time.sleep(0.05)

@kept
def test_after(dist_info):
    with noted("after", 2): pass

@kept
def test_again(dist_info):
    with noted("again", 2): pass
"""
)
OTHER = (
    TIMED
    + """
def test_wait():
    while "before" not in Path(os.environ["NOTES"]).read_text():
        time.sleep(0.05)

@pytest.mark.distributed(world_size=2)
def test_other(dist_info):
    with noted("other", 2): pass
"""
)


def test_kept_ranks_give_up_slots_that_others_want(run, pytester):
    # Each file goes to a worker of its own.
    pytester.makepyfile(test_other=OTHER)
    result, notes = run(KEPT, "--rank-slots", "2", "--dist", "loadfile")
    result.assert_outcomes(passed=6)
    assert most_at_once(notes) == 2
    pids = {(note[0], note[2]): note[4] for note in notes}
    for rank in ("0", "1"):
        assert pids["before", rank] != pids["after", rank]
        assert pids["after", rank] == pids["again", rank], "nobody wanted these slots"


def test_waiting_for_slots_does_not_count_as_test_time(run):
    result, notes = run(
        TIMED
        + """
@pytest.mark.parametrize("n", range(2))
@pytest.mark.distributed(world_size=1, timeout_s=LIMIT_S)
def test_it(n, dist_info):
    with noted(n, 1, seconds=LIMIT_S * 4 / 7): pass
""".replace("LIMIT_S", str(extend_under_load(7))),
        "--rank-slots",
        "1",
    )
    result.assert_outcomes(passed=2)
    assert most_at_once(notes) == 1
    first, second = sorted(notes, key=lambda note: note[5])
    assert first[1] != second[1], "the second worker waited"


DEATH = (
    TIMED
    + """
import signal
import sys

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

@pytest.mark.parametrize("n", range(4))
@pytest.mark.distributed(world_size=2)
def test_it(n, dist_info):
    with noted(n, 2, seconds=0.2): pass
    if n == 0:
        if dist_info.rank == 0:
            # The fork server's parent: the worker.
            os.kill(parent(os.getppid()), signal.SIGKILL)
        time.sleep(1000)
"""
)


def test_killed_worker_frees_slots_and_ends_its_ranks(run):
    result, notes = run(DEATH, "--rank-slots", "2")
    result.assert_outcomes(passed=3, failed=1)
    assert "crashed while running 'test_it.py::test_it[0]'" in result.stdout.str()
    assert most_at_once(notes) <= 2
    assert {note[0] for note in notes} == {"0", "1", "2", "3"}
    wait_for(lambda: not [note for note in notes if os.path.exists(f"/proc/{note[4]}")])  # noqa: PTH110  # a process


# The daemons, killed with the ranks, emulate processes that the kernel does not release.
UNKILLABLE_DAEMONS = """
from pathlib import Path
import pytest_fsdp_comm.ranks.start.ending as ending

kill = ending.kill

def spare(pids):
    spared = {file.read_text() for file in Path(__file__).parent.glob("daemon?")}
    kill([pid for pid in pids if str(pid) not in spared])

ending.kill = spare
"""


def test_a_process_left_running_holds_no_slot(run, pytester):
    pytester.makeconftest(UNKILLABLE_DAEMONS)
    result, notes = run(
        TIMED
        + """
@pytest.mark.parametrize("n", range(3))
@pytest.mark.distributed(world_size=1)
def test_it(n, dist_info):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(f"daemon{n}").write_text(str(os.getpid()))
            os.close(1), os.close(2)
            time.sleep(1000)
        os._exit(0)
    with noted(n, 1): pass
    for file in Path().glob("daemon?"):
        assert Path(f"/proc/{file.read_text()}").exists()
""",
        "--rank-slots",
        "1",
    )
    result.assert_outcomes(passed=3)
    assert most_at_once(notes) == 1
    for file in pytester.path.glob("daemon?"):
        os.kill(int(file.read_text()), signal.SIGKILL)


def test_more_ranks_than_slots_are_a_usage_error(run):
    result, _ = run(MANY, "-n", "0", "--rank-slots", "1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "test_it.py::test_kept[0]: @pytest.mark.distributed: the test needs 2 ranks, but "
        "--rank-slots (ini fsdp_comm_rank_slots) allows only 1 at a time; raise it to at least 2, "
        "lower the world size, or simulate the ranks in one process with backend='fake'"
    ) in result.stderr.str()
    assert "test_fresh[0-ws1]" not in result.stderr.str()


LEASES = (
    TIMED
    + """
@pytest.mark.parametrize("n", range(4))
@pytest.mark.distributed(world_size=1, backend="nccl")
def test_it(n): pass
"""
)
# Where no GPU is, each of these tests ends with that error; what it was to use is noted before.
LEASES_CONFTEST = """
import os
import pytest
from pytest_fsdp_comm.ranks.session import runner
from test_it import noted, extend_under_load

runner.count_visible_gpus = lambda: 2

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    with noted(os.environ["CUDA_VISIBLE_DEVICES"], 1, seconds=extend_under_load(1)): pass
"""


def test_two_workers_never_share_a_gpu(run, pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    pytester.makeconftest(LEASES_CONFTEST)
    _, notes = run(LEASES)
    assert len(notes) == 4
    assert {note[0] for note in notes} == {"5", "7"}
    assert most_at_once(notes) == 2
    for one, other in combinations(notes, 2):
        if float(one[5]) < float(other[6]) and float(other[5]) < float(one[6]):
            assert one[0] != other[0]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--dist", "load"), marks=pytest.mark.upstream),
        pytest.param(("--dist", "worksteal"), marks=pytest.mark.release),
        pytest.param(("--dist", "no"), marks=pytest.mark.release),
        pytest.param(("--dist", "each"), marks=pytest.mark.release),
    ],
    ids=lambda arguments: arguments[1],
)
def test_rank_limit_holds_in_each_dist_mode(run, arguments):
    result, notes = run(MANY, *arguments, "--rank-slots", "4", "-k", "not 2-ws")
    times = 2 if "each" in arguments else 1
    result.assert_outcomes(passed=7 * times)
    assert len(notes) == 12 * times
    assert most_at_once(notes) <= 4


def test_maxfail_leaves_no_rank(run):
    result, notes = run(
        TIMED
        + """
@pytest.mark.parametrize("n", range(8))
@pytest.mark.distributed(world_size=2, scope="module")
def test_it(n, dist_info):
    with noted(n, 2, seconds=0.1): pass
    assert n != 1
""",
        "--maxfail=1",
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    assert not [note for note in notes if os.path.exists(f"/proc/{note[4]}")]  # noqa: PTH110  # a process
