"""A recording keeps numbers and names, but no tensors, modules or groups alive."""

import gc
import sys
import tracemalloc
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from allocations import peak_allocated_nbytes
from models import WIDTH, Model, shard, step
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

fake = pytest.mark.distributed(world_size=4, backend="fake")


def live_tensors():
    gc.collect()
    # By type: isinstance() asks some deprecated objects of torch, which warn.
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@fake
def test_tensors_die_while_the_recording_goes_on(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *arguments: seen.append(weakref.ref(arguments[-1])))
    step(model)
    seen.clear()
    with comm_mode(model):
        step(model)
        gc.collect()
        assert len(seen) == 2
        assert [reference() for reference in seen] == [None, None]


@fake
def test_no_tensor_stays_alive(comm_mode, device_mesh):
    mesh = device_mesh()
    model = shard(Model(), mesh)
    rows = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Shard(0)])

    def everything():
        step(model)
        rows.redistribute(mesh, [Replicate()])
        dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda _: torch.ones(3))

    everything()
    before = live_tensors()
    with comm_mode(model):
        everything()
    assert len(comm_mode.events) > 8
    assert live_tensors() == before


@pytest.mark.distributed(world_size=2, backend="gloo")
def test_gathered_memory_is_freed_during_recording(comm_mode, device_mesh):
    # A real group's work holds the tensors that it sent and received.
    model = shard(Model(blocks=16), device_mesh())

    def recorded():
        with comm_mode(model):
            step(model)

    def least(run):
        # In about every second step the threads of gloo free a few tensors late, up to as many as
        # all others, recorded or not.
        return min(peak_allocated_nbytes(run) for _ in range(8))

    step(model)
    # Each of 16 blocks is gathered twice.
    assert least(recorded) < 1.2 * least(lambda: step(model))
    assert comm_mode.counts("all_gather") > 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.distributed(world_size=2, backend="gloo")
def test_process_memory_does_not_grow_with_events(comm_mode, device_mesh):
    # Small pieces of memory, kept between large ones, make malloc leave the large ones' places.
    layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, mesh=device_mesh())
    fully_shard(model, mesh=device_mesh())

    def run():
        model(torch.ones(2, 1024)).sum().backward()
        model.zero_grad()

    def resident_mib():
        fields = dict(
            line.split(":") for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(fields["VmRSS"].split()[0]) / 1024

    for _ in range(3):
        run()
    with comm_mode(model):
        run()
        before = resident_mib()
        for _ in range(10):
            run()
        grown = resident_mib() - before
    assert comm_mode.counts("all_gather") == 11 * 16
    # 64 MiB were gathered in each step; it grew by 45 MiB a step.
    assert grown < 200


@fake
def test_the_model_is_not_kept(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    with comm_mode(model):
        step(model)
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None
    assert len(comm_mode.events) == 8


@fake
def test_living_graph_keeps_no_unit_of_other_model(comm_mode, device_mesh):
    model, other = (shard(Model(), device_mesh()) for _ in range(2))
    with comm_mode:
        loss = model(torch.ones(2, WIDTH)).sum()
        step(other)
    known = weakref.ref(other)
    del other
    gc.collect()
    assert known() is None
    loss.backward()


@fake
def test_the_size_of_a_recording_is_that_of_its_events(comm_mode):
    def kept(events, numel):
        tensor = torch.ones(numel)
        tracemalloc.start()
        with comm_mode:
            for _ in range(events):
                dist.all_reduce(tensor)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(comm_mode.events) == events
        return size

    kept(10, 1)  # objects that are created once
    small, large, many = kept(200, 1), kept(200, 100_000), kept(2000, 1)
    # Not with the size of what is sent; with the number of events, 1 KiB of host memory each.
    assert large < 1.5 * small
    assert many / 2000 < 1024


@fake
def test_a_thousand_recordings_leave_nothing(comm_mode, device_mesh):
    model = shard(Model(blocks=1), device_mesh())

    def record(times):
        for _ in range(times):
            with comm_mode(model):
                model(torch.ones(2, WIDTH))
        gc.collect()
        return len(gc.get_objects())

    def count_new_objects():
        before = record(5)
        return record(200) - before

    record(5)
    # The rank's watchdog creates some objects with its first answer, but only once.
    assert min(count_new_objects() for _ in range(2)) < 50


@fake
def test_import_between_recordings_leaves_no_kernels(comm_mode, monkeypatch):
    def record(times):
        for _ in range(times):
            monkeypatch.setitem(sys.modules, f"imported_{len(sys.modules)}", ModuleType("imported"))
            with comm_mode:
                pass
        gc.collect()
        return len(gc.get_objects())

    record(5)
    before = record(5)
    assert record(20) - before < 100
