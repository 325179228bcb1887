"""No shard that FSDP2 or tensor parallelism makes is a view of something larger."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.tree.finding import FindingSettings


def check(model):
    tree = capture_tree(model, FindingSettings(padding_nbytes=1))
    assert "oversized-storage" not in [finding.code for finding in tree.findings], str(tree)


def train(model):
    model(torch.ones(2, 5)).sum().backward()


def uneven():
    """Shards of 4 ranks need padding, and some are empty."""
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2), nn.Linear(2, 1))


def shard(model, **options):
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def shard_on_meta():
    with torch.device("meta"):
        model = uneven()
    return shard(model)


@pytest.mark.distributed(world_size=4)
def test_uneven_shards_fill_their_storages(tmp_path):
    model, empty = shard(uneven()), shard_on_meta()
    check(empty)
    train(model)
    empty.to_empty(device="cpu")
    for each in (model, empty):
        check(each)
    empty.load_state_dict(model.state_dict(), assign=True)
    check(empty)
    path = [str(tmp_path)]
    dist.broadcast_object_list(path, 0)
    dcp.save(model.state_dict(), checkpoint_id=path[0])
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path[0])
    model.load_state_dict(state, assign=True)
    train(model)
    check(model)
    model.unshard()
    check(model)


@pytest.mark.distributed(world_size=4)
def test_shards_of_a_2d_mesh_fill_their_storages(device_mesh):
    mesh = device_mesh(dp=2, tp=2)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), mesh["tp"], plan)
    check(model)
    check(shard(model, mesh=mesh["dp"]))
    check(model.double())


@pytest.mark.distributed(world_size=4, simulate=True, ranks="all")
def test_simulated_shards_fill_their_storages(device_mesh):
    model = shard(uneven())
    train(model)
    check(model)
    check(shard_on_meta().to_empty(device="cpu"))
    # A simulated tensor has no storage to look at, so even a view is not reported.
    view = torch.zeros(64, 64).chunk(4)[dist.get_rank()]
    model[0].weight = nn.Parameter(DTensor.from_local(view, device_mesh(tp=4), [Shard(0)]))
    check(model)
