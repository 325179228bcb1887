"""Patches torch while a rank is simulated."""

# Two kinds of tensors stay real, because torch reads their values: the rank numbers of a mesh, and
# the bytes of pickled objects. FSDP2 splits each parameter into chunks for all ranks, but uses only
# one chunk, so `LazyChunks` creates a chunk only when it is accessed. Checked in torch 2.7 to 2.15.

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import _meta_registrations, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.recording.frames import find_call_site, is_outside_torch
from pytest_fsdp_comm.recording.patches import patched
from pytest_fsdp_comm.recording.value_dependence import reporting_reads
from pytest_fsdp_comm.simulation.devices import cuda_on_cpu, is_cuda_used
from pytest_fsdp_comm.simulation.groups import RealGroups
from pytest_fsdp_comm.simulation.memory import SimulationError
from pytest_fsdp_comm.simulation.values import SimulatedTensors, is_own, values_of

_MESHES_OF = frozenset({"__getitem__", "_concatenate"})
_CHUNKS = "_chunk_with_empty"
_LEARN = "_propagate_tensor_meta_non_cached"  # checked in torch 2.13
_STRIDED = "_propagate_use_strided_shard_flag"  # checked in torch 2.13 and 2.15
_GROUPED = "_meta_grouped_mm_common"  # checked in torch 2.13 and 2.15
_GATHERS = {"all_gather_object", "gather_object"}
_OBJECTS = ("_object_to_tensor", "_tensor_to_object")  # checked in torch 2.13 and 2.15
_MAKE_GROUP = "_new_process_group_helper"  # checked in torch 2.7 to 2.15
_FAKE_OPTIONS = {"backend_options": None, "device_id": None}
_PIPELINES = "torch.distributed.pipelining."
_SENDS_BY_BACKEND = {"torch.distributed.nn.functional", "torch.distributed.distributed_c10d"}
"""torch modules that communicate differently for different backends."""
_COPY: Final[Callable[..., Any]] = torch.Tensor.__deepcopy__
_ADDRESS: Final[Callable[..., int]] = torch.UntypedStorage.data_ptr
_ADDRESSES: Final = 2**60
"""The first address for simulated storages; real addresses are lower."""
_NO_MEMORY: Final = "its data is not allocated yet"
"""Part of the error that c10's TensorImpl raises about missing memory (torch 2.7 to 2.15)."""
_PLACE: Final = "_fsdp_comm_address"
_addresses: Final = itertools.count(_ADDRESSES, 2**42)


@contextlib.contextmanager
def simulated(
    *, answers: bool, shares: tuple[float, ...] | None = None, groups: RealGroups | None = None
) -> Iterator[None]:
    """Simulate this rank during the block.

    Args:
        answers: If true, reading an unknown float returns 1.0, and reading an unknown boolean
            returns False; if false, both raise. Reading an unknown integer always raises.
        shares: Relative number of tokens that a router sends to each expert; empty if all experts
            get the same number, None to leave the router's choices unknown.
        groups: Exchanges values with peers along the axes of ``real=``; None without ``real=``.
    """
    _complete_collectives()
    tensors = _tensors(answers, shares)
    tensors.begin(groups)
    with (
        patched(*_attributes(tensors, groups)),
        reporting_reads(),
        cuda_on_cpu(answers=answers),
        # Do not compile: compiled code communicates like eager code, but would use fake tensors of
        # a different mode.
        torch.compiler.set_stance("force_eager"),
        tensors,
    ):
        yield


@functools.cache
def _complete_collectives() -> Any:
    """Register meta kernels for coalesced collectives that lack one (torch 2.7 to 2.15)."""
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for name in ("allreduce", "allgather", "allgather_into_tensor", "reduce_scatter_tensor"):
        func = getattr(torch.ops.c10d, f"{name}_coalesced_").default
        if not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
            library.impl(func, lambda *_, **__: FakeWork().boxed(), "Meta")
    return library  # cached: torch unregisters the kernels when the library is garbage-collected


