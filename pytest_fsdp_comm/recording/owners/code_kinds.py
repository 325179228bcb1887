"""Classify code objects by what they tell about a collective, such as code that calls a module."""

from __future__ import annotations

import functools
import inspect
from types import CodeType
from typing import Final, Literal

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.recording.frames import Whose, find_author, torch_path_prefix

# Checked in torch 2.6, 2.9, 2.11 and 2.13; tests/recording/test_contracts.py fails if one moves.
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
    # Look up the public names, which have existed since torch 2.6. The definitions have private
    # names: torch.nn.utils.get_total_norm is clip_grad._get_total_norm.
    names = ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm")
    codes = [code_of("torch.nn.utils", name) for name in names]
    return [*codes, code_of("torch.distributed.fsdp", "FullyShardedDataParallel.clip_grad_norm_")]


@functools.cache
def code_of(module: str, name: str) -> CodeType:
    """Return the code object of a torch function, or of a method, such as ``Linear.forward``."""
    code: CodeType = inspect.unwrap(upstream.look_up(module, name)).__code__
    return code
