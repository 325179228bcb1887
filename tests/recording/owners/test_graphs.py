"""Graphs whose backward runs in another block than their forward."""

import pytest
import torch
from models import ACTIVATION_NBYTES, WIDTH
from oracle import gloo_and_fake, lines
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

UP = f"all_reduce[tp] {ACTIVATION_NBYTES}"
BACKWARD = [f"backward {n} {UP} < {n}" for n in ("2.0", "1.0", "0.0")]
LOST = [f"backward - {UP} < -"] * 3


def note(count):
    return (
        f"no owner for {count} collectives in backward, because the forward ran outside "
        "`with comm_mode`",
    )


@pytest.fixture
def model(device_mesh):
    """Three column-parallel linears, each of which all-reduces in backward."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
    for block in blocks:
        layouts = torch.distributed.tensor.Replicate()
        plan = {"0": ColwiseParallel(output_layouts=layouts)}
        parallelize_module(block, device_mesh(tp=2), plan)
    return blocks


def batch():
    return torch.randn(2, WIDTH, requires_grad=True)


def forward(model):
    return model(batch()).sum()


def in_backward(comm_mode):
    return [line for line in lines(comm_mode) if line.startswith("backward")]


@gloo_and_fake(2)
def test_a_graph_made_in_the_block_has_its_owners(comm_mode, model):
    with comm_mode(model):
        forward(model).backward()
    assert in_backward(comm_mode) == BACKWARD
    assert comm_mode.recording.notes == ()


@gloo_and_fake(2)
def test_graph_made_before_block_gives_note_no_owners(comm_mode, model):
    first, x = forward(model), batch()
    with comm_mode(model):
        # The first operation of the block is one of a module's.
        second = model(x).sum()
        first.backward()
        second.backward()
    assert in_backward(comm_mode) == [*LOST, *BACKWARD]
    assert comm_mode.recording.notes == note(3)


@gloo_and_fake(2)
def test_forward_of_earlier_block_gives_owners(comm_mode, model):
    with comm_mode(model):
        loss = forward(model)
    with comm_mode(model):
        loss.backward()
    assert in_backward(comm_mode) == BACKWARD
    assert comm_mode.recording.notes == ()


@gloo_and_fake(2)
def test_1f1b_with_block_per_micro_batch_has_owners(comm_mode, model):
    with comm_mode(model):
        first = forward(model)
    for _ in range(2):
        with comm_mode(model):
            second = forward(model)
            first.backward()
        assert in_backward(comm_mode) == BACKWARD
        assert comm_mode.recording.notes == ()
        first = second


@gloo_and_fake(2)
def test_a_graph_made_between_two_blocks_has_no_owners(comm_mode, model):
    with comm_mode(model):
        first = forward(model)
    second = forward(model)
    with comm_mode(model):
        third = forward(model)
        for loss in (first, second, third):
            loss.backward()
    assert in_backward(comm_mode) == [*BACKWARD, *LOST, *BACKWARD]
    assert comm_mode.recording.notes == note(3)
