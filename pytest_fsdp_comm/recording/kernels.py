"""Have torch call the recorder for each operation that communicates, and for no other."""

# Note [Kernels]: each operation that communicates has a kernel of ours at the dispatch key
# BackendSelect, which passes it on to the keys below. There, torch has nothing of its own for them;
# the key lies below autograd and tensor subclasses, so that what DTensor and other wrappers send is
# seen as what it is, on the tensors that they hold; and it is active on every thread, in
# inference_mode, and for calls from C++, such as those of DDP's reducer. A functional collective
# calls one of c10d inside, which does not count again. What torch.compile only traces is not sent.
# The kernels are registered at the first recording and stay: torch takes a kernel away without
# regard for a thread that is just about to call it. While nothing records they pass on each call.
# They are registered below torch.library, which would refuse a library that registers its own
# kernel later. Such a kernel shadows ours: in a block that is a gap. Before a block, a dispatch
# mode sees the calls of its own thread instead, as where torch has none of this.
# Private names of torch were read in 2.6 to 2.15.

# Note [Subclasses pass through]
# A mode sees an operation before a tensor subclass does, and would see what the subclass then does
# otherwise. So DTensor and other wrappers are let through (NotImplemented): what they make of the
# operation comes back here on the tensors that they hold. A class with code of its own that nobody
# can take apart is let through too, but a collective that it is given is taken as it is.

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.events import Gap
from pytest_fsdp_comm.recording import active
from pytest_fsdp_comm.recording.comm_debug import ModuleTracer
from pytest_fsdp_comm.recording.dtensors import Dispatch, dispatch_of, is_dtensor_class
from pytest_fsdp_comm.recording.operations import NAMESPACES, VALUE_READS, Call, call_of

_KEY: Final = "BackendSelect"
_META: Final = torch._C.DispatchKey.Meta
_USED: Final = (
    *("_dispatch_library", "_dispatch_get_all_op_names", "_dispatch_keyset_full_after"),
    *("_dispatch_dump", "_dispatch_tls_is_dispatch_key_included"),
)

# In a function that torch.compile cannot take as a whole, the compiler looks at each frame that is
# run. Ours it skips, but not those of generated code, such as the __init__ of a dataclass.
set_compiler: Callable[[Any], Any] = upstream.look_up(
    "torch._C._dynamo.eval_frame", "set_eval_frame"
)
"""Set what compiles the frames of this thread, or None for nothing; returns what did."""

_libraries: Final[list[Any]] = []
"""What has registered our kernels, which last as long as it does."""
_known: Final[dict[str, Call]] = {}
"""The operations that have a kernel of ours."""
_checked: tuple[int, ...] = ()
"""What was registered when that was last looked at."""


class _Thread(threading.local):
    is_inside = False
    """Whether it runs an operation that is noted: what that calls inside is part of it."""


_thread = _Thread()


def register_collectives() -> str:
    """Have each collective of the process seen from now on.

    Returns:
        Why a recording needs a dispatch mode instead; empty if it needs none.
    """
    global _checked  # noqa: PLW0603  # the kernels are the process's
    missing = [name for name in _USED if not hasattr(torch._C, name)]
    if missing:
        return f"this torch has no torch._C.{missing[0]}"
    if not torch._C._dispatch_tls_is_dispatch_key_included(getattr(torch._C.DispatchKey, _KEY)):
        return f"torch calls no kernels at {_KEY} on this thread"
    if _registrations() == _checked:
        return ""
    calls = communicating()
    foreign = next(filter(_is_foreign, calls), "")
    if foreign:
        return f"another library has registered a kernel for {foreign} at {_KEY}"
    # A library may have taken away an operation, and another one defined it anew.
    new = {name: call for name, call in calls.items() if _known.get(name) is not call}
    _known.update(new)
    for name, call in new.items():
        # Names of earlier torch, each of which calls the operation that is called so now.
        if call.namespace != "c10d_functional":
            _register(name, call.func, functools.partial(run_recorded, call))
    _checked = _registrations()
    return ""


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
    # What a library has taken away keeps its name there, but no schema.
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.partition("::")[0] in NAMESPACES
        and "schema: (none)" not in torch._C._dispatch_dump(name)
    ]
    calls = {name: call_of(_overload(name)) for name in names}
    return {name: call for name, call in calls.items() if call is not None}


