"""Ranks that torch simulates itself: local tensors, and process groups written in Python.

Both send above the dispatcher's kernels, so that neither may be recorded as nothing.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from oracle import gloo_and_fake
from torch.testing._internal.distributed import multi_threaded_pg

from pytest_fsdp_comm import CommMode
from pytest_fsdp_comm.ranks.wire.load import extend_under_load

local_tensor = pytest.importorskip("torch.distributed._local_tensor")

# Gaps, old names of collectives, hooks of CommDebugMode.
pytestmark = pytest.mark.filterwarnings("ignore")

RANKS = 4
fake = pytest.mark.distributed(world_size=RANKS, backend="fake")


@fake
@pytest.mark.parametrize("is_inside", [True, False])
def test_local_ranks_are_a_gap(comm_mode, is_inside):
    contexts = [comm_mode, local_tensor.LocalTensorMode(RANKS)]
    with contextlib.ExitStack() as stack:
        for context in contexts if is_inside else reversed(contexts):
            stack.enter_context(context)
        dist.all_reduce(torch.ones(2))
    assert [gap.text for gap in comm_mode.recording.gaps] == [
        "ranks of LocalTensorMode communicated above torch's dispatcher; run the block without "
        "this mode, for example with @pytest.mark.distributed"
    ]
    with comm_mode:
        dist.all_reduce(torch.ones(2))
    assert comm_mode.counts() == 1
    assert comm_mode.recording.gaps == ()


def recorded_or_named(comm_mode, kinds):
    """Asserts that these kinds were recorded, or that a gap names the Python process group."""
    found = [event.kind for event in comm_mode.events]
    texts = " ".join(gap.text for gap in comm_mode.recording.gaps)
    assert found == kinds or "ProcessLocalGroup" in texts


@pytest.mark.distributed(world_size=1)
def test_python_process_group_is_recorded_or_gap(comm_mode):
    # The first one is made in its block.
    with comm_mode:
        group = dist.new_group([0], backend="threaded")
        dist.all_reduce(torch.ones(4), group=group)
    recorded_or_named(comm_mode, ["all_reduce"])
    with comm_mode:
        dist.all_reduce(torch.ones(4), group=group)
    recorded_or_named(comm_mode, ["all_reduce"])
    with comm_mode:
        funcol.all_reduce(torch.ones(4), "sum", group).wait()
    recorded_or_named(comm_mode, ["all_reduce"])


@gloo_and_fake(2)
def test_torchs_own_groups_are_none_of_them(comm_mode, device_mesh):
    groups = [dist.group.WORLD, dist.new_group([0, 1]), device_mesh(a=1, b=2)["b"].get_group()]
    assert {type(group) for group in groups} == {dist.ProcessGroup}
    with comm_mode:
        for group in groups:
            dist.all_reduce(torch.ones(4), group=group)
    assert len(comm_mode.events) == 3
    assert comm_mode.recording.gaps == ()


def test_threads_as_ranks_are_recorded_or_gap():
    modes, store = [CommMode() for _ in range(2)], dist.HashStore()

    def play(rank):
        dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
        with modes[rank]:
            dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    multi_threaded_pg._install_threaded_pg()
    isolate(True)  # noqa: FBT003  # takes no names
    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(play, range(2), timeout=extend_under_load(60))) == [None, None]
    finally:
        isolate(False)  # noqa: FBT003  # as above
        multi_threaded_pg._uninstall_threaded_pg()
    for mode in modes:
        recorded_or_named(mode, ["all_reduce"])
