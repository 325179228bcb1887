"""Register kernels that call the recorder for each operation that communicates."""

# For each operation that communicates, we register a kernel at the dispatch key BackendSelect,
# where torch has none for these operations; the kernel passes the call on to the keys below.
# BackendSelect lies below autograd and tensor subclasses, so collectives of DTensor and other
# wrappers arrive with plain tensors. It is active on every thread, in inference_mode, and for calls
# from C++ code such as DDP's reducer. A functional collective calls a c10d collective
# internally, which we do not record again. Nor do we record calls that torch.compile only traces.
# The kernels are registered at the first recording and never removed, because torch would remove a
# kernel even while a thread is about to call it. While nothing is recorded, the kernels only pass
# calls on. We do not register them through torch.library, which would then reject the kernels of
# other libraries.
# Another library's kernel shadows ours: if it is registered during a block, the recording has a
# gap. If it was registered before, or torch lacks the private functions, a dispatch mode records
# the calls of the block's thread instead.

# Note [Subclasses pass through]
# A dispatch mode receives an operation before the tensor subclass does. If the mode runs the
# operation, it does not see the operations that the subclass calls in turn. So for DTensor and
# other wrapper classes, the mode returns NotImplemented, and then receives the operations on their
# inner tensors. It also returns NotImplemented for opaque subclasses, except for collectives, which
# it records directly.

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.events import Gap
from pytest_fsdp_comm.recording import active
from pytest_fsdp_comm.recording.dtensors import Dispatch, dispatch_of
from pytest_fsdp_comm.recording.module_trace import ModuleTracer
from pytest_fsdp_comm.recording.operations import NAMESPACES, VALUE_READS, Call, call_of
from pytest_fsdp_comm.recording.overlap import current_overlap, run_and_issue
from pytest_fsdp_comm.recording.private import OpOverload, TorchDispatchMode

_KEY: Final = "BackendSelect"
_META: Final = upstream.look_up("torch._C", "DispatchKey.Meta")
_LINE: Final = 0
"""The line number that marks our kernels; torch 2.7 stores a kernel's line, but not its file."""
_USED: Final = (
    *("_C._dispatch_library", "_C._dispatch_get_all_op_names", "_C._dispatch_keyset_full_after"),
    *("_C._dispatch_dump", "_C._dispatch_tls_is_dispatch_key_included", "_C.DispatchKey." + _KEY),
    *("library._defs", "library._impls"),
)

# After a graph break, the compiler inspects every frame that runs. It skips our frames,
# but not generated code, such as a dataclass's __init__, so we switch it off while we record.
set_compiler: Callable[[Any], Any] = upstream.look_up(
    "torch._C._dynamo.eval_frame", "set_eval_frame"
)
"""Set the compiler for this thread's frames, or None for no compiler; return the previous one."""

_libraries: Final[list[Any]] = []
"""Keeps torch's library objects alive: when torch frees one, it removes the kernel too."""
_calls: Final[dict[str, Call]] = {}
"""The operations for which we registered a kernel, keyed by dispatcher name."""
_checked: tuple[int, ...] = ()
"""The result of `_count_registrations` when `register_collective_kernels` last succeeded."""


class _Thread(threading.local):
    is_inside = False
    """Whether a recorded operation is running; operations that it calls are not recorded again."""


_thread = _Thread()


def register_collective_kernels() -> str:
    """Register kernels for all collectives; return a reason if that is impossible, else ""."""
    global _checked  # noqa: PLW0603  # the whole process shares the kernels
    for name in _USED:
        try:
            attrgetter(name)(torch)
        except AttributeError:
            return f"this torch has no torch.{name}"
    if not torch._C._dispatch_tls_is_dispatch_key_included(getattr(torch._C.DispatchKey, _KEY)):
        return f"torch calls no kernels at {_KEY} on this thread"
    if _count_registrations() == _checked:
        return ""
    calls = find_communicating_operations()
    foreign = next(filter(_has_foreign_kernel, calls), "")
    if foreign:
        return f"another library has registered a kernel for {foreign} at {_KEY}"
    # Compare objects, not names: a library may have removed an operation, and another redefined it.
    new = {name: call for name, call in calls.items() if _calls.get(name) is not call}
    _calls.update(new)
    for name, call in new.items():
        # Skip the old c10d_functional: its operations call _c10d_functional, which we record.
        if call.namespace != "c10d_functional":
            _register_kernel(name, call.func, functools.partial(run_and_record, call))
    _checked = _count_registrations()
    return ""


def find_communicating_operations() -> Mapping[str, Call]:
    """Return all operations of this torch that communicate, keyed by dispatcher name."""
    return _search_communicating_operations(*_count_registrations())


def _count_registrations() -> tuple[int, ...]:
    """Return counts that change whenever an operation or kernel is registered or removed."""
    # Compare counts, because querying the dispatcher takes longer than the rest of a short block.
    # Include the namespaces: a removed operation disappears from them, but not from _defs.
    listed = sys.modules, torch.ops.loaded_libraries, torch.library._defs, torch.library._impls
    spaces = (vars(getattr(torch.ops, name)) for name in NAMESPACES)
    return tuple(map(len, (*listed, *spaces)))


