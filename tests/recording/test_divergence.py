"""Ranks whose calls diverge, and similar steps of ranks that do not, on gloo and simulated."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_comm import RanksDivergedError
from pytest_fsdp_comm.comm.json import load_recordings
from pytest_fsdp_comm.command_line.documents import merge_recordings

gloo = pytest.mark.distributed(world_size=3, backend="gloo", scope="module")


class Branches(nn.Module):
    """Two layers of equal size, of which the caller selects those that run."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(6, 6, bias=False) for _ in range(2))

    def forward(self, x, names):
        return sum(getattr(self, name)(x) for name in names)


def sharded(mesh, **options):
    model = Branches()
    fully_shard(model, mesh=mesh, **options)
    return model


def diverged(comm_mode):
    """Return where the ranks diverge; every question about all ranks must agree."""
    profile = comm_mode.merged_profile(allow_divergence=True)
    text = "" if profile.divergence is None else str(profile.divergence)
    if text:
        with pytest.raises(RanksDivergedError) as caught:
            comm_mode.merged_profile()
        assert str(caught.value) == text
    else:
        assert comm_mode.merged_profile() == profile
    return text


@gloo
def test_order_of_units(comm_mode, device_mesh, dist_info, tmp_path):
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    for layer in layers:
        fully_shard(layer, mesh=device_mesh())
    order = (0, 2, 1) if dist_info.rank == 1 else (0, 1, 2)
    with comm_mode(layers):
        x = torch.ones(2, 6)
        for number in order:
            x = layers[number](x)
        x.sum().backward()
    line = "ranks diverge at call #2 over dp: rank 1 gathers 2, ranks 0, 2 gather 1"
    assert diverged(comm_mode) == line
    path = tmp_path / "step.json"
    with pytest.raises(RanksDivergedError) as caught:
        comm_mode.save(path)
    assert str(caught.value) == f"{line}; the recordings are in {path}"
    if dist_info.rank == 0:
        assert str(merge_recordings(load_recordings(path.read_text())).divergence) == line


@pytest.mark.upstream
@gloo
@pytest.mark.parametrize("accumulates", [False, True])
def test_parameters_of_a_reduction(comm_mode, device_mesh, dist_info, accumulates):
    model = sharded(device_mesh())
    name = "b" if dist_info.rank == 1 else "a"
    with comm_mode(model):
        if accumulates:
            model.set_requires_gradient_sync(False)
            model(torch.ones(2, 6), name).sum().backward()
            model.set_requires_gradient_sync(True)
        model(torch.ones(2, 6), name).sum().backward()
    number = 3 if accumulates else 2
    assert diverged(comm_mode) == (
        f"ranks diverge at call #{number} over dp: rank 1 reduces gradients of b.weight, "
        "ranks 0, 2 reduce gradients of a.weight"
    )


@gloo
def test_unused_parameters_may_be_reduced_as_zeros(comm_mode, device_mesh, dist_info):
    model = sharded(device_mesh())
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch cannot reduce zeros for unused parameters")
    model.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
    with comm_mode(model):
        model(torch.ones(2, 6), "b" if dist_info.rank == 1 else "a").sum().backward()
    assert diverged(comm_mode) == ""


@gloo
def test_experts_without_tokens_have_gradients(comm_mode, device_mesh, dist_info):
    model = sharded(device_mesh())
    with comm_mode(model):
        model(torch.ones(0 if dist_info.rank == 1 else 2, 6), "ab").sum().backward()
    assert diverged(comm_mode) == ""


@gloo
def test_accumulated_gradients_are_carried_too(comm_mode, device_mesh, dist_info):
    """Each rank runs both branches, in one of two micro-batches, so all carry both gradients."""
    model = sharded(device_mesh())
    names = "ba" if dist_info.rank == 1 else "ab"
    with comm_mode(model):
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 6), names[0]).sum().backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 6), names[1]).sum().backward()
    assert diverged(comm_mode) == ""
    assert [event.parameters for event in comm_mode.events][-1] == ()


@gloo
def test_all_reduce_of_replicas_carries_parameters(comm_mode, device_mesh, dist_info):
    mesh = device_mesh(replicate=3, shard=1)
    model = sharded(mesh)
    name = "b" if dist_info.rank == 1 else "a"
    with comm_mode(model):
        model(torch.ones(2, 6), name).sum().backward()
    assert "over replicate: rank 1 reduces gradients of b.weight" in diverged(comm_mode)


@gloo
def test_frozen_and_unused_parameters(comm_mode, device_mesh):
    model = Branches()
    model.a.requires_grad_(requires_grad=False)
    fully_shard(model, mesh=device_mesh())
    with comm_mode(model):
        model(torch.ones(2, 6), "ab").sum().backward()
    assert diverged(comm_mode) == ""
    assert [event.parameters for event in comm_mode.events] == [(), ("b.weight",)]


