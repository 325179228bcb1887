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
from torch import fx, nn

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.recording.active import OWN_CODES, TORCH_FILES
from pytest_fsdp_comm.text.words import show_path

if TYPE_CHECKING:
    from collections.abc import Iterator

# Read in torch 2.6, 2.9, 2.11, 2.13; tests/recording/test_contracts.py fails when one moves.
_CALL_MODULE: Final = nn.Module._call_impl.__code__
"""Every call of a module passes through it."""
_STEP: Final = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""torch's wrapper around every optimizer's step."""

_DDP: Final = TORCH_FILES + "nn/parallel/distributed.py"
# The recorder, and what torch puts between the dispatcher and Python: a kernel's, or a mode's.
_PACKAGE: Final = f"{Path(__file__).parents[2]}/"
_SKIPPED: Final = (
    *(f"{_PACKAGE}{room}/" for room in ("recording", "simulation")),
    *(TORCH_FILES + path for path in ("_compile.py", "_dynamo/", "utils/_python_dispatch.py")),
)
_USE: Final = "the recorder relies on"
_STDLIB: Final = sysconfig.get_path("stdlib") + "/"
_SITE_PACKAGES: Final = ("/site-packages/", "/dist-packages/")
_THIN: Final = tuple(
    TORCH_FILES + path
    for path in (
        *("_tensor.py", "functional.py", "_jit_internal.py", "_ops.py", "overrides.py"),
        *("distributed/tensor/_api.py", "distributed/tensor/_dispatch.py"),
        "distributed/_functional_collectives.py",
    )
)
"""Files of torch that only pass on what their caller requests."""


def innermost_module() -> nn.Module | None:
    """The innermost module on the stack that runs, or is run again; None in backward itself."""
    for frame in _outwards(sys._getframe(1)):
        kind = _kind_of(frame.f_code)
        if kind == "module":
            module = _module_of(frame)
            if module is not None:
                return module
        elif kind == "engine":
            return None
    return None


# traceback.walk_stack() would look up the line of each frame, which is slow.
def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_modules() -> list[nn.Module]:
    """The modules on the stack whose calls are under way, outermost first."""
    return [module for module in running() if module is not None]


def running() -> list[nn.Module | None]:
    """What is under way on the stack, outermost first: modules, and None for the engine."""
    found: list[nn.Module | None] = []
    for frame in _outwards(sys._getframe(1)):
        kind = _kind_of(frame.f_code)
        module = _module_of(frame) if kind == "module" else None
        if module is not None or kind == "engine":
            found.append(module)
    return found[::-1]


def requesting_frame() -> FrameType | None:
    """The innermost frame that requested the operation which runs; None if it is no user's."""
    for frame in _outwards(sys._getframe(1)):
        is_own = _kind_of(frame.f_code) == "skipped"
        requests = None if is_own else _requests(frame.f_code.co_filename)
        if requests is not None:
            return frame if requests else None
    return None