def _attributes(
    tensors: SimulatedTensors, groups: RealGroups | None
) -> Iterator[tuple[Any, str, Any]]:
    mesh = device_mesh.DeviceMesh
    for name, attribute in vars(mesh).items():
        if name.startswith("__") and name not in {"__init__", "__getitem__"}:
            continue
        real = _real(attribute)
        if groups is not None and name == "__init__":
            real = _checked(real, groups)
        if real is not None:
            yield mesh, name, _made_once(real) if name in _MESHES_OF else real
    yield from _of_sharding()
    yield DistributedDataParallel, "__init__", _refuse_ddp
    for name in _OBJECTS:
        real = _on_real(getattr(distributed_c10d, name), tensors.simulate)
        yield distributed_c10d, name, _of_this_rank(real, groups)
    for module in (dist, distributed_c10d):
        yield module, "get_backend", _backend_of_real(dist.get_backend, groups)
    yield FakeWork, "is_completed", lambda _: True
    # torch draws an id for each `Work` from Python's `random`, which would change the test's random
    # numbers. Use consecutive numbers instead.
    if numbering := sys.modules.get("torch.distributed._meta_registrations"):  # not in torch 2.9
        yield numbering, "generate_unique_id", itertools.count(1).__next__
    yield distributed_c10d, _MAKE_GROUP, _made_fake(getattr(distributed_c10d, _MAKE_GROUP))
    timeout = distributed_c10d.default_pg_timeout
    yield distributed_c10d, "_get_default_timeout", lambda _: timeout
    # Disable TorchScript (as PYTORCH_JIT=0 does), because it cannot compile replaced functions.
    yield torch.jit._state._enabled, "enabled", False
    yield torch.utils, "swap_tensors", tensors.swap
    yield threading.Thread, "start", _in_modes(threading.Thread.start, tensors)
    with contextlib.suppress(ImportError):  # import it now, so that its loaders get patched
        importlib.import_module("torchdata.stateful_dataloader")
    for loader in (DataLoader, *_subclasses(DataLoader)):
        if "__iter__" in vars(loader):
            yield loader, "__iter__", _in_this_process(vars(loader)["__iter__"])
    yield from _of_memory(tensors)


def _of_sharding() -> Iterator[tuple[Any, str, Any]]:
    if hasattr(_fsdp_param, _CHUNKS):  # without it, simulations are just slower
        yield _fsdp_param, _CHUNKS, LazyChunks
    # DTensor runs operations on full-size fake tensors to find the shapes of results. Run them
    # outside the simulation, so that the fake tensors do not count as memory of this rank.
    learn = getattr(ShardingPropagator, _LEARN, None)
    if learn is not None:  # without it, memory estimates are just too large
        yield ShardingPropagator, _LEARN, _on_real(learn)
    if hasattr(_sharding_prop, _STRIDED):  # without it, simulations are just slower
        yield _sharding_prop, _STRIDED, _looked_for_once(getattr(_sharding_prop, _STRIDED))
    if hasattr(_meta_registrations, _GROUPED):
        yield _meta_registrations, _GROUPED, _of_any_dtype(getattr(_meta_registrations, _GROUPED))


def _of_memory(tensors: SimulatedTensors) -> Iterator[tuple[Any, str, Any]]:
    # Patch conversions of simulated tensors, because some make torch raise unhelpful errors, and
    # others make it read memory that does not exist (checked in torch 2.13).
    yield torch.Tensor, "__deepcopy__", _copied_as_it_is
    yield FakeTensor, "__deepcopy__", _copied
    yield FakeTensor, "__format__", _formatted
    yield FakeTensor, "__reduce_ex__", _refuse
    yield FakeTensor, "data_ptr", _data_ptr
    yield FakeTensor, "share_memory_", lambda tensor: tensor
    yield FakeTensor, "__dlpack__", _exported
    yield torch.utils.dlpack, "to_dlpack", _exported
    yield torch.UntypedStorage, "data_ptr", _address
    for name in ("__getitem__", "_write_file", "cpu"):
        yield torch.UntypedStorage, name, _reading(getattr(torch.UntypedStorage, name))
    for name in ("cast", "memmove", "memset", "string_at"):
        yield ctypes, name, _reading(getattr(ctypes, name))
    yield torch, "asarray", _of_storage(torch.asarray, tensors)
    yield FakeTensor, "numpy", _array
    yield FakeTensor, "tolist", lambda tensor: _array(tensor).tolist()
    # These functions read memory before they run any operation that the mode could intercept.
    for make in (torch.tensor, torch.as_tensor):
        yield torch, make.__name__, _joined(make)
    for place in (torch, torch.Tensor):
        yield place, "tensor_split", _split(place.tensor_split)


