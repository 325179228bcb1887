"""Changes whose rows resemble those of another cause: `look_alikes.json` says which.

Each change is one line of `CHANGES`: a function of whether it was made.
"""

from functools import partial

import torch
import torch.distributed as dist
from models import Decoder
from regressions.lost import adapt
from regressions.moe import EXPERTS, Mixture, Sparse, sparse
from regressions.pipelines import pipeline
from regressions.steps import accumulate, evaluate, of, tokens, train, units
from regressions.table import Case, mesh
from regressions.tensor_parallel import sharded, split, step, tensor_parallel
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as checkpointed


class Ordered(Decoder):
    """Runs its layers in an order of their numbers, and recomputes some of them."""

    def __init__(self, order=(0, 1, 2, 3), *, recomputed=()):
        super().__init__(max(order) + 1)
        self.order, self.recomputed = order, recomputed

    def forward(self, given):
        x = self.embed(given)
        for at in self.order:
            layer = self.layers[at]
            is_again = at in self.recomputed
            x = checkpointed(layer, x, use_reentrant=False) if is_again else layer(x)
        x = self.norm(x)
        return self.head(x) if hasattr(self, "head") else x


class Towers(nn.Module):
    """An encoder that may run several times, and a decoder behind it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = units(Decoder(2)), units(Decoder(2))

    def forward(self, given, *, times=1, detached=0):
        x = sum(self.encoder(given) for _ in range(times))
        with torch.no_grad():
            for _ in range(detached):
                self.encoder(given)
        return self.decoder(x.argmax(-1)) + x


def towers():
    return fully_shard(Towers(), mesh=mesh())


class Whole(nn.Module):
    """Its root has no parameters of its own."""

    def __init__(self):
        super().__init__()
        self.body = Decoder()

    def forward(self, given):
        return self.body(given)


def whole(*, root=True, **options):
    model = Whole()
    for part in parts(model.body):
        fully_shard(part, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh()) if root else model


def parts(model):
    return model.embed, *model.layers, model.norm, model.head


def explicit(model=None, *, root, free=None):
    """Layers may be told what to do after forward, as torchtitan tells them."""
    model, policy = model or Decoder(), {} if free is None else {"reshard_after_forward": free}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh(), **policy)
    return fully_shard(model, mesh=mesh(), **policy) if root else model


def headless(*, has_head):
    """With its head in the root's unit; without it, nothing is gathered ahead in backward."""
    model = Ordered()
    if not has_head:
        del model.head
    units(model, "embed", "norm")
    return model if has_head else listed(model, backward=lambda n: [n])


def listed(model, *, forward=None, backward=None):
    """Lists of what each layer prefetches, as functions of its number."""
    layers = [*model.layers]
    for number, layer in enumerate(layers):
        for way, choose in (("forward", forward), ("backward", backward)):
            if choose is not None:
                chosen = [layers[at] for at in choose(number) if 0 <= at < len(layers)]
                getattr(layer, f"set_modules_to_{way}_prefetch")(chosen)
    return model


def resharding(model, *, after_backward, **options):
    model.set_reshard_after_backward(after_backward, **options)
    return model


class Routed(Mixture):
    """Experts take a part of their tokens; the rest is dropped."""

    part = 1

    def _through_experts(self, y):
        taken = y.view(EXPERTS, -1, y.shape[-1]).chunk(self.part, 1)[0]
        done = super()._through_experts(taken.flatten(0, 1)).view_as(taken)
        return done.repeat(1, self.part, 1).flatten(0, 1)


class Halved(Routed):
    part = 2


class Cast(Mixture):
    """Tokens travel in bfloat16."""

    def _exchange(self, y):
        return super()._exchange(y.bfloat16()).float()


def routed(kind):
    """A sparse model whose layers have experts of that kind."""
    axes = mesh(dp=2, ep=2)
    model = Sparse(axes["ep"])
    for layer in model.layers:
        layer.moe.__class__ = kind
        fully_shard(layer.moe.experts, mesh=axes["dp"])
        fully_shard(layer, mesh=axes["dp"])
    return fully_shard(model, mesh=axes["dp"])


def exchanges_saved(_context, operation, *_args, **_options):
    is_saved = any(name in str(operation) for name in ("all_to_all_single", "wait_tensor"))
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(*, saves):
    """Layers are recomputed, all but what experts exchange."""
    model = sparse()
    contexts = partial(create_selective_checkpoint_contexts, exchanges_saved)
    options = {"context_fn": contexts} if saves else {}

    def forward(given):
        x = model.embed(given)
        for layer in model.layers:
            x = checkpointed(layer, x, use_reentrant=False, **options)
        return model.head(x)

    model.forward = forward
    return model


