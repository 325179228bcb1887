"""Small models for all tests, with sizes that are easy to compute by hand."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH = 8
FLOAT = 4
LINEAR_NBYTES = WIDTH * WIDTH * FLOAT
BLOCK_NBYTES = 2 * LINEAR_NBYTES
ROOT_NBYTES = 2 * LINEAR_NBYTES  # embed and head
ACTIVATION_NBYTES = 2 * WIDTH * FLOAT  # of `step`
VOCABULARY = 16


class Block(nn.Module):
    """Two linears with a residual connection."""

    def __init__(self, width=WIDTH, hidden=None, *, bias=False, norm=False):
        super().__init__()
        if norm:
            self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden or width, bias=bias)
        self.down = nn.Linear(hidden or width, width, bias=bias)

    def forward(self, x):
        normed = self.norm(x) if hasattr(self, "norm") else x
        return x + self.down(torch.relu(self.up(normed)))


class Model(nn.Module):
    """Linears without bias: embed, blocks, head.

    Args:
        blocks: Number of blocks.
        reentrant: How to checkpoint each block; None for no checkpointing.
    """

    def __init__(self, blocks=2, *, reentrant=None):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.reentrant = reentrant

    def forward(self, x, *, chunks=1):
        x = self.embed(x)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return (
            torch.cat([self.head(part) for part in x.chunk(chunks)]) if chunks > 1 else self.head(x)
        )


class TokenModel(nn.Module):
    """Embedding, blocks and head, which may be tied to the embedding."""

    def __init__(self, layers=2, width=WIDTH, *, tied=False, norm=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            Block(width, 2 * width, bias=True, norm=norm) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class UnevenModel(nn.Module):
    """A model with sizes that 4 ranks cannot share evenly, and two heads with a tied weight."""

    def __init__(self, hidden=7):
        super().__init__()
        self.embed = nn.Linear(5, 5)
        self.layers = nn.Sequential(Block(5, hidden, bias=True), Block(5, hidden, bias=True))
        self.head = nn.Linear(5, 3)
        self.head_twin = nn.Linear(5, 3)
        self.head_twin.weight = self.head.weight

    def forward(self, x):
        return self.head(self.layers(self.embed(x))) + self.head_twin(x)


def shard(model, mesh, *, root=None, **options):
    """Make a unit of each layer and of the root; `root` is the root's `reshard_after_forward`."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    # torch 2.7 does not accept None.
    policy = {} if root is None else {"reshard_after_forward": root}
    return fully_shard(model, mesh=mesh, **policy)


def step(model, *, batch=2, grad_input=False, **options):
    model(torch.randn(batch, WIDTH, requires_grad=grad_input), **options).sum().backward()


class Attention(nn.Module):
    """Attention with heads of size 4; their number follows from the local projections."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x):
        query, key, value = (
            project(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it."""

    def __init__(self, width, hidden):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width), FeedForward(width, hidden)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A small Llama.

    `reentrant` says how to checkpoint each layer; None for no checkpointing. `chunks` is the number
    of parts in which the head runs.
    """

    def __init__(self, layers=3, width=16, *, hidden=32, vocabulary=32, tied=False, reentrant=None):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def forward(self, tokens, *, chunks=1):
        x = self.embed(tokens)
        for layer in self.layers:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        x = self.norm(x)
        if chunks == 1:
            return self.head(x)
        return torch.cat([self.head(part) for part in x.chunk(chunks, dim=1)], dim=1)
