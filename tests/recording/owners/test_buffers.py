"""Buffers of several parameters, in which hand-written ZeRO sends."""

import pytest
import torch
import torch.distributed as dist
from models import WIDTH
from torch import nn

pytestmark = [
    pytest.mark.distributed(world_size=2, scope="module"),
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]


def named(comm_mode):
    return [(event.kind, event.owner, event.role) for event in comm_mode.events]


def build():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))


def flatten(model):
    """Keeps all parameters in one buffer."""
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    for parameter, part in zip(model.parameters(), flat.chunk(2), strict=True):
        parameter.data = part.view_as(parameter)
    return flat


def test_a_gather_into_all_parameters_is_that_of_none(comm_mode, dist_info):
    model = build()
    flat = flatten(model)
    first, _ = flat.chunk(2)
    with comm_mode(model):
        # Each rank sends exactly one layer.
        dist.all_gather_into_tensor(flat, flat.chunk(2)[dist_info.rank])
        dist.all_gather_into_tensor(first, first.chunk(2)[dist_info.rank])
        dist.all_gather([*flat.chunk(2)], torch.randn(WIDTH * WIDTH))
    assert named(comm_mode) == [
        ("all_gather", None, "parameters"),
        ("all_gather", "0", "parameters"),
        ("all_gather", None, "parameters"),
    ]


def test_bucket_content_does_not_name_earlier_calls(comm_mode):
    model = build()
    bucket = torch.empty(WIDTH, WIDTH)
    with comm_mode(model):
        for layer in model:
            model.zero_grad()
            dist.all_reduce(bucket.copy_(torch.randn(WIDTH, WIDTH)))
            layer.weight.grad = bucket
    assert named(comm_mode) == [("all_reduce", None, None)] * 2


def test_gradient_names_all_its_reductions(comm_mode):
    model = build()
    halves = torch.randn(2, WIDTH, WIDTH)
    apart = [torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH).add_(1)]
    for reduced in (halves, apart):
        with comm_mode(model):
            model.zero_grad()
            for layer, part in zip(model, reduced, strict=True):
                dist.all_reduce(part)
                dist.all_reduce(part, op=dist.ReduceOp.MAX)
                layer.weight.grad = part
        assert named(comm_mode) == [
            ("all_reduce", name, "gradients") for name in ("0", "0", "1", "1")
        ]
