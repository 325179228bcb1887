"""Estimate a rank's peak memory, and count its floating-point operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import flop_registry

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.private import TorchDispatchMode

_USE = "an estimate relies on"
# The memory kinds of FSDPMemTracker that each field of `Estimate` sums up.
_TRACKED = {
    "parameters_nbytes": ("Sharded Param", "Buffer"),
    "gradients_nbytes": ("Sharded Grad", "Unsharded Grad", "Reduce Scatter"),
    "optimizer_nbytes": ("OptState",),
    "activations_nbytes": ("Activation", "Temp", "Inputs"),
    "gathered_nbytes": ("Unsharded Param", "All Gather"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A rank's peak memory, estimated by torch's ``FSDPMemTracker``, and its FLOPs.

    Only the memory of tensors counts, without the allocator's rounding.
    """

    parameters_nbytes: int
    """This rank's parameter shards, and the buffers."""
    gradients_nbytes: int
    """Gradients, including unsharded ones and those being reduced."""
    optimizer_nbytes: int
    activations_nbytes: int
    """Inputs, tensors saved by forward, and tensors of backward that are not gradients yet."""
    gathered_nbytes: int
    """Parameters of gathered units, and the buffers for gathering. `CommMode.peak_gathered_nbytes`
    differs: it is the peak of the parameters alone, which may occur at a different time."""
    flops: int
    """Floating-point operations of this rank in the block, from torch's ``flop_registry``."""

    @property
    def peak_nbytes(self) -> int:
        return sum(getattr(self, name) for name in _TRACKED)


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Count like ``FlopCounterMode``, but only this rank's share of operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._fake_mode = upstream.look_up("torch._guards", "active_fake_mode", _USE)
        self._outer = self._fake_mode()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, torch.distributed.tensor.DTensor) for cls in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        # Skip the operations that DTensor runs on fake tensors to infer the shapes of results.
        if count is not None and self._fake_mode() is self._outer:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


@contextlib.contextmanager
def measure_block(
    models: Sequence[nn.Module], optimizer: object
) -> Iterator[Callable[[], Estimate]]:
    """Measure the block's memory and FLOPs; yield a function that returns the `Estimate` so far."""
    model = models[0]
    if len(models) > 1 or not isinstance(model, FSDPModule):
        names = ", ".join(type(module).__name__ for module in models)
        raise RecordingError(
            f"estimate= needs a single model that is an FSDP2 root, got {names}: call fully_shard "
            "on the model that is passed to comm_mode, or leave out estimate="
        )
    tracker_type: Any = upstream.look_up(
        "torch.distributed._tools.fsdp2_mem_tracker", "FSDPMemTracker", _USE
    )
    tracker = tracker_type(model, optimizer)

    def begin(_: nn.Module, *inputs: object) -> None:
        # Reset the tracker, because otherwise a second forward raises.
        tracker.reset_mod_stats()
        tracker.track_inputs(inputs)

    def estimate() -> Estimate:
        (snapshot, *_) = tracker.get_tracker_snapshot("peak").values()
        by_kind = {getattr(kind, "value", kind): nbytes for kind, nbytes in snapshot.items()}
        nbytes = {name: sum(by_kind[kind] for kind in kinds) for name, kinds in _TRACKED.items()}
        return Estimate(**nbytes, flops=flops.total)

    with (
        tracker,
        model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
        _Flops() as flops,
    ):
        yield estimate
