"""Entries of FSDP2 units other than `forward`."""

import pytest
import torch
import torch.distributed as dist
from models import BLOCK_NBYTES, ROOT_NBYTES, WIDTH, Model, shard
from oracle import gloo_and_fake, lines, witnessed
from torch.distributed.fsdp import register_fsdp_forward_method


class Encoder(Model):
    def encode(self, x):
        dist.barrier()
        for layer in self.layers:
            x = layer(self.embed(x))
        return x


@gloo_and_fake(2)
@pytest.mark.parametrize("is_given", [True, False])
def test_registered_forward_method_is_module_call(comm_mode, device_mesh, is_given):
    model = shard(Encoder(blocks=1), device_mesh())
    register_fsdp_forward_method(model, "encode")
    # The witnesses watch two runs, and the root would keep its parameters until backward.
    model.set_reshard_after_forward(reshard_after_forward=True, recurse=False)

    def encode_and_back():
        model.encode(torch.randn(2, WIDTH)).sum().backward()

    witnessed(comm_mode, model if is_given else None, encode_and_back)
    assert lines(comm_mode)[:3] == [
        f"forward . all_gather[dp] {ROOT_NBYTES} < .",
        "forward . barrier[dp] 0 < .",
        f"forward layers.0 all_gather[dp] {BLOCK_NBYTES} < layers.0",
    ]


@gloo_and_fake(2)
def test_a_method_that_is_not_registered_is_outside(comm_mode, device_mesh):
    model = shard(Encoder(blocks=1), device_mesh())
    model.unshard()
    with comm_mode(model):
        model.encode(torch.randn(2, WIDTH))
    assert lines(comm_mode) == [
        "outside - barrier[dp] 0 < -",
        f"forward layers.0 all_gather[dp] {BLOCK_NBYTES} < layers.0",
    ]
