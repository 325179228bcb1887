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
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.text.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Iterator

# Read in torch 2.6, 2.9, 2.11, 2.13; tests/recording/test_contracts.py fails when one moves.
_CALL_MODULE: Final = nn.Module._call_impl.__code__
"""Every call of a module passes through it."""
_STEP: Final = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""torch's wrapper around every optimizer's step."""

_TORCH: Final = str(Path(torch.__file__).parent) + "/"
_DDP: Final = _TORCH + "nn/parallel/distributed.py"
# The recorder, and what torch puts between the dispatcher and a mode's Python.
_SKIPPED: Final = (
    str(Path(__file__).parents[1]) + "/",
    *(_TORCH + path for path in ("_compile.py", "_dynamo/", "utils/_python_dispatch.py")),
)
_USE: Final = "the recorder relies on"
_STDLIB: Final = sysconfig.get_path("stdlib") + "/"
_SITE_PACKAGES: Final = ("/site-packages/", "/dist-packages/")
_THIN: Final = tuple(
    _TORCH + path
    for path in (
        *("_tensor.py", "functional.py", "_jit_internal.py", "_ops.py", "overrides.py"),
        *("distributed/tensor/_api.py", "distributed/tensor/_dispatch.py"),
        "distributed/_functional_collectives.py",
    )
)
"""Files of torch that only pass on what their caller requests."""


def innermost_module() -> nn.Module | None:
    """The innermost module on the stack that runs, or is run again; None in backward itself."""
    frame: FrameType | None = sys._getframe(1)
    engine, method = _engine_code(), _forward_method_code()
    while frame is not None:
        code = frame.f_code
        if code is _CALL_MODULE or code is method:
            module = _module_of(frame)
            if module is not None:
                return module
        elif code is engine:
            return None
        frame = frame.f_back
    return None


# traceback.walk_stack() would look up the line of each frame, which is slow.
def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_modules() -> list[nn.Module]:
    """The modules on the stack whose calls are under way, outermost first."""
    method = _forward_method_code()
    found = [
        _module_of(frame)
        for frame in _outwards(sys._getframe(1))
        if frame.f_code is _CALL_MODULE or frame.f_code is method
    ]
    return [module for module in reversed(found) if module is not None]


def requesting_frame() -> FrameType | None:
    """The innermost frame that requested the operation which runs; None if it is no user's."""
    for frame in _outwards(sys._getframe(1)):
        requests = _requests(frame.f_code.co_filename)
        if requests is not None:
            return frame if requests else None
    return None


@functools.cache
def _requests(path: str) -> bool | None:
    """Whether code of a file acts for a user; None if it passes on what its caller requests."""
    kind = _kind_of_file(path)
    if kind == "library" and "/numpy/" in path:
        return None
    if kind == "library":
        # transformers' own code outside of its models looks at masks and positions.
        return Path(path).parent.name != "transformers"
    if kind in {"torch", "requester"}:
        return None if path.startswith(_THIN) else False
    return True if kind == "user" else None


_File = Literal["skipped", "torch", "requester", "stdlib", "library", "user"]
"""Whose code a file is. ``skipped``: the recorder's own, or what torch runs between its dispatcher
and a mode. ``requester``: of torch, and may be what requested a collective."""


@functools.cache
def _kind_of_file(path: str) -> _File:
    if path.startswith(_SKIPPED):
        return "skipped"
    if path.startswith(_TORCH):
        return "requester" if path == _DDP or path.startswith(_TORCH + "distributed") else "torch"
    # Packages are below the standard library where there is no virtual environment.
    if any(directory in path for directory in _SITE_PACKAGES):
        return "library"
    return "stdlib" if path.startswith((_STDLIB, "<")) else "user"


