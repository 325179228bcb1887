"""Several changes at once, some of which nobody wanted."""

import torch
import torch.distributed as dist
from models import Decoder
from regressions.fsdp import Blocks, block_units, prefetching
from regressions.steps import accumulate, evaluate, of, train, units
from regressions.table import TABLE, mesh
from regressions.tensor_parallel import sharded, split, step
from torch.distributed.fsdp import MixedPrecisionPolicy

regression, innocent = TABLE.regression, TABLE.innocent

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@innocent(is_reversible=True)
def two_layers_more_and_mixed_precision(changed):
    return of(units(Decoder(5), mp_policy=BFLOAT16) if changed else units(Decoder(3)))


@innocent(is_reversible=True)
def two_layers_more_and_4_micro_batches(changed):
    return of(units(Decoder(5 if changed else 3)), accumulate, micro_batches=4 if changed else 1)


@innocent(is_reversible=True)
def evaluation_and_4_micro_batches(changed):
    def run(model):
        accumulate(model, 4 if changed else 1)
        if changed:
            evaluate(model)

    return of(units(Decoder()), run)


@innocent(is_reversible=True)
def twice_the_batch_and_width(changed):
    return of(split(width=32 if changed else 16), step, batch=4 if changed else 2)


@innocent(is_silent=True)
def twice_the_batch_and_half_the_sequence(changed):
    return of(split(), step, batch=4 if changed else 2, length=4 if changed else 8)


@innocent(is_reversible=True)
def twice_the_batch_and_two_layers_more(changed):
    return of(sharded(4 if changed else 2), step, batch=4 if changed else 2)


@innocent(is_reversible=True)
def checkpointing_and_twice_the_batch(changed):
    decoder = {"reentrant": False if changed else None}
    return of(sharded(decoder=decoder), step, batch=4 if changed else 2)


@innocent(is_reversible=True)
def checkpointing_and_mixed_precision(changed):
    return of(
        sharded(
            decoder={"reentrant": False if changed else None},
            shards={"mp_policy": BFLOAT16} if changed else {},
        ),
        step,
    )


@innocent(is_reversible=True)
def another_width_and_vocabulary(changed):
    return of(units(Decoder(width=32, vocabulary=40) if changed else Decoder()))


@innocent(is_reversible=True)
def embedding_and_head_become_units_and_norm_frozen(changed):
    model = Decoder()
    model.norm.requires_grad_(not changed)
    return of(units(model, *["embed", "head"] * changed))


@regression
def two_layers_more_and_gradients_reduced_for_each_micro_batch(changed):
    return of(units(Decoder(5 if changed else 3)), accumulate, micro_batches=4, reduce_each=changed)


@regression
def two_layers_more_and_head_gathered_for_each_chunk(changed):
    return of(units(Decoder(5 if changed else 3), "head"), chunks=4 if changed else 1)


@regression
def layers_renamed_and_nothing_freed_after_forward(changed):
    if not changed:
        return of(units(Decoder()))
    model = block_units(Blocks())
    for block in model.blocks:
        block.set_reshard_after_forward(reshard_after_forward=False)
    return of(model)


@regression
def mixed_precision_and_prefetch_dropped(changed):
    policy = {"mp_policy": BFLOAT16} if changed else {}
    return of(prefetching(units(Decoder(4), **policy), 0 if changed else 1))


@regression
def twice_the_batch_and_sequence_parallel_off(changed):
    return of(split(sequence=not changed), step, batch=4 if changed else 2)


@regression
def twice_the_batch_and_loss_averaged(changed):
    def run(model):
        step(model, batch=4 if changed else 2)
        if changed:
            dist.all_reduce(torch.ones(1))

    return of(sharded(), run)


@regression
def mesh_turned_around_and_two_layers_more(changed):
    axes = mesh(tp=2, dp=2) if changed else mesh(dp=2, tp=2)
    return of(sharded(4 if changed else 2, axes=axes), step)


@regression
def evaluation_and_a_parameter_gathered_for_logging(changed):
    def run(model):
        train(model)
        if changed:
            evaluate(model)
            model.layers[0].mlp.up.weight.full_tensor()

    return of(units(Decoder()), run)


def three_axes_micro_batches(*, reduce_each, all_reduce_each):
    axes = mesh(replicate=2, shard=2, tp=2)
    model = sharded(axes={"tp": axes["tp"], "dp": axes["replicate", "shard"]})

    def run():
        for is_last in (False, True):
            model.set_requires_gradient_sync(reduce_each or is_last)
            model.set_requires_all_reduce(all_reduce_each or is_last)
            step(model)

    return model, run


@regression(worlds=(8, 8), is_reversible=True)
def three_axes_replicas_reduced_for_each_micro_batch(changed):
    return three_axes_micro_batches(reduce_each=True, all_reduce_each=changed)


@regression(worlds=(8, 8), is_reversible=True)
def three_axes_only_the_all_reduce_is_deferred(changed):
    return three_axes_micro_batches(reduce_each=changed, all_reduce_each=False)


@regression(worlds=(8, 8), is_reversible=True)
def three_axes_sequence_parallel_switched_off(changed):
    axes = mesh(replicate=2, shard=2, tp=2)
    axes = {"tp": axes["tp"], "dp": axes["replicate", "shard"]}
    return of(sharded(axes=axes, sequence=not changed), step)


@innocent(worlds=(8, 8), is_reversible=True)
def three_axes_two_layers_more(changed):
    axes = mesh(replicate=2, shard=2, tp=2)
    axes = {"tp": axes["tp"], "dp": axes["replicate", "shard"]}
    return of(sharded(4 if changed else 2, axes=axes), step)


@innocent(worlds=(8, 8), is_reversible=True)
def three_axes_without_replicas(changed):
    axes = mesh(replicate=2, shard=2, tp=2)
    if changed:
        flat = axes["replicate", "shard"]._flatten("dp")
        return of(sharded(axes={"tp": axes["tp"], "dp": flat}), step)
    return of(sharded(axes={"tp": axes["tp"], "dp": axes["replicate", "shard"]}), step)
