"""``CommMode().saving``: record a block of a launched job, without disturbing the job."""

import json
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from models import TokenModel, shard
from running import wait_for

from pytest_fsdp_comm import CommMode, UnseenCollectivesWarning, record_script
from pytest_fsdp_comm.comm.json import load_recordings
from pytest_fsdp_comm.command_line.documents import read_document
from pytest_fsdp_comm.command_line.main import main
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.gathering import RankFiles
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.recording.active import has_running_recording

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "record.md").read_text()
RANKS = 3
gloo = pytest.mark.distributed(world_size=RANKS, backend="gloo")


def step(model):
    model(torch.arange(4).view(1, 4)).sum().backward()


def until_written(path):
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(extend_under_load(60))
    wait_for(path.exists)


@pytest.fixture
def shared(tmp_path_factory):
    """A directory that all ranks of a test share; each has a basetemp of its own."""
    return tmp_path_factory.getbasetemp().parent


@gloo
def test_saving_matches_a_test_and_folds_equal_ranks(
    comm_mode, device_mesh, dist_info, shared, monkeypatch
):
    model = shard(TokenModel(3), device_mesh())
    step(model)
    path = shared / "step.json"
    with comm_mode(model):
        step(model)
    merged = comm_mode.merged_profile()
    # The loop shown on the page, which records one step.
    (loop,) = [
        code for code in re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE) if "saving" in code
    ]
    given = {}
    exec(loop, given)  # noqa: S102  # as readers would
    monkeypatch.chdir(shared)
    batches = [torch.arange(4).view(1, 4)] * 5
    given["train"](model, torch.optim.SGD(model.parameters()), batches)
    until_written(path)
    if dist_info.rank == 0:
        text = path.read_text()
        assert read_document(path).profile == merged
        recordings = load_recordings(text)
        assert sorted(one.rank for one in recordings) == [*range(RANKS)]
        assert len(json.loads(text)["value"]["recordings"]) < RANKS
        assert not [*shared.glob(".step*")]


@gloo
def test_saving_warns_on_own_errors_raises_jobs(device_mesh, dist_info, tmp_path):
    model = shard(TokenModel(3), device_mesh())
    path = tmp_path / "step.json"
    with (
        pytest.warns(UnseenCollectivesWarning, match="comm_mode recorded nothing: .*, got str"),
        CommMode().saving("model", path),
    ):
        step(model)
    with pytest.raises(ZeroDivisionError), CommMode().saving(model, path):
        raise ZeroDivisionError
    assert not has_running_recording()
    (tmp_path / "file").touch()
    unwritable = tmp_path / "file" / "step.json"
    with (
        pytest.warns(UnseenCollectivesWarning, match=f"comm_mode did not write {unwritable}: "),
        CommMode().saving(model, unwritable),
    ):
        step(model)
    with (
        pytest.warns(UnseenCollectivesWarning, match=r"expects a path that ends with \.json"),
        CommMode().saving(model, tmp_path / "step.comm"),
    ):
        step(model)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    assert dist_info.world_size == RANKS


@gloo
def test_saving_with_error_warnings_writes_gaps(device_mesh, dist_info, shared, capfd):
    model = shard(TokenModel(3), device_mesh())
    backend = device_mesh().get_group()._get_backend(torch.device("cpu"))
    path = shared / "step.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnseenCollectivesWarning)
        for given, where in (("model", path), (model, None), (model, shared / "step.comm")):
            with CommMode().saving(given, where):
                step(model)
        with CommMode().saving(model, path):
            step(model)
            backend.allreduce([torch.ones(1)]).wait()  # below torch's dispatcher
        until_written(path)
    said = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        *["comm_mode recorded nothing"] * 3,
        "comm_mode has gaps",
    ]
    if dist_info.rank == 0:
        assert read_document(path).profile.gaps


@gloo
def test_incomplete_step_ends_with_error_warnings(comm_mode, device_mesh):
    backend = device_mesh().get_group()._get_backend(torch.device("cpu"))
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())

    def train():
        for _ in range(4):
            backend.allreduce([torch.ones(1)]).wait()  # below torch's dispatcher
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnseenCollectivesWarning)
        record_script(comm_mode, train)
    assert comm_mode.recording.gaps


def test_ranks_that_left_nothing_are_named(tmp_path):
    files = RankFiles(tmp_path / "step.json")
    files.publish(1, "text")
    with pytest.raises(
        RecordingError, match=r"recordings of 4 ranks .* ranks 0, 2-3 had written none; the"
    ):
        files.collect(4, timeout_s=0)
    for rank in (0, 2, 3):
        files.publish(rank, "text" if rank else "other")
    found = files.collect(4, timeout_s=0)
    assert found == {0: "other", 1: "text", 2: "text", 3: "text"}
    assert found[1] is found[3]
    assert [*tmp_path.iterdir()] == []


def test_thousands_of_ranks_match_a_simulated_rank(tmp_path, capsys):
    from sample_files import recording

    from pytest_fsdp_comm.comm.json import dump_recordings, join_recordings
    from pytest_fsdp_comm.snapshots.documents import SnapshotText

    ranks = recording(0).world_size
    own = dump_recordings([recording(0)])
    (tmp_path / "step.json").write_text(join_recordings(dict.fromkeys(range(ranks), own)))
    (tmp_path / "one.json").write_text(own)
    one = SnapshotText.from_profile(read_document(tmp_path / "one.json").profile, where="one.comm")
    (tmp_path / "one.comm").write_text(one)
    assert "ranks 0\n" in one
    assert main(["diff", str(tmp_path / "one.comm"), str(tmp_path / "step.json")]) == 0
    out, err = capsys.readouterr()
    assert not out
    assert err.endswith(f"step.json, because {tmp_path}/one.comm has no other rank\n")
