"""Applying a finding's cure saves what the finding claims, and causes no other finding."""

import pytest
import torch
from models import WIDTH, Model
from oracle import witnessed
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.tree.finding import FindingSettings

CPU = torch.device("cpu")
ws2 = pytest.mark.distributed(world_size=2)


# Measured by the recorder and the flight recorder: a step before and after the cure.


def count_bytes(**thresholds):
    return FindingSettings(**{"small_nbytes": 0, **thresholds})


class Sent:
    """The collectives of a model's step."""

    def __init__(self, comm_mode, model):
        inputs = torch.ones(2, WIDTH)
        witnessed(comm_mode, model, lambda: model(inputs).sum().backward(), warm_up=1)
        self.nbytes = sum(event.nbytes for event in comm_mode.events)
        self.collectives = len(comm_mode.events)


def fsdp1(model, names):
    for name in names:
        wrapped = Fsdp1(model.get_submodule(name), device_id=CPU, use_orig_params=True)
        model.set_submodule(name, wrapped)
    return Fsdp1(model, device_id=CPU, use_orig_params=True)


def fsdp2(model, names):
    for name in names:
        fully_shard(model.get_submodule(name))
    return fully_shard(model)


def half_frozen():
    model = Model()
    for layer in model.layers:
        layer.up.requires_grad_(requires_grad=False)
    return model


LAYERS = ("layers.0", "layers.1")
UPS = tuple(f"{layer}.up" for layer in LAYERS)


@ws2
def test_separating_frozen_fsdp1_modules_saves_zeros(comm_mode):
    mixed, parted = fsdp1(half_frozen(), LAYERS), fsdp1(half_frozen(), (*UPS, *LAYERS))
    (finding,) = capture_tree(mixed, count_bytes()).findings
    assert (finding.code, finding.fqns, finding.count) == ("mixed-frozen", LAYERS, 2)
    assert not capture_tree(parted, count_bytes()).findings
    before, after = Sent(comm_mode, mixed), Sent(comm_mode, parted)
    assert before.nbytes - after.nbytes == finding.nbytes == 2 * 4 * WIDTH * WIDTH
    assert "separate units add 2 collectives to a step" in finding.reason
    assert after.collectives - before.collectives == 2 * finding.count


@ws2
def test_mixed_frozen_fsdp2_unit_is_no_finding(comm_mode):
    mixed, parted = fsdp2(half_frozen(), LAYERS), fsdp2(half_frozen(), (*UPS, *LAYERS))
    assert not capture_tree(mixed, count_bytes()).findings
    before, after = Sent(comm_mode, mixed), Sent(comm_mode, parted)
    assert before.nbytes == after.nbytes
    assert before.collectives < after.collectives


@ws2
def test_merging_a_small_unit_saves_collectives(comm_mode):
    def build(names):
        model = Model()
        model.layers[0].down = nn.Sequential(
            nn.Linear(WIDTH, 40 * WIDTH), nn.Linear(40 * WIDTH, WIDTH)
        )
        return fsdp2(model, names)

    apart, left = build(("layers.0.up", "layers.0")), build(("layers.0",))
    small = count_bytes(small_nbytes=1000)
    (finding,) = capture_tree(apart, small).findings
    assert (finding.code, finding.fqns) == ("unit-too-small", ("layers.0.up",))
    assert not capture_tree(left, small).findings
    before, after = Sent(comm_mode, apart), Sent(comm_mode, left)
    assert before.nbytes == after.nbytes
    assert "a step has 3 fewer collectives" in finding.reason
    assert before.collectives - after.collectives == 3


# LoRA on a Llama, with the sizes of 8 billion parameters and the thresholds as they are.


class Adapted(nn.Module):
    """A linear with two adapters, by the names of peft."""

    def __init__(self, inputs, outputs, **where):
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs, bias=False, **where)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 16, bias=False, **where)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, outputs, bias=False, **where)})
        self.base_layer.requires_grad_(requires_grad=False)

    def forward(self, x):
        raise NotImplementedError


class LlamaLayer(nn.Module):
    def __init__(self, width, hidden, **where):
        super().__init__()
        self.self_attn = nn.Module()
        for name in ("q_proj", "v_proj"):
            self.self_attn.add_module(name, Adapted(width, width, **where))
        for name in ("k_proj", "o_proj"):
            self.self_attn.add_module(name, nn.Linear(width, width, bias=False, **where))
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, hidden, bias=False, **where),
                "up_proj": nn.Linear(width, hidden, bias=False, **where),
                "down_proj": nn.Linear(hidden, width, bias=False, **where),
            }
        )
        self.input_layernorm = nn.RMSNorm(width, **where)
        self.post_attention_layernorm = nn.RMSNorm(width, **where)

    def forward(self, x):
        raise NotImplementedError


class LoraLlama(nn.Module):
    """All but the adapters is frozen; `positions` are a table of 8 KiB, frozen too."""

    def __init__(self, layers, width=4096, hidden=14336, device="meta", dtype=torch.bfloat16):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.embed_tokens = nn.Embedding(32000, width, **where)
        self.positions = nn.Embedding(64, 64, **where)
        self.layers = nn.ModuleList(LlamaLayer(width, hidden, **where) for _ in range(layers))
        self.norm = nn.RMSNorm(width, **where)
        self.lm_head = nn.Linear(width, 32000, bias=False, **where)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "lora_" in name

    def forward(self, x):
        raise NotImplementedError


PER_LAYER = ("layers.0", "layers.1", "layers.2")
ADAPTERS = tuple(
    f"{layer}.self_attn.{name}.{adapter}.default"
    for layer in PER_LAYER
    for name in ("q_proj", "v_proj")
    for adapter in ("lora_A", "lora_B")
)


@pytest.mark.usefixtures("four_ranks")
def test_lora_on_a_llama_has_no_finding():
    assert not capture_tree(fsdp2(LoraLlama(3), PER_LAYER)).findings
    assert not capture_tree(fsdp2(LoraLlama(3), (*PER_LAYER, "lm_head"))).findings


@pytest.mark.usefixtures("four_ranks")
def test_adapter_units_give_one_finding():
    (finding,) = capture_tree(fsdp2(LoraLlama(3), (*ADAPTERS, *PER_LAYER))).findings
    assert (finding.code, finding.count) == ("unit-too-small", len(ADAPTERS))
    assert set(finding.fqns) == set(ADAPTERS)
    assert finding.where.startswith("layers.{0..2}.self_attn.q_proj.lora_A.default, ")
    assert str(finding).splitlines()[0] == (
        "warning unit-too-small (12 cases, 128.0 KiB each, 1.5 MiB in all):"
    )
    assert "a step has at least 2 fewer collectives and no more bytes" in finding.reason
    assert not capture_tree(fsdp2(LoraLlama(3), PER_LAYER)).findings