@gloo
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1"])
def test_whole_buckets_may_lack_gradients(comm_mode, dist_info, wrapper):
    """DDP and FSDP1 reduce zeros for unused parameters, so nothing is mixed up."""
    model = Branches()
    if wrapper == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    for _ in range(2):
        with comm_mode(model):
            model(torch.ones(2, 6), "b" if dist_info.rank == 1 else "a").sum().backward()
        assert comm_mode.counts() > 0
        assert diverged(comm_mode) == ""


@gloo
def test_hand_written_reduction_in_another_order(comm_mode, dist_info):
    model = Branches()
    model(torch.ones(2, 6), "ab").sum().backward()
    parameters = [*model.parameters()]
    with comm_mode(model):
        for parameter in parameters[:: -1 if dist_info.rank == 1 else 1]:
            dist.all_reduce(parameter.grad)
    assert "#1 over world: rank 1 reduces gradients of b, ranks 0, 2 reduce" in diverged(comm_mode)


@gloo
def test_uneven_amounts_are_legitimate(comm_mode, device_mesh, dist_info):
    """Uneven splits, DTensors and lists, roots of gathers and scatters, and objects."""
    rank, mesh = dist_info.rank, device_mesh()
    counts = [[1, 2, 3], [0, 4, 1], [2, 2, 2]]
    received = [torch.empty(row[rank]) for row in counts]
    with comm_mode:
        sent = [torch.ones(count) for count in counts[rank]]
        output = torch.empty(sum(row[rank] for row in counts))
        dist.all_to_all_single(output, torch.cat(sent), [row[rank] for row in counts], counts[rank])
        assert sum(map(len, received)) == len(output)
        distribute_tensor(torch.ones(7, 2), mesh, [Shard(0)]).full_tensor()
        is_root = rank == 1
        parts = [torch.ones(2) for _ in range(3)]
        dist.gather(torch.ones(2), parts if is_root else None, dst=1)
        dist.scatter(torch.ones(2), parts if is_root else None, src=1)
        dist.broadcast(torch.ones(5), src=2)
        dist.reduce(torch.ones(5), dst=2)
        objects = [None] * 3
        dist.all_gather_object(objects, "x" * (rank + 1))
        dist.broadcast_object_list([{rank: "y" * 40} if is_root else None], src=1)
        dist.gather_object("z" * rank, objects if is_root else None, dst=1)
    assert diverged(comm_mode) == ""
    assert isinstance(distribute_tensor(torch.ones(3), mesh, [Shard(0)]), DTensor)


@gloo
def test_ranks_outside_a_group(comm_mode, dist_info):
    pair = dist.new_group([1, 2])
    with comm_mode:
        dist.all_reduce(torch.ones(2))
        if dist_info.rank:
            dist.all_reduce(torch.ones(3), group=pair)
    assert diverged(comm_mode) == ""
    assert [event.group_ranks for event in comm_mode.events][1:] == [(1, 2)] * bool(dist_info.rank)


@gloo
def test_transfers_between_stages(comm_mode, dist_info):
    rank = dist_info.rank
    with comm_mode:
        if rank:
            dist.recv(torch.empty(4), rank - 1)
        if rank < 2:
            dist.send(torch.ones(4), rank + 1)
        dist.all_reduce(torch.ones(1))
    assert diverged(comm_mode) == ""


@gloo
def test_threads_may_call_at_any_time(comm_mode, dist_info):
    """A thread uses its own group before or after the calls of the main thread."""
    background = dist.new_group([0, 1, 2])

    def run():
        dist.all_reduce(torch.ones(2), group=background)

    thread = threading.Thread(target=run)
    with comm_mode:
        if dist_info.rank == 1:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            thread.start()
            work.wait()
        else:
            thread.start()
            dist.all_reduce(torch.ones(3))
        thread.join()
    assert {event.is_unordered for event in comm_mode.events} == {False, True}
    assert diverged(comm_mode) == ""


@gloo
def test_asynchronous_calls_of_two_groups_form_a_circle(comm_mode, dist_info):
    first, second = (dist.new_group([0, 1, 2], group_desc=name) for name in ("first", "second"))
    groups = [second, first] if dist_info.rank == 1 else [first, second]
    with comm_mode:
        works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]
        for work in works:
            work.wait()
    assert diverged(comm_mode) == (
        "ranks call several groups in different orders, which can hang on NCCL: rank 0 calls "
        "all_reduce #1 over first before all_reduce #1 over second, rank 1 calls all_reduce #1 "
        "over second before all_reduce #1 over first"
    )


@pytest.mark.distributed(world_size=8, simulate=True, ranks=[0, 1, 5])
def test_simulated_ranks_are_compared(comm_mode, device_mesh, dist_info):
    layers, mesh = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), device_mesh(dp=4, tp=2)
    for layer in layers:
        fully_shard(layer, mesh=mesh["dp"])
    order = (1, 0) if dist_info.rank == 5 else (0, 1)
    with comm_mode(layers):
        x = torch.ones(2, 8)
        for number in order:
            x = layers[number](x)
        x.sum().backward()
    assert diverged(comm_mode) == (
        "ranks diverge at call #1 over dp (ranks 1, 5): rank 1 gathers 0, rank 5 gathers 1"
    )
