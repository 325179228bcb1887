"""Set attributes of torch's classes and modules while recordings run; no other module does."""

# Note [Patches]: a step is watched by plain attributes, which are set when the first recording of
# the process begins and put back when the last one ends. Each replacement asks `active.entered`
# whom it serves, so one that somebody has kept serves later recordings too, or none.
# What the compiler traced through a replacement it would trace again later, so while it traces, all
# originals are back. Frames of this package that run beside compiled code it skips.
# Global hooks of modules would switch torch.compile off and leak after an error, hence
# `nn.Module.__call__`. Methods other than forward that enter a unit of FSDP2
# (register_fsdp_forward_method) call FSDPState's `_pre_forward` and `_post_forward` by name.
# DDP's communication hooks chain collectives in Future.then (PowerSGD does). Whether such a
# callback runs at once or later on a thread of the backend is a race, so both must be recorded, and
# attributed alike: to what registered the callback.
# What was captured before the block, as by the hooks of a graph, is not watched.
# Read in torch 2.6 to 2.15.

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.autograd.graph
from torch import nn

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.recording import active
from pytest_fsdp_comm.recording.active import entered
from pytest_fsdp_comm.recording.owners.fsdp import IS_WATCHED, Around, watched_methods
from pytest_fsdp_comm.recording.owners.stack import engine_code
from pytest_fsdp_comm.recording.value_dependence import shows_values

Attribute = tuple[Any, str, Any]
"""The holder of an attribute, its name and its replacement."""

_INPUTS: Final = slice(3, 4)
"""The argument of a call of the engine, after the outputs, of what it computes the gradients."""
_INHERITED: Final = object()
_lock = threading.RLock()
_num_users = 0
_patches: list[_Patch] = []


class _Patch:
    def __init__(self, holder: Any, name: str, replacement: Any) -> None:
        self._holder, self._name, self._replacement = holder, name, replacement
        self._found = vars(holder).get(name, _INHERITED)

    def put(self) -> None:
        if vars(self._holder).get(self._name, _INHERITED) is self._found:
            setattr(self._holder, self._name, self._replacement)

    def take(self) -> None:
        # Otherwise somebody else has replaced it since, and calls this one.
        if vars(self._holder).get(self._name) is self._replacement:
            if self._found is _INHERITED:
                delattr(self._holder, self._name)
            else:
                setattr(self._holder, self._name, self._found)


@contextlib.contextmanager
def patched(*attributes: Attribute) -> Iterator[None]:
    """Have attributes replaced while the block runs."""
    patches = [_Patch(*attribute) for attribute in attributes]
    _put(patches)
    try:
        yield
    finally:
        _take(patches)


def _put(patches: Iterable[_Patch]) -> None:
    for patch in patches:
        patch.put()


