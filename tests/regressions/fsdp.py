"""Changes of a step with FSDP2 over one axis."""

import torch
import torch.distributed as dist
from models import Decoder, DecoderLayer
from regressions.steps import accumulate, evaluate, of, tokens, train, units
from regressions.table import TABLE, mesh
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

regression, innocent = TABLE.regression, TABLE.innocent


# How often gradients are reduced, and parameters gathered.


@regression(reported="cosmos-framework 161, verl PR 7095", is_reversible=True)
def gradients_reduced_for_each_micro_batch(changed):
    return of(units(Decoder()), accumulate, micro_batches=4, reduce_each=changed)


@regression(is_reversible=True)
def gradients_reduced_in_the_first_micro_batch(changed):
    return of(units(Decoder()), accumulate, micro_batches=4, reduce_first=changed)


@regression
def layers_stay_gathered_from_step_to_step(changed):
    model = units(Decoder())
    for layer in model.layers:
        layer.set_reshard_after_backward(not changed)
    train(model)
    return of(model)


@regression
def parameters_gathered_for_each_micro_batch(changed):
    # Kept over all micro-batches, as zero 2 does, and no longer.
    model = units(Decoder(), reshard_after_forward=False)

    def run():
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            model.set_reshard_after_backward(changed or number == 2)
            train(model)

    return model, run


@regression(reported="OLMo-core 194", is_reversible=True)
def embedding_gathered_in_backward(changed):
    model = units(Decoder(), "embed")
    model.embed.set_unshard_in_backward(unshard_in_backward=changed)
    return of(model)


@regression(reported="trl 6076")
def head_gathered_for_each_chunk(changed):
    return of(units(Decoder(), "head"), chunks=4 if changed else 1)


@regression
def head_split_off_and_gathered_for_each_chunk(changed):
    return of(units(Decoder(), *["head"] * changed), chunks=4)


@regression
def norm_called_for_each_chunk(changed):
    class Chunked(Decoder):
        def forward(self, given):
            x = self.embed(given)
            for layer in self.layers:
                x = layer(x)
            return self.head(torch.cat([self.norm(part) for part in x.chunk(4 if changed else 1)]))

    return of(units(Chunked(), "norm"), batch=4)


@regression
def embedding_called_for_each_sequence(changed):
    class Separate(Decoder):
        def forward(self, given):
            rows = given.split(1) if changed else [given]
            x = torch.cat([self.embed(row) for row in rows])
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    return of(units(Separate(), "embed"), batch=4)


@innocent(is_reversible=True)
def accumulation_over_4_micro_batches(changed):
    return of(units(Decoder()), accumulate, micro_batches=4 if changed else 1)


@innocent(is_reversible=True)
def accumulation_over_3_instead_of_2(changed):
    return of(units(Decoder()), accumulate, micro_batches=3 if changed else 2)


@innocent(is_reversible=True)
def two_steps_instead_of_one(changed):
    return of(units(Decoder()), accumulate, micro_batches=1 + changed, reduce_each=True)


# Which modules are units.


@innocent(is_reversible=True)
def head_becomes_a_unit(changed):
    return of(units(Decoder(), *["head"] * changed))


@innocent(is_reversible=True)
def head_becomes_a_unit_with_2_micro_batches(changed):
    # Once a false cause: "called 2 times in one forward".
    return of(units(Decoder(), *["head"] * changed), accumulate, micro_batches=2)


@innocent(is_reversible=True)
def norm_becomes_a_unit_with_2_micro_batches(changed):
    return of(units(Decoder(), *["norm"] * changed), accumulate, micro_batches=2)


@innocent(is_reversible=True)
def embedding_becomes_a_unit_with_2_micro_batches(changed):
    return of(units(Decoder(), *["embed"] * changed), accumulate, micro_batches=2)


@innocent(is_reversible=True)
def embedding_and_head_become_units(changed):
    return of(units(Decoder(), *["embed", "head"] * changed))


@regression(is_reversible=True)
def layers_are_no_units_any_more(changed):
    return of(units(Decoder(), layers=not changed))


@regression(is_reversible=True)
def one_layer_is_no_unit_any_more(changed):
    model = Decoder(4)
    for layer in [*model.layers][: 3 if changed else 4]:
        fully_shard(layer, mesh=mesh())
    return of(fully_shard(model, mesh=mesh()))


@regression(is_reversible=True)
def attention_and_mlp_become_units_of_their_own(changed):
    inner = [f"layers.{n}.{part}" for n in range(3) for part in ("attention", "mlp")]
    return of(units(Decoder(), *inner * changed))


