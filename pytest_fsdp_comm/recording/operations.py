"""Tables of the operations that communicate, with their kinds and the tensors that they send."""

# The tables list dispatched operations, not functions of torch.distributed, because functions come
# and go: dist.all_gather_single is new in torch 2.13, but it still calls c10d._allgather_base_.

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import torch
import torch.distributed as dist

from pytest_fsdp_comm.comm.events import REDUCING, Source

NAMESPACES: Final = frozenset(
    {
        *("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor"),
        "symm_mem",
    }
)

UNKNOWN: Final = "unknown:"
"""Prefix of the kind of an operation that is not in the tables, such as a symmetric-memory
operation. All its tensors count as sent."""


class Location(Enum):
    """Where an operation's tensors are, if no single named argument holds them."""

    NOWHERE = auto()
    """There are no tensors, or (for `received`) the operation overwrites the sent tensors."""
    RESULT = auto()
    ALL = auto()
    """In all arguments, because the operation is not in the tables."""


NOWHERE: Final = Location.NOWHERE

BATCH: Final = "batch"
"""Kind of an operation that runs several ``isend`` and ``irecv``, which we record one by one."""

TIMING_CATEGORIES: Final = ("all_gather", "all_gather_object", "reduce", "resharding", "all")
"""The categories in which a recording sums up host time; a call may count in several of them."""

_SENT_BY_UNITS: Final = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast"})

# Operations that send nothing: they wait, wrap a result, or look something up.
SILENT: Final = frozenset(
    {
        *("wait_tensor", "wait_tensors", "_wrap_tensor_autograd"),
        *("check_for_nan", "mesh_get_process_group"),
        # Symmetric memory: wait for data that other ranks wrote, read it or multiply it.
        *("nccl_wait_for_signal", "nccl_wait_signal", "nvshmem_wait_for_signal", "_rendezvous"),
        *("get_remote_tensors", "memset32_", "stream_write_value32_", "_async_input_mm"),
    }
)


@dataclass(frozen=True, slots=True)
class Operation:
    """How one operation communicates."""

    kind: str
    """One of `events.COLLECTIVE_KINDS`, ``unknown:<op>`` or, for several messages, `BATCH`."""
    sent: str | Location = "input"
    """The argument that holds the tensors to send, or a `Location`."""
    received: str | Location = Location.RESULT
    """The argument that holds the output tensors, or a `Location`."""
    root: str = ""
    """The argument that holds the root's group rank; empty if the operation has no root."""
    peer: str = ""
    """The argument that holds the peer's group rank (a list in a batch); empty without a peer."""

    def tensors_sent(self, bound: Mapping[object, object]) -> list[Any]:
        return tensors_in(bound if self.sent is Location.ALL else bound.get(self.sent))

    def tensors_received(self, bound: Mapping[object, object], result: object) -> list[Any]:
        return tensors_in(result if self.received is Location.RESULT else bound.get(self.received))


