"""Every call of torch.distributed, DDP and FSDP1, on real gloo ranks, with sizes by hand."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

NUMEL = 4
NBYTES = 4 * NUMEL


def calls(comm_mode):
    return [
        (event.kind, event.source.value, event.nbytes_sent, event.nbytes_received)
        for event in comm_mode.events
    ]


@pytest.mark.distributed(world_size=2)
def test_each_call_is_one_event_with_its_bytes(comm_mode, dist_info):
    first = dist_info.rank == 0
    other = 1 - dist_info.rank
    tensor = torch.ones(NUMEL)
    both = [torch.zeros(NUMEL) for _ in range(2)]
    with comm_mode, warnings.catch_warnings():
        # torch 2.13 renamed the *_tensor functions; the old names are what most code calls.
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.all_gather(both, tensor)
        dist.all_gather_into_tensor(torch.zeros(2 * NUMEL), tensor)
        dist.gather(tensor, both if first else None, 0)
        dist.scatter(tensor, both if first else None, 0)
        dist.reduce_scatter(tensor, both)
        dist.all_to_all_single(torch.zeros(NUMEL), tensor)
        if first:
            dist.send(tensor, other)
        else:
            dist.recv(tensor, other)
        operation = dist.isend if first else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, other)]):
            work.wait()
        dist.all_reduce(tensor, async_op=True).wait()
        dist.barrier()
        dist.monitored_barrier()
    user = "user"
    point_to_point = ("send", user, NBYTES, 0) if first else ("recv", user, 0, NBYTES)
    assert calls(comm_mode) == [
        ("all_reduce", user, NBYTES, NBYTES),
        ("broadcast", user, NBYTES, 0) if first else ("broadcast", user, 0, NBYTES),
        ("reduce", user, NBYTES, 0),
        ("all_gather", user, NBYTES, 2 * NBYTES),
        ("all_gather", user, NBYTES, 2 * NBYTES),
        ("gather", user, NBYTES, 2 * NBYTES if first else 0),
        ("scatter", user, 2 * NBYTES if first else 0, NBYTES),
        ("reduce_scatter", user, 2 * NBYTES, NBYTES),
        ("all_to_all", user, NBYTES, NBYTES),
        point_to_point,
        point_to_point,
        ("all_reduce", user, NBYTES, NBYTES),
        ("barrier", user, 0, 0),
        ("barrier", user, 0, 0),
    ]
    assert {(event.phase.value, event.owner, event.axis) for event in comm_mode.events} == {
        ("outside", None, "world")
    }
    sites = [event.call_site for event in comm_mode.events]
    assert all("test_plain_collectives.py:" in site for site in sites)


@pytest.mark.distributed(world_size=2)
def test_call_in_hook_is_not_of_the_line_that_calls_backward(comm_mode):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def hook(param):
        dist.all_reduce(param.grad)

    # If hooks issue most calls of backward, their line is still not the one that calls it.
    for param in [*model.parameters()] * 3:
        param.register_post_accumulate_grad_hook(hook)
    unit = fully_shard(nn.Linear(4, 4))
    with comm_mode(model):
        unit(model(torch.ones(4, 4))).sum().backward()
    found = {
        (event.kind, event.phase.value, event.call_site.rpartition(":")[2], event.is_of_backward)
        for event in comm_mode.events
    }
    first = hook.__code__.co_firstlineno
    step = str(first + 8)
    assert found == {
        ("all_gather", "forward", step, False),
        ("reduce_scatter", "backward", step, True),
        ("all_reduce", "backward", str(first + 1), False),
    }


@pytest.mark.distributed(world_size=4)
def test_groups_are_named_by_mesh_axis_or_shape(comm_mode, device_mesh, dist_info):
    mesh = device_mesh(dp=2, tp=2)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with comm_mode:
        for axis in ("dp", "tp"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
        dist.all_reduce(torch.ones(1), group=pairs[dist_info.rank % 2])
        dist.all_reduce(torch.ones(1))
    assert [(event.axis, event.group_size) for event in comm_mode.events] == [
        ("dp", 2),
        ("tp", 2),
        ("size2.stride2", 2),
        ("world", 4),
    ]
