"""Frameworks' training programs are recorded by one command, and ``diff`` reports a mistake."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

RECORD = ("-m", "pytest_fsdp_comm", "record")
# A module for torchtitan's --experimental.custom_import: a tiny model, data without a file, and
# workarounds to run on the CPU.
TITAN = """
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.distributed import parallel_dims, utils as distributed_utils
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools import utils

cpu = SimpleNamespace(
    **dict.fromkeys(
        ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), lambda *_: None
    ),
    get_device_name=lambda *_: "cpu",
    current_device=lambda: 0,
    get_device_properties=lambda *_: SimpleNamespace(total_memory=1),
    memory_stats=lambda *_: {},
)
for module in (utils, distributed_utils, parallel_dims, metrics):
    module.device_type, module.device_module = "cpu", cpu
divide = FSDPModule.set_gradient_divide_factor


def divide_the_sum(self, factor):
    divide(self, factor)
    self.set_force_sum_reduction_for_comms(enable=True)


FSDPModule.set_gradient_divide_factor = divide_the_sum


class Loader:
    def __iter__(self):
        while True:
            tokens = torch.arange(32).view(2, 16)
            yield {"input": tokens}, tokens

    def state_dict(self):
        return {}

    def load_state_dict(self, _): ...


spec = llama3.get_train_spec()
sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 128}
model_args = {"tiny": replace(spec.model_args["debugmodel"], **sizes)}
loading = {"build_tokenizer_fn": None, "build_dataloader_fn": lambda **_: Loader()}
register_train_spec("tiny", replace(spec, model_args=model_args, **loading))
"""
ACCELERATED = """
import argparse
from contextlib import nullcontext

import accelerate
import tiny_llama
import torch
from frameworks.accelerated import use_fsdp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--forget", action="store_true")
    arguments = parser.parse_args()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    use_fsdp(accelerator, accelerate.FullyShardedDataParallelPlugin())  # reads FSDP_*
    model = tiny_llama.build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(1, 11):
        with nullcontext() if arguments.forget else accelerator.accumulate(model):
            accelerator.backward(tiny_llama.loss(model))
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
"""
LAYERS = "model.layers.{0..1}"
PER_MICRO_BATCH = (
    f"gradients of lm_head+model.norm, model.embed_tokens, {LAYERS} reduced 1 -> 2 times "
    "(reduce_scatter), gathers unchanged"
)


def run(*arguments):
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": tests,
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=extend_under_load(300),
        check=False,
    )


def told(*commands):
    """Record with two commands, and return the lines that `diff` prints."""
    for side, command in zip(("old", "new"), commands, strict=True):
        place = command.index("record") + 1
        done = run(*command[:place], "--out", f"{side}.comm", *command[place:])
        assert done.returncode == 0, done.stderr
        assert f"Wrote {side}.comm, {side}.json, {side}.tree.comm" in done.stderr
    diff = run("-m", "pytest_fsdp_comm", "diff", "old.json", "new.json")
    assert diff.returncode == 1, diff.stderr
    return {line.strip() for line in diff.stdout.splitlines()}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.skipif(
    not (find_spec("torchtitan") and find_spec("triton")), reason="needs torchtitan"
)
def test_torchtitans_train_py():
    Path("tiny_model.py").write_text(TITAN)
    options = {
        "experimental.custom_import": "tiny_model",
        "model.name": "tiny",
        "model.flavor": "tiny",
        "training.seq_len": "16",
        "training.local_batch_size": "2",
        "training.steps": "4",
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    train = (*RECORD, "--nproc", "2", "-m", "torchtitan.train", *flags)
    assert told(train, (*train, "--parallelism.fsdp_reshard_after_forward", "never")) >= {
        "layers.{0..1}, tok_embeddings no longer resharded after forward, so not gathered again in "
        "backward: -3 calls, -272.5 KiB",
        "layers.{0..1}, tok_embeddings: reshard_after_forward True -> False",
    }


def test_script_launched_by_accelerate():
    pytest.importorskip("accelerate")
    Path("train.py").write_text(ACCELERATED)
    options = ("fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP", "num_processes=2")
    options += ("fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayer", "main_process_port=0")
    options += ("fsdp_version=2", "fsdp_cpu_ram_efficient_loading=false", "use_fsdp", "module")
    launch = ("-m", "accelerate.commands.launch", *(f"--{option}" for option in options))
    train = (*launch, "pytest_fsdp_comm", "record", "train.py")
    assert PER_MICRO_BATCH in told(train, (*train, "--forget"))
