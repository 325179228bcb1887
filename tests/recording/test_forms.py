"""Every form of a collective: functional, in place, into a tensor, coalesced, on sub-groups."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from oracle import gloo_and_fake, lines, witnessed

NBYTES = 16

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def data():
    return torch.ones(4)


def kinds(comm_mode):
    return [(event.kind, event.nbytes_sent, event.nbytes_received) for event in comm_mode.events]


@gloo_and_fake(2)
def test_functional_collectives_are_recorded(comm_mode):
    world = dist.group.WORLD

    def send():
        x = data()
        funcol.all_reduce(x, "sum", world)
        funcol.all_gather_tensor(x, 0, world)
        funcol.reduce_scatter_tensor(x, "sum", 0, world)
        funcol.broadcast(x, 0, world)
        funcol.all_to_all_single(x, None, None, world)

    witnessed(comm_mode, None, send)
    rank = dist.get_rank()
    assert kinds(comm_mode) == [
        ("all_reduce", NBYTES, NBYTES),
        ("all_gather", NBYTES, 2 * NBYTES),
        ("reduce_scatter", NBYTES, NBYTES // 2),
        ("broadcast", *((NBYTES, 0) if rank == 0 else (0, NBYTES))),
        ("all_to_all", NBYTES, NBYTES),
    ]


@gloo_and_fake(2)
def test_in_place_and_out_forms_are_recorded(comm_mode):
    # What inductor emits.
    ops = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name

    def send():
        x = data()
        ops.all_reduce_(x, "sum", name)
        ops.broadcast_(x, 0, name)
        ops.all_reduce_coalesced_([x, x.clone()], "sum", name)
        ops.all_gather_into_tensor_out(x, 2, name, out=torch.empty(8))
        ops.reduce_scatter_tensor_out(x, "sum", 2, name, out=torch.empty(2))

    witnessed(comm_mode, None, send)
    assert [event.kind for event in comm_mode.events] == [
        "all_reduce",
        "broadcast",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    ]
    assert kinds(comm_mode)[2:] == [
        ("all_reduce", 2 * NBYTES, 2 * NBYTES),
        ("all_gather", NBYTES, 2 * NBYTES),
        ("reduce_scatter", NBYTES, NBYTES // 2),
    ]


@gloo_and_fake(2)
def test_coalesced_collectives_are_one_event(comm_mode):
    world = dist.group.WORLD

    def send():
        x, y = data(), torch.ones(2)
        funcol.all_reduce_coalesced([x, y], "sum", world)
        funcol.all_gather_into_tensor_coalesced([x, y], world)
        funcol.reduce_scatter_tensor_coalesced([x, y], "sum", [0, 0], world)
        dist.all_reduce_coalesced([x, y])
        with dist._coalescing_manager():
            dist.all_reduce(x)
            dist.all_reduce(y)
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(torch.ones(8), x)
            dist.all_gather_into_tensor(data(), y)
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(y, data())
            dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2))

    witnessed(comm_mode, None, send)
    both = NBYTES + NBYTES // 2
    assert kinds(comm_mode) == [
        ("all_reduce", both, both),
        ("all_gather", both, 2 * both),
        ("reduce_scatter", both, both // 2),
        ("all_reduce", both, both),
        ("all_reduce", both, both),
        ("all_gather", both, 2 * both),
        ("reduce_scatter", both, both // 2),
    ]


@gloo_and_fake(2)
def test_async_collective_is_recorded_when_issued(comm_mode):
    def send():
        x = data()
        works = [
            dist.all_reduce(x, async_op=True),
            dist.all_gather_into_tensor(torch.empty(8), x.clone(), async_op=True),
            dist.barrier(async_op=True),
        ]
        for work in works:
            work.wait()

    witnessed(comm_mode, None, send)
    assert [event.kind for event in comm_mode.events] == ["all_reduce", "all_gather", "barrier"]


@pytest.mark.distributed(world_size=4)
def test_equal_sized_groups_are_named_apart(comm_mode, dist_info):
    rank = dist_info.rank
    neighbours = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    twice = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    strided = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    described = dist.new_group([0, 1, 2, 3], group_desc="checkpoints")

    def send():
        for group in (neighbours, twice, strided, described):
            dist.all_reduce(data(), group=group)

    witnessed(comm_mode, None, send)
    # By shape and description, and the same on every rank; never by torch's counters.
    assert lines(comm_mode) == [
        f"outside - all_reduce[{axis}] {NBYTES} < -"
        for axis in ("size2.stride1", "size2.stride1", "size2.stride2", "checkpoints")
    ]
    assert {event.group_size for event in comm_mode.events} == {2, 4}


@pytest.mark.distributed(world_size=2)
def test_object_collectives_send_their_size_first(comm_mode):
    def send():
        dist.all_gather_object([None, None], {"a": 1})
        dist.broadcast_object_list([{"a": 1}], 0)
        gathered = [None, None] if dist.get_rank() == 0 else None
        dist.gather_object({"a": 1}, gathered)
        scattered = [{"a": 1}, {"b": 2}] if dist.get_rank() == 0 else None
        dist.scatter_object_list([None], scattered)

    witnessed(comm_mode, None, send)
    assert {event.source.value for event in comm_mode.events} == {"object"}
    # Each sends its size first.
    assert [event.kind for event in comm_mode.events] == [
        "all_gather",
        "all_gather",
        "broadcast",
        "broadcast",
        "all_gather",
        "gather",
        "broadcast",
        "scatter",
        "scatter",
    ]


@gloo_and_fake(4)
def test_a_batch_of_sends_and_receives(comm_mode, dist_info):
    batch = getattr(torch.ops._c10d_functional, "batch_p2p_ops", None)
    if batch is None:
        pytest.skip("this torch has no batch_p2p_ops")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, other = groups[dist_info.rank // 2], 1 - dist_info.rank % 2
    received = torch.zeros(4)

    def send():
        mine = torch.full((4,), float(dist_info.rank))
        tensors = [mine, received, torch.ones(2), torch.zeros(2)]
        names = ["isend", "irecv"] * 2
        for result in batch(names, [other] * 4, [0, 0, 1, 1], tensors, group.group_name):
            torch.ops._c10d_functional.wait_tensor(result)

    with comm_mode:
        send()
    assert kinds(comm_mode) == [
        ("send", NBYTES, 0),
        ("recv", 0, NBYTES),
        ("send", NBYTES // 2, 0),
        ("recv", 0, NBYTES // 2),
    ]
    assert [event.index for event in comm_mode.events] == [0, 1, 2, 3]
    assert {event.op for event in comm_mode.events} == {"_c10d_functional.batch_p2p_ops"}
    assert {event.group_size for event in comm_mode.events} == {2}
    if dist.get_backend() == "gloo":
        assert received.tolist() == [float(dist_info.rank ^ 1)] * 4