@innocent(is_reversible=True)
def two_layers_a_unit(changed):
    model = Decoder(4)
    for first in range(0, 4, 2 if changed else 1):
        fully_shard([*model.layers[first : first + 1 + changed]], mesh=mesh())
    return of(fully_shard(model, mesh=mesh()))


@regression(reported="torchtitan 1547")
def root_is_not_sharded(changed):
    model = Decoder()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    return of(model if changed else fully_shard(model, mesh=mesh()))


@innocent
def embedding_becomes_a_unit_below_a_wrapped_root(changed):
    # Once a false cause: "the root is no FSDP unit any more".
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Decoder()

        def forward(self, given):
            return self.model(given)

    model = Wrapper()
    units(model.model, *["embed"] * changed)
    return of(fully_shard(model, mesh=mesh()))


# When units are freed and gathered again.


@regression(is_reversible=True)
def nothing_is_freed_after_forward(changed):
    return of(units(Decoder(), reshard_after_forward=not changed))


@regression(reported="pytorch 131965, 149029, 154655", is_reversible=True)
def root_is_freed_after_forward(changed):
    return of(units(Decoder(), root=changed))


@regression(is_reversible=True)
def everything_is_freed_after_forward(changed):
    return of(units(Decoder(), root=changed, reshard_after_forward=changed))


@innocent(is_reversible=True)
def layers_are_resharded_to_two_ranks(changed):
    return of(units(Decoder(), reshard_after_forward=2 if changed else True))


@innocent(is_reversible=True)
def root_is_resharded_to_two_ranks(changed):
    return of(units(Decoder(), root=2 if changed else True))


@innocent(is_reversible=True)
def last_layer_is_kept(changed):
    model = Decoder()
    for number, layer in enumerate(model.layers):
        fully_shard(layer, mesh=mesh(), reshard_after_forward=not (changed and number == 2))
    return of(fully_shard(model, mesh=mesh()))


@innocent(is_reversible=True)
def head_is_kept_after_forward(changed):
    model = Decoder()
    fully_shard(model.head, mesh=mesh(), reshard_after_forward=not changed)
    return of(units(model))


def prefetching(model, ahead):
    layers = list(model.layers)
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + ahead])
    return model


@regression(reported="Megatron-LM 5513", is_reversible=True)
def forward_prefetch_dropped(changed):
    return of(prefetching(units(Decoder(4)), 0 if changed else 1))


@regression(is_reversible=True)
def forward_prefetch_one_instead_of_two_ahead(changed):
    return of(prefetching(units(Decoder(4)), 1 if changed else 2))


@regression(is_reversible=True)
def backward_prefetch_dropped(changed):
    model = units(Decoder(4))
    for layer in model.layers if changed else ():
        layer.set_modules_to_backward_prefetch([layer])
    return of(model)


@regression
def unshard_became_synchronous(changed):
    model = units(Decoder())

    def run():
        model.layers[0].unshard(async_op=not changed)
        train(model)

    return model, run


@regression(reported="NeMo Automodel PR 3411")
def reentrant_checkpointing_repeats_prefetching(changed):
    model = Decoder(4, reentrant=changed)
    return of(prefetching(units(model), 1))


@innocent(is_silent=True)
def checkpointing_of_units(changed):
    return of(units(Decoder(reentrant=False if changed else None)))


@innocent(is_silent=True)
def checkpointing_below_units(changed):
    inner = [f"layers.{n}.mlp" for n in range(3)]
    return of(units(Decoder(reentrant=False if changed else None), *inner))


@innocent(is_reversible=True)
def checkpointing_that_gathers(changed):
    # Nothing is gathered ahead, so the recomputation is the first to need a part.
    model = Decoder(reentrant=False if changed else None)
    inner = [f"layers.{n}.{part}" for n in range(3) for part in ("attention", "mlp")]
    units(model, *inner)
    for name in inner:
        part = model.get_submodule(name)
        part.set_modules_to_backward_prefetch([part])
    for layer in model.layers:
        layer.set_modules_to_backward_prefetch([layer])
    return of(model)


# What is sent, and how large it is.


def mixed(**dtypes):
    return MixedPrecisionPolicy(**dtypes)


def mixed_alike(dtype):
    # Without reduce_dtype, versions of torch reduce in different types.
    return mixed(param_dtype=dtype, reduce_dtype=dtype)


