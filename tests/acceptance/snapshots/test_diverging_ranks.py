"""A comparison of ranks that diverge fails, with or without a snapshot, and is never written."""

import pytest

SOURCE = """
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

@pytest.mark.distributed(world_size=3)
def test_it(comm_mode, comm_snapshot, fsdp_tree, device_mesh, dist_info):
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    for layer in layers:
        fully_shard(layer, mesh=device_mesh())
    order = [0, 1, 2]
    num_barriers = 0
    pass  # here
    with comm_mode(layers):
        x = torch.ones(2, 6)
        for number in order:
            x = layers[number](x)
        x.sum().backward()
        for _ in range(num_barriers):
            dist.barrier()
    assert {"comm": comm_mode, "tree": fsdp_tree(layers)} == comm_snapshot
"""
DIVERGE = "order = [0, 2, 1] if dist_info.rank == 1 else [0, 1, 2]"
LINE = "ranks diverge at call #2 over dp: rank 1 gathers 2, ranks 0, 2 gather 1"
FILE = "snapshots/test_it/test_it.ws3.comm"
HEAD = f"assert comm_mode compared with {FILE}: its ranks diverge"


@pytest.fixture
def run(pytester):
    def run(change, *arguments):
        source = SOURCE.replace("pass  # here", change)
        pytester.makepyfile(test_it=source)
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
        lines = [line[2:].strip() for line in result.outlines if line.startswith("E ")]
        return result, lines

    return run


def test_diverging_ranks_fail_before_the_diff(run, pytester):
    artifacts = ("--comm-artifacts", "artifacts")
    result, lines = run(DIVERGE, *artifacts)
    result.assert_outcomes(failed=1)
    assert LINE in "\n".join(lines), "without a snapshot"
    assert not (pytester.path / FILE).exists()
    run("", "--snapshot-update")[0].assert_outcomes(passed=1)
    reviewed = (pytester.path / FILE).read_text()

    result, lines = run(DIVERGE, *artifacts)
    result.assert_outcomes(failed=1)
    assert lines == [HEAD, LINE]
    result.stdout.fnmatch_lines([f"FAILED test_it.py::test_it - {LINE[:20]}*"])

    result, lines = run(f"{DIVERGE}; num_barriers = 2", *artifacts)
    assert lines[:2] == [HEAD, LINE]
    assert len(lines) > 2
    assert "accept" not in "".join(lines)
    assert not [*pytester.path.glob("artifacts/received/**/*.comm")]

    for option in ("--snapshot-update", "--snapshot-update-new-only"):
        result, lines = run(DIVERGE, option)
        result.assert_outcomes(failed=1)
        assert LINE in "\n".join(lines)
    assert any("nothing was written" in line for line in run(DIVERGE, "--snapshot-update")[1])
    assert (pytester.path / FILE).read_text() == reviewed
