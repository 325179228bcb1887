"""Runs code for "cuda" on the CPU, as if there were a GPU, when no GPU is visible."""

# Note [Cuda without CUDA]
# `values.SimulatedTensors` runs operations for cuda on the CPU and marks the storages of their
# results with the cuda device. Operations on marked tensors return marked tensors. To user code,
# marked tensors are on cuda, and `torch.cuda` has an H100. To torch itself, all tensors are on the
# CPU, so it communicates exactly as it does on the CPU. This module only has to patch calls that
# fail before any operation is dispatched, attributes that user code reads, and calls that
# communicate differently on a GPU.

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, product
from types import FrameType, SimpleNamespace
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.autograd import graph
from torch.backends import cudnn
from torch.distributed import utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.tensor import DTensor, placement_types
from torch.nn.modules import batchnorm
from torch.nn.parallel import distributed

from pytest_fsdp_comm.recording.frames import (
    find_author,
    find_call_site,
    is_outside_torch,
    torch_path_prefix,
)
from pytest_fsdp_comm.recording.patches import Replacement, patch_attributes, wrap_attribute
from pytest_fsdp_comm.recording.value_dependence import add_assumption
from pytest_fsdp_comm.simulation.gpu_functions import gpu_function_patches
from pytest_fsdp_comm.simulation.memory import SimulationError
from pytest_fsdp_comm.simulation.streams import SimulatedEvent, stream_patches, wait_on_host
from pytest_fsdp_comm.simulation.values import (
    CPU,
    SimulatedTensors,
    mark_with_device,
    marked_device,
    remove_device_mark,
)
from pytest_fsdp_comm.upstream import look_up, moved_error

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
    *("empty_cache", "init", "ipc_collect", "set_sync_debug_mode"),
    *("_record_memory_history", "_dump_snapshot", "start", "stop"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
)
"""Functions of torch.cuda that do nothing on a simulated rank."""
_ZERO: Final = (
    *("memory_allocated", "memory_reserved", "memory_cached"),
    *("max_memory_allocated", "max_memory_reserved", "max_memory_cached"),
    *("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"),
)
_IDLE: Final = ("device", "device_of", "device_index")
_SEE_GPU: Final = frozenset(
    {batchnorm.__file__, distributed.__file__, utils.__file__, graph.__file__}
)
"""Files of torch that need a GPU for batch norms, for the `device_ids` of DDP, or to copy saved
tensors back to it."""
_MOVERS: Final = frozenset({nn.modules.module.__file__, graph.__file__})
"""Files of torch that move modules, or saved tensors, between devices for the user."""
_TO: Final = torch.Tensor.to
_OFFLOADS: Final = f"{torch_path_prefix()}distributed/fsdp/_fully_shard/_fsdp_collectives.py"
"""Where FSDP2 copies gradients to the host, and no other tensors (torch 2.7 to 2.15)."""
_CAPTURABLE: Final = "_get_capturable_supported_devices"  # checked in torch 2.7 to 2.15
_MOVE: Final = "_move_states_to_device"  # in one of two modules, depending on the version
_CHECK_STATES: Final = "_check_module_states_for_sync_module_states"  # checked in torch 2.13
_INDEX: Final = "_get_device_index"
_USE: Final = "a simulation relies on"
_GENERATOR: Final = torch.Generator


