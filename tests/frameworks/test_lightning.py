"""Lightning's Trainer with its ModelParallelStrategy (FSDP2, DTensor) and FSDPStrategy (FSDP1)."""

from functools import partial

import pytest
import torch
from derived import fsdp_lines
from frameworks.changes import comm_failure, observed
from models import ACTIVATION_NBYTES, BLOCK_NBYTES, FLOAT, ROOT_NBYTES, WIDTH, Block, Model, shard
from oracle import owned_lines, witnessed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytest.importorskip("lightning")

import lightning
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

pytestmark = [
    pytest.mark.distributed(world_size=4),
    # Lightning warns about loaders without workers, torch about calls that Lightning makes.
    pytest.mark.filterwarnings("ignore"),
]

PARAMETERS = 6
BLOCKS = ["model.layers.0", "model.layers.1"]


class Module(lightning.LightningModule):
    def __init__(self, *, plan=("up", "down"), lr=0.1, reduces_last=False, **options):
        super().__init__()
        self.model = Model()
        self.reduces_last = reduces_last
        self.plan, self.lr, self.options = plan, lr, options

    def configure_model(self):
        if self.device_mesh["tensor_parallel"].size() > 1:
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for layer in self.model.layers:
                plan = {name: styles[name] for name in self.plan}
                parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)
        shard(self.model, self.device_mesh["data_parallel"], **self.options)

    def training_step(self, batch, batch_idx):
        if self.reduces_last:
            is_last = (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
            self.model.set_requires_gradient_sync(is_last)
        loss = self.model(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Fsdp1(Module):
    def configure_model(self):
        # The strategy would also wrap, but passes FSDP no device on the CPU.
        policy = ModuleWrapPolicy({Block})
        cpu = torch.device("cpu")
        self.model = FullyShardedDataParallel(self.model, auto_wrap_policy=policy, device_id=cpu)


class FsdpOnCpu(FSDPStrategy):
    """Subclass, because Lightning refuses FSDPStrategy without a GPU, but not subclasses."""


def fit(module, strategy, **options):
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(64, WIDTH), batch_size=2))


def model_parallel(data, tensor):
    return partial(ModelParallelStrategy, data_parallel_size=data, tensor_parallel_size=tensor)


def trained(comm_mode, *, data=4, tensor=1, trainer=None, **module):
    """Record one step of a new module; the Trainer shards it, so each fit needs a new one."""
    model = Module(**module)
    run = partial(fit, model, model_parallel(data, tensor), **trainer or {})
    return observed(comm_mode, model, run, warm_up=0, profiler=False)


def sent_by_modules(comm_mode):
    return [line for line in owned_lines(comm_mode) if not line.startswith("outside")]


def units_of(tensor=1):
    return {"model": ROOT_NBYTES, **dict.fromkeys(BLOCKS, BLOCK_NBYTES // tensor)}


@pytest.mark.parametrize("is_clipped", [False, True])
def test_fsdp2(comm_mode, fsdp_tree, is_clipped):
    module = Module()
    options = {"gradient_clip_val": 1.0} if is_clipped else {}
    witnessed(
        comm_mode, module, partial(fit, module, model_parallel(4, 1), **options), profiler=False
    )
    clipping = f"optimizer - all_reduce[data_parallel] {PARAMETERS * FLOAT}"
    expected = fsdp_lines(units_of(), axis="data_parallel", kept="model")
    assert sent_by_modules(comm_mode) == sorted(expected + [clipping] * is_clipped)
    assert {event.owner for event in comm_mode.events if event.phase == "outside"} == {None}
    tree = fsdp_tree(module)
    assert {tree.unit_name(index) for index in range(3)} == units_of().keys()
    assert not tree.findings


def test_fsdp2_with_tensor_parallelism(comm_mode, fsdp_tree):
    module = Module()
    witnessed(comm_mode, module, partial(fit, module, model_parallel(2, 2)), profiler=False)
    expected = fsdp_lines(units_of(tensor=2), axis="data_parallel", kept="model")
    for block in BLOCKS:
        expected.append(f"forward {block}.down all_reduce[tensor_parallel] {ACTIVATION_NBYTES}")
        expected.append(f"backward {block}.up all_reduce[tensor_parallel] {ACTIVATION_NBYTES}")
    assert sent_by_modules(comm_mode) == sorted(expected)
    assert {axis.name for axis in fsdp_tree(module).mesh_axes} == {
        "data_parallel",
        "tensor_parallel",
    }


def test_accumulation_reduces_in_each_batch(comm_mode):
    """Accumulation reduces only once if the module calls `set_requires_gradient_sync`."""
    twice = {"trainer": {"accumulate_grad_batches": 2}}
    each = trained(comm_mode, **twice)
    a_batch = fsdp_lines(units_of(), axis="data_parallel", kept="model")
    assert sent_by_modules(comm_mode) == sorted(a_batch * 2)
    last = trained(comm_mode, reduces_last=True, **twice)
    a_step = fsdp_lines(units_of(), axis="data_parallel", kept="model", unreduced_batches=1)
    assert sent_by_modules(comm_mode) == sorted(a_step)
    assert comm_failure(last, each)[0] == (
        "gradients of model, model.layers.{0..1} reduced 1 -> 2 times (reduce_scatter), gathers "
        "unchanged"
    )


def test_fsdp1_on_the_cpu(comm_mode, fsdp_tree):
    module = Fsdp1()
    witnessed(comm_mode, module, partial(fit, module, FsdpOnCpu), profiler=False)
    expected = fsdp_lines(units_of(), axis="world", kept="model")
    assert sent_by_modules(comm_mode) == sorted(expected)
    tree = fsdp_tree(module)
    assert {tree.unit_name(index) for index in range(3)} == units_of().keys()
    assert {unit.kind for unit in tree.units} == {"fsdp1"}


def test_fsdp1_refuses_to_clip_norms():
    with pytest.raises(MisconfigurationException, match="'norm'` is currently not supported"):
        fit(Fsdp1(), FsdpOnCpu, gradient_clip_val=1.0)


def test_change_without_effect_is_not_reported(comm_mode):
    reviewed = trained(comm_mode)
    torch.manual_seed(1)
    assert not comm_failure(reviewed, trained(comm_mode, lr=0.5, trainer={"log_every_n_steps": 1}))
