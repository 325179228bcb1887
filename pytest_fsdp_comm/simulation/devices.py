"""Runs code for "cuda" on the CPU, as if there were a GPU, when no GPU is visible."""

# Note [Cuda without CUDA]
# `values.SimulatedTensors` runs operations for cuda on the CPU and marks the storages of their
# results with the cuda device. Operations on marked tensors return marked tensors. To user code,
# marked tensors are on cuda, and `torch.cuda` has an H100. To torch itself, all tensors are on the
# CPU, so it communicates exactly as it does on the CPU. This module only has to patch calls that
# fail before any operation is dispatched, and attributes that user code reads. Checked in torch
# 2.7, 2.13 and 2.15.

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, product
from types import SimpleNamespace
from typing import Any, Final, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.backends import cudnn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules import batchnorm

from pytest_fsdp_comm.recording.frames import find_call_site, is_outside_torch
from pytest_fsdp_comm.recording.patches import patched
from pytest_fsdp_comm.recording.value_dependence import note_answer
from pytest_fsdp_comm.simulation.gpu_functions import replaced_functions
from pytest_fsdp_comm.simulation.memory import SimulationError
from pytest_fsdp_comm.simulation.values import CPU, SimulatedTensors, mark, mark_of

_H100: Final = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    warp_size=32,
    uuid="GPU-00000000-0000-0000-0000-000000000000",
)
_CUDA_VERSION: Final = "12.8"
_NOTHING: Final = (
    *("empty_cache", "init", "ipc_collect", "synchronize", "set_sync_debug_mode"),
    *("_record_memory_history", "_dump_snapshot", "start", "stop"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_accumulated_memory_stats", "set_per_process_memory_fraction", "set_stream"),
)
"""Functions of torch.cuda that do nothing on a simulated rank."""
_ZERO: Final = (
    *("memory_allocated", "memory_reserved", "memory_cached"),
    *("max_memory_allocated", "max_memory_reserved", "max_memory_cached"),
    *("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"),
)
_IDLE: Final = (
    *("Stream", "Event", "StreamContext", "stream", "device", "device_of", "device_index"),
    *("current_stream", "default_stream", "ExternalStream"),
)
_TO: Final = torch.Tensor.to
_CAPTURABLE: Final = "_get_capturable_supported_devices"  # checked in torch 2.7 to 2.15
_GENERATOR: Final = torch.Generator


class _Idle:
    """Replaces streams, events and their context managers with objects that do nothing."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _current()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: _Idle | None = None) -> _Idle:
        return event or _Idle()

    def elapsed_time(self, _: _Idle) -> float:
        return cast("float", _state.answer(1.0, "elapsed_time"))

    def record(self, *_: Any) -> None:
        """Do nothing, because operations on the CPU have finished when they return."""

    synchronize = wait = wait_event = wait_stream = record


class _AnyGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _GENERATOR)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        device = _device(device)
        return _GENERATOR(CPU if device.type == "cuda" else device)


class _Generator(metaclass=_AnyGenerator):
    """Replaces ``torch.Generator``, whose constructor looks for a GPU if the device is cuda."""


class _State:
    """Whether reads of GPU properties return assumed values, and which devices the test uses."""

    answers = True
    index = 0
    has_mesh = False

    def answer(self, value: Any, how: str) -> Any:
        if not self.answers:
            raise SimulationError(
                f"{find_call_site()} reads {how}, but a simulated rank has no GPU: use a value "
                "from your configuration instead, or simulate=True, which assumes a value"
            )
        text = "H100" if value is _H100 else value or 0
        note_answer(str(text).replace(" ", ""), how, of_process=True)
        return value


_state = _State()


@contextlib.contextmanager
def cuda_on_cpu(*, answers: bool) -> Iterator[None]:
    """Run code for "cuda" on the CPU during the block, if no GPU is visible."""
    if torch.cuda.is_available():
        yield
        return
    _state.answers = answers
    patches = (
        _of_tensors(),
        replaced_functions(_device),
        _of_meshes(),
        _of_amp(),
        _of_gpus_alone(),
        _of_cuda(),
    )
    with patched(*chain.from_iterable(patches)):
        yield


def is_cuda_used() -> bool:
    """Return whether a test has used cuda for a tensor or a mesh, although no GPU is visible."""
    return SimulatedTensors.has_cuda


def _current() -> torch.device:
    return torch.device("cuda", _state.index)


def _device(value: Any) -> Any:
    """Convert an index or string to a device, and give cuda an index; return other values as is."""
    # CPU-only builds of torch reject a bare index, and "cuda" without an index, before they
    # dispatch any operation, so convert both here.
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    if isinstance(value, str):
        value = torch.device(value)
    is_bare = isinstance(value, torch.device) and value.type == "cuda" and value.index is None
    return _current() if is_bare else value


def _moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run ``Tensor.to`` on the CPU, and mark the result with the requested device."""
    other = kwargs.pop("other", args[0] if args else None)
    if isinstance(other, torch.Tensor):
        args = (mark_of(other) or other.device, other.dtype, *args[1:])
    device = _device(args[0] if args else kwargs.get("device"))
    if not isinstance(device, torch.device):
        return _TO(tensor, *args, **kwargs)
    is_to_cuda = device.type == "cuda"
    # Copy only if the device changes, because copying a partial DTensor communicates. To torch
    # itself, all tensors are on the CPU, so do not copy when torch moves a tensor there.
    frame, movers = sys._getframe(1), {__file__, nn.modules.module.__file__}
    if is_to_cuda != (mark_of(tensor) is not None) and (
        is_to_cuda or is_outside_torch(frame) or frame.f_code.co_filename in movers
    ):
        kwargs["copy"] = True
    device, mark_as = (CPU, device) if is_to_cuda else (device, None)
    result = _TO(tensor, device, *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})
    if mark_as is not None:
        mark(result, mark_as)
    return result


