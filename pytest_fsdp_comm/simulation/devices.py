"""Code that says "cuda", where no GPU is visible: answered as cuda, executed on the CPU."""

# Note [Cuda without CUDA]
# What is to be on cuda reaches `values.SimulatedTensors`, which has the CPU do it and marks the
# memory that it fills; what an operation makes of marked memory is marked. Users' code reads cuda
# of marked tensors, and what `torch.cuda` says of a GPU; torch's own code reads the truth, so that
# it sends what it sends on the CPU. Patched are only what refuses before any operation runs, and
# what is read back. Read in torch 2.7, 2.13 and 2.15.

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
from pytest_fsdp_comm.simulation.values import (
    CPU,
    SimulatedTensors,
    mark,
    mark_of,
)

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
"""Functions that change nothing that a simulated rank has."""
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
_CAPTURABLE: Final = "_get_capturable_supported_devices"  # read in torch 2.7 to 2.15
_GENERATOR: Final = torch.Generator


class _Idle:
    """A stream, an event, or a block that selects a stream or a device: nothing waits."""

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
        """A number of milliseconds that nobody knows."""
        return cast("float", _state.answer(1.0, "elapsed_time"))

    def record(self, *_: Any) -> None:
        """Nothing runs."""

    synchronize = wait = wait_event = wait_stream = record


class _AnyGenerator(type):
    def __instancecheck__(cls, own: object) -> bool:
        return isinstance(own, _GENERATOR)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        device = _place(device)
        return _GENERATOR(CPU if device.type == "cuda" else device)


class _Generator(metaclass=_AnyGenerator):
    """In place of ``torch.Generator``, which looks for the GPU."""


class _State:
    """What code of this process has said of devices."""

    answers = True
    index = 0
    has_mesh = False

    def answer(self, value: Any, how: str) -> Any:
        if not self.answers:
            raise SimulationError(
                f"{find_call_site()} asks for {how}, which a simulated rank has no GPU to know: "
                "let a number of the configuration decide in its place, or use simulate=True"
            )
        shown = "H100" if value is _H100 else value or 0
        note_answer(str(shown).replace(" ", ""), how, of_process=True)
        return value


_state = _State()


@contextlib.contextmanager
def cuda_on_cpu(*, answers: bool) -> Iterator[None]:
    """Have code that says "cuda" run on the CPU; nothing changes where a GPU is visible."""
    if torch.cuda.is_available():
        yield
        return
    _state.answers = answers
    own = (
        _of_tensors(),
        replaced_functions(_place),
        _of_meshes(),
        _of_amp(),
        _of_gpus_alone(),
        _of_cuda(),
    )
    with patched(*chain.from_iterable(own)):
        yield


def is_cuda_used() -> bool:
    """Whether a test has put something on cuda, where no GPU is visible, or made a mesh of it."""
    return SimulatedTensors.has_cuda


def _current() -> torch.device:
    return torch.device("cuda", _state.index)


def _place(given: Any) -> Any:
    """A device with its number, where one is given as torch takes it; anything else as it is."""
    # Without a number, or as a number alone, a CPU build refuses it before any operation runs.
    if isinstance(given, int) and not isinstance(given, bool):
        return torch.device("cuda", given)
    if isinstance(given, str):
        given = torch.device(given)
    is_bare = isinstance(given, torch.device) and given.type == "cuda" and given.index is None
    return _current() if is_bare else given


