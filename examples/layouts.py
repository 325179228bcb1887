"""Train published models at their real size, without importing pytest-fsdp-comm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig

SEQUENCE = 4096


def _llama(width: int, hidden: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        use_cache=False,
    )


# As published with the weights.
LLAMA_3_8B = _llama(4096, 14336, 32, 32)
LLAMA_3_70B = _llama(8192, 28672, 80, 64)
LLAMA_3_405B = _llama(16384, 53248, 126, 128)
MIXTRAL_8X22B = MixtralConfig(
    vocab_size=32768,
    hidden_size=6144,
    intermediate_size=16384,
    num_hidden_layers=56,
    num_attention_heads=48,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=None,
    use_cache=False,
)

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
LAYER_PLAN = {
    **{f"self_attn.{name}_proj": COLUMNS for name in "qkv"},
    "self_attn.o_proj": ROWS,
    "mlp.gate_proj": COLUMNS,
    "mlp.up_proj": COLUMNS,
    "mlp.down_proj": ROWS,
}
ROOT_PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def build(config: PretrainedConfig, mesh: DeviceMesh) -> nn.Module:
    """Build a model and shard it over a mesh; an axis named ``tp`` is for tensor parallelism."""
    model = AutoModelForCausalLM.from_config(config)
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], ROOT_PLAN)
    data: Any = mesh["dp"] if "tp" in names else mesh
    for layer in model.model.layers:
        if "tp" in names:
            parallelize_module(layer, mesh["tp"], LAYER_PLAN)
        fully_shard(layer, mesh=data, mp_policy=POLICY, shard_placement_fn=_placement)
    fully_shard(model, mesh=data, mp_policy=POLICY)
    return model


def _placement(parameter: nn.Parameter) -> Shard | None:
    # The first dimension of expert weights is the expert. There are fewer experts than ranks, so
    # FSDP would pad that dimension; shard the rows of each expert instead.
    return Shard(1) if parameter.dim() == 3 else None


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run forward, backward and the optimizer on one sequence."""
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
