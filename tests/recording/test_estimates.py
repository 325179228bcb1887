"""Estimates of memory and compute: against the allocator, hand counts and torch's own counter."""

import json
from dataclasses import fields, replace

import pytest
import torch
from allocations import peak_allocated_nbytes
from torch import _guards, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.flop_counter import FlopCounterMode

from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.estimates import _TRACKED, Estimate

WIDTH, LAYERS, ROWS, FLOAT = 64, 4, 16, 4
gloo = pytest.mark.distributed(world_size=2, backend="gloo")
simulated = pytest.mark.distributed(world_size=8, simulate=True)


def build(mesh):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), torch.optim.AdamW(model.parameters())


def train(model, optimizer, batches=1):
    for _ in range(batches):
        model(torch.ones(ROWS, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


UNIT = (WIDTH + 1) * WIDTH * FLOAT


# With the fake group, what was sent is freed at once; a thread of gloo may take longer.
@pytest.mark.parametrize(
    "late_units",
    [
        pytest.param(0, marks=pytest.mark.distributed(world_size=2, backend="fake")),
        pytest.param(2 * LAYERS, marks=gloo),
    ],
)
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
def test_the_peak_is_what_the_allocator_gives_out(
    comm_mode, device_mesh, has_state, batches, late_units
):
    models = [build(device_mesh()) for _ in range(2)]
    for own in models if has_state else ():
        train(*own)
    (model, optimizer), other = models
    held = sum(p.to_local().nbytes for p in model.parameters())
    states = [one for kept in optimizer.state.values() for one in kept.values()]
    held += sum(getattr(one, "_local_tensor", one).nbytes for one in states)
    measured = held + peak_allocated_nbytes(lambda: train(*other, batches=batches))
    with comm_mode(model, estimate=optimizer):
        train(model, optimizer, batches=batches)
    # torch has a few counters that no tracker sees.
    assert abs(measured - comm_mode.estimate.peak_nbytes) <= 64 + late_units * UNIT
    assert comm_mode.estimate.parameters_nbytes == LAYERS * UNIT // 2
    if has_state:  # two moments, and the number of steps of each parameter
        assert comm_mode.estimate.optimizer_nbytes == LAYERS * UNIT + 2 * LAYERS * FLOAT


PROJECT = """
import json, pathlib
import pytest
from test_estimates import build, train

@pytest.mark.distributed(world_size=2)
def test_real(comm_mode, device_mesh, dist_info):
    run(comm_mode, device_mesh(), f"real{dist_info.rank}")

@pytest.mark.distributed(world_size=2, simulate=True, ranks=[0, 1])
def test_simulated(comm_mode, device_mesh, dist_info):
    run(comm_mode, device_mesh(), f"simulated{dist_info.rank}")

def run(comm_mode, mesh, name):
    model, optimizer = build(mesh)
    train(model, optimizer)
    estimates = []
    # In 1 to 5 % of the steps, a thread of gloo frees what it has reduced late.
    for _ in range(8):
        with comm_mode(model, estimate=optimizer):
            train(model, optimizer)
        estimates.append(comm_mode.estimate)
    least = min(estimates, key=lambda one: one.peak_nbytes)
    pathlib.Path(name).write_text(json.dumps([repr(least), least.flops]))
"""


@pytest.mark.release
def test_simulated_estimate_equals_real_one(pytester, request):
    pytester.makepyfile(test_it=PROJECT)
    pytester.makeini(f"[pytest]\npythonpath = {request.path.parent} {request.path.parents[1]}\n")
    pytester.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=2)
    for rank in "01":
        real, other = (
            json.loads((pytester.path / (kind + rank)).read_text())
            for kind in ("real", "simulated")
        )
        assert other == real
        assert real[1] > 0


@pytest.mark.distributed(world_size=[2, 8], simulate=8)
def test_estimate_does_not_change_recording(comm_mode, device_mesh):
    def record(**arguments):
        model, optimizer = build(device_mesh())
        train(model, optimizer)
        with comm_mode(model, **arguments):
            train(model, optimizer, batches=2)
        found = comm_mode.recording
        collectives = tuple(replace(one, call_site="") for one in found.collectives)
        return replace(found, collectives=collectives, timings=())

    estimated = record(estimate=True)
    assert estimated == record()
    with pytest.raises(RecordingError, match=r"with comm_mode\(model, estimate=optimizer\)"):
        comm_mode.estimate  # noqa: B018  # it raises


@simulated
def test_flops_match_manual_count_and_torch(comm_mode, device_mesh):
    model, optimizer = build(device_mesh())
    with FlopCounterMode(display=False) as theirs:
        train(model, optimizer)
    with comm_mode(model, estimate=optimizer):
        train(model, optimizer)
    # Forward, the gradient of the weight, and but for the first layer that of the input.
    by_hand = 2 * ROWS * WIDTH * WIDTH * (3 * LAYERS - 1)
    assert comm_mode.estimate.flops == theirs.get_total_flops() == by_hand


@simulated
def test_flops_of_tensor_parallel_layer_are_local(comm_mode, device_mesh):
    mesh = device_mesh(dp=-1, tp=2)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    with comm_mode(model, estimate=True):
        model(torch.ones(ROWS, WIDTH)).sum().backward()
    # Half of each layer, which is 2 * WIDTH * WIDTH; the first one's input has no gradient.
    assert comm_mode.estimate.flops == 2 * ROWS * WIDTH * WIDTH * (2 + 3)
    assert comm_mode.estimate.optimizer_nbytes == 0


@simulated
def test_an_estimate_stays_after_the_block(comm_mode, device_mesh):
    model, optimizer = build(device_mesh())
    with comm_mode(model, estimate=optimizer):
        train(model, optimizer)
        so_far = comm_mode.estimate
    assert comm_mode.estimate == so_far
    assert so_far.gathered_nbytes >= UNIT
    assert so_far.peak_nbytes > comm_mode.peak_gathered_nbytes


@simulated
def test_a_model_that_is_no_root_is_refused(comm_mode, device_mesh):
    model, _ = build(device_mesh())
    for models, given in ((nn.Linear(1, 1), "Linear"), ([model, nn.ReLU()], "FSDP.*, ReLU")):
        refused = pytest.raises(RecordingError, match=f"an FSDP2 root, got {given}: call fully_")
        with refused, comm_mode(models, estimate=True):
            pytest.fail("the block ran")
    with comm_mode(model):
        train(model, torch.optim.SGD(model.parameters()))
    assert comm_mode.counts("all_gather") > LAYERS


@pytest.mark.upstream
def test_torch_has_names_that_flop_count_needs():
    assert callable(_guards.active_fake_mode)
    assert callable(_sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached)


def test_each_memory_kind_of_torch_has_a_field():
    tracker = pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    known = [kind for kinds in _TRACKED.values() for kind in kinds]
    assert sorted(known) == sorted(kind.value for kind in tracker._FSDPRefType)


def test_the_parts_add_up_to_the_peak():
    one = Estimate(**{field.name: 10**at for at, field in enumerate(fields(Estimate))})
    assert one.peak_nbytes == 11_111