def asks_for_user(frame: FrameType) -> bool:
    """Whether a frame is code of a user or of a library, neither torch's nor this package's."""
    path = frame.f_code.co_filename
    return _kind_of_file(path) in {"user", "library"} and not path.startswith(_PACKAGE)


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
and a kernel or a mode. ``requester``: of torch, and may be what requested a collective."""


@functools.cache
def _kind_of_file(path: str) -> _File:
    if path.startswith(_SKIPPED):
        return "skipped"
    if path.startswith(TORCH_FILES):
        return (
            "requester" if path == _DDP or path.startswith(TORCH_FILES + "distributed") else "torch"
        )
    # Packages are below the standard library where there is no virtual environment.
    if any(directory in path for directory in _SITE_PACKAGES):
        return "library"
    return "stdlib" if path.startswith((_STDLIB, "<")) else "user"


_Code = Literal[
    "skipped",
    "module",
    "engine",
    "step",
    "user",
    "library",
    "ddp",
    "redistribute",
    "dtensor",
    "object",
    "other",
]
"""What a frame's code means to whoever looks for the reason of a call. ``skipped``: the recorder's
own, or what torch runs between dispatcher and kernel."""


_MEANT: Final[dict[_File, _Code]] = {"skipped": "skipped", "user": "user", "library": "library"}

# By identity, since code hashes slowly; kept, so that its identity stays its own. A stack of a
# hundred frames is looked at for every collective, so each costs one look-up.
_kinds: dict[int, _Code] = {}
_codes: list[CodeType] = []
_passed: set[int] = set()
"""The codes among them that are neither a user's nor a library's."""


def _kind_of(code: CodeType) -> _Code:
    kind = _kinds.get(id(code))
    if kind is None:
        _codes.append(code)
        kind = _kinds[id(code)] = _look_at(code)
        if kind not in {"user", "library"}:
            _passed.add(id(code))
    return kind


def _look_at(code: CodeType) -> _Code:
    if code is _CALL_MODULE or code is _forward_method_code():
        return "module"
    if code is engine_code():
        return "engine"
    if code is _STEP or any(code is clipping for clipping in _clipping_codes()):
        return "step"
    if code is _redistribute_code():
        return "redistribute"
    path = code.co_filename
    kind = "skipped" if any(code is own for own in OWN_CODES.values()) else _kind_of_file(path)
    if kind == "requester":
        return _kind_of_requester(code)
    return _MEANT.get(kind, "other")


def _kind_of_requester(code: CodeType) -> _Code:
    if code.co_filename == _DDP:
        return "ddp"
    inside = code.co_filename[len(TORCH_FILES) :]
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
    """Python called the autograd engine further up, as far as the walk went."""
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

    def pass_module(self, frame: FrameType) -> None:
        """Note the call of a module."""
        module = _module_of(frame)
        if module is not None:
            self.outermost = module
            # Never the truth of a module, which is its length, or an error.
            if self.innermost is None and not self.is_in_engine:
                self.innermost = module

    def pass_code(self, kind: _Code, frame: FrameType) -> None:
        """Note any other code that means something."""
        if kind in {"user", "library"}:
            known = self.caller and _kind_of(self.caller.f_code)
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


def scan_stack(*, needs_outermost: bool = True) -> StackScan:
    """Walk up the stack: all of it, or until only what runs further out remains unknown."""
    scan, known = StackScan(), _kinds.get
    below = sys._getframe(1)
    frame: FrameType | None = below
    entry: FrameType | None = None
    has_reason = has_user = False
    while frame is not None:
        kind = known(id(frame.f_code)) or _kind_of(frame.f_code)
        if kind == "other":
            scan.is_from_cpp &= entry is not None
        elif kind == "module":
            scan.pass_module(frame)
            has_reason = has_reason or scan.innermost is not None
        elif kind == "engine":
            entry = entry or below
            scan.is_in_engine = has_reason = True
        elif kind != "skipped":
            scan.is_from_cpp &= entry is not None
            # A redistribution has many frames of DTensor's.
            if kind != "dtensor" or not (has_reason or scan.is_from_dtensor):
                scan.pass_code(kind, frame)
            has_user = has_user or kind == "user"
        if has_reason and has_user and not needs_outermost:
            break
        below, frame = frame, frame.f_back
    if entry is not None or frame is None:
        scan.is_from_ddp = scan.is_from_ddp or _is_given_a_bucket(entry or below)
    return scan


def find_call_site() -> str:
    """What `StackScan.call_site` says, by a walk up to the innermost user code alone."""
    return call_site_of(find_caller())


def find_caller() -> FrameType | None:
    """What `StackScan.caller` is, by a walk up to the innermost user code alone.

    Keep none: it keeps its tensors alive.
    """
    library, passed, frame = None, _passed, sys._getframe(1).f_back
    while frame is not None:
        if id(frame.f_code) not in passed:
            kind = _kinds.get(id(frame.f_code)) or _kind_of(frame.f_code)
            if kind == "user":
                return frame
            if kind == "library":
                library = library or frame
        frame = frame.f_back
    return library


# For every collective the same few places.
_call_sites: dict[tuple[int, int], str] = {}


def call_site_of(frame: FrameType | None) -> str:
    """``path:line``; empty for None."""
    if frame is None:
        return ""
    place = id(frame.f_code), frame.f_lasti
    if place not in _call_sites:
        _call_sites[place] = f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
    return _call_sites[place]


def _is_given_a_bucket(entry: FrameType) -> bool:
    """Whether the frame that C++ called, or that starts a thread, is DDP's communication hook's."""
    if entry.f_code.co_name == "<module>":
        return False
    bucket: Any = dist.GradBucket  # type: ignore[attr-defined]  # public, but torch does not list it
    for value in entry.f_locals.values():  # noqa: SIM110  # any() takes four times as long
        if isinstance(value, bucket):
            return True
    return False


def _module_of(frame: FrameType) -> nn.Module | None:
    """The user's module whose call a frame is; None for a graph that the compiler made of one."""
    found: Any = frame.f_locals.get("self")
    return None if not isinstance(found, nn.Module) or is_graph(found) else found


def is_graph(module: nn.Module | None) -> bool:
    """Whether a module is a graph that the compiler made, or what the compiler calls it by."""
    # Some backends run a graph as it is, and dynamo wraps that of backward (read in torch 2.13).
    # What TorchScript has in place of a dict has no get().
    held = {} if module is None else module._modules
    called = held["_orig_mod"] if "_orig_mod" in held else module  # noqa: SIM401  # as just said
    if not isinstance(called, fx.GraphModule):
        return False
    if isinstance(called, graph_type()):
        return True
    # A pass may have made another of it, of the class of those that users trace; AOTAutograd names
    # what backward is given (read in torch 2.13).
    inputs = called.graph.find_nodes(op="placeholder")
    return any(str(node.target).startswith("tangents_") for node in inputs)


# For every collective the same few files.
_shown = functools.cache(show_path)


@functools.cache
def engine_code() -> CodeType:
    """The code of torch's function that calls the autograd engine."""
    return _code("torch.autograd.graph", "_engine_run_backward")


@functools.cache
def graph_type() -> type[nn.Module]:
    """The class of the graphs that a compiled module's call runs."""
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
def _clipping_codes() -> list[CodeType]:
    """The code of functions that clip gradients."""
    # By their public names, all there since torch 2.6, because the functions themselves live under
    # private ones: torch.nn.utils.get_total_norm is clip_grad._get_total_norm.
    names = ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm")
    fsdp1 = _look_up("torch.distributed.fsdp", "FullyShardedDataParallel")
    if not hasattr(fsdp1, "clip_grad_norm_"):
        raise upstream.moved_error("torch", f"{fsdp1.__qualname__}.clip_grad_norm_", _USE)
    codes = [_code("torch.nn.utils", name) for name in names]
    codes.append(inspect.unwrap(fsdp1.clip_grad_norm_).__code__)
    return codes


def _code(module: str, name: str) -> CodeType:
    code: CodeType = inspect.unwrap(_look_up(module, name)).__code__
    return code


def _look_up(module: str, name: str) -> Any:
    return upstream.look_up("torch", module, name, _USE)
