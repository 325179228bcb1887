"""Regressions that were reported for real projects, as this plugin shows them.

Each changes no loss. The reviewed step and the regressed one are recorded on gloo ranks; what the
failed comparison says is the point.
"""

import dataclasses
import itertools
import re
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Block, Model, TokenModel, shard
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_facts import needs_default_reshard

from pytest_fsdp_comm.comm.cost import Cost
from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.reports.changes import render_comparison
from pytest_fsdp_comm.snapshots.comm_text import format_profile

README = (Path(__file__).parents[2] / "README.md").read_text()

pytestmark = pytest.mark.distributed(world_size=2)


def step(model, **options):
    models.step(model, batch=4, grad_input=True, **options)


@pytest.fixture
def record(comm_mode):
    """Records one call in a settled state."""

    def record(model, run):
        run()
        with comm_mode(model):
            run()
        return comm_mode.profile

    return record


def said(reviewed, regressed):
    """The lines of the failure, without head, cost and command."""
    comparison = dataclasses.replace(compare(reviewed, regressed), cost=Cost())
    return [
        re.sub(r"py:\d+", "py:N", line.strip())
        for line in render_comparison(comparison, snapshot="s").body
        if not re.search(r": (now |no longer )?(un|re)sharded,", line)
    ]


def count(profile, kind):
    return sum(row.count for row in profile.rows if row.what == kind)


@pytest.mark.upstream
@needs_default_reshard
def test_reshard_after_forward_adds_all_gathers(record, device_mesh):
    profiles = {}
    for policy in (True, False, None):
        model = shard(Model(), device_mesh(), reshard_after_forward=policy, root=policy)
        profiles[policy] = record(model, lambda model=model: step(model))
    counts = {policy: count(profile, "all_gather") for policy, profile in profiles.items()}
    assert counts == {True: 6, False: 3, None: 5}
    assert said(profiles[None], profiles[True]) == [
        "(root) now resharded after forward and gathered again in backward: +1 call, +512 B",
        "likely: reshard_after_forward became True (FSDP1: FULL_SHARD), or the unit is no longer a "
        "root: more traffic, less memory",
    ]
    assert said(profiles[True], profiles[False])[0] == (
        "(root), layers.{0..1} no longer resharded after forward, so not gathered again in "
        "backward: -3 calls, -1.5 KiB"
    )


def test_gradients_per_micro_batch_are_explained(record, device_mesh):
    # cosmos-framework 161, verl PR 7095.
    model = shard(Model(), device_mesh())

    def train(*, sync_each):
        for n in range(4):
            model.set_requires_gradient_sync(sync_each or n == 3)
            step(model)

    reviewed = record(model, lambda: train(sync_each=False))
    regressed = record(model, lambda: train(sync_each=True))
    assert (count(reviewed, "reduce_scatter"), count(regressed, "reduce_scatter")) == (3, 12)
    assert count(reviewed, "all_gather") == count(regressed, "all_gather") == 20
    assert said(reviewed, regressed) == [
        "gradients of (root), layers.{0..1} reduced 1 -> 4 times "
        "(reduce_scatter), gathers unchanged",
        "likely: reduced in each micro-batch: call set_requires_gradient_sync(False), or run "
        "backward inside no_sync() with FSDP1, for all micro-batches but the last",
    ]


@pytest.mark.distributed(world_size=4)
def test_replicas_per_micro_batch_are_explained(record, device_mesh):
    # cosmos-framework 161, torchtitan 1929, VeOmni 781.
    model = shard(Model(), device_mesh(replicate=2, shard=2))

    def train(*, sync_each):
        for n in range(2):
            model.set_requires_all_reduce(sync_each or n == 1)
            step(model)

    reviewed = record(model, lambda: train(sync_each=False))
    regressed = record(model, lambda: train(sync_each=True))
    assert (count(reviewed, "all_reduce"), count(regressed, "all_reduce")) == (3, 6)
    likely = (
        "likely: reduced in each micro-batch: call set_requires_all_reduce(False) for all "
        "micro-batches but the last"
    )
    assert said(reviewed, regressed) == [
        "gradients of (root), layers.{0..1} reduced 1 -> 2 times (all_reduce), gathers unchanged",
        likely,
    ]
    assert f"`{likely}`" in README.replace("\n", " ")


def test_head_gathered_per_loss_chunk_is_explained(record, device_mesh):
    # trl 6076, whose hand-made guard (6172) could not be made to fail.
    def build():
        model = Model()
        fully_shard(model.head, mesh=device_mesh())
        return shard(model, device_mesh())

    model, chunked = build(), build()
    reviewed = record(model, lambda: step(model))
    regressed = record(chunked, lambda: step(chunked, chunks=4))
    assert said(reviewed, regressed)[1] == (
        "likely: called several times in one forward, e.g. by a loop or a chunked loss: leave it "
        "in its parent's unit, or set its reshard_after_forward to False"
    )


