"""Peers, roots, reductions and the async flag of recorded calls."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from models import Model, shard, step
from oracle import gloo_and_fake
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch_facts import SHOWS_ASYNC, SHOWS_REDUCE_OP

from pytest_fsdp_comm.comm.json import dump_recordings, load_recordings

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

functional = torch.ops._c10d_functional


def data():
    return torch.ones(4)


def peers(comm_mode):
    return [(event.kind, event.peer) for event in comm_mode.events]


def halves():
    """This rank's of the groups of every second rank, whose numbers are not those of the world."""
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]


@gloo_and_fake(4)
def test_peers_are_counted_from_the_rank_itself(comm_mode, dist_info):
    rank = dist_info.rank
    group = halves()
    ahead, behind, opposite = (rank + 1) % 4, (rank - 1) % 4, (rank + 2) % 4
    with comm_mode:
        sending = dist.isend(data(), ahead)
        dist.recv(data(), behind)
        sending.wait()
        pair = [
            dist.P2POp(dist.isend, data(), opposite, group),
            dist.P2POp(dist.irecv, data(), opposite, group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
    # The same on every rank, the last one too.
    assert peers(comm_mode) == [("send", 1), ("recv", 3), ("send", 1), ("recv", 1)]
    assert load_recordings(dump_recordings([comm_mode.recording]))[0] == comm_mode.recording


@pytest.mark.distributed(world_size=2)
def test_a_receiver_from_anyone_has_no_peer(comm_mode, dist_info):
    with comm_mode:
        if dist_info.rank == 0:
            dist.recv(data())
        else:
            dist.send(data(), 0)
    assert peers(comm_mode) == [("recv", None) if dist_info.rank == 0 else ("send", 1)]


@gloo_and_fake(4)
def test_each_call_of_a_batch_has_its_own_peer(comm_mode):
    if not hasattr(functional, "batch_p2p_ops"):
        pytest.skip("this torch has no batch_p2p_ops")
    group = halves()
    other = 1 - group.rank()
    tensors = [data(), data()]
    with comm_mode:
        names = ["isend", "irecv"]
        results = functional.batch_p2p_ops(names, [other] * 2, [0] * 2, tensors, group.group_name)
        for result in results:
            functional.wait_tensor(result)
    assert peers(comm_mode) == [("send", 1), ("recv", 1)]


@pytest.mark.distributed(world_size=4, backend="fake", ranks=[0, 2])
def test_a_functional_rank_is_that_of_the_group(comm_mode, dist_info):
    if not hasattr(functional, "isend"):
        pytest.skip("this torch has no functional send")
    group = halves()
    with comm_mode:
        # torch passes the number on as a group rank, though its functions pass a global rank.
        for number in range(4):
            functional.isend(data(), number, 0, group.group_name)
            functional.broadcast(data(), number, group.group_name)
    from_rank = {0: (0, 1), 2: (1, 0)}[dist_info.rank]
    assert [(event.peer, event.root_rank) for event in comm_mode.events] == [
        (from_rank[0], None),
        (None, 0),
        (from_rank[1], None),
        (None, 1),
        *[(None, None)] * 4,  # the group has no such ranks
    ]


@gloo_and_fake(4)
def test_roots_are_ranks_of_the_group(comm_mode, dist_info):
    rank, group = dist_info.rank, halves()
    last = 2 + rank % 2
    parts = [data(), data()] if rank == last else None
    with comm_mode:
        dist.broadcast(data(), last, group=group)
        dist.scatter(data(), parts, last, group=group)
        dist.broadcast(data(), 3)
        funcol.broadcast(data(), 2, dist.group.WORLD)
        dist.reduce(data(), 0)
    assert [(event.kind, event.root_rank) for event in comm_mode.events] == [
        ("broadcast", 1),
        ("scatter", 1),
        ("broadcast", 3),
        ("broadcast", 2),
        ("reduce", 0),
    ]
    assert {event.peer for event in comm_mode.events} == {None}


@pytest.mark.distributed(world_size=2, backend="fake")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("SUM", marks=pytest.mark.upstream),
        *("AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"),
    ],
)
def test_a_reduction_is_named_as_torch_names_it(comm_mode, name):
    if name == "PREMUL_SUM":
        reduce_op = dist._make_nccl_premul_sum(2.0)
    else:
        reduce_op = getattr(dist.ReduceOp, name)
    with comm_mode:
        dist.all_reduce(data(), reduce_op)
        dist.reduce(data(), 0, reduce_op)
        dist.reduce_scatter_tensor(torch.ones(2), data(), reduce_op)
        dist.all_reduce_coalesced([data()], reduce_op)
        if name != "PREMUL_SUM":  # the functional collectives do not know it
            funcol.all_reduce(data(), name, dist.group.WORLD)
        dist.all_gather_into_tensor(torch.ones(8), data())
        dist.barrier()
    found = [event.reduce_op for event in comm_mode.events]
    assert found[-2:] == [None, None]
    of_c10d = name.lower() if SHOWS_REDUCE_OP else None
    assert found[:-2] == [of_c10d] * 4 + [name.lower()] * (name != "PREMUL_SUM")
    calls = {row.what: row.calls for row in comm_mode.profile.rows}
    assert [str(call) for call in calls["reduce"]] == [
        "x1 of 16 B float32 root 0" + (f" by {of_c10d}" if of_c10d and name != "SUM" else "")
    ]