class _Idle(contextlib.nullcontext[object]):
    """Replaces context managers that select a GPU."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(self)
        self.device = _make_current_device()


class _Event(SimulatedEvent):
    def elapsed_time(self, _: SimulatedEvent) -> float:
        return cast("float", _state.assume(1.0, "elapsed_time"))


class _AnyGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _GENERATOR)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        device = _convert_to_device(device)
        return _GENERATOR(CPU if device.type == "cuda" else device)


class _Generator(metaclass=_AnyGenerator):
    """Replaces ``torch.Generator``, whose constructor looks for a GPU if the device is cuda."""


class _State:
    """Whether reads of GPU properties return assumed values, and which devices the test uses."""

    assumes = True
    index = 0
    has_mesh = False

    def assume(self, value: object, how: str) -> Any:
        """Record `value` as an assumption, and return it; raise if nothing may be assumed."""
        if not self.assumes:
            raise SimulationError(
                f"{find_call_site()} reads {how}, but a simulated rank has no GPU: use a value "
                "from your configuration instead, or simulate=True, which assumes a value"
            )
        text = "H100" if value is _H100 else value or 0
        add_assumption(str(text).replace(" ", ""), how, of_process=True)
        return value


_state = _State()


@contextlib.contextmanager
def simulate_cuda(*, assumes: bool) -> Iterator[None]:
    """Run code for "cuda" on the CPU during the block, if no GPU is visible."""
    if torch.cuda.is_available():
        with patch_attributes(*_stream_patches()):
            yield
        return
    _state.assumes, _state.index, _state.has_mesh = assumes, 0, False
    patches = (
        _tensor_patches(),
        gpu_function_patches(_convert_to_device),
        _mesh_patches(),
        _amp_patches(),
        _gpu_only_patches(),
        _fsdp1_patches(),
        _cuda_patches(),
    )
    with patch_attributes(*chain.from_iterable(patches)):
        yield


def is_cuda_used() -> bool:
    """Return whether a test has used cuda for a tensor or a mesh, although no GPU is visible."""
    return SimulatedTensors.has_cuda


def _can_see_gpu(frame: FrameType) -> bool:
    """Return whether a frame's code must see the simulated GPU, as all code outside torch does."""
    return is_outside_torch(frame) or frame.f_code.co_filename in _SEE_GPU


def _make_current_device() -> torch.device:
    return torch.device("cuda", _state.index)


def _count_gpus() -> int:
    """Return the number of simulated GPUs: one for each rank that a launcher starts on a host."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def _convert_to_device(value: object) -> Any:
    """Convert an index or string to a device, and give cuda an index; return other values as is."""
    # CPU-only builds of torch reject a bare index, and "cuda" without an index, before they
    # dispatch any operation, so convert both here.
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    if isinstance(value, str):
        value = torch.device(value)
    is_bare = isinstance(value, torch.device) and value.type == "cuda" and value.index is None
    return _make_current_device() if is_bare else value


def _simulated_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run ``Tensor.to`` on the CPU, and mark the result with the requested device."""
    # `other` is the argument of ``type_as``, which this replaces too, or of ``to(other)``.
    other = kwargs.pop("other", args[0] if args else None)
    if isinstance(other, torch.Tensor):
        args = (marked_device(other) or other.device, other.dtype, *args[1:])
    device = _convert_to_device(args[0] if args else kwargs.get("device"))
    if not isinstance(device, torch.device):
        return _TO(tensor, *args, **kwargs)
    is_to_cuda, is_on_cuda = device.type == "cuda", marked_device(tensor) is not None
    is_blocking = not (kwargs.get("non_blocking") or True in args[2:3])
    mover = sys._getframe(1).f_code.co_filename
    is_by_torch = find_author(mover) == "torch" and mover not in _MOVERS
    # Copy only if the device changes, because copying a partial DTensor communicates. To torch
    # itself, all tensors are on the CPU, so do not copy when torch moves a tensor there.
    is_moved = is_to_cuda != is_on_cuda and (is_to_cuda or not is_by_torch)
    if is_moved:
        kwargs["copy"] = True
        # Inside an operation that torch decomposes, tensors have no marks, so nothing is copied.
        if is_blocking and not is_by_torch:
            wait_on_host("copy_to_device" if is_to_cuda else "copy_to_host")
    elif is_blocking and not is_to_cuda and mover == _OFFLOADS:
        wait_on_host("copy_to_host")
    device, mark_as = (CPU, device) if is_to_cuda else (device, None)
    result = _TO(tensor, device, *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})
    if mark_as is not None:
        mark_with_device(result, mark_as)
    elif is_moved:
        remove_device_mark(getattr(result, "_local_tensor", result))
    return result


