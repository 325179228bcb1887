"""What a collective leaves on this rank if every peer holds what this rank holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from pytest_fsdp_comm.recording.operations import reduce_op

_Reduction = tuple[
    Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, int], torch.Tensor]
]
_REDUCED: Final[Mapping[str | None, _Reduction]] = {
    "sum": (lambda parts: parts.sum(0), lambda own, size: own * size),
    "product": (lambda parts: parts.prod(0), lambda own, size: own**size),
    "min": (lambda parts: parts.amin(0), lambda own, _: own),
    "max": (lambda parts: parts.amax(0), lambda own, _: own),
    "avg": (lambda parts: parts.double().mean(0), lambda own, _: own),
    "band": (functools.partial(functools.reduce, torch.bitwise_and), lambda own, _: own),
    "bor": (functools.partial(functools.reduce, torch.bitwise_or), lambda own, _: own),
    "bxor": (
        functools.partial(functools.reduce, torch.bitwise_xor),
        lambda own, size: own * (size % 2),
    ),
}
"""By name, of what several ranks hold, stacked, and of what a number of ranks hold alike."""


def reduction(bound: Mapping[str, Any]) -> _Reduction | None:
    """The reduction that a call asks for; None if it is not known, or the call reduces nothing."""
    return _REDUCED.get(reduce_op(bound.get("reduce_op", bound.get("red_op"))))


def parts_for_each(
    bound: Mapping[str, Any], sent: Sequence[torch.Tensor], size: int
) -> Sequence[torch.Tensor]:
    """What an all-to-all sends to each rank of a group of `size`."""
    if len(sent) == size > 1:
        return sent
    return torch.split(sent[0], bound.get("input_split_sizes") or len(sent[0]) // size)


def mirrored(
    kind: str,
    group: dist.ProcessGroup,
    bound: Mapping[str, Any],
    sent: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """The values of each output, from those that are sent; None for those that do not follow."""
    parts = _parts(kind, group, bound, sent, len(outputs))
    if not parts:
        return [None] * len(outputs)
    return [
        _filled(output, parts[place % len(parts)], group.size())
        for place, output in enumerate(outputs)
    ]


def _parts(
    kind: str,
    group: dist.ProcessGroup,
    bound: Mapping[str, Any],
    sent: Sequence[torch.Tensor],
    num_outputs: int,
) -> Sequence[torch.Tensor]:
    """What each output has once, or once for each rank, in turn; nothing if unknown."""
    rank, size = group.rank(), group.size()
    if kind in {"all_gather", "gather", "broadcast"}:
        return sent
    if kind == "all_to_all" and "gather_dim" not in bound:
        if len(sent) == size > 1:
            return [sent[rank]]
        part = parts_for_each(bound, sent, size)[rank]
        # Where parts of other sizes are awaited, peers hold something else.
        awaits = {*(bound.get("output_split_sizes") or [len(part)])}
        return [part.flatten().repeat(size)] if awaits == {len(part)} else ()
    reduced = reduction(bound)
    if reduced is None or kind not in {"all_reduce", "reduce_scatter"}:
        return ()
    if kind == "reduce_scatter":
        is_list = len(sent) != num_outputs
        sent = [sent[rank]] if is_list else [own.flatten().chunk(size)[rank] for own in sent]
    return [reduced[1](own, size) for own in sent]


def _filled(output: torch.Tensor, part: torch.Tensor, size: int) -> torch.Tensor | None:
    for times in (1, size):
        if part.numel() * times == output.numel():
            return part.flatten().repeat(times).view(output.shape).to(output.dtype)
    return None  # parts of unequal size, of which a peer holds others
