"""Replaces streams and waits on a simulated rank, to follow the order in which a GPU would run."""

# While a recording runs, these replacements pass the order of everything to `overlap.Timeline`:
# - A synchronous collective runs on the current stream, an asynchronous one on a stream of its
#   process group, and a send or receive on a stream of its pair of ranks, as with NCCL.
# - Waiting for a collective makes the current stream wait. Only a barrier makes the host wait.
# - torch takes the simulation's mode for a compiler, and would wait for a functional collective at
#   once. Instead, the first operation that uses the result waits, as with AsyncCollectiveTensor.
# - Autograd runs a node on the stream of its forward, after the streams that computed its inputs.
# FSDP2 takes its streams from torch.cpu, since simulated tensors are on the CPU.

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, Self, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.futures import Future
from torch.utils import flop_counter

from pytest_fsdp_comm.recording.active import entered_recorders
from pytest_fsdp_comm.recording.frames import (
    find_author,
    find_caller,
    is_outside_torch,
    torch_path_prefix,
    walk_outwards,
)
from pytest_fsdp_comm.recording.operations import UNKNOWN, VALUE_READS
from pytest_fsdp_comm.recording.overlap import current_overlap
from pytest_fsdp_comm.recording.owners.attribution import list_output_nodes
from pytest_fsdp_comm.recording.owners.stack import BELOW_DISPATCHER
from pytest_fsdp_comm.recording.patches import Replacement, wrap_attribute
from pytest_fsdp_comm.recording.value_dependence import is_mask, is_one_hot_with_classes
from pytest_fsdp_comm.simulation.memory import OperatorCall
from pytest_fsdp_comm.simulation.overlap import NOTHING, Clock, StreamPosition, Timeline
from pytest_fsdp_comm.upstream import look_up

_Work: TypeAlias = tuple[nn.Module | None, int]
"""The running module and the FLOPs of an operation."""
_ATTENTION: Final = "_scaled_dot_product_flash_attention_for_cpu"
_ASYNC: Final = "AsyncCollectiveTensor"
_AsyncTensor: Final[Any] = functional.AsyncCollectiveTensor
_WRAP: Final = "_maybe_wrap_tensor"  # checked in torch 2.7 to 2.15
_SCALER: Final = (torch_path_prefix() + "amp/grad_scaler.py",)
"""The file in which torch reads tensors that it has created on the GPU itself."""
_HOST_SIDE: Final = tuple(torch_path_prefix() + path for path in ("optim/", "utils/data/"))
"""Files of torch that read tensors on the host, such as step counts and a sampler's indices."""
_PASS_ON: Final = (torch_path_prefix() + "distributed/_tools/", *BELOW_DISPATCHER)
"""Files of torch that run an operation for its caller, such as the tracker of ``estimate=``."""
_next_node: Final[Callable[[], int]] = look_up("torch.autograd", "_get_sequence_nr")
_ACCUMULATES: Final = 2**63
"""Numbers of nodes from here on belong to AccumulateGrad, which is not created in forward."""
_numbers: Final = itertools.count(1)
_COLLECTIVES: Final = (
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "reduce"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter"),
)
"""Methods of a process group whose first argument receives the results."""
_outputs: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()
"""The tensors that receive the results of each collective's ``Work``."""


