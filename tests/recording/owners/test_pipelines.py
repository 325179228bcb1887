"""Pipelines: the messages between stages, in the order of each schedule."""

import pytest
import torch
import torch.distributed as dist
from models import ACTIVATION_NBYTES, WIDTH, Block, Model, shard
from oracle import witnessed
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch_facts import needs_pipelines_on_gloo

from pytest_fsdp_comm.errors import RecordingError

MICRO_BATCHES = 4
BATCH = 2 * MICRO_BATCHES

# torch tells which of its own functions the stages call.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def run(schedule, dist_info, group_rank=None):
    rank = dist_info.rank if group_rank is None else group_rank
    if rank == 0:
        schedule.step(torch.randn(BATCH, WIDTH))
    else:
        schedule.step(target=torch.randn(BATCH, WIDTH))


def loss(output, target):
    return (output - target).pow(2).sum()


def order(comm_mode):
    """``s`` and ``r``, as this rank sends and receives."""
    return "".join(event.kind[0] for event in comm_mode.events)


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        # All forwards, then all backwards.
        ("ScheduleGPipe", "ssssrrrr", "rrrrssss"),
        # One forward, one backward.
        pytest.param(
            "Schedule1F1B",
            "ssrsrsrr",
            "rsrsrsrs",
            marks=[pytest.mark.upstream, needs_pipelines_on_gloo],
        ),
    ],
)
def test_one_stage_a_rank_follows_its_schedule(comm_mode, dist_info, name, first, last):
    part = Block()
    stage = pipelining.PipelineStage(part, dist_info.rank, 2, torch.device("cpu"))
    schedule = getattr(pipelining, name)(stage, MICRO_BATCHES, loss_fn=loss)
    # The first step also sends the shapes, as objects.
    witnessed(comm_mode, part, lambda: run(schedule, dist_info), warm_up=1)
    assert order(comm_mode) == (first if dist_info.rank == 0 else last)
    assert {event.nbytes for event in comm_mode.events} == {ACTIVATION_NBYTES}
    assert {event.source.value for event in comm_mode.events} == {"user"}


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_two_stages_per_rank_send_each_hop_once(comm_mode, dist_info, name):
    parts = nn.ModuleList([Block(), Block()])
    stages = [
        pipelining.PipelineStage(part, dist_info.rank + 2 * n, 4, torch.device("cpu"))
        for n, part in enumerate(parts)
    ]
    schedule = getattr(pipelining, name)(stages, MICRO_BATCHES, loss_fn=loss)
    witnessed(comm_mode, parts, lambda: run(schedule, dist_info), warm_up=1)
    # Three hops between four stages, there and back, half of them sent from here.
    assert comm_mode.counts("send") == comm_mode.counts("recv") == 3 * MICRO_BATCHES


@pytest.mark.distributed(world_size=4)
def test_stages_that_are_sharded(comm_mode, device_mesh, dist_info):
    mesh = device_mesh(pp=2, dp=2)
    pp = mesh["pp"]

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block()])

        def forward(self, x):
            return self.layers[0](x)

    part = shard(Part(), mesh["dp"])
    stage = pipelining.PipelineStage(
        part, pp.get_local_rank(), 2, torch.device("cpu"), group=pp.get_group()
    )
    schedule = pipelining.ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss)
    step = lambda: run(schedule, dist_info, pp.get_local_rank())  # noqa: E731  # in place of a def with the same words
    witnessed(comm_mode, part, step, warm_up=1)
    by_axis = {}
    for event in comm_mode.events:
        by_axis.setdefault(event.axis, set()).add((event.kind, event.owner))
    assert by_axis == {
        "pp": {("send", None), ("recv", None)},
        "dp": {("all_gather", "layers.0"), ("reduce_scatter", "layers.0")},
    }
    # The schedule reduces after its last backward, outside of autograd.
    assert comm_mode.counts("reduce_scatter", phase="backward") == 1
    assert comm_mode.counts("reduce_scatter", phase="outside") == 0


