"""Changes of a step with experts, which tokens reach by all-to-all, below FSDP2."""

import torch
import torch.distributed as dist
from regressions.steps import evaluate, of, tokens, train
from regressions.table import TABLE, mesh
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

regression, innocent = TABLE.regression, TABLE.innocent

EXPERTS = 4


class Experts(nn.Module):
    """The experts of this rank: two matrices each."""

    def __init__(self, number, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.randn(number, width, hidden) / 8)
        self.down = nn.Parameter(torch.randn(number, hidden, width) / 8)

    def forward(self, x):
        return torch.relu(x @ self.up) @ self.down


class Mixture(nn.Module):
    """As many tokens for each expert, so that the sizes sent depend on no value.

    Args:
        axes: The mesh of the ranks that share the experts; None if each has them all.
        rounds: How often tokens travel there and back.
        counts_tokens: Whether ranks first tell each other how many tokens come.
        gathers: Whether all tokens go to all ranks, in place of each to its own.
    """

    def __init__(
        self, width, hidden, axes, *, rounds=1, counts_tokens=False, gathers=False, shared=False
    ):
        super().__init__()
        self.group = axes.get_group() if axes is not None else None
        ranks = axes.size() if axes is not None else 1
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS // ranks, width, hidden)
        if shared:
            self.shared = nn.Linear(width, width, bias=False)
        self.rounds, self.counts_tokens, self.gathers = rounds, counts_tokens, gathers

    def forward(self, x):
        y = x * self.router(x).softmax(-1).max(-1, keepdim=True).values
        for _ in range(self.rounds):
            y = self._through_experts(y.flatten(0, 1)).view(x.shape)
        return y + self.shared(x) if hasattr(self, "shared") else y

    def _through_experts(self, y):
        if self.group is None:
            return self.experts(y.view(EXPERTS, -1, y.shape[-1]))
        if self.counts_tokens:
            counts = torch.full((EXPERTS,), len(y) // EXPERTS)
            dist.all_to_all_single(torch.empty_like(counts), counts, group=self.group)
        if self.gathers:
            everything = collectives.all_gather_tensor_autograd(y, 0, self.group)
            local = len(self.experts.up)
            done = self.experts(everything.view(local, -1, y.shape[-1])).flatten(0, 1)
            return collectives.reduce_scatter_tensor_autograd(done, "sum", 0, self.group)
        local = len(self.experts.up)
        y = self._exchange(y).view(local, -1, y.shape[-1])
        return self._exchange(self.experts(y).flatten(0, 1))

    def _exchange(self, y):
        return collectives.all_to_all_single_autograd(y, None, None, self.group)


class Layer(nn.Module):
    """A matrix, then experts or one more."""

    def __init__(self, width, hidden, axes, *, is_dense=False, **options):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.moe = (
            nn.Linear(width, width, bias=False)
            if is_dense
            else Mixture(width, hidden, axes, **options)
        )

    def forward(self, x):
        return x + self.moe(self.mix(self.norm(x)))


class Sparse(nn.Module):
    """A language model whose layers have experts, every one or every second."""

    def __init__(
        self, axes, layers=2, *, width=16, hidden=32, every=1, recomputes=False, **options
    ):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(
            Layer(width, hidden, axes, is_dense=n % every > 0, **options) for n in range(layers)
        )
        self.head = nn.Linear(width, 32, bias=False)
        self.recomputes = recomputes

    def forward(self, given):
        x = self.embed(given)
        for layer in self.layers:
            if self.recomputes and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.head(x)


def sparse(layers=2, *, axes=None, experts=True, splits=True, shards=None, **options):
    """Layers are units over all ranks, experts over those that have the same ones.

    Args:
        layers: How many.
        axes: The mesh; None for 2 by 2 ranks.
        experts: Whether experts are units of their own.
        splits: Whether ranks share the experts.
        shards: As for `fully_shard`.
        options: As for `Sparse`.
    """
    axes = axes or mesh(dp=2, ep=2)
    model, shards = Sparse(axes["ep"] if splits else None, layers, **options), shards or {}
    for layer in model.layers:
        if experts and isinstance(layer.moe, Mixture):
            fully_shard(layer.moe.experts, mesh=axes["dp"], **shards)
        fully_shard(layer, mesh=axes["dp"], **shards)
    return fully_shard(model, mesh=axes["dp"])


@regression(is_reversible=True)
def experts_tokens_sent_twice(changed):
    return of(sparse(rounds=1 + changed))


@regression(is_reversible=True)
def experts_are_not_split(changed):
    return of(sparse(splits=not changed))


@regression(is_reversible=True)
def experts_get_all_tokens_from_all_ranks(changed):
    return of(sparse(gathers=changed))


@regression(is_reversible=True)
def experts_are_no_units_any_more(changed):
    return of(sparse(experts=not changed))


@regression(is_reversible=True)
def experts_stay_gathered(changed):
    return of(sparse(shards={"reshard_after_forward": not changed}))


@regression
def experts_tokens_counted_first(changed):
    return of(sparse(counts_tokens=changed))


@regression
def experts_load_averaged_in_each_layer(changed):
    model = sparse()

    def average(_module, _args, output):
        if changed:
            dist.all_reduce(output.detach().sum((0, 1)))

    for layer in model.layers:
        layer.moe.router.register_forward_hook(average)
    return of(model)


@innocent(is_reversible=True)
def experts_recomputed(changed):
    return of(sparse(recomputes=changed))


@innocent(is_reversible=True)
def experts_two_layers_more(changed):
    return of(sparse(4 if changed else 2))


@innocent(is_reversible=True)
def experts_in_every_second_layer(changed):
    return of(sparse(4, every=2 if changed else 1))


@innocent(is_reversible=True)
def experts_layers_more_of_two_kinds(changed):
    return of(sparse(6 if changed else 4, every=2))


@innocent(is_reversible=True)
def experts_hidden_size_doubled(changed):
    return of(sparse(hidden=64 if changed else 32))


@innocent(is_reversible=True)
def experts_batch_doubled(changed):
    return of(sparse(), batch=4 if changed else 2)


@innocent(is_reversible=True)
def experts_batch_and_micro_batches_doubled(changed):
    def run(model):
        for _ in range(2 if changed else 1):
            train(model, batch=4 if changed else 2)

    return of(sparse(), run)


@innocent(is_reversible=True)
def experts_have_a_shared_one(changed):
    return of(sparse(shared=changed))


@innocent(is_reversible=True)
def experts_evaluation_before_the_step(changed):
    def run(model):
        if changed:
            evaluate(model)
        train(model)

    return of(sparse(), run)


@innocent(worlds=(8, 8), is_reversible=True)
def experts_split_over_twice_the_ranks(changed):
    return of(sparse(axes=mesh(dp=2, ep=4) if changed else mesh(dp=4, ep=2)))


@innocent(is_reversible=True)
def experts_accumulation_over_4_micro_batches(changed):
    model, number = sparse(), 4 if changed else 1

    def run():
        for n in range(number):
            model.set_requires_gradient_sync(n == number - 1)
            train(model)

    return model, run


@innocent(is_reversible=True)
def experts_frozen(changed):
    model = sparse()
    for layer in model.layers:
        layer.moe.experts.requires_grad_(not changed)
    return of(model)


@regression
def router_gathered_for_logging(changed):
    def run(model):
        train(model)
        if changed:
            for layer in model.layers:
                layer.moe.router.weight.full_tensor().norm()

    return of(sparse(), run)


@innocent(is_reversible=True)
def experts_forward_alone(changed):
    def run(model):
        if changed:
            with torch.no_grad():
                model(tokens())
        else:
            train(model)

    return of(sparse(), run)
