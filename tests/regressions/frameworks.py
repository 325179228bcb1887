"""Changes of a step as frameworks make it, with torch alone.

How torchtitan, accelerate, peft, transformers and trainers for reinforcement learning wrap models
and write loops; the frameworks themselves are in `tests/frameworks`.
"""

import torch
import torch.distributed as dist
from models import Decoder, DecoderLayer
from regressions.steps import accumulate, evaluate, of, tokens, train, units
from regressions.table import TABLE, mesh
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

regression, innocent = TABLE.regression, TABLE.innocent


# torchtitan: the last norm and the head are one unit, which stays gathered after forward.


def titan(layers=2, *, last=True, kept=True, embedding=True, **options):
    model = Decoder(layers, **options)
    if embedding:
        fully_shard(model.embed, mesh=mesh())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh())
    if last:
        fully_shard([model.norm, model.head], mesh=mesh(), reshard_after_forward=not kept)
    return fully_shard(model, mesh=mesh())


@regression(is_reversible=True)
def titan_last_unit_is_freed_after_forward(changed):
    return of(titan(kept=not changed))


@regression(is_reversible=True)
def titan_last_unit_lost(changed):
    return of(titan(last=not changed))


@regression(is_reversible=True)
def titan_embedding_lost(changed):
    return of(titan(embedding=not changed))


@innocent(is_reversible=True)
def titan_two_layers_more(changed):
    return of(titan(4 if changed else 2))


@innocent(is_reversible=True)
def titan_head_alone_in_the_last_unit(changed):
    model = Decoder(2)
    last = [model.head] if changed else [model.norm, model.head]
    fully_shard(last, mesh=mesh(), reshard_after_forward=False)
    return of(units(model, "embed"))


@regression
def titan_prefetches_written_for_fewer_layers(changed):
    # They end after the second of four layers.
    model = titan(4)
    layers = [*model.layers]
    for number, layer in enumerate(layers[:2] if changed else layers[:-1]):
        layer.set_modules_to_forward_prefetch([layers[number + 1]])
    return of(model)


@innocent(is_reversible=True)
def titan_validation_of_two_batches(changed):
    def run(model):
        train(model)
        for _ in range(2 if changed else 0):
            evaluate(model)

    return of(titan(), run)


@regression
def titan_loss_averaged_for_each_micro_batch(changed):
    def run(model):
        for number in range(4):
            model.set_requires_gradient_sync(number == 3)
            loss = model(tokens()).mean()
            if changed or number == 3:
                dist.all_reduce(loss.detach().clone())
            loss.backward()

    return of(titan(), run)


# accelerate: units by the names of classes.


class ForCausalLM(nn.Module):
    """As transformers names things: the decoder is `model`, the head is beside it."""

    def __init__(self, layers=2, **options):
        super().__init__()
        self.model = Decoder(layers, **options)
        self.lm_head = self.model.head
        self.model.head = nn.Identity()

    def forward(self, given):
        return self.lm_head(self.model(given))


