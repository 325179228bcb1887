"""Changes of a step with tensor parallelism, alone and below FSDP2."""

import torch
import torch.distributed as dist
from models import WIDTH, Block, Decoder
from regressions.steps import evaluate, of, tokens, train, units
from regressions.table import TABLE, mesh
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

regression, innocent = TABLE.regression, TABLE.innocent

SEQUENCE = Shard(1)


def layer_plan(*, sequence=True, norms=True, attention=None, down=None):
    """How a layer is split: as torchtitan does it, or without sequence parallelism.

    Args:
        sequence: Whether norms work on a part of the sequence.
        norms: Whether the norms' own parameters know that.
        attention: Replaces the plan of attention's input.
        down: Replaces the plan of the last matrix.
    """
    split = SEQUENCE if sequence else Replicate()
    plan = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=split),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": down or RowwiseParallel(output_layouts=split),
    }
    if sequence:
        whole = PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate())
        plan |= {"attention": attention or whole, "mlp": whole}
    if sequence and norms:
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    return plan


def tensor_parallel(model, axes, *, sequence=True, logits=None, **options):
    """Splits a decoder as torchtitan does.

    Args:
        model: The decoder.
        axes: The mesh of one axis.
        sequence: Whether norms work on a part of the sequence.
        logits: Layout of the output; None for one part of the vocabulary a rank.
        options: As for `layer_plan`.
    """
    split = SEQUENCE if sequence else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
        "head": ColwiseParallel(
            input_layouts=split,
            output_layouts=logits or Shard(-1),
            use_local_output=logits is not None,
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, axes, plan)
    for layer in model.layers:
        parallelize_module(layer, axes, layer_plan(sequence=sequence, **options))
    return model


def step(model, *, batch=2, length=8, is_whole=False):
    """Forward and backward; the loss is computed where the logits are, unless they are whole."""
    if is_whole:
        train(model, batch=batch, length=length)
        return
    given = tokens(batch, length)
    with loss_parallel():
        cross_entropy(model(given).flatten(0, 1), given.flatten()).backward()


def split(layers=2, *, width=16, hidden=32, vocabulary=32, reentrant=None, **options):
    """A decoder over two ranks, on an axis of its own."""
    model = Decoder(layers, width, hidden=hidden, vocabulary=vocabulary, reentrant=reentrant)
    return tensor_parallel(model, mesh(tp=4), **options)


def sharded(layers=2, *, axes=None, decoder=None, names=(), shards=None, **options):
    """A decoder under both."""
    axes = axes or mesh(dp=2, tp=2)
    model = tensor_parallel(Decoder(layers, **(decoder or {})), axes["tp"], **options)
    return units(model, *names, axes=axes["dp"], **(shards or {}))


# Layouts.


@regression(reported="pytorch 167106", is_reversible=True)
def needless_gather_between_two_linears(changed):
    layout = Replicate() if changed else Shard(-1)
    model = nn.Sequential(Block(), Block())
    for part in model:
        plan = {
            "up": ColwiseParallel(output_layouts=layout),
            "down": RowwiseParallel(input_layouts=layout),
        }
        parallelize_module(part, mesh(tp=4), plan)

    def run():
        model(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()

    return model, run


@regression
def logits_gathered_before_the_loss(changed):
    model = split(logits=Replicate() if changed else None)
    return of(model, step, is_whole=changed)


@regression
def logits_gathered_before_the_loss_under_fsdp(changed):
    model = sharded(logits=Replicate() if changed else None)
    return of(model, step, is_whole=changed)


@regression(is_reversible=True)
def sequence_parallel_switched_off(changed):
    return of(split(sequence=not changed), step)


@regression(is_reversible=True)
def sequence_parallel_switched_off_under_fsdp(changed):
    return of(sharded(sequence=not changed), step)


@regression
def last_matrix_leaves_its_output_whole(changed):
    # The residual takes it apart again.
    whole = PrepareOutput() if changed else None
    return of(split(down=whole), step)


class PrepareOutput(RowwiseParallel):
    """Reduces to all ranks, then keeps a part of the sequence."""

    def __init__(self):
        super().__init__(output_layouts=SEQUENCE)

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        whole = outputs.redistribute(placements=[Replicate()])
        return RowwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, whole, device_mesh
        )


