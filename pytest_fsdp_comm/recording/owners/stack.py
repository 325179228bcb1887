"""Read the Python stack: the running module, the phase, and the code that issued a call."""

# Note [No hooks]
# Global module hooks would switch torch.compile off, leak after an error, and miscount modules that
# run twice, so the recorder reads the stack instead. It recognises functions by their code objects,
# which survive decorators that copy names. Frames further out than the innermost module, or than
# the autograd engine, did not request the current call.

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final, Literal

import torch.distributed as dist
from torch import fx, nn

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.recording.frames import (
    Whose,
    call_site_of,
    find_author,
    torch_path_prefix,
    walk_outwards,
)

_CALL_MODULE: Final[CodeType] = upstream.look_up("torch.nn", "Module._call_impl").__code__
"""The code object of the function that every module call runs."""

_STEP: Final[CodeType] = upstream.look_up("torch.optim", "Optimizer.profile_hook_step")(
    lambda: None
).__code__
"""The code object of the function that torch wraps around every optimizer's step."""

_DDP: Final = torch_path_prefix() + "nn/parallel/distributed.py"

# Files of torch whose code runs between the dispatcher and a kernel or a mode.
BELOW_DISPATCHER: Final = tuple(
    torch_path_prefix() + path
    for path in ("_compile.py", "_dynamo/", "_ops.py", "_subclasses/", "utils/_python_dispatch.py")
)

CodeKind = Literal[
    "skipped",
    "module",
    "engine",
    "step",
    "other",
    # Code that may have requested a collective:
    "user",
    "library",
    "ddp",
    "redistribute",
    "dtensor",
    "object",
]
"""The kind of code that a frame runs. ``skipped`` is code of this package, and code that torch runs
between the dispatcher and a kernel."""

_KINDS_BY_AUTHOR: Final[dict[Whose, CodeKind]] = {
    "user": "user",
    "library": "library",
    "stdlib": "other",
    "ours": "skipped",
}

# The kind of each code object, keyed by its id, because code objects hash slowly. `_codes` keeps
# the objects alive, so that ids stay unique. For each collective, we walk a stack of about a
# hundred frames, so a frame must cost only one look-up.
code_kinds: dict[int, CodeKind] = {}

_codes: list[CodeType] = []


def get_cached_code_kind(code: CodeType) -> CodeKind:
    """Return the kind of a code object."""
    kind = code_kinds.get(id(code))
    if kind is None:
        _codes.append(code)
        kind = code_kinds[id(code)] = _classify_code(code)
    return kind


def _classify_code(code: CodeType) -> CodeKind:  # noqa: PLR0911  # one return for each kind
    if code is _CALL_MODULE or code is _registered_forward_code():
        return "module"
    if code is engine_code():
        return "engine"
    if code is _STEP or any(code is clipping for clipping in _clipping_codes()):
        return "step"
    if code is code_of("torch.distributed.tensor._redistribute", "redistribute_local_tensor"):
        return "redistribute"
    owner = find_author(code.co_filename)
    if owner != "torch":
        return _KINDS_BY_AUTHOR[owner]
    if code.co_filename.startswith(BELOW_DISPATCHER):
        return "skipped"
    if code.co_filename == _DDP:
        return "ddp"
    inside = code.co_filename[len(torch_path_prefix()) :]
    if inside.startswith(("distributed/tensor/", "distributed/_tensor/")):
        return "dtensor"
    if inside == "distributed/distributed_c10d.py" and "object" in code.co_name:
        return "object"
    return "other"


def engine_code() -> CodeType:
    """Return the code of torch's function that calls the autograd engine."""
    return code_of("torch.autograd.graph", "_engine_run_backward")


@functools.cache
def _registered_forward_code() -> CodeType:
    # torch wraps this code around a method other than forward, to unshard the FSDP2 unit first.
    name = "register_fsdp_forward_method"
    registering = code_of("torch.distributed.fsdp", name)
    for constant in registering.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == "wrapped_method":
            return constant
    raise upstream.moved_error("torch", f"torch.distributed.fsdp.{name}.<locals>.wrapped_method")


@functools.cache
def _clipping_codes() -> list[CodeType]:
    """Return the code of torch's functions that clip gradients."""
    # Look up public names: the functions themselves have private ones, such as _get_total_norm.
    names = ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm")
    codes = [code_of("torch.nn.utils", name) for name in names]
    return [*codes, code_of("torch.distributed.fsdp", "FullyShardedDataParallel.clip_grad_norm_")]


@functools.cache
def code_of(module: str, name: str) -> CodeType:
    """Return the code object of a torch function, or of a method, such as ``Linear.forward``."""
    code: CodeType = inspect.unwrap(upstream.look_up(module, name)).__code__
    return code


def called_module(frame: FrameType) -> nn.Module | None:
    """Return the module that a frame calls; None for other frames and compiled graphs."""
    return _read_called_module(frame) if get_cached_code_kind(frame.f_code) == "module" else None


def running_modules() -> list[nn.Module | None]:
    """Return the running modules on the stack, outermost first, with None for the engine."""
    modules = []
    for frame in walk_outwards(sys._getframe(1)):
        module = called_module(frame)
        if module is not None or get_cached_code_kind(frame.f_code) == "engine":
            modules.append(module)
    return modules[::-1]


