"""Have torch call the recorder for each operation that communicates, and for no other."""

# Note [Kernels]: while a recording runs, each operation that communicates has a kernel of ours at
# the dispatch key BackendSelect, which passes it on to the keys below. There, torch has nothing of
# its own for them; the key lies below autograd and tensor subclasses, so that what DTensor and
# other wrappers send is seen as what it is, on the tensors that they hold; and it is active on
# every thread, in inference mode, and for calls from C++, such as those of DDP's reducer. A
# functional collective calls one of c10d inside, which is no second one. What torch.compile only
# traces is not sent.
# Registered below torch.library, which would have a library that registers its own kernel meanwhile
# fail. Such a kernel shadows ours, which is a gap. One that is there before would be shadowed by
# ours: then, or where torch has none of this, a dispatch mode sees the calls of its own thread.
# Looked for are those of torch.library and of what is loaded meanwhile.
# torch takes a kernel away without regard for a thread that is just about to call it, which then
# fails, or calls another one (2.13: "fallthrough_kernel was executed", the arguments of a foreign
# operation). So that happens only while all other threads wait for something outside of torch, and
# else after a later block. Until then the kernels pass on what they are given.
# What is used of torch was read in 2.6 to 2.15.

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import functools
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._ops import OpOverload

from pytest_fsdp_comm.comm.events import Gap
from pytest_fsdp_comm.recording.active import (
    TORCH_FILES,
    Shared,
    entered,
    patched,
    set_compiler,
    uncompiled,
    whose_call,
)
from pytest_fsdp_comm.recording.operations import (
    COPY,
    NAMESPACES,
    VALUE_READS,
    Call,
    copy_direction,
    look_up,
)
from pytest_fsdp_comm.recording.subclasses import is_dtensor_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType


_KEY: Final = "BackendSelect"
_META: Final = torch._C.DispatchKey.Meta
_USED: Final = (
    *("_dispatch_library", "_dispatch_get_all_op_names", "_dispatch_keyset_full_after"),
    *("_dispatch_has_kernel_for_dispatch_key", "_dispatch_dump"),
    "_dispatch_tls_is_dispatch_key_included",
)


class _Thread(threading.local):
    is_inside = False
    """Whether it runs a collective that is recorded: what that sends inside is part of it."""
    is_reading = False
    """Whether it runs an operation that was noted, which may run others of the kind."""


_thread = _Thread()


def why_no_kernels() -> str:
    """Why a recording needs a dispatch mode instead; empty if it needs none."""
    missing = [name for name in _USED if not hasattr(torch._C, name)]
    if missing:
        return f"this torch has no torch._C.{missing[0]}"
    if not torch._C._dispatch_tls_is_dispatch_key_included(getattr(torch._C.DispatchKey, _KEY)):
        return f"torch calls no kernels at {_KEY} on this thread"
    found = "" if collectives.is_there else _taken(*_registrations())
    return found and f"another library has registered a kernel for {found} at {_KEY}"


def _do_others_wait() -> bool:
    """Whether no other thread of Python can be in an operation of torch. See Note [Kernels]."""
    own = threading.get_ident()
    for delay_s in _DELAYS_S:
        if len(sys._current_frames()) == 1:
            return True
        # With the GIL just taken, no other thread gets it before the kernels are gone.
        time.sleep(delay_s)
        if all(_waits(frame) for thread, frame in sys._current_frames().items() if thread != own):
            return True
    return False


_DELAYS_S: Final = (0.0, *(0.0005 * 2**n for n in range(6)))
"""Before each look: in all 32 ms, for a thread that is about to wait on a busy machine."""
_Kernels = functools.partial(Shared, may_end=_do_others_wait)
_WAITING: Final = (
    *(str(module.__file__) for module in (threading, queue, selectors, subprocess, socket)),
    *(f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parents[1]}/execnet/"),
)
"""Where threads wait: those of the user, the watchdog of a rank, and those of xdist."""


def _waits(frame: FrameType | None) -> bool:
    if frame is None or frame.f_code is concurrent.futures.thread._worker.__code__:
        return True
    if not frame.f_code.co_filename.startswith(_WAITING):
        return False
    while frame is not None and not frame.f_code.co_filename.startswith(TORCH_FILES):
        frame = frame.f_back
    return frame is None