def detaching(model, *, detaches):
    """Attention gives outputs that need no gradients."""
    for layer in model.layers:
        layer.attention.register_forward_hook(
            lambda *given: given[2].detach() if detaches else given[2]
        )
    return model


def logged(model, *, logs):
    """Prints its logits, of which each rank has a part."""
    model.head.register_forward_hook(lambda *given: given[2].full_tensor() if logs else None)
    return model


# Steps.


def inputs(model, *, number):
    """One loss of several inputs."""
    sum(model(tokens()).mean() for _ in range(number)).backward()


def split_inputs(model, *, number):
    with loss_parallel():
        logits = [model(tokens()).flatten(0, 1) for _ in range(number)]
        sum(cross_entropy(one, tokens().flatten()) for one in logits).backward()


def evaluations(model, *, number):
    for _ in range(number):
        evaluate(model)


def then_again(model, module, *, times, micro_batches=1):
    """A module runs again after the step, without a backward."""
    accumulate(model, micro_batches)
    given = torch.ones(1, 1, 16) if module == "head" else tokens()
    with torch.no_grad():
        for _ in range(times):
            model.get_submodule(module)(given)


def of_encoder(model, *, steps):
    """The encoder alone takes further steps."""
    train(model)
    for _ in range(steps):
        model.encoder(tokens()).mean().backward()


def steps_of_micro_batches(model, *, steps, micro_batches, **options):
    for _ in range(steps):
        accumulate(model, micro_batches, **options)


def backwards(model, *, number):
    """Several backwards of one forward."""
    loss = model(tokens()).mean()
    for left in reversed(range(number)):
        loss.backward(retain_graph=left > 0)


def reducing(model, *, last):
    """4 micro-batches, of which the last ones reduce gradients."""
    for number in range(4):
        model.set_requires_gradient_sync(number >= 4 - last)
        train(model)


def chunked_loss(model, *, chunks):
    """The head runs forward and backward for each chunk, unsharded once around all."""
    x = model.embed(tokens())
    for layer in model.layers:
        x = layer(x)
    hidden = model.norm(x).detach().requires_grad_()
    model.head.unshard()
    model.head.set_reshard_after_forward(False)
    model.head.set_reshard_after_backward(False)
    for part in hidden.chunk(chunks, dim=1):
        model.head(part).mean().backward()
    model.head.reshard()
    x.backward(hidden.grad)


def below_root(model, *, is_called):
    """Runs modules below the root in place of the root."""
    if is_called:
        train(model)
        return
    x = model.embed(tokens())
    for layer in model.layers:
        x = layer(x)
    model.head(x).mean().backward()


def evaluated(model, *, evaluates=True, reshards=True):
    train(model)
    if evaluates:
        evaluate(model)
    if reshards:
        model.reshard()


def freshly_evaluated(model, *, micro_batches=1, evaluates, **options):
    """Begins with nothing gathered, as the first step does."""
    reshard_all(model)
    for number in range(micro_batches):
        model.set_requires_gradient_sync(number == micro_batches - 1)
        mean(model)
    if evaluates:
        evaluate(model, **options)


def resharded_by_hand(model):
    train(model)
    reshard_all(model)


def reshard_all(model):
    for module in (model, *model.layers):
        module.reshard()


def unsharded(model, *, unshards):
    train(model)
    if unshards:
        model.unshard()
        model.reshard()


def mean(model):
    model(tokens()).mean().backward()


def autocast(model, *, enabled):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        logits = model(tokens())
    logits.float().mean().backward()


def after(run, *acts):
    """A step, and acts on its parameters before their gradients are dropped."""

    def stepped(model):
        run(model)
        with torch.no_grad():
            for act in acts:
                act([*model.parameters()])
        model.zero_grad()

    return stepped


def clip_all(parameters):
    nn.utils.clip_grad_norm_(parameters, 1.0).full_tensor()


def clip_what_there_is(model, *, synchronizes=True, detaches=False):
    model.set_requires_gradient_sync(synchronizes)
    logits = model(tokens())
    if detaches:
        logits = logits.detach().requires_grad_()
    logits.float().logsumexp(-1).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    _ = norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_each(parameters):
    for parameter in parameters:
        nn.utils.clip_grad_norm_([parameter], 1.0)


