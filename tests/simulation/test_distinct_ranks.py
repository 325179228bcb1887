"""Which ranks run where a model's parameters do not divide, and what of all ranks they miss."""

import itertools
import pathlib
import random
import shutil

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.simulation.groups import distinct_coordinates

TESTS = pathlib.Path(__file__).parents[1]
MODEL = """
import pytest, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)

class Model(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.head = nn.Linear(32, vocabulary, bias=False)
    def forward(self, tokens):
        return self.head(torch.relu(self.embed(tokens)))

def parallelized(mesh, vocabulary):
    model = Model(vocabulary)
    parallelize_module(model, mesh["tp"], {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    })
    return fully_shard(model, mesh=mesh["dp"])
"""
COMPARED = """
@pytest.mark.distributed(world_size=4096, simulate=True{ranks})
def test_layout(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    model = parallelized(device_mesh(dp=-1, tp=4), {vocabulary})
    with comm_mode(model):
        model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    assert {{"comm": comm_mode, "tree": fsdp_tree(model)}} == comm_snapshot
"""


def local(shape, sizes, dims, place):
    """As torch cuts a tensor along each axis of a mesh in turn."""
    shape = [*shape]
    for size, dim, own in zip(sizes, dims, place, strict=True):
        if dim is not None:
            chunk = -(-shape[dim] // size)
            shape[dim] = max(0, min(chunk, shape[dim] - own * chunk))
    return tuple(shape)


@pytest.mark.parametrize("length", range(20))
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (3, 5)])
def test_each_local_shape_has_a_rank(length, sizes):
    everywhere = [*itertools.product(*map(range, sizes))]
    for dims in {(0,) * len(sizes), (None, 0)[-len(sizes) :], (1, 0)[: len(sizes)]}:
        shape = (length, 7)
        of_all = {local(shape, sizes, dims, place) for place in everywhere}
        for own in everywhere:
            places = [*itertools.product(*distinct_coordinates(shape, sizes, dims, own))]
            assert own in places
            assert {local(shape, sizes, dims, place) for place in places} == of_all
            if len(of_all) == 1:
                assert places == [own]


def run(pytester, *tests, args=()):
    pytester.makepyfile(test_it="\n".join((MODEL, *tests)))
    shutil.copy(TESTS / "conftest.py", pytester.path)
    return pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", *args, timeout=extend_under_load(120)
    )


def snapshots(pytester, kind):
    return sorted(
        path.read_text()
        for path in pytester.path.glob("snapshots/**/*")
        if path.is_file() and f"2 {kind} |" in path.read_text()
    )


def test_ranks_with_smaller_shards_are_recorded(pytester):
    test = COMPARED.format(ranks="", vocabulary=4098)
    result = run(pytester, test, args=["--snapshot-update", "-v"])
    result.assert_outcomes(passed=1)
    assert result.stdout.str().count("PASSED") == 1
    (comm,), (tree,) = snapshots(pytester, "comm"), snapshots(pytester, "tree")
    # 1,025 rows of the vocabulary on each rank of tp, and 1,023 on the last one.
    assert "\nranks 0,3\n" in comm
    assert "\nranks 0,3\n" in tree
    assert f"peak gathered {2 * 1025 * 32 * 4:_} B ranks 0\n" in comm
    assert f"peak gathered {2 * 1023 * 32 * 4:_} B ranks 3\n" in comm
    run(pytester, test).assert_outcomes(passed=1)
    run(pytester, COMPARED.format(ranks="", vocabulary=4096)).assert_outcomes(failed=1)


def test_one_rank_is_enough_if_sizes_divide(pytester):
    test = COMPARED.format(ranks="", vocabulary=4096)
    run(pytester, test, args=["--snapshot-update"]).assert_outcomes(passed=1)
    written = [snapshots(pytester, kind) for kind in ("comm", "tree")]
    for (text,) in written:
        assert "\nranks 0\n" in text
    named = COMPARED.format(ranks=", ranks=[0]", vocabulary=4096)
    run(pytester, named).assert_outcomes(passed=1)
    assert written == [snapshots(pytester, kind) for kind in ("comm", "tree")]


ASKED = """
@pytest.mark.distributed(world_size={world_size}, simulate=True, scope="{scope}"{ranks})
@pytest.mark.parametrize("number", range(2))
def test_asks(number, device_mesh, dist_info):
    mesh = device_mesh(dp=-1, tp={tp})
    model = parallelized(mesh, {vocabulary})
    assert model.head.weight.shape[0] == {vocabulary}
    assert dist_info.rank == 0
"""


@pytest.mark.parametrize("scope", ["test", "module"])
def test_a_test_without_a_comparison_runs_on_them_too(pytester, scope):
    asked = ASKED.format(world_size=64, tp=4, vocabulary=10, ranks="", scope=scope)
    result = run(pytester, asked)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*rank 3 failed*", "*rank 0 did not fail*"])
    named = ASKED.format(world_size=64, tp=4, vocabulary=10, ranks=", ranks=[0]", scope=scope)
    run(pytester, named).assert_outcomes(passed=2)


def rows(text):
    """What a snapshot says, without which ranks it was recorded on and their sums."""
    lines = (line.strip().partition(" ranks ")[0] for line in text.splitlines()[1:])
    return {line for line in lines if not line.startswith(("ranks ", "total "))}


@pytest.mark.release
def test_nothing_of_all_ranks_is_lost(pytester):
    drawn = random.Random(16).sample(range(5, 60), 3)  # noqa: S311  # no secret
    sixteen = COMPARED.replace("4096", "16").replace("test_layout", "test_{vocabulary}")
    tests = {}
    # Ranks that run all tests of a module are forked once.
    for ranks in ("", ', ranks="all", scope="module"'):
        written = [sixteen.format(ranks=ranks, vocabulary=number) for number in drawn]
        run(pytester, *written, args=["--snapshot-update"]).assert_outcomes(passed=3)
        for kind in ("comm", "tree"):
            tests[bool(ranks), kind] = snapshots(pytester, kind)
        shutil.rmtree(pytester.path / "snapshots")
    for kind in ("comm", "tree"):
        found, whole = tests[False, kind], tests[True, kind]
        assert len(found) == len(whole) == 3
        assert sorted(map(sorted, map(rows, found))) == sorted(map(sorted, map(rows, whole)))
    # Not for want of ranks that differ.
    assert sum("peak gathered" in one and " ranks 3" in one for one in tests[False, "comm"]) >= 2
