"""The Trainer of transformers, with FSDP2 from accelerate or from transformers."""

import pytest
import tiny_llama
from derived import fsdp_lines
from frameworks.accelerated import BATCHES, LAYER_CLASS, FsdpOnCpu, arguments, trained
from frameworks.changes import comm_failure, tree_failure
from oracle import owned_lines
from tiny_llama import FLOAT, PARAMETERS
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

distributed = pytest.importorskip("transformers.distributed", reason="needs transformers 5")

pytestmark = [
    pytest.mark.distributed(world_size=4),
    # torch warns about calls that transformers makes.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]
RANKS = 4
LONG = 8
UNITS = tiny_llama.units()
KEPT = "lm_head+model.norm"
# Each step gathers the number of tokens of all ranks; the end gathers the loss.
COUNTED = f"outside - all_gather[{{axis}}] {RANKS * LONG}"
LOSS = f"outside - all_gather[{{axis}}] {RANKS * FLOAT}"


class FsdpTrainer(FsdpOnCpu, Trainer):
    pass


def by_arguments(folder, *, config=None, **changed):
    """Return a trainer that shards by its `fsdp_config`, as users write it."""
    fsdp = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": [LAYER_CLASS]}}
    if config is not None:
        fsdp["fsdp_config"] = config
    settings = arguments(TrainingArguments, folder, **(fsdp | changed))
    return FsdpTrainer(tiny_llama.build(), settings, train_dataset=BATCHES)


def by_plan(folder, *, sizes, **changed):
    """Return a trainer whose model was sharded when it was loaded, not by accelerate."""
    settings = arguments(TrainingArguments, folder, **changed)
    model = LlamaForCausalLM.from_pretrained(
        None,
        config=tiny_llama.config(),
        state_dict=tiny_llama.build().state_dict(),
        distributed_config=distributed.DistributedConfig(**sizes),
    )
    return Trainer(model, settings, train_dataset=BATCHES)


def expected(axis, *, steps=1, batches=1, replicate=None):
    step = fsdp_lines(
        UNITS, axis=axis, kept=KEPT, unreduced_batches=batches - 1, replicate=replicate
    )
    step.append(COUNTED.format(axis=axis))
    return sorted([*step * steps, LOSS.format(axis=axis)])


def clipping(*axes):
    return [f"optimizer - all_reduce[{axis}] {PARAMETERS * FLOAT}" for axis in axes]


@pytest.mark.parametrize(("steps", "batches"), [(2, 1), (1, 2)])
def test_fsdp_by_arguments(comm_mode, fsdp_tree, tmp_path, steps, batches):
    trainer = by_arguments(tmp_path, steps=steps, gradient_accumulation_steps=batches)
    trained(comm_mode, trainer)
    assert owned_lines(comm_mode) == sorted(
        expected("world", steps=steps, batches=batches) + clipping("world") * steps
    )
    tree = fsdp_tree(trainer.model)
    assert {tree.unit_name(index) for index in range(len(tree.units))} == {"", *UNITS}


@pytest.mark.parametrize("batches", [1, 2])
def test_plan_of_transformers_needs_no_override(comm_mode, tmp_path, batches):
    """The plain Trainer uses FSDP2 on the CPU if transformers sharded the model."""
    trainer = by_plan(tmp_path, sizes={"fsdp_size": 4}, gradient_accumulation_steps=batches)
    trained(comm_mode, trainer)
    assert owned_lines(comm_mode) == sorted(expected("fsdp", batches=batches) + clipping("fsdp"))


def test_last_micro_batch_reduces_over_replicas(comm_mode, tmp_path):
    sizes = {"fsdp_size": 2, "dp_replicate_size": 2}
    trained(comm_mode, by_plan(tmp_path, sizes=sizes, gradient_accumulation_steps=2))
    sent = [line for line in owned_lines(comm_mode) if not line.startswith(("outside", "optim"))]
    step = fsdp_lines(
        UNITS, axis="fsdp", kept=KEPT, unreduced_batches=1, replicate=("dp_replicate", 2)
    )
    # Within a replica, every micro-batch is reduced, so that gradients stay sharded.
    step += [f"backward {unit} reduce_scatter[fsdp] {nbytes}" for unit, nbytes in UNITS.items()]
    assert sent == sorted(step)


def test_change_of_arguments_is_reported(comm_mode, tmp_path):
    def of(**changed):
        settings = {"gradient_accumulation_steps": 2} | changed
        return trained(comm_mode, by_arguments(tmp_path, **settings))

    reviewed = of()
    innocent = {
        "other numbers": {"learning_rate": 0.5, "weight_decay": 0.1, "seed": 7, "data_seed": 7},
        # Without a class name, the model names the classes of its layers.
        "no class named": {"config": {}},
        # Each layer is a unit, which backward gathers anyway.
        "recomputed": {"activation_checkpointing": True},
    }
    for name, changed in innocent.items():
        assert not comm_failure(reviewed, of(**changed)), name

    gathered = of(config={"reshard_after_forward": False})
    # The embedding of 32 KiB and two layers of 160.5, for two micro-batches.
    assert comm_failure(reviewed, gathered)[0] == (
        "model.embed_tokens, model.layers.{0..1} no longer resharded after forward, so not "
        "gathered again in backward: -6 calls, -706.0 KiB"
    )
    assert tree_failure(reviewed, gathered) == [
        "model.embed_tokens, model.layers.{0..1}: reshard_after_forward True -> False",
    ]
    each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert comm_failure(reviewed, of(accelerator_config=each))[0] == (
        "gradients of lm_head+model.norm, model.embed_tokens, model.layers.{0..1} reduced 1 -> 2 "
        "times (reduce_scatter), gathers unchanged"
    )
    logged = of(logging_strategy="steps", logging_steps=1)
    assert comm_failure(reviewed, logged) == [
        "(no-module) outside forward and backward: all_gather[world] 2 -> 4 (+2), 48 -> 96 B per "
        "rank"
    ]
    # Falls back to DDP, which has a single bucket.
    assert comm_failure(reviewed, of(fsdp=None))[0].startswith(
        "lm_head+model.norm, model.embed_tokens, model.layers.{0..1} no longer gathered or reduced"
    )