@pytest.mark.parametrize("advice", ["parent", "kept"])
def test_advice_for_a_chunked_loss_helps(record, device_mesh, advice):
    def count_gathers(*, is_advised):
        model = Model()
        if not (is_advised and advice == "parent"):
            fully_shard(model.head, mesh=device_mesh(), reshard_after_forward=not is_advised)
        shard(model, device_mesh())
        return count(record(model, lambda: step(model, chunks=4)), "all_gather")

    assert count_gathers(is_advised=True) < count_gathers(is_advised=False)


def test_embedding_gathered_in_backward_is_explained(record, device_mesh):
    # OLMo-core 194.
    model = TokenModel()
    fully_shard(model.embed, mesh=device_mesh())
    shard(model, device_mesh())

    def train(*, in_backward):
        model.embed.set_unshard_in_backward(unshard_in_backward=in_backward)
        model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()

    reviewed = record(model, lambda: train(in_backward=False))
    regressed = record(model, lambda: train(in_backward=True))
    assert count(regressed, "all_gather") == count(reviewed, "all_gather") + 1
    told, likely = said(reviewed, regressed)
    assert told.startswith("embed now gathered in backward: 1 call of ")
    assert likely.startswith(
        "likely: set_unshard_in_backward(False) is no longer called on the unit"
    )
    assert said(regressed, reviewed) == [
        "embed no longer gathered in backward",
        "likely: set_unshard_in_backward(False) is now called on the unit",
    ]


def test_a_full_state_dict_in_each_step_is_explained(record, device_mesh):
    model = shard(Model(), device_mesh())

    def train(*, saved):
        step(model)
        if saved:
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    reviewed = record(model, lambda: train(saved=False))
    regressed = record(model, lambda: train(saved=True))
    told, likely = said(reviewed, regressed)
    assert told.startswith(
        "embed, head, layers.{0..1}.down and 1 more: full parameters gathered outside "
    )
    assert "a full state dict (e.g. for a checkpoint)" in likely


def test_reentrant_checkpoint_prefetch_gathers_twice(record, device_mesh):
    # NeMo Automodel PR 3411.
    def build(*, reentrant):
        model = shard(Model(blocks=4, reentrant=reentrant), device_mesh())
        for layer, following in itertools.pairwise(model.layers):
            layer.set_modules_to_forward_prefetch([following])
        return model

    models = [build(reentrant=reentrant) for reentrant in (False, True)]
    reviewed, regressed = (record(model, lambda model=model: step(model)) for model in models)
    assert count(regressed, "all_gather") > count(reviewed, "all_gather")
    assert said(reviewed, regressed)[1] == (
        "likely: reentrant checkpointing gathers the units a second time (if it wraps FSDP1's "
        "units, or after set_modules_to_forward_prefetch): pass use_reentrant=False"
    )


def test_frozen_backbone_gathered_again_is_explained(record, device_mesh):
    # LoRA: UniRL PR 321. Micro-batches of half the size in place of one.
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
            self.adapter = nn.Linear(WIDTH, 1, bias=False)

        def forward(self, x):
            return self.base(x) + self.adapter(x)

    def build(*, kept):
        model = nn.Sequential(Adapted(), Adapted())
        for part in model:
            fully_shard(part.adapter, mesh=device_mesh())
            fully_shard(part, mesh=device_mesh(), reshard_after_forward=not kept)
        return fully_shard(model, mesh=device_mesh())

    def train(model):
        for _ in range(4):
            model(torch.ones(1, WIDTH)).sum().backward()

    models = [build(kept=kept) for kept in (True, False)]
    reviewed, regressed = (record(model, lambda model=model: train(model)) for model in models)
    assert said(reviewed, regressed) == [
        "modules {0..1} now resharded after forward and gathered again in backward: +8 calls, +2.0 "
        "KiB",
        "likely: reshard_after_forward became True (FSDP1: FULL_SHARD), or the unit is no longer a "
        "root: more traffic, less memory",
    ]


def test_frozen_layer_is_prefetched_in_backward(record, device_mesh):
    def build(*, frozen):
        model = Model()
        model.embed.requires_grad_(not frozen)
        model.layers[0].requires_grad_(not frozen)
        return shard(model, device_mesh())

    model = build(frozen=True)

    def without_gradient_of_the_input():
        model(torch.ones(4, WIDTH)).sum().backward()

    profile = record(model, without_gradient_of_the_input)
    gathers = [
        row for row in profile.collectives if row.owner == "layers.0" and row.phase == "backward"
    ]
    # Its gradients are never computed, and its parameters gathered all the same.
    assert [(row.what, row.count) for row in gathers] == [("all_gather", 1)]