_C10D: Final = {
    "_allgather_base_": Operation("all_gather", "input_tensor", "output_tensor"),
    "allgather_": Operation("all_gather", "input_tensors", "output_tensors"),
    "allgather_coalesced_": Operation("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": Operation("all_gather", "inputs", "outputs"),
    "_reduce_scatter_base_": Operation("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_": Operation("reduce_scatter", "input_tensors", "output_tensors"),
    "reduce_scatter_tensor_coalesced_": Operation("reduce_scatter", "inputs", "outputs"),
    "allreduce_": Operation("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": Operation("all_reduce", "tensors", "tensors"),
    "broadcast_": Operation("broadcast", "tensors", "tensors", "root_rank"),
    "reduce_": Operation("reduce", "tensors", NOWHERE, "root_rank"),
    "gather_": Operation("gather", "input_tensors", "output_tensors", "root_rank"),
    "gather_into_tensor_": Operation("gather", "input_tensor", "output_tensor"),  # since torch 2.15
    "scatter_": Operation("scatter", "input_tensors", "output_tensors", "root_rank"),
    "alltoall_": Operation("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": Operation("all_to_all", "input", "output"),
    "send": Operation("send", "tensors", NOWHERE, peer="dst"),
    "recv_": Operation("recv", NOWHERE, "tensors", peer="src"),
    "recv_any_source_": Operation("recv", NOWHERE, "tensors"),
    "barrier": Operation("barrier", NOWHERE, NOWHERE),
    "monitored_barrier_": Operation("barrier", NOWHERE, NOWHERE),
}

# Two tables, because both namespaces have a ``broadcast_``, with different arguments.
_FUNCTIONAL: Final = {
    "all_gather_into_tensor": Operation("all_gather"),
    "all_gather_into_tensor_out": Operation("all_gather"),
    "all_gather_into_tensor_coalesced": Operation("all_gather", "inputs"),
    "reduce_scatter_tensor": Operation("reduce_scatter"),
    "reduce_scatter_tensor_out": Operation("reduce_scatter"),
    "reduce_scatter_tensor_coalesced": Operation("reduce_scatter", "inputs"),
    "all_reduce": Operation("all_reduce"),
    "all_reduce_": Operation("all_reduce"),
    "all_reduce_coalesced": Operation("all_reduce", "inputs"),
    "all_reduce_coalesced_": Operation("all_reduce", "inputs"),
    "all_to_all_single": Operation("all_to_all"),
    "broadcast": Operation("broadcast", root="src"),
    "broadcast_": Operation("broadcast", root="src"),
    "isend": Operation("send", "tensor", NOWHERE, peer="dst"),
    "irecv": Operation("recv", NOWHERE, "tensor", peer="src"),
    "batch_p2p_ops": Operation(BATCH, "tensors", "tensors", peer="peer_list"),  # seen in torch 2.13
    "shard_dim_alltoall": Operation("all_to_all"),
}


def find_operation(func: Any) -> Operation | None:
    """Return how a ``torch._ops.OpOverload`` communicates; None if it does not."""
    name = func.overloadpacket.__name__
    if func.namespace not in NAMESPACES or name in SILENT:
        return None
    operation = (_C10D if func.namespace == "c10d" else _FUNCTIONAL).get(name)
    return operation or Operation(f"{UNKNOWN}{name}", Location.ALL, NOWHERE)


class Call:
    """An operation that communicates, and the names and defaults of its arguments."""

    def __init__(self, func: Any, operation: Operation) -> None:
        """Read the arguments of `func` from its schema, which is private but lists them all."""
        self.func = func
        self.operation = operation
        self.namespace: str = func.namespace
        self.may_come_from_unit = self.namespace == "c10d" and operation.kind in _SENT_BY_UNITS
        """Whether FSDP units may call the operation directly. They call functional collectives only
        through DTensor, to reduce partial gradients."""
        self.op = f"{func.namespace}.{func.overloadpacket.__name__}"
        arguments = func._schema.arguments
        self._names = [argument.name for argument in arguments]
        self._defaults = {
            arg.name: arg.default_value for arg in arguments if arg.has_default_value()
        }

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[Any, Any]:
        """Return all arguments, keyed by name, with defaults for those that torch left out."""
        return {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}


@functools.cache
def call_of(func: object) -> Call | None:
    """Return the `Call` of an operation; None if it does not communicate."""
    operation = find_operation(func)
    return None if operation is None else Call(func, operation)


def group_of(bound: Mapping[object, object]) -> dist.ProcessGroup | None:
    """Return the process group among a call's arguments; None if there is none."""
    argument: Any = bound.get("process_group", bound.get("group_name"))
    group: dist.ProcessGroup | None = argument
    if isinstance(argument, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(argument)
    elif isinstance(argument, str):
        # Private, but torch's functional collectives call it too (checked in torch 2.7 to 2.13).
        distributed: Any = dist.distributed_c10d
        group = distributed._resolve_process_group(argument)
    return group


def has_async_flag() -> bool:
    """Whether c10d operations of this torch version take a flag for asynchronous calls."""
    arguments = torch.ops.c10d.allreduce_.default._schema.arguments
    # torch up to 2.13 uses one of these names.
    return not {"async_op", "asyncOp"}.isdisjoint(argument.name for argument in arguments)


def tensors_in(value: object) -> list[Any]:
    """Return all tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for entry in value for tensor in tensors_in(entry)]


def message_fields(
    operation: Operation,
    group: dist.ProcessGroup | None,
    bound: Mapping[object, Any],
    result: object,
) -> list[dict[str, object]]:
    """Return the `Collective` fields of each message in a call; only a batch has several."""
    if operation.kind == BATCH:
        batched = zip(bound["op_list"], bound[operation.peer], bound["tensors"], strict=True)
        calls = [(_FUNCTIONAL[name], number, tensor) for name, number, tensor in batched]
        return [
            message
            for call, number, tensor in calls
            for message in message_fields(call, group, {"tensor": tensor, call.peer: number}, None)
        ]
    sent = operation.tensors_sent(bound)
    received = operation.tensors_received(bound, result)
    root_rank = _group_rank_if_valid(group, bound[operation.root]) if operation.root else None
    if operation.kind == "broadcast":
        is_source = group is not None and group.rank() == root_rank
        sent, received = (sent, []) if is_source else ([], received)
    return [
        {
            "kind": operation.kind,
            "dtype": join_dtypes(tensor.dtype for tensor in sent or received),
            "nbytes_sent": _nbytes(sent),
            "nbytes_received": _nbytes(received),
            "peer": _peer_distance(group, bound[operation.peer]) if operation.peer else None,
            "root_rank": root_rank,
            "reduce_op": read_reduce_op(bound.get("reduce_op", bound.get("red_op"))),
            "is_async": bound.get("async_op", bound.get("asyncOp")),
        }
    ]


def list_reduce_scatter_parts(
    operation: Operation, bound: Mapping[object, object]
) -> tuple[tuple[str, int], ...]:
    """Return each tensor's dtype and bytes for a reduce-scatter, else (). See `Pending.parts`."""
    if operation.kind != "reduce_scatter":
        return ()
    tensors = operation.tensors_sent(bound)
    return tuple((_dtype_name(tensor.dtype), _nbytes([tensor])) for tensor in tensors)


def _group_rank_if_valid(group: dist.ProcessGroup | None, number: int | None) -> int | None:
    # torch's functional sends and broadcasts pass a global rank where a group rank is expected; the
    # global rank may be too large for the group.
    if group is None or number is None or not 0 <= number < group.size():
        return None
    return number


def _peer_distance(group: dist.ProcessGroup | None, number: int | None) -> int | None:
    rank = _group_rank_if_valid(group, number)
    return None if group is None or rank is None else (rank - group.rank()) % group.size()


def read_reduce_op(argument: object) -> str | None:
    """Return the name of a reduction, such as ``sum``, from a call's argument; None if unknown."""
    if argument is None:
        return None
    if isinstance(argument, str):  # functional collectives pass the name
        return argument.lower()
    # c10d passes a boxed object. Its only method, hidden in some torch versions, returns a number.
    number = getattr(argument, "op", None)
    return None if number is None else str(dist.ReduceOp.RedOpType(number()).name).lower()


def join_dtypes(dtypes: Iterable[torch.dtype]) -> str:
    """Join distinct dtypes in order of appearance, as in `comm.events.Collective.dtype`."""
    return "+".join(dict.fromkeys(map(_dtype_name, dtypes)))


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum([tensor.numel() * tensor.dtype.itemsize for tensor in tensors])


@functools.cache
def timing_categories(kind: str, source: Source) -> tuple[str, ...]:
    """Return the `TIMING_CATEGORIES` to which a collective's host time is added."""
    if kind == "all_gather":
        return ("all", "all_gather_object" if source is Source.OBJECT else "all_gather")
    return ("all", "reduce") if kind in REDUCING else ("all",)


# These are the operations that torch 2.13 tags data_dependent_output or dynamic_output_shape. We
# omit composite operations, because they call these: conversions to sparse tensors, for example,
# call nonzero (or masked_select in torch 2.7).
VALUE_READS: Final = tuple(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "equal", "index.Tensor", "nonzero", "masked_select", "bincount"),
        *("repeat_interleave.Tensor", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
        *("unique_dim_consecutive", "allclose"),
    )
)
"""The operations that return tensor values to Python, or whose output shape depends on values."""