def reduce_each(parameters):
    for parameter in parameters:
        parameter.grad.norm().full_tensor()


def clip_groups(parameters):
    for at in range(0, len(parameters), 7):
        nn.utils.clip_grad_norm_(parameters[at : at + 7], 1.0)


def reduce_one(parameters):
    reduce_each(parameters[:1])


def log_weights(parameters):
    nn.utils.get_total_norm(parameters).full_tensor()


def log_scalars(_parameters):
    for _ in range(2):
        dist.all_reduce(torch.ones(1))


class Trusting(torch.optim.SGD):
    """Divides norms of weights by those of gradients, as LAMB does."""

    def step(self):
        for weight in self.param_groups[0]["params"]:
            (weight.norm() / weight.grad.norm()).full_tensor()


def trust(parameters):
    Trusting(parameters, lr=1e-3).step()


def acting(build, run, before, behind):
    """Steps that act otherwise on their parameters."""
    return lambda changed: of(build(), after(run, *(behind if changed else before)))


def half(reduced):
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)


def sharded_head(policy):
    model = Decoder()
    fully_shard(model.head, mesh=mesh(), mp_policy=policy)
    return model


def freshly_accumulated(model):
    reshard_all(model)
    accumulate(model, 2)


def steps_and_evaluation(model, *, steps):
    evaluate(model)
    for _ in range(steps):
        train(model)


