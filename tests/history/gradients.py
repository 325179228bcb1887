"""Gradients: reductions that are too frequent, over too few ranks, or in the wrong dtype."""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from history.reported import reported
from models import Decoder
from regressions import steps
from regressions.replicas import hybrid, micro_batches, replicated, without_sync, wrapped
from regressions.steps import of, tokens, train, units
from regressions.table import mesh
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, ShardingStrategy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def accumulate(model, deferred):
    """Four micro-batches, all but the last in a context that should defer their reductions."""
    for number in range(4):
        with deferred(model) if number < 3 else nullcontext():
            train(model)


@reported(
    "NVIDIA/cosmos-framework/issues/161",
    "pytorch/torchtitan/pull/4505",
    "ByteDance-Seed/VeOmni/pull/781",
    happened="Each micro-batch all-reduced the gradients over the replicas. In the first of these "
    "projects, the context that should have deferred it handled only DDP.",
    cost="4 micro-batches in 88.8 s instead of 54.3 s, on 2 x 8 A100.",
    first="gradients of (root), layers.{0..2} reduced 1 -> 4 times (all_reduce), gathers unchanged",
    likely="reduced in each micro-batch: call set_requires_all_reduce(False) for all micro-batches but the last",
    more={"all_reduce": 12},  # 4 units, 3 micro-batches
    neighbour=lambda: of(
        hybrid(3), micro_batches, number=4, reduce_each=True, all_reduce_each=False
    ),
)
def replicas_reduced_for_each_micro_batch(changed):
    @contextmanager
    def deferred(model):
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = False
            elif isinstance(module, FSDPModule) and not changed:
                module.set_requires_all_reduce(requires_all_reduce=False, recurse=False)
        yield
        model.set_requires_all_reduce(requires_all_reduce=True)

    return of(hybrid(3), accumulate, deferred=deferred)


@reported(
    "huggingface/accelerate/pull/3762",
    happened="The code called `no_sync` only if the model had it. FSDP2 has "
    "`set_requires_gradient_sync` instead, so nothing was deferred.",
    first="gradients of (root), layers.{0..2} reduced 1 -> 4 times (reduce_scatter), gathers unchanged",
    likely="reduced in each micro-batch: call set_requires_gradient_sync(False), or run backward inside no_sync() with FSDP1, for all micro-batches but the last",
    more={"reduce_scatter": 12},
    neighbour=lambda: of(units(Decoder()), steps.accumulate, micro_batches=4),
)
def a_context_that_fsdp2_does_not_have(changed):
    @contextmanager
    def deferred(model):
        if changed:
            with getattr(model, "no_sync", nullcontext)():
                yield
            return
        model.set_requires_gradient_sync(requires_gradient_sync=False)
        yield
        model.set_requires_gradient_sync(requires_gradient_sync=True)

    return of(units(Decoder()), accumulate, deferred=deferred)


@reported(
    "verl-project/verl/pull/7095",
    "mlfoundations/open_lm/issues/48",
    happened="Gradient accumulation without `no_sync`: FSDP reduced in each backward.",
    first="gradients of (root), layers.{0..1} reduced 1 -> 2 times (reduce_scatter), gathers unchanged",
    likely="reduced in each micro-batch: call set_requires_gradient_sync(False), or run backward inside no_sync() with FSDP1, for all micro-batches but the last",
    more={"reduce_scatter": 3},
)
def fsdp1_reduces_in_each_backward(changed):
    return of(wrapped(), without_sync, number=2, reduce_each=changed)


@reported(
    "huggingface/accelerate/pull/1153",
    "Lightning-AI/pytorch-lightning/issues/4092",
    happened="Gradient accumulation under DDP without `no_sync`, or with it in the wrong place.",
    cost="2 s per batch instead of 0.91 s on two nodes, 0.5 s instead of 0.41 s on one.",
    first="gradients of (root) reduced in 1 -> 2 calls (all_reduce)",
    likely="2 steps instead of one, or reduced in each micro-batch: run forward and backward "
    "inside no_sync() for all micro-batches but the last",
    more={"all_reduce": 1},
    gloo=2,
)
def ddp_reduces_in_each_backward(changed):
    return of(replicated(), without_sync, number=2, reduce_each=changed)


class Headless(Decoder):
    """Gives what its head works on; a loss calls the head, for a part of the sequence at once."""

    def forward(self, given):
        x = self.embed(given)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def chunked(*, reduce_each, chunks=4):
    """A head whose backward runs for each part, before that of the layers."""
    model = Headless(2)
    fully_shard(model.head, mesh=mesh(), reshard_after_forward=False)
    units(model)
    model.head.set_reshard_after_backward(reshard_after_backward=False)

    def run():
        hidden = model(tokens())
        parts = [part.detach().requires_grad_() for part in hidden.chunk(chunks, dim=1)]
        labels = tokens().chunk(chunks, dim=1)
        for number, (part, given) in enumerate(zip(parts, labels, strict=True)):
            model.head.set_requires_gradient_sync(reduce_each or number == chunks - 1)
            cross_entropy(model.head(part).flatten(0, 1), given.flatten()).backward()
        hidden.backward(torch.cat([part.grad for part in parts], dim=1))
        model.head.reshard()

    return model, run


