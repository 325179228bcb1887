"""Patch torch while a recording is active."""

# Note [Patches]: We replace functions of torch when the first recording of the process begins, and
# restore them when the last recording ends. Code that has stored a replacement may still call it
# after that; the call then finds no running recording (`active.entered`), and records nothing.
# While torch.compile is tracing, we restore all originals, because it would otherwise recompile
# after the block. We also make it skip frames of this package, which run around compiled code.
# We replace `nn.Module.__call__` because global module hooks would switch torch.compile off and
# leak after an error. We replace FSDPState's `_pre_forward` and `_post_forward` because methods
# registered with register_fsdp_forward_method call them, not `__call__`.
# DDP's communication hooks may chain collectives with Future.then, as PowerSGD does. Depending on a
# race, the callback runs at once, or later on a thread of the backend. In both cases we record its
# collectives and attribute them to the code that registered the callback.
# Code that captured a function before the block, such as the hooks of an autograd graph, calls the
# original, so we do not see these calls.
# Checked in torch 2.6 to 2.15.

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
"""A class or module, the name of an attribute, and its replacement."""

_INPUTS: Final = slice(3, 4)
"""The place of `inputs` among the engine's positional arguments after `outputs`, as a slice."""
_INHERITED: Final = object()
_lock = threading.RLock()
_num_users = 0
_patches: list[_Patch] = []


class _Patch:
    def __init__(self, holder: Any, name: str, replacement: Any) -> None:
        self._holder, self._name, self._replacement = holder, name, replacement
        self._original = vars(holder).get(name, _INHERITED)

    def put(self) -> None:
        if vars(self._holder).get(self._name, _INHERITED) is self._original:
            setattr(self._holder, self._name, self._replacement)

    def take(self) -> None:
        # If a library has since wrapped our replacement, leave its wrapper, which calls ours.
        if vars(self._holder).get(self._name) is self._replacement:
            if self._original is _INHERITED:
                delattr(self._holder, self._name)
            else:
                setattr(self._holder, self._name, self._original)


@contextlib.contextmanager
def patched(*attributes: Attribute) -> Iterator[None]:
    """Replace attributes while the block runs."""
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
    """Patch torch while the block runs, so that recordings see its events. See Note [Patches]."""
    global _num_users  # noqa: PLW0603  # the whole process shares the patches
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
    """Make the compiler skip frames of this package, which run around compiled code."""
    upstream.look_up("torch._dynamo.trace_rules", "add")(__package__.split(".")[0])


def _compiler_callbacks() -> Any:
    return upstream.look_up("torch._dynamo.callback", "callback_handler")


def _register(handler: Any) -> None:
    if _before_tracing not in handler.start_callbacks:
        handler.register_start_callback(_before_tracing)
        handler.register_end_callback(_after_tracing)


def _before_tracing(*_: object) -> None:  # torch 2.7 passes nothing
    _take(_patches)


def _after_tracing(*_: object) -> None:
    _put(_patches)


def _attributes() -> Iterator[Attribute]:
    from torch.distributed.fsdp._fully_shard._fsdp_state import (  # noqa: PLC0415  # loads torch.distributed
        FSDPState,
    )

    engine_code()  # cache the code now, before its function is replaced
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
        # Patch the base class, because work.get_future() returns an instance of it.
        *((torch._C.Future, name, _registering) for name in ("then", "add_done_callback")),
        # Executors and timers start their threads through this method too.
        (threading.Thread, "start", _start),
        *((torch.Tensor, name, _reading) for name in ("tolist", "numpy", "tensor_split")),
        (torch, "tensor_split", _reading),
        # LocalTensorMode emulates collectives above all kernels, so we can only report a gap.
        *([] if modes is None else [(modes.LocalTensorMode, "__torch_dispatch__", _local_ranks)]),
        (handler, "clear", _clear),  # otherwise torch._dynamo.reset() drops our callbacks
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
        depths = [(each, each.enter_engine(outputs, inputs or (), adds=adds)) for each in recorders]
        try:
            return original(outputs, *args, **kwargs)
        finally:
            for recorder, depth in depths:
                recorder.backward.leave(depth)
                # Look for results among the gradients now, before user code zeroes them.
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
    def watched(unit: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # Watch a call only once: it gets here twice if a library wrapped an earlier replacement.
        call = name, id(unit)
        watches = [recorder.units for recorder in entered() if call not in recorder.units.running]
        if not watches:
            return original(unit, *args, **kwargs)
        arguments = (*args, *kwargs.values())
        generators = [around(watch, unit, arguments) for watch in watches]
        acting = [*zip(watches, map(next, generators), strict=True)]
        for watch, acting_unit in acting:
            watch.running.add(call)
            if acting_unit is not None:
                watch.acting.append(acting_unit)
        try:
            result = original(unit, *args, **kwargs)
            for generator in generators:
                next(generator, None)
        finally:
            for watch, acting_unit in acting:
                watch.running.discard(call)
                if acting_unit is not None:
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
    """Wrap a method that reads tensor values without calling an operation that has our kernel."""
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
                "ranks of LocalTensorMode communicated above torch's dispatcher; run the block "
                "without this mode, for example with @pytest.mark.distributed"
            )
        return original(*args, **kwargs)

    return dispatch
