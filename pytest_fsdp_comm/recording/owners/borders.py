"""Follow which module runs, by a border around each call of one and of the autograd engine."""

# Note [Borders]: global module hooks would switch torch.compile off and leak after an error, so
# while recordings run `nn.Module.__call__` runs code around its own. What the compiler traced then
# it would trace again later, so while it traces the original is back.
# Methods other than forward that enter a unit of FSDP2 (register_fsdp_forward_method) call
# FSDPState's `_pre_forward` and `_post_forward` by name, which all others have captured: these are
# attributes of the class, and not other code in place. Read in torch 2.6 to 2.15.

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.autograd.graph
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.recording.active import (
    ENTERED,
    InPlace,
    Shared,
    entered,
    in_place,
    patched,
    set_compiler,
    uncompiled,
)
from pytest_fsdp_comm.recording.owners.stack import engine_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CREATE_GRAPH: Final = 2
"""The place of the argument of a call of the engine, after the outputs."""
_ENGINE: Final = "_engine_run_backward"
_HOLDERS: Final = (torch.autograd.graph, torch.autograd)
_USE: Final = "the recorder relies on to find the module in backward"


_is_compiling = torch.compiler.is_dynamo_compiling


# Each of these runs in place of torch's function. See Note [In place].


@uncompiled
def _call(self: nn.Module, *args: Any, _fsdp_comm: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    original, is_compiling, set_compiler, find, thread, entered = _fsdp_comm
    if is_compiling():  # where `_calls` could not take it away
        return original(self, *args, **kwargs)
    compiler = set_compiler(None)
    depths = []
    for recorder in find(thread()) or entered():
        depths.append((recorder.backward, recorder.backward.enter(self)))
        if recorder.idle or recorder.lacks_root:
            recorder.note_module(self)
    if compiler is not None:
        set_compiler(compiler)
    try:
        return original(self, *args, **kwargs)
    finally:
        if compiler is not None:
            set_compiler(None)
        for backward, depth in depths:
            backward.leave(depth)
        if compiler is not None:
            set_compiler(compiler)


@uncompiled
def _run_backward(outputs: Any, *args: Any, _fsdp_comm: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    original, around = _fsdp_comm
    return around(original, outputs, *args, **kwargs)


@uncompiled
def _within_engine(engine: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    compiler = set_compiler(None)
    recorders = entered()
    depths = [recorder.backward.enter(None) for recorder in recorders]
    makes_nodes = len(args) > _CREATE_GRAPH and args[_CREATE_GRAPH]
    modes = [_Noting(recorder.backward.note_nodes) for recorder in recorders if makes_nodes]
    try:
        with contextlib.ExitStack() as noting:
            for mode in modes:
                noting.enter_context(mode)
            set_compiler(compiler)
            try:
                return engine(outputs, *args, **kwargs)
            finally:
                set_compiler(None)
    finally:
        for recorder, depth in zip(recorders, depths, strict=True):
            recorder.backward.leave(depth)
        set_compiler(compiler)


@contextlib.contextmanager
def _calls() -> Iterator[None]:
    """Put a border around calls of modules, but while the compiler traces."""
    handler = upstream.look_up("torch", "torch._dynamo.callback", "callback_handler", _USE)
    find = (ENTERED.get, threading.get_ident, entered)
    call = InPlace(nn.Module, "__call__", _call, _is_compiling, set_compiler, *find)

    # Otherwise their compilation would wait for a lock of torch's that is held while they are
    # called.
    @uncompiled
    def away(*_: Any) -> None:
        call.take()

    @uncompiled
    def back(*_: Any) -> None:
        call.put()

    clear = handler.clear

    def register() -> None:
        handler.register_start_callback(away)
        handler.register_end_callback(back)

    def cleared() -> None:  # by torch._dynamo.reset() in the block
        clear()
        register()

    with in_place(call), patched((handler, "clear", cleared)):
        register()
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # somebody else has cleared them otherwise
                handler.remove_start_callback(away)
                handler.remove_end_callback(back)


@Shared
@contextlib.contextmanager
def borders() -> Iterator[None]:
    """Have each recording told what its thread enters and leaves. See Note [Borders]."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import (  # noqa: PLC0415  # loads torch.distributed
        FSDPState,
    )

    engine_code()  # now, while it is that of torch
    methods = (
        (FSDPState, "_pre_forward", _before_method(FSDPState._pre_forward)),
        (FSDPState, "_post_forward", _after_method(FSDPState._post_forward)),
    )
    engines = (InPlace(holder, _ENGINE, _run_backward, _within_engine) for holder in _HOLDERS)
    with _calls(), in_place(*engines), patched(*methods):
        yield


def _before_method(original: Any) -> Any:
    @uncompiled
    def pre_forward(state: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        compiler = set_compiler(None)
        for recorder in entered():
            recorder.backward.enter_method(module)
            recorder.note_module(module)
        set_compiler(compiler)
        return original(state, module, *args, **kwargs)

    return functools.update_wrapper(pre_forward, original)


def _after_method(original: Any) -> Any:
    @uncompiled
    def post_forward(state: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return original(state, module, *args, **kwargs)
        finally:
            compiler = set_compiler(None)
            for recorder in entered():
                recorder.backward.leave_method(module)
            set_compiler(compiler)

    return functools.update_wrapper(post_forward, original)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Note nodes at each operation of a backward that makes some: no border lies between them."""

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._note = note

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch.compile on under this mode (torch 2.9.1 and newer)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note()
        return func(*args, **(kwargs or {}))
