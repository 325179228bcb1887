"""Patches functions that read or convert the memory of tensors while a rank is simulated."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.patches import Replacement, wrap_attribute
from pytest_fsdp_comm.simulation.devices import is_cuda_used
from pytest_fsdp_comm.simulation.memory import SimulationError
from pytest_fsdp_comm.simulation.process_groups import wrap_with_memory
from pytest_fsdp_comm.simulation.streams import (
    count_waits_as,
    is_called_by_user,
    wait_on_host,
)
from pytest_fsdp_comm.simulation.values import (
    SimulatedTensors,
    await_and_view_values,
    marked_device,
)

_COPY: Final[Callable[..., Any]] = torch.Tensor.__deepcopy__
_ADDRESS: Final[Callable[..., int]] = torch.UntypedStorage.data_ptr
_ADDRESSES: Final = 2**60
"""The first address for simulated storages; real addresses are lower."""
_ADDRESS_NAME: Final = "_fsdp_comm_address"
_addresses: Final = itertools.count(_ADDRESSES, 2**42)


def memory_patches(tensors: SimulatedTensors) -> Iterator[Replacement]:
    """Yield replacements for functions that convert tensors or read their memory.

    Without them, torch raises unhelpful errors, or reads memory that does not exist (checked in
    torch 2.13).
    """
    yield torch.Tensor, "__deepcopy__", _simulated_tensor_deepcopy
    yield FakeTensor, "__deepcopy__", _simulated_deepcopy
    yield FakeTensor, "__format__", _format_simulated_tensor
    yield FakeTensor, "__repr__", _simulated_repr
    yield FakeTensor, "__reduce_ex__", _refuse_read
    yield FakeTensor, "data_ptr", _simulated_data_ptr
    yield FakeTensor, "share_memory_", lambda tensor: tensor
    yield FakeTensor, "__dlpack__", _simulated_dlpack
    yield torch.utils.dlpack, "to_dlpack", _simulated_dlpack
    yield torch.UntypedStorage, "data_ptr", _simulated_storage_data_ptr
    for name in ("__getitem__", "_write_file", "cpu"):
        yield wrap_attribute(torch.UntypedStorage, name, _simulated_memory_read)
    for name in ("cast", "memmove", "memset", "string_at"):
        yield wrap_attribute(ctypes, name, _simulated_memory_read)
    yield wrap_attribute(torch, "asarray", functools.partial(_simulated_asarray, tensors))
    yield torch, "from_file", wrap_with_memory(torch.from_file, tensors.simulate)
    yield FakeTensor, "numpy", _simulated_numpy
    yield FakeTensor, "tolist", _simulated_tolist
    # These functions read memory before they run any operation that the mode could intercept.
    for name in ("tensor", "as_tensor"):
        yield wrap_attribute(torch, name, _simulated_tensor)
    for holder in (torch, torch.Tensor):
        yield wrap_attribute(holder, "tensor_split", _simulated_tensor_split)


@functools.wraps(_COPY)
def _simulated_tensor_deepcopy(tensor: torch.Tensor, memo: dict[int, object]) -> object:
    # Plain tensors, such as the rank numbers of a mesh, have memory, so copy them outside the mode.
    with unset_fake_temporarily() if type(tensor) is torch.Tensor else contextlib.nullcontext():
        return _COPY(tensor, memo)


def _simulated_deepcopy(tensor: FakeTensor, memo: dict[int, object]) -> object:
    if not tensor.is_leaf:
        return _COPY(tensor, memo)  # raises torch's error
    with torch.no_grad():
        result = tensor.clone()
    if isinstance(tensor, nn.Parameter):
        result = nn.Parameter(result, tensor.requires_grad)
    else:
        result.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = result
    result.grad = copy.deepcopy(tensor.grad, memo)
    return result


def _format_simulated_tensor(tensor: FakeTensor, spec: str) -> str:
    return format(tensor.detach().item() if tensor.dim() == 0 and spec else str(tensor), spec)


def _simulated_repr(tensor: FakeTensor, **kwargs: object) -> str:
    # On a GPU, the host waits for the values that the text shows.
    if is_called_by_user() and (marked_device(tensor) is not None or not is_cuda_used()):
        wait_on_host("item")
    return str(torch.Tensor.__repr__(tensor, **kwargs))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _simulated_tolist(tensor: FakeTensor) -> Any:
    with count_waits_as("tolist"):
        return _read_as_numpy(tensor).tolist()


def _simulated_numpy(tensor: FakeTensor, *, force: bool = False) -> Any:
    del force
    with count_waits_as():  # an array is on the host
        return _read_as_numpy(tensor)


def _read_as_numpy(tensor: FakeTensor) -> Any:
    # `item` returns a known or assumed value, or raises an error.
    first = tensor[(0,) * tensor.dim()].item() if tensor.numel() else 0
    values: torch.Tensor = await_and_view_values(tensor.detach())
    with unset_fake_temporarily():
        if isinstance(values, FakeTensor):
            values = torch.full(tensor.shape, first, dtype=tensor.dtype, device="cpu")
        return values.numpy()


def _simulated_storage_data_ptr(storage: torch.UntypedStorage) -> int:
    if storage.device.type != "meta":
        return _ADDRESS(storage)
    if not storage.nbytes():
        return 0
    start: int = vars(storage).setdefault(_ADDRESS_NAME, next(_addresses))
    return start


def _simulated_data_ptr(tensor: FakeTensor) -> int:
    if tensor.fake_device.type == "meta" or not tensor.numel():
        return 0
    return (
        _simulated_storage_data_ptr(tensor.untyped_storage())
        + int(tensor.storage_offset()) * tensor.element_size()
    )


def _simulated_memory_read(function: Callable[..., object], *args: object) -> object:
    """Make a function raise an error if an argument is a simulated storage or its address."""
    for arg in args:
        if (isinstance(arg, int) and arg >= _ADDRESSES) or (
            isinstance(arg, torch.UntypedStorage) and arg.device.type == "meta"
        ):
            _refuse_read()
    return function(*args)


def _simulated_dlpack(tensor: torch.Tensor, **how: Any) -> object:
    values = await_and_view_values(tensor.detach())
    if isinstance(values, FakeTensor):
        _refuse_read()
    with unset_fake_temporarily():
        return values.__dlpack__(**how)


def _simulated_asarray(
    tensors: SimulatedTensors, convert: Callable[..., torch.Tensor], obj: object, **how: object
) -> torch.Tensor:
    # safetensors calls this function with storages that it has read from a file.
    if not isinstance(obj, torch.UntypedStorage):
        return convert(obj, **how)
    with unset_fake_temporarily():
        result = convert(obj, **how)
    return tensors.simulate(result)


def _simulated_tensor(
    make: Callable[..., torch.Tensor],
    data: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    **how: object,
) -> torch.Tensor:
    """Make ``torch.tensor`` and ``as_tensor`` accept lists that contain simulated tensors."""
    if isinstance(data, torch.Tensor) and make.__name__ == "as_tensor":
        return data.to(device, dtype)
    if not _has_simulated_tensor(data):
        options = {"dtype": dtype, "device": device, "requires_grad": requires_grad, **how}
        return make(data, **{name: value for name, value in options.items() if value})
    parts = [part if torch.is_tensor(part) else _simulated_tensor(make, part) for part in data]
    with torch.no_grad():
        return torch.stack(parts).to(device, dtype).requires_grad_(requires_grad)


def _has_simulated_tensor(data: object) -> bool:
    return isinstance(data, (list, tuple)) and any(
        isinstance(part, FakeTensor) or _has_simulated_tensor(part) for part in data
    )


def _simulated_tensor_split(
    split: Callable[..., object],
    input: torch.Tensor,  # noqa: A002  # the parameter name of torch
    indices_or_sections: object = None,
    dim: int = 0,
    **how: object,
) -> object:
    # torch also accepts them as `indices`, `sections` or `tensor_indices_or_sections`.
    indices = next(iter(how.values()), indices_or_sections)
    if isinstance(indices, FakeTensor):
        indices = _simulated_numpy(indices).tolist()  # torch needs them on the host
    return split(input, indices, dim)


def _refuse_read(*_: object) -> object:
    raise SimulationError(
        f"{find_call_site()} reads the memory of a tensor (for example, to save a checkpoint), but "
        "simulated tensors have no memory: move the call out of the code that the test runs, or "
        "run the test on real ranks, without simulate="
    )