@functools.lru_cache(maxsize=1)
def _search_communicating_operations(*_registered: int) -> Mapping[str, Call]:
    # Skip removed operations: the dispatcher still lists them, but without a schema.
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.partition("::")[0] in NAMESPACES
        and "schema: (none)" not in torch._C._dispatch_dump(name)
    ]
    calls = {name: call_of(_look_up_overload(name)) for name in names}
    return {name: call for name, call in calls.items() if call is not None}


def _look_up_overload(name: str) -> OpOverload:
    namespace, _, qualified = name.partition("::")
    packet, _, overload = qualified.partition(".")
    func: OpOverload = attrgetter(f"{namespace}.{packet}.{overload or 'default'}")(torch.ops)
    return func


def _has_foreign_kernel(name: str) -> bool:
    """Whether another library's kernel at our dispatch key receives an operation's calls."""
    lines = torch._C._dispatch_dump(name).splitlines()
    return any(line.startswith(f"{_KEY}: ") and f":{_LINE} " not in line for line in lines)


def find_gaps() -> Iterator[Gap]:
    """Yield a gap for each operation whose calls in the block may have bypassed our kernel."""
    if _count_registrations() == _checked:
        return
    for name, call in find_communicating_operations().items():
        if _calls.get(name) is not call:
            problem = "was registered"
        elif _has_foreign_kernel(name):
            problem = "got another kernel"
        else:
            continue
        yield Gap(
            kind="unseen",
            text=f"{name} {problem} in the block, so some calls to it may be missing; register it "
            "before the block",
        )


@functools.cache
def register_value_read_kernels() -> None:
    """For simulated ranks, register kernels that report each operation that reads tensor values."""
    # Older versions of torch lack some of these operations.
    for name in frozenset(VALUE_READS).intersection(torch._C._dispatch_get_all_op_names()):
        func = _look_up_overload(name)
        _register_kernel(name, func, functools.partial(_run_and_note_read, func))


def _register_kernel(name: str, func: OpOverload, run: Callable[..., object]) -> None:
    """Register a kernel that calls `run` during a recording, and otherwise passes calls on."""
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
    # Call the function behind `func.redispatch`, to save a frame (the same in torch 2.7 to 2.15).
    handle = getattr(func, "_handle", None)
    redispatch = getattr(handle, "redispatch_boxed", func.redispatch)

    def kernel(keys: Any, *args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
        if not active.has_running_recording() or (keys.has(_META) and _is_compiler_tracing()):
            return redispatch(keys & below, *args, **kwargs)
        compiler = set_compiler(None)
        try:
            return run(args, kwargs, functools.partial(redispatch, keys & below, *args, **kwargs))
        finally:
            set_compiler(compiler)

    namespace, _, short = name.partition("::")
    library: Any = torch._C._dispatch_library("IMPL", namespace, "", __file__, _LINE)
    library.impl(short, _KEY, kernel, True)  # noqa: FBT003  # with_keyset=True
    _libraries.append(library)


def run_and_record(
    call: Call, args: Sequence[object], kwargs: dict[str, object], run: Callable[[], object]
) -> object:
    """Run a collective, and record it in every recording that includes this thread."""
    __tracebackhide__ = True
    if _thread.is_inside:
        return run()
    recorders, outlived = active.find_recorders_of_call()
    for recorder in outlived:
        recorder.note_outliving_thread(call)
    overlap = current_overlap()
    if overlap is not None:
        run = functools.partial(run_and_issue, overlap, call, args, kwargs, run)
    for recorder in recorders[1:]:
        run = functools.partial(recorder.run_collective, call, args, kwargs, run)
    _thread.is_inside = True
    try:
        return recorders[0].run_collective(call, args, kwargs, run) if recorders else run()
    finally:
        _thread.is_inside = False


def _run_and_note_read(
    func: OpOverload, args: Sequence[object], kwargs: dict[str, object], run: Callable[[], object]
) -> object:
    __tracebackhide__ = True
    if _thread.is_inside:
        return run()
    for recorder in active.entered_recorders():
        if recorder.reads is not None:
            recorder.reads.note_operation(func, args, kwargs)
    _thread.is_inside = True
    try:
        return run()
    finally:
        _thread.is_inside = False


def _is_compiler_tracing() -> bool:
    """Whether torch.compile is tracing; meta tensors then belong to the compiler, not the test."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


class WatchingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Trace or record this thread's operations. See Note [Subclasses pass through]."""

    # Without this, a higher-order operator in the block raises.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch.compile enabled under this mode (torch 2.9.1 and newer)."""
        return True

    def __init__(self, tracer: ModuleTracer | None, *, records: bool) -> None:
        """Pass operations to `tracer`; if `records`, also record those that communicate."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._tracer = tracer
        self._records = records

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        keywords = kwargs or {}
        communicates = getattr(func, "namespace", None) in NAMESPACES
        dispatch = max(map(dispatch_of, types), default=Dispatch.NONE)
        if dispatch is Dispatch.WRAPPER:
            # As in CommDebugMode, operations on subclasses of DTensor do not count.
            if self._tracer is not None and DTensor in types:
                self._tracer.trace_operation(func, args)
            return NotImplemented
        if dispatch is Dispatch.OPAQUE and not communicates:
            return NotImplemented
        if self._tracer is not None:
            self._tracer.trace_operation(func)
        call = call_of(func) if communicates and self._records else None
        if call is None:
            return func(*args, **keywords)
        return run_and_record(call, args, keywords, functools.partial(func, *args, **keywords))
