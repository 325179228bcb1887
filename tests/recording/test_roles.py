"""The roles of collectives, by sender and phase: parameters, gradients or activations."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from models import LINEAR_NBYTES, WIDTH, Block, Model, shard, step
from oracle import lines, witnessed_twice
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

pytestmark = pytest.mark.distributed(world_size=4, backend="fake", scope="module")


def roles(comm_mode):
    """The roles of each kind and axis, by phase."""
    return sorted(
        (
            {
                (event.phase.value, f"{event.kind}[{event.axis}]", event.role and event.role.value)
                for event in comm_mode.events
            }
        ),
        key=str,
    )


def recorded(comm_mode, model, run):
    run()
    with comm_mode(model):
        run()
    return roles(comm_mode)


def test_fsdp_sends_parameters_and_gradients(comm_mode, device_mesh):
    model = shard(Model(), device_mesh(replicate=2, shard=2))
    assert recorded(comm_mode, model, lambda: step(model)) == [
        ("backward", "all_gather[shard]", "parameters"),
        ("backward", "all_reduce[replicate]", "gradients"),
        ("backward", "reduce_scatter[shard]", "gradients"),
        ("forward", "all_gather[shard]", "parameters"),
    ]


class Scaled(torch.Tensor):
    """A weight that is gathered in fewer bits, by its largest value on all ranks: float8's way."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Scaled, lambda scaled: scaled.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Scaled, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh):
        """Return the tensors to gather, and their metadata."""
        largest = funcol.all_reduce(self.held.abs().max(), "max", (mesh, 0))
        return ((self.held / largest).bfloat16(),), (largest,)

    def fsdp_post_all_gather(self, gathered, _metadata, _dtype, *, out=None):
        """The weight, and what holds its memory; into `out` it was gathered."""
        (data,) = gathered
        return None if out is not None else (data, (data,))


@pytest.mark.distributed(world_size=2, backend="gloo", scope="test")
def test_collective_of_gather_extension_has_parameters(comm_mode, device_mesh):
    model, mesh = Model(), device_mesh(dp=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.layers:
        layer.up.weight = nn.Parameter(Scaled(layer.up.weight.detach()))
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # Prefetched: the largest value is sent one unit ahead too, but only a gather says so.
    witnessed_twice(comm_mode, model, lambda: step(model), warm_up=1)
    assert [line for line in lines(comm_mode) if "all_reduce" in line] == [
        f"{phase} layers.{layer} all_reduce[dp] 4 < {within}"
        for phase, layer, within in (
            ("forward", 0, "layers.0"),
            ("forward", 1, "layers.1"),
            ("backward", 1, "."),
            ("backward", 0, "layers.1"),
        )
    ]
    (largest, gathered) = (
        event
        for event in comm_mode.events
        if event.phase == "backward" and event.owner == "layers.0" and event.role == "parameters"
    )
    assert (largest.kind, largest.ahead) == ("all_reduce", None)
    assert (gathered.kind, gathered.ahead, gathered.nbytes) == ("all_gather", 1, LINEAR_NBYTES)


def test_tensor_parallel_roles_with_norm_gradients(comm_mode, device_mesh):
    mesh = device_mesh(dp=2, tp=2)
    model = nn.Sequential(*(Block(bias=True, norm=True) for _ in range(2)))
    for part in model:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(part, mesh["tp"], plan)
        fully_shard(part, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    x = torch.ones(2, 4, WIDTH)
    found = recorded(comm_mode, model, lambda: model(x).sum().backward())
    assert {role for _, what, role in found if "[tp]" in what} >= {"activations"}
    # FSDP's hook makes the gradients of the norms, which every tensor-parallel rank holds whole.
    assert ("backward", "all_reduce[tp]", "gradients") in found
    assert {role for _, what, role in found if "[dp]" in what} == {"parameters", "gradients"}


@pytest.mark.distributed(world_size=2, backend="gloo", scope="test")
def test_ddp_sends_gradients(comm_mode):
    model = DistributedDataParallel(Model())
    # The broadcasts say how it has built its buckets anew.
    assert recorded(comm_mode, model, lambda: step(model)) == [
        ("backward", "all_reduce[world]", "gradients"),
        ("forward", "broadcast[world]", None),
    ]


def test_a_module_that_sends_itself_sends_activations(comm_mode):
    class Dispatch(nn.Module):
        def forward(self, x):
            return all_to_all_single_autograd(x, None, None, dist.group.WORLD) * 2

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Dispatch())

    def run():
        loss = model(torch.ones(4, WIDTH)).sum()
        dist.all_reduce(loss.detach().clone())
        loss.backward()

    assert recorded(comm_mode, model, run) == [
        ("backward", "all_to_all[world]", "activations"),
        ("forward", "all_to_all[world]", "activations"),
        ("outside", "all_reduce[world]", None),
    ]
