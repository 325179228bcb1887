"""Follow which module runs, by a border around each call of one and of the autograd engine."""

# Note [Borders]: global module hooks would switch torch.compile off and leak after an error, so for
# the time of recordings `nn.Module.__call__` is replaced by a function around it. What the compiler
# traced with it in place it would trace again without, so while it traces the original is back.
# Methods other than forward that enter a unit of FSDP2 (register_fsdp_forward_method) call
# FSDPState's `_pre_forward` and `_post_forward` by name, which all others have captured. Read in
# torch 2.6 to 2.15.

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.autograd.graph
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.recording.active import Shared, entered, patched, set_compiler, uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CREATE_GRAPH: Final = 2
"""The place of the argument of a call of the engine, after the outputs."""
_ENGINE: Final = "_engine_run_backward"
_HOLDERS: Final = (torch.autograd.graph, torch.autograd)
_USE: Final = "the recorder relies on to find the module in backward"


_is_compiling = torch.compiler.is_dynamo_compiling


def _around_call(original: Any) -> Any:
    @uncompiled
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if _is_compiling():  # where `_calls` could not take it away
            return original(self, *args, **kwargs)
        compiler = set_compiler(None)
        entries = [(one.backward.leave, one.enter_module(self)) for one in entered()]
        set_compiler(compiler)
        try:
            return original(self, *args, **kwargs)
        finally:
            set_compiler(None)
            for leave, depth in entries:
                leave(depth)
            set_compiler(compiler)

    return call


@contextlib.contextmanager
def _calls() -> Iterator[None]:
    """Put a border around calls of modules, but while the compiler traces."""
    handler = upstream.look_up("torch", "torch._dynamo.callback", "callback_handler", _USE)
    original = vars(nn.Module)["__call__"]
    border = _around_call(original)

    def swap(found: Any, other: Any) -> Callable[..., None]:
        # Its compilation would wait for a lock of torch's that is held while it is called.
        @uncompiled
        def swapped(*_: Any) -> None:
            # Otherwise somebody else has replaced it since.
            if vars(nn.Module)["__call__"] is found:
                nn.Module.__call__ = other  # type: ignore[method-assign]  # see Note [Borders]

        return swapped

    away, back = swap(border, original), swap(original, border)
    clear = handler.clear

    def register() -> None:
        handler.register_start_callback(away)
        handler.register_end_callback(back)

    def cleared() -> None:  # by torch._dynamo.reset() in the block
        clear()
        register()

    with patched((nn.Module, "__call__", border), (handler, "clear", cleared)):
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

    engine = upstream.look_up("torch", "torch.autograd.graph", _ENGINE, _USE)
    engines = ((holder, _ENGINE, _around_engine(engine)) for holder in _HOLDERS)
    methods = (
        (FSDPState, "_pre_forward", _before_method(FSDPState._pre_forward)),
        (FSDPState, "_post_forward", _after_method(FSDPState._post_forward)),
    )
    with _calls(), patched(*engines, *methods):
        yield


def _around_engine(engine: Any) -> Any:
    @uncompiled
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
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

    return functools.update_wrapper(run_backward, engine)


def _before_method(original: Any) -> Any:
    @uncompiled
    def pre_forward(state: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        compiler = set_compiler(None)
        for recorder in entered():
            recorder.enter_method(module)
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