def _moved(own: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As ``Tensor.to``: on the CPU, and marked by where it is to be."""
    other = kwargs.pop("other", args[0] if args else None)
    if isinstance(other, torch.Tensor):
        args = (mark_of(other) or other.device, other.dtype, *args[1:])
    place = _place(args[0] if args else kwargs.get("device"))
    if not isinstance(place, torch.device):
        return _TO(own, *args, **kwargs)
    is_to_cuda = place.type == "cuda"
    # A tensor that stays where it is stays itself: to copy a partial one, DTensor would send it.
    frame, movers = sys._getframe(1), {__file__, nn.modules.module.__file__}
    # To the CPU, torch's own code takes it for where it is already.
    if is_to_cuda != (mark_of(own) is not None) and (
        is_to_cuda or is_outside_torch(frame) or frame.f_code.co_filename in movers
    ):
        kwargs["copy"] = True
    place, mark_as = (CPU, place) if is_to_cuda else (place, None)
    result = _TO(own, place, *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})
    if mark_as is not None:
        mark(result, mark_as)
    return result


def _of_tensors() -> Iterator[tuple[Any, str, Any]]:
    parse = torch._C._nn._parse_to

    def cuda(own: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        non_blocking = dict(zip(("non_blocking",), args, strict=False))
        return _moved(own, _current() if device is None else device, **non_blocking, **kwargs)

    def cpu(own: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return _moved(own, CPU, **kwargs)

    def parsed(*args: Any, **kwargs: Any) -> Any:
        return parse(*map(_place, args), **{name: _place(own) for name, own in kwargs.items()})

    def device_read_by(true: Callable[[torch.Tensor], torch.device]) -> property:
        def read(own: torch.Tensor) -> torch.device:
            frame = sys._getframe(1)
            is_asked = is_outside_torch(frame) or frame.f_code.co_filename == batchnorm.__file__
            return _place(mark_of(own) if is_asked else None) or true(own)

        return property(read)

    def is_cuda(own: torch.Tensor) -> bool:
        return is_outside_torch(sys._getframe(1)) and mark_of(own) is not None

    def get_device(own: torch.Tensor) -> int:
        place = mark_of(own)
        return -1 if place is None else _place(place).index

    tensor = torch.Tensor
    yield tensor, "to", _moved
    yield tensor, "get_device", _to_users(get_device, tensor.get_device)
    yield tensor, "cuda", cuda
    yield tensor, "cpu", cpu
    yield tensor, "pin_memory", lambda own, *_, **__: own
    yield tensor, "record_stream", lambda *_: None
    yield tensor, "is_cuda", property(is_cuda)
    yield FakeTensor, "device", device_read_by(vars(FakeTensor)["device"].fget)
    yield DTensor, "device", device_read_by(tensor.device.__get__)
    yield torch._C._nn, "_parse_to", parsed


def _of_meshes() -> Iterator[tuple[Any, str, Any]]:
    make = DeviceMesh.__init__

    @functools.wraps(make)
    def made(own: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        _state.has_mesh |= device_type == "cuda"
        SimulatedTensors.has_cuda |= device_type == "cuda"
        make(own, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    # An attribute before torch 2.10, a property of `_device_type` since.
    def read(own: DeviceMesh) -> str:
        is_asked = _state.has_mesh and is_outside_torch(sys._getframe(1))
        found = vars(own).get("device_type") or own._device_type
        return "cuda" if is_asked and found == "cpu" else found

    def move_and_mark(move: Any, parameters: Any, buffers: Any, *args: Any) -> None:
        move(parameters, buffers, *args)
        for own in (*parameters, *buffers) if _state.has_mesh else ():
            mark(own, _current())

    yield DeviceMesh, "__init__", made
    yield (
        DeviceMesh,
        "device_type",
        property(read, lambda own, value: vars(own).update(device_type=value)),
    )
    for module in (_fsdp_init, _fully_shard):
        move = getattr(module, "_move_states_to_device", None)
        if move is not None:
            yield module, "_move_states_to_device", functools.partial(move_and_mark, move)


def _of_gpus_alone() -> Iterator[tuple[Any, str, Any]]:
    """Modules and optimizers that refuse the CPU."""

    def capturable(true: Callable[..., list[str]], *args: Any, **kwargs: Any) -> list[str]:
        return [*true(*args, **kwargs), *(["cpu"] if is_cuda_used() else [])]

    for name, module in sys.modules.items():
        true = vars(module).get(_CAPTURABLE) if name.startswith("torch.optim.") else None
        if true is not None:
            yield module, _CAPTURABLE, functools.partial(capturable, true)
    yield batchnorm, "sync_batch_norm", _SyncBatchNorm


class _SyncBatchNorm(torch.autograd.Function):
    """Sends what torch's does, whose kernels are a GPU's alone (read in torch 2.7 to 2.15)."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, weight: torch.Tensor | None, *how: Any) -> Any:
        *_, group, size = how
        ctx.group = group
        ctx.save_for_backward(own, weight)
        # The mean and the deviation of each channel, and a count.
        sent = _sums(own, 2 * own.shape[1] + 1)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13
        gather(sent.new_empty(size * len(sent)), sent, group)
        return torch.empty_like(own)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        own, weight = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            dist.all_reduce(_sums(own, 2 * own.shape[1]), group=ctx.group)
        made = [None if each is None else torch.empty_like(each) for each in (own, weight, weight)]
        return (*made, *[None] * 6)


def _sums(own: torch.Tensor, size: int) -> torch.Tensor:
    is_half = own.numel() and own.dtype in {torch.float16, torch.bfloat16}
    return own.new_empty(size, dtype=torch.float32 if is_half else own.dtype)


def _of_amp() -> Iterator[tuple[Any, str, Any]]:
    cast_, scale = torch.autocast.__init__, GradScaler.__init__

    def autocast(
        own: Any, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any
    ) -> None:
        if device_type.partition(":")[0] == "cuda":
            device_type, dtype = "cpu", dtype or autocast_dtype("cuda")
            # Of what runs in float32 all the same, it knows less than that of cuda.
            if enabled:
                _state.answer("cpu", "torch.autocast")
        cast_(own, device_type, dtype, enabled, **kwargs)

    def scaler(own: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scale(own, "cpu" if device == "cuda" else device, *args, **kwargs)

    autocast_dtype = torch.get_autocast_dtype
    yield torch.autocast, "__init__", autocast
    yield GradScaler, "__init__", scaler
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
    def told(value: Any, how: str) -> Callable[..., Any]:
        return lambda *_, **__: _state.answer(value, f"torch.cuda.{how}")

    def set_device(device: Any) -> None:
        _state.index = _place(device).index

    def module_of(device: Any = None) -> Any:
        return torch.cuda if device is None else true_module_of(device)

    cuda, nbytes, true_module_of = torch.cuda, _H100.total_memory, torch.get_device_module
    found: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(_NOTHING, lambda *_, **__: None),
        **{name: told(0, name) for name in _ZERO},
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        "can_device_access_peer": lambda *_: True,
        "is_current_stream_capturing": lambda: False,
        **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), lambda *_, **__: True),
        # In `torch.accelerator` the names have an ending.
        **{f"current_device{end}": lambda: _state.index for end in ("", "_index", "_idx")},
        **{f"set_device{end}": set_device for end in ("", "_index", "_idx")},
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        # As many as the launcher starts ranks on a host.
        "device_count": lambda: int(os.environ["LOCAL_WORLD_SIZE"]),
        "get_device_capability": told((_H100.major, _H100.minor), "get_device_capability"),
        "get_device_name": told(_H100.name, "get_device_name"),
        "get_device_properties": told(_H100, "get_device_properties"),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": torch.initial_seed,
        **{name: told((nbytes, nbytes), name) for name in ("mem_get_info", "get_memory_info")},
        **{name: told(defaultdict(int), name) for name in ("memory_stats", "host_memory_stats")},
        "memory_summary": told("0", "memory_summary"),
        "memory_snapshot": told([], "memory_snapshot"),
        **dict.fromkeys(("is_built", "is_nccl_available"), lambda: True),
    }
    places = (cuda, cuda.memory, cuda.profiler, torch.accelerator, dist, torch.backends.cuda)
    for module, name, own in _present(places, found):
        # `fork_rng`, too, asks for the states of devices that it is given.
        is_open = "rng_state" in name
        yield module, name, own if is_open else _to_users(own, getattr(module, name))
    yield from _present((cuda, torch.accelerator), dict.fromkeys(_IDLE, _Idle))
    for module, version in ((cuda.nccl, (2, 28, 9)), (cudnn, 91002)):
        yield module, "version", _to_users(told(version, "version"), module.version)
    yield cudnn, "is_available", _to_users(lambda: True, cudnn.is_available)
    yield torch.version, "cuda", torch.version.cuda or _CUDA_VERSION
    yield torch, "get_device_module", _to_users(module_of, true_module_of)
    for name in ("range_push", "range_pop", "mark"):
        yield cuda.nvtx, name, lambda *_: None
    for name, own in (("Stream", _Idle), ("Event", _Idle), ("Generator", _Generator)):
        yield torch, name, own


def _present(places: Iterable[Any], named: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    for module, (name, own) in product(places, named.items()):
        if hasattr(module, name):
            yield module, name, own


def _to_users(answer: Callable[..., Any], true: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(true)
    def ask(*args: Any, **kwargs: Any) -> Any:
        return (answer if is_outside_torch(sys._getframe(1)) else true)(*args, **kwargs)

    return ask