def test_leaving_out_no_sync_of_fsdp1_is_explained(record):
    # pytorch 75892.
    model = FullyShardedDataParallel(
        Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )

    def train(*, accumulate):
        if accumulate:
            with model.no_sync():
                step(model)
        else:
            step(model)
        step(model)

    reviewed = record(model, lambda: train(accumulate=True))
    regressed = record(model, lambda: train(accumulate=False))
    assert (count(reviewed, "reduce_scatter"), count(regressed, "reduce_scatter")) == (3, 6)
    lines = said(reviewed, regressed)
    assert "reduced 1 -> 2 times (reduce_scatter), gathers unchanged" in lines[0]
    assert "run backward inside no_sync() with FSDP1" in lines[-1]


def test_a_root_that_is_not_sharded_is_explained(record, device_mesh):
    # torchtitan 1547: each block is a root of its own, and no gradient of the rest is reduced.
    model = shard(Model(), device_mesh())
    rootless = Model()
    for layer in rootless.layers:
        fully_shard(layer, mesh=device_mesh())
    reviewed = record(model, lambda: step(model))
    regressed = record(rootless, lambda: step(rootless))
    assert said(reviewed, regressed) == [
        "breaks training: (root) no longer gathered or reduced, gathers of other units unchanged "
        "in forward",
        "layers.{0..1} no longer resharded after forward, so not gathered again in backward: -2 "
        "calls, -1.0 KiB",
        "likely: fully_shard on the root is missing: its parameters are not sharded, FSDP does not "
        "reduce their gradients, and each unit below becomes a root; or the root's forward is not "
        "called",
        "peak gathered: 1_536 B -> 1_024 B",
    ]