@innocent(is_reversible=True)
def mixed_precision_switched_on(changed):
    policy = mixed(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if changed else mixed()
    return of(units(Decoder(), mp_policy=policy))


@innocent(is_reversible=True)
def all_of_mixed_precision_in_bfloat16(changed):
    return of(units(Decoder(), mp_policy=mixed_alike(torch.bfloat16) if changed else mixed()))


@innocent(is_reversible=True)
def gradients_reduced_in_float32(changed):
    reduced = torch.float32 if changed else torch.bfloat16
    policy = mixed(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    return of(units(Decoder(), mp_policy=policy))


@regression
def one_unit_lost_its_mixed_precision(changed):
    policy = mixed_alike(torch.bfloat16)
    model = Decoder()
    fully_shard(
        model.head, mesh=mesh(), mp_policy=mixed(param_dtype=torch.float32) if changed else policy
    )
    return of(units(model, mp_policy=policy))


@innocent(is_reversible=True)
def whole_model_in_bfloat16(changed):
    return of(units(Decoder().to(torch.bfloat16 if changed else torch.float32)))


@innocent(is_reversible=True)
def bfloat16_instead_of_float16(changed):
    dtype = torch.bfloat16 if changed else torch.float16
    return of(units(Decoder(), mp_policy=mixed_alike(dtype)))


@innocent(is_reversible=True)
def width_doubled(changed):
    return of(units(Decoder(width=16 << changed, hidden=32 << changed)))


@innocent(is_reversible=True)
def hidden_size_changed(changed):
    return of(units(Decoder(hidden=48 if changed else 32)))


@innocent(is_reversible=True)
def vocabulary_enlarged(changed):
    return of(units(Decoder(vocabulary=40 if changed else 32)))


@regression(is_reversible=True)
def embedding_untied_from_head(changed):
    return of(units(Decoder(tied=not changed)))


@regression
def embedding_untied_from_head_as_a_unit(changed):
    model = Decoder(tied=not changed)
    fully_shard([model.embed, model.norm, model.head], mesh=mesh())
    return of(units(model))


@innocent(is_silent=True)
def batch_doubled(changed):
    return of(units(Decoder()), batch=4 if changed else 2)


@innocent(is_silent=True)
def parameters_offloaded(changed):
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if changed else {}
    return of(units(Decoder(), **policy))


# Layers and names.


@innocent(is_reversible=True)
def two_layers_more(changed):
    return of(units(Decoder(5 if changed else 3)))


@innocent(is_reversible=True)
def twice_the_layers(changed):
    return of(units(Decoder(6 if changed else 3)))


@innocent(is_reversible=True)
def one_layer_of_two_less(changed):
    return of(units(Decoder(1 if changed else 2)))


class Blocks(Decoder):
    """A decoder whose layers are called blocks."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.blocks = self.layers
        del self.layers

    def forward(self, given):
        x = self.embed(given)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def block_units(model):
    for block in model.blocks:
        fully_shard(block, mesh=mesh())
    return fully_shard(model, mesh=mesh())


@innocent(is_reversible=True)
def layers_renamed_to_blocks(changed):
    return of(block_units(Blocks()) if changed else units(Decoder()))


@innocent
def layers_renamed_and_two_more(changed):
    return of(block_units(Blocks(5)) if changed else units(Decoder()))


class Inner(nn.Module):
    """Everything below one module more."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, given):
        return self.inner(given)


@innocent(is_reversible=True)
def wrapped_in_another_module(changed):
    model = units(Decoder())
    return of(Inner(model) if changed else model)


@innocent(is_reversible=True)
def wrapped_before_it_is_sharded(changed):
    if not changed:
        return of(units(Decoder()))
    model = Inner(Decoder())
    for layer in model.inner.layers:
        fully_shard(layer, mesh=mesh())
    return of(fully_shard(model, mesh=mesh()))


class RenamedLayer(DecoderLayer):
    """Its `mlp` is `feed_forward`."""

    def __init__(self):
        super().__init__(16, 32)
        self.feed_forward = self.mlp
        del self.mlp

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.mlp_norm(x))


@innocent(is_reversible=True)
def attributes_of_layers_renamed(changed):
    model = Decoder()
    if changed:
        model.layers = nn.ModuleList(RenamedLayer() for _ in range(3))
    return of(
        units(model, *[f"layers.{n}.{'feed_forward' if changed else 'mlp'}" for n in range(3)])
    )


@innocent
def one_layer_removed_and_another_module_added(changed):
    # Once a false cause: "renamed".
    class Extended(Decoder):
        def __init__(self):
            super().__init__(2)
            self.adapter = nn.Linear(16, 16)

        def forward(self, given):
            x = self.embed(given)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.adapter(self.norm(x)))

    return of(units(Extended(), "adapter") if changed else units(Decoder(3)))


@innocent
def a_shared_layer_used_twice(changed):
    class Looped(Decoder):
        def forward(self, given):
            x = self.embed(given)
            for layer in self.layers:
                x = layer(x)
            if changed:
                x = self.layers[0](x)
            return self.head(self.norm(x))

    return of(units(Looped()))


