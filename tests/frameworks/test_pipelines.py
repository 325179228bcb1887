"""Schedules of torch with FSDP2 inside the stages, from the second step on.

What FSDP gathers is derived from the order in which a schedule runs its micro-batches.
"""

import pytest
import torch
from models import ACTIVATION_NBYTES, BLOCK_NBYTES, LINEAR_NBYTES, WIDTH, Block
from oracle import lines, owned_lines, witnessed_twice
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard

MICRO_BATCHES = 4
BATCH = 2 * MICRO_BATCHES

# torch warns about calls that its own stages make.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Part(nn.Module):
    """A stage of two layers with their numbers in the model; the first stage also embeds."""

    def __init__(self, number, mesh):
        super().__init__()
        if number == 0:
            self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        numbers = (2 * number, 2 * number + 1)
        self.layers = nn.ModuleDict({str(n): fully_shard(Block(), mesh=mesh) for n in numbers})
        fully_shard(self, mesh=mesh)

    def forward(self, x):
        if hasattr(self, "embed"):
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x


class Pipeline:
    """The stages of this rank, out of `stages`, and a step of the schedule."""

    def __init__(self, schedule, stages, pp, dp):
        self.rank, ranks = pp.get_local_rank(), pp.size()
        self.last = ranks - 1
        self.numbers = range(self.rank, stages, ranks)
        self.parts = [Part(number, dp) for number in self.numbers]
        local_stages = [
            pipelining.PipelineStage(
                part, number, stages, torch.device("cpu"), group=pp.get_group()
            )
            for part, number in zip(self.parts, self.numbers, strict=True)
        ]
        self.schedule = getattr(pipelining, schedule)(
            local_stages if stages > ranks else local_stages[0],
            MICRO_BATCHES,
            loss_fn=lambda output, target: (output - target).pow(2).sum(),
        )

    def step(self):
        inputs = [torch.randn(BATCH, WIDTH)] if self.rank == 0 else []
        target = torch.randn(BATCH, WIDTH) if self.rank == self.last else None
        self.schedule.step(*inputs, target=target)


def gathers(order, *, is_unsharded=False):
    """Return the phases in which a layer is gathered, if backward does not reshard it.

    Args:
        order: ``F`` and ``B``, as a stage runs them.
        is_unsharded: Whether the schedule gathers it itself, ahead of the first forward.
    """
    phases = ["outside"] if is_unsharded else []
    for direction in order:
        if not is_unsharded:
            phases.append("forward" if direction == "F" else "backward")
        # Forward reshards the layer; after backward it stays gathered until the step ends.
        is_unsharded = direction == "B"
    return phases


def stage_lines(number, order, *, is_unsharded=False):
    """Return lines of a stage's layers, and of the root's embedding, which stays gathered."""
    sent = [
        f"{phase} layers.{layer} all_gather[dp] {BLOCK_NBYTES}"
        for layer in (2 * number, 2 * number + 1)
        for phase in gathers(order, is_unsharded=is_unsharded)
    ]
    sent += [
        f"backward layers.{layer} reduce_scatter[dp] {BLOCK_NBYTES}"
        for layer in (2 * number, 2 * number + 1)
    ]
    if number == 0:
        first = "outside" if is_unsharded else "forward"
        sent += [f"{first} . all_gather[dp] {LINEAR_NBYTES}"]
        sent += [f"backward . reduce_scatter[dp] {LINEAR_NBYTES}"]
    return sent


@pytest.mark.distributed(world_size=4)
def test_1f1b_communication_follows_its_order(comm_mode, fsdp_tree, device_mesh):
    mesh = device_mesh(pp=2, dp=2)
    pipeline = Pipeline("Schedule1F1B", 2, mesh["pp"], mesh["dp"])
    witnessed_twice(comm_mode, pipeline.parts, pipeline.step, warm_up=1)
    # The first stage is one micro-batch ahead of the last.
    order = "FFBFBFBB" if pipeline.rank == 0 else "FBFBFBFB"
    hops = [f"outside - {kind}[pp] {ACTIVATION_NBYTES}" for kind in ("send", "recv")]
    expected = stage_lines(pipeline.rank, order) + hops * MICRO_BATCHES
    assert owned_lines(comm_mode) == sorted(expected)
    # They follow the last backward, outside autograd; their order differs in torch 2.13 and 2.15.
    sent = [line.partition(" < ")[0] for line in lines(comm_mode)]
    reductions = [line for line in sent if "reduce_scatter" in line]
    assert sent[-len(reductions) :] == reductions
    assert not fsdp_tree(pipeline.parts[0]).findings


@pytest.mark.distributed(world_size=4)
def test_interleaved_1f1b_with_two_stages_a_rank(comm_mode, device_mesh):
    mesh = device_mesh(pp=2, dp=2)
    pipeline = Pipeline("ScheduleInterleaved1F1B", 4, mesh["pp"], mesh["dp"])
    witnessed_twice(comm_mode, pipeline.parts, pipeline.step, warm_up=1)
    expected = []
    for number in pipeline.numbers:
        order = "".join(
            action.computation_type.value
            for action in pipeline.schedule.pipeline_order[pipeline.rank]
            if action is not None and action.stage_index == number
        )
        assert sorted(order) == sorted("FB" * MICRO_BATCHES)
        expected += stage_lines(number, order, is_unsharded=True)
    # Four stages have three hops in each direction; each rank sends half of them.
    hops = [f"outside - {kind}[pp] {ACTIVATION_NBYTES}" for kind in ("send", "recv")]
    assert owned_lines(comm_mode) == sorted(expected + hops * 3 * MICRO_BATCHES)


@pytest.mark.distributed(world_size=4)
def test_1f1b_peers_are_neighbouring_stages(comm_mode, device_mesh):
    """Activations go to the next stage, gradients to the previous one."""
    mesh = device_mesh(pp=4, dp=1)
    pipeline = Pipeline("Schedule1F1B", 4, mesh["pp"], mesh["dp"])
    witnessed_twice(comm_mode, pipeline.parts, pipeline.step, warm_up=1)
    # Peers count upwards and around: 1 is the next of four stages, 3 the previous one.
    following = [("send", 1), ("recv", 1)] if pipeline.rank < pipeline.last else []
    previous = [("send", 3), ("recv", 3)] if pipeline.rank > 0 else []
    met = [(event.kind, event.peer) for event in comm_mode.events]
    assert sorted(met) == sorted((following + previous) * MICRO_BATCHES)


@pytest.mark.distributed(world_size=2)
def test_first_step_sends_shapes(comm_mode, device_mesh):
    mesh = device_mesh(pp=2, dp=1)
    pipeline = Pipeline("Schedule1F1B", 2, mesh["pp"], mesh["dp"])
    with comm_mode(pipeline.parts):
        pipeline.step()
    sizes = {event.nbytes for event in comm_mode.events}
    assert ACTIVATION_NBYTES in sizes
    assert len(sizes) > 1
