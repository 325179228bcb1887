"""The model of the recording tests, whose sizes are easy to count by hand."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH = 8
FLOAT = 4
LINEAR_NBYTES = WIDTH * WIDTH * FLOAT
BLOCK_NBYTES = 2 * LINEAR_NBYTES
ROOT_NBYTES = 2 * LINEAR_NBYTES  # embed and head
ACTIVATION_NBYTES = 2 * WIDTH * FLOAT  # of `step`


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model, mesh, **options):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def step(model):
    model(torch.randn(2, WIDTH)).sum().backward()
