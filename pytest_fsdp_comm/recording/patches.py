"""Patch torch while a recording is active."""

# Note [Patches]: We replace functions of torch when the first recording of the process begins, and
# restore them when the last recording ends. Code that has stored a replacement may still call it
# after that; the call then finds no running recording (`active.entered_recorders`), and records
# nothing. While torch.compile is tracing, we restore all originals, because it would otherwise
# recompile after the block. We also make it skip frames of this package, which run around compiled
# code.
# We replace `nn.Module.__call__` because global module hooks would switch torch.compile off and
# leak after an error. We replace FSDPState's `_pre_forward` and `_post_forward` because methods
# registered with register_fsdp_forward_method call them, not `__call__`.
# DDP's communication hooks may chain collectives with Future.then, as PowerSGD does. Depending on a
# race, the callback runs at once, or later on a thread of the backend. In both cases we record its
# collectives and attribute them to the code that registered the callback.
# Code that captured a function before the block, such as the hooks of an autograd graph, calls the
# original, so we do not see these calls.

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
from pytest_fsdp_comm.recording.active import entered_recorders
from pytest_fsdp_comm.recording.overlap import current_overlap
from pytest_fsdp_comm.recording.owners.fsdp import IS_WATCHED, Around, list_watched_methods
from pytest_fsdp_comm.recording.owners.stack import engine_code
from pytest_fsdp_comm.recording.value_dependence import is_value_read

Replacement = tuple[object, str, object]
"""A class or module, the name of an attribute, and its replacement."""

_INPUTS: Final = slice(3, 4)
"""The index of `inputs` among the engine's positional arguments after `outputs`, as a slice."""
_INHERITED: Final = object()
_lock = threading.RLock()
_num_users = 0
_patches: list[_Patch] = []


class _Patch:
    def __init__(self, holder: object, name: str, replacement: object) -> None:
        self._holder, self._name, self._replacement = holder, name, replacement
        self._original = vars(holder).get(name, _INHERITED)

    def apply(self) -> None:
        if vars(self._holder).get(self._name, _INHERITED) is self._original:
            setattr(self._holder, self._name, self._replacement)

    def revert(self) -> None:
        # If a library has since wrapped our replacement, leave its wrapper, which calls ours.
        if vars(self._holder).get(self._name) is self._replacement:
            if self._original is _INHERITED:
                delattr(self._holder, self._name)
            else:
                setattr(self._holder, self._name, self._original)


@contextlib.contextmanager
def patch_attributes(*attributes: Replacement) -> Iterator[None]:
    """Replace attributes while the block runs."""
    patches = [_Patch(*attribute) for attribute in attributes]
    _apply_patches(patches)
    try:
        yield
    finally:
        _revert_patches(patches)


def wrap_attribute(holder: object, name: str, function: Callable[..., object]) -> Replacement:
    """Replace a function by `function`, which gets the original as its first argument."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def run(*args: object, **kwargs: object) -> object:
        return function(original, *args, **kwargs)

    return holder, name, run


def _apply_patches(patches: Iterable[_Patch]) -> None:
    for patch in patches:
        patch.apply()


def _revert_patches(patches: Sequence[_Patch]) -> None:
    for patch in reversed(patches):
        patch.revert()


@contextlib.contextmanager
def watch_torch() -> Iterator[None]:
    """Patch torch while the block runs, so that recordings see its events. See Note [Patches]."""
    global _num_users  # noqa: PLW0603  # the whole process shares the patches
    with _lock:
        if not _num_users:
            hide_package_from_compiler()
            _patches[:] = [_Patch(*attribute) for attribute in _torch_patches()]
            _register_compiler_callbacks()
            _apply_patches(_patches)
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if not _num_users:
                _revert_patches(_patches)
                _patches.clear()


@functools.cache
def hide_package_from_compiler() -> None:
    """Make the compiler skip frames of this package, which run around compiled code."""
    upstream.look_up("torch._dynamo.trace_rules", "add")(__package__.split(".")[0])


def _compiler_callback_handler() -> Any:
    return upstream.look_up("torch._dynamo.callback", "callback_handler")


def _register_compiler_callbacks() -> None:
    handler = _compiler_callback_handler()
    if _revert_before_compilation not in handler.start_callbacks:
        handler.register_start_callback(_revert_before_compilation)
        handler.register_end_callback(_reapply_after_compilation)


def _revert_before_compilation(*_: object) -> None:  # torch 2.7 passes nothing
    _revert_patches(_patches)


def _reapply_after_compilation(*_: object) -> None:
    _apply_patches(_patches)


def _torch_patches() -> Iterator[Replacement]:
    engine_code()  # cache the code now, before its function is replaced
    # Without this method, `param_groups` would find no units.
    upstream.look_up("torch.distributed.fsdp", "FSDPModule._get_fsdp_state")
    for holder, name, wrap in _list_wrappers():
        original = getattr(holder, name)
        replacement = functools.update_wrapper(wrap(original), original)
        setattr(replacement, IS_WATCHED, True)
        yield holder, name, replacement


def _list_wrappers() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield a class or module, the name of a function in it, and what wraps the function."""
    yield nn.Module, "__call__", _wrap_module_call
    for module in (torch.autograd.graph, torch.autograd):
        yield module, "_engine_run_backward", _wrap_engine
    state = upstream.look_up("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")
    yield state, "_pre_forward", _wrap_pre_forward
    yield state, "_post_forward", _wrap_post_forward
    for holder, name, around in list_watched_methods():
        yield holder, name, functools.partial(_wrap_watched_method, name, around)
    for name in ("then", "add_done_callback"):
        # Patch the base class, because work.get_future() returns an instance of it.
        yield torch._C.Future, name, _wrap_callback_registration
    # Executors and timers start their threads through this method too.
    yield threading.Thread, "start", _wrap_thread_start
    for name in ("tolist", "numpy", "tensor_split"):
        yield torch.Tensor, name, _wrap_value_read
    yield torch, "tensor_split", _wrap_value_read
    functional: Any = sys.modules.get("torch.distributed.nn.functional")
    gather = getattr(functional, "_AllGather", None)
    if gather is not None:  # without it, a note is missing
        yield gather, "backward", _wrap_gather_backward
    modes: Any = sys.modules.get("torch.distributed._local_tensor")  # new in torch 2.9
    if modes is not None:
        # LocalTensorMode emulates collectives above all kernels, so we can only report a gap.
        yield modes.LocalTensorMode, "__torch_dispatch__", _wrap_local_tensor_dispatch
    # Otherwise torch._dynamo.reset() drops our callbacks.
    yield _compiler_callback_handler(), "clear", _wrap_callback_clear