def communicating() -> Mapping[str, Call]:
    """Every operation of this torch that communicates, by its name in the dispatcher."""
    return _communicating(*_registrations())


def _registrations() -> tuple[int, ...]:
    """What differs once something was registered or taken away, as far as torch lists it."""
    # Counts, since to ask the dispatcher takes longer than all the rest of a short block. What was
    # destroyed stays on the list of what was defined, but leaves its namespace.
    listed = sys.modules, torch.ops.loaded_libraries, torch.library._defs, torch.library._impls
    spaces = (vars(getattr(torch.ops, name)) for name in NAMESPACES)
    return tuple(map(len, (*listed, *spaces)))


@functools.lru_cache(maxsize=1)
def _communicating(*_registered: int) -> Mapping[str, Call]:
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.partition("::")[0] in NAMESPACES and _can_run(torch._C._dispatch_dump(name))
    ]
    calls = {name: _call(_overload(name)) for name in names}
    return {name: call for name, call in calls.items() if call is not None}


def _can_run(dump: str) -> bool:
    """Whether what the dispatcher has of an operation could run on this machine."""
    # Of symmetric memory's 39 operations, few have a kernel in a build of torch for CPUs, and the
    # others one for GPUs alone.
    found = {line.partition(":")[0].partition("[")[0] for line in dump.splitlines()}
    found -= _NO_KERNELS
    return bool(found if torch.accelerator.is_available() else found - _OF_ACCELERATORS)


_NO_KERNELS: Final = {"", "name", "schema", "debug", "alias analysis kind"}
_OF_ACCELERATORS: Final = {"CUDA", "XPU", "PrivateUse1", "SparseCUDA", "SparseXPU"}


@functools.lru_cache(maxsize=1)
def _taken(*_registered: int) -> str:
    return next(filter(_has_kernel, communicating()), "")


# Kept, since each has a kernel that is kept.
@functools.cache
def _call(func: OpOverload) -> Call | None:
    operation = look_up(func)
    return None if operation is None else Call(func, operation)


def _overload(name: str) -> OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    func: OpOverload = getattr(
        getattr(getattr(torch.ops, namespace), packet), overload or "default"
    )
    return func


def _name(func: Any) -> str:
    # A higher-order operator has none there.
    return str(func.name()) if isinstance(func, OpOverload) else ""  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _has_kernel(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY))


_Kernel = tuple[str, "Callable[..., Any]"]
_ByNamespace = dict[str, list[_Kernel]]
"""Kernels, each with the name of its operation, by the namespace of that."""


def _by_namespace(kernels: Iterable[_Kernel]) -> _ByNamespace:
    found: _ByNamespace = {}
    for name, kernel in kernels:
        namespace, _, short = name.partition("::")
        found.setdefault(namespace, []).append((short, kernel))
    return found


@contextlib.contextmanager
def _registered(kernels: _ByNamespace) -> Iterator[None]:
    """Have kernels in place while the block runs."""
    libraries: list[Any] = []
    try:
        for namespace, named in kernels.items():
            library: Any = torch._C._dispatch_library("IMPL", namespace, "", __file__, 1)
            libraries.append(library)
            for name, kernel in named:
                library.impl(name, _KEY, kernel, True)  # noqa: FBT003  # with the key set
        yield
    finally:
        for library in libraries:
            library.reset()


@_Kernels
@contextlib.contextmanager
def collectives() -> Iterator[None]:
    """Have each collective of the process recorded."""
    global _before  # noqa: PLW0603  # as of `_known`: the kernels are the process's
    _before = _registrations()
    with _registered(_of_collectives(*_before)):
        _known.update(communicating())
        yield
    _known.clear()


@functools.lru_cache(maxsize=1)
def _of_collectives(*_registered: int) -> _ByNamespace:
    return _by_namespace(
        (name, _collective_kernel(call))
        for name, call in communicating().items()
        # Names of earlier torch, each of which calls the operation that is called so now.
        if call.namespace != "c10d_functional"
    )


_known: dict[str, Call] = {}
"""The operations that are seen now."""
_before: tuple[int, ...] = ()
"""What was registered when they were."""


