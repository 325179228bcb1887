"""Helpers to use accelerate's FSDP2 on CPU ranks, directly and through trainers."""

from typing import TYPE_CHECKING

import pytest
import tiny_llama
import torch
from frameworks.changes import observed

if TYPE_CHECKING:
    from regressions.table import Side

# Without accelerate, this skips the importing test file.
accelerate = pytest.importorskip("accelerate")

LAYER_CLASS = "LlamaDecoderLayer"
# Each rank runs the model once per step for each of these sequences.
TOKENS = torch.arange(tiny_llama.LENGTH) % tiny_llama.VOCABULARY
BATCHES = [{"input_ids": TOKENS, "labels": TOKENS}] * 64


def plugin(**changed):
    settings = {"transformer_cls_names_to_wrap": [LAYER_CLASS], "cpu_ram_efficient_loading": False}
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **(settings | changed)
    )


def use_fsdp(accelerator, chosen):
    """Set what accelerate sets only on GPUs; on the CPU it uses DDP."""
    accelerate.PartialState().distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = chosen


def forget():
    """Reset accelerate's state of the process, so that a test can prepare several models."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class FsdpOnCpu:
    """Mixin that makes a trainer shard on the CPU as its arguments say."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            asked_for = self.args.fsdp_plugin_args
            use_fsdp(self.accelerator, accelerate.FullyShardedDataParallelPlugin(**asked_for))
            self.is_fsdp_enabled = True


def arguments(kind, folder, *, steps=1, **changed):
    """Return arguments of a trainer that runs on the CPU and prints and saves nothing."""
    forget()
    settings = {
        "use_cpu": True,
        "max_steps": steps,
        "per_device_train_batch_size": tiny_llama.BATCH,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return kind(output_dir=str(folder), **(settings | changed))


def trained(comm_mode, trainer) -> "Side":
    """Record all steps of a trainer."""
    return observed(comm_mode, trainer.model, trainer.train, is_traced=False)