@dataclass(slots=True)
class StackScan:
    """What one walk up the stack found. Keep none: its frame keeps all its tensors alive."""

    innermost: nn.Module | None = None
    """The module that runs; in backward only one that a recomputation runs. None if none does."""
    outermost: nn.Module | None = None
    """The outermost module of the whole stack; None if no module runs."""
    is_in_engine: bool = False
    """Python called the autograd engine further up."""
    is_in_optimizer: bool = False
    """An optimizer's step, or gradient clipping, runs."""
    is_object: bool = False
    """One of the ``*_object*`` collectives requested it."""
    is_from_cpp: bool = True
    """No Python lies between the call and the autograd engine, or the start of its thread."""
    is_from_ddp: bool = False
    """DDP requested it, or a communication hook that it called."""
    is_from_dtensor: bool = False
    redistribution: FrameType | None = None
    user_call_site: str = ""
    """``path:line`` of the innermost user code; empty if there is none."""
    library_call_site: str = ""
    """``path:line`` of the innermost library outside of torch; empty if there is none."""

    @property
    def call_site(self) -> str:
        """Where it was requested: in user code, else in a library; empty if in neither."""
        return self.user_call_site or self.library_call_site

    def pass_module(self, frame: FrameType) -> None:
        """Note the call of a module."""
        module = _module_of(frame)
        if module is not None:
            self.outermost = module
            # Never the truth of a module, which is its length, or an error.
            if self.innermost is None and not self.is_in_engine:
                self.innermost = module

    def pass_code(self, frame: FrameType, clipping: dict[int, CodeType]) -> None:
        """Note any other frame; `clipping` as `_clipping_codes`."""
        code = frame.f_code
        path = code.co_filename
        kind = _kind_of_file(path)
        if kind == "skipped":
            return
        if not self.is_in_engine:
            self.is_from_cpp = False
        if code is _STEP or id(code) in clipping:
            self.is_in_optimizer = True
        elif kind in {"user", "library"}:
            self._pass_caller(frame, kind)
        # See Note [No hooks].
        elif kind == "requester" and self.innermost is None and not self.is_in_engine:
            self._pass_requester(frame)

    def _pass_caller(self, frame: FrameType, kind: _File) -> None:
        if self.user_call_site or (kind == "library" and self.library_call_site):
            return
        call_site = f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
        if kind == "user":
            self.user_call_site = call_site
        else:
            self.library_call_site = call_site

    def _pass_requester(self, frame: FrameType) -> None:
        code = frame.f_code
        if code.co_filename == _DDP:
            self.is_from_ddp = True
            return
        if code is _redistribute_code() and self.redistribution is None:
            self.redistribution = frame
        inside = code.co_filename[len(_TORCH) :]
        if inside.startswith(("distributed/tensor/", "distributed/_tensor/")):
            self.is_from_dtensor = True
        elif inside == "distributed/distributed_c10d.py" and "object" in code.co_name:
            self.is_object = True

    def pass_entry(self, frame: FrameType) -> None:
        """Look at the frame that C++ called: below the engine, or at the start of a thread."""
        # A communication hook of DDP is given the bucket.
        bucket: Any = dist.GradBucket  # type: ignore[attr-defined]  # public, but torch does not list it
        self.is_from_ddp |= any(isinstance(value, bucket) for value in frame.f_locals.values())


def scan_stack() -> StackScan:
    """Walk the whole stack once."""
    scan = StackScan()
    engine, method, clipping = _engine_code(), _forward_method_code(), _clipping_codes()
    below = sys._getframe(1)
    for frame in _outwards(below):
        code = frame.f_code
        if code is engine:
            if not scan.is_in_engine:
                scan.pass_entry(below)
            scan.is_in_engine = True
        elif code is _CALL_MODULE or code is method:
            scan.pass_module(frame)
        else:
            scan.pass_code(frame, clipping)
        below = frame
    if not scan.is_in_engine:
        scan.pass_entry(below)
    return scan


def _module_of(frame: FrameType) -> nn.Module | None:
    """The user's module whose call a frame is; None for a graph that the compiler made of one."""
    found: Any = frame.f_locals.get("self")
    if not isinstance(found, nn.Module) or isinstance(found, _graph_type()):
        return None
    return found


# For every collective the same few files.
_shown = functools.cache(show_path)


@functools.cache
def _engine_code() -> CodeType:
    return _code("torch.autograd.graph", "_engine_run_backward")


@functools.cache
def _graph_type() -> type[nn.Module]:
    # As whose call the backends below inductor (eager, aot_eager) run a compiled module's graph.
    found: type[nn.Module] = _look_up("torch.fx._lazy_graph_module", "_LazyGraphModule")
    return found


@functools.cache
def _forward_method_code() -> CodeType:
    # Around a method other than forward that is an entry of an FSDP2 unit.
    name = "register_fsdp_forward_method"
    registering = _code("torch.distributed.fsdp", name)
    for constant in registering.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == "wrapped_method":
            return constant
    raise upstream.moved_error(
        "torch", f"torch.distributed.fsdp.{name}.<locals>.wrapped_method", _USE
    )


@functools.cache
def _redistribute_code() -> CodeType:
    return _code("torch.distributed.tensor._redistribute", "redistribute_local_tensor")


@functools.cache
def _clipping_codes() -> dict[int, CodeType]:
    """The code of functions that clip gradients, by identity: code hashes slowly."""
    # By their public names, all there since torch 2.6, because the functions themselves live under
    # private ones: torch.nn.utils.get_total_norm is clip_grad._get_total_norm.
    names = ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm")
    fsdp1 = _look_up("torch.distributed.fsdp", "FullyShardedDataParallel")
    if not hasattr(fsdp1, "clip_grad_norm_"):
        raise upstream.moved_error("torch", f"{fsdp1.__qualname__}.clip_grad_norm_", _USE)
    codes = [_code("torch.nn.utils", name) for name in names]
    codes.append(inspect.unwrap(fsdp1.clip_grad_norm_).__code__)
    return {id(code): code for code in codes}


def _code(module: str, name: str) -> CodeType:
    code: CodeType = inspect.unwrap(_look_up(module, name)).__code__
    return code


def _look_up(module: str, name: str) -> Any:
    return upstream.look_up("torch", module, name, _USE)
