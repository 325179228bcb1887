"""``comm_mode.save``: the recordings of all ranks in one file."""

import pytest
import torch
from models import TokenModel, shard

from pytest_fsdp_comm.comm.json import load_recordings
from pytest_fsdp_comm.errors import FsdpCommError, RecordingError


@pytest.mark.distributed(world_size=2, backend="gloo")
def test_one_process_writes_what_all_ranks_recorded(comm_mode, device_mesh, dist_info, tmp_path):
    model = shard(TokenModel(3), device_mesh())
    with pytest.raises(RecordingError, match="has no recording yet"):
        comm_mode.save(tmp_path / "early.json")
    with comm_mode(model):
        with pytest.raises(RecordingError, match="inside the block"):
            comm_mode.save(tmp_path / "early.json")
        model(torch.arange(4).view(1, 4)).sum().backward()
    with pytest.raises(FsdpCommError, match=r"writes \.json files, got '.*\.txt'"):
        comm_mode.save(tmp_path / "step.txt")
    comm_mode.save(str(tmp_path / "step.json"))
    if dist_info.rank:
        assert list(tmp_path.iterdir()) == []
        return
    recordings = load_recordings((tmp_path / "step.json").read_text())
    assert [recording.rank for recording in recordings] == [0, 1]
    assert recordings[0] == comm_mode.recording
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]
