"""Simulates a rank: enters the modes and patches of the other modules of `simulation/`."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import TracebackType
from typing import Any, Final

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils.data import DataLoader

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.recording.frames import is_outside_torch
from pytest_fsdp_comm.recording.overlap import provide_overlap
from pytest_fsdp_comm.recording.patches import Replacement, patch_attributes, wrap_attribute
from pytest_fsdp_comm.simulation.devices import simulate_cuda
from pytest_fsdp_comm.simulation.groups import RealGroups
from pytest_fsdp_comm.simulation.memory import SimulationError
from pytest_fsdp_comm.simulation.memory_access import memory_patches
from pytest_fsdp_comm.simulation.process_groups import group_patches
from pytest_fsdp_comm.simulation.reducer import reducer_patches
from pytest_fsdp_comm.simulation.scripts import SkippedSaves, process_patches
from pytest_fsdp_comm.simulation.sharding import sharding_patches
from pytest_fsdp_comm.simulation.streams import StreamOrder, wait_patches
from pytest_fsdp_comm.simulation.values import SimulatedTensors
from pytest_fsdp_comm.upstream import private_names

_META: Final = torch._C.DispatchKey.Meta
_NO_MEMORY: Final = "its data is not allocated yet"
"""Part of the error that c10's TensorImpl raises about missing memory (torch 2.7 to 2.15)."""
# Use the same mode in all tests, because tensors of module-scoped fixtures outlive a test, and
# torch cannot mix tensors of two modes.
_cached_tensors: Final = cache(SimulatedTensors)


@contextlib.contextmanager
def simulate_script() -> Iterator[SkippedSaves]:
    """Simulate this rank of a script; yield the saves that it skips."""
    skipped = SkippedSaves()
    SimulationError.is_in_script = True
    with (
        simulate_rank(assumes=True),
        patch_attributes(*skipped.patches(), *process_patches()),
    ):
        yield skipped


@contextlib.contextmanager
def simulate_rank(
    *, assumes: bool, shares: tuple[float, ...] | None = None, groups: RealGroups | None = None
) -> Iterator[None]:
    """Simulate this rank during the block.

    Args:
        assumes: If true, reading an unknown float returns 1.0, and reading an unknown boolean
            returns False; if false, both raise. Reading an unknown integer always raises.
        shares: Relative number of tokens that a router sends to each expert; empty if all experts
            get the same number, None to leave the router's choices unknown.
        groups: Exchanges values with peers along the axes of ``real=``; None without ``real=``.
    """
    _register_missing_meta_kernels()
    tensors = _cached_tensors(assumes=assumes, shares=shares)
    tensors.begin_test(groups)
    with (
        private_names("a class or module that a simulation reads"),
        patch_attributes(*_world_patches(tensors, groups)),
        provide_overlap(StreamOrder),
        patch_attributes(*wait_patches()),
        simulate_cuda(assumes=assumes),
        # Do not compile: compiled code communicates like eager code, but would use fake tensors of
        # a different mode.
        torch.compiler.set_stance("force_eager"),
        tensors,
    ):
        yield


@cache
def _register_missing_meta_kernels() -> object:
    """Register meta kernels for collectives that lack one (torch 2.7 to 2.15)."""
    if not torch.ops.c10d.allreduce_.default.has_kernel_for_dispatch_key(_META):
        importlib.import_module("torch.distributed._tools.fake_collectives")  # registers most
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for name in ("allreduce", "allgather", "allgather_into_tensor", "reduce_scatter_tensor"):
        func = getattr(torch.ops.c10d, f"{name}_coalesced_").default
        if not func.has_kernel_for_dispatch_key(_META):
            library.impl(func, lambda *_, **__: FakeWork().boxed(), "Meta")
    return library  # cached: torch unregisters the kernels when the library is garbage-collected


def _world_patches(tensors: SimulatedTensors, groups: RealGroups | None) -> Iterator[Replacement]:
    yield from group_patches(tensors, groups)
    yield from sharding_patches()
    yield from reducer_patches()
    # Unknown booleans are False, so distributions would reject all unknown arguments.
    yield torch.distributions.Distribution, "_validate_args", False
    # torch draws an id for each `Work` from Python's `random`, which would change the test's random
    # numbers. Use consecutive numbers instead.
    if numbering := sys.modules.get("torch.distributed._meta_registrations"):  # not in torch 2.9
        yield numbering, "generate_unique_id", itertools.count(1).__next__
    # Disable TorchScript (as PYTORCH_JIT=0 does), because it cannot compile replaced functions.
    yield torch.jit._state._enabled, "enabled", False
    yield torch.utils, "swap_tensors", tensors.swap
    yield wrap_attribute(threading.Thread, "start", partial(_simulated_thread_start, tensors))
    with contextlib.suppress(ImportError):  # import it now, so that its loaders get patched
        importlib.import_module("torchdata.stateful_dataloader")
    for loader in (DataLoader, *_list_subclasses(DataLoader)):
        # The `state_dict` of torchdata's loader starts workers, too.
        for name in {"__iter__", "state_dict"} & vars(loader).keys():
            yield wrap_attribute(loader, name, _run_without_workers)
    yield from memory_patches(tensors)


def strip_inner_frames(error: FsdpCommError) -> FsdpCommError:
    """Remove torch's and this package's frames from the traceback of a SimulationError."""
    if not isinstance(error, SimulationError):
        return error
    entry, outside = error.__traceback__, []
    while entry is not None:
        outside += [entry] if is_outside_torch(entry.tb_frame) else []
        entry = entry.tb_next
    traceback = None
    for entry in reversed(outside):
        traceback = TracebackType(traceback, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return error.with_traceback(traceback)


def add_memory_remedy(error: RuntimeError) -> None:
    """Add a note with the cause and a remedy to torch's error about missing memory."""
    if _NO_MEMORY in str(error):
        remedy = SimulationError(
            "C++ code read the memory of a simulated tensor, which has none: avoid that "
            "call (use torch.tensor([t]) instead of torch.LongTensor([t]), padded instead of "
            "packed sequences in nn.LSTM), or run the test on real ranks, without simulate="
        )
        error.add_note(f"fsdp-comm: {remedy}")


def _simulated_thread_start(
    tensors: SimulatedTensors, start: Callable[[threading.Thread], None], thread: threading.Thread
) -> None:
    """Also simulate tensors in new threads, because torch's modes are thread-local."""
    run = thread.run

    def simulate() -> None:
        with tensors:
            run()

    thread.run = simulate  # type: ignore[method-assign]  # works for every subclass of Thread
    start(thread)


def _list_subclasses(kind: type[object]) -> Iterator[type[object]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _list_subclasses(subclass)


def _run_without_workers(method: Callable[..., object], loader: DataLoader[object]) -> object:
    """Make a DataLoader run without workers, which would send tensors through shared memory.

    It does not pin memory either: torch would warn that there is no GPU.
    """
    settings = vars(loader)
    original = {name: settings[name] for name in ("num_workers", "timeout", "pin_memory")}
    settings.update(num_workers=0, timeout=0, pin_memory=False)
    try:
        return method(loader)
    finally:
        settings.update(original)
