"""LoRA of peft: most parameters are frozen, gathered, and never reduced."""

import pytest
import tiny_llama
from oracle import owned_lines, witnessed_twice
from tiny_llama import EMBEDDING, FLOAT, LAYER, LAYERS, NORM, WIDTH
from torch.distributed.fsdp import fully_shard

peft = pytest.importorskip("peft")

RANK = 4
# Two adapters a layer, of two matrices.
ADAPTERS = 2 * 2 * RANK * WIDTH * FLOAT
MODEL = "base_model.model.model"


@pytest.mark.distributed(world_size=4)
# Of transformers, about what peft reads.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_lora_with_one_unit_a_layer(comm_mode, fsdp_tree, device_mesh):
    lora = peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(tiny_llama.build(), lora)
    mesh = device_mesh()
    for layer in model.get_submodule(f"{MODEL}.layers"):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
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
    # Units of their own for the adapters would gather as many bytes in more collectives.
    assert not tree.findings
