"""Compiled models: inductor stays on while recording, and no collective is missed."""

import pytest
import torch
import torch.distributed as dist
from models import ACTIVATION_NBYTES, WIDTH, Model, shard, step
from oracle import lines, witnessed
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = [
    pytest.mark.distributed(world_size=2),
    # torch's compiler warns about itself.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def kernels():
    """Tells how many kernels inductor has generated since the test began."""
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    yield lambda: metrics.generated_kernel_count
    torch._dynamo.reset()


def gathered(comm_mode):
    """The collectives, with the prefetch distance of each gather."""
    return list(zip(lines(comm_mode), [event.ahead for event in comm_mode.events], strict=True))


def plain_step(device_mesh, comm_mode):
    torch.manual_seed(0)
    model = shard(Model(), device_mesh())
    with comm_mode(model):
        step(model)
    return gathered(comm_mode)


# inductor compiles C++, which takes seconds. One test that is always run shows that it stays on.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.release)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_model_matches_eager_model(comm_mode, device_mesh, kernels, backend):
    expected = plain_step(device_mesh, comm_mode)
    model = shard(Model(), device_mesh())
    compiled = torch.compile(model, backend=backend)
    witnessed(comm_mode, compiled, lambda: step(compiled))
    assert (kernels() > 0) is (backend == "inductor")
    assert gathered(comm_mode) == expected


# Also run below, with aot_eager.
@pytest.mark.release
@pytest.mark.parametrize(
    "in_place",
    [pytest.param(True, id="module.compile()"), pytest.param(False, id="torch.compile")],
)
def test_compiled_blocks_send_what_eager_ones_send(comm_mode, device_mesh, kernels, in_place):
    expected = plain_step(device_mesh, comm_mode)
    model = Model()
    for n, layer in enumerate(model.layers):
        if in_place:
            layer.compile()
        else:
            model.layers[n] = torch.compile(layer)
    shard(model, device_mesh())
    witnessed(comm_mode, model, lambda: step(model))
    assert kernels() > 0
    assert gathered(comm_mode) == expected


def parallel(device_mesh):
    model = Model()
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, device_mesh(tp=2), plan)
    return model


def activations(*owners):
    """Of two blocks that all-reduce once in forward and once in backward."""
    phases = ("forward", "forward", "backward", "backward")
    return [
        f"{phase} {owner} all_reduce[tp] {ACTIVATION_NBYTES} < {owner}"
        for phase, owner in zip(phases, owners, strict=True)
    ]


@pytest.mark.parametrize(
    ("backend", "in_place"),
    [
        pytest.param("inductor", False, id="inductor", marks=pytest.mark.release),
        # Runs each graph as a module of its own.
        pytest.param("aot_eager", False, id="aot_eager", marks=pytest.mark.release),
        pytest.param("aot_eager", True, id="aot_eager, module.compile()"),
    ],
)
def test_collectives_inside_a_compiled_block(comm_mode, device_mesh, kernels, backend, in_place):
    model = parallel(device_mesh)
    for n, layer in enumerate(model.layers):
        if in_place:
            layer.compile(backend=backend)
        else:
            model.layers[n] = torch.compile(layer, backend=backend)
    witnessed(comm_mode, model, lambda: step(model))
    assert (kernels() > 0) is (backend == "inductor")
    # The parts of a compiled block are one: its owner is the block.
    assert lines(comm_mode) == activations("layers.0", "layers.1", "layers.1", "layers.0")
    assert {event.source.value for event in comm_mode.events} == {"user"}


def test_collectives_inside_a_compiled_model(comm_mode, device_mesh, kernels):
    compiled = torch.compile(parallel(device_mesh), backend="aot_eager")
    witnessed(comm_mode, compiled, lambda: step(compiled))
    assert kernels() == 0
    assert lines(comm_mode) == activations(".", ".", ".", ".")


class Sends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        dist.all_reduce(x)
        return all_gather_tensor_autograd(x.relu(), 0, dist.group.WORLD)


def test_collectives_called_in_compiled_code_count(comm_mode, kernels):
    model = torch.compile(nn.Sequential(Sends()))
    witnessed(comm_mode, model, lambda: step(model))
    assert kernels() > 0
    assert lines(comm_mode) == [
        f"forward . all_reduce[world] {ACTIVATION_NBYTES} < .",
        f"forward . all_gather[world] {2 * ACTIVATION_NBYTES} < .",
        f"backward . reduce_scatter[world] {2 * ACTIVATION_NBYTES} < .",
        f"backward . all_reduce[world] {ACTIVATION_NBYTES} < .",
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_ddp_reduces_in_one_bucket(comm_mode, kernels, backend):
    from torch.nn.parallel import DistributedDataParallel

    model = torch.compile(DistributedDataParallel(Model()), backend=backend)
    witnessed(comm_mode, model, lambda: step(model), warm_up=2)
    assert (kernels() > 0) is (backend == "inductor")
    assert {(event.owner, event.source.value) for event in comm_mode.events} == {("", "ddp")}
    assert len(comm_mode.events) == 1
