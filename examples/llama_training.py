"""Train a Hugging Face Llama with FSDP2, without importing pytest-fsdp-comm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LOSS_CHUNKS = 4


def build_model(*, tie_word_embeddings: bool) -> LlamaForCausalLM:
    """Build a small Llama with random weights, which needs no download."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie_word_embeddings,
        use_cache=False,
    )
    return ChunkedLossLlama(config)


class ChunkedLossLlama(LlamaForCausalLM):
    """Compute the loss in chunks of the sequence, so that the full logits never exist."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        chunks = zip(
            hidden.chunk(LOSS_CHUNKS, dim=1), labels.chunk(LOSS_CHUNKS, dim=1), strict=True
        )
        losses = [
            functional.cross_entropy(self.lm_head(part).flatten(0, 1), target.flatten())
            for part, target in chunks
        ]
        return torch.stack(losses).mean()


def shard(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """Shard each decoder block, then the root with the remaining parameters."""
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Run forward, backward and the optimizer on a random batch, and return the loss."""
    tokens = torch.randint(model.config.vocab_size, (2, 16))
    loss = model(tokens, labels=tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
