"""Models sharded by plans of transformers: tensor and expert parallelism, FSDP2, and all three."""

import pytest
import tiny_llama
import torch
from derived import fsdp_lines
from frameworks.changes import comm_failure, observed, tree_failure
from oracle import owned_lines, witnessed_twice
from tiny_llama import (
    ACTIVATION,
    BATCH,
    EMBEDDING,
    FLOAT,
    HIDDEN,
    LAYERS,
    LENGTH,
    LOGITS,
    NORM,
    VOCABULARY,
    WIDTH,
)
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytest.importorskip("accelerate", reason="transformers needs it to load a sharded model")
distributed = pytest.importorskip("transformers.distributed", reason="needs transformers 5")

pytestmark = [
    pytest.mark.distributed(world_size=4),
    # torch warns about calls that transformers makes.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


def sharded(*, kind=LlamaForCausalLM, config=None, seed=0, **sizes):
    config = config or tiny_llama.config()
    torch.manual_seed(seed)
    return kind.from_pretrained(
        None,
        config=config,
        state_dict=kind(config).state_dict(),
        distributed_config=distributed.DistributedConfig(**sizes),
    )


def tensor_parallel_lines():
    """Column-wise layers reduce input gradients in backward, row-wise ones outputs in forward."""
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


def test_automatic_tensor_parallel_plan(comm_mode, fsdp_tree):
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


EXPERTS, CHOSEN, EXPERT_HIDDEN = 8, 2, 32
HEADS, HEAD = 4, 16
EXPERTS_NBYTES = EXPERTS * 3 * WIDTH * EXPERT_HIDDEN * FLOAT
ROUTER = EXPERTS * WIDTH * FLOAT
LONG = 8
# Each token goes to two experts.
DISPATCHED = CHOSEN * ACTIVATION
WEIGHTS = BATCH * LENGTH * CHOSEN * FLOAT
MOE_LAYERS = [f"model.layers.{layer}" for layer in range(LAYERS)]


def mixture(**sizes):
    """Build a Qwen3 model with even routing, so that no size depends on random weights."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        moe_intermediate_size=EXPERT_HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        use_cache=False,
    )
    model = sharded(kind=Qwen3MoeForCausalLM, config=config, **sizes)

    def evenly(router, _inputs, result):
        logits, scores, chosen = result
        return logits, scores, torch.arange(chosen.numel()).view_as(chosen) % router.num_experts

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(evenly)
    return model


def mixture_units(*, tensor_parallel=1):
    attention = 4 * WIDTH * HEADS * HEAD * FLOAT // tensor_parallel
    layer = attention + 2 * HEAD * FLOAT + 2 * NORM + ROUTER
    return {
        "model.embed_tokens": EMBEDDING // tensor_parallel,
        **dict.fromkeys(MOE_LAYERS, layer),
        "lm_head+model.norm": EMBEDDING // tensor_parallel + NORM,
    }


def dispatch_lines(axis, *, tensor_parallel=1):
    """Return the exchanges of token counts, of tokens, and of the experts' outputs."""
    tokens = DISPATCHED // tensor_parallel
    return [
        line
        for layer in MOE_LAYERS
        for line in [
            f"forward {layer}.mlp.experts all_to_all[{axis}] {EXPERTS * LONG}",
            *[f"forward {layer}.mlp.experts all_to_all[{axis}] {tokens}"] * 2,
            *[f"backward {layer}.mlp.experts all_to_all[{axis}] {tokens}"] * 2,
        ]
    ]


def mixture_lines(*, tensor_parallel=1, ep):
    units = mixture_units(tensor_parallel=tensor_parallel)
    lines = fsdp_lines(units, axis="fsdp", kept="lm_head+model.norm")
    if ep == 2:
        experts = {f"{layer}.mlp.experts": EXPERTS_NBYTES // ep for layer in MOE_LAYERS}
        lines += fsdp_lines(experts, axis="efsdp", kept="")
    # torch has one group of all ranks, so with ep=4 both axes have the same name.
    return lines + dispatch_lines("ep" if ep == 2 else "fsdp", tensor_parallel=tensor_parallel)


@pytest.mark.parametrize("ep", [2, 4])
def test_experts_use_two_axes(comm_mode, fsdp_tree, ep):
    """Expert parameters are gathered over `efsdp`; tokens are sent over `ep`."""
    model = mixture(fsdp_size=4, ep_size=ep)
    witnessed_twice(comm_mode, model, lambda: tiny_llama.loss(model).backward())
    assert owned_lines(comm_mode) == sorted(mixture_lines(ep=ep))
    tree = fsdp_tree(model)
    experts = {f"{layer}.mlp.experts" for layer in MOE_LAYERS}
    names = {tree.unit_name(index) for index in range(len(tree.units))}
    assert names == {"", *mixture_units(), *experts}
    # transformers loads these shards as views of larger tensors.
    assert [finding.code for finding in tree.findings] == ["oversized-storage"]


def test_experts_with_tp_send_slices(comm_mode):
    """Each rank of a `tp` group sends a slice of the tokens."""
    model = mixture(fsdp_size=2, tp_size=2, ep_size=2)
    witnessed_twice(comm_mode, model, lambda: tiny_llama.loss(model).backward())
    expected = [
        f"forward model.embed_tokens all_reduce[tp] {ACTIVATION}",
        f"forward lm_head all_gather[tp] {LOGITS}",
        f"backward lm_head all_reduce[tp] {ACTIVATION}",
    ]
    for layer in MOE_LAYERS:
        attention = f"{layer}.self_attn"
        expected += [
            f"forward {attention}.o_proj all_reduce[tp] {ACTIVATION}",
            *(f"backward {attention}.{name}_proj all_reduce[tp] {ACTIVATION}" for name in "qkv"),
            # Each rank normalizes only its heads.
            *(f"backward {attention}.{name}_norm all_reduce[tp] {HEAD * FLOAT}" for name in "qk"),
            f"forward {layer}.mlp.experts all_gather[tp] {ACTIVATION}",
            f"backward {layer}.mlp.experts all_gather[tp] {ACTIVATION}",
            f"backward {layer}.mlp.experts all_gather[tp] {WEIGHTS}",
        ]
    assert owned_lines(comm_mode) == sorted(expected + mixture_lines(tensor_parallel=2, ep=2))


@pytest.mark.filterwarnings("ignore:.enable_expert_parallel:FutureWarning")
@pytest.mark.parametrize("sizes", [{"enable_expert_parallel": True}, {"ep_size": 4, "tp_plan": {}}])
def test_experts_alone_are_refused_over_tp(sizes):
    # The first is deprecated and translated to the second.
    with pytest.raises(ValueError, match="has no `tp_plan`"):
        mixture(tp_size=4, **sizes)


def seen(comm_mode, model):
    return observed(comm_mode, model, lambda: tiny_llama.loss(model).backward())


def test_change_of_the_plan_is_reported(comm_mode):
    sizes = {"tp_plan": "auto", "tp_size": 4}
    reviewed = seen(comm_mode, sharded(**sizes))
    assert not comm_failure(reviewed, seen(comm_mode, sharded(**sizes, seed=7)))
    config = tiny_llama.config()
    plan = config.base_model_tp_plan
    config.base_model_tp_plan = {name: plan[name] for name in plan if ".mlp." not in name}
    dropped = seen(comm_mode, sharded(**sizes, config=config))
    assert comm_failure(reviewed, dropped) == [
        "model.layers.{0..1}.mlp.gate_proj, model.layers.{0..1}.mlp.up_proj in backward: no "
        "longer redistributed (Partial(sum)) -> (Replicate())",
        "model.layers.{0..1}.mlp.down_proj in forward: no longer redistributed (Partial(sum)) "
        "-> (Replicate())",
        "likely: the parallelize_module plan gives the module other layouts, or none, as the tree "
        "shows",
    ]
    assert tree_failure(reviewed, dropped) == [
        "model.layers.{0..1}.mlp.down_proj.weight: Shard(1) over tp -> a plain tensor",
        "model.layers.{0..1}.mlp.gate_proj.weight, model.layers.{0..1}.mlp.up_proj.weight: "
        "Shard(0) over tp -> a plain tensor",
    ]
