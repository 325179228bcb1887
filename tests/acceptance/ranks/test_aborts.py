"""Where gloo ends a rank because ranks do not fit together, the report says what does not fit.

All tests run in one session, whose reports are read test by test.
"""

import re

import pytest

SOURCE = r"""
import os
import pathlib
import signal
import time
import pytest
import torch
import torch.distributed as dist
from pytest_fsdp_comm.ranks.wire.load import extend_under_load

pytestmark = pytest.mark.distributed(world_size=4, timeout_s=60)

def reduce(odd, numel=4):
    dist.all_reduce(torch.ones(400_000 if odd else numel))

# Gloo ends ranks as soon as two calls do not fit: the odd one calls once all others wait for it.
def call_last(odd):
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0]
    calling = pathlib.Path(f"{test}.calling")
    calling.mkdir(exist_ok=True)
    if odd:
        while len([*calling.iterdir()]) < dist.get_world_size() - 1:
            time.sleep(0.01)
        time.sleep(extend_under_load(0.3))
    else:
        (calling / str(dist.get_rank())).touch()
    return odd

def test_sizes(dist_info):
    dist.barrier()
    reduce(call_last(dist_info.rank == 3))

@pytest.mark.distributed(world_size=2, timeout_s=60)
@pytest.mark.parametrize("odd", [0, 1])
class TestTwo:
    def test_two(self, odd, dist_info):
        reduce(call_last(dist_info.rank == odd))

def test_dtypes(dist_info):
    dist.barrier()
    dtype = torch.bfloat16 if call_last(dist_info.rank == 2) else torch.float32
    dist.all_reduce(torch.ones(4, dtype=dtype))

def test_gathers(dist_info):
    dist.barrier()
    numel = 400_000 if call_last(dist_info.rank == 0) else 4
    dist.all_gather([torch.ones(numel) for _ in range(4)], torch.ones(numel))

def test_scatters(dist_info):
    dist.barrier()
    numel = 400_000 if call_last(dist_info.rank == 1) else 4
    dist.reduce_scatter_tensor(torch.ones(numel), torch.ones(4 * numel))

def test_subgroup(device_mesh, dist_info):
    mesh = device_mesh(dp=2, tp=2)
    reduced = torch.ones(400_000 if call_last(dist_info.rank == 2) else 4)
    dist.all_reduce(reduced, group=mesh["tp"].get_group())

def test_caught(dist_info):
    try:
        reduce(call_last(dist_info.rank == 3))
    except RuntimeError:
        pass
    assert dist_info.rank > 3, "later"

def test_reworded(dist_info):
    dist.barrier()
    try:
        reduce(call_last(dist_info.rank == 3))
    except RuntimeError as error:
        raise LookupError("a step failed") from error

def test_point_to_point(dist_info):
    dist.barrier()
    if dist_info.rank == 0:
        dist.send(torch.ones(400_000), 1)
    elif dist_info.rank == 1:
        dist.recv(torch.ones(4), 0)

def test_aborted(dist_info):
    dist.barrier()
    if dist_info.rank == 1:
        os.abort()
    dist.all_reduce(torch.ones(4))

def test_asserted(dist_info):
    reduce(False)
    assert dist_info.rank != 2, "plain"
    reduce(dist_info.rank == 3)

@pytest.fixture
def meeting():
    yield
    dist.barrier()

def test_asserted_before_a_fixture_that_meets(meeting, dist_info):
    assert dist_info.rank != 2, "plain"
    reduce(False, numel=400_000)

@pytest.mark.parametrize("is_earlier", [False, True])
def test_uneven(is_earlier, dist_info):
    # All of this works: sizes differ on purpose, or gloo does not mind.
    sizes = [4 * (rank + 1) for rank in range(4)]
    dist.all_gather_object([None] * 4, "x" * 10 ** dist_info.rank)
    if is_earlier:
        dist.broadcast(torch.ones(4 if dist_info.rank == 0 else 8), 0)
        dist.barrier()
    else:
        own = sizes[dist_info.rank]
        dist.all_to_all_single(torch.ones(sum(sizes)), torch.ones(4 * own), sizes, [own] * 4)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
"""