def _take(patches: Sequence[_Patch]) -> None:
    for patch in reversed(patches):
        patch.take()


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Have recordings told of what their threads do while the block runs. See Note [Patches]."""
    global _num_users  # noqa: PLW0603  # the patches are the process's
    with _lock:
        if not _num_users:
            hide_from_compiler()
            handler = _compiler_callbacks()
            _patches[:] = [_Patch(*attribute) for attribute in _attributes()]
            _register(handler)
            _put(_patches)
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if not _num_users:
                _take(_patches)
                _patches.clear()


@functools.cache
def hide_from_compiler() -> None:
    """Have the compiler skip frames of this package, which run beside code that it compiles."""
    upstream.look_up("torch._dynamo.trace_rules", "add")(__package__.split(".")[0])


def _compiler_callbacks() -> Any:
    return upstream.look_up("torch._dynamo.callback", "callback_handler")


def _register(handler: Any) -> None:
    if _before_tracing not in handler.start_callbacks:
        handler.register_start_callback(_before_tracing)
        handler.register_end_callback(_after_tracing)


def _before_tracing(_: object) -> None:
    _take(_patches)


def _after_tracing(_: object) -> None:
    _put(_patches)


def _attributes() -> Iterator[Attribute]:
    from torch.distributed.fsdp._fully_shard._fsdp_state import (  # noqa: PLC0415  # loads torch.distributed
        FSDPState,
    )

    engine_code()  # now, while it is torch's
    handler = _compiler_callbacks()
    modes: Any = sys.modules.get("torch.distributed._local_tensor")  # new in torch 2.9
    wrappers: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (nn.Module, "__call__", _call),
        (torch.autograd.graph, "_engine_run_backward", _engine),
        (torch.autograd, "_engine_run_backward", _engine),
        (FSDPState, "_pre_forward", _pre_forward),
        (FSDPState, "_post_forward", _post_forward),
        *(
            (holder, name, functools.partial(_watched, name, around))
            for holder, name, around in watched_methods()
        ),
        # The base, since work.get_future() gives a plain one.
        *((torch._C.Future, name, _registering) for name in ("then", "add_done_callback")),
        # Executors and timers start by it too.
        (threading.Thread, "start", _start),
        *((torch.Tensor, name, _reading) for name in ("tolist", "numpy", "tensor_split")),
        (torch, "tensor_split", _reading),
        # It lies above every kernel, and does what a collective would.
        *([] if modes is None else [(modes.LocalTensorMode, "__torch_dispatch__", _local_ranks)]),
        (handler, "clear", _clear),  # by torch._dynamo.reset() in the block
    ]
    for holder, name, wrapper in wrappers:
        original = getattr(holder, name)
        replacement = functools.update_wrapper(wrapper(original), original)
        setattr(replacement, IS_WATCHED, True)
        yield holder, name, replacement


def _clear(original: Any) -> Any:
    def clear() -> None:
        original()
        _register(_compiler_callbacks())

    return clear


def _call(original: Any) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorders = entered()
        depths = [(recorder, recorder.enter_module(self)) for recorder in recorders]
        try:
            return original(self, *args, **kwargs)
        finally:
            for recorder, depth in depths:
                recorder.backward.leave(depth)

    return call


def _engine(original: Any) -> Any:
    def engine(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorders = entered()
        inputs = (*args[_INPUTS], ())[0]
        adds = kwargs.get("accumulate_grad", True)
        depths = [(one, one.enter_engine(outputs, inputs or (), adds=adds)) for one in recorders]
        try:
            return original(outputs, *args, **kwargs)
        finally:
            for recorder, depth in depths:
                recorder.backward.leave(depth)
                # Before somebody zeroes the gradients.
                recorder.tensors.settle_new()

    return engine


def _pre_forward(original: Any) -> Any:
    def pre_forward(state: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        for recorder in entered():
            recorder.enter_module(module)
        return original(state, module, *args, **kwargs)

    return pre_forward


def _post_forward(original: Any) -> Any:
    def post_forward(state: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return original(state, module, *args, **kwargs)
        finally:
            for recorder in entered():
                recorder.backward.leave_method(module)

    return post_forward


def _watched(name: str, around: Around, original: Any) -> Any:
    def watched(held: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # A patch that somebody left around an earlier replacement still calls that one.
        call = name, id(held)
        watches = [one.units for one in entered() if call not in one.units.running]
        if not watches:
            return original(held, *args, **kwargs)
        given = (*args, *kwargs.values())
        calls = [around(watch, held, given) for watch in watches]
        acting = [*zip(watches, map(next, calls), strict=True)]
        for watch, unit in acting:
            watch.running.add(call)
            if unit is not None:
                watch.acting.append(unit)
        try:
            result = original(held, *args, **kwargs)
            for one in calls:
                next(one, None)
        finally:
            for watch, unit in acting:
                watch.running.discard(call)
                if unit is not None:
                    watch.acting.pop()
        return result

    return watched


def _registering(original: Any) -> Any:
    def register(future: Any, callback: Callable[..., Any]) -> Any:
        recorders, _ = active.whose_call()
        registered = [(recorder, recorder.attribute_callback()) for recorder in recorders]

        @functools.wraps(callback)
        def run(*args: Any) -> Any:
            with contextlib.ExitStack() as resumed:
                for recorder, attribution in registered:
                    resumed.enter_context(recorder.resumed(attribution))
                return callback(*args)

        return original(future, run if registered else callback)

    return register


def _start(original: Any) -> Any:
    def start(thread: threading.Thread) -> None:
        active.note_start(thread)
        original(thread)

    return start


def _reading(original: Any) -> Any:
    """Wrap a method that reads values without any operation that has a kernel."""
    name = original.__name__

    def read(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorders = entered()
        if recorders and not torch.compiler.is_compiling():
            for recorder in recorders if shows_values(name, args, kwargs) else ():
                recorder.note_read_by_method(name)
        return original(*args, **kwargs)

    return read


def _local_ranks(original: Any) -> Any:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        for recorder in entered():
            recorder.note_unseen(
                "ranks of LocalTensorMode sent above torch's dispatcher; run the block without it, "
                "as by @pytest.mark.distributed"
            )
        return original(*args, **kwargs)

    return dispatch
