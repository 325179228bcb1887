"""Changes of a step with replicas: HSDP, DDP, and FSDP1, which has all of them."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from models import Decoder, DecoderLayer
from regressions.steps import evaluate, of, train, units
from regressions.table import TABLE, mesh
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

regression, innocent = TABLE.regression, TABLE.innocent


# FSDP2 over two axes.


def hybrid(layers=2, *, replicate=2, shard=2, **options):
    axes = mesh(replicate=replicate, shard=shard)
    return units(Decoder(layers), axes=axes, **options)


def micro_batches(model, number, *, reduce_each, all_reduce_each):
    for n in range(number):
        is_last = n == number - 1
        model.set_requires_gradient_sync(reduce_each or is_last)
        model.set_requires_all_reduce(all_reduce_each or is_last)
        train(model)


@regression(reported="torchtitan 1929, VeOmni 781", is_reversible=True)
def hybrid_replicas_reduced_for_each_micro_batch(changed):
    return of(hybrid(), micro_batches, number=2, reduce_each=True, all_reduce_each=changed)


@regression(is_reversible=True)
def hybrid_only_the_all_reduce_is_deferred(changed):
    return of(hybrid(), micro_batches, number=2, reduce_each=changed, all_reduce_each=False)


@regression(is_reversible=True)
def hybrid_gradients_reduced_for_each_micro_batch(changed):
    return of(hybrid(), micro_batches, number=2, reduce_each=changed, all_reduce_each=changed)


@regression(is_reversible=True)
def hybrid_became_fully_sharded(changed):
    axes = mesh(dp=4) if changed else mesh(replicate=2, shard=2)
    return of(units(Decoder(2), axes=axes))


@innocent(is_reversible=True)
def hybrid_beside_features_of_all_ranks(changed):
    # The loss gathers over all ranks in both, so their axis remains.
    model = Decoder(2)
    for module in (*model.layers, model):
        fully_shard(module, **({"mesh": mesh(replicate=2, shard=2)} if changed else {}))

    def run(model):
        train(model)
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(1))

    return of(model, run)


@innocent(worlds=(8, 8), is_reversible=True)
def hybrid_replicates_more_and_shards_less(changed):
    return of(hybrid(replicate=4, shard=2) if changed else hybrid(replicate=2, shard=4))


@innocent(worlds=(4, 8), is_reversible=True)
def hybrid_twice_the_replicas(changed):
    return of(hybrid(replicate=4 if changed else 2))


@regression
def hybrid_one_layer_is_not_replicated(changed):
    model, axes = Decoder(2), mesh(replicate=2, shard=2)
    if changed:
        fully_shard(model.layers[1], mesh=axes["shard"])
    for layer in model.layers:
        if not changed or layer is not model.layers[1]:
            fully_shard(layer, mesh=axes)
    return of(fully_shard(model, mesh=axes))


@regression
def hybrid_axes_exchanged(changed):
    # Parameters are gathered across machines, gradients all-reduced within them.
    ranks = [[0, 2], [1, 3]] if changed else [[0, 1], [2, 3]]
    axes = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    return of(units(Decoder(2), axes=axes))


@innocent(is_reversible=True)
def hybrid_two_layers_more(changed):
    return of(hybrid(4 if changed else 2))


@innocent(is_reversible=True)
def hybrid_evaluation_before_the_step(changed):
    def run(model):
        if changed:
            evaluate(model)
        train(model)

    return of(hybrid(), run)


@regression(is_reversible=True)
def hybrid_nothing_is_freed_after_forward(changed):
    return of(hybrid(reshard_after_forward=not changed))


# FSDP1.


def wrapped(model=None, *, policy=None, **options):
    return FullyShardedDataParallel(
        model or Decoder(2),
        auto_wrap_policy=policy or ModuleWrapPolicy({DecoderLayer}),
        device_id=torch.device("cpu"),
        **options,
    )


def without_sync(model, number, *, reduce_each):
    for n in range(number):
        with nullcontext() if reduce_each or n == number - 1 else model.no_sync():
            train(model)


@regression(reported="pytorch 75892", is_reversible=True)
def fsdp1_no_sync_left_out(changed):
    return of(wrapped(), without_sync, number=2, reduce_each=changed)


@regression(is_reversible=True)
def fsdp1_parameters_replicated(changed):
    # The silent form: another sharding strategy, the same loss.
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    return of(wrapped(sharding_strategy=strategies[changed]))


@regression(is_reversible=True)
def fsdp1_gradients_sharded_only(changed):
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    return of(wrapped(sharding_strategy=strategies[changed]))


@regression(is_reversible=True)
def fsdp1_layers_are_no_units_any_more(changed):
    # The class in the policy is not the class of the layers.
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer if changed else DecoderLayer})
    return of(wrapped(policy=policy))


@innocent(is_reversible=True)
def fsdp1_embedding_becomes_a_unit(changed):
    policy = ModuleWrapPolicy({DecoderLayer, *[nn.Embedding] * changed})
    return of(wrapped(policy=policy))


@innocent(is_reversible=True)
def fsdp1_units_by_size(changed):
    def by_size(module, recurse, nonwrapped_numel):
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=1_000)

    return of(wrapped(policy=by_size if changed else None))


@regression(is_reversible=True)
def fsdp1_backward_prefetch_dropped(changed):
    return of(wrapped(backward_prefetch=None if changed else BackwardPrefetch.BACKWARD_PRE))


@innocent(is_reversible=True)
def fsdp1_forward_prefetch_added(changed):
    return of(wrapped(forward_prefetch=changed))


@innocent(is_reversible=True)
def fsdp1_mixed_precision_switched_on(changed):
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return of(wrapped(mixed_precision=policy if changed else None))


@innocent(is_reversible=True)
def fsdp1_two_layers_more(changed):
    return of(wrapped(Decoder(4 if changed else 2)))


@regression
def fsdp1_gradients_clipped_as_if_not_sharded(changed):
    # FSDP1 has its own `clip_grad_norm_`, which sums the norms of all shards.
    model = wrapped(use_orig_params=True)

    def run():
        train(model)
        if changed:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            model.clip_grad_norm_(1.0)

    return model, run


@regression
def fsdp1_all_parameters_gathered_for_logging(changed):
    def run(model):
        train(model)
        if changed:
            with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                sum(weight.norm() for weight in model.parameters())

    return of(wrapped(), run)


@regression(is_reversible=True)
def fsdp1_became_fsdp2(changed):
    return of(units(Decoder(2)) if changed else wrapped())


# DDP, whose reducer the fake group does not serve.


def replicated(model=None, **options):
    return DistributedDataParallel(model or Decoder(2), **options)


@regression(gloo=2, is_reversible=True)
def ddp_no_sync_left_out(changed):
    return of(replicated(), without_sync, number=2, reduce_each=changed)


@regression(gloo=2, is_reversible=True)
def ddp_smaller_buckets(changed):
    return of(replicated(bucket_cap_mb=0.01 if changed else 25))


@regression(gloo=2, is_reversible=True)
def ddp_smaller_buckets_beside_unused_parameters(changed):
    return of(replicated(bucket_cap_mb=0.01 if changed else 25, find_unused_parameters=True))


@regression(gloo=2, is_reversible=True)
def ddp_looks_for_unused_parameters(changed):
    return of(replicated(find_unused_parameters=changed))


@innocent(gloo=2, is_reversible=True)
def ddp_static_graph(changed):
    return of(replicated(static_graph=changed))


@innocent(gloo=2, is_reversible=True)
def ddp_reduces_in_float16(changed):
    model = replicated()
    if changed:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return of(model)


@regression(gloo=2)
def ddp_broadcasts_buffers(changed):
    model = Decoder(2)
    model.head.register_buffer("scale", torch.ones(16))
    return of(replicated(model, broadcast_buffers=changed))


@innocent(gloo=2, is_reversible=True)
def ddp_two_layers_more(changed):
    return of(replicated(Decoder(4 if changed else 2)))


@innocent(gloo=2, is_reversible=True)
def ddp_became_fsdp(changed):
    return of(units(Decoder(2)) if changed else replicated())


@innocent(gloo=2, is_reversible=True)
def ddp_backbone_frozen(changed):
    model = Decoder(2)
    model.layers.requires_grad_(not changed)
    return of(replicated(model))


@regression(gloo=2)
def ddp_replaced_by_reducing_each_gradient(changed):
    model = Decoder(2)

    def run(model):
        train(model)
        for weight in model.parameters() if changed else ():
            dist.all_reduce(weight.grad)

    return of(model if changed else replicated(model), run)


@regression
def gradients_reduced_by_hand_after_each_micro_batch(changed):
    model = Decoder(2)

    def run(model):
        for number in range(2):
            train(model)
            for weight in model.parameters() if changed or number == 1 else ():
                dist.all_reduce(weight.grad)

    return of(model, run)


# Replicas with an optimizer that updates a part of each parameter on each rank.


class ShardedSGD(torch.optim.Optimizer):
    """Args:
    params: Replicated parameters.
    least: The number of elements from which a parameter is split.
    gathers: Whether ranks exchange the updated parts.
    """

    def __init__(self, params, *, least=0, gathers=True):
        super().__init__(params, {})
        self.least, self.gathers = least, gathers

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() < self.least:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
                parameter.add_(parameter.grad, alpha=-1e-3)
                continue
            size = len(parameter) // dist.get_world_size()
            part = parameter[dist.get_rank() * size :][:size]
            gradient = torch.empty_like(part)
            dist.reduce_scatter_tensor(gradient, parameter.grad, op=dist.ReduceOp.AVG)
            part.add_(gradient, alpha=-1e-3)
            if self.gathers:
                dist.all_gather_into_tensor(parameter, part.clone())


def with_sharded_optimizer(**options):
    model = Decoder(2)
    optimizer = ShardedSGD(model.parameters(), **options)

    def run():
        train(model)
        optimizer.step()
        optimizer.zero_grad()

    return model, run


@regression(is_reversible=True)
def sharded_optimizer_splits_fewer_parameters(changed):
    return with_sharded_optimizer(least=300 if changed else 0)


@regression
def sharded_optimizer_gathers_nothing(changed):
    return with_sharded_optimizer(gathers=not changed)
