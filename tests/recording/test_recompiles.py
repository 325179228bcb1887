"""torch.compile does the same with a recording as without one, by dynamo's own counters."""

import contextlib
import functools
import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from models import WIDTH, Model, shard
from oracle import lines
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# torch's compiler warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore")

fake = pytest.mark.distributed(world_size=2, backend="fake")


def compiled_blocks(device_mesh, backend):
    model = Model()
    for layer in model.layers:
        layer.compile(backend=backend)
    return shard(model, device_mesh())


def compiled_blocks_of_torch_compile(device_mesh, backend):
    model = Model()
    for n, layer in enumerate(model.layers):
        model.layers[n] = torch.compile(layer, backend=backend)
    return shard(model, device_mesh())


def compiled_around_units(device_mesh, backend):
    return torch.compile(shard(Model(), device_mesh()), backend=backend)


def parallel(device_mesh, backend):
    model, mesh = Model(), device_mesh(tp=2)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return torch.compile(model, backend=backend)


class Sends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = funcol.all_reduce(self.linear(x), "sum", dist.group.WORLD)
        return funcol.all_gather_tensor_autograd(x.relu(), 0, dist.group.WORLD)


class Broken(Sends):
    """Has a graph break between its collectives."""

    def forward(self, x):
        x = funcol.all_reduce(self.linear(x), "sum", dist.group.WORLD)
        torch._dynamo.graph_break()
        return funcol.all_gather_tensor_autograd(x.relu(), 0, dist.group.WORLD)


def functional(_, backend):
    return torch.compile(nn.Sequential(Sends()), backend=backend)


def functional_in_pieces(_, backend):
    return torch.compile(nn.Sequential(Broken()), backend=backend)


def functional_step(_, backend):
    """A step with its backward, and what reads values of tensors, in one compiled function."""
    torch.manual_seed(0)  # which branch is compiled depends on the loss
    model = nn.Sequential(Sends())

    @functools.partial(torch.compile, backend=backend)
    def step(x):
        loss = model(x).sum()
        loss.backward()
        if loss.item() == 0 or torch.equal(x, x + 1):
            return x * 2
        return x + 1

    return lambda x: step(x).requires_grad_()


# How many collectives two blocks, or a module and what it sends, issue in a step.
CASES = {
    "compiled blocks of FSDP2": (compiled_blocks, 8),
    "torch.compile of blocks of FSDP2": (compiled_blocks_of_torch_compile, 8),
    "a compiled model around FSDP2": (compiled_around_units, 8),
    "a compiled model with TP": (parallel, 4),
    "functional collectives": (functional, 4),
    "functional collectives and a graph break": (functional_in_pieces, 4),
    "a compiled step": (functional_step, 4),
}


def compiled():
    """Dynamo's compilations since the counters were cleared, and the reasons for recompilations."""
    counts = {
        name: dict(counters[name])
        for name in ("frames", "stats", "graph_break", "unimplemented", "inline_call")
    }
    # A backward has metrics of its own, unless inductor has it in its cache.
    reasons = (metrics.recompile_reason for metrics in get_compilation_metrics())
    again = [reason for reason in reasons if reason is not None]
    return counts, again


def run(model):
    model(torch.ones(2, WIDTH)).sum().backward()


def three_steps(model, blocks):
    """What is compiled by the first step, by the second, by the third."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    found = []
    for block in blocks:
        with block:
            run(model)
        found.append(compiled())
    return found


def same_with_and_without(comm_mode, device_mesh, name, backend):
    arrange, expected = CASES[name]
    without = contextlib.nullcontext()
    gc.collect()
    # Code that garbage collection calls, such as weak reference callbacks, may be compiled too.
    gc.disable()
    try:
        three_steps(arrange(device_mesh, backend), [without])  # some is compiled once a process
        alone = three_steps(arrange(device_mesh, backend), [without] * 3)
        assert alone[0][0]["stats"]["unique_graphs"] > 0
        assert alone[0] == alone[2]  # nothing is compiled again by itself
        for blocks in (
            [comm_mode, comm_mode, comm_mode],
            [without, comm_mode, without],
            [comm_mode, without, comm_mode],
        ):
            assert three_steps(arrange(device_mesh, backend), blocks) == alone
        assert len(comm_mode.events) == expected, lines(comm_mode)
    finally:
        gc.enable()
        torch._dynamo.reset()


# The others have the same calls, or one of the same kind.
ALIKE = {
    "torch.compile of blocks of FSDP2",
    "a compiled model around FSDP2",
    "functional collectives",
    # Tested with inductor, too.
    "a compiled model with TP",
    "a compiled step",
}


@fake
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.release] * (name in ALIKE)) for name in CASES],
)
def test_a_block_compiles_nothing_more(comm_mode, device_mesh, name):
    same_with_and_without(comm_mode, device_mesh, name, "aot_eager")


@pytest.mark.release
@pytest.mark.costly
@pytest.mark.distributed(world_size=2)
def test_a_block_compiles_nothing_more_on_ranks(comm_mode, device_mesh):
    for name in ("compiled blocks of FSDP2", "functional collectives"):
        same_with_and_without(comm_mode, device_mesh, name, "aot_eager")


# inductor compiles C++, which takes seconds; differences would show with aot_eager, too.
@pytest.mark.release
# Beside other tests, the compiler can need minutes.
@pytest.mark.distributed(world_size=2, backend="fake", timeout_s=300)
@pytest.mark.parametrize(
    "name", ["compiled blocks of FSDP2", "a compiled model with TP", "a compiled step"]
)
def test_a_block_makes_inductor_compile_nothing_more(comm_mode, device_mesh, name):
    same_with_and_without(comm_mode, device_mesh, name, "inductor")


def test_compiler_reset_in_block_adds_no_compilation(comm_mode):
    def reset_between(block):
        torch._dynamo.reset()
        counters.clear()
        model, given = nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.ones(2, WIDTH)
        called = torch.compile(model, backend="eager")
        with block:
            called(given)
            torch._dynamo.reset()
            called(given)
        called(given)
        return compiled()[0]

    try:
        assert reset_between(comm_mode) == reset_between(contextlib.nullcontext())
    finally:
        torch._dynamo.reset()