def of_user(error: FsdpCommError) -> FsdpCommError:
    """Remove torch's and this package's frames from the traceback of a SimulationError."""
    if not isinstance(error, SimulationError):
        return error
    at, outside = error.__traceback__, []
    while at is not None:
        outside += [at] * is_outside_torch(at.tb_frame)
        at = at.tb_next
    traceback = None
    for at in reversed(outside):
        traceback = TracebackType(traceback, at.tb_frame, at.tb_lasti, at.tb_lineno)
    return error.with_traceback(traceback)


def note_memory(error: RuntimeError) -> None:
    """Add a note with the cause and a remedy to torch's error about missing memory."""
    if _NO_MEMORY in str(error):
        error.add_note(
            "fsdp-comm: C++ code read the memory of a simulated tensor, which has none: avoid that "
            "call (use torch.tensor([t]) instead of torch.LongTensor([t]), padded instead of "
            "packed sequences in nn.LSTM), or run the test on real ranks, without simulate="
        )


def _looked_for_once(propagate: Callable[..., None]) -> Callable[..., None]:
    """Make torch look for strided shards once per operation, not for each sharding strategy."""
    schema: Any = None
    is_needed = False

    def run(strategy: Any, op_schema: Any) -> None:
        nonlocal schema, is_needed
        if schema is not op_schema:
            placements = (each for spec in op_schema.args_spec for each in spec.placements)
            schema = op_schema
            is_needed = any(isinstance(each, _StridedShard) for each in placements)
        if is_needed:
            propagate(strategy, op_schema)

    return run


