"""Megatron-FSDP on the fake backend, with mocks for the CUDA functions that it calls."""

from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from frameworks.changes import comm_failure, observed
from models import BLOCK_NBYTES, ROOT_NBYTES, WIDTH, Model
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("megatron_fsdp")

import megatron_fsdp

pytestmark = [
    pytest.mark.distributed(world_size=4, backend="fake"),
    # Megatron-FSDP warns about optional packages, torch about calls that it makes.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    for name in ("Stream", "current_stream", "Event", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)


def trained(comm_mode, *, lr=0.1, **options):
    model = Model()
    # Without a tensor-parallel axis, Megatron-FSDP looks for one named None.
    model, optimizer = megatron_fsdp.fully_shard(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        device_mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        device=torch.device("cpu"),
        **{"fsdp_unit_modules": ["models.Block"]} | options,
    )

    def step():
        optimizer.zero_grad()
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()

    return observed(comm_mode, model, step)


def test_units_are_gathered_twice_and_reduced_once(comm_mode):
    side = trained(comm_mode)
    sent = [
        (event.phase.value, event.kind, event.nbytes, event.role.value)
        for event in comm_mode.events
    ]
    gathered, reduced = ("all_gather", "parameters"), ("reduce_scatter", "gradients")
    sizes = [
        ("forward", gathered, ROOT_NBYTES),
        *[("forward", gathered, BLOCK_NBYTES), ("backward", gathered, BLOCK_NBYTES)] * 2,
        *[("backward", reduced, BLOCK_NBYTES)] * 2,
        ("backward", reduced, ROOT_NBYTES),
    ]
    assert sorted(sent) == sorted(
        (phase, kind, nbytes, role) for phase, (kind, role), nbytes in sizes
    )
    # Each buffer holds several parameters, so it has no owner.
    assert {event.owner for event in comm_mode.events} == {None}
    placements = {parameter.placements for parameter in side.tree.common.parameters.values()}
    assert placements == {(("dp", "Shard(0)"),)}


def test_change_without_effect_is_not_reported(comm_mode):
    reviewed = trained(comm_mode)
    torch.manual_seed(1)
    assert not comm_failure(reviewed, trained(comm_mode, lr=0.5))


CHANGES = {
    "another class is the unit": (
        {"fsdp_unit_modules": ["torch.nn.Linear"]},
        "gradients of (no-module) now reduced in 6 calls, same bytes in total",
    ),
    "parameters are not sharded": (
        {"zero_dp_strategy": "optim_grads"},
        "(no-module) in backward: all_gather[dp] 2 -> 0 (-2), 1.0 KiB -> 0 B per rank",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_reported_in_the_first_line(comm_mode, change):
    options, first = CHANGES[change]
    assert comm_failure(trained(comm_mode), trained(comm_mode, **options))[0] == first
