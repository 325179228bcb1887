"""DDP on a simulated rank sends what it sends on two gloo ranks, call by call."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ddp_programs import PROGRAMS
from models import BLOCK_NBYTES, ROOT_NBYTES, WIDTH, Model
from sessions import set_outermost
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.simulation.memory import SimulationError

TESTS = Path(__file__).parents[1]
MODEL_NBYTES = ROOT_NBYTES + 2 * BLOCK_NBYTES

simulated = pytest.mark.distributed(world_size=2, simulate=True)


def test_ddp_sends_what_gloo_ranks_send(tmp_path):
    """Run all programs of `ddp_programs` on both kinds of ranks, in one session."""
    for name in ("oracle.py", "models.py", "texts.py", "torch_facts.py", "conftest.py"):
        shutil.copy(TESTS / name, tmp_path)
    shutil.copy(TESTS / "ddp_programs.py", tmp_path / "test_ddp_programs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    with pytest.MonkeyPatch.context() as patch:
        set_outermost(patch)
        done = subprocess.run(
            command,
            check=False,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=extend_under_load(300),
        )
    assert not done.returncode, done.stdout + done.stderr
    gloo, fake = (
        {name: read(tmp_path / f"{name}-{how}.json") for name in PROGRAMS}
        for how in ("gloo", "simulated")
    )
    assert all(all(steps) for steps in gloo.values())
    assert gloo == fake


def read(path):
    """Return the lines of each step, without those that only one kind of rank has."""
    steps = json.loads(path.read_text())
    only = ("# pytest-fsdp-comm", "ranks ", "answered ")
    return [[line for line in step if not line.startswith(only)] for step in steps]


def train(model, device="cuda"):
    model(torch.ones(2, WIDTH, device=device)).sum().backward()


# The arguments of DDP for a script that has called `torch.cuda.set_device(1)`.
DEVICE_IDS = {
    "device": {"device_ids": [torch.device("cuda", 1)]},
    "device without index": {"device_ids": [torch.device("cuda")]},
    "text": {"device_ids": ["cuda:1"]},
    "text without index": {"device_ids": ["cuda"]},
    "index": {"device_ids": [1]},
    "output": {"device_ids": [1], "output_device": 1},
    "output without index": {"device_ids": ["cuda"], "output_device": torch.device("cuda")},
    "output as text": {"device_ids": [1], "output_device": "cuda:1"},
    "none": {},
}


@pytest.mark.distributed(world_size=8, simulate=True)
@pytest.mark.parametrize("name", DEVICE_IDS)
def test_ddp_accepts_device_ids_of_gpus(comm_mode, name):
    torch.cuda.set_device(1)
    device = torch.device("cuda", 1)
    model = DistributedDataParallel(Model().cuda(), **DEVICE_IDS[name])
    assert model.device == device
    assert model.device_ids == ([1] if DEVICE_IDS[name] else None)
    assert model.output_device == (1 if DEVICE_IDS[name] else None)
    # DDP moves the batch to its device, if it knows the device.
    for batch_device in ("cpu", device) if DEVICE_IDS[name] else (device,):
        with comm_mode(model):
            result = model(torch.ones(2, WIDTH, device=batch_device))
            assert result.device == device
            result.sum().backward()
        assert comm_mode.nbytes("all_reduce") == MODEL_NBYTES


@simulated
@pytest.mark.parametrize("precision", [{}, {"param_dtype": torch.float16}])
def test_ddp_reduces_in_half_precision_on_gpus(comm_mode, precision):
    options = {"mixed_precision": _MixedPrecision(**precision)} if precision else {}
    model = DistributedDataParallel(Model().cuda(), device_ids=[0], **options)
    if not precision:
        model.register_comm_hook(None, bf16_compress_hook)
    for _ in range(2):
        with comm_mode(model):
            train(model)
    assert comm_mode.nbytes("all_reduce") == MODEL_NBYTES // 2
    assert comm_mode.counts("all_reduce", owner="") == 1


@simulated
def test_ddp_synchronizes_batch_norms(comm_mode):
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).cuda()
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(layers))
    with comm_mode(model):
        train(model)
    # The statistics of each channel and a count; their gradients; the gradients of parameters.
    assert comm_mode.nbytes("all_gather") == 2 * (2 * WIDTH + 1) * 4
    sizes = [event.nbytes for event in comm_mode.events if event.kind == "all_reduce"]
    assert sizes == [2 * WIDTH * 4, (WIDTH + 3) * WIDTH * 4]


@simulated
def test_ddp_error_names_parameters_without_gradient():
    class Skipping(Model):
        def forward(self, x):
            return self.embed(x)

    model = DistributedDataParallel(Skipping(blocks=1))
    train(model, "cpu")
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as failed:
        train(model, "cpu")
    missing = "layers.0.up.weight, layers.0.down.weight, head.weight got no gradient"
    assert missing in str(failed.value)


@simulated
def test_ddp_error_names_parameter_used_twice():
    model = DistributedDataParallel(Model(blocks=1))
    output = model(torch.ones(2, WIDTH)).sum()
    output.backward(retain_graph=True)
    model.reducer.prepare_for_backward([])
    model.reducer._autograd_hook(0)
    with pytest.raises(RuntimeError, match=r"mark a variable ready only once: embed\.weight"):
        model.reducer._autograd_hook(0)


@simulated
def test_ddp_error_when_static_graph_changes():
    class Changing(Model):
        is_longer = False

        def forward(self, x):
            return super().forward(self.embed(x) if self.is_longer else x)

    model = DistributedDataParallel(Changing(), static_graph=True)
    train(model, "cpu")
    model(torch.ones(2, WIDTH))
    model.reducer._autograd_hook(0)
    with pytest.raises(RuntimeError, match="graph has changed in this iteration"):
        model.reducer._autograd_hook(0)


@simulated
def test_ddp_error_when_nothing_to_finalize(comm_mode):
    """The reducer can be told to wait later; DDP has a public method for it since torch 2.15."""
    reducer = (model := DistributedDataParallel(Model())).reducer
    reducer._set_manual_finalization_required(required=True)
    assert reducer._should_finalize_after_backward()
    with pytest.raises(RuntimeError, match="has no all-reduces to wait for"):
        reducer._finalize_backward_manual()
    with comm_mode(model):
        train(model, "cpu")
        reducer._finalize_backward_manual()
    with pytest.raises(RuntimeError, match="has no all-reduces to wait for"):
        reducer._finalize_backward_manual()
    assert comm_mode.nbytes("all_reduce") == MODEL_NBYTES


@simulated
def test_ddp_error_names_sparse_gradient():
    model = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    with pytest.raises(SimulationError, match=r"^weight has a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()