def gaps() -> Iterator[Gap]:
    """What the kernels that are in place may not have seen."""
    if _registrations() == _before:
        return
    for name in communicating():
        if name not in _known:
            problem = "was registered"
        elif f"{_KEY} (inactive)" in torch._C._dispatch_dump(name):
            problem = "was given another kernel"
        else:
            continue
        yield Gap(
            kind="unseen",
            text=f"{name} {problem} in the block, so that calls of it may be missing; do so "
            "before the block",
        )


@functools.cache
def _collective_kernel(call: Call) -> Callable[..., Any]:
    below = _keys_below()
    # What that method calls, each time through another frame (the same in torch 2.7 to 2.15).
    handle = getattr(call.func, "_handle", None)
    redispatch = getattr(handle, "redispatch_boxed", call.func.redispatch)

    @uncompiled
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if _thread.is_inside:
            return redispatch(keys & below, *args, **kwargs)
        compiler = set_compiler(None)
        try:
            run = functools.partial(redispatch, keys & below, *args, **kwargs)
            if keys.has(_META) and _is_traced():
                return run()
            return _recorded(call, args, kwargs, run)
        finally:
            set_compiler(compiler)

    return kernel


def _recorded(
    call: Call, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]
) -> Any:
    __tracebackhide__ = True
    if _thread.is_inside:
        return run()
    recorders, outlived = whose_call()
    for recorder in outlived:
        recorder.note_outliving_thread(call)
    for recorder in recorders[1:]:
        run = functools.partial(recorder.run_collective, call, args, kwargs, run)
    _thread.is_inside = True
    try:
        return recorders[0].run_collective(call, args, kwargs, run) if recorders else run()
    finally:
        _thread.is_inside = False


@Shared
@contextlib.contextmanager
def local_ranks() -> Iterator[None]:
    """Have what all ranks of a LocalTensorMode send recorded as one of them sends it."""
    # Its mode, which lies above every kernel, does what a collective would (new in torch 2.9).
    module: Any = sys.modules.get("torch.distributed._local_tensor")
    if module is None:
        yield
        return
    original = module.LocalTensorMode.__torch_dispatch__

    def dispatch(
        mode: Any, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = functools.partial(original, mode, func, types, args, kwargs)
        call = _known.get(_name(func))
        if call is None or module.LocalTensor not in types or any(map(is_dtensor_class, types)):
            return run()
        return _recorded(call, args, kwargs or {}, run)

    with patched((module.LocalTensorMode, "__torch_dispatch__", dispatch)):
        yield


@_Kernels
@contextlib.contextmanager
def value_reads() -> Iterator[None]:
    """Have recordings on the fake group told of each operation that shows values to Python."""
    with _registered(_of_reads()):
        yield


@functools.cache
def _of_reads() -> _ByNamespace:
    # Older torch has not all of them.
    names = frozenset(VALUE_READS).intersection(torch._C._dispatch_get_all_op_names())
    return _by_namespace((name, _noting_kernel(name)) for name in names)


@_Kernels
@contextlib.contextmanager
def copies() -> Iterator[None]:
    """Have each copy recorded that may cross between host and device."""
    # Every other operation that copies between them calls it.
    with _registered(_by_namespace([(COPY, _copy_kernel(_overload(COPY)))])):
        yield


def _noting_kernel(name: str) -> Callable[..., Any]:
    func, below = _overload(name), _keys_below()

    @uncompiled
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        compiler = set_compiler(None)
        is_noted = not (_thread.is_reading or (keys.has(_META) and _is_traced()))
        try:
            if is_noted:
                for recorder in entered():
                    recorder.note_read(func, args, kwargs)
                _thread.is_reading = True
            return func.redispatch(keys & below, *args, **kwargs)
        finally:
            if is_noted:
                _thread.is_reading = False
            set_compiler(compiler)

    return kernel


def _copy_kernel(func: OpOverload) -> Callable[..., Any]:
    below = _keys_below()

    @uncompiled
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        compiler = set_compiler(None)
        try:
            run = functools.partial(func.redispatch, keys & below, *args, **kwargs)
            direction = copy_direction(*args[:2])
            if direction is not None and not (keys.has(_META) and _is_traced()):
                for recorder in entered():
                    run = functools.partial(recorder.run_copy, direction, args[0], run)
            return run()
        finally:
            set_compiler(compiler)

    return kernel


@functools.cache
def _keys_below() -> Any:
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))


def _is_traced() -> bool:
    """Whether a call on tensors without memory is the compiler's, and not a test's real one."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None
