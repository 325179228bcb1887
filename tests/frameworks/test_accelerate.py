"""FSDP2 through accelerate, without a trainer."""

from contextlib import nullcontext

import pytest
import tiny_llama
import torch
from derived import fsdp_lines
from frameworks.accelerated import accelerate, plugin, use_fsdp
from oracle import owned_lines, witnessed_twice
from tiny_llama import FLOAT, PARAMETERS

pytestmark = pytest.mark.distributed(world_size=4)
UNITS = tiny_llama.units()
CLIPPING = f"optimizer - all_reduce[world] {PARAMETERS * FLOAT}"


def prepared(*, batches, accumulates=True, lr=0.001, **changed):
    """Return a prepared model, and its step of several micro-batches."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=batches)
    use_fsdp(accelerator, plugin(**changed))
    model = tiny_llama.build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))

    def step():
        for batch in range(batches):
            with accelerator.accumulate(model) if accumulates else nullcontext():
                accelerator.backward(tiny_llama.loss(model))
                if batch == batches - 1:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

    return model, step


def unit_names(tree):
    return {tree.unit_name(index) for index in range(len(tree.units))}


@pytest.mark.parametrize("batches", [1, 2])
def test_step_with_clipping_and_accumulation(comm_mode, fsdp_tree, batches):
    model, step = prepared(batches=batches)
    witnessed_twice(comm_mode, model, step)
    sent = fsdp_lines(UNITS, axis="world", kept="lm_head+model.norm", unreduced_batches=batches - 1)
    assert owned_lines(comm_mode) == sorted([*sent, CLIPPING])
    tree = fsdp_tree(model)
    assert unit_names(tree) == {"", *UNITS}
    assert not tree.findings


def test_ddp_is_used_without_distributed_type(comm_mode, fsdp_tree):
    """On the CPU, accelerate silently wraps the model in DDP."""
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin())
    model = accelerator.prepare(tiny_llama.build())

    def step():
        accelerator.backward(tiny_llama.loss(model))

    witnessed_twice(comm_mode, model, step, warm_up=2)
    assert {event.source.value for event in comm_mode.events} == {"ddp"}
    assert comm_mode.nbytes("all_reduce", phase="backward") == sum(UNITS.values())
    assert [unit.kind for unit in fsdp_tree(model).units] == ["ddp"]
