"""Operations of symmetric memory, whose kernels need CUDA: here with kernels of gloo's."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as symm_mem
from oracle import assert_flown, flights, last_flight
from texts import parse_comm
from torch import nn

from pytest_fsdp_comm import RecordingError
from pytest_fsdp_comm.reports.trace import dump_trace
from pytest_fsdp_comm.snapshots.comm_text import format_profile

ROWS, WIDTH, RANKS = 4, 8, 2
NBYTES = 4 * ROWS * WIDTH
OPS = torch.ops.symm_mem

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ws2 = pytest.mark.distributed(RANKS)


def gathered(tensor, group):
    return funcol.all_gather_tensor(tensor, 0, group).wait()


def broadcast(tensor, root, _group):
    dist.broadcast(tensor, root)
    return tensor


KERNELS = {
    "_low_contention_all_gather": gathered,
    "one_shot_all_reduce": lambda tensor, op, group: funcol.all_reduce(tensor, op, group).wait(),
    # What torch does without symmetric memory: functional collectives.
    "fused_all_gather_matmul": symm_mem._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symm_mem._fused_matmul_reduce_scatter_fallback,
    "nvshmem_broadcast": broadcast,
    "all_to_all_vdev": lambda *_: None,
    "nccl_put": lambda *_: None,
    "nccl_get": lambda *_: None,
    "get_remote_tensors": lambda tensor, _group: [tensor],
}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel)
    yield
    library._destroy()


def world():
    return dist.group.WORLD.group_name


def sent(comm_mode):
    return [
        (event.kind, event.axis, event.dtype, event.nbytes_sent, event.nbytes_received)
        for event in comm_mode.events
    ]


@ws2
def test_each_operation_is_recorded_once_as_what_it_sends(comm_mode):
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, 6, dtype=torch.float32)
    since = last_flight()
    with comm_mode:
        OPS.one_shot_all_reduce(x, "sum", world())
        OPS._low_contention_all_gather(x, world())
        OPS.fused_all_gather_matmul(x, [weight], 0, world())
        # Also where it does not return what it has gathered.
        OPS.fused_all_gather_matmul(x, [weight], 0, world(), return_A=False)
        OPS.fused_matmul_reduce_scatter(x, weight, "sum", 0, world())
    assert sent(comm_mode) == [
        ("all_reduce", "world", "float32", NBYTES, NBYTES),
        *[("all_gather", "world", "float32", NBYTES, RANKS * NBYTES)] * 3,
        # A product of 4 x 6, of which each rank keeps half.
        ("reduce_scatter", "world", "float32", 4 * ROWS * 6, 4 * ROWS * 6 // RANKS),
    ]
    assert_flown(comm_mode.events, flights(after=since))
    assert [event.reduce_op for event in comm_mode.events] == ["sum", None, None, None, "sum"]
    assert comm_mode.recording.gaps == ()


@ws2
def test_what_shows_no_group_has_no_axis_and_what_is_sent_by_values_no_size(comm_mode):
    x, splits = torch.ones(ROWS, WIDTH), torch.ones(RANKS, dtype=torch.int64)
    with comm_mode:
        OPS.nccl_put(x, 1)
        OPS.nccl_get(x, 1)
        OPS.get_remote_tensors(x, world())
        OPS.nvshmem_broadcast(x, 0, world())
        OPS.all_to_all_vdev(x, x.clone(), splits, splits.clone(), world())
    first = dist.get_rank() == 0
    assert sent(comm_mode) == [
        ("send", "", "float32", NBYTES, 0),
        ("recv", "", "float32", 0, NBYTES),
        ("broadcast", "world", "float32", *((NBYTES, 0) if first else (0, NBYTES))),
        ("all_to_all", "world", "float32", 0, 0),
    ]
    assert [event.is_unsized for event in comm_mode.events] == [False, False, False, True]
    assert repr(comm_mode) == "<CommMode: 4 collectives, 384 B and 1 of unknown size>"
    assert comm_mode.nbytes("send") == NBYTES
    assert comm_mode.counts("all_to_all") == 1
    with pytest.raises(RecordingError, match=r"1 collective, such as symm_mem.all_to_all_vdev, is"):
        comm_mode.nbytes()
    events = json.loads(dump_trace([comm_mode.recording]))["traceEvents"]
    sizes = [event["args"].get("bytes") for event in events if event.get("cat") == "outside"]
    assert sizes == [NBYTES, NBYTES, NBYTES, None]
    text = format_profile(comm_mode.merged_profile())
    assert "\noutside (no-module) all_to_all[world] x1 of unknown size float32\n" in text
    assert "\noutside (no-module) send[] x1 of 128 B float32\n" in text
    assert "\ntotal all_to_all[world] x1 of unknown size\n" in text
    assert parse_comm(text) == comm_mode.merged_profile()


@ws2
def test_in_a_module_it_sends_the_activations_of_that_module(comm_mode):
    class Columns(nn.Linear):
        def forward(self, x):
            return OPS.fused_all_gather_matmul(x, [self.weight.t()], 0, world())[1][0]

    model = nn.Sequential(Columns(WIDTH, WIDTH))
    with comm_mode(model), torch.no_grad():
        model(torch.ones(ROWS, WIDTH))
    (event,) = comm_mode.events
    assert (event.owner, event.phase, event.role) == ("0", "forward", "activations")
