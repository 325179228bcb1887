"""Recorded collectives equal those in torch.profiler and counts made by hand."""

import pytest
import torch
from models import BLOCK_NBYTES, FLOAT, ROOT_NBYTES, WIDTH, Model, shard, step
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile
from torch_facts import SENT_ON_ONE_RANK, needs_replicas_of_fsdp2

BLOCKS = 3

# The profiler shows the sizes of a call's tensor arguments: the tensor that every rank contributes.
KINDS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
}

SILENT = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


def profiled(comm_mode, model):
    """Records one step and profiles the next: (kind, numel of the contribution) of each call.

    Not the same step: under any dispatch mode the profiler sees each call twice.
    """
    with comm_mode(model):
        step(model)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step(model)
    seen = [
        (KINDS[event.name], numel(event))
        for event in sorted(profiler.events(), key=lambda event: event.time_range.start)
        if is_collective(event) and not is_collective(event.cpu_parent)
    ]
    recorded = [
        (event.kind, None if event.op == "c10d.allreduce_" else event.nbytes_sent // FLOAT)
        for event in comm_mode.events
    ]
    return recorded, seen


def is_collective(event):
    """A functional collective calls a c10d operation in C++, which is the same one."""
    namespaces = ("c10d::", "_c10d_functional::")
    return event is not None and event.name.startswith(namespaces) and event.name not in SILENT


def numel(event):
    """Elements of the contribution; None for allreduce_, whose list of tensors has no shape."""
    if event.name == "c10d::allreduce_":
        return None
    # _allgather_base_(output, input, ...) and _reduce_scatter_base_(output, input, ...).
    return torch.Size(event.input_shapes[1 if event.name.endswith("_base_") else 0]).numel()


def rows(comm_mode):
    return {
        (row.phase.value, row.owner, row.what, row.axis): (row.count, row.nbytes)
        for row in comm_mode.profile.collectives
    }


def layers(phase, kind, axis, count, nbytes):
    return {(phase, f"layers.{n}", kind, axis): (count, nbytes) for n in range(BLOCKS)}


@pytest.mark.upstream
@pytest.mark.distributed(world_size=[2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_sends_what_the_profiler_saw(comm_mode, device_mesh, reshard):
    model = shard(Model(BLOCKS), device_mesh(), reshard_after_forward=reshard)
    recorded, seen = profiled(comm_mode, model)
    assert recorded == seen
    # Forward: root and blocks; backward: blocks again, since the root does not reshard.
    again = layers("backward", "all_gather", "dp", 1, BLOCK_NBYTES) if reshard else {}
    assert len(recorded) == (1 + BLOCKS) + len(again) + (1 + BLOCKS)
    assert rows(comm_mode) == {
        ("forward", "", "all_gather", "dp"): (1, ROOT_NBYTES),
        ("backward", "", "reduce_scatter", "dp"): (1, ROOT_NBYTES),
        **layers("forward", "all_gather", "dp", 1, BLOCK_NBYTES),
        **again,
        **layers("backward", "reduce_scatter", "dp", 1, BLOCK_NBYTES),
    }


@pytest.mark.upstream
@needs_replicas_of_fsdp2
@pytest.mark.distributed(world_size=4)
def test_hsdp_all_reduces_reduce_scattered_shard(comm_mode, device_mesh):
    model = shard(Model(BLOCKS), device_mesh(replicate=2, shard=2))
    recorded, seen = profiled(comm_mode, model)
    assert recorded == seen
    # The all-reduce over the other axis sends the shard that the reduce-scatter left.
    assert rows(comm_mode) == {
        ("forward", "", "all_gather", "shard"): (1, ROOT_NBYTES),
        ("backward", "", "reduce_scatter", "shard"): (1, ROOT_NBYTES),
        ("backward", "", "all_reduce", "replicate"): (1, ROOT_NBYTES // 2),
        **layers("forward", "all_gather", "shard", 1, BLOCK_NBYTES),
        **layers("backward", "all_gather", "shard", 1, BLOCK_NBYTES),
        **layers("backward", "reduce_scatter", "shard", 1, BLOCK_NBYTES),
        **layers("backward", "all_reduce", "replicate", 1, BLOCK_NBYTES // 2),
    }


@pytest.mark.upstream
@pytest.mark.distributed(world_size=[2, 4])
def test_tensor_parallel_fsdp_matches_profiler(comm_mode, device_mesh, dist_info):
    mesh = device_mesh(dp=-1, tp=2)
    model = Model(BLOCKS)
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    shard(model, mesh["dp"])
    recorded, seen = profiled(comm_mode, model)
    assert recorded == seen
    activation = 2 * WIDTH * FLOAT
    tensor_parallel = {
        # Rowwise sums its output in forward, Colwise its input's gradient in backward.
        **{
            ("forward", f"layers.{n}.down", "all_reduce", "tp"): (1, activation)
            for n in range(BLOCKS)
        },
        **{
            ("backward", f"layers.{n}.up", "all_reduce", "tp"): (1, activation)
            for n in range(BLOCKS)
        },
    }
    half = BLOCK_NBYTES // 2
    data_parallel = {
        ("forward", "", "all_gather", "dp"): (1, ROOT_NBYTES),
        ("backward", "", "reduce_scatter", "dp"): (1, ROOT_NBYTES),
        **layers("forward", "all_gather", "dp", 1, half),
        **layers("backward", "all_gather", "dp", 1, half),
        **layers("backward", "reduce_scatter", "dp", 1, half),
    }
    # With two ranks the data-parallel axis has one, and nothing to send.
    sent = {
        row: count
        for row, count in data_parallel.items()
        if dist_info.world_size == 4 or SENT_ON_ONE_RANK[row[2]]
    }
    assert rows(comm_mode) == tensor_parallel | sent