@regression
def attention_asks_for_an_input_that_is_whole_already(changed):
    class Twice(PrepareModuleInput):
        def __init__(self):
            super().__init__(input_layouts=SEQUENCE, desired_input_layouts=Replicate())

        def _apply(self, module, device_mesh):
            for linear in (module.query, module.key, module.value):
                PrepareModuleInput(
                    input_layouts=SEQUENCE, desired_input_layouts=Replicate()
                )._apply(linear, device_mesh)
            return module

    # Each projection gathers for itself.
    return of(split(attention=Twice() if changed else None), step)


@regression
def head_is_not_split(changed):
    model = Decoder(2)
    axes = mesh(tp=4)
    plan = {"embed": RowwiseParallel(input_layouts=Replicate())}
    if not changed:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, axes, plan)
    for layer in model.layers:
        parallelize_module(layer, axes, layer_plan(sequence=False))
    return of(model)


@regression
def embedding_split_by_width(changed):
    model = Decoder(2)
    axes = mesh(tp=4)
    style = (
        ColwiseParallel(output_layouts=Replicate())
        if changed
        else RowwiseParallel(input_layouts=Replicate())
    )
    parallelize_module(model, axes, {"embed": style})
    for layer in model.layers:
        parallelize_module(layer, axes, layer_plan(sequence=False))
    return of(model)


@regression
def one_layer_is_not_split(changed):
    model = Decoder(3)
    axes = mesh(tp=4)
    for layer in model.layers if not changed else model.layers[:2]:
        parallelize_module(layer, axes, layer_plan(sequence=False))
    return of(model)


@regression
def a_partial_sum_is_reduced_twice(changed):
    model = split(sequence=False)

    def run():
        step(model)
        if changed:
            norm = model.head.weight.grad.pow(2).sum()
            norm.redistribute(placements=[Replicate()])
            norm.full_tensor()

    return model, run


# Sizes, counts, names.


@innocent(is_reversible=True)
def split_batch_doubled(changed):
    return of(split(), step, batch=4 if changed else 2)


@innocent(is_reversible=True)
def split_batch_of_3_instead_of_2(changed):
    return of(split(), step, batch=3 if changed else 2)


@innocent(is_reversible=True)
def split_sequence_halved(changed):
    return of(split(), step, length=4 if changed else 8)


@innocent(is_reversible=True)
def split_width_doubled(changed):
    return of(split(width=32 if changed else 16), step)


@innocent(is_silent=True)
def split_vocabulary_enlarged(changed):
    return of(split(vocabulary=64 if changed else 32), step)


@innocent(is_reversible=True)
def split_two_layers_more(changed):
    return of(split(4 if changed else 2), step)


@innocent(is_reversible=True)
def split_evaluation_before_the_step(changed):
    def run(model):
        if changed:
            evaluate(model)
        step(model)

    return of(split(), run)


@innocent(is_reversible=True)
def split_evaluation_after_the_step(changed):
    def run(model):
        step(model)
        if changed:
            evaluate(model)

    return of(split(), run)


@innocent(is_reversible=True)
def split_training_replaced_by_evaluation(changed):
    return of(split(), evaluate if changed else step)


@innocent(is_reversible=True)
def split_three_micro_batches(changed):
    def run(model):
        for _ in range(3 if changed else 1):
            step(model)

    return of(split(), run)


@innocent(is_reversible=True)
def split_in_bfloat16(changed):
    model = split()
    return of(model.to(torch.bfloat16) if changed else model, step)


@innocent(is_reversible=True)
def split_checkpointing(changed):
    return of(split(reentrant=False if changed else None), step)


@regression(is_reversible=True)
def split_checkpointing_became_reentrant(changed):
    # It recomputes the whole layer: it does not stop after what backward needs.
    return of(split(reentrant=changed), step)


@innocent(is_reversible=True)
def split_attributes_renamed(changed):
    class Renamed(Decoder):
        def __init__(self):
            super().__init__(2)
            if changed:
                self.norms, self.final = self.norm, self.head
                del self.norm, self.head

        def forward(self, given):
            x = self.embed(given)
            for layer in self.layers:
                x = layer(x)
            return self.final(self.norms(x)) if changed else self.head(self.norm(x))

    model, axes = Renamed(), mesh(tp=4)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "norms" if changed else "norm": SequenceParallel(),
        "final" if changed else "head": ColwiseParallel(
            input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, axes, plan)
    for layer in model.layers:
        parallelize_module(layer, axes, layer_plan())
    return of(model, step)


@innocent(worlds=(4, 8), is_reversible=True)
def split_over_twice_the_ranks(changed):
    del changed
    model = Decoder(2, 32)
    return of(tensor_parallel(model, mesh(tp=-1)), step)