@pytest.mark.distributed(world_size=4)
def test_gradient_reduced_between_stages_is_found(comm_mode, device_mesh, dist_info):
    """As for tied weights; the schedule sets the gradients after its last backward."""
    mesh = device_mesh(pp=2, dp=2)
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    # A look-up that fails may wait for a quarter as many others as there are parameters.
    part = shard(Model(blocks=6), mesh["dp"])
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    schedule = pipelining.ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss)

    def step():
        run(schedule, dist_info, rank)
        gradient = part.layers[0].up.weight.grad
        dist.all_reduce(gradient.to_local(), group=group)
        part.zero_grad()

    step()
    with comm_mode(part):
        step()
    sums = [event for event in comm_mode.events if event.kind == "all_reduce"]
    assert [(event.owner, event.role, event.axis) for event in sums] == [
        ("layers.0.up", "gradients", "pp")
    ]


@pytest.mark.distributed(world_size=4)
def test_stage_keeps_names_of_whole_model(comm_mode, device_mesh, dist_info, fsdp_tree):
    mesh = device_mesh(pp=2, dp=2)
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()

    class Part(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.layers = nn.ModuleDict({str(n): fully_shard(Block(), mesh=mesh["dp"])})
            fully_shard(self, mesh=mesh["dp"])

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return x

    numbers = [rank, rank + 2]
    parts = [Part(n) for n in numbers]
    stages = [
        pipelining.PipelineStage(part, n, 4, torch.device("cpu"), group=group)
        for part, n in zip(parts, numbers, strict=True)
    ]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss)
    witnessed(comm_mode, parts, lambda: run(schedule, dist_info, rank), warm_up=1)
    reduced = [
        (event.phase.value, event.owner)
        for event in comm_mode.events
        if event.kind == "reduce_scatter"
    ]
    assert sorted(reduced) == [("backward", f"layers.{n}") for n in numbers]
    assert set(comm_mode.get_parameter_info()) == {
        f"FSDPPart.layers.{n}.{name}" for n in numbers for name in ("up", "down")
    }
    assert comm_mode.counts(owner="layers.*") == comm_mode.counts(axis="dp") > 0
    tree = fsdp_tree.of_all_ranks(parts)
    # Ranks 0 and 2 run other stages, which is no difference of one model.
    assert not tree.findings, tree
    units = {tree.unit_name(index) for index in range(len(tree.units))}
    assert units == {"", *(f"layers.{n}" for n in numbers)}


@pytest.mark.distributed(world_size=4)
def test_first_step_also_runs_shape_inference(comm_mode, device_mesh, dist_info):
    mesh = device_mesh(pp=2, dp=2)
    part = fully_shard(Block(), mesh=mesh["dp"])
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    schedule = pipelining.ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss)
    sent = []
    for _ in range(3):
        with comm_mode(part):
            run(schedule, dist_info, rank)
        sent.append(
            [(event.kind, event.phase, event.owner, event.nbytes) for event in comm_mode.events]
        )
        objects = [event for event in comm_mode.events if event.source.value == "object"]
        assert bool(objects) == (len(sent) == 1)
    assert sent[0] != sent[1] == sent[2]
    gathers = [
        sum(kind == "all_gather" and phase == "forward" for kind, phase, *_ in step)
        for step in sent
    ]
    assert gathers[0] > gathers[1]


def test_parts_with_equal_parameter_names_raise(comm_mode):
    with pytest.raises(RecordingError, match=r"of them have a parameter named down\.weight; pass"):
        comm_mode([Block(), Block()])
    with pytest.raises(RecordingError, match="or a list of them, got str"):
        comm_mode([Block(), "Block"])
    with pytest.raises(RecordingError, match=r"comm_mode\(\[\]\) got an empty list"):
        comm_mode([])
    whole = nn.Sequential(Block(), nn.Sequential(Block()))
    overlap = r"do not overlap, but one of them, a \w+, is passed twice or lies within another"
    for parts in ([whole, whole], [whole, whole[1]], [whole[0], whole]):
        with pytest.raises(RecordingError, match=overlap):
            comm_mode(parts)
    # Modules without parameters may have equal names.
    comm_mode([nn.Sequential(nn.ReLU(), Block()), nn.Sequential(nn.ReLU())])
