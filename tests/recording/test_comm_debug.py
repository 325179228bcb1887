"""CommMode answers CommDebugMode's questions: alike where that is right, better elsewhere."""

import gc
import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import Block, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from pytest_fsdp_comm import RecordingError

fake = pytest.mark.distributed(world_size=4, backend="fake")
# Of CommDebugMode's hooks, and of FSDP about outputs that it takes for views under them.
ignore_hook_warning = pytest.mark.filterwarnings("ignore::UserWarning")


def build(mesh, blocks, sharded, parallel, reshard):
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    for number in sorted(parallel):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model[number % blocks], mesh["tp"], plan)
    for number in sorted(sharded):
        if not isinstance(model[number % blocks], torch.distributed.fsdp.FSDPModule):
            fully_shard(model[number % blocks], mesh=mesh["dp"], reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh["dp"])


@fake
@ignore_hook_warning
def test_totals_are_equal_on_random_models(comm_mode, device_mesh):
    mesh = device_mesh(dp=2, tp=2)
    numbers = st.sets(st.integers(0, 3))

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(blocks=st.integers(1, 4), sharded=numbers, parallel=numbers, reshard=st.booleans())
    def check(blocks, sharded, parallel, reshard):
        model = build(mesh, blocks, sharded, {n % blocks for n in parallel}, reshard)
        with comm_mode(model):
            step(model)
        theirs = CommDebugMode()
        with theirs:
            step(model)
        assert comm_mode.get_total_counts() == theirs.get_total_counts()
        assert comm_mode.get_comm_counts() == dict(theirs.get_comm_counts())

    check()


@fake
@ignore_hook_warning
def test_prefetch_misleads_the_counts_of_torch_but_not_ours(comm_mode, device_mesh):
    model = build(device_mesh(dp=2, tp=2), 3, {0, 1, 2}, set(), reshard=True)
    gather = torch.ops.c10d._allgather_base_
    with comm_mode(model):
        step(model)
    ours = comm_mode.get_comm_module_counts()
    # Each block gathers its own parameters once in backward.
    for number in range(3):
        assert ours[f"FSDPSequential.{number}"]["backward"][gather] == 1
    assert ours["FSDPSequential"]["backward"][gather] == 3
    assert ours["Global"]["forward"] == {gather: 3}
    theirs = CommDebugMode()
    with theirs:
        step(model)
    counts = theirs.comm_module_counts
    # Block 0 was prefetched by block 1, and torch books it there.
    first = counts["FSDPSequential.0"]["backward"] if "FSDPSequential.0" in counts else {}
    assert first.get(gather, 0) == 0


@pytest.mark.distributed(world_size=2)
def test_torch_counts_neither_barriers_nor_point_to_point(comm_mode, dist_info):
    theirs = CommDebugMode()
    for mode in (comm_mode, theirs):
        with mode:
            dist.barrier()
            if dist_info.rank == 0:
                dist.send(torch.ones(1), 1)
            else:
                dist.recv(torch.ones(1), 0)
    assert comm_mode.get_total_counts() == 2
    assert theirs.get_total_counts() == 0


@fake
@ignore_hook_warning
def test_parameters_placements_table_and_files_are_offered(comm_mode, device_mesh, tmp_path):
    model = build(device_mesh(dp=2, tp=2), 1, {0}, set(), reshard=True)
    with comm_mode(model):
        step(model)
    assert set(comm_mode.get_parameter_info()) == {"FSDPSequential.0.up", "FSDPSequential.0.down"}
    sharding = comm_mode.get_sharding_info()
    assert {key: str(value) for key, value in sharding.items()} == {
        "FSDPSequential.0.up.weight": "(Shard(dim=0),)",
        "FSDPSequential.0.down.weight": "(Shard(dim=0),)",
    }
    table = comm_mode.generate_comm_debug_tracing_table(noise_level=0)
    assert "FSDPSequential.0\n  forward c10d._allgather_base_: 1\n" in table
    comm_mode.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"), noise_level=1)
    assert "forward 0: all_gather[dp] 512 B float32 at " in (tmp_path / "log.txt").read_text()
    comm_mode.generate_json_dump(str(tmp_path / "log.json"))
    assert json.loads((tmp_path / "log.json").read_text())["kind"] == "recording"
    counts = comm_mode.get_comm_counts()
    counts.clear()
    assert comm_mode.get_comm_counts()
    del model
    gc.collect()
    with pytest.raises(RecordingError, match="recorded model and its parameters no longer exist"):
        comm_mode.get_parameter_info()


def test_misuse_without_ranks_is_an_error(comm_mode):
    with pytest.raises(RecordingError, match="no recording yet; run the code in"):
        comm_mode.get_total_counts()
    with pytest.raises(RecordingError, match="or a list of them, got str; pass the model"):
        comm_mode("model")
    with pytest.raises(RecordingError, match="entered without a process group"), comm_mode:
        pass
    with pytest.raises(RecordingError, match="no longer exists; keep a reference"):
        comm_mode(nn.Linear(1, 1)).__enter__()


@fake
def test_misuse_within_a_recording_is_an_error(comm_mode):
    inside = pytest.raises(RecordingError, match="is already recording and cannot be nested")
    with comm_mode, inside:
        comm_mode.__enter__()
    with pytest.raises(RecordingError, match="there is no phase 'forwards'; expected one of"):
        comm_mode.counts(phase="forwards")
