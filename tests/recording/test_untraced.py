"""CommDebugMode's methods of the fixture, which does not trace operations."""

import pytest
import torch
from models import Block
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.comm_mode import CommMode

fake = pytest.mark.distributed(world_size=4, backend="fake")


def parallel_model(mesh):
    model = nn.Sequential(Block(), Block())
    plan = {}
    for number in range(2):
        plan |= {f"{number}.up": ColwiseParallel(), f"{number}.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


@fake
def test_untraced_block_matches_traced_block(comm_mode, device_mesh):
    model = parallel_model(device_mesh(tp=4)["tp"])
    batch = torch.randn(2, 8)
    traced = CommMode()
    for mode in (comm_mode, traced):
        with mode(model):
            model(batch).sum().backward()
    assert comm_mode.get_comm_module_counts() == traced.get_comm_module_counts()
    assert comm_mode.get_sharding_info() == traced.get_sharding_info()
    assert comm_mode.get_parameter_info().keys() == traced.get_parameter_info().keys()
    ours, theirs = comm_mode.advanced_module_tracker, traced.advanced_module_tracker
    assert ours.module_helper_dict == theirs.module_helper_dict
    assert ours.module_parents_dict == theirs.module_parents_dict
    assert len(ours.module_helper_dict) > len(list(model.modules()))
    table = comm_mode.generate_comm_debug_tracing_table(noise_level=0)
    assert table == traced.generate_comm_debug_tracing_table(noise_level=0)
    assert "all_reduce" in table


@fake
def test_operations_raise_without_trace(comm_mode, device_mesh, tmp_path):
    model = parallel_model(device_mesh(tp=4)["tp"])
    questions = [
        lambda: comm_mode.comm_module_operation_counts,
        lambda: comm_mode.generate_comm_debug_tracing_table(noise_level=1),
        lambda: comm_mode.generate_json_dump(str(tmp_path / "x.json")),
        lambda: comm_mode.log_comm_debug_tracing_table_to_file(str(tmp_path / "x.txt")),
    ]
    with comm_mode(model):
        model(torch.randn(2, 8))
    for ask in questions:
        with pytest.raises(RecordingError, match=r"with comm_mode\(model, trace_operations=True\)"):
            ask()
    assert list(tmp_path.iterdir()) == []
    with comm_mode(model, trace_operations=True):
        model(torch.randn(2, 8))
    for ask in questions:
        ask()
    assert len(comm_mode.comm_module_operation_counts) > 1
    # For one block only.
    with comm_mode(model):
        model(torch.randn(2, 8))
    with pytest.raises(RecordingError, match="were not traced"):
        questions[0]()
