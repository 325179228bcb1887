"""What ordinary code makes of a simulated tensor: a copy, a text, an array, a file."""

# Of a tensor without memory torch refuses some of it, in words that name no cure, and takes memory
# for granted in the rest. Read in torch 2.13.

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils.data import DataLoader

from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.simulation.values import SimulationError, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COPY: Final[Callable[..., Any]] = torch.Tensor.__deepcopy__


def conversions() -> Iterator[tuple[Any, str, Any]]:
    """What is to be replaced while a rank is simulated: the holder, the name, and by what."""
    yield torch.Tensor, "__deepcopy__", _copied_as_it_is(_COPY)
    yield FakeTensor, "__deepcopy__", _copied
    yield FakeTensor, "__format__", _formatted
    yield FakeTensor, "__reduce_ex__", _refuse
    yield FakeTensor, "data_ptr", _refuse
    yield FakeTensor, "numpy", _array
    yield DataLoader, "__iter__", _in_this_process(DataLoader.__iter__)


def _copied_as_it_is(copied: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(copied)
    def run(own: torch.Tensor, memo: dict[int, Any]) -> Any:
        # With memory, as what the mesh of a DTensor's state is made of.
        with unset_fake_temporarily() if type(own) is torch.Tensor else contextlib.nullcontext():
            return copied(own, memo)

    return run


def _copied(own: FakeTensor, memo: dict[int, Any]) -> Any:
    if not own.is_leaf:
        return _COPY(own, memo)  # which refuses
    with torch.no_grad():
        made = own.clone()
    if isinstance(own, nn.Parameter):
        made = nn.Parameter(made, own.requires_grad)
    else:
        made.requires_grad_(own.requires_grad)
    memo[id(own)] = made
    made.grad = copy.deepcopy(own.grad, memo)
    return made


def _formatted(own: FakeTensor, spec: str) -> str:
    return format(own.detach().item() if own.dim() == 0 and spec else str(own), spec)


def _array(own: FakeTensor, *, force: bool = False) -> Any:
    del force
    values = values_of(own.detach())
    if isinstance(values, FakeTensor):
        filler = values.flatten()[0].item() if values.numel() else 0  # answered, or refused
        with unset_fake_temporarily():
            values = torch.full(own.shape, filler, dtype=own.dtype, device="cpu")
    with unset_fake_temporarily():
        return values.numpy()


def _refuse(*_: Any) -> Any:
    raise SimulationError(
        f"{find_call_site()} reads the memory of a tensor, as what writes a checkpoint does, and a "
        "simulated one has none: leave that to code which the test does not run, or run the test "
        "on real ranks, without simulate="
    )


def _in_this_process(iterate: Callable[..., Any]) -> Callable[..., Any]:
    # A worker would have to send tensors through shared memory.
    @functools.wraps(iterate)
    def run(loader: DataLoader[Any]) -> Any:
        settings = vars(loader)
        kept = {name: settings[name] for name in ("num_workers", "timeout")}
        settings.update(num_workers=0, timeout=0)
        try:
            return iterate(loader)
        finally:
            settings.update(kept)

    return run
