"""Programs that use DDP, for `tests/simulation/test_ddp.py`.

That test runs this file on two gloo ranks and on a simulated rank, and compares the recordings.
pytest does not collect the file itself.
"""

import contextlib
import json
import pathlib
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Block, Model, TokenModel
from oracle import lines
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_facts import DDP_FINALIZES_MANUALLY, DDP_SKIPS_UNUSED

from pytest_fsdp_comm.comm.profile import remove_overlap
from pytest_fsdp_comm.snapshots.comm_text import format_profile

STEPS = 3
"""A static graph rebuilds its buckets in the third step."""
TWO_MATRICES = 0.0004
"""MiB; the second matrix of `WIDTH` x `WIDTH` closes a bucket."""

# torch warns about its own functions that DDP calls.
pytestmark = pytest.mark.filterwarnings("ignore")


def ddp(model=None, **options):
    return DistributedDataParallel(Model() if model is None else model, **options)


def small(model=None, **options):
    return ddp(model, bucket_cap_mb=TWO_MATRICES, **options)


def train(model, batch=None):
    model(torch.ones(2, WIDTH) if batch is None else batch).sum().backward()


def zeroing(model, *, set_to_none=True):
    train(model)
    model.zero_grad(set_to_none=set_to_none)


class Branches(nn.Module):
    """Uses one of two layers in each step, and a third one never."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.number = 0

    def forward(self, x):
        self.number += 1
        return self.layers[self.number % 2](self.embed(x))


class TwoOutputs(Model):
    def forward(self, x):
        return super().forward(x), self.layers[0](x)


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.middle(self.up(x).bfloat16()).float())


class Reused(Model):
    """Runs one layer twice, each time checkpointed, and another one never."""

    def __init__(self):
        super().__init__()
        self.unused = Block()

    def forward(self, x):
        x = self.embed(x)
        for _ in range(2):
            x = checkpoint(self.layers[0], x, use_reentrant=True)
        return self.head(self.layers[1](x))


def norms():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def frozen():
    model = Model()
    model.layers[0].requires_grad_(requires_grad=False)
    return model


def ignoring():
    model = Model()
    model._ddp_params_and_buffers_to_ignore = {"layers.0.up.weight"}
    return model


def hooked(hook, state=None, wrap=small, **options):
    model = wrap(**options)
    model.register_comm_hook(state, hook)
    return model


def builtin(name):
    model = small()
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    return model


def halve(_state, bucket):
    return reduce_as(torch.bfloat16, bucket)


def round_down(_state, bucket):
    return reduce_as(torch.int32, bucket)


def reduce_as(dtype, bucket):
    work = dist.all_reduce(bucket.buffer().to(dtype), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].float())


def twice(_state, bucket):
    """Reduce a bucket, then something else; gloo orders the calls of several buckets at random."""
    assert bucket.is_last() or bucket.index() < 2
    assert len(bucket.gradients()) == len(bucket.parameters())

    def again(done):
        dist.all_reduce(torch.zeros(bucket.index() + 1))
        return done.value()[0]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)


def power_sgd():
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    return hooked(powerSGD_hook.powerSGD_hook, state, ddp)


def accumulating(model):
    with model.no_sync():
        zeroing(model)
        train(model)
    train(model)


def evaluating(model):
    with torch.no_grad():
        model.eval()(torch.ones(2, WIDTH))
    train(model.train())


def joining(model):
    with Join([model]):
        for _ in range(2):
            train(model)


def on_subgroup():
    return ddp(process_group=dist.new_group([0, 1]))


def delaying():
    model = Model()
    delayed = [
        (f"layers.0.{name}.weight", getattr(model.layers[0], name).weight)
        for name in ("up", "down")
    ]
    return ddp(
        model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model.embed.weight
    )


def summing_buffers():
    model = ddp(norms())

    def add(_state, buffers):
        for name, buffer in buffers.items():
            if "mean" in name:
                dist.all_reduce(buffer)

    model._register_buffer_comm_hook(None, add)
    return model


def replicated():
    return replicate(Model(), bucket_cap_mb=TWO_MATRICES)


def wrapping_twice():
    """Wrap a model whose first wrapper is gone: only one reducer must remain."""
    model = Model()
    train(ddp(model))
    return small(model)


def sharding_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

    model = ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def run(model):
        train(model)
        optimizer.step()

    return model, run


def finalizing():
    model = small()
    model.require_manual_backward_finalization = True

    def run(model):
        zeroing(model)
        model.finalize_backward()

    return model, run


def tokens(model):
    train(model, torch.zeros(2, 3, dtype=torch.int64))


def of_width_3000(model):
    train(model, torch.ones(2, 3000))


def first_output(model):
    model(torch.ones(2, WIDTH))[0].sum().backward()


PROGRAMS = {
    "plain": lambda: (ddp(), zeroing),
    "small_buckets": lambda: (small(), zeroing),
    "bucket_of_25_mib": lambda: (
        ddp(nn.Linear(3000, 3000)),
        lambda model: train(model, torch.ones(2, 3000)),
    ),
    "kept_gradients": lambda: (small(), lambda model: zeroing(model, set_to_none=False)),
    "gradients_as_views": lambda: (small(gradient_as_bucket_view=True), zeroing),
    "kept_views": lambda: (small(gradient_as_bucket_view=True), train),
    "tied": lambda: (small(TokenModel(tied=True, norm=True)), tokens),
    "frozen": lambda: (small(frozen()), zeroing),
    "ignored": lambda: (ddp(ignoring()), zeroing),
    "mixed_dtypes": lambda: (small(MixedDtypes()), zeroing),
    "buffers": lambda: (ddp(norms()), zeroing),
    "buffers_not_sent": lambda: (ddp(norms(), broadcast_buffers=False), zeroing),
    "buffers_by_hook": lambda: (summing_buffers(), zeroing),
    "evaluation": lambda: (ddp(norms()), evaluating),
    "no_initial_sync": lambda: (ddp(norms(), init_sync=False), zeroing),
    "accumulation": lambda: (small(), accumulating),
    "finds_unused": lambda: (small(Branches(), find_unused_parameters=True), zeroing),
    "finds_none_unused": lambda: (small(find_unused_parameters=True), accumulating),
    "unused_output": lambda: (small(TwoOutputs(), find_unused_parameters=True), first_output),
    "static": lambda: (small(static_graph=True), zeroing),
    "static_reused": lambda: (small(Reused(), static_graph=True), zeroing),
    "checkpointed": lambda: (small(Model(reentrant=False)), zeroing),
    "fp16_hook": lambda: (hooked(default_hooks.fp16_compress_hook), zeroing),
    "bf16_hook": lambda: (hooked(halve), zeroing),
    "int_hook": lambda: (hooked(round_down, find_unused_parameters=True), zeroing),
    "mean_hook": lambda: (hooked(default_hooks.allreduce_hook, dist.group.WORLD), zeroing),
    "wrapped_hook": lambda: (
        hooked(fp16_compress_wrapper(default_hooks.allreduce_hook), dist.group.WORLD),
        zeroing,
    ),
    "chained_hook": lambda: (hooked(twice, wrap=ddp), zeroing),
    "power_sgd_hook": lambda: (power_sgd(), zeroing),
    "builtin_fp16": lambda: (builtin("FP16_COMPRESS"), zeroing),
    "builtin_mean": lambda: (builtin("ALLREDUCE"), zeroing),
    "join": lambda: (small(), joining),
    "subgroup": lambda: (on_subgroup(), zeroing),
    "delayed": lambda: (delaying(), train),
    "sharded_optimizer": sharding_optimizer,
    "replicate": lambda: (replicated(), zeroing),
    "two_replicas": lambda: (nn.Sequential(small(), ddp(find_unused_parameters=True)), zeroing),
    "wrapped_twice": lambda: (wrapping_twice(), zeroing),
}
if DDP_SKIPS_UNUSED:
    PROGRAMS["skips_unused"] = lambda: (
        small(Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True),
        zeroing,
    )
if DDP_FINALIZES_MANUALLY:
    PROGRAMS["finalized_manually"] = finalizing


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            how, marks=pytest.mark.distributed(2, scope="module", simulate=how == "simulated")
        )
        for how in ("gloo", "simulated")
    ],
)
def test_ddp(name, how, comm_mode, dist_info):
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    recorded = []

    @contextlib.contextmanager
    def recording(*model):
        with comm_mode(*model) if model else comm_mode:
            yield
        # Only simulated ranks record overlap.
        text = format_profile(remove_overlap(comm_mode.merged_profile())).splitlines()
        recorded.append([*lines(comm_mode), *text])

    with recording():
        model, step = PROGRAMS[name]()
    for _ in range(STEPS):
        with recording(model):
            step(model)
    if dist_info.rank == 0:
        pathlib.Path(f"{name}-{how}.json").write_text(json.dumps(recorded))