def by_class(model, *classes, **options):
    for module in reversed([*model.modules()]):
        if isinstance(module, classes) and module is not model:
            fully_shard(module, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


@regression(is_reversible=True)
def accelerate_finds_no_class_of_that_name(changed):
    classes = () if changed else (DecoderLayer,)
    return of(by_class(ForCausalLM(), *classes))


class Chunked(ForCausalLM):
    """TRL's loss in chunks: the head is no call of its own, so the loss gathers its weight."""

    def __init__(self, *, for_each):
        super().__init__()
        self.for_each = for_each

    def forward(self, given):
        hidden = self.model(given)
        whole = None
        logits = []
        for chunk in hidden.chunk(4, dim=1):
            if whole is None or self.for_each:
                whole = self.lm_head.weight.full_tensor()
            logits.append(chunk @ whole.T)
        return torch.cat(logits, dim=1)


class Penalized(ForCausalLM):
    """A loss reads the head's weight, which is not gathered outside of the head's call."""

    def forward(self, given):
        return super().forward(given) + self.lm_head.weight.full_tensor().square().mean()


@regression
def trl_gathers_the_head_for_each_chunk(changed):
    return of(by_class(Chunked(for_each=changed), DecoderLayer, nn.Linear))


@regression
def trl_gathers_the_head_for_each_chunk_outside_of_the_model(changed):
    def run(model):
        given = tokens()
        hidden = model.model(given)
        for chunk in hidden.chunk(4, dim=1) if changed else ():
            (chunk @ model.lm_head.weight.full_tensor().T).sum().backward(retain_graph=True)
        hidden.sum().backward()

    return of(by_class(ForCausalLM(), Decoder, nn.Linear), run)


@regression
def trl_gathers_the_head_beside_its_unit(changed):
    return of(by_class(Penalized() if changed else ForCausalLM(), DecoderLayer, nn.Linear))


@innocent(is_reversible=True)
def accelerate_embeddings_become_units(changed):
    classes = (DecoderLayer, *[nn.Embedding] * changed)
    return of(by_class(ForCausalLM(), *classes))


@regression(is_reversible=True)
def accelerate_every_linear_is_a_unit(changed):
    return of(by_class(ForCausalLM(), nn.Linear if changed else DecoderLayer))


@regression(is_reversible=True)
def accelerate_lost_its_mixed_precision(changed):
    # As it makes of mixed_precision_policy="bf16".
    dtype = None if changed else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    return of(by_class(ForCausalLM(), DecoderLayer, mp_policy=policy))


@regression
def accelerate_gathers_the_loss_in_each_step(changed):
    def run(model):
        loss = model(tokens()).mean()
        loss.backward()
        if changed:
            dist.all_gather_into_tensor(torch.empty(4), loss.detach().view(1))

    return of(by_class(ForCausalLM(), DecoderLayer), run)


@regression
def accelerate_norm_of_each_gradient_reduced_alone(changed):
    def run(model):
        train(model)
        if changed:
            for weight in model.parameters():
                weight.grad.norm().full_tensor()
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        model.zero_grad()

    return of(by_class(ForCausalLM(), DecoderLayer), run)


@regression
def accelerate_saves_the_whole_state_in_each_step(changed):
    def run(model):
        train(model)
        if changed:
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    return of(by_class(ForCausalLM(), DecoderLayer), run)


@innocent(is_reversible=True)
def transformers_embeddings_resized(changed):
    return of(by_class(ForCausalLM(vocabulary=64 if changed else 32), DecoderLayer))


@innocent(is_reversible=True)
def transformers_model_moved_below_another_name(changed):
    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            inner = ForCausalLM()
            self.language_model, self.lm_head = inner.model, inner.lm_head

        def forward(self, given):
            return self.lm_head(self.language_model(given))

    return of(by_class(Renamed() if changed else ForCausalLM(), DecoderLayer))


# peft: a frozen matrix with a small one beside it.


class Adapted(nn.Module):
    """LoRA of one linear."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(*, layers=2, rank=2, targets=("query", "value"), frozen=True):
    model = Decoder(layers).requires_grad_(requires_grad=False)
    for layer in model.layers:
        for target in targets:
            linear = getattr(layer.attention, target)
            setattr(layer.attention, target, Adapted(linear, rank))
    if not frozen:
        model.requires_grad_(requires_grad=True)
    return model


@regression(is_reversible=True)
def lora_backbone_is_trained(changed):
    return of(units(adapted(frozen=not changed)))


@regression
def lora_head_is_trained(changed):
    model = adapted()
    model.head.requires_grad_(changed)
    return of(units(model))


@innocent(is_reversible=True)
def lora_of_twice_the_rank(changed):
    return of(units(adapted(rank=4 if changed else 2)))


@innocent(is_reversible=True)
def lora_of_all_projections(changed):
    targets = ("query", "key", "value", "output") if changed else ("query", "value")
    return of(units(adapted(targets=targets)))


@innocent(is_reversible=True)
def lora_instead_of_training_everything(changed):
    return of(units(adapted() if changed else Decoder(2)))


@innocent(is_reversible=True)
def lora_adapters_become_units(changed):
    model = adapted()
    names = [f"layers.{n}.attention.{kind}" for n in range(2) for kind in ("query", "value")]
    pieces = [f"{name}.{piece}" for name in names for piece in ("down", "up")]
    return of(units(model, *pieces * changed))


@regression(reported="UniRL PR 321")
def lora_backbone_gathered_again_for_each_micro_batch(changed):
    return of(
        units(adapted(), reshard_after_forward=changed, root=changed), accumulate, micro_batches=4
    )


@regression
def lora_embedding_becomes_trainable(changed):
    # What `modules_to_save` does, or a call that makes inputs require gradients.
    model = adapted()
    model.embed.requires_grad_(changed)
    return of(units(model, "embed"))


@innocent(is_reversible=True)
def lora_merged(changed):
    return of(units(Decoder(2) if changed else adapted()), evaluate)


# Reinforcement learning: other models in the same step, and generation.


@innocent(is_reversible=True)
def reinforcement_with_a_reference_model(changed):
    model, reference = units(Decoder(2)), units(Decoder(2))

    def run():
        train(model)
        if changed:
            evaluate(reference)

    return model, run


@innocent(is_reversible=True)
def reinforcement_generates_before_the_step(changed):
    def run(model):
        for length in range(4, 8) if changed else ():
            evaluate(model, length=length)
        train(model)

    return of(units(Decoder(2)), run)


@regression
def reinforcement_copies_weights_for_each_mini_batch(changed):
    def run(model):
        for number in range(2):
            train(model)
            if changed or number == 1:
                for weight in model.parameters():
                    weight.full_tensor()

    return of(units(Decoder(2)), run)


@regression
def averaged_weights_gathered_in_each_step(changed):
    model = units(Decoder(2))
    average = [torch.zeros(weight.shape) for weight in model.parameters()]

    def run():
        train(model)
        if changed:
            for mean, weight in zip(average, model.parameters(), strict=True):
                mean.lerp_(weight.detach().full_tensor(), 0.1)

    return model, run


# Parts of a sequence on each rank, with keys and values from all.


class Contextual(nn.Module):
    """Attention over parts of a sequence: keys and values come from all ranks, at once or not."""

    def __init__(self, group, *, at_once):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.group, self.at_once = group, at_once

    def _from_all(self, x):
        return collectives.all_gather_tensor_autograd(x, 1, self.group)

    def forward(self, x):
        key, value = self.key(x), self.value(x)
        if self.at_once:
            key, value = self._from_all(torch.cat([key, value], dim=-1)).chunk(2, dim=-1)
        else:
            key, value = self._from_all(key), self._from_all(value)
        return (self.query(x) @ key.transpose(-2, -1)).softmax(-1) @ value


def contextual(*, at_once=True, axes=None, layers=2):
    axes = axes or mesh(dp=2, cp=2)
    model = Decoder(layers)
    for layer in model.layers:
        layer.attention = Contextual(axes["cp"].get_group(), at_once=at_once)
    return units(model, axes=axes["dp", "cp"]._flatten("fsdp"))


@regression(is_reversible=True)
def context_gathers_keys_and_values_apart(changed):
    return of(contextual(at_once=not changed))


@innocent(is_reversible=True)
def context_sequence_doubled(changed):
    return of(contextual(), length=16 if changed else 8)


@innocent(worlds=(4, 8), is_reversible=True)
def context_over_twice_the_ranks(changed):
    return of(contextual(axes=mesh(dp=2, cp=4 if changed else 2)))
