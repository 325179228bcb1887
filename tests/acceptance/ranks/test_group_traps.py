"""Process groups that tests destroy, replace or miss, and threads from before the fork."""

import re

import pytest
from running import stories

SOURCE = """
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

# Several threads do maths at import.
torch.set_num_threads(4)
torch.rand(700, 700) @ torch.rand(700, 700)

on_ranks = pytest.mark.distributed(world_size=2, timeout_s=60)
on_kept_ranks = pytest.mark.distributed(world_size=2, timeout_s=60, scope="module")

def note(name):
    Path(f"{name}.{os.environ['RANK']}").write_text(str(os.getpid()))

def replace_group(tmp_path_factory, dist_info, name):
    dist.destroy_process_group()
    path = tmp_path_factory.getbasetemp().parent / name
    store = dist.FileStore(str(path), dist_info.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=dist_info.rank, world_size=dist_info.world_size
    )

@on_ranks
def test_second_group(): dist.init_process_group("gloo")

@on_ranks
def test_group_by_environment():
    dist.destroy_process_group()
    dist.init_process_group("gloo")

@on_ranks
def test_destroyed_group():
    dist.destroy_process_group()
    dist.barrier()

@on_ranks
def test_expected_error():
    with pytest.raises(ValueError, match="twice") as caught:
        dist.init_process_group("gloo")
    assert not hasattr(caught.value, "__notes__")

@on_ranks
def test_other_error(): raise ValueError("of the test's own")

@on_kept_ranks
def test_kept(): note("kept")

@on_kept_ranks
def test_that_destroys():
    note("destroys")
    dist.destroy_process_group()

@on_kept_ranks
def test_after_destroying():
    note("after_destroying")
    dist.barrier()

@on_kept_ranks
def test_that_replaces(tmp_path_factory, dist_info):
    note("replaces")
    replace_group(tmp_path_factory, dist_info, "of_its_own")
    dist.barrier()

@on_kept_ranks
def test_after_replacing(tmp_path_factory, dist_info):
    note("after_replacing")
    dist.barrier()

def test_mesh_without_mark(device_mesh): device_mesh(dp=2, tp=2)

def test_model_without_mark(comm_mode):
    with comm_mode:
        fully_shard(nn.Linear(2, 2))

def test_collective_without_mark(): dist.all_reduce(torch.ones(1))

@pytest.fixture
def broken(): return undefined_name

def test_broken_without_mark(broken, device_mesh): device_mesh()

def test_own_group_without_mark(device_mesh):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert device_mesh().size() == 1
    finally:
        dist.destroy_process_group()

def test_mesh_that_does_not_fit(device_mesh):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        device_mesh(dp=3)
    finally:
        dist.destroy_process_group()

@on_ranks
def test_threads():
    torch.set_num_threads(2)
    torch.rand(700, 700) @ torch.rand(700, 700)
"""


@pytest.fixture(scope="module")
def session(run_session):
    return run_session(SOURCE, "-v")


def failure(session, name):
    """All that pytest shows of a test's failure."""
    return "\n".join(stories(session.output, name))


def error(session, name):
    """The lines of a test's error."""
    lines = re.findall(r"^E {3,10}(.*)", failure(session, name), re.MULTILINE)
    assert lines, session.output
    return "\n".join(lines)


def test_second_group_error_has_a_remedy(session):
    of_ranks = "fsdp-comm: the ranks of a distributed test get a process group before the first"
    for name in ("test_second_group", "test_group_by_environment", "test_destroyed_group"):
        told = error(session, name)
        assert of_ranks in told
        assert "Remove the calls to init_process_group() and destroy_process_group()." in told
    assert "fsdp-comm" not in error(session, "test_other_error")


def test_a_forgotten_marker_is_named(session):
    remedy = "Mark it, its class or its module"
    assert error(session, "test_mesh_without_mark").endswith(
        "device_mesh needs ranks, but test_it.py::test_mesh_without_mark is not marked as "
        "distributed and runs in pytest's own process. Mark it, its class or its module: "
        "@pytest.mark.distributed(world_size=4)"
    )
    for name in ("test_model_without_mark", "test_collective_without_mark"):
        told = error(session, name)
        assert "fsdp-comm: this test is not marked as distributed" in told
        assert remedy in told
    assert remedy not in error(session, "test_broken_without_mark")


def test_mesh_error_points_to_the_test(session):
    assert error(session, "test_mesh_that_does_not_fit").endswith(
        "device_mesh(dp=3) does not fit world size 1: the product of the sizes must equal it, and "
        "at most one may be -1"
    )
    for name in ("test_mesh_without_mark", "test_mesh_that_does_not_fit"):
        shown = failure(session, name)
        assert "test_it.py:" in shown
        assert "fixtures.py" not in shown


def test_kept_ranks_without_group_run_no_other_test(session):
    for rank in (0, 1):
        pids = {
            name: (session.path / f"{name}.{rank}").read_text()
            for name in ("kept", "destroys", "after_destroying", "replaces", "after_replacing")
        }
        assert pids["kept"] == pids["destroys"] != pids["after_destroying"] == pids["replaces"]
        assert pids["replaces"] != pids["after_replacing"]


def test_other_groups_and_earlier_threads_pass(session):
    assert "8 failed, 8 passed, 1 error" in session.output
    assert "test_it.py::test_threads PASSED" in session.output
    assert "so forking is not safe" not in session.output
