"""Estimates what a rank holds at its peak, and how much it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import RecordingError

_USE = "an estimate relies on"
# By field, how torch's tracker calls what it adds up (read in torch 2.13).
_TRACKED = {
    "parameters_nbytes": ("Sharded Param", "Buffer"),
    "gradients_nbytes": ("Sharded Grad", "Unsharded Grad", "Reduce Scatter"),
    "optimizer_nbytes": ("OptState",),
    "activations_nbytes": ("Activation", "Temp", "Inputs"),
    "gathered_nbytes": ("Unsharded Param", "All Gather"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a rank holds when it holds most, by torch's ``FSDPMemTracker``, and what it computes.

    What an allocator rounds up, and what is not made of tensors, is not counted.
    """

    parameters_nbytes: int
    """Own shards, and buffers."""
    gradients_nbytes: int
    """Also of whole units, and what is being reduced."""
    optimizer_nbytes: int
    activations_nbytes: int
    """Inputs, what forward keeps, and what backward computes until it is known for a gradient."""
    gathered_nbytes: int
    """Parameters of gathered units, and the buffers that gather them. `peak_gathered_nbytes` is
    another number: the most parameters, at another time, without buffers."""
    flops: int
    """Floating-point operations of this rank in the whole block, of torch's ``flop_registry``."""

    @property
    def peak_nbytes(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self) if one.name != "flops")


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """As ``FlopCounterMode``, of what this rank computes of DTensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        # Read in torch 2.13.
        self._fake_mode = upstream.look_up("torch._guards", "active_fake_mode", _USE)
        self._outer = self._fake_mode()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, torch.distributed.tensor.DTensor) for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        # DTensor also runs operations on fake tensors, to learn what they would return.
        if count is not None and self._fake_mode() is self._outer:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


@contextlib.contextmanager
def estimating(models: Sequence[nn.Module], optimizer: Any) -> Iterator[Callable[[], Estimate]]:
    """Estimate while the block runs; gives what says the result up to now."""
    model = models[0]
    if len(models) > 1 or not isinstance(model, FSDPModule):
        given = ", ".join(type(one).__name__ for one in models)
        raise RecordingError(
            f"an estimate needs one model that is a root of FSDP2, got {given}: call fully_shard "
            "on the model that is given to comm_mode, or leave out estimate="
        )
    tracker_type: Any = upstream.look_up(
        "torch.distributed._tools.fsdp2_mem_tracker", "FSDPMemTracker", _USE
    )
    tracker = tracker_type(model, optimizer)

    def begin(_: nn.Module, *inputs: Any) -> None:
        # Otherwise a second forward is an error.
        tracker.reset_mod_stats()
        tracker.track_inputs(inputs)

    def estimate() -> Estimate:
        (snapshot, *_) = tracker.get_tracker_snapshot("peak").values()
        held = {getattr(kind, "value", kind): nbytes for kind, nbytes in snapshot.items()}
        nbytes = {name: sum(held[kind] for kind in kinds) for name, kinds in _TRACKED.items()}
        return Estimate(**nbytes, flops=flops.total)

    with (
        tracker,
        model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
        _Flops() as flops,
    ):
        yield estimate
