"""What a failed comparison says of the cost, with real ranks, with and without known links."""

import pytest

SOURCE = """
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

BATCHES = 1

@pytest.mark.distributed(world_size=2)
def test_step(device_mesh, comm_mode, comm_snapshot):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=device_mesh(), reshard_after_forward=False)
    fully_shard(model, mesh=device_mesh())
    with comm_mode(model):
        for _ in range(BATCHES):
            model(torch.randn(2, 64)).sum().backward()
    assert comm_mode == comm_snapshot
"""


@pytest.fixture
def changed(pytester):
    """Two steps where one was reviewed."""
    file = pytester.makepyfile(test_it=SOURCE)
    pytester.runpytest_subprocess("--snapshot-update").assert_outcomes(passed=1)
    file.write_text(SOURCE.replace("BATCHES = 1", "BATCHES = 2"))
    return pytester


def costs(pytester, links=""):
    """The lines below the head of the failure."""
    pytester.makeini(f"[pytest]\nfsdp_comm_links =\n{links}")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    shown = [line.removeprefix("E").strip() for line in result.stdout.lines if line[:1] == "E"]
    head = next(n for n, line in enumerate(shown) if "comm_mode differs from" in line)
    return shown[head + 1 : head + 3]


def test_the_first_line_is_what_the_change_costs(changed):
    # 2 layers of 64 x 64 float32, each gathered once and reduced once a step.
    assert costs(changed)[0] == (
        "+100 % bytes in all (64.0 -> 128.0 KiB per rank and step), alike in every kind, peak "
        "gathered unchanged"
    )


def test_known_links_give_an_estimate_in_seconds(changed):
    # 4 calls of 1 hop, and half of 64 KiB at 1 MB/s; then twice as many.
    links = "    dp: 1 MB/s 1 ms\n    another_tests_axis: 50 GB/s 10 us"
    assert costs(changed, links)[1] == (
        "about 37 -> 74 ms a step on dp (1 MB/s, 1 ms), without overlap"
    )
    first, second = costs(changed, "    tp: 1 MB/s 1 ms")
    assert first.startswith("+100 % bytes in all")
    assert " step" not in second
