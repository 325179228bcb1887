"""Read the Python stack: which module runs, in which phase, at the request of what."""

# Note [No hooks]
# The stack needs no hooks: global module hooks switch torch.compile off, leak after an error, and
# miscount modules that run twice. Functions are recognised by their code objects, which survive
# decorators that copy names; what lies beyond the innermost module, or beyond the autograd engine,
# did not request what happens now.

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import fx, nn

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.recording.frames import Whose, call_site_of, outwards, torch_files, whose

# Read in torch 2.6, 2.9, 2.11, 2.13; tests/recording/test_contracts.py fails when one moves.
_CALL_MODULE: Final = nn.Module._call_impl.__code__
"""Every call of a module passes through it."""
_STEP: Final = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""torch's wrapper around every optimizer's step."""

_DDP: Final = torch_files() + "nn/parallel/distributed.py"
# What torch puts between the dispatcher and a kernel or a mode.
_BELOW_DISPATCHER: Final = tuple(
    torch_files() + path for path in ("_compile.py", "_dynamo/", "utils/_python_dispatch.py")
)


def called_module(frame: FrameType) -> nn.Module | None:
    """The module that a frame calls; None if it calls none, or a graph of the compiler."""
    return _module_of(frame) if _meaning_of(frame.f_code) == "module" else None


def running() -> list[nn.Module | None]:
    """What is under way on the stack, outermost first: modules, and None for the engine."""
    found = []
    for frame in outwards(sys._getframe(1)):
        module = called_module(frame)
        if module is not None or _meaning_of(frame.f_code) == "engine":
            found.append(module)
    return found[::-1]


_Requester = Literal["user", "library", "ddp", "redistribute", "dtensor", "object"]
_Code = Literal["skipped", "module", "engine", "step", "other"] | _Requester
"""What a frame's code means to whoever looks for the reason of a call. ``skipped``: the recorder's
own, or what torch runs between dispatcher and kernel."""


_MEANINGS: Final[dict[Whose, _Code]] = {
    "user": "user",
    "library": "library",
    "stdlib": "other",
    "ours": "skipped",
}

# By identity, since code hashes slowly; kept, so that its identity stays its own. A stack of a
# hundred frames is looked at for every collective, so each costs one look-up.
_meanings: dict[int, _Code] = {}
_codes: list[CodeType] = []


def _meaning_of(code: CodeType) -> _Code:
    meaning = _meanings.get(id(code))
    if meaning is None:
        _codes.append(code)
        meaning = _meanings[id(code)] = _look_at(code)
    return meaning


def _look_at(code: CodeType) -> _Code:  # noqa: PLR0911  # one for each meaning
    if code is _CALL_MODULE or code is _forward_method_code():
        return "module"
    if code is engine_code():
        return "engine"
    if code is _STEP or any(code is clipping for clipping in _clipping_codes()):
        return "step"
    if code is code_of("torch.distributed.tensor._redistribute", "redistribute_local_tensor"):
        return "redistribute"
    owner = whose(code.co_filename)
    if owner != "torch":
        return _MEANINGS[owner]
    if code.co_filename.startswith(_BELOW_DISPATCHER):
        return "skipped"
    if code.co_filename == _DDP:
        return "ddp"
    inside = code.co_filename[len(torch_files()) :]
    if inside.startswith(("distributed/tensor/", "distributed/_tensor/")):
        return "dtensor"
    if inside == "distributed/distributed_c10d.py" and "object" in code.co_name:
        return "object"
    return "other"


@dataclass(slots=True)
class StackScan:
    """What one walk up the stack found. Keep none: its frame keeps all its tensors alive."""

    innermost: nn.Module | None = None
    """The module that runs; in backward only one that a recomputation runs. None if none does."""
    outermost: nn.Module | None = None
    """The outermost module that was passed; None if none was."""
    is_in_engine: bool = False
    """Python called the autograd engine further up."""
    is_in_optimizer: bool = False
    """An optimizer's step, or gradient clipping, runs, and not a closure's forward or backward."""
    is_object: bool = False
    """One of the ``*_object*`` collectives requested it."""
    is_from_cpp: bool = True
    """No Python lies between the call and the autograd engine, or the start of its thread."""
    is_from_ddp: bool = False
    """DDP requested it, or a communication hook that it called."""
    is_from_dtensor: bool = False
    redistribution: FrameType | None = None
    redistributing: dict[str, Any] | None = None
    """The locals of that frame, read once, which takes long."""
    caller: FrameType | None = None
    """The innermost user code; else the innermost library outside of torch."""

    @property
    def call_site(self) -> str:
        """``path:line`` of the caller; empty if there is none."""
        return call_site_of(self.caller)

    def pass_code(self, kind: _Code, frame: FrameType) -> None:
        """Note any other code that means something."""
        if kind in {"user", "library"}:
            known = self.caller and _meaning_of(self.caller.f_code)
            if known is None or (known == "library" and kind == "user"):
                self.caller = frame
        # See Note [No hooks].
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
    """Walk up the stack."""
    scan, known = StackScan(), _meanings.get
    below = sys._getframe(1)
    frame: FrameType | None = below
    entry: FrameType | None = None
    has_reason = False
    while frame is not None:
        kind = known(id(frame.f_code)) or _meaning_of(frame.f_code)
        if kind == "other":
            scan.is_from_cpp &= entry is not None
        elif kind == "module":
            module = _module_of(frame)
            # Never the truth of a module, which is its length, or an error.
            if module is not None:
                scan.outermost = module
                if scan.innermost is None and not scan.is_in_engine:
                    scan.innermost = module
            has_reason = has_reason or scan.innermost is not None
        elif kind == "engine":
            entry = entry or below
            scan.is_in_engine = has_reason = True
        elif kind != "skipped":
            scan.is_from_cpp &= entry is not None
            # A redistribution has many frames of DTensor's.
            if kind != "dtensor" or not (has_reason or scan.is_from_dtensor):
                scan.pass_code(kind, frame)
        below, frame = frame, frame.f_back
    scan.is_from_ddp = scan.is_from_ddp or _is_given_a_bucket(entry or below)
    return scan


def _is_given_a_bucket(entry: FrameType) -> bool:
    """Whether the frame that C++ called, or that starts a thread, is DDP's communication hook's."""
    if entry.f_code.co_name == "<module>":
        return False
    bucket: Any = dist.GradBucket  # type: ignore[attr-defined]  # public, but torch does not list it
    return any(isinstance(value, bucket) for value in entry.f_locals.values())


def _module_of(frame: FrameType) -> nn.Module | None:
    """The user's module whose call a frame is; None for a graph that the compiler made of one."""
    found: Any = frame.f_locals.get("self")
    return None if not isinstance(found, nn.Module) or is_graph(found) else found


