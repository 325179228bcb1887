"""Collectives inside of autograd functions and hooks, as in hand-written tensor parallelism."""

import pytest
import torch
import torch.distributed as dist
from models import ACTIVATION_NBYTES, WIDTH, Model, step
from oracle import gloo_and_fake, lines, witnessed
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_comm.comm.events import Role

SENT = ACTIVATION_NBYTES


class Copy(torch.autograd.Function):
    """Runs no operation in forward: its node is all that the module leaves."""

    @staticmethod
    def forward(_context, x):
        return x

    @staticmethod
    def backward(_context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_context, gradient):
        return gradient


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(_context, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(_context, gradient):
        parts = list(gradient.contiguous().chunk(dist.get_world_size()))
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        return mine


class Around(nn.Module):
    """A linear between two functions."""

    def __init__(self, before, after):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.before, self.after = before, after

    def forward(self, x):
        return self.after(self.linear(self.before(x)))


def unchanged(x):
    return x


@gloo_and_fake(2)
def test_function_belongs_to_module_applying_it(comm_mode):
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Around(Copy.apply, unchanged),  # column-parallel
        Around(unchanged, Reduce.apply),  # row-parallel
        Around(unchanged, Gather.apply),
        nn.Linear(WIDTH, WIDTH),
        Around(Copy.apply, Gather.apply),
    )
    witnessed(comm_mode, model, lambda: step(model))
    assert lines(comm_mode) == [
        f"forward 2 all_reduce[world] {SENT} < 2",
        f"forward 3 all_gather[world] {2 * SENT} < 3",
        # The batch is twice as large from there on.
        f"forward 5 all_gather[world] {4 * SENT} < 5",
        f"backward 5 reduce_scatter[world] {4 * SENT} < 5",
        f"backward 5 all_reduce[world] {2 * SENT} < 5",
        f"backward 3 reduce_scatter[world] {2 * SENT} < 3",
        f"backward 1 all_reduce[world] {SENT} < 1",
    ]


@gloo_and_fake(4)
def test_expert_parallel_sends_tokens_both_ways(comm_mode, device_mesh):
    mesh = device_mesh(dp=2, ep=2)

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.expert = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            half = [x.shape[0] // 2] * 2
            sent = all_to_all_single_autograd(x, half, half, mesh["ep"].get_group())
            sent = self.expert(sent)
            return all_to_all_single_autograd(sent, half, half, mesh["ep"].get_group())

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, WIDTH))
    for part in model:
        fully_shard(part, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    witnessed(comm_mode, model, lambda: step(model))
    # Tokens go to their experts and back, and their gradients the other way round.
    assert [line for line in lines(comm_mode) if "all_to_all" in line] == [
        f"{phase} 1 all_to_all[ep] {SENT} < 1"
        for phase in ("forward", "forward", "backward", "backward")
    ]
    assert {e.axis for e in comm_mode.events if e.kind != "all_to_all"} == {"dp"}


@gloo_and_fake(2)
def test_what_a_hook_sends_belongs_to_its_module(comm_mode):
    model = Model(blocks=1)
    block = model.layers[0]

    def barrier(*_):
        dist.barrier()

    block.register_forward_pre_hook(barrier)
    block.register_full_backward_hook(barrier)
    block.up.weight.register_hook(lambda gradient: dist.all_reduce(gradient.clone()))
    witnessed(comm_mode, model, lambda: step(model))
    assert [line.split(" < ")[0] for line in lines(comm_mode)] == [
        "forward layers.0 barrier[world] 0",
        f"backward layers.0.up all_reduce[world] {WIDTH * WIDTH * 4}",
        "backward layers.0 barrier[world] 0",
    ]


class Summed(nn.Linear):
    """Sums its weight's gradient in a hook, as norms of heads do under tensor parallelism."""

    has_hook = False

    def forward(self, x):
        # The parameter that FSDP registers only while the unit is gathered.
        dist.broadcast(self.weight.data, 0)
        if not self.has_hook:
            self.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
            self.has_hook = True
        return super().forward(x)


@gloo_and_fake(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_collective_on_gathered_parameter_has_owner(comm_mode, device_mesh, reshard_after_forward):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Summed(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(model, mesh=device_mesh(), reshard_after_forward=reshard_after_forward)
    witnessed(comm_mode, model, lambda: model(torch.ones(2, WIDTH)).sum().backward(), warm_up=1)
    by_hand = [event for event in comm_mode.events if event.kind in {"broadcast", "all_reduce"}]
    assert [(event.kind, event.owner, event.issued_in, event.role) for event in by_hand] == [
        ("broadcast", "1", "1", Role.PARAMETERS),
        ("all_reduce", "1", "1", Role.GRADIENTS),
    ]


@gloo_and_fake(2)
# torch cannot differentiate the all-reduce itself, which is no matter here.
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_gradient_of_gradient_belongs_to_module(comm_mode):
    model = Around(Copy.apply, unchanged)

    def penalty():
        x = torch.randn(2, WIDTH, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    witnessed(comm_mode, model, penalty)
    assert {line.split(" < ")[0] for line in lines(comm_mode)} == {
        f"backward . all_reduce[world] {SENT}"
    }


@pytest.mark.distributed(world_size=2)
def test_module_in_inference_mode_owns_collectives(comm_mode):
    model = Around(unchanged, Reduce.apply)
    with torch.inference_mode():
        witnessed(comm_mode, model, lambda: model(torch.randn(2, WIDTH)))
    assert lines(comm_mode) == [f"forward . all_reduce[world] {SENT} < ."]