SPEAKS = {
    "sizes": "rank 3 called all_reduce of 400,000 float32, ranks LEFT of 4 float32: mismatch in "
    "#2 of world at test_it.py:N in reduce",
    "gathers": "rank 0 called all_gather of 400,000 float32, ranks LEFT of 4 float32: mismatch in "
    "#2 of world at test_it.py:N in test_gathers",
    "scatters": "rank 1 called reduce_scatter of 1,600,000 float32, ranks LEFT of 16 float32: "
    "mismatch in #2 of world at test_it.py:N in test_scatters",
    "subgroup": "rank 2 called all_reduce of 400,000 float32, rank 3 of 4 float32: mismatch in "
    "#1 of tp at test_it.py:N in test_subgroup",
    "dtypes": "rank 2 called all_reduce of 4 bfloat16, ranks LEFT of 4 float32: mismatch in "
    "#2 of world at test_it.py:N in test_dtypes",
    "two[0]": "rank 0 called all_reduce of 400,000 float32, rank 1 of 4 float32: mismatch in "
    "#1 of world at test_it.py:N in reduce",
    "two[1]": "rank 0 called all_reduce of 4 float32, rank 1 of 400,000 float32: mismatch in "
    "#1 of world at test_it.py:N in reduce",
    # The place of its failure is another.
    "reworded": "rank 3 called all_reduce of 400,000 float32, ranks LEFT of 4 float32: mismatch in "
    "#2 of world",
}


@pytest.fixture(scope="module")
def reports(run_session):
    """The failure of each test, with line numbers replaced by ``N``, and the summary's lines."""
    output = run_session(SOURCE, "-q").output
    failures, _, summary = output.partition("= short test summary info =")
    parts = re.split(r"^_+ (?:TestTwo\.)?test_(\w+\S*) _+$", failures, flags=re.MULTILINE)
    texts = {
        name: re.sub(r"py:\d+", "py:N", text)
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert len(texts) == len(re.findall("^FAILED", summary, re.MULTILINE)) == 15
    return texts


@pytest.mark.parametrize("test", SPEAKS)
def test_rank_with_a_different_size_comes_first(reports, test):
    lines = reports[test].splitlines()
    # Gloo ends one of the ranks, which saves its position before.
    assert re.sub(r"ranks [\d, -]+ of", "ranks LEFT of", lines[1]).startswith(SPEAKS[test])
    # Then what became of the ranks, with gloo's own words.
    killed = next(line for line in lines if " killed by signal 6 (SIGABRT) during call: " in line)
    assert "gloo::EnforceNotMet" in killed
    assert "Received data size doesn't match expected size" in killed
    where = (
        r"^ranks? [\d, -]+ (was|were) at \(innermost frame first\):\n    test_it.py:N in .*: dist\."
    )
    assert re.search(where, reports[test], re.MULTILINE)


def test_gloos_words_lead_if_no_call_is_known(reports):
    """The flight recorder does not list sends and receives."""
    test = "point_to_point"
    first = reports[test].splitlines()[1]
    assert " killed by signal 6 (SIGABRT) during call: gloo::EnforceNotMet: " in first
    assert "Received data size doesn't match expected size" in first
    assert " called " not in reports[test].partition("Captured")[0]


def test_abort_without_a_cpp_exception_stays_unexplained(reports):
    first, *others = reports["aborted"].splitlines()[1:]
    assert first == "rank 1 was killed by signal 6 (SIGABRT) during call"
    assert not [line for line in others if " called " in line or line.startswith("rank 1 was at")]


def test_order_of_a_failure_and_a_death_is_not_claimed(reports):
    story = reports["caught"].partition("Captured")[0]
    assert "AssertionError: later" in story
    assert " killed by signal 6 (SIGABRT) during call: " in story
    assert " failed first" not in story


@pytest.mark.parametrize("test", ["asserted", "asserted_before_a_fixture_that_meets"])
def test_ordinary_failure_stays_first(reports, test):
    assert "AssertionError: plain" in reports[test]
    assert "rank 2 failed first" in reports[test]
    assert " called " not in reports[test].partition("Captured")[0]


@pytest.mark.parametrize("test", ["uneven[False]", "uneven[True]"])
def test_sizes_that_may_differ_explain_nothing(reports, test):
    assert "RuntimeError: Connection closed by peer" in reports[test]
    assert " called " not in reports[test].partition("Captured")[0]
