"""Collectives that torch runs on gloo: a simulated rank sends the same."""

import json
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as nn_functional
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

RANKS, FLOAT = 4, 4


def ones(size):
    return torch.ones(size, requires_grad=True)


def coalesced_all_reduce():
    dist.all_reduce_coalesced([torch.ones(3), torch.ones(5)])


def coalesced_all_gather():
    rows = [[torch.empty(3), torch.empty(5)] for _ in range(RANKS)]
    dist.all_gather_coalesced(rows, [torch.ones(3), torch.arange(5.0)])
    assert rows[2][1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def coalescing(call):
    def run():
        with dist._coalescing_manager(async_ops=True) as manager:
            for size in (3, 5):
                call(size)
        manager.wait()

    return run


def gathered_loss():
    """As CLIP's: the backward of the gather scatters on gloo."""
    torch.cat(nn_functional.all_gather(ones(3))).sum().backward()


def exchanged_in_autograd():
    rows = [ones(3) for _ in range(RANKS)]
    torch.cat(nn_functional.all_to_all([torch.empty(3) for _ in rows], rows)).sum().backward()


def polling():
    work = dist.all_reduce(torch.ones(3), async_op=True)
    while not work.is_completed():
        pass


def fully_sharded_1():
    device = torch.device("cpu")
    model = FullyShardedDataParallel(nn.Linear(4, 7), device_id=device, use_orig_params=True)
    model(torch.ones(2, 4)).sum().backward()


def scatters(rank):
    """One from each rank, which alone sends."""
    return [
        ("scatter", 3 * FLOAT * RANKS if root == rank else 0, 3 * FLOAT) for root in range(RANKS)
    ]


def gathers(nbytes):
    return [("all_gather", nbytes, RANKS * nbytes)]


REDUCES = ("all_reduce", 8 * FLOAT, 8 * FLOAT)
UNIT = 9 * FLOAT  # of (4 + 1) * 7 parameters, padded
CASES = {
    coalesced_all_reduce: lambda _: [REDUCES],
    coalesced_all_gather: lambda _: gathers(8 * FLOAT),
    coalescing(lambda size: dist.all_reduce(torch.ones(size))): lambda _: [REDUCES],
    coalescing(
        lambda size: dist.all_gather_into_tensor(torch.empty(RANKS * size), torch.ones(size))
    ): lambda _: gathers(8 * FLOAT),
    coalescing(
        lambda size: dist.reduce_scatter_tensor(torch.empty(size), torch.ones(RANKS * size))
    ): lambda _: [("reduce_scatter", RANKS * 8 * FLOAT, 8 * FLOAT)],
    gathered_loss: lambda rank: [*gathers(3 * FLOAT), *scatters(rank)],
    exchanged_in_autograd: lambda rank: scatters(rank) * 2,
    dist.monitored_barrier: lambda _: [("barrier", 0, 0)],
    polling: lambda _: [("all_reduce", 3 * FLOAT, 3 * FLOAT)],
    fully_sharded_1: lambda _: [
        *gathers(UNIT),
        ("reduce_scatter", RANKS * UNIT, UNIT),
    ],
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("gloo", marks=pytest.mark.distributed(RANKS, backend="gloo")),
        pytest.param("fake", marks=pytest.mark.distributed(RANKS, simulate=True, ranks="all")),
    ],
)
def test_collectives_send_what_gloo_sends(way, comm_mode, dist_info):
    assert (dist_info.backend, dist.get_backend()) == (way, "gloo")
    random.seed(3)
    state = random.getstate()
    wrong = {}
    for run, sends in CASES.items():
        with comm_mode:
            run()
        found = [(one.kind, one.nbytes_sent, one.nbytes_received) for one in comm_mode.events]
        if found != sends(dist_info.rank) or comm_mode.recording.gaps:
            wrong[str(run)] = (found, sends(dist_info.rank), str(comm_mode.recording.gaps))
    assert not wrong, json.dumps(wrong, indent=1)
    assert random.getstate() == state  # torch draws to number what it sends


@pytest.mark.distributed(world_size=4, simulate=True)
def test_waiting_for_known_integers_keeps_them():
    reduced = funcol.all_reduce(torch.tensor([1, 2]), "sum", dist.group.WORLD)
    assert funcol.wait_tensor(reduced).tolist() == [4, 8]
