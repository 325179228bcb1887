"""Code of a user's tests: annotated fixtures, values that are passed on, errors that are caught."""

from collections import Counter
from typing import assert_type

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_comm import (
    Collective,
    CommMode,
    CommProfile,
    CommSnapshot,
    DistInfo,
    FsdpCommError,
    MakeDeviceMesh,
    Phase,
    Recording,
    RecordingError,
    Reshard,
    ShardTree,
    TreeFactory,
)


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def bytes_by_phase(recording: Recording) -> Counter[Phase]:
    counted: Counter[Phase] = Counter()
    for event in recording.collectives:
        assert_type(event, Collective)
        counted[event.phase] += event.nbytes
    return counted


def early(events: tuple[Collective, ...]) -> list[str]:
    return [event.owner or "" for event in events if event.ahead is not None and event.ahead > 0]


@pytest.fixture
def model(device_mesh: MakeDeviceMesh, dist_info: DistInfo) -> nn.Sequential:
    layers = (nn.Linear(8, 8, device=dist_info.device) for _ in range(2))
    return shard(nn.Sequential(*layers), device_mesh(dp=-1))


@pytest.mark.distributed(world_size=[2, 4], backend="fake", timeout_s=30)
def test_step(
    model: nn.Sequential,
    comm_mode: CommMode,
    fsdp_tree: TreeFactory,
    comm_snapshot: CommSnapshot,
    dist_info: DistInfo,
) -> None:
    with comm_mode(model) as recorded, torch.enable_grad():
        model(torch.ones(1, 8, device=dist_info.device)).sum().backward()
    assert_type(recorded, CommMode)
    assert_type(recorded.counts("all_gather", phase=Phase.FORWARD, owner="{0..1}"), int)
    assert_type(recorded.nbytes(axis="dp"), int)
    assert_type(recorded.reshards, tuple[Reshard, ...])
    assert_type(recorded.profile, CommProfile)
    assert_type(recorded.peak_gathered_nbytes, int)
    assert bytes_by_phase(recorded.recording)[Phase.BACKWARD] > 0
    assert early(recorded.events) == ["0"]
    tree = fsdp_tree(model)
    assert_type(tree, ShardTree)
    assert [finding.code for finding in tree.findings] == []
    assert {"comm": comm_mode, "tree": tree} == comm_snapshot
    assert comm_mode == comm_snapshot(name="again", allow_value_dependent=True)


def test_errors_are_caught_by_their_base(comm_mode: CommMode) -> None:
    with pytest.raises(RecordingError) as caught:
        _ = comm_mode.events
    assert_type(caught.value, RecordingError)
    assert isinstance(caught.value, FsdpCommError)


@pytest.mark.distributed(world_size=2, backend="fake")
def test_old_names_stay(comm_mode: CommMode, model: nn.Module) -> None:
    with comm_mode:
        model(torch.ones(1, 8))
    assert_type(comm_mode.get_total_counts(), int)
