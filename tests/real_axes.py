"""Pipelines and experts, for `tests/acceptance/test_real_axes.py`.

That test runs this file on gloo ranks and on simulated ranks with a real axis, and compares the
recordings of ranks that run in both. pytest does not collect the file itself.
"""

import json
import pathlib

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Block
from oracle import lines
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch_facts import needs_pipelines_on_gloo

MICRO_BATCHES = 8

# torch warns about its functions that its stages call.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), needs_pipelines_on_gloo]


class Part(nn.Module):
    def __init__(self, number, mesh):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): fully_shard(Block(), mesh=mesh)})
        fully_shard(self, mesh=mesh)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def pipeline(schedule, mesh):
    """Return this rank's parts, and a function that runs a step of the schedule."""
    pp, schedule_class = mesh["pp"], getattr(pipelining, schedule)
    rank, ranks = pp.get_local_rank(), pp.size()
    is_multiple = issubclass(schedule_class, pipelining.schedules.PipelineScheduleMulti)
    last = (2 * ranks if is_multiple else ranks) - 1
    # In V schedules, the second stage of a rank is at the opposite end.
    second = last - rank if "V" in schedule else rank + ranks
    numbers = (rank, second) if is_multiple else (rank,)
    parts = [Part(number, mesh["dp"]) for number in numbers]
    stages = [
        pipelining.PipelineStage(part, number, last + 1, torch.device("cpu"), group=pp.get_group())
        for part, number in zip(parts, numbers, strict=True)
    ]
    runner = schedule_class(
        stages if is_multiple else stages[0],
        MICRO_BATCHES,
        loss_fn=lambda output, target: (output - target).pow(2).sum(),
    )

    def step():
        batch = torch.randn(2 * MICRO_BATCHES, WIDTH)
        runner.step(*([batch] if 0 in numbers else []), target=batch if last in numbers else None)

    return parts, step


class Experts(nn.Module):
    """One expert per rank of `ep`; only the sending ranks know how many tokens it receives."""

    def __init__(self, mesh):
        super().__init__()
        self.expert = fully_shard(Block(), mesh=mesh["dp"])
        self.group = mesh["ep"].get_group()

    def forward(self, x):
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        sent = torch.arange(size) + 1 + rank
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        splits = [received.tolist(), sent.tolist()]
        exchange = functional.all_to_all_single_autograd
        x = exchange(x[: sum(splits[1])], *splits, self.group)
        return exchange(self.expert(x), *reversed(splits), self.group)


def record(steps, parts, comm_mode, dist_info, request):
    """Write the events of each step to a file; the first step also exchanges objects."""
    events = []
    for step in steps:
        with comm_mode(parts):
            step()
        assert not [gap for gap in comm_mode.recording.gaps if gap.kind != "value_dependent"]
        peers = [event.peer for event in comm_mode.events]
        events.append([*zip(lines(comm_mode), peers, strict=True)])
    path = pathlib.Path(request.config.rootpath, f"{request.node.name}-{dist_info.rank}.json")
    path.write_text(json.dumps(events))


@pytest.fixture
def kind(request):
    return request.param


def both_ways(world_size, real):
    marks = {
        "gloo": pytest.mark.distributed(world_size, backend="gloo"),
        "simulated": pytest.mark.distributed(world_size, simulate=True, real=real),
    }
    kinds = [pytest.param(name, marks=mark) for name, mark in marks.items()]
    return lambda test: pytest.mark.parametrize("kind", kinds, indirect=True)(
        pytest.mark.usefixtures("kind")(test)
    )


@both_ways(8, {"pp": 4})
@pytest.mark.parametrize(
    "schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"]
)
def test_pipelines(schedule, comm_mode, device_mesh, dist_info, request):
    parts, step = pipeline(schedule, device_mesh(pp=4, dp=2))
    record([step, step], parts, comm_mode, dist_info, request)


@both_ways(4, {"ep": (2, 1)})
def test_experts(comm_mode, device_mesh, dist_info, request):
    experts = Experts(device_mesh(dp=2, ep=2))
    step = lambda: experts(torch.randn(8, WIDTH)).sum().backward()  # noqa: E731  # shorter than a def
    record([step], experts, comm_mode, dist_info, request)
