"""accelerate's FSDP2 on CPU ranks, by itself and under the trainers that use it."""

from typing import TYPE_CHECKING

import pytest
import tiny_llama
import torch
from frameworks.changes import observed

if TYPE_CHECKING:
    from regressions.table import Side

# Whoever imports this file is skipped without it.
accelerate = pytest.importorskip("accelerate")

LAYER_CLASS = "LlamaDecoderLayer"
# For each of these sequences the model is run once a step, on each rank.
TOKENS = torch.arange(tiny_llama.LENGTH) % tiny_llama.VOCABULARY
BATCHES = [{"input_ids": TOKENS, "labels": TOKENS}] * 64


def plugin(**changed):
    given = {"transformer_cls_names_to_wrap": [LAYER_CLASS], "cpu_ram_efficient_loading": False}
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **(given | changed)
    )


def use_fsdp(accelerator, chosen):
    """accelerate sets these three itself where it finds GPUs; on the CPU it takes DDP."""
    accelerate.PartialState().distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = chosen


def forget():
    """accelerate keeps one state for each process, and a test may make several models."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class FsdpOnCpu:
    """Of a trainer: shards as its arguments ask for."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            asked_for = self.args.fsdp_plugin_args
            use_fsdp(self.accelerator, accelerate.FullyShardedDataParallelPlugin(**asked_for))
            self.is_fsdp_enabled = True


def arguments(kind, folder, *, steps=1, **changed):
    """What a trainer is told on CPU ranks, where it shall say and save nothing."""
    forget()
    given = {
        "use_cpu": True,
        "max_steps": steps,
        "per_device_train_batch_size": tiny_llama.BATCH,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return kind(output_dir=str(folder), **(given | changed))


def trained(comm_mode, trainer) -> "Side":
    """Records all steps of a trainer, after all of them."""
    return observed(comm_mode, trainer.model, trainer.train, is_traced=False)