@pytest.mark.distributed(world_size=2, backend="fake")
def test_reduction_of_fsdp_and_dtensor_is_not_shown(comm_mode, device_mesh):
    mesh = device_mesh()
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with comm_mode(model):
        model(torch.ones(2, 4)).sum().backward()
        DTensor.from_local(data(), mesh, [Partial("max")]).full_tensor()
    assert comm_mode.events[-1].reduce_op == "max"
    assert {row.what for row in comm_mode.profile.collectives} >= {"reduce_scatter", "all_reduce"}
    assert {call.reduce_op for row in comm_mode.profile.rows for call in row.calls} == {""}


@gloo_and_fake(2)
def test_call_with_work_to_wait_for_is_async(comm_mode):
    other = 1 - dist.get_rank()
    with comm_mode:
        for is_async in (False, True):
            works = [
                dist.all_reduce(data(), async_op=is_async),
                dist.all_gather_into_tensor(torch.ones(8), data(), async_op=is_async),
                dist.broadcast(data(), 0, async_op=is_async),
                dist.barrier(async_op=is_async),
            ]
            for work in works:
                if work is not None:
                    work.wait()
        # torch passes no flag: these return at once, and are waited for where they are used.
        funcol.all_reduce(data(), "sum", dist.group.WORLD).wait()
        sending = dist.isend(data(), other)
        dist.recv(data(), other)
        sending.wait()
        if dist.get_backend() == "gloo":
            dist.monitored_barrier()
    found = [event.is_async for event in comm_mode.events]
    assert found[:8] == [False] * 4 + [True] * 4
    assert set(found[8:]) == {None}


@pytest.mark.upstream
@gloo_and_fake(2)
def test_fsdp_is_sync_except_async_unshard(comm_mode, device_mesh):
    model = shard(Model(1), device_mesh())
    with comm_mode(model):
        step(model)
        model.layers[0].unshard(async_op=True).wait()
    by_kind = {
        kind: [event.is_async for event in comm_mode.events if event.kind == kind]
        for kind in ("all_gather", "reduce_scatter")
    }
    assert by_kind == {"all_gather": [False] * 3 + [True], "reduce_scatter": [False] * 2}


@gloo_and_fake(2)
def test_units_that_unshard_asynchronously_say_so(comm_mode, device_mesh):
    model = shard(Model(1), device_mesh())
    model.layers[0]._set_unshard_async_op(async_op=True)
    with comm_mode(model):
        step(model)
    gathers = [event for event in comm_mode.events if event.kind == "all_gather"]
    # Its forward, and its backward by prefetch; the root is as before.
    assert [(event.owner, event.is_async) for event in gathers] == [
        ("", False),
        ("layers.0", True),
        ("layers.0", True),
    ]


@pytest.mark.upstream
@gloo_and_fake(2)
def test_fsdp1_calls_are_synchronous(comm_mode):
    model = FullyShardedDataParallel(Model(1), device_id=torch.device("cpu"))
    with comm_mode(model):
        step(model)
    assert {(event.kind, event.is_async) for event in comm_mode.events} == {
        # Of parts; torch 2.7 does not pass the flag of their gather.
        ("all_gather", False if SHOWS_ASYNC else None),
        ("reduce_scatter", False),
    }


@gloo_and_fake(2)
def test_ddp_reduces_its_buckets_asynchronously(comm_mode):
    replica = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    # On the fake group torch's reducer fails at the result of the call, once it has issued it.
    is_fake = dist.get_backend() == "fake"
    with comm_mode(replica), contextlib.suppress(*[RuntimeError] * is_fake):
        replica(torch.ones(1, 4)).sum().backward()
    (event,) = comm_mode.events
    assert (event.kind, event.is_async, event.reduce_op) == ("all_reduce", True, "sum")
