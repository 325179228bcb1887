"""Functions that the CPU refuses, or for which a GPU has other kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812  # as all do
from torch.nn.attention import flex_attention
from torch.utils._device import _device_constructors

from pytest_fsdp_comm.simulation.values import CPU, mark_of

# torch keeps these for the process, and asks them for `with torch.device(...)`: looked up before
# any is replaced.
_constructors: Iterable[Callable[..., Any]] = _device_constructors()
_CONSTRUCTORS: Final = tuple(
    make.__name__ for make in _constructors if vars(torch).get(make.__name__) is make
)
_EAGER_FLEX: Final = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # read in torch 2.13 and 2.15


def replaced_functions(place: Callable[[Any], Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what to replace; `place` makes a device of its number."""
    for name in _CONSTRUCTORS:
        yield torch, name, _on_place(getattr(torch, name), place)
    for holder in (torch, torch.Tensor):
        yield holder, "histc", _counted(holder.histc)
    yield F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention)
    check, hop = flex_attention._validate_device, "flex_attention_hop"

    def checked(query: torch.Tensor, *args: Any) -> None:
        if mark_of(query) is None:
            check(query, *args)

    yield flex_attention, "_validate_device", checked
    yield flex_attention, hop, _scored(getattr(flex_attention, hop))
    if hasattr(flex_attention, _EAGER_FLEX):  # otherwise it advises to compile what is eager here
        yield flex_attention, _EAGER_FLEX, True


def _on_place(make: Callable[..., Any], place: Callable[[Any], Any]) -> Callable[..., Any]:
    # A CPU build takes no number for a device, and pins no memory.
    @functools.wraps(make)
    def run(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = place(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return run


def _counted(true: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Count integers as ``histc`` does on a GPU alone."""

    @functools.wraps(true)
    def histc(own: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:  # noqa: A002  # as torch names them
        if own.is_floating_point() or mark_of(own) is None:
            return true(own, bins, min, max)
        low, high = (min, max) if min != max else (own.min().item(), own.max().item())
        low, high = (low - 1, high + 1) if low == high else (int(low), int(high))
        is_inside = (own >= low) & (own <= high)
        places = ((own.long() - low) * bins // (high - low)).clamp(0, bins - 1)
        return own.new_zeros(bins).index_add(0, places.flatten(), is_inside.flatten().to(own.dtype))

    return histc


def _attention(true: Callable[..., Any]) -> Callable[..., Any]:
    """Have attention run the kernel that a GPU would choose: DTensor shards none of the CPU's."""

    # Named as torch's: context parallelism replaces what it finds, by its name.
    @functools.wraps(true)
    def attention(  # noqa: PLR0913, PLR0917  # torch's signature
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,
    ) -> Any:
        own, enabled = [query, key, value], torch.backends.cuda
        is_on_gpu = any(isinstance(one, DTensor) or mark_of(one) for one in own)
        is_fused = enabled.flash_sdp_enabled() or enabled.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]  # torch's
        is_fused |= enabled.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # as above
        if not (is_on_gpu and is_fused and query.dim() == len("BHSD")):
            return true(*own, attn_mask, dropout_p, is_causal, **how)
        if torch.is_autocast_enabled("cpu"):
            own = [one.to(torch.get_autocast_dtype("cpu")) for one in own]
        aten, scale = torch.ops.aten, how.get("scale")
        if attn_mask is None:
            flash = aten._scaled_dot_product_flash_attention
            return flash(*own, dropout_p, is_causal, scale=scale)[0]
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=own[0].dtype)
            attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient, has_sums = aten._scaled_dot_product_efficient_attention, torch.is_grad_enabled()
        return efficient(*own, attn_mask, has_sums, dropout_p, is_causal, scale=scale)[0]

    return attention


def _scored(hop: Callable[..., Any]) -> Callable[..., Any]:
    """Give gradients to the parameters of a score function, which the compiler would find."""

    def run(query: torch.Tensor, key: Any, value: Any, score_mod: Any, *args: Any) -> Any:
        result, *sums = hop(query, key, value, score_mod, *args)
        places = [torch.zeros((), dtype=torch.int, device=CPU) for _ in range(4)]
        score = score_mod(query.new_zeros(()), *places)
        return (result + 0 * score.to(result.dtype) if score.requires_grad else result, *sums)

    return run
