"""accelerate's FSDP2, by itself and under the Trainer of transformers."""

import pytest
import tiny_llama
import torch
from derived import fsdp_lines
from oracle import owned_lines, witnessed_twice
from tiny_llama import FLOAT, PARAMETERS, VOCABULARY
from transformers import Trainer, TrainingArguments

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.distributed(world_size=4)
UNITS = tiny_llama.units()
CLIPPING = f"optimizer - all_reduce[world] {PARAMETERS * FLOAT}"


def plugin():
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )


def use_fsdp(accelerator):
    """accelerate sets these three itself where it finds GPUs; on the CPU it takes DDP."""
    accelerate.PartialState().distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin()


def unit_names(tree):
    return {tree.unit_name(index) for index in range(len(tree.units))}


@pytest.mark.parametrize("batches", [1, 2])
def test_a_step_with_clipping_and_accumulation(comm_mode, fsdp_tree, batches):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=batches)
    use_fsdp(accelerator)
    model = tiny_llama.build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))

    def step():
        for _ in range(batches):
            with accelerator.accumulate(model):
                accelerator.backward(tiny_llama.loss(model))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    witnessed_twice(comm_mode, model, step)
    sent = fsdp_lines(UNITS, axis="world", kept="lm_head+model.norm", unreduced_batches=batches - 1)
    assert owned_lines(comm_mode) == sorted([*sent, CLIPPING])
    tree = fsdp_tree(model)
    assert unit_names(tree) == {"", *UNITS}
    assert not tree.findings


def test_without_the_distributed_type_accelerate_takes_ddp_and_the_recording_shows_it(
    comm_mode, fsdp_tree
):
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin())
    model = accelerator.prepare(tiny_llama.build())

    def step():
        accelerator.backward(tiny_llama.loss(model))

    witnessed_twice(comm_mode, model, step, warm_up=2)
    assert {event.source.value for event in comm_mode.events} == {"ddp"}
    assert comm_mode.nbytes("all_reduce", phase="backward") == sum(UNITS.values())
    assert [unit.kind for unit in fsdp_tree(model).units] == ["ddp"]


class FsdpTrainer(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        use_fsdp(self.accelerator)


def test_the_trainer(comm_mode, fsdp_tree, tmp_path):
    steps = 2
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=tiny_llama.BATCH,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    tokens = torch.arange(tiny_llama.LENGTH) % VOCABULARY
    batches = [{"input_ids": tokens, "labels": tokens}] * 64
    trainer = FsdpTrainer(tiny_llama.build(), arguments, train_dataset=batches)
    with comm_mode:
        trainer.train()
    a_step = [*fsdp_lines(UNITS, axis="world", kept="lm_head+model.norm"), CLIPPING]
    sent = [line for line in owned_lines(comm_mode) if not line.startswith("outside")]
    assert sent == sorted(a_step * steps)
    # How many tokens each rank has, in each step, and at the end the loss.
    assert comm_mode.counts(phase="outside") == comm_mode.counts(
        phase="outside", owner="(no-module)"
    )
    assert comm_mode.counts(phase="outside") == steps + 1
    assert unit_names(fsdp_tree(trainer.model)) == {"", *UNITS}
