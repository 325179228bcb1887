"""LoRA with peft: most parameters are frozen, so they are gathered but never reduced."""

import pytest
import tiny_llama
from frameworks.changes import comm_failure, observed
from oracle import owned_lines, witnessed_twice
from tiny_llama import EMBEDDING, FLOAT, LAYER, LAYERS, NORM, WIDTH
from torch.distributed.fsdp import fully_shard

peft = pytest.importorskip("peft")

RANK = 4
# Each layer has two adapters of two matrices.
ADAPTERS = 2 * 2 * RANK * WIDTH * FLOAT
MODEL = "base_model.model.model"


pytestmark = [
    pytest.mark.distributed(world_size=4),
    # transformers warns about attributes that peft reads.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


def adapted(mesh, *, change=lambda _: None, units=LAYERS, **changed):
    """Return a LoRA model in which each layer, or each of the first ones, is a unit."""
    settings = {"r": RANK, "target_modules": ["q_proj", "v_proj"]} | changed
    model = peft.get_peft_model(tiny_llama.build(), peft.LoraConfig(**settings))
    change(model)
    for layer in model.get_submodule(f"{MODEL}.layers")[:units]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_lora_with_one_unit_a_layer(comm_mode, fsdp_tree, device_mesh):
    model = adapted(device_mesh())
    witnessed_twice(comm_mode, model, lambda: tiny_llama.loss(model).backward())

    layers = [f"{MODEL}.layers.{layer}" for layer in range(LAYERS)]
    expected = [f"forward . all_gather[dp] {2 * EMBEDDING + NORM}"]
    for layer in layers:
        expected += [
            f"forward {layer} all_gather[dp] {LAYER + ADAPTERS}",
            f"backward {layer} all_gather[dp] {LAYER + ADAPTERS}",
            f"backward {layer} reduce_scatter[dp] {ADAPTERS}",
        ]
    assert owned_lines(comm_mode) == sorted(expected)
    tree = fsdp_tree(model)
    trainable = {name for name, entry in tree.named_parameters() if entry.trainable}
    assert trainable == {name for name, entry in tree.named_parameters() if "lora_" in name}
    # Separate units for adapters would gather the same bytes in more collectives.
    assert not tree.findings


def test_change_of_adapters_is_reported(comm_mode, device_mesh):
    def of(**changed):
        model = adapted(device_mesh(), **changed)
        return observed(comm_mode, model, lambda: tiny_llama.loss(model).backward())

    reviewed = of()
    innocent = {"lora_alpha": 32, "lora_dropout": 0.1, "use_rslora": True, "bias": "all"}
    assert not comm_failure(reviewed, of(**innocent))

    def train_the_head(model):
        model.get_submodule("base_model.model.lm_head").requires_grad_(requires_grad=True)

    assert comm_failure(reviewed, of(change=train_the_head))[0] == (
        "gradients of (root) now reduced (reduce_scatter[dp]), gathers unchanged"
    )

    def train_everything(model):
        model.requires_grad_(requires_grad=True)

    assert comm_failure(reviewed, of(change=train_everything)) == [
        "gradients of (root) now reduced (reduce_scatter[dp]), gathers unchanged",
        "gradients of more parameters are now reduced, gathers unchanged: "
        "base_model.model.model.layers.{0..1} 4.0 -> 164.5 KiB per call",
        "likely: parameters are no longer frozen, as the tree shows",
    ]
    assert comm_failure(reviewed, of(units=1))[0] == f"{MODEL}.layers.1 merged into unit (root)"
    # Adds a second head, which is gathered with the first; only the second is trained.
    copied = comm_failure(reviewed, of(modules_to_save=["lm_head"]))
    assert copied[:2] == [
        "(root) in forward: all_gather[dp] x1, 64.2 -> 96.2 KiB per rank",
        "(root) in backward: reduce_scatter[dp] 0 -> 1 (+1), 0 -> 32.0 KiB per rank",
    ]