class SimulatedStream:
    """Replaces the streams of torch.cuda and torch.cpu."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.stream_id = next(_numbers)
        self._outer: list[SimulatedStream] = []

    def __enter__(self) -> Self:
        self._outer.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._outer.pop())

    def query(self) -> bool:
        return True

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = SimulatedEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        if isinstance(event, SimulatedEvent):
            event.wait(self)

    def wait_stream(self, stream: SimulatedStream) -> None:
        if isinstance(stream, SimulatedStream):
            self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class SimulatedEvent:
    """Replaces the events of torch.cuda and torch.cpu."""

    def __init__(self, *_: object, **__: object) -> None:
        self._clock = NOTHING
        self._overlap: StreamOrder | None = None

    def query(self) -> bool:
        return True

    def record(self, stream: SimulatedStream | None = None) -> None:
        self._overlap = current_order()
        if self._overlap is not None:
            self._clock = self._overlap.timeline.record(stream or current_stream())

    def wait(self, stream: SimulatedStream | None = None) -> None:
        # An event of an earlier recording comes after nothing of this one.
        if self._overlap is not None and self._overlap is current_order():
            self._overlap.timeline.wait(stream or current_stream(), self._clock)

    def synchronize(self) -> None:
        wait_on_host("synchronize", self._clock if self._overlap is current_order() else NOTHING)


def _simulated_stream_context(stream: object) -> contextlib.AbstractContextManager[object]:
    """Replace ``torch.cuda.stream(...)``, which accepts None, and streams of other packages."""
    return stream if isinstance(stream, SimulatedStream) else contextlib.nullcontext()


_default: Final = SimulatedStream()


class _Thread(threading.local):
    way: str | None = None
    """The public function that makes the host wait, while its operations run. It is set by
    `count_waits_as`."""

    def __init__(self) -> None:
        self.stream = _default
        # Autograd numbers each thread's nodes. For each run of nodes that forward created on one
        # stream: the number of the first node, and the stream.
        self.firsts = [0]
        self.streams = [_default]

    def set_stream(self, stream: SimulatedStream) -> None:
        self.stream, first = stream, _next_node()
        if self.firsts[-1] == first:  # the last stream got no nodes
            self.firsts.pop()
            self.streams.pop()
        if not self.streams or self.streams[-1] is not stream:
            self.firsts.append(first)
            self.streams.append(stream)

    def stream_of(self, node: Any, otherwise: SimulatedStream) -> SimulatedStream:
        """Return the stream of a node's forward; `otherwise` for an AccumulateGrad."""
        number = node._sequence_nr()
        if number >= _ACCUMULATES:
            return otherwise
        return self.streams[bisect_right(self.firsts, number) - 1]


_thread = _Thread()


def current_stream(_: object = None) -> SimulatedStream:
    """Return the stream that this thread issues operations on."""
    return _thread.stream


def default_stream(_: object = None) -> SimulatedStream:
    """Return the stream that every thread starts with."""
    return _default


def set_stream(stream: SimulatedStream) -> None:
    """Issue this thread's next operations on a stream."""
    _thread.set_stream(stream)


def synchronize(_: object = None) -> None:
    """Wait for all streams of a device."""
    overlap = current_order()
    wait_on_host("synchronize", NOTHING if overlap is None else overlap.timeline.record_all())


def stream_patches(module: object, event: type[SimulatedEvent]) -> Iterator[Replacement]:
    """Replace the streams of a module such as torch.cuda, whose events are of type `event`."""
    replacements: dict[str, object] = {
        **dict.fromkeys(("Stream", "ExternalStream"), SimulatedStream),
        **dict.fromkeys(("StreamContext", "stream"), _simulated_stream_context),
        "Event": event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
    }
    for name, replacement in replacements.items():
        if hasattr(module, name):
            yield module, name, replacement


def wait_patches() -> Iterator[Replacement]:
    """Replace the ways to wait for a collective."""
    yield from stream_patches(torch.cpu, SimulatedEvent)
    for name in ("wait", "synchronize"):
        yield wrap_attribute(FakeWork, name, _simulated_work_wait)
    yield FakeWork, "get_future", _simulated_get_future
    for name in filter(functools.partial(hasattr, dist.ProcessGroup), _COLLECTIVES):
        yield wrap_attribute(dist.ProcessGroup, name, _run_and_store_outputs)
    look_up(functional.__name__, _WRAP)
    yield functional, _WRAP, lambda tensor: tensor
    # DTensor and user code wait themselves if a result is an AsyncCollectiveTensor.
    for name in ("wait", "trigger_wait"):
        yield FakeTensor, name, _simulated_result_wait
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(_ASYNC) is _AsyncTensor:
            yield module, _ASYNC, _InFlight


class _InFlightType(type(_AsyncTensor)):  # type: ignore[misc]  # a class written in C++
    def __instancecheck__(cls, value: object) -> bool:
        if isinstance(value, FakeTensor):
            order = current_order()
            return order is not None and order.is_in_flight(value)
        return isinstance(value, _AsyncTensor)


