"""What transformers shards by its own plans: tensor parallelism, FSDP2, both."""

import pytest
import tiny_llama
from derived import fsdp_lines
from oracle import owned_lines, witnessed_twice
from tiny_llama import ACTIVATION, LAYERS, LOGITS
from transformers import LlamaForCausalLM

pytest.importorskip("accelerate", reason="transformers needs it to load a sharded model")
distributed = pytest.importorskip("transformers.distributed", reason="needs transformers 5")

pytestmark = [
    pytest.mark.distributed(world_size=4),
    # Of torch, about what transformers does.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


def sharded(**sizes):
    return LlamaForCausalLM.from_pretrained(
        None,
        config=tiny_llama.config(),
        state_dict=tiny_llama.build().state_dict(),
        distributed_config=distributed.DistributedConfig(**sizes),
    )


def tensor_parallel_lines():
    """Column-wise layers reduce what goes into them in backward, row-wise ones what comes out."""
    layers = [f"model.layers.{layer}" for layer in range(LAYERS)]
    column_wise = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    column_wise += ("mlp.gate_proj", "mlp.up_proj")
    row_wise = ("self_attn.o_proj", "mlp.down_proj")
    return [
        f"forward model.embed_tokens all_reduce[tp] {ACTIVATION}",
        *(
            f"forward {layer}.{name} all_reduce[tp] {ACTIVATION}"
            for layer in layers
            for name in row_wise
        ),
        f"forward lm_head all_gather[tp] {LOGITS}",
        f"backward lm_head all_reduce[tp] {ACTIVATION}",
        *(
            f"backward {layer}.{name} all_reduce[tp] {ACTIVATION}"
            for layer in layers
            for name in column_wise
        ),
    ]


def test_the_automatic_tensor_parallel_plan(comm_mode, fsdp_tree):
    model = sharded(tp_plan="auto", tp_size=4)
    witnessed_twice(comm_mode, model, lambda: tiny_llama.loss(model).backward())
    assert owned_lines(comm_mode) == sorted(tensor_parallel_lines())
    tree = fsdp_tree(model)
    assert tree.is_sharded
    assert not tree.units


def test_fsdp_with_replicas(comm_mode, fsdp_tree):
    model = sharded(fsdp_size=2, dp_replicate_size=2)
    witnessed_twice(comm_mode, model, lambda: tiny_llama.loss(model).backward())
    units = tiny_llama.units()
    assert owned_lines(comm_mode) == sorted(
        fsdp_lines(units, axis="fsdp", kept="lm_head+model.norm", replicate=("dp_replicate", 2))
    )
    tree = fsdp_tree(model)
    assert {tree.unit_name(index) for index in range(len(tree.units))} == {"", *units}
    assert not tree.findings


def test_fsdp_with_tensor_parallelism(comm_mode):
    model = sharded(tp_plan="auto", tp_size=2, fsdp_size=2)
    witnessed_twice(comm_mode, model, lambda: tiny_llama.loss(model).backward())
    units = tiny_llama.units(tensor_parallel=2)
    expected = fsdp_lines(units, axis="fsdp", kept="lm_head+model.norm") + tensor_parallel_lines()
    assert owned_lines(comm_mode) == sorted(expected)
