"""Reads the Python stack: which module runs, in which phase, who asked, and where in user code.

The stack is the one witness that needs no hooks: global module hooks switch torch.compile off, leak
after an error, and miscount modules that run twice.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn

from pytest_fsdp_comm import upstream

if TYPE_CHECKING:
    from types import CodeType

# Read in torch 2.6, 2.9, 2.11, 2.13; tests/unit/test_capture_contracts.py fails when one moves.
_CALL_MODULE: Final = nn.Module._call_impl.__code__  # noqa: SLF001  # every module call passes here
_STEP: Final = torch.optim.Optimizer.profile_hook_step(
    lambda: None
).__code__  # torch's wrapper around every optimizer's step

_TORCH: Final = str(Path(torch.__file__).parent) + "/"
_DDP: Final = _TORCH + "nn/parallel/distributed.py"
_OURS: Final = str(Path(__file__).parents[1]) + "/"
# What torch puts between the dispatcher and a mode's Python.
_AROUND_DISPATCH: Final = tuple(
    _TORCH + path for path in ("_compile.py", "_dynamo/", "utils/_python_dispatch.py")
)
_STDLIB: Final = sysconfig.get_path("stdlib") + "/"
_SITE_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


@dataclass(slots=True)
class Scan:
    """What one walk up the stack found."""

    modules: list[nn.Module] = field(default_factory=list)
    """Modules that run, innermost first; in backward only those of a recomputation."""
    outermost: nn.Module | None = None
    """The outermost module of the whole stack."""
    is_in_engine: bool = False
    """Python called the autograd engine further up."""
    is_in_optimizer: bool = False
    """An optimizer's step, or gradient clipping, runs."""
    is_object: bool = False
    """One of the ``*_object*`` collectives asked for it."""
    is_from_cpp: bool = True
    """No Python lies between the call and the autograd engine, or the start of its thread."""
    is_from_ddp: bool = False
    """DDP asked for it, or a communication hook that it called."""
    is_from_dtensor: bool = False
    """DTensor asked for it."""
    redistribution: FrameType | None = None
    """The frame of DTensor's redistribution."""
    call_site: str = ""
    """``path:line`` of the innermost user code, or else of the innermost library."""
    library_call_site: str = ""


def innermost_module() -> nn.Module | None:
    """The module that runs, or is run again, at the innermost place of the stack."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect.currentframe, documented for CPython
    engine = _engine_code()
    while frame is not None:
        code = frame.f_code
        if code is _CALL_MODULE:
            return _self_of(frame)
        if code is engine:
            return None
        frame = frame.f_back
    return None


def outermost_module() -> nn.Module | None:
    """The module whose call is furthest up the stack."""
    found = None
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # see above
    while frame is not None:
        if frame.f_code is _CALL_MODULE:
            found = _self_of(frame)
        frame = frame.f_back
    return found


def scan_stack() -> Scan:
    """Walks the whole stack once."""
    scan = Scan()
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # see above
    below = frame
    while frame is not None:
        if frame.f_code is _engine_code():
            if not scan.is_in_engine:
                _note_entry(scan, below)
            scan.is_in_engine = True
        elif frame.f_code is _CALL_MODULE:
            _note_module(scan, frame)
        else:
            _note_code(scan, frame)
        below, frame = frame, frame.f_back
    if not scan.is_in_engine:
        _note_entry(scan, below)
    scan.call_site = scan.call_site or scan.library_call_site
    return scan


def _note_module(scan: Scan, frame: FrameType) -> None:
    module = _self_of(frame)
    # Never `module or ...`: the truth of a module is its length, or an error.
    if module is not None:
        scan.outermost = module
        if not scan.is_in_engine:
            scan.modules.append(module)


def _note_code(scan: Scan, frame: FrameType) -> None:
    code = frame.f_code
    path = code.co_filename
    if path.startswith((_OURS, *_AROUND_DISPATCH)):
        return
    if not scan.is_in_engine:
        scan.is_from_cpp = False
    if code is _STEP or code in _clipping_codes():
        scan.is_in_optimizer = True
    elif path.startswith(_TORCH):
        _note_torch_frame(scan, frame, _redistribute_code())
    elif not scan.call_site and not path.startswith((_STDLIB, "<")):
        where = f"{_shown(path)}:{frame.f_lineno}"
        if any(part in path for part in _SITE_PACKAGES):
            scan.library_call_site = scan.library_call_site or where
        else:
            scan.call_site = where


def _note_torch_frame(scan: Scan, frame: FrameType, redistribute: CodeType) -> None:
    code = frame.f_code
    if scan.modules or scan.is_in_engine:
        return
    if code.co_filename == _DDP:
        scan.is_from_ddp = True
    if not code.co_filename.startswith(_TORCH + "distributed"):
        return
    if code is redistribute and scan.redistribution is None:
        scan.redistribution = frame
    inside = code.co_filename[len(_TORCH) :]
    if inside.startswith(("distributed/tensor/", "distributed/_tensor/")):
        scan.is_from_dtensor = True
    elif inside == "distributed/distributed_c10d.py" and "object" in code.co_name:
        scan.is_object = True


def _self_of(frame: FrameType) -> nn.Module | None:
    found: Any = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) else None


def _note_entry(scan: Scan, frame: FrameType | None) -> None:
    """Looks at the frame that C++ called: below the engine, or at the start of a thread."""
    if frame is None:
        return
    # A communication hook of DDP is given the bucket.
    bucket: Any = dist.GradBucket  # type: ignore[attr-defined]  # public, but torch does not list it
    scan.is_from_ddp |= any(isinstance(value, bucket) for value in frame.f_locals.values())


@functools.cache
def _shown(path: str) -> str:
    """A path relative to the working directory where it lies below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


@functools.cache
def _engine_code() -> CodeType:
    return _code("torch.autograd.graph", "_engine_run_backward")


@functools.cache
def _redistribute_code() -> CodeType:
    return _code("torch.distributed.tensor._redistribute", "redistribute_local_tensor")


@functools.cache
def _clipping_codes() -> frozenset[CodeType]:
    names = ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm")
    module = "torch.nn.utils.clip_grad"
    found = {_code(module, name) for name in names if _has(module, name)}
    fsdp1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
    if fsdp1 in sys.modules:
        wrapped = sys.modules[fsdp1].FullyShardedDataParallel.clip_grad_norm_
        found.add(_unwrapped(wrapped).__code__)
    return frozenset(found)


def _has(module: str, name: str) -> bool:
    return hasattr(_imported(module), name)


def _code(module: str, name: str) -> CodeType:
    function = getattr(_imported(module), name, None)
    if function is None:
        raise upstream.moved("torch", f"{module}.{name}", "the recorder relies on")
    code: CodeType = _unwrapped(function).__code__
    return code


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _imported(module: str) -> Any:
    import importlib  # noqa: PLC0415  # on first use only

    return importlib.import_module(module)