def _of_tensors() -> Iterator[tuple[Any, str, Any]]:
    parse = torch._C._nn._parse_to

    def cuda(tensor: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        non_blocking = dict(zip(("non_blocking",), args, strict=False))
        return _moved(tensor, _current() if device is None else device, **non_blocking, **kwargs)

    def cpu(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return _moved(tensor, CPU, **kwargs)

    def parsed(*args: Any, **kwargs: Any) -> Any:
        return parse(*map(_device, args), **{name: _device(arg) for name, arg in kwargs.items()})

    def device_read_by(original: Callable[[torch.Tensor], torch.device]) -> property:
        def read(tensor: torch.Tensor) -> torch.device:
            frame = sys._getframe(1)
            sees_mark = is_outside_torch(frame) or frame.f_code.co_filename == batchnorm.__file__
            return _device(mark_of(tensor) if sees_mark else None) or original(tensor)

        return property(read)

    def is_cuda(tensor: torch.Tensor) -> bool:
        return is_outside_torch(sys._getframe(1)) and mark_of(tensor) is not None

    def get_device(tensor: torch.Tensor) -> int:
        device = mark_of(tensor)
        return -1 if device is None else _device(device).index

    cls = torch.Tensor
    yield cls, "to", _moved
    yield cls, "get_device", _to_users(get_device, cls.get_device)
    yield cls, "cuda", cuda
    yield cls, "cpu", cpu
    yield cls, "pin_memory", lambda tensor, *_, **__: tensor
    yield cls, "record_stream", lambda *_: None
    yield cls, "is_cuda", property(is_cuda)
    yield FakeTensor, "device", device_read_by(vars(FakeTensor)["device"].fget)
    yield DTensor, "device", device_read_by(cls.device.__get__)
    yield torch._C._nn, "_parse_to", parsed


def _of_meshes() -> Iterator[tuple[Any, str, Any]]:
    make = DeviceMesh.__init__

    @functools.wraps(make)
    def init(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        _state.has_mesh |= device_type == "cuda"
        SimulatedTensors.has_cuda |= device_type == "cuda"
        make(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    # `device_type` is a property since torch 2.10, and an attribute in earlier versions.
    def read(mesh: DeviceMesh) -> str:
        is_read_by_user = _state.has_mesh and is_outside_torch(sys._getframe(1))
        device_type = vars(mesh).get("device_type") or mesh._device_type
        return "cuda" if is_read_by_user and device_type == "cpu" else device_type

    def move_and_mark(move: Any, parameters: Any, buffers: Any, *args: Any) -> None:
        move(parameters, buffers, *args)
        for tensor in (*parameters, *buffers) if _state.has_mesh else ():
            mark(tensor, _current())

    yield DeviceMesh, "__init__", init
    yield (
        DeviceMesh,
        "device_type",
        property(read, lambda mesh, value: vars(mesh).update(device_type=value)),
    )
    for module in (_fsdp_init, _fully_shard):
        move = getattr(module, "_move_states_to_device", None)
        if move is not None:
            yield module, "_move_states_to_device", functools.partial(move_and_mark, move)


def _of_gpus_alone() -> Iterator[tuple[Any, str, Any]]:
    """Make modules and optimizers that need a GPU accept the CPU."""

    def capturable(original: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
        return [*original(*args, **kwargs), *(["cpu"] if is_cuda_used() else [])]

    for name, module in sys.modules.items():
        original = vars(module).get(_CAPTURABLE) if name.startswith("torch.optim.") else None
        if original is not None:
            yield module, _CAPTURABLE, functools.partial(capturable, original)
    yield batchnorm, "sync_batch_norm", _SyncBatchNorm


class _SyncBatchNorm(torch.autograd.Function):
    """Communicates like torch's class, but without GPU kernels (checked in torch 2.7 to 2.15)."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, weight: torch.Tensor | None, *args: Any) -> Any:
        *_, group, size = args
        ctx.group = group
        ctx.save_for_backward(batch, weight)
        # Each rank sends the mean and inverse standard deviation of each channel, and a count.
        statistics = _sums(batch, 2 * batch.shape[1] + 1)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # since 2.13
        gather(statistics.new_empty(size * len(statistics)), statistics, group)
        return torch.empty_like(batch)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        batch, weight = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            dist.all_reduce(_sums(batch, 2 * batch.shape[1]), group=ctx.group)
        inputs = (batch, weight, weight)
        gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in inputs]
        return (*gradients, *[None] * 6)


def _sums(batch: torch.Tensor, size: int) -> torch.Tensor:
    is_half = batch.numel() and batch.dtype in {torch.float16, torch.bfloat16}
    return batch.new_empty(size, dtype=torch.float32 if is_half else batch.dtype)


def _of_amp() -> Iterator[tuple[Any, str, Any]]:
    cast_, scale = torch.autocast.__init__, GradScaler.__init__

    def autocast(
        block: Any, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any
    ) -> None:
        if device_type.partition(":")[0] == "cuda":
            device_type, dtype = "cpu", dtype or autocast_dtype("cuda")
            # Record an assumption, because autocast keeps different operations in float32 on the
            # CPU than on a GPU.
            if enabled:
                _state.answer("cpu", "torch.autocast")
        cast_(block, device_type, dtype, enabled, **kwargs)

    def init_scaler(scaler: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scale(scaler, "cpu" if device == "cuda" else device, *args, **kwargs)

    autocast_dtype = torch.get_autocast_dtype
    yield torch.autocast, "__init__", autocast
    yield GradScaler, "__init__", init_scaler
    for name in (
        "is_autocast_enabled",
        "set_autocast_enabled",
        "get_autocast_dtype",
        "set_autocast_dtype",
    ):
        yield torch, name, functools.partial(_of_cpu, getattr(torch, name))


def _of_cpu(function: Callable[..., Any], device: Any = "cuda", *args: Any) -> Any:
    return function("cpu" if device == "cuda" else device, *args)


def _of_cuda() -> Iterator[tuple[Any, str, Any]]:
    def answer(value: Any, name: str) -> Callable[..., Any]:
        return lambda *_, **__: _state.answer(value, f"torch.cuda.{name}")

    def set_device(device: Any) -> None:
        _state.index = _device(device).index

    def module_of(device: Any = None) -> Any:
        return torch.cuda if device is None else get_module(device)

    cuda, nbytes, get_module = torch.cuda, _H100.total_memory, torch.get_device_module
    replacements: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(_NOTHING, lambda *_, **__: None),
        **{name: answer(0, name) for name in _ZERO},
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "can_device_access_peer": lambda *_: True,
        "is_current_stream_capturing": lambda: False,
        **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), lambda *_, **__: True),
        # `torch.accelerator` has the same functions under names with a suffix.
        **{f"current_device{end}": lambda: _state.index for end in ("", "_index", "_idx")},
        **{f"set_device{end}": set_device for end in ("", "_index", "_idx")},
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        # Simulate one GPU for each rank that a launcher would start on this host.
        "device_count": lambda: int(os.environ["LOCAL_WORLD_SIZE"]),
        "get_device_capability": answer((_H100.major, _H100.minor), "get_device_capability"),
        "get_device_name": answer(_H100.name, "get_device_name"),
        "get_device_properties": answer(_H100, "get_device_properties"),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": torch.initial_seed,
        **{name: answer((nbytes, nbytes), name) for name in ("mem_get_info", "get_memory_info")},
        **{name: answer(defaultdict(int), name) for name in ("memory_stats", "host_memory_stats")},
        "memory_summary": answer("0", "memory_summary"),
        "memory_snapshot": answer([], "memory_snapshot"),
        **dict.fromkeys(("is_built", "is_nccl_available"), lambda: True),
    }
    modules = (cuda, cuda.memory, cuda.profiler, torch.accelerator, dist, torch.backends.cuda)
    for module, name, function in _present(modules, replacements):
        # Replace RNG functions for all callers, because torch's `fork_rng` also calls them.
        is_for_all = "rng_state" in name
        yield module, name, function if is_for_all else _to_users(function, getattr(module, name))
    yield from _present((cuda, torch.accelerator), dict.fromkeys(_IDLE, _Idle))
    for module, version in ((cuda.nccl, (2, 28, 9)), (cudnn, 91002)):
        yield module, "version", _to_users(answer(version, "version"), module.version)
    yield cudnn, "is_available", _to_users(lambda: True, cudnn.is_available)
    yield torch.version, "cuda", torch.version.cuda or _CUDA_VERSION
    yield torch, "get_device_module", _to_users(module_of, get_module)
    for name in ("range_push", "range_pop", "mark"):
        yield cuda.nvtx, name, lambda *_: None
    for name, cls in (("Stream", _Idle), ("Event", _Idle), ("Generator", _Generator)):
        yield torch, name, cls


def _present(modules: Iterable[Any], named: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    for module, (name, value) in product(modules, named.items()):
        if hasattr(module, name):
            yield module, name, value


def _to_users(answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `original` if torch calls it, and `answer` if other code does."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (answer if is_outside_torch(sys._getframe(1)) else original)(*args, **kwargs)

    return call