# Below FSDP2.


@innocent(is_reversible=True)
def both_batch_doubled(changed):
    return of(sharded(), step, batch=4 if changed else 2)


@innocent(is_reversible=True)
def both_width_doubled(changed):
    return of(sharded(decoder={"width": 32 if changed else 16}), step)


@innocent(is_reversible=True)
def both_hidden_size_changed(changed):
    return of(sharded(decoder={"hidden": 48 if changed else 32}), step)


@innocent(is_reversible=True)
def both_two_layers_more(changed):
    return of(sharded(4 if changed else 2), step)


def accumulated(model, micro_batches, *, reduce_each=False):
    for number in range(micro_batches):
        model.set_requires_gradient_sync(reduce_each or number == micro_batches - 1)
        step(model)


@innocent(is_reversible=True)
def both_accumulation_over_3_micro_batches(changed):
    return of(sharded(), accumulated, micro_batches=3 if changed else 1)


@regression(is_reversible=True)
def both_gradients_reduced_for_each_micro_batch(changed):
    return of(sharded(), accumulated, micro_batches=2, reduce_each=changed)


@innocent(is_reversible=True)
def both_checkpointing(changed):
    return of(sharded(decoder={"reentrant": False if changed else None}), step)


@regression(is_reversible=True)
def both_nothing_is_freed_after_forward(changed):
    return of(sharded(shards={"reshard_after_forward": not changed}), step)


@innocent(is_reversible=True)
def both_head_becomes_a_unit_with_2_micro_batches(changed):
    return of(sharded(names=["head"] * changed), accumulated, micro_batches=2)


@innocent(is_reversible=True)
def both_mixed_precision(changed):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return of(sharded(shards={"mp_policy": policy} if changed else {}), step)


@innocent(is_reversible=True)
def both_evaluation_before_the_step(changed):
    def run(model):
        if changed:
            evaluate(model)
        step(model)

    return of(sharded(), run)


@innocent(is_reversible=True)
def both_axes_renamed(changed):
    names = ("shard", "tensor") if changed else ("dp", "tp")
    axes = mesh(**dict.fromkeys(names, 2))
    model = tensor_parallel(Decoder(2), axes[names[1]])
    return of(units(model, axes=axes[names[0]]), step)


@regression(reported="torchtitan PR 286", is_reversible=True)
def both_mesh_turned_around(changed):
    return of(sharded(axes=mesh(tp=2, dp=2) if changed else mesh(dp=2, tp=2)), step)


@innocent(worlds=(4, 8), is_reversible=True)
def both_twice_the_data_parallel_ranks(changed):
    del changed
    return of(sharded(axes=mesh(dp=-1, tp=2)), step)


@innocent(worlds=(4, 8), is_reversible=True)
def both_twice_the_tensor_parallel_ranks(changed):
    return of(sharded(axes=mesh(dp=2, tp=4 if changed else 2)), step)


@innocent(worlds=(8, 8), is_reversible=True)
def both_more_tensor_and_less_data_parallel_ranks(changed):
    return of(sharded(axes=mesh(dp=2, tp=4) if changed else mesh(dp=4, tp=2)), step)


@innocent(is_reversible=True)
def both_tensor_parallel_added(changed):
    return of(sharded(), step) if changed else of(units(Decoder(2), axes=mesh(dp=4)))


@regression
def both_a_parameter_gathered_for_logging(changed):
    def run(model):
        step(model)
        if changed:
            model.layers[0].mlp.down.weight.full_tensor().norm()

    return of(sharded(), run)


@regression
def both_gradients_clipped_twice(changed):
    model = sharded()

    def run():
        step(model)
        for _ in range(1 + changed):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        model.zero_grad()

    return model, run


@innocent(is_reversible=True)
def both_gradients_clipped(changed):
    model = sharded()

    def run():
        step(model)
        if changed:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        model.zero_grad()

    return model, run


@innocent(is_reversible=True)
def both_norms_frozen(changed):
    model = sharded(sequence=False)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not (changed and "norm" in name))
    return of(model, step)


@regression
def both_activations_averaged_by_hand(changed):
    axes = mesh(dp=2, tp=2)
    model = sharded(axes=axes)

    def average(_module, _args, output):
        if changed:
            dist.all_reduce(output.detach().to_local(), group=axes["tp"].get_group())

    model.head.register_forward_hook(average)
    return of(model, step)