def _tensor_patches() -> Iterator[Replacement]:
    parse = torch._C._nn._parse_to

    def cuda(
        tensor: torch.Tensor, device: object = None, *args: object, **kwargs: object
    ) -> torch.Tensor:
        non_blocking = dict(zip(("non_blocking",), args, strict=False))
        return _simulated_to(
            tensor, _make_current_device() if device is None else device, **non_blocking, **kwargs
        )

    def cpu(tensor: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return _simulated_to(tensor, CPU, **kwargs)

    def simulated_parse_to(*args: object, **kwargs: object) -> object:
        return parse(
            *map(_convert_to_device, args),
            **{name: _convert_to_device(arg) for name, arg in kwargs.items()},
        )

    def device_read_by(original: Callable[[torch.Tensor], torch.device]) -> property:
        def read(tensor: torch.Tensor) -> torch.device:
            device = marked_device(tensor) if _can_see_gpu(sys._getframe(1)) else None
            return _convert_to_device(device) or original(tensor)

        return property(read)

    def new_tensor(tensor: torch.Tensor, data: object, **options: Any) -> torch.Tensor:
        result = make(tensor, data, **options)
        if "device" in options:
            return result
        return _simulated_to(result, marked_device(tensor) or CPU)

    def is_cuda(tensor: torch.Tensor) -> bool:
        return is_outside_torch(sys._getframe(1)) and marked_device(tensor) is not None

    def get_device(tensor: torch.Tensor) -> int:
        device = marked_device(tensor)
        return -1 if device is None else _convert_to_device(device).index

    cls, make = torch.Tensor, torch.Tensor.new_tensor
    original = look_up("torch._subclasses.fake_tensor", "FakeTensor.device.fget", _USE)
    yield cls, "to", _simulated_to
    yield _patch_outside_torch(cls, "get_device", get_device)
    yield cls, "cuda", cuda
    yield cls, "cpu", cpu
    yield cls, "type_as", _simulated_to
    yield cls, "new_tensor", new_tensor
    yield cls, "pin_memory", lambda tensor, *_, **__: tensor
    yield cls, "is_cuda", property(is_cuda)
    yield FakeTensor, "device", device_read_by(original)
    yield DTensor, "device", device_read_by(cls.device.__get__)
    yield torch._C._nn, "_parse_to", simulated_parse_to


def _mesh_patches() -> Iterator[Replacement]:
    def init(
        make: Callable[..., None], mesh: DeviceMesh, /, device_type: str, *args: Any, **kwargs: Any
    ) -> None:
        _state.has_mesh |= device_type == "cuda"
        SimulatedTensors.has_cuda |= device_type == "cuda"
        make(mesh, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    # `device_type` is a property since torch 2.10, and an attribute in earlier versions.
    def read(mesh: DeviceMesh) -> str:
        is_read_by_user = _state.has_mesh and is_outside_torch(sys._getframe(1))
        device_type = vars(mesh).get("device_type") or mesh._device_type
        return "cuda" if is_read_by_user and device_type == "cpu" else device_type

    def write(mesh: DeviceMesh, device_type: str) -> None:
        vars(mesh).update(device_type=device_type)

    def move_and_mark(move: Any, parameters: Any, buffers: Any, *args: object) -> None:
        move(parameters, buffers, *args)
        for tensor in (*parameters, *buffers) if _state.has_mesh else ():
            mark_with_device(tensor, _make_current_device())

    def exchange_shards(  # noqa: PLR0913, PLR0917  # torch's signature
        original: Callable[..., torch.Tensor],
        tensor: torch.Tensor,
        gather_dim: int,
        shard_dim: int,
        mesh: DeviceMesh,
        mesh_dim: int,
    ) -> Any:
        # On a CPU mesh, torch gathers all shards instead (checked in torch 2.7 to 2.15).
        if marked_device(tensor) is None and not _state.has_mesh:
            return original(tensor, gather_dim, shard_dim, mesh, mesh_dim)
        exchange = torch.ops._dtensor.shard_dim_alltoall
        return exchange(tensor, gather_dim, shard_dim, mesh.get_group(mesh_dim).group_name)

    yield wrap_attribute(DeviceMesh, "__init__", init)
    yield DeviceMesh, "device_type", property(read, write)
    yield wrap_attribute(placement_types, "shard_dim_alltoall", exchange_shards)
    modules = [module for module in (_fsdp_init, _fully_shard) if hasattr(module, _MOVE)]
    if not modules:
        raise moved_error("torch", f"{_fsdp_init.__name__}.{_MOVE}", _USE)
    for module in modules:
        yield wrap_attribute(module, _MOVE, move_and_mark)


def _fsdp1_patches() -> Iterator[Replacement]:
    """Make FSDP1 use the CPU, and mark the parameters with the device that they would be on."""
    signature = inspect.signature(FullyShardedDataParallel.__init__)

    def init(
        wrap: Callable[..., None], wrapper: nn.Module, /, *args: object, **kwargs: object
    ) -> None:
        call = signature.bind(wrapper, *args, **kwargs)
        device, offload = (call.arguments.get(name) for name in ("device_id", "cpu_offload"))
        call.arguments["device_id"] = CPU
        marks = [
            _convert_to_device(device),
            *map(marked_device, call.arguments["module"].parameters()),
        ]
        is_offloaded = offload is not None and offload.offload_params
        device = next(filter(None, marks), None)
        if device is None or device.type != "cuda":
            wrap(*call.args, **call.kwargs)
            return
        # Without a mesh, hybrid sharding shards over the devices of a host.
        with patch_attributes((torch.cpu, "device_count", _count_gpus)):
            wrap(*call.args, **call.kwargs)
        if not is_offloaded:
            for tensor in (*wrapper.parameters(), *wrapper.buffers()):
                mark_with_device(tensor, device)

    yield wrap_attribute(FullyShardedDataParallel, "__init__", init)
    # FSDP1 cannot offload parameters or state dicts to the CPU if it computes there.
    handle = look_up("torch.distributed.fsdp._flat_param", "FlatParamHandle", _USE)
    yield handle, "to_cpu", lambda _: contextlib.nullcontext()
    # FSDP1 raises if the states that it broadcasts are on the CPU.
    look_up(_init_utils.__name__, _CHECK_STATES, _USE)
    yield _init_utils, _CHECK_STATES, lambda _: None


def _gpu_only_patches() -> Iterator[Replacement]:
    """Make modules and optimizers that need a GPU accept the CPU."""

    def capturable(original: Callable[..., list[str]], *args: object, **kwargs: Any) -> list[str]:
        return [*original(*args, **kwargs), *(["cpu"] if is_cuda_used() else [])]

    for name, module in sys.modules.items():
        if name.startswith("torch.optim.") and hasattr(module, _CAPTURABLE):
            yield wrap_attribute(module, _CAPTURABLE, capturable)
    yield batchnorm, "sync_batch_norm", _SyncBatchNorm
    index = look_up(distributed.__name__, _INDEX, _USE)
    # If `device_ids` have no index, DDP asks torch for the current GPU, and torch finds none.
    yield distributed, _INDEX, lambda device, *args: index(_convert_to_device(device), *args)


class _SyncBatchNorm(torch.autograd.Function):
    """Communicates like torch's class, but without GPU kernels (checked in torch 2.7 to 2.15)."""

    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, weight: torch.Tensor | None, *args: Any) -> object:
        *_, group, size = args
        ctx.group = group
        ctx.save_for_backward(batch, weight)
        # Each rank sends the mean and inverse standard deviation of each channel, and a count.
        statistics = _make_batch_norm_buffer(batch, 2 * batch.shape[1] + 1)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # since 2.13
        gather(statistics.new_empty(size * len(statistics)), statistics, group)
        return torch.empty_like(batch)

    @staticmethod
    def backward(ctx: Any, *_: object) -> object:
        batch, weight = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            dist.all_reduce(_make_batch_norm_buffer(batch, 2 * batch.shape[1]), group=ctx.group)
        inputs = (batch, weight, weight)
        gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in inputs]
        return (*gradients, *[None] * 6)