def _wrap_callback_clear(original: Any) -> object:
    def clear() -> None:
        original()
        _register_compiler_callbacks()

    return clear


def _wrap_module_call(original: Any) -> object:
    def call(self: nn.Module, *args: object, **kwargs: Any) -> object:
        __tracebackhide__ = True
        recorders = entered_recorders()
        depths = [(recorder, recorder.enter_module(self)) for recorder in recorders]
        try:
            return original(self, *args, **kwargs)
        finally:
            for recorder, depth in depths:
                recorder.backward.leave(depth)

    return call


def _wrap_engine(original: Any) -> object:
    def engine(outputs: Any, *args: Any, **kwargs: Any) -> object:
        __tracebackhide__ = True
        recorders = entered_recorders()
        inputs = (*args[_INPUTS], ())[0]
        adds = kwargs.get("accumulate_grad", True)
        depths = [(r, r.enter_engine(outputs, inputs or (), adds=adds)) for r in recorders]
        overlap = current_overlap()
        try:
            if overlap is None:
                return original(outputs, *args, **kwargs)
            with overlap.use_forward_streams(outputs):
                return original(outputs, *args, **kwargs)
        finally:
            for recorder, depth in depths:
                recorder.backward.leave(depth)
                # Look for results among the gradients now, before user code zeroes them.
                recorder.tensors.attribute_new_results()
                recorder.tensors.expect_new_gradients()

    return engine


def _wrap_pre_forward(original: Any) -> object:
    def pre_forward(state: object, module: nn.Module, *args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
        for recorder in entered_recorders():
            recorder.enter_module(module)
        return original(state, module, *args, **kwargs)

    return pre_forward


def _wrap_post_forward(original: Any) -> object:
    def post_forward(state: object, module: nn.Module, *args: object, **kwargs: Any) -> object:
        __tracebackhide__ = True
        try:
            return original(state, module, *args, **kwargs)
        finally:
            for recorder in entered_recorders():
                recorder.backward.leave_method(module)

    return post_forward


def _wrap_watched_method(name: str, around: Around, original: Any) -> object:
    def run_watched(unit: object, *args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
        # Watch a call only once: it gets here twice if a library wrapped an earlier replacement.
        call = name, id(unit)
        watches = [
            recorder.units for recorder in entered_recorders() if call not in recorder.units.running
        ]
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

    return run_watched


def _wrap_callback_registration(original: Any) -> object:
    def register(future: object, callback: Callable[..., object]) -> object:
        recorders, _ = active.find_recorders_of_call()
        registered = [(recorder, recorder.attribute_callback()) for recorder in recorders]

        @functools.wraps(callback)
        def run(*args: object) -> object:
            with contextlib.ExitStack() as resumed:
                for recorder, attribution in registered:
                    resumed.enter_context(recorder.use_attribution(attribution))
                return callback(*args)

        return original(future, run if registered else callback)

    return register


def _wrap_thread_start(original: Any) -> object:
    def start(thread: threading.Thread) -> None:
        active.store_recordings_on_thread(thread)
        original(thread)

    return start


def _wrap_value_read(original: Any) -> object:
    """Wrap a method that reads tensor values without calling an operation that has our kernel."""
    name = original.__name__

    def read(*args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
        for recorder in entered_recorders():
            reads = None if torch.compiler.is_compiling() else recorder.reads
            if reads is not None and is_value_read(name, args, kwargs):
                reads.note_read(name)
        return original(*args, **kwargs)

    return read


def _wrap_gather_backward(original: Any) -> object:
    def backward(*args: object) -> object:
        for recorder in entered_recorders():
            recorder.note_gather_backward()
        return original(*args)

    return backward


def _wrap_local_tensor_dispatch(original: Any) -> object:
    def dispatch(*args: object, **kwargs: object) -> object:
        for recorder in entered_recorders():
            recorder.note_unseen(
                "ranks of LocalTensorMode communicated above torch's dispatcher; run the block "
                "without this mode, for example with @pytest.mark.distributed"
            )
        return original(*args, **kwargs)

    return dispatch
