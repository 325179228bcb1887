"""Simulate published models on thousands of ranks; check snapshots and calculated sizes."""

from __future__ import annotations

import layouts
import pytest
import torch
from sums import BF16, FLOAT, padded


def attention(config, tp=1):
    width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    keys = config.num_key_value_heads * head // tp
    return [(width // tp, width), (keys, width), (keys, width), (width, width // tp)]


def feed_forward(config, tp=1):
    width, hidden = config.hidden_size, config.intermediate_size // tp
    return [(hidden, width), (hidden, width), (width, hidden)]


def layer_of(config, ranks, tp=1):
    norms = [(config.hidden_size,)] * 2
    return padded(ranks, *attention(config, tp), *feed_forward(config, tp), *norms)


def root_of(config, ranks, tp=1):
    table = (config.vocab_size // tp, config.hidden_size)
    return padded(ranks, table, table, (config.hidden_size,))


def record(config, mesh, comm_mode):
    model = layouts.build(config, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with comm_mode(model):
        layouts.train_step(model, optimizer)
    return model


def check_sizes(comm_mode, config, layer, root, axis="dp"):
    """Check that layers are gathered twice, the root once, and each unit reduced once."""
    layers = config.num_hidden_layers
    assert comm_mode.nbytes("all_gather", axis=axis) == (2 * layers * layer + root) * BF16
    assert comm_mode.nbytes("reduce_scatter", axis=axis) == (layers * layer + root) * FLOAT


@pytest.mark.distributed(world_size=8192, simulate=True)
def test_llama_8b(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    config = layouts.LLAMA_3_8B
    model = record(config, device_mesh(), comm_mode)
    check_sizes(comm_mode, config, layer_of(config, 8192), root_of(config, 8192))
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot


@pytest.mark.large
@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # torch warns about its own tensor parallelism
@pytest.mark.distributed(world_size=8192, simulate=True)
def test_llama_70b(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    config = layouts.LLAMA_3_70B
    model = record(config, device_mesh(dp=-1, tp=8), comm_mode)
    check_sizes(comm_mode, config, layer_of(config, 1024, tp=8), root_of(config, 1024, tp=8))
    # The outputs of attention and feed-forward in each layer, and of the embedding.
    sent = (2 * config.num_hidden_layers + 1) * layouts.SEQUENCE * config.hidden_size
    assert comm_mode.nbytes("all_reduce", axis="tp", phase="forward") == sent * BF16
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot


@pytest.mark.large
@pytest.mark.distributed(world_size=16384, simulate=True)
def test_llama_405b(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    config = layouts.LLAMA_3_405B
    model = record(config, device_mesh(), comm_mode)
    check_sizes(comm_mode, config, layer_of(config, 16384), root_of(config, 16384))
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot


@pytest.mark.large
@pytest.mark.distributed(world_size=8192, simulate=True, simulation_splits="even")
def test_mixtral_8x22b(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    config = layouts.MIXTRAL_8X22B
    model = record(config, device_mesh(replicate=128, shard=64), comm_mode)
    width, experts = config.hidden_size, config.num_local_experts
    layer = padded(64, *attention(config), (experts, width), (width,), (width,))
    layer += experts * 3 * width * config.intermediate_size  # rows divide by 64: no padding
    root = root_of(config, 64)
    check_sizes(comm_mode, config, layer, root, axis="shard")
    reduced = (config.num_hidden_layers * layer + root) // 64
    assert comm_mode.nbytes("all_reduce", axis="replicate") == reduced * FLOAT
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot
