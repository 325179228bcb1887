"""Replaces functions that need a GPU, or use special kernels on a GPU, for simulated ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812  # the usual name of this module
from torch.nn.attention import flex_attention
from torch.utils._device import _device_constructors

from pytest_fsdp_comm.recording.patches import Replacement, wrap_attribute
from pytest_fsdp_comm.simulation.values import CPU, mark_with_device, marked_device

# Functions that accept a device. torch caches this set for `with torch.device(...)`, so make torch
# fill its cache before any of the functions is replaced.
_constructors: Iterable[Callable[..., Any]] = _device_constructors()
_CONSTRUCTORS: Final = tuple(
    make.__name__ for make in _constructors if vars(torch).get(make.__name__) is make
)
_CHECK: Final = "_validate_device"
_HOP: Final = "flex_attention_hop"
_EAGER_FLEX: Final = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # checked in torch 2.13 and 2.15


def gpu_function_patches(device: Callable[[object], object]) -> Iterator[Replacement]:
    """Yield the arguments of `setattr` for each function; `device` turns an index into a device."""
    for name in _CONSTRUCTORS:
        yield wrap_attribute(torch, name, functools.partial(_simulated_constructor, device))
    for holder in (torch, torch.Tensor):
        yield wrap_attribute(holder, "histc", _simulated_histc)
    yield wrap_attribute(torch._C._nn, "pad", _simulated_pad)
    # The replacement keeps the name by which context parallelism finds this function.
    yield wrap_attribute(F, "scaled_dot_product_attention", _simulated_attention)
    if hasattr(flex_attention, _CHECK):  # without it, torch accepts or rejects the CPU elsewhere
        yield wrap_attribute(flex_attention, _CHECK, _simulated_device_check)
    # `wrap_attribute` raises if torch lacks this one: score functions would get no gradients.
    yield wrap_attribute(flex_attention, _HOP, _simulated_flex_attention)
    if hasattr(flex_attention, _EAGER_FLEX):  # keeps torch from warning about eager mode
        yield flex_attention, _EAGER_FLEX, True


def _simulated_device_check(check: Callable[..., None], query: torch.Tensor, *args: object) -> None:
    if marked_device(query) is None:
        check(query, *args)


def _simulated_constructor(
    device: Callable[[object], object], make: Callable[..., object], /, *args: Any, **kwargs: Any
) -> object:
    # CPU-only builds of torch reject device indices and `pin_memory`, so convert or drop them.
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = device(kwargs["device"])
    kwargs.pop("pin_memory", None)
    return make(*args, **kwargs)


def _simulated_pad(
    pad: Callable[..., torch.Tensor], data: torch.Tensor, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Keep the result on the GPU; circular padding makes it on the device that torch sees."""
    result = pad(data, *args, **kwargs)
    if (device := marked_device(data)) is not None:
        mark_with_device(result, device)
    return result


def _simulated_histc(
    histc: Callable[..., torch.Tensor],
    input: torch.Tensor,  # noqa: A002  # the parameter names of torch
    bins: int = 100,
    min: float = 0,  # noqa: A002  # as above
    max: float = 0,  # noqa: A002  # as above
) -> torch.Tensor:
    """Make ``histc`` accept integers, as torch does only on a GPU."""
    if input.is_floating_point() or marked_device(input) is None:
        return histc(input, bins, min, max)
    low, high = (min, max) if min != max else (input.min().item(), input.max().item())
    low, high = (low - 1, high + 1) if low == high else (int(low), int(high))
    is_inside = (input >= low) & (input <= high)
    indices = ((input.long() - low) * bins // (high - low)).clamp(0, bins - 1)
    counts = input.new_zeros(bins)
    return counts.index_add(0, indices.flatten(), is_inside.flatten().to(input.dtype))


def _simulated_attention(  # noqa: PLR0913, PLR0917  # torch's signature
    attend: Callable[..., object],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: object,
) -> object:
    """Make attention call a fused GPU kernel, because DTensor cannot shard the CPU kernels."""
    inputs, enabled = [query, key, value], torch.backends.cuda
    is_on_gpu = any(isinstance(tensor, DTensor) or marked_device(tensor) for tensor in inputs)
    is_fused = enabled.flash_sdp_enabled() or enabled.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    is_fused |= enabled.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # as above
    if not (is_on_gpu and is_fused and query.dim() == len("BHSD")):
        return attend(*inputs, attn_mask, dropout_p, is_causal, **options)
    if torch.is_autocast_enabled("cpu"):
        inputs = [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in inputs]
    aten, scale = torch.ops.aten, options.get("scale")
    if attn_mask is None:
        flash = aten._scaled_dot_product_flash_attention
        return flash(*inputs, dropout_p, is_causal, scale=scale)[0]
    if attn_mask.dtype == torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=inputs[0].dtype)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient, has_sums = aten._scaled_dot_product_efficient_attention, torch.is_grad_enabled()
    return efficient(*inputs, attn_mask, has_sums, dropout_p, is_causal, scale=scale)[0]


def _simulated_flex_attention(
    hop: Callable[..., Any], query: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    """Give gradients to the parameters of a score function, as compiled flex attention does."""
    result, *sums = hop(query, *args)
    _, _, score_mod, *_ = args
    indices = [torch.zeros((), dtype=torch.int, device=CPU) for _ in range(4)]
    score = score_mod(query.new_zeros(()), *indices)
    return (result + 0 * score.to(result.dtype) if score.requires_grad else result, *sums)