class _InFlight(_AsyncTensor, metaclass=_InFlightType):  # type: ignore[misc]  # as above
    """Replaces ``AsyncCollectiveTensor``; also has results that nobody has waited for."""


def _simulated_result_wait(tensor: FakeTensor) -> FakeTensor:
    order = current_order()
    if order is not None:
        order.wait_for_results([tensor])
    return tensor


def _simulated_work_wait(
    wait: Callable[..., object], work: object, *args: object, **kwargs: object
) -> object:
    overlap = current_order()
    if overlap is not None:
        overlap.wait_for(work)
    return wait(work, *args, **kwargs)


class _SimulatedFuture(Future[Any]):
    """A future of a collective, which makes the current stream wait like its ``Work``."""

    work: Any
    """Has a method `wait`, such as a ``Work`` or an event."""

    def wait(self) -> object:
        self.work.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> _SimulatedFuture:
        """Run the callback on a stream of its own, as torch does for tensors of a GPU.

        Read in ``Future::invokeCallback``, ``aten/src/ATen/core/ivalue_inl.h``.
        """
        chained = _SimulatedFuture()
        with SimulatedStream() as stream:
            chained.set_result(callback(self))
        chained.work = stream.record_event()
        return chained

    def value(self) -> object:
        self.work.wait()
        return super().value()


def _simulated_get_future(work: dist.Work) -> _SimulatedFuture:
    future = _SimulatedFuture()
    future.work = work
    future.set_result(_outputs.get(work))  # torch's fake backend completes futures with None
    return future


def _run_and_store_outputs(
    collective: Callable[..., object], group: object, outputs: object, *args: Any, **kwargs: Any
) -> object:
    work = collective(group, outputs, *args, **kwargs)
    if isinstance(work, FakeWork):
        _outputs[work] = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return work


def current_order() -> StreamOrder | None:
    """Return the order of the running recording; None if nothing is recorded."""
    return cast("StreamOrder | None", current_overlap())