def test_newly_replicated_parameters_are_explained(record):
    # The silent form: another sharding strategy, the same loss.
    def build(strategy):
        return FullyShardedDataParallel(
            Model(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            sharding_strategy=strategy,
        )

    model = build(ShardingStrategy.FULL_SHARD)
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        replicated = build(ShardingStrategy.NO_SHARD)
    reviewed = record(model, lambda: step(model))
    regressed = record(replicated, lambda: step(replicated))
    assert said(reviewed, regressed) == [
        "(root), layers.{0..1} replicated instead of sharded: gradients all-reduced, parameters no "
        "longer gathered",
        "peak gathered: 1_536 B -> 0 B",
    ]


def test_a_needless_gather_of_a_dtensor_is_explained(record, device_mesh):
    # pytorch 167106 and its like: an output layout that nobody needs.
    def build(layout):
        model = nn.Sequential(Block(), Block())
        for part in model:
            plan = {
                "up": ColwiseParallel(output_layouts=layout),
                "down": RowwiseParallel(input_layouts=layout),
            }
            parallelize_module(part, device_mesh(tp=2), plan)
        return model

    models = [build(layout) for layout in (Shard(-1), Replicate())]

    reviewed, regressed = (record(model, lambda model=model: step(model)) for model in models)
    assert said(reviewed, regressed) == [
        "{0..1}.up in forward: now redistributed (Shard(dim=1)) -> (Replicate()) by "
        "all_gather[tp]: 2 calls, 256 B in total, at tests/models.py:N",
        "{0..1}.down in backward: now redistributed (Shard(dim=1)) -> (Replicate()) by "
        "all_gather[tp]: 2 calls, 256 B in total",
        "likely: the module's layouts in the parallelize_module plan no longer match those of the "
        "modules before or after it, or redistribute() or full_tensor() is called",
    ]


def test_gathering_a_parameter_to_log_it_is_explained(record, device_mesh):
    model = shard(Model(), device_mesh())

    def train(*, logged):
        step(model)
        if logged:
            model.head.weight.full_tensor().norm()

    reviewed = record(model, lambda: train(logged=False))
    regressed = record(model, lambda: train(logged=True))
    assert said(reviewed, regressed) == [
        "head: full parameters gathered outside forward and backward: +1 call, +256 B, "
        "at tests/regressions/test_reported.py:N",
        "likely: full_tensor() or redistribute(), a full state dict (e.g. for a checkpoint), or a "
        "DTensor that is printed or logged",
    ]


def test_averaged_loss_is_recorded_outside_the_model(record, device_mesh):
    model = shard(Model(), device_mesh())

    def train(*, averaged):
        loss = model(torch.ones(4, WIDTH)).sum()
        if averaged:
            dist.all_reduce(loss.detach().clone())
        loss.backward()

    reviewed = record(model, lambda: train(averaged=False))
    regressed = record(model, lambda: train(averaged=True))
    assert said(reviewed, regressed) == [
        "(no-module) outside forward and backward: all_reduce[dp] 0 -> 1 (+1), 0 -> 4 B per rank, "
        "called from tests/regressions/test_reported.py:N",
    ]


# What sends the same bytes in the same number of calls.


def changed(reviewed, regressed):
    """Whether the text of a snapshot differs, and what is said."""
    lines = [format_profile(profile).splitlines()[1:] for profile in (reviewed, regressed)]
    assert lines[0] != lines[1]
    return said(reviewed, regressed)


def test_a_prefetch_that_was_dropped_is_a_difference(record, device_mesh):
    # Megatron-LM issue 5513 guards by hand what is gathered while another layer computes.
    def build(*, prefetch):
        model = shard(Model(blocks=4), device_mesh())
        for layer, following in itertools.pairwise(model.layers):
            layer.set_modules_to_forward_prefetch([following] if prefetch else [])
        return model

    models = [build(prefetch=prefetch) for prefetch in (True, True, False)]
    reviewed, same, regressed = (record(model, lambda model=model: step(model)) for model in models)
    assert format_profile(reviewed) == format_profile(same)
    assert changed(reviewed, regressed) == [
        "layers.{1..3} in forward: all_gather[dp] no longer prefetched (1 -> 0 units ahead of use)",
        "likely: less forward prefetching (set_modules_to_forward_prefetch; FSDP1: "
        "forward_prefetch)",
    ]


def test_unshard_that_becomes_synchronous_differs(record, device_mesh):
    model = shard(Model(), device_mesh())

    def run(*, is_async):
        model.layers[0].unshard(async_op=is_async)
        step(model)

    reviewed, regressed = (
        record(model, lambda is_async=is_async: run(is_async=is_async))
        for is_async in (True, False)
    )
    assert changed(reviewed, regressed) == [
        "layers.0 outside forward and backward: all_gather[dp] now synchronous: the caller waits "
        "for it"
    ]


@pytest.mark.distributed(world_size=4)
def test_a_mesh_turned_around_is_a_difference(record):
    # torchtitan PR 286: tensor parallelism across machines.
    def run(names):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        torch.manual_seed(0)
        model = Model()
        for block in model.layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        shard(model, mesh["dp"])
        return record(model, lambda: step(model))

    assert changed(run(("dp", "tp")), run(("tp", "dp"))) == [
        "mesh: dp=2 stride 2, tp=2 stride 1 -> dp=2 stride 1, tp=2 stride 2",
        "likely: mesh axes dp and tp are swapped: dp is now the inner one",
    ]


def test_another_dtype_of_equal_size_is_a_difference(record, device_mesh):
    def build(dtype):
        model, policy = Model(), MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for module in (*model.layers, model):
            fully_shard(module, mesh=device_mesh(), mp_policy=policy)
        return model

    models = [build(dtype) for dtype in (torch.float16, torch.bfloat16)]
    reviewed, regressed = (record(model, lambda model=model: step(model)) for model in models)
    assert changed(reviewed, regressed) == [
        "parameters[dp], gradients[dp] float16 -> bfloat16, same bytes",
        "likely: MixedPrecisionPolicy, or the dtype of the model's parameters",
    ]


def test_changed_source_and_peer_differ(record):
    def run(source, to):
        rank, others = dist.get_rank(), dist.get_world_size()
        dist.broadcast(torch.ones(4), source)
        sent = dist.isend(torch.ones(4), (rank + to) % others)
        dist.recv(torch.ones(4), (rank - to) % others)
        sent.wait()

    model = nn.Linear(1, 1)
    profiles = [record(model, lambda source=source: run(source, 1)) for source in (0, 1)]
    assert changed(*profiles) == [
        "(no-module) outside forward and backward: broadcast[world] x1 of 16 B float32 root 0 -> "
        "x1 of 16 B float32 root 1, called from tests/regressions/test_reported.py:N"
    ]


def test_sizes_that_cancel_are_a_difference(record):
    def run(*sizes):
        for size in sizes:
            dist.all_reduce(torch.ones(size))

    model = nn.Linear(1, 1)
    reviewed, regressed = (
        record(model, lambda sizes=sizes: run(*sizes)) for sizes in ((8, 8), (1, 15))
    )
    assert changed(reviewed, regressed) == [
        "(no-module) outside forward and backward: all_reduce[world] x2 of 32 B float32 -> x1 of 4 "
        "B float32, x1 of 60 B float32, called from tests/regressions/test_reported.py:N"
    ]