def _make_batch_norm_buffer(batch: torch.Tensor, size: int) -> torch.Tensor:
    is_half = batch.numel() and batch.dtype in {torch.float16, torch.bfloat16}
    return batch.new_empty(size, dtype=torch.float32 if is_half else batch.dtype)


def _amp_patches() -> Iterator[Replacement]:
    def init_autocast(
        init: Any, block: Any, device_type: str, dtype: Any = None, enabled: bool = True, **how: Any
    ) -> None:
        if device_type.partition(":")[0] == "cuda":
            device_type, dtype = "cpu", dtype or autocast_dtype("cuda")
            # Record an assumption, because autocast keeps different operations in float32 on the
            # CPU than on a GPU.
            if enabled:
                _state.assume("cpu", "torch.autocast")
        init(block, device_type, dtype, enabled, **how)

    def init_scaler(
        init: Any, scaler: Any, /, device: str = "cuda", *args: Any, **kwargs: Any
    ) -> None:
        init(scaler, "cpu" if device == "cuda" else device, *args, **kwargs)

    autocast_dtype = torch.get_autocast_dtype
    yield wrap_attribute(torch.autocast, "__init__", init_autocast)
    yield wrap_attribute(GradScaler, "__init__", init_scaler)
    for name in (
        *("is_autocast_enabled", "set_autocast_enabled"),
        *("get_autocast_dtype", "set_autocast_dtype"),
    ):
        yield wrap_attribute(torch, name, _call_for_cpu)


