"""Builds of torch for GPUs on machines without one: asking for GPUs leaves ranks forked.

That is what ``pip install torch`` gives on most runners of CI. Where this suite runs on a build
without CUDA, the sessions have a stand-in, which does what such a build does (read and tried in
2.13.0+cu130 and 2.15.0+cu132); on a build with CUDA they have that.
"""

import pytest

from pytest_fsdp_comm.ranks.rank.gpus import count_visible_gpus

pytestmark = pytest.mark.skipif(count_visible_gpus() > 0, reason="needs a machine without GPUs")

STAND_IN = """
import os
import torch

if not torch.cuda._is_compiled():
    started_in = None

    def start_driver():
        global started_in
        started_in = started_in or os.getpid()

    def is_in_bad_fork():
        return started_in not in {None, os.getpid()}

    def count():
        start_driver()
        return 0

    def init():
        assert not is_in_bad_fork(), "INTERNAL ASSERT FAILED"
        start_driver()
        raise RuntimeError("Found no NVIDIA driver on your system.")

    torch._C._cuda_getDeviceCount = count
    torch._C._cuda_isInBadFork = torch.cuda._is_in_bad_fork = is_in_bad_fork
    torch._C._cuda_init = init
    torch.cuda._cudart = object()  # CUDA's libraries are there
"""
ASKS = {
    "is_available": "torch.cuda.is_available()",
    "init": "torch.cuda.init()",
    "manual_seed_all": "torch.cuda.manual_seed_all(3)",
}
TEST = """
import os
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(): assert False

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.distributed(world_size=2, device="cuda")
def test_on_gpus(): pass

@pytest.mark.distributed(world_size=2, device="cuda")
def test_on_missing_gpus(): pass

@pytest.mark.distributed(world_size=2)
def test_step(device_mesh):
    assert "PYTEST_FSDP_COMM_RANK" not in os.environ, "spawned"
    model = fully_shard(nn.Linear(4, 4), mesh=device_mesh())
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    torch.manual_seed(1)
    with torch.random.fork_rng():
        torch.rand(1)
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("use", [
    lambda: torch.ones(1).cuda(),
    lambda: torch.zeros(1, device="cuda"),
    torch.cuda.current_device,
    lambda: torch.cuda.synchronize(),
    torch.cuda.init,
])
def test_using_a_gpu_names_the_missing_driver(use):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Found no NVIDIA driver on your system"):
            use()
    assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(ask, marks=pytest.mark.upstream if ask == "is_available" else ())
        for ask in ASKS
    ],
)
def test_ranks_are_forked_whatever_was_queried_of_cuda(run_session, ask):
    conftest = f"{STAND_IN}\ntry:\n    {ASKS[ask]}\nexcept RuntimeError:\n    pass\n"
    result = run_session(TEST, conftest=conftest)
    assert "so forking is not safe" not in result.output
    assert "6 passed, 2 skipped, 1 error" in result.output, result.output
    assert (
        "2 ranks need one GPU each (visible: 0); use fewer ranks, drop device='cuda', or skip the "
        "test with"
    ) in result.output