CHANGES = {
    "head_reduces_in_bfloat16": lambda c: of(
        units(sharded_head(half(None if c else torch.float32)), mp_policy=half(torch.float32))
    ),
    "two_inputs_in_one_loss": lambda c: of(units(Decoder()), inputs, number=1 + c),
    "two_inputs_with_units_kept": lambda c: of(
        units(Decoder(), reshard_after_forward=False), inputs, number=1 + c
    ),
    "two_inputs_with_units_kept_after_forward": lambda c: of(
        units(Decoder(), reshard_after_forward=not c), inputs, number=2
    ),
    "two_inputs_with_a_root_that_is_freed": lambda c: of(
        units(Decoder(), root=True), inputs, number=1 + c
    ),
    "two_inputs_of_a_split_model": lambda c: of(split(), split_inputs, number=1 + c),
    "two_inputs_of_a_sharded_split_model": lambda c: of(sharded(), split_inputs, number=1 + c),
    "two_evaluations_instead_of_one": lambda c: of(
        units(Decoder(), root=True), evaluations, number=1 + c
    ),
    "gpipe_with_4_instead_of_2_micro_batches": lambda c: pipeline(
        "ScheduleGPipe", micro_batches=2 + 2 * c
    ),
    "gpipe_that_is_not_sharded": lambda c: pipeline(
        "ScheduleGPipe", micro_batches=2 + 2 * c, sharded=False
    ),
    "encoder_runs_again_after_the_step": lambda c: of(
        towers(), then_again, module="encoder", times=c
    ),
    "encoder_runs_again_within_forward": lambda c: of(towers(), detached=c),
    "encoder_runs_twice_in_one_loss": lambda c: of(towers(), times=1 + c),
    "encoder_runs_twice_for_each_micro_batch": lambda c: of(
        towers(), accumulate, micro_batches=2, times=1 + c
    ),
    "encoder_takes_two_steps": lambda c: of(towers(), of_encoder, steps=c),
    "two_steps_of_two_micro_batches": lambda c: of(
        units(Decoder()), steps_of_micro_batches, steps=1 + c, micro_batches=1 + c
    ),
    "layers_run_in_a_loop": lambda c: of(units(Ordered((0, 1, 2) * (1 + c)))),
    "embedding_runs_again_after_the_step": lambda c: of(
        units(Decoder(), "embed"), then_again, module="embed", times=c
    ),
    "head_runs_again_after_the_step": lambda c: of(
        units(Decoder(), "head"), then_again, module="head", times=c
    ),
    "head_runs_again_after_micro_batches": lambda c: of(
        units(Decoder(), "head"), then_again, module="head", times=2 * c, micro_batches=2
    ),
    "two_backwards_with_units_kept": lambda c: of(
        units(Decoder(), reshard_after_forward=False), backwards, number=1 + c
    ),
    "reduced_in_2_of_4_micro_batches": lambda c: of(units(Decoder()), reducing, last=1 + c),
    "head_reduced_for_each_chunk": lambda c: of(
        units(Decoder(), "embed", "norm", "head"), chunked_loss, chunks=1 + 3 * c
    ),
    "root_lost_where_layers_are_freed_explicitly": lambda c: of(explicit(root=not c, free=True)),
    "root_lost_where_layers_are_kept_explicitly": lambda c: of(explicit(root=not c, free=False)),
    "root_without_parameters_lost": lambda c: of(whole(root=not c)),
    "root_lost_and_two_layers_more": lambda c: of(
        explicit(Decoder(4), root=False) if c else units(Decoder(2))
    ),
    "model_in_bfloat16_runs_twice": lambda c: of(
        units(Decoder().to(torch.bfloat16) if c else Decoder()), inputs, number=1 + c
    ),
    "root_without_parameters_lost_explicitly": lambda c: of(
        whole(root=not c, reshard_after_forward=True)
    ),
    "root_is_not_called": lambda c: of(whole(), lambda model: train(model.body if c else model)),
    "root_with_parameters_is_not_called": lambda c: of(
        units(Decoder(), "embed", "head"), below_root, is_called=not c
    ),
    "root_parts_become_units_and_layers_are_kept": lambda c: of(
        units(Decoder(), *["embed", "norm", "head"] * c, reshard_after_forward=not c)
    ),
    "root_head_removed_and_prefetch_dropped": lambda c: of(headless(has_head=not c), mean),
    "root_not_resharded_after_the_evaluation": lambda c: of(
        units(Decoder()), evaluated, reshards=not c
    ),
    "evaluation_and_its_reshard_removed": lambda c: of(
        units(Decoder()), evaluated, evaluates=not c, reshards=not c
    ),
    "evaluation_of_one_unit_and_its_reshard_removed": lambda c: of(
        fully_shard(Decoder(), mesh=mesh()), evaluated, evaluates=not c, reshards=not c
    ),
    "root_not_resharded_after_backward": lambda c: of(
        resharding(units(Decoder()), after_backward=not c, recurse=False)
    ),
    "nothing_resharded_after_backward": lambda c: of(
        resharding(units(Decoder()), after_backward=not c)
    ),
    "units_kept_between_micro_batches": lambda c: of(
        resharding(units(Decoder(), reshard_after_forward=not c), after_backward=not c),
        freshly_accumulated,
    ),
    "two_steps_more_beside_an_evaluation": lambda c: of(
        units(Decoder(), root=True), steps_and_evaluation, steps=1 + 2 * c
    ),
    "units_resharded_by_hand_instead": lambda c: of(
        resharding(units(Decoder()), after_backward=not c), resharded_by_hand if c else train
    ),
    "evaluation_after_the_first_step": lambda c: of(
        units(Decoder()), freshly_evaluated, evaluates=c
    ),
    "evaluation_after_3_micro_batches": lambda c: of(
        units(Decoder(), root=True), freshly_evaluated, micro_batches=3, evaluates=c
    ),
    "evaluation_of_a_larger_batch": lambda c: of(
        sharded(), freshly_evaluated, evaluates=c, batch=4
    ),
    "evaluation_of_units_that_are_kept": lambda c: of(
        units(Decoder(), reshard_after_forward=False), freshly_evaluated, evaluates=c
    ),
    "attention_detached": lambda c: of(detaching(units(Decoder()), detaches=c)),
    "adapters_attached_late_beside_trained_weights": lambda c: of(
        (adapt if c else lambda model: model)(units(Decoder(2)))
    ),
    "evaluation_keeps_units": lambda c: of(units(Decoder(), reshard_after_forward=not c), evaluate),
    "weights_unsharded_by_hand_no_longer": lambda c: of(
        units(Decoder()), unsharded, unshards=not c
    ),
    "forward_prefetch_skips_a_layer": lambda c: of(
        listed(units(Decoder(4)), forward=lambda n: [n + 1 + c])
    ),
    "forward_prefetch_of_the_last_layer_by_all": lambda c: of(
        listed(units(Decoder(4)), forward=lambda n: [3 if c else n + 1])
    ),
    "forward_prefetch_of_all_that_follow": lambda c: of(
        listed(units(Decoder(4)), forward=lambda n: range(n + 1, 4 if c else n + 2))
    ),
    "forward_prefetch_names_the_layer_before": lambda c: of(
        listed(units(Decoder(4)), forward=lambda n: [n - 1 if c else n + 1])
    ),
    "backward_prefetch_skips_a_layer": lambda c: of(
        listed(units(Decoder(4)), backward=lambda n: [n - 1 - c])
    ),
    "backward_prefetch_names_the_layer_behind": lambda c: of(
        listed(units(Decoder(4)), backward=lambda n: [n + 1 if c else n - 1])
    ),
    "layers_run_in_another_order": lambda c: of(
        listed(units(Ordered((0, 2, 1, 3) if c else (0, 1, 2, 3))), forward=lambda n: [n + 1])
    ),
    "two_layers_more_with_lists": lambda c: of(
        listed(units(Decoder(6 if c else 4)), forward=lambda n: [n + 1])
    ),
    "capacity_of_experts_halved": lambda c: of(routed(Halved if c else Routed)),
    "tokens_cast_to_bfloat16_by_hand": lambda c: of(routed(Cast if c else Mixture)),
    "activations_under_autocast": lambda c: of(sparse(), autocast, enabled=bool(c)),
    "selective_checkpointing_saves_no_exchange": lambda c: of(selective(saves=not c)),
    "one_of_two_layers_is_recomputed_too": lambda c: of(
        tensor_parallel(Ordered((0, 1), recomputed=(0, 1) if c else (0,)), mesh(tp=4)), step
    ),
    "norm_of_weights_logged": acting(lambda: units(Decoder(2)), train, [], [log_weights]),
    "optimizer_trusts_norms": acting(lambda: units(Decoder(2)), train, [], [trust]),
    "optimizer_trusts_norms_beside_clipping": acting(
        lambda: units(Decoder(2)), train, [clip_all], [clip_all, trust]
    ),
    "nothing_to_clip_without_synchronization": lambda c: of(
        units(Decoder(2)), clip_what_there_is, synchronizes=not c
    ),
    "nothing_to_clip_behind_a_detached_loss": lambda c: of(
        units(Decoder(2)), clip_what_there_is, detaches=bool(c)
    ),
    "each_parameter_clipped_alone": acting(
        lambda: units(Decoder(2)), train, [clip_all], [clip_each]
    ),
    "each_parameter_of_a_split_model_clipped_alone": acting(sharded, step, [clip_all], [clip_each]),
    "each_norm_reduced_by_hand": acting(
        lambda: units(Decoder(2)), train, [clip_all], [reduce_each]
    ),
    "each_norm_logged_beside_clipping": acting(
        lambda: units(Decoder(2)), train, [clip_all], [clip_all, reduce_each]
    ),
    "clipping_replaced_by_two_logged_scalars": acting(
        lambda: units(Decoder(2)), train, [clip_all], [log_scalars]
    ),
    "each_group_clipped_alone": acting(lambda: units(Decoder(2)), train, [clip_all], [clip_groups]),
    "clipping_replaced_by_one_norm": acting(
        lambda: units(Decoder(2)), train, [clip_all], [reduce_one]
    ),
    "clipping_replaced_by_trusting_norms": acting(
        lambda: units(Decoder(2)), train, [clip_all], [trust]
    ),
    "logits_printed_in_full": lambda c: of(logged(split(), logs=bool(c)), step),
    "reduce_dtype_became_float32": lambda c: of(
        units(Decoder(), mp_policy=half(torch.float32 if c else torch.bfloat16))
    ),
}
CHANGES_OF_8_RANKS = {
    "mesh_of_4_by_2_turned_around": lambda c: of(
        sharded(axes=mesh(tp=2, dp=4) if c else mesh(dp=4, tp=2)), step
    ),
    "names_of_a_mesh_of_4_by_2_swapped": lambda c: of(
        sharded(axes=mesh(tp=4, dp=2) if c else mesh(dp=4, tp=2)), step
    ),
    "sizes_of_a_mesh_of_4_by_2_swapped": lambda c: of(
        sharded(axes=mesh(dp=2, tp=4) if c else mesh(dp=4, tp=2)), step
    ),
    "third_axis_becomes_the_inner_one": lambda c: of(
        sharded(axes=mesh(dp=2, tp=2, pp=2) if c else mesh(pp=2, dp=2, tp=2)), step
    ),
    "mesh_of_4_by_2_becomes_8_by_1": lambda c: of(
        sharded(axes=mesh(dp=8, tp=1) if c else mesh(dp=4, tp=2)), step
    ),
}

OWN = {
    name: Case(name=name, build=build, is_regression=False, worlds=(size, size))
    for size, changes in ((4, CHANGES), (8, CHANGES_OF_8_RANKS))
    for name, build in changes.items()
}