def _call_for_cpu(
    function: Callable[..., object], device: object = "cuda", *args: object
) -> object:
    return function("cpu" if device == "cuda" else device, *args)


def _cuda_patches() -> Iterator[Replacement]:
    def assume(value: object, name: str) -> Callable[..., object]:
        return lambda *_, **__: _state.assume(value, f"torch.cuda.{name}")

    def set_device(device: object) -> None:
        _state.index = _convert_to_device(device).index

    def module_of(device: object = None) -> object:
        return torch.cuda if device is None else get_module(device)

    cuda, nbytes, get_module = torch.cuda, _H100.total_memory, torch.get_device_module
    replacements: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(_NOTHING, lambda *_, **__: None),
        **{name: assume(0, name) for name in _ZERO},
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "can_device_access_peer": lambda *_: True,
        "is_current_stream_capturing": lambda: False,
        **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), lambda *_, **__: True),
        # `torch.accelerator` has the same functions under names with a suffix.
        **{f"current_device{end}": lambda: _state.index for end in ("", "_index", "_idx")},
        **{f"set_device{end}": set_device for end in ("", "_index", "_idx")},
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "device_count": _count_gpus,
        "get_device_capability": assume((_H100.major, _H100.minor), "get_device_capability"),
        "get_device_name": assume(_H100.name, "get_device_name"),
        "get_device_properties": assume(_H100, "get_device_properties"),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": torch.initial_seed,
        **{name: assume((nbytes, nbytes), name) for name in ("mem_get_info", "get_memory_info")},
        **{name: assume(defaultdict(int), name) for name in ("memory_stats", "host_memory_stats")},
        "memory_summary": assume("0", "memory_summary"),
        "memory_snapshot": assume([], "memory_snapshot"),
        "is_built": lambda: True,
    }
    yield _patch_outside_torch(dist, "is_nccl_available", lambda: True)
    modules = (cuda, cuda.memory, cuda.profiler, torch.accelerator, torch.backends.cuda)
    for module, name, function in _existing_name_patches(modules, replacements):
        # Replace RNG functions for all callers, because torch's `fork_rng` also calls them.
        if "rng_state" in name:
            yield module, name, function
        else:
            yield _patch_outside_torch(module, name, function)
    yield from _stream_patches()
    yield from _existing_name_patches((cuda, torch.accelerator), dict.fromkeys(_IDLE, _Idle))
    yield _patch_outside_torch(cuda.nccl, "version", assume((2, 28, 9), "nccl.version"))
    yield _patch_outside_torch(cudnn, "version", assume(91002, "cudnn.version"))
    yield _patch_outside_torch(cudnn, "is_available", lambda: True)
    yield torch.version, "cuda", torch.version.cuda or _CUDA_VERSION
    yield _patch_outside_torch(torch, "get_device_module", module_of)
    for name in ("range_push", "range_pop", "mark"):
        yield cuda.nvtx, name, lambda *_: None
    yield torch, "Generator", _Generator


def _stream_patches() -> Iterator[Replacement]:
    for module in (torch.cuda, torch.accelerator, torch):
        yield from stream_patches(module, _Event)
    yield torch.Tensor, "record_stream", lambda *_: None


def _existing_name_patches(
    modules: Iterable[object], named: Mapping[str, object]
) -> Iterator[tuple[object, str, Any]]:
    for module, (name, value) in product(modules, named.items()):
        if hasattr(module, name):
            yield module, name, value


def _patch_outside_torch(holder: object, name: str, function: Callable[..., object]) -> Replacement:
    """Replace a function for code outside torch; torch itself still calls the original."""

    def call(original: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        is_outside = _can_see_gpu(sys._getframe(2))  # the caller of the wrapper
        return (function if is_outside else original)(*args, **kwargs)

    return wrap_attribute(holder, name, call)