class StreamOrder:
    """What a simulated rank has issued since the outermost recording began."""

    def __init__(self) -> None:
        self.timeline: Timeline[_Work] = Timeline()
        # Positions of asynchronous calls, keyed by the id of their `Work`, which the value keeps.
        self._works: dict[int, tuple[Any, StreamPosition, bool]] = {}
        # Positions of functional collectives whose results nobody has used, keyed by the address
        # of the result's storage, which the value keeps.
        self._results: dict[int, tuple[Any, StreamPosition | None]] = {}
        self._latest: StreamPosition | None = None

    # The recorder calls the next three methods; see `recording.overlap.Overlap`.

    def issue(self, group: object, message: Mapping[str, Any], result: object) -> StreamPosition:
        stream: Any = current_stream()
        communicator = group, message["peer"]
        # Operations on symmetric memory are kernels of the current stream.
        if message["is_async"] is not False and not message["kind"].startswith(UNKNOWN):
            self.timeline.wait(communicator, self.timeline.record(stream))
            stream = communicator
        position = self._latest = self.timeline.communicate(stream, communicator)
        is_barrier = message["kind"] == "barrier"
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.ScriptObject):
                work = distributed_c10d.Work.unbox(value)
                self._works[id(work)] = work, position, is_barrier
        return position

    def work_beside(self, position: StreamPosition) -> Iterator[_Work]:
        return self.timeline.work_beside(position)

    @contextlib.contextmanager
    def use_forward_streams(self, outputs: Iterable[object]) -> Iterator[None]:
        if _thread.streams == [current_stream()]:
            yield
            return
        stream = current_stream()
        with contextlib.ExitStack() as hooks:
            used = _add_stream_hooks(outputs, hooks)
            try:
                yield
            finally:
                set_stream(stream)
                for other in used:  # as at the end of the engine's C++ code
                    stream.wait_stream(other)

    def wait_for(self, work: object) -> None:
        """Make the current stream wait for a collective, and for a barrier also the host."""
        if id(work) in self._works:
            _, position, is_barrier = self._works[id(work)]
            self.timeline.wait(current_stream(), position.end)
            if is_barrier:
                wait_on_host("barrier", position.end)

    def wait_for_latest(self) -> None:
        """Make the current stream wait for the latest collective."""
        if self._latest is not None:
            self.timeline.wait(current_stream(), self._latest.end)

    def track_functional_results(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the first operation that uses a functional collective's results wait for it."""
        for tensor in tensors if self._latest is not None else ():
            storage = tensor.untyped_storage()
            self._results[storage._cdata] = storage, self._latest

    def is_in_flight(self, tensor: torch.Tensor) -> bool:
        """Whether nobody has waited for the functional collective that returned a tensor."""
        return tensor.untyped_storage()._cdata in self._results

    def wait_before_use(self, op: OperatorCall) -> None:
        """Note that an operation on the current stream is about to use its tensors."""
        if self._results and not _is_view(op.func):
            self.wait_for_results(op.tensors)

    def wait_for_results(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the current stream wait for the functional collectives that returned tensors."""
        for tensor in tensors:
            _, position = self._results.pop(tensor.untyped_storage()._cdata, (None, None))
            if position is not None:
                self.timeline.wait(current_stream(), position.end)

    def note_computation(self, op: OperatorCall, result: object) -> None:
        """Note an operation that has run on the current stream, if it has FLOPs."""
        count = _find_flop_formula(op.func)
        flops = 0 if count is None else count(*op.args, **op.kwargs, out_val=result)
        if flops:
            recorders = entered_recorders()
            module = recorders[-1].running_module() if recorders else None
            self.timeline.compute(current_stream(), (module, flops))


def _add_stream_hooks(
    outputs: Iterable[object], hooks: contextlib.ExitStack
) -> set[SimulatedStream]:
    """Switch streams around the nodes of a graph; return the streams other than the current."""
    caller = current_stream()
    # Events of nodes on other streams, keyed by the nodes that wait for them.
    events: defaultdict[Any, list[SimulatedEvent]] = defaultdict(list)
    streams = _map_nodes_to_streams(outputs)
    for root in list_output_nodes(outputs):
        if streams[root] is not caller:
            events[root].append(caller.record_event())
    for node, stream in streams.items():
        consumers = [c for c, _ in node.next_functions if c and streams[c] is not stream]
        if consumers:
            record = functools.partial(
                _record_event_for_consumers, stream, [events[consumer] for consumer in consumers]
            )
            hooks.callback(node.register_hook(record).remove)
    for node, stream in streams.items():
        if stream is not caller or node in events:
            enter = functools.partial(_enter_stream_after_events, stream, events.get(node, ()))
            hooks.callback(node.register_prehook(enter).remove)
            hooks.callback(node.register_hook(lambda *_: set_stream(caller)).remove)
    return {*streams.values()} - {caller}


def _map_nodes_to_streams(outputs: Iterable[object]) -> dict[Any, SimulatedStream]:
    """Return the stream of each node in a graph."""
    caller, pending = current_stream(), list_output_nodes(outputs)
    streams = {root: _thread.stream_of(root, caller) for root in pending}
    while pending:
        node = pending.pop()
        for consumer, _ in node.next_functions:
            if consumer is not None and consumer not in streams:
                streams[consumer] = _thread.stream_of(consumer, streams[node])
                pending.append(consumer)
    return streams


def _record_event_for_consumers(
    stream: SimulatedStream, events: Iterable[list[SimulatedEvent]], *_: object
) -> None:
    event = stream.record_event()
    for listed in events:
        listed.append(event)


def _enter_stream_after_events(
    stream: SimulatedStream, events: Iterable[SimulatedEvent], *_: object
) -> None:
    set_stream(stream)
    for event in events:
        stream.wait_event(event)


def wait_on_host(way: str, event: Clock | None = None) -> None:
    """Note that the host waits for an event; None for everything on the current stream."""
    overlap, way = current_order(), _thread.way or way
    if overlap is None or way == _UNCOUNTED:
        return
    for recorder in entered_recorders():
        recorder.note_host_wait(way)
    timeline = overlap.timeline
    timeline.wait_on_host(timeline.record(current_stream()) if event is None else event)


_UNCOUNTED: Final = "-"


@contextlib.contextmanager
def count_waits_as(way: str = _UNCOUNTED) -> Iterator[None]:
    """Count waits in the block as `way`, or not at all."""
    outer, _thread.way = _thread.way, way
    try:
        yield
    finally:
        _thread.way = outer


@functools.cache
def _is_view(func: object) -> bool:
    # AsyncCollectiveTensor does not wait for these either.
    arguments = func._schema.arguments if isinstance(func, OpOverload) else ()
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and not alias.is_write


@functools.cache
def _find_flop_formula(func: OpOverload) -> Callable[..., int] | None:
    """Return the function that counts an operation's FLOPs; None if it has none."""
    packet = getattr(func, "overloadpacket", func)
    formula = _CPU_FORMULAS.get(getattr(packet, "__name__", ""))
    return formula or flop_counter.flop_registry.get(packet)


def _grouped_mm_flops(first: torch.Tensor, second: torch.Tensor, *_: object, **__: object) -> int:
    num_groups = first.shape[0] if first.dim() == second.dim() == len("GMK") else 1
    return int(2 * num_groups * first.shape[-2] * first.shape[-1] * second.shape[-1])


def _make_flop_formula(count: Any, num_tensors: int) -> Callable[..., int]:
    return lambda *args, **_: int(count(*(tensor.shape for tensor in args[:num_tensors])))


# Operations that torch's registry lacks.
_CPU_FORMULAS: Final[dict[str, Callable[..., int]]] = {
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped_mm_flops),
    _ATTENTION: _make_flop_formula(flop_counter.sdpa_flop_count, 3),
    f"{_ATTENTION}_backward": _make_flop_formula(flop_counter.sdpa_backward_flop_count, 4),
}

_MASKED: Final = "boolean_index"
_WAYS: Final = {
    "_local_scalar_dense": "item",
    **dict.fromkeys(("index", "index_put", "index_put_"), _MASKED),
    "_unique": "unique",
    "_unique2": "unique",
}


def note_wait_of_read(op: OperatorCall, *, is_on_gpu: bool | None) -> None:
    """Note an operation that reads values; `is_on_gpu` is None if the test uses no GPU."""
    way, args = find_way_of_read(op.func), op.args
    if way is None or op.kwargs.get("output_size") is not None:
        return
    if is_on_gpu is False and not _is_called_from(_SCALER):
        return
    if way == _MASKED:
        # A GPU writes a single value wherever the mask is true, without counting.
        is_single_value = any(value.numel() == 1 for value in args[2:3])
        if is_single_value or not any(map(is_mask, args[1])):
            return
    if way == "item" and is_one_hot_with_classes(find_caller()):
        return
    if is_on_gpu is None and _is_called_from(_HOST_SIDE):
        return
    wait_on_host(way)


def _find_caller_of_operation() -> FrameType | None:
    """Return the frame that called the running operation, which may be torch's."""
    for frame in walk_outwards(sys._getframe(1)):
        file = frame.f_code.co_filename
        if find_author(file) != "ours" and not file.startswith(_PASS_ON):
            return frame
    return None


def _is_called_from(paths: tuple[str, ...]) -> bool:
    caller = _find_caller_of_operation()
    return caller is not None and caller.f_code.co_filename.startswith(paths)


def is_called_by_user() -> bool:
    """Whether code outside torch called the running operation, not torch itself."""
    caller = _find_caller_of_operation()
    return caller is not None and is_outside_torch(caller)


@functools.cache
def find_way_of_read(func: OpOverload) -> str | None:
    """Return how an operation that makes the host wait for values is called; None for others."""
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    schema = getattr(func, "_schema", None)
    qualified = f"{schema.name}.{schema.overload_name}".rstrip(".") if schema else ""
    if qualified in VALUE_READS or name in {"index_put", "index_put_"}:
        return _WAYS.get(name, name)
    return None
