"""On GPUs with NCCL; skipped without them. Not run on every change: see docs/torch-versions.md."""

import pytest
import torch
import torch.distributed as dist
from models import BLOCK_NBYTES, ROOT_NBYTES, WIDTH, Model, shard
from oracle import lines
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

needs_one = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

STEP = [
    f"forward . all_gather[dp] {ROOT_NBYTES} < .",
    f"forward layers.0 all_gather[dp] {BLOCK_NBYTES} < layers.0",
    f"forward layers.1 all_gather[dp] {BLOCK_NBYTES} < layers.1",
    f"backward layers.1 all_gather[dp] {BLOCK_NBYTES} < .",
    f"backward layers.0 all_gather[dp] {BLOCK_NBYTES} < layers.1",
    f"backward layers.1 reduce_scatter[dp] {BLOCK_NBYTES} < layers.1",
    f"backward layers.0 reduce_scatter[dp] {BLOCK_NBYTES} < layers.0",
    f"backward . reduce_scatter[dp] {ROOT_NBYTES} < .",
]


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
    assert lines(comm_mode) == STEP
    assert comm_mode.recording.notes == ()


@needs_one
@pytest.mark.distributed(world_size=2, backend="gloo")
def test_gloo_ranks_may_share_a_gpu(comm_mode):
    torch.cuda.set_device(0)
    model = shard(Model().cuda(), init_device_mesh("cuda", (2,), mesh_dim_names=("dp",)))
    with comm_mode(model):
        model(torch.ones(2, WIDTH, device="cuda")).sum().backward()
    assert lines(comm_mode) == STEP
    assert comm_mode.recording.notes == ()


@needs_one
@pytest.mark.distributed(world_size=1, backend="nccl")
def test_nccl_runs_what_is_recorded(comm_mode, dist_info):
    ones, out = (torch.ones(8, device=dist_info.device) for _ in range(2))
    dist.all_reduce(ones)
    with profile(activities=[ProfilerActivity.CPU]) as profiled, comm_mode:
        dist.all_reduce(ones, op=dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(out, ones)
        dist.reduce_scatter_tensor(out, ones, op=dist.ReduceOp.AVG)
        dist.all_to_all_single(out, ones)
        dist.broadcast(ones, 0)
        dist.all_gather([out], ones)
        dist.gather(ones, [out], dst=0)
        dist.scatter(out, [ones], src=0)
    recorded = [line.split()[2] for line in lines(comm_mode)]
    assert recorded == [
        *("all_reduce[world]", "all_gather[world]", "reduce_scatter[world]", "all_to_all[world]"),
        *("broadcast[world]", "all_gather[world]", "gather[world]", "scatter[world]"),
    ]
    assert {event.name for event in profiled.events() if event.name.startswith("nccl:")} == {
        *("nccl:all_reduce", "nccl:_all_gather_base", "nccl:_reduce_scatter_base"),
        *("nccl:all_to_all", "nccl:broadcast", "nccl:all_gather", "nccl:gather", "nccl:scatter"),
    }