def _overload(name: str) -> OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    func: OpOverload = getattr(
        getattr(getattr(torch.ops, namespace), packet), overload or "default"
    )
    return func


def _is_foreign(name: str) -> bool:
    """Whether calls of an operation reach a kernel of somebody else at our key."""
    lines = torch._C._dispatch_dump(name).splitlines()
    return any(line.startswith(f"{_KEY}: ") and __file__ not in line for line in lines)


def gaps() -> Iterator[Gap]:
    """What the kernels may not have seen since the block began."""
    if _registrations() == _checked:
        return
    for name, call in communicating().items():
        if _known.get(name) is not call:
            problem = "was registered"
        elif _is_foreign(name):
            problem = "was given another kernel"
        else:
            continue
        yield Gap(
            kind="unseen",
            text=f"{name} {problem} in the block, so that calls of it may be missing; do so "
            "before the block",
        )


@functools.cache
def register_value_reads() -> None:
    """Have recordings on the fake group told of each operation that shows values to Python."""
    # Older torch has not all of them.
    for name in frozenset(VALUE_READS).intersection(torch._C._dispatch_get_all_op_names()):
        func = _overload(name)
        _register(name, func, functools.partial(_run_read, func))


def _register(name: str, func: OpOverload, run: Callable[..., Any]) -> None:
    """Register a kernel that passes a call on, through `run` while something records."""
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
    # What that method calls, each time through another frame (the same in torch 2.7 to 2.15).
    handle = getattr(func, "_handle", None)
    redispatch = getattr(handle, "redispatch_boxed", func.redispatch)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not active.is_any() or (keys.has(_META) and _is_traced()):
            return redispatch(keys & below, *args, **kwargs)
        compiler = set_compiler(None)
        try:
            return run(args, kwargs, functools.partial(redispatch, keys & below, *args, **kwargs))
        finally:
            set_compiler(compiler)

    namespace, _, short = name.partition("::")
    library: Any = torch._C._dispatch_library("IMPL", namespace, "", __file__, 1)
    library.impl(short, _KEY, kernel, True)  # noqa: FBT003  # with the key set
    _libraries.append(library)


def run_recorded(
    call: Call, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]
) -> Any:
    """Run a collective, and have it recorded by whom this thread's calls are."""
    __tracebackhide__ = True
    if _thread.is_inside:
        return run()
    recorders, outlived = active.whose_call()
    for recorder in outlived:
        recorder.note_outliving_thread(call)
    for recorder in recorders[1:]:
        run = functools.partial(recorder.run_collective, call, args, kwargs, run)
    _thread.is_inside = True
    try:
        return recorders[0].run_collective(call, args, kwargs, run) if recorders else run()
    finally:
        _thread.is_inside = False


def _run_read(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]
) -> Any:
    __tracebackhide__ = True
    if _thread.is_inside:
        return run()
    for recorder in active.entered():
        recorder.note_read(func, args, kwargs)
    _thread.is_inside = True
    try:
        return run()
    finally:
        _thread.is_inside = False


def _is_traced() -> bool:
    """Whether a call on tensors without memory is the compiler's, and not a test's real one."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


class WatchingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """See every operation of this thread below autograd. See Note [Subclasses pass through]."""

    # Without it a higher-order operator in the block raises.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch.compile on under this mode (torch 2.9.1 and newer)."""
        return True

    def __init__(self, tracer: ModuleTracer | None, calls: Iterable[Call] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._tracer = tracer
        # By identity: torch's operations hash slowly.
        self._calls = {id(call.func): call for call in calls}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        call = self._calls.get(id(func))
        dispatch = max(map(dispatch_of, types), default=Dispatch.NONE)
        if dispatch is Dispatch.WRAPPER:
            if self._tracer is not None and any(map(is_dtensor_class, types)):
                self._tracer.note(func, args)
            return NotImplemented
        if dispatch is Dispatch.OPAQUE and getattr(func, "namespace", None) not in NAMESPACES:
            return NotImplemented
        if self._tracer is not None:
            self._tracer.note(func)
        if call is None:
            return func(*args, **given)
        return run_recorded(call, args, given, functools.partial(func, *args, **given))