@dataclass(slots=True)
class StackScan:
    """The result of one walk up the stack. Do not store it: its frames keep tensors alive."""

    innermost: nn.Module | None = None
    """The innermost running module, if any; in backward, modules run only for recomputation."""
    outermost: nn.Module | None = None
    is_in_engine: bool = False
    """Whether Python code further up the stack called the autograd engine."""
    is_in_optimizer: bool = False
    """Whether an optimizer step or gradient clipping is running; False in the forward and backward
    of the step's closure."""
    is_object: bool = False
    """Whether one of the ``*_object*`` collectives requested the call."""
    is_from_cpp: bool = True
    """True if no Python code lies between the call and the engine (or the start of the thread)."""
    is_from_ddp: bool = False
    """Whether DDP, or a communication hook that DDP called, requested the call."""
    is_from_dtensor: bool = False
    redistribution: FrameType | None = None
    redistributing: dict[str, Any] | None = None
    """The local variables of `redistribution`, read only once because reading them is slow."""
    caller: FrameType | None = None
    """The innermost frame of user code, or else of a library other than torch, if any."""
    is_of_backward: bool = False
    """Whether the caller called the autograd engine, which issued the call."""

    @property
    def call_site(self) -> str:
        """``path:line`` of the caller; empty if there is none."""
        return call_site_of(self.caller)

    def add_frame(self, kind: CodeKind, frame: FrameType) -> None:
        """Update the scan for a frame that runs neither a module nor the engine."""
        if kind in {"user", "library"}:
            caller_kind = self.caller and get_cached_code_kind(self.caller.f_code)
            if caller_kind is None or (caller_kind == "library" and kind == "user"):
                self.caller, self.is_of_backward = frame, self.is_in_engine
        # Frames further out did not request the call; see Note [No hooks].
        elif self.innermost is not None or self.is_in_engine:
            return
        elif kind == "step":
            self.is_in_optimizer = True
        elif kind == "ddp":
            self.is_from_ddp = True
        elif kind == "object":
            self.is_object = True
        else:
            self.is_from_dtensor = True
            if kind == "redistribute" and self.redistribution is None:
                self.redistribution, self.redistributing = frame, frame.f_locals


def scan_stack() -> StackScan:
    """Scan the stack, from the calling function outwards."""
    scan, get_kind = StackScan(), code_kinds.get
    previous = sys._getframe(1)
    frame: FrameType | None = previous
    entry: FrameType | None = None
    has_reason = False
    while frame is not None:
        kind = get_kind(id(frame.f_code)) or get_cached_code_kind(frame.f_code)
        if kind == "other":
            scan.is_from_cpp &= entry is not None
        elif kind == "module":
            module = _read_called_module(frame)
            # Compare with None: bool() of a module may be its length, or raise.
            if module is not None:
                scan.outermost = module
                if scan.innermost is None and not scan.is_in_engine:
                    scan.innermost = module
            has_reason = has_reason or scan.innermost is not None
        elif kind == "engine":
            entry = entry or previous
            scan.is_in_engine = has_reason = True
        elif kind != "skipped":
            scan.is_from_cpp &= entry is not None
            # A redistribution has many frames of DTensor code; reading the first is enough.
            if kind != "dtensor" or not (has_reason or scan.is_from_dtensor):
                scan.add_frame(kind, frame)
        if kind != "skipped":  # a simulated DDP runs in frames of this package
            previous = frame
        frame = frame.f_back
    scan.is_from_ddp = scan.is_from_ddp or _is_ddp_hook_frame(entry or previous)
    return scan


def _is_ddp_hook_frame(entry: FrameType) -> bool:
    """Whether `entry`, called from C++ or by a new thread, is a DDP communication hook."""
    if entry.f_code.co_name == "<module>":
        return False
    bucket: Any = dist.GradBucket  # type: ignore[attr-defined]  # public, but torch does not list it
    return any(isinstance(value, bucket) for value in entry.f_locals.values())


def _read_called_module(frame: FrameType) -> nn.Module | None:
    """Return the user's module that a frame calls; None for a compiled graph."""
    module: Any = frame.f_locals.get("self")
    return None if not isinstance(module, nn.Module) or is_compiled_graph(module) else module


def unwrap_compiled_module(module: nn.Module | None) -> nn.Module | None:
    """Return the module inside a wrapper of `torch.compile`; any other module unchanged."""
    # A TorchScript module's `_modules` is not a dict and has no get().
    modules = {} if module is None else module._modules
    return modules["_orig_mod"] if "_orig_mod" in modules else module  # noqa: SIM401  # no get()


def is_compiled_graph(module: nn.Module | None) -> bool:
    """Whether a module is a compiled graph, or dynamo's wrapper around one."""
    # Some backends call the graph directly; dynamo wraps the graph of backward (torch 2.13).
    called = unwrap_compiled_module(module)
    if not isinstance(called, fx.GraphModule):
        return False
    if isinstance(called, graph_type()):
        return True
    # A compiler pass may rebuild the graph as a plain GraphModule, which is also the class of
    # users' traces. Only AOTAutograd names inputs `tangents_`, in backward (checked in torch 2.13).
    inputs = called.graph.find_nodes(op="placeholder")
    return any(str(node.target).startswith("tangents_") for node in inputs)


@functools.cache
def graph_type() -> type[nn.Module]:
    """Return the class of the graphs that the backends eager and aot_eager call."""
    graph: type[nn.Module] = upstream.look_up("torch.fx._lazy_graph_module", "_LazyGraphModule")
    return graph
