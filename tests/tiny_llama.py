"""A small Llama of transformers that needs no download, and the bytes of its parts."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, HIDDEN, VOCABULARY, LAYERS = 64, 128, 128, 2
BATCH, LENGTH = 2, 8
FLOAT = 4

EMBEDDING = VOCABULARY * WIDTH * FLOAT
NORM = WIDTH * FLOAT
MATRICES = (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN) * FLOAT
LAYER = MATRICES + 2 * NORM
ACTIVATION = BATCH * LENGTH * WIDTH * FLOAT
LOGITS = BATCH * LENGTH * VOCABULARY * FLOAT
# Norms and matrices of the layers, the last norm, embedding and head.
PARAMETERS = LAYERS * (2 + 7) + 3


def config():
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        use_cache=False,
    )


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(config())


def loss(model):
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return model(input_ids=tokens, labels=tokens).loss


def units(*, tensor_parallel=1):
    """Return the bytes of the units of accelerate and transformers; norm and head share one."""
    return {
        "model.embed_tokens": EMBEDDING // tensor_parallel,
        "model.layers.0": MATRICES // tensor_parallel + 2 * NORM,
        "model.layers.1": MATRICES // tensor_parallel + 2 * NORM,
        "lm_head+model.norm": EMBEDDING // tensor_parallel + NORM,
    }
