"""Layouts: wrong mesh axes, and unnecessary gathers of activations."""

import torch
from history.reported import reported
from models import WIDTH, Attention, Decoder
from regressions.steps import of, train, units
from regressions.table import mesh
from regressions.tensor_parallel import sharded, split, step, tensor_parallel
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    SequenceParallel,
    parallelize_module,
)


@reported(
    "Tencent-Hunyuan/UniRL/pull/410",
    happened="The code built the mesh for hybrid sharding before the process group existed. "
    "Without an error, parameters were sharded over all ranks.",
    cost="Shards over 16 ranks on two nodes instead of over 8 on one.",
    first="mesh axes in use: replicate=2 stride 2, shard=2 stride 1 -> dp=4 stride 1",
    tree="mesh axes in use: replicate=2 stride 2, shard=2 stride 1 -> dp=4 stride 1",
    more={"all_reduce": -4},
)
def hybrid_fell_back_to_all_ranks(changed):
    return of(units(Decoder(), axes=mesh(dp=4) if changed else mesh(replicate=2, shard=2)))


@reported(
    "pytorch/torchtitan/issues/286",
    happened="The mesh axes were in the wrong order, so tensor parallelism ran across nodes.",
    first="mesh: dp=2 stride 2, tp=2 stride 1 -> dp=2 stride 1, tp=2 stride 2",
    likely="mesh axes dp and tp are swapped: dp is now the inner one",
)
def tensor_parallelism_across_nodes(changed):
    return of(sharded(axes=mesh(tp=2, dp=2) if changed else mesh(dp=2, tp=2)), step)


class NormedAttention(Attention):
    """Queries and keys are normed head by head, as in Qwen3."""

    def __init__(self, norm):
        super().__init__(16)
        self.query_norm, self.key_norm = norm(4), norm(4)

    def forward(self, x):
        query, key, value = (
            project(x).unflatten(-1, (-1, 4)) for project in (self.query, self.key, self.value)
        )
        query, key = self.query_norm(query).transpose(1, 2), self.key_norm(key).transpose(1, 2)
        mixed = (query @ key.transpose(-2, -1)).softmax(-1) @ value.transpose(1, 2)
        return self.output(mixed.transpose(1, 2).flatten(2))


def normed(style, norm=nn.RMSNorm):
    model, axes = Decoder(2), mesh(tp=4)
    for layer in model.layers:
        layer.attention = NormedAttention(norm)
    tensor_parallel(model, axes)
    for layer in model.layers:
        parallelize_module(layer.attention, axes, {"query_norm": style, "key_norm": style})
    return of(model, step)


HEADS = Shard(2)
BY_HEAD = SequenceParallel(sequence_dim=2, use_local_output=True)


def on_all_heads():
    # Not in torch 2.7.
    from torch.distributed.tensor.parallel import PrepareModuleInputOutput

    return PrepareModuleInputOutput(
        input_layouts=HEADS,
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=HEADS,
    )


@reported(
    "pytorch/torchtitan/issues/1867",
    happened="The plan gathered all heads before the norms of queries and keys, although each "
    "norm needs only one head.",
    first="layers.{0..1}.attention.key_norm, layers.{0..1}.attention.query_norm in forward: now redistributed (Shard(dim=2)) -> (Replicate()) by all_gather[tp]: 4 calls, 4.0 KiB in total",
    likely="the module's layouts in the parallelize_module plan no longer match those of the modules before or after it, or redistribute() or full_tensor() is called",
    more={"all_gather": 8},  # 2 norms of 2 layers, in forward and in backward
    neighbour=lambda: normed(BY_HEAD, nn.LayerNorm),
)
def heads_gathered_for_their_norms(changed):
    return normed(on_all_heads() if changed else BY_HEAD)


class Product(nn.Module):
    """Every rank has all that it needs of both factors."""

    def __init__(self, axes, *, by_matmul):
        super().__init__()
        weight = distribute_tensor(torch.ones(WIDTH, 1), axes, [Replicate(), Replicate()])
        self.weight, self.by_matmul = nn.Parameter(weight), by_matmul

    def forward(self, x):
        return x @ self.weight if self.by_matmul else (x * self.weight.t()).sum(-1)


@reported(
    "pytorch/pytorch/issues/167106",
    happened="DTensor's matrix product flattens two sharded dimensions. Its backward gathers for "
    "that, although every rank has all inputs.",
    first="product in backward: now redistributed (Shard(dim=1),_StridedShard(dim=1,sf=2)) -> (Shard(dim=1),Replicate()) by all_gather[columns]: 1 call of 256 B",
    more={"all_gather": 1},
)
def a_product_that_needs_no_gather(changed):
    axes = mesh(rows=2, columns=2)
    given = distribute_tensor(torch.ones(4, 4, WIDTH), axes, [Shard(0), Shard(1)])
    decoder, product = units(Decoder(1), axes=axes), Product(axes, by_matmul=changed)
    model = nn.ModuleDict({"decoder": decoder, "product": product})

    def run():
        train(decoder)
        product(given.detach().requires_grad_()).sum().backward()

    return model, run


@reported(
    "pytorch/torchtitan/pull/4685",
    "NVIDIA/Megatron-LM/pull/7520",
    happened="To compute the log-probabilities of a few tokens, each rank gathered the logits of "
    "the whole vocabulary.",
    first="head in forward: now redistributed (Shard(dim=2)) -> (Replicate()) by all_gather[tp]: 1 call of 2.0 KiB",
    likely="the module's layouts in the parallelize_module plan no longer match those of the modules before or after it, or redistribute() or full_tensor() is called",
    more={"all_gather": 1, "all_reduce": -3},  # maximum, sum and loss were reduced
)
def logits_of_the_whole_vocabulary(changed):
    return of(split(logits=Replicate() if changed else None), step, is_whole=changed)