def compiled_module(module: nn.Module | None) -> nn.Module | None:
    """The module inside of one that `torch.compile` made of it; any other as it is."""
    # What TorchScript has in place of a dict has no get().
    held = {} if module is None else module._modules
    return held["_orig_mod"] if "_orig_mod" in held else module  # noqa: SIM401  # as just said


def is_graph(module: nn.Module | None) -> bool:
    """Whether a module is a graph that the compiler made, or what the compiler calls it by."""
    # Some backends run a graph as it is, and dynamo wraps that of backward (read in torch 2.13).
    called = compiled_module(module)
    if not isinstance(called, fx.GraphModule):
        return False
    if isinstance(called, graph_type()):
        return True
    # A pass may have made another of it, of the class of those that users trace; AOTAutograd names
    # what backward is given (read in torch 2.13).
    inputs = called.graph.find_nodes(op="placeholder")
    return any(str(node.target).startswith("tangents_") for node in inputs)


def engine_code() -> CodeType:
    """The code of torch's function that calls the autograd engine."""
    return code_of("torch.autograd.graph", "_engine_run_backward")


@functools.cache
def graph_type() -> type[nn.Module]:
    """The class of the graphs that a compiled module's call runs."""
    # As whose call the backends below inductor (eager, aot_eager) run a compiled module's graph.
    found: type[nn.Module] = upstream.look_up("torch.fx._lazy_graph_module", "_LazyGraphModule")
    return found


@functools.cache
def _forward_method_code() -> CodeType:
    # Around a method other than forward that is an entry of an FSDP2 unit.
    name = "register_fsdp_forward_method"
    registering = code_of("torch.distributed.fsdp", name)
    for constant in registering.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == "wrapped_method":
            return constant
    raise upstream.moved_error("torch", f"torch.distributed.fsdp.{name}.<locals>.wrapped_method")


@functools.cache
def _clipping_codes() -> list[CodeType]:
    """The code of functions that clip gradients."""
    # By their public names, all there since torch 2.6, because the functions themselves live under
    # private ones: torch.nn.utils.get_total_norm is clip_grad._get_total_norm.
    names = ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm")
    fsdp1 = upstream.look_up("torch.distributed.fsdp", "FullyShardedDataParallel")
    if not hasattr(fsdp1, "clip_grad_norm_"):
        raise upstream.moved_error("torch", f"{fsdp1.__qualname__}.clip_grad_norm_")
    codes = [code_of("torch.nn.utils", name) for name in names]
    codes.append(inspect.unwrap(fsdp1.clip_grad_norm_).__code__)
    return codes


@functools.cache
def code_of(module: str, name: str, method: str = "") -> CodeType:
    """The code of a function of torch, or of a class's method."""
    found = upstream.look_up(module, name)
    code: CodeType = inspect.unwrap(getattr(found, method) if method else found).__code__
    return code
