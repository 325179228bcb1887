"""Gradients that are no longer reduced, or too often."""

import torch
from models import WIDTH, Block, Decoder
from regressions.frameworks import Adapted
from regressions.pipelines import pipeline
from regressions.steps import of, train, units
from regressions.table import TABLE, mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

regression = TABLE.regression


class Routed(nn.Module):
    """A gate whose weight each rank has, and a block that is split over them.

    Args:
        axes: The mesh of one axis.
        placement: What the gradient of the gate's output is taken for; it is a partial sum.
    """

    def __init__(self, axes, placement):
        super().__init__()
        self.gate = distribute_module(nn.Linear(WIDTH, WIDTH, bias=False), axes)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        self.block = parallelize_module(Block(), axes, plan)
        self.axes, self.placement = axes, placement

    def forward(self, x):
        x = self.block(x)
        scores = self.gate(DTensor.from_local(x, self.axes, [Replicate()]))
        return x * scores.to_local(grad_placements=[self.placement])


def routed(placement, *, is_sharded):
    axes = mesh(dp=2, tp=2)
    layers = nn.Sequential(*(Routed(axes["tp"], placement) for _ in range(2)))
    for layer in layers if is_sharded else ():
        fully_shard(layer.gate, mesh=axes["dp"])

    def run():
        layers(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        for layer in layers if not is_sharded else ():
            # As an optimizer of DTensors does.
            weight = layer.gate.weight
            weight.grad = weight.grad.redistribute(placements=weight.placements)

    return layers, run


@regression
def gradient_of_a_gate_treated_as_whole(changed):
    return routed(Replicate() if changed else Partial(), is_sharded=True)


@regression
def gradient_of_a_gate_treated_as_whole_without_fsdp(changed):
    return routed(Replicate() if changed else Partial(), is_sharded=False)


@regression
def weight_made_whole_without_grad_placements(changed):
    model = units(Decoder(2))

    def run():
        train(model)
        weight = model.head.weight.full_tensor(grad_placements=None if changed else [Partial()])
        weight.sum().backward()

    return model, run


def adapt(model):
    """Attaches LoRA to two projections of each layer."""
    for layer in model.layers:
        for name in ("query", "value"):
            setattr(layer.attention, name, Adapted(getattr(layer.attention, name), 2))
    return model


@regression
def lora_attached_after_sharding(changed):
    model = Decoder(2).requires_grad_(requires_grad=False)
    return of(adapt(units(model)) if changed else units(adapt(model)))


@regression
def lora_attached_after_sharding_beside_a_trained_head(changed):
    model = Decoder(2).requires_grad_(requires_grad=False)
    model.head.requires_grad_(requires_grad=True)
    return of(adapt(units(model)) if changed else units(adapt(model)))


@regression(is_reversible=True)
def pipeline_stage_is_no_unit(changed):
    return pipeline(is_unit=not changed)


def split_mlp(changed, **styles):
    """Splits each block's two products over tp; the second one's output may stay a partial sum."""
    axes = mesh(dp=2, tp=2)
    model = Decoder(2)
    for layer in model.layers:
        down = RowwiseParallel(**(styles if changed else {}))
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": down}
        parallelize_module(layer.mlp, axes["tp"], plan)
    return of(units(model, axes=axes["dp"]))


@regression
def output_of_a_row_split_module_left_partial(changed):
    return split_mlp(changed, output_layouts=Partial())
