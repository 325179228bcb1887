"""Compare a training step of a Llama, and its sharding, with snapshots."""

from __future__ import annotations

import pytest
import torch
from llama_training import build_model, shard, train_step


@pytest.mark.distributed
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_train_step(tied, device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    model = shard(build_model(tie_word_embeddings=tied), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters())

    with comm_mode(model):
        loss = train_step(model, optimizer)

    assert torch.isfinite(loss)
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot
