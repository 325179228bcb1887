"""Turns a call of an operation into an event: what went in, what came out, in which direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pytest_fsdp_comm.comm.events import Collective, Source
from pytest_fsdp_comm.recording.mesh_axes import group_of
from pytest_fsdp_comm.recording.operations import tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_fsdp_comm.recording.operations import Operation
    from pytest_fsdp_comm.recording.owners.place import Place

TIMING_CATEGORIES = ("all_gather", "all_gather_object", "reduce", "resharding", "H2D", "D2H")
_REDUCING = ("reduce_scatter", "all_reduce", "reduce")


def collective(
    operation: Operation, func: Any, bound: dict[str, Any], result: Any, at: tuple[int, Place]
) -> Collective:
    """The event of a call, before its modules and its group have names.

    Args:
        operation: As `op_table.look_up` tells.
        func: The ``OpOverload``.
        bound: Its arguments by name.
        result: What it returned.
        at: Place in the recording, and who asked for it.
    """
    index, place = at
    sent, received = _sent_and_received(operation, bound, result)
    dtypes = dict.fromkeys(
        str(tensor.dtype).removeprefix("torch.") for tensor in (sent or received)
    )
    return Collective(
        index=index,
        kind=operation.kind,
        op=f"{func.namespace}.{func.overloadpacket.__name__}",
        owner=None,
        issued_in=None,
        phase=place.phase,
        axis="",
        group_size=0,
        dtype="+".join(dtypes),
        nbytes_sent=_nbytes(sent),
        nbytes_received=_nbytes(received),
        source=place.source,
        call_site=place.scan.call_site,
    )


def timing_category(kind: str, source: Source) -> str | None:
    """The category of `TIMING_CATEGORIES` that a collective's seconds belong to; None for none."""
    if kind == "all_gather":
        return "all_gather_object" if source is Source.OBJECT else "all_gather"
    return "reduce" if kind in _REDUCING else None


def copy_direction(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Literal["H2D", "D2H"] | None:
    """Whether a ``_to_copy`` or ``copy_`` crosses between host and device; None if it does not."""
    if func.overloadpacket.__name__ == "_to_copy":
        target = kwargs.get("device")
        source = args[0].device.type
        to = getattr(target, "type", target)
    else:
        to, source = args[0].device.type, args[1].device.type
    if to is None or to == source or "meta" in (to, source):
        return None
    if source == "cpu":
        return "H2D"
    return "D2H" if to == "cpu" else None


def _sent_and_received(
    operation: Operation, bound: dict[str, Any], result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if operation.sent == "*":
        return list(tensors_in(bound)), []
    sent = list(tensors_in(bound.get(operation.sent))) if operation.sent else []
    if operation.received == "return":
        received = list(tensors_in(result))
    else:
        received = list(tensors_in(bound.get(operation.received))) if operation.received else []
    if operation.root:
        group = group_of(bound)
        is_root = group is not None and group.rank() == bound.get(operation.root)
        return (sent, []) if is_root else ([], received)
    return sent, received


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