# What else runs in a step.


def with_evaluation(model, *, before, after):
    if before:
        evaluate(model)
    train(model)
    if after:
        evaluate(model)


@innocent(is_reversible=True)
def evaluation_before_the_step(changed):
    return of(units(Decoder()), with_evaluation, before=changed, after=False)


@innocent(is_reversible=True)
def evaluation_after_the_step(changed):
    return of(units(Decoder()), with_evaluation, before=False, after=changed)


@innocent(is_reversible=True)
def training_replaced_by_evaluation(changed):
    # Once a false cause: "reshard_after_forward became False".
    return of(units(Decoder()), evaluate if changed else train)


@regression
def a_second_forward_in_each_step(changed):
    def run(model):
        with torch.no_grad():
            for _ in range(1 + changed):
                model(tokens())
        train(model)

    return of(units(Decoder()), run)


@innocent(is_reversible=True)
def a_second_backward(changed):
    def run(model):
        loss = model(tokens()).mean()
        if changed:
            loss.backward(retain_graph=True)
        loss.backward()

    return of(units(Decoder()), run)


@regression
def a_parameter_gathered_for_logging(changed):
    def run(model):
        train(model)
        if changed:
            model.head.weight.full_tensor().norm()

    return of(units(Decoder()), run)


@regression
def all_parameters_gathered_for_logging(changed):
    def run(model):
        train(model)
        if changed:
            for weight in model.parameters():
                weight.full_tensor().norm()

    return of(units(Decoder()), run)


@regression
def all_gradients_gathered_for_logging(changed):
    def run(model):
        train(model)
        if changed:
            for weight in model.parameters():
                weight.grad.full_tensor().norm()

    return of(units(Decoder()), run)


@regression
def loss_averaged_in_each_step(changed):
    def run(model):
        loss = model(tokens()).mean()
        if changed:
            dist.all_reduce(loss.detach().clone())
        loss.backward()

    return of(units(Decoder()), run)


@regression
def a_barrier_in_each_step(changed):
    def run(model):
        train(model)
        if changed:
            dist.barrier()

    return of(units(Decoder()), run)


def optimized(model, *, clips=0, steps=True, gather=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run():
        train(model)
        for _ in range(clips):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm.full_tensor()
        if steps:
            optimizer.step()
        if gather:
            model.unshard()
            model.reshard()
        optimizer.zero_grad()

    return model, run


@innocent(is_silent=True)
def optimizer_added(changed):
    return optimized(units(Decoder()), steps=changed)


@innocent(is_reversible=True)
def gradients_clipped(changed):
    return optimized(units(Decoder()), clips=int(changed))


@regression
def gradients_clipped_twice(changed):
    return optimized(units(Decoder()), clips=1 + changed)


@regression
def root_gathered_after_the_optimizer(changed):
    return optimized(units(Decoder()), clips=1, gather=changed)


class Whole(torch.optim.SGD):
    """Works on whole matrices, as Muon does."""

    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.ndim == 2:
                    weight.grad.full_tensor()
        super().step()


@innocent(is_reversible=True)
def optimizer_works_on_whole_matrices(changed):
    model = units(Decoder(2))
    optimizer = (Whole if changed else torch.optim.SGD)(model.parameters(), lr=1e-3)

    def run():
        train(model)
        optimizer.step()

    return model, run


# Which parameters are trained.


@innocent(is_reversible=True)
def embedding_frozen(changed):
    model = Decoder()
    model.embed.requires_grad_(not changed)
    return of(units(model, "embed"))


@innocent(is_reversible=True)
def embedding_and_first_layer_frozen(changed):
    model = Decoder()
    for module in (model.embed, model.layers[0]):
        module.requires_grad_(not changed)
    return of(units(model, "embed"))


@innocent(is_reversible=True)
def all_norms_frozen(changed):
    model = Decoder()
    for name, weight in model.named_parameters():
        weight.requires_grad_(not (changed and "norm" in name))
    return of(units(model))


@regression
def a_frozen_layer_is_trained(changed):
    model = Decoder()
    model.layers[1].requires_grad_(changed)
    return of(units(model))


# Ranks and axes.


@innocent(worlds=(4, 8), is_reversible=True)
def twice_the_ranks(changed):
    del changed
    return of(units(Decoder()))


@innocent(is_reversible=True)
def axis_renamed(changed):
    return of(units(Decoder(), axes=mesh(**{"shard" if changed else "dp": 4})))


@regression
def root_broadcasts_from_another_rank(changed):
    def run(model):
        train(model)
        dist.broadcast(torch.ones(4), int(changed))

    return of(units(Decoder()), run)
