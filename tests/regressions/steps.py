"""What the cases are made of: units, plans and steps."""

import torch
from regressions.table import mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

BATCH, LENGTH = 2, 8


def units(model, *names, axes=None, root=None, layers=True, **options):
    """Makes FSDP units of the named modules, each layer, and the root.

    Args:
        model: Has `layers`.
        names: Further units.
        axes: The mesh; None for one axis over all ranks.
        root: As the root's `reshard_after_forward`; None for torch's default.
        layers: Whether layers are units.
        options: As for `fully_shard`, for all but the root's `reshard_after_forward`.
    """
    axes = mesh() if axes is None else axes
    for name in names:
        fully_shard(model.get_submodule(name), mesh=axes, **options)
    if layers:
        for layer in model.layers:
            fully_shard(layer, mesh=axes, **options)
    rest = {key: given for key, given in options.items() if key != "reshard_after_forward"}
    policy = {} if root is None else {"reshard_after_forward": root}
    return fully_shard(model, mesh=axes, **rest, **policy)


def tokens(batch=BATCH, length=LENGTH):
    return torch.zeros(batch, length, dtype=torch.int64)


def train(model, *, batch=BATCH, length=LENGTH, **options):
    """One forward and backward of a language model."""
    given = tokens(batch, length)
    logits = model(given, **options)
    cross_entropy(logits.flatten(0, 1).float(), given.flatten()).backward()


def evaluate(model, **options):
    with torch.no_grad():
        model(tokens(**options))


def accumulate(model, micro_batches, *, reduce_each=False, reduce_first=False, **options):
    """Micro-batches of one step; gradients are reduced after one of them, or after each."""
    chosen = 0 if reduce_first else micro_batches - 1
    for number in range(micro_batches):
        model.set_requires_gradient_sync(reduce_each or number == chosen)
        train(model, **options)


def of(model, step=train, **options):
    """A model and its step."""
    return model, lambda: step(model, **options)