@reported(
    "pytorch/torchtitan/pull/4182",
    happened="A chunked loss ran the backward of the head once per chunk, and each run reduced "
    "its gradients.",
    cost="17 reduce-scatters instead of 1 in the last stage of a pipeline.",
    first="gradients of head reduced 1 -> 4 times (reduce_scatter), gathers unchanged",
    likely="the unit's backward runs several times, e.g. for a chunked loss: call set_requires_gradient_sync(False) on the unit for all backwards but the last",
    more={"reduce_scatter": 3},
    neighbour=lambda: chunked(reduce_each=False, chunks=8),
)
def head_reduced_for_each_chunk(changed):
    return chunked(reduce_each=changed)


@reported(
    "verl-project/verl/issues/7493",
    "pytorch/pytorch/issues/154888",
    happened="A setting produced shards of one rank. FSDP1 then treated HYBRID_SHARD as "
    "NO_SHARD and reduced over that rank only, so the ranks trained separate models.",
    first="breaks training: gradients of (root), layers.{0..1} are no longer reduced over replicate and shard (was 6 calls, 36.5 KiB per rank)",
    tree="mesh axes in use: replicate=2 stride 2, shard=2 stride 1 -> shard=1",
    more={"all_gather": -5, "reduce_scatter": -3},  # 3 units, of which the root is kept
)
def a_shard_of_one_rank(changed):
    shape = (4, 1) if changed else (2, 2)
    axes = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return of(wrapped(device_mesh=axes, sharding_strategy=ShardingStrategy.HYBRID_SHARD))


@reported(
    "NVIDIA-NeMo/Automodel/pull/3135",
    happened="The parallelizer of experts built a mesh with only the shard axis. Replicas no "
    "longer exchanged gradients.",
    first="breaks training: gradients of (root), layers.{0..2} are no longer reduced over replicate (was 4 calls, 17.2 KiB per rank)",
    tree="mesh axes in use: replicate=2 stride 2, shard=2 stride 1 -> shard=2 stride 1",
    more={"all_reduce": -4},
)
def replicas_lost_from_the_mesh(changed):
    axes = mesh(replicate=2, shard=2)
    return of(units(Decoder(), axes=axes["shard"] if changed else axes))


class Scaled(nn.Module):
    """A head with something beside it that is not trained."""

    def __init__(self, head):
        super().__init__()
        self.head, self.scale = head, nn.Linear(32, 32).requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.scale(self.head(x))


def ignoring(*names):
    model = Decoder(2)
    model.head = Scaled(model.head)
    return of(wrapped(model, ignored_modules=[model.get_submodule(name) for name in names]))


@reported(
    "pytorch/pytorch/issues/98281",
    "BrotherHappy/OSTQuant/issues/15",
    happened="Trained modules were listed in `ignored_modules`. FSDP1 does not reduce their "
    "gradients, so each GPU applied its local gradients.",
    first="unit sizes changed: (root) 4.1 -> 2.1 KiB per gather",
    tree="breaks training: head.head.weight: FlatShard() over world -> a plain tensor, no longer managed by a unit",
)
def trained_modules_ignored(changed):
    return ignoring("head.scale", *["head.head"] * changed)


@reported(
    "Tencent-Hunyuan/UniRL/pull/7",
    happened="Only the blocks were sharded. Each rank held the whole embedding, norm and head, "
    "and the code all-reduced their gradients.",
    cost="About 6 GB per rank, for a 4B model on 32 ranks.",
    first="(root) no longer gathered or reduced, gathers of other units unchanged in forward",
    likely="fully_shard on the root is missing: its parameters are not sharded, FSDP does not reduce their gradients, and each unit below becomes a root",
    more={"all_gather": -4, "reduce_scatter": -1, "all_reduce": 3},
)
def root_left_whole(changed):
    model = Decoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    if not changed:
        return of(fully_shard(model, mesh=mesh()))

    def run(model):
        train(model)
        for module in (model.embed, model.norm, model.head):
            dist.all_reduce(module.weight.grad)

    return of(model, run)


@reported(
    "mosaicml/composer/pull/2628",
    happened="The default precision set no `reduce_dtype`, so FSDP1 reduced in bfloat16.",
    first="gradients[world] float32 -> bfloat16, half the bytes",
    likely="MixedPrecisionPolicy, as the tree shows",
    tree="(root), layers.{0..1}: reduce_dtype float32 -> None",
)
def gradients_reduced_in_bfloat16(changed):
    reduced = {} if changed else {"reduce_dtype": torch.float32}
    return of(wrapped(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, **reduced)))
