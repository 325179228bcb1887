"""On GPUs with NCCL; skipped without them. Not run on every change: see docs/limits.md."""

import pytest
import torch
import torch.distributed as dist
from models import BLOCK_NBYTES, ROOT_NBYTES, WIDTH, Model, shard
from oracle import lines

needs_one = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two
@pytest.mark.distributed(world_size=2, backend="nccl")
def test_each_rank_has_its_device(dist_info):
    assert dist_info.device == f"cuda:{dist_info.local_rank}"
    assert torch.cuda.current_device() == dist_info.local_rank
    ones = torch.ones(3, device=dist_info.device)
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0, 2.0, 2.0]
    # The host's tensors go through gloo, so that object collectives need no GPU.
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0, 2.0, 2.0]


@needs_two
@pytest.mark.distributed(world_size=2, backend="nccl")
def test_the_same_is_recorded_as_on_gloo(comm_mode, device_mesh, dist_info):
    model = shard(Model().to(dist_info.device), device_mesh())
    with comm_mode(model):
        model(torch.ones(2, WIDTH, device=dist_info.device)).sum().backward()
    assert lines(comm_mode) == [
        f"forward . all_gather[dp] {ROOT_NBYTES} < .",
        f"forward layers.0 all_gather[dp] {BLOCK_NBYTES} < layers.0",
        f"forward layers.1 all_gather[dp] {BLOCK_NBYTES} < layers.1",
        f"backward layers.1 all_gather[dp] {BLOCK_NBYTES} < .",
        f"backward layers.0 all_gather[dp] {BLOCK_NBYTES} < layers.1",
        f"backward layers.1 reduce_scatter[dp] {BLOCK_NBYTES} < layers.1",
        f"backward layers.0 reduce_scatter[dp] {BLOCK_NBYTES} < layers.0",
        f"backward . reduce_scatter[dp] {ROOT_NBYTES} < .",
    ]
    assert comm_mode.recording.notes == ()


@needs_one
@pytest.mark.distributed(world_size=1, backend="nccl")
def test_copies_between_host_and_device_are_recorded(comm_mode, dist_info):
    with comm_mode:
        there = torch.ones(6).to(dist_info.device)
        there.cpu()
        torch.empty(6).copy_(there)
        dist.barrier()
    copies = [(copy.direction, copy.nbytes) for copy in comm_mode.recording.copies]
    assert copies == [("H2D", 24), ("D2H", 24), ("D2H", 24)]
