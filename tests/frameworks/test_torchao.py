"""torchao's float8 linear layers, whose weights FSDP2 gathers in 8 bits."""

import pytest
import torch
from derived import fsdp_lines
from frameworks.changes import comm_failure, observed
from oracle import owned_lines, witnessed_twice
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

float8 = pytest.importorskip("torchao.float8", reason="needs torchao")

pytestmark = pytest.mark.distributed(world_size=4)

WIDTH, HIDDEN, BATCH, LAYERS = 32, 64, 4, 2
BYTE, HALF, FLOAT = 1, 2, 4
WEIGHT = WIDTH * HIDDEN
"""Elements of each matrix of a layer."""
NORM = HIDDEN
WEIGHTS = 2 * LAYERS


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)))


class Training:
    """A model whose linear layers, or some of them, use float8, and its step."""

    def __init__(
        self,
        mesh,
        *,
        in_float8=True,
        precomputes=True,
        is_converted=lambda _module, _name: True,
        learning_rate=0.1,
    ):
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=in_float8, emulate=True)
        float8.convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.precomputes = precomputes
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)

    def step(self):
        self.model(torch.randn(BATCH, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.precomputes:
            float8.precompute_float8_dynamic_scale_for_fsdp(self.model)


def layer_lines(gathered):
    """Return what FSDP2 sends if a layer gathers that many bytes and reduces 32 bits."""
    lines = fsdp_lines({str(n): gathered for n in range(LAYERS)}, axis="dp", kept="")
    reduced = (2 * WEIGHT + NORM) * FLOAT
    return [
        line if "reduce_scatter" not in line else line.replace(str(gathered), str(reduced))
        for line in lines
    ]


def test_weights_are_gathered_in_8_bits(comm_mode, device_mesh):
    """Weights are gathered in 8 bits, and one all-reduce computes all scales."""
    training = Training(device_mesh())
    witnessed_twice(comm_mode, training.model, training.step, warm_up=1)
    # One all-reduce computes the largest value of each weight.
    expected = [*layer_lines(2 * WEIGHT * BYTE + NORM * HALF)]
    expected += [f"outside - all_reduce[dp] {WEIGHTS * FLOAT}"]
    assert owned_lines(comm_mode) == sorted(expected)
    gathers = [event for event in comm_mode.events if event.kind == "all_gather"]
    assert {(e.role, e.dtype) for e in gathers} == {("parameters", "float8_e4m3fn+bfloat16")}


def test_scales_are_reduced_before_each_gather(comm_mode, device_mesh):
    """Scales are reduced separately unless the training step precomputes them."""
    training = Training(device_mesh(), precomputes=False)
    witnessed_twice(comm_mode, training.model, training.step, warm_up=1)
    expected = [*layer_lines(2 * WEIGHT * BYTE + NORM * HALF)]
    for phase in ("forward", "backward"):
        for layer in range(LAYERS):
            expected += [f"{phase} {layer} all_reduce[dp] {FLOAT}"] * 2
    assert owned_lines(comm_mode) == sorted(expected)


def test_16_bits_are_sent_without_float8_gather(comm_mode, device_mesh):
    training = Training(device_mesh(), in_float8=False)
    witnessed_twice(comm_mode, training.model, training.step, warm_up=1)
    assert owned_lines(comm_mode) == sorted(layer_lines((2 * WEIGHT + NORM) * HALF))


def of(comm_mode, mesh, **options):
    training = Training(mesh, **options)
    return observed(comm_mode, training.model, training.step)


def test_change_of_float8_is_reported(comm_mode, device_mesh):
    mesh = device_mesh()
    reviewed = of(comm_mode, mesh)
    assert not comm_failure(reviewed, of(comm_mode, mesh, learning_rate=1e-3))
    whole = comm_failure(reviewed, of(comm_mode, mesh, in_float8=False))
    # Of 130 bytes in 16 bits, 66 remain.
    assert whole[0] == "parameters[dp] float8_e4m3fn+bfloat16 -> bfloat16, 65/33 times the bytes"
    assert whole[-1].startswith("likely: an fsdp_pre_all_gather hook of the weights, such as")
    forgotten = comm_failure(reviewed, of(comm_mode, mesh, precomputes=False))
    assert forgotten[:2] == [
        "(no-module) outside forward and backward: no longer redistributed (Partial(max)) -> "
        "(Replicate())",
        "modules {0..1} in forward, each: all_reduce[dp] 0 -> 2 (+2), 0 -> 8 B per rank",
    ]
    half = of(comm_mode, mesh, is_converted=lambda _, name: "down" not in name)
    # Half as many scales, and one more matrix in 16 bits.
    assert comm_failure(reviewed, half)[:2] == [
        "(no-module) outside forward and backward: all_reduce[dp] x1, 16 -> 8 B per rank",
        "modules {0..1} in forward, each: all_gather[dp] x1, 4.1 -> 6.1 KiB per rank",
    ]