def _of_any_dtype(size: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # Like a GPU, torch's meta kernel for grouped matrix products accepts only bfloat16. The CPU
    # also accepts other dtypes, so compute the result's shape for these here.
    @functools.wraps(size)
    def run(*args: Any, scale_a: Any = None, offs: Any = None, **options: Any) -> torch.Tensor:
        if scale_a is None and args[0].dtype != torch.bfloat16:
            make: Any = _meta_registrations._create_grouped_mm_output_tensor
            return cast("torch.Tensor", make(*args[:2], offs, options.get("out_dtype")))
        return size(*args, scale_a=scale_a, offs=offs, **options)

    return run


def _refuse_ddp(*_: Any, **__: Any) -> None:
    raise SimulationError(
        f"{find_call_site()} wraps a model in DistributedDataParallel, whose reducer needs tensors "
        "with memory: use fully_shard with a 2-D mesh (HSDP), or "
        'backend="fake" instead of simulate='
    )


@functools.cache
def _tensors(answers: bool, shares: tuple[float, ...] | None) -> SimulatedTensors:
    # Use the same mode in all tests, because tensors of module-scoped fixtures outlive a test, and
    # torch cannot mix tensors of two modes.
    return SimulatedTensors(answers=answers, shares=shares)


def _real(attribute: Any) -> Any:
    """Make a mesh's method or property use tensors with memory; return None for anything else."""
    if isinstance(attribute, property) and attribute.fget is not None:
        return property(_on_real(attribute.fget), attribute.fset, attribute.fdel)
    if isinstance(attribute, staticmethod):
        return staticmethod(_on_real(attribute.__func__))
    return _on_real(attribute) if callable(attribute) and not isinstance(attribute, type) else None


def _made_once(make: Any) -> Any:
    """Cache the meshes that `make` returns, because FSDP requests a mesh for each parameter."""
    # Equal meshes that are separate objects would be slow: torch compares them rank by rank.
    made: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    is_static = isinstance(make, staticmethod)

    def run(*args: Any) -> Any:
        flat = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
        key = tuple(part if isinstance(part, str) else id(part) for part in flat)
        if key not in made:
            made[key] = (make(*args), *flat)  # references to the arguments keep their ids unique
        return made[key][0]

    return staticmethod(run) if is_static else run


def _checked(init: Any, groups: RealGroups) -> Callable[..., None]:
    @functools.wraps(init)
    def run(self: device_mesh.DeviceMesh, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        with unset_fake_temporarily():
            groups.check(self)

    return run


def _on_real(
    function: Callable[..., Any], result_of: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The search for tensors is slow, so skip it for the most common argument, a single mesh.
        if kwargs or [*map(type, args)] != [device_mesh.DeviceMesh]:
            args, kwargs = tree_map_only(torch.Tensor, values_of, (args, kwargs))
        with unset_fake_temporarily():
            result = function(*args, **kwargs)
            return result if result_of is None else tree_map_only(torch.Tensor, result_of, result)

    return run


def _of_this_rank(convert: Callable[..., Any], groups: RealGroups | None) -> Callable[..., Any]:
    @functools.wraps(convert)
    def run(value: Any, place: Any, group: Any, *options: Any) -> Any:  # torch 2.15 adds an option
        # Raise before the objects of thousands of ranks are read, which would take minutes.
        is_gathered = sys._getframe(1).f_code.co_name in _GATHERS
        group = group or distributed_c10d.GroupMember.WORLD
        has_peers = group.size() == 1 or (groups is not None and groups.has(group))
        if (is_gathered and not has_peers) or (
            convert.__name__ == _OBJECTS[1] and not is_own(value)
        ):
            raise SimulationError(
                f"{find_call_site()} receives an object from a rank that does not run (as "
                "torch.distributed.checkpoint does): create the object on every rank, keep "
                "checkpoints out of the test, run these ranks with real={'<axis>': <size>}, or run "
                "the test on real ranks, without simulate="
            )
        return convert(value, place, group, *options)

    return run


def _backend_of_real(
    get_backend: Callable[..., str], groups: RealGroups | None
) -> Callable[..., str]:
    @functools.wraps(get_backend)
    def run(group: Any = None) -> str:
        fake = get_backend(group)
        frame = sys._getframe(1)
        asks: str = frame.f_globals.get("__name__", "")
        is_real = is_outside_torch(frame) or asks in _SENDS_BY_BACKEND
        if asks.startswith(_PIPELINES):
            # Since torch 2.15, pipeline stages that exchange their shapes reject a fake group.
            is_real = groups is not None and group is not None and groups.has(group)
        if not is_real:
            return fake
        return dist.Backend.NCCL if is_cuda_used() else dist.Backend.GLOO

    return run


def _in_modes(start: Callable[[threading.Thread], None], tensors: SimulatedTensors) -> Any:
    """Also simulate tensors in new threads, because torch's modes are thread-local."""

    @functools.wraps(start)
    def started(thread: threading.Thread) -> None:
        run = thread.run

        def simulate() -> None:
            with tensors:
                run()

        thread.run = simulate  # type: ignore[method-assign]  # works for every subclass of Thread
        start(thread)

    return started


def _made_fake(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make new process groups use the fake backend, whatever backend the caller requests."""

    def run(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        del backend
        return make(size, rank, ranks, "fake", *args, **kwargs | _FAKE_OPTIONS)

    return run


class LazyChunks(Sequence[torch.Tensor]):
    """Replaces FSDP2's ``_chunk_with_empty``, but creates a chunk only when it is accessed."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num, self._dim = tensor, num_chunks, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        number = range(self._num)[index]
        start, size = number * self._length, self._tensor.size(self._dim)
        if size and start >= size:
            return self[0].new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, size - start))


@functools.wraps(_COPY)
def _copied_as_it_is(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    # Plain tensors, such as the rank numbers of a mesh, have memory, so copy them outside the mode.
    with unset_fake_temporarily() if type(tensor) is torch.Tensor else contextlib.nullcontext():
        return _COPY(tensor, memo)


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    if not tensor.is_leaf:
        return _COPY(tensor, memo)  # raises torch's error
    with torch.no_grad():
        result = tensor.clone()
    if isinstance(tensor, nn.Parameter):
        result = nn.Parameter(result, tensor.requires_grad)
    else:
        result.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = result
    result.grad = copy.deepcopy(tensor.grad, memo)
    return result


def _formatted(tensor: FakeTensor, spec: str) -> str:
    return format(tensor.detach().item() if tensor.dim() == 0 and spec else str(tensor), spec)


def _array(tensor: FakeTensor, *, force: bool = False) -> Any:
    del force
    # `item` returns a known or assumed value, or raises an error.
    first = tensor[(0,) * tensor.dim()].item() if tensor.numel() else 0
    values: torch.Tensor = values_of(tensor.detach())
    with unset_fake_temporarily():
        if isinstance(values, FakeTensor):
            values = torch.full(tensor.shape, first, dtype=tensor.dtype, device="cpu")
        return values.numpy()


def _address(storage: torch.UntypedStorage) -> int:
    if storage.device.type != "meta":
        return _ADDRESS(storage)
    if not storage.nbytes():
        return 0
    start: int = vars(storage).setdefault(_PLACE, next(_addresses))
    return start


def _data_ptr(tensor: FakeTensor) -> int:
    if tensor.fake_device.type == "meta" or not tensor.numel():
        return 0
    return _address(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function raise an error if an argument is a simulated storage or its address."""

    @functools.wraps(function)
    def read(*args: Any) -> Any:
        for arg in args:
            if (isinstance(arg, int) and arg >= _ADDRESSES) or (
                isinstance(arg, torch.UntypedStorage) and arg.device.type == "meta"
            ):
                _refuse()
        return function(*args)

    return read


def _exported(tensor: torch.Tensor, **how: Any) -> Any:
    values = values_of(tensor.detach())
    if isinstance(values, FakeTensor):
        _refuse()
    with unset_fake_temporarily():
        return values.__dlpack__(**how)


def _of_storage(
    convert: Callable[..., torch.Tensor], tensors: SimulatedTensors
) -> Callable[..., torch.Tensor]:
    # safetensors calls this function with storages that it has read from a file.
    @functools.wraps(convert)
    def asarray(data: Any, **how: Any) -> torch.Tensor:
        if not isinstance(data, torch.UntypedStorage):
            return convert(data, **how)
        with unset_fake_temporarily():
            result = convert(data, **how)
        return tensors.simulate(result)

    return asarray


def _joined(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make ``torch.tensor`` and ``as_tensor`` accept lists that contain simulated tensors."""

    @functools.wraps(make)
    def run(
        data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **how: Any
    ) -> torch.Tensor:
        if not _holds_simulated(data):
            options = {"dtype": dtype, "device": device, "requires_grad": requires_grad, **how}
            return make(data, **{name: value for name, value in options.items() if value})
        parts = [part if isinstance(part, torch.Tensor) else run(part) for part in data]
        with torch.no_grad():
            return torch.stack(parts).to(device, dtype).requires_grad_(requires_grad)

    return run


def _holds_simulated(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and any(
        isinstance(part, FakeTensor) or _holds_simulated(part) for part in data
    )


def _split(split: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(split)
    def run(tensor: torch.Tensor, indices_or_sections: Any = None, dim: int = 0, **how: Any) -> Any:
        places = how.get("indices", indices_or_sections)
        return split(tensor, places.tolist() if isinstance(places, FakeTensor) else places, dim)

    return run


def _refuse(*_: Any) -> Any:
    raise SimulationError(
        f"{find_call_site()} reads the memory of a tensor (for example, to save a checkpoint), but "
        "simulated tensors have no memory: move the call out of the code that the test runs, or "
        "run the test on real ranks, without simulate="
    )


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _in_this_process(iterate: Callable[..., Any]) -> Callable[..., Any]:
    """Make a DataLoader run without workers, which would send tensors through shared memory."""

    @functools.wraps(iterate)
    def run(loader: DataLoader[Any]) -> Any:
        settings = vars(loader)
        original = {name: settings[name] for name in ("num_workers", "timeout")}
        settings.update(num_workers=0, timeout=0)
        try:
            return iterate(loader)
        finally:
            settings.update(original)

    return run
