"""What of torch works otherwise where one rank is simulated."""

# Note [What stays real]
# A mesh is arithmetic on the numbers of ranks, which torch does with tensors: they stay real, as it
# reads them, and so are objects when they become bytes, or bytes objects. FSDP2 cuts each parameter
# into the chunks of all ranks, to keep one: they are cut when they are looked at. Read in torch 2.7
# to 2.15.

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
_LEARN = "_propagate_tensor_meta_non_cached"  # read in torch 2.13
_STRIDED = "_propagate_use_strided_shard_flag"  # read in torch 2.13 and 2.15
_GROUPED = "_meta_grouped_mm_common"  # read in torch 2.13 and 2.15
_GATHERS = {"all_gather_object", "gather_object"}
_OBJECTS = ("_object_to_tensor", "_tensor_to_object")  # read in torch 2.13 and 2.15
_MAKE_GROUP = "_new_process_group_helper"  # read in torch 2.7 to 2.15
_FAKE_OPTIONS = {"backend_options": None, "device_id": None}
_PIPELINES = "torch.distributed.pipelining."
_SENDS_BY_BACKEND = {"torch.distributed.nn.functional", "torch.distributed.distributed_c10d"}
"""Modules of torch that send something else with another backend."""
_COPY: Final[Callable[..., Any]] = torch.Tensor.__deepcopy__
_ADDRESS: Final[Callable[..., int]] = torch.UntypedStorage.data_ptr
_ADDRESSES: Final = 2**60
"""Where those of simulated storages begin: no process can have such a one."""
_NO_MEMORY: Final = "its data is not allocated yet"
"""What c10's TensorImpl says, in torch 2.7 to 2.15."""
_PLACE: Final = "_fsdp_comm_address"
_addresses: Final = itertools.count(_ADDRESSES, 2**42)


@contextlib.contextmanager
def simulated(
    *, answers: bool, shares: tuple[float, ...] | None = None, groups: RealGroups | None = None
) -> Iterator[None]:
    """Simulate this rank while the block runs.

    Args:
        answers: Whether a floating-point number that nobody knows is 1.0, and a truth False;
            otherwise each is an error, as unknown whole numbers always are.
        shares: Of each expert in what is chosen by scores, in any unit; empty if all are equal,
            None if unknown.
        groups: Those whose ranks run; None if this rank runs alone.
    """
    _complete_collectives()
    tensors = _tensors(answers, shares)
    tensors.begin(groups)
    with (
        patched(*_attributes(tensors, groups)),
        reporting_reads(),
        cuda_on_cpu(answers=answers),
        # What is compiled sends what it sends as it is written, and the compiler's own tensors
        # without memory mix with no others.
        torch.compiler.set_stance("force_eager"),
        tensors,
    ):
        yield


@functools.cache
def _complete_collectives() -> Any:
    """Have tensors without memory sent by all operations; torch leaves some out (2.7 to 2.15)."""
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for name in ("allreduce", "allgather", "allgather_into_tensor", "reduce_scatter_tensor"):
        func = getattr(torch.ops.c10d, f"{name}_coalesced_").default
        if not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
            library.impl(func, lambda *_, **__: FakeWork().boxed(), "Meta")
    return library  # its kernels last as long as it does


def _attributes(
    tensors: SimulatedTensors, groups: RealGroups | None
) -> Iterator[tuple[Any, str, Any]]:
    mesh = device_mesh.DeviceMesh
    for name, found in vars(mesh).items():
        if name.startswith("__") and name not in {"__init__", "__getitem__"}:
            continue
        real = _real(found)
        if groups is not None and name == "__init__":
            real = _checked(real, groups)
        if real is not None:
            yield mesh, name, _made_once(real) if name in _MESHES_OF else real
    yield from _of_sharding()
    yield DistributedDataParallel, "__init__", _refuse_ddp
    for name in _OBJECTS:
        real = _on_real(getattr(distributed_c10d, name), tensors.known)
        yield distributed_c10d, name, _of_this_rank(real, groups)
    for module in (dist, distributed_c10d):
        yield module, "get_backend", _backend_of_real(dist.get_backend, groups)
    yield FakeWork, "is_completed", lambda _: True
    # torch numbers works by Python's random numbers, which are the user's.
    numbers = itertools.count(1).__next__
    numbering: Any = sys.modules["torch.distributed._meta_registrations"]
    yield numbering, "generate_unique_id", numbers
    yield distributed_c10d, _MAKE_GROUP, _made_fake(getattr(distributed_c10d, _MAKE_GROUP))
    timeout = distributed_c10d.default_pg_timeout
    yield distributed_c10d, "_get_default_timeout", lambda _: timeout
    # As PYTORCH_JIT=0: the compiler of scripts does not know what stands for torch's functions.
    yield torch.jit._state._enabled, "enabled", False
    yield torch.utils, "swap_tensors", tensors.swap
    yield threading.Thread, "start", _in_modes(threading.Thread.start, tensors)
    with contextlib.suppress(ImportError):  # or the code may import it later
        importlib.import_module("torchdata.stateful_dataloader")
    for loader in (DataLoader, *_subclasses(DataLoader)):
        if "__iter__" in vars(loader):
            yield loader, "__iter__", _in_this_process(vars(loader)["__iter__"])
    yield from _of_memory(tensors)


def _of_sharding() -> Iterator[tuple[Any, str, Any]]:
    if hasattr(_fsdp_param, _CHUNKS):  # otherwise only slower
        yield _fsdp_param, _CHUNKS, LazyChunks
    # DTensor runs operations of whole tensors to learn what they return: on tensors of its own, as
    # without a simulation, so that nothing counts them as this rank's.
    learn = getattr(ShardingPropagator, _LEARN, None)
    if learn is not None:  # otherwise estimates alone are too large
        yield ShardingPropagator, _LEARN, _on_real(learn)
    if hasattr(_sharding_prop, _STRIDED):  # otherwise only slower
        yield _sharding_prop, _STRIDED, _looked_for_once(getattr(_sharding_prop, _STRIDED))
    if hasattr(_meta_registrations, _GROUPED):
        yield _meta_registrations, _GROUPED, _of_any_dtype(getattr(_meta_registrations, _GROUPED))


def _of_memory(tensors: SimulatedTensors) -> Iterator[tuple[Any, str, Any]]:
    # What Python makes of a simulated tensor: a copy, a text, an array, a file. torch refuses some
    # of it in words that name no cure, and takes memory for granted in the rest. Read in torch
    # 2.13.
    yield torch.Tensor, "__deepcopy__", _copied_as_it_is
    yield FakeTensor, "__deepcopy__", _copied
    yield FakeTensor, "__format__", _formatted
    yield FakeTensor, "__reduce_ex__", _refuse
    yield FakeTensor, "data_ptr", _data_ptr
    yield FakeTensor, "share_memory_", lambda own: own
    yield FakeTensor, "__dlpack__", _exported
    yield torch.utils.dlpack, "to_dlpack", _exported
    yield torch.UntypedStorage, "data_ptr", _address
    for name in ("__getitem__", "_write_file", "cpu"):
        yield torch.UntypedStorage, name, _reading(getattr(torch.UntypedStorage, name))
    for name in ("cast", "memmove", "memset", "string_at"):
        yield ctypes, name, _reading(getattr(ctypes, name))
    yield torch, "asarray", _of_storage(torch.asarray, tensors)
    yield FakeTensor, "numpy", _array
    yield FakeTensor, "tolist", lambda own: _array(own).tolist()
    # These read memory before any operation runs.
    for make in (torch.tensor, torch.as_tensor):
        yield torch, make.__name__, _joined(make)
    for place in (torch, torch.Tensor):
        yield place, "tensor_split", _split(place.tensor_split)


def of_user(error: FsdpCommError) -> FsdpCommError:
    """Leave the frames of torch and of this package out of a SimulationError."""
    if not isinstance(error, SimulationError):
        return error
    found, kept = error.__traceback__, []
    while found is not None:
        kept += [found] * is_outside_torch(found.tb_frame)
        found = found.tb_next
    shown = None
    for one in reversed(kept):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return error.with_traceback(shown)


def note_memory(error: RuntimeError) -> None:
    """Say what torch's error about memory that is missing means in a simulation."""
    if _NO_MEMORY in str(error):
        error.add_note(
            "fsdp-comm: C++ code read the memory of a simulated tensor, which has none: call what "
            "does not (torch.tensor([t]) for torch.LongTensor([t]), padded for packed sequences in "
            "nn.LSTM), or run the test on real ranks, without simulate="
        )


def _looked_for_once(propagate: Callable[..., None]) -> Callable[..., None]:
    """Look through the tensors of an operation once, not for each that it returns."""
    schema: Any = None
    is_needed = False

    def run(strategy: Any, given: Any) -> None:
        nonlocal schema, is_needed
        if schema is not given:
            placements = (placement for spec in given.args_spec for placement in spec.placements)
            schema = given
            is_needed = any(isinstance(each, _StridedShard) for each in placements)
        if is_needed:
            propagate(strategy, given)

    return run


def _of_any_dtype(size: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # Where nothing runs, torch refuses of a grouped matrix product what a GPU would, and the CPU
    # does not: numbers of another dtype than bfloat16.
    @functools.wraps(size)
    def run(*args: Any, scale_a: Any = None, offs: Any = None, **how: Any) -> torch.Tensor:
        if scale_a is None and args[0].dtype != torch.bfloat16:
            make: Any = _meta_registrations._create_grouped_mm_output_tensor
            return cast("torch.Tensor", make(*args[:2], offs, how.get("out_dtype")))
        return size(*args, scale_a=scale_a, offs=offs, **how)

    return run


def _refuse_ddp(*_: Any, **__: Any) -> None:
    raise SimulationError(
        f"{find_call_site()} wraps a model in DistributedDataParallel, whose reducer needs tensors "
        "that have memory: use fully_shard over a mesh of replicas and shards, or "
        'backend="fake" in place of simulate='
    )


@functools.cache
def _tensors(answers: bool, shares: tuple[float, ...] | None) -> SimulatedTensors:
    # One for the process: fixtures of a module outlive the test that they were made in, and torch
    # mixes no tensors of two.
    return SimulatedTensors(answers=answers, shares=shares)


def _real(found: Any) -> Any:
    """A method or property of a mesh as one on real tensors; None for anything else."""
    if isinstance(found, property) and found.fget is not None:
        return property(_on_real(found.fget), found.fset, found.fdel)
    if isinstance(found, staticmethod):
        return staticmethod(_on_real(found.__func__))
    return _on_real(found) if callable(found) and not isinstance(found, type) else None


def _made_once(make: Any) -> Any:
    """Have the same meshes and names give the same mesh: FSDP asks for each parameter's."""
    # It would hold a number for each rank, and tell itself from its like by comparing them.
    made: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    is_static = isinstance(make, staticmethod)

    def run(*args: Any) -> Any:
        given = [own for arg in args for own in (arg if isinstance(arg, (list, tuple)) else [arg])]
        key = tuple(own if isinstance(own, str) else id(own) for own in given)
        if key not in made:
            made[key] = (make(*args), *given)  # kept, so that their addresses stay theirs
        return made[key][0]

    return staticmethod(run) if is_static else run


def _checked(init: Any, groups: RealGroups) -> Callable[..., None]:
    @functools.wraps(init)
    def run(mesh: device_mesh.DeviceMesh, *args: Any, **kwargs: Any) -> None:
        init(mesh, *args, **kwargs)
        with unset_fake_temporarily():
            groups.check(mesh)

    return run


def _on_real(
    function: Callable[..., Any], result_of: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Most are given a mesh alone, and some return the numbers of all ranks: what holds no
        # tensor is not looked through.
        if kwargs or [*map(type, args)] != [device_mesh.DeviceMesh]:
            args, kwargs = tree_map_only(torch.Tensor, values_of, (args, kwargs))
        with unset_fake_temporarily():
            result = function(*args, **kwargs)
            return result if result_of is None else tree_map_only(torch.Tensor, result_of, result)

    return run


def _of_this_rank(convert: Callable[..., Any], groups: RealGroups | None) -> Callable[..., Any]:
    @functools.wraps(convert)
    def run(given: Any, place: Any, group: Any, *options: Any) -> Any:  # torch 2.15 has one
        # Asked before they are sent, since those of thousands of ranks take minutes to read.
        is_gathered = sys._getframe(1).f_code.co_name in _GATHERS
        group = group or distributed_c10d.GroupMember.WORLD
        has_peers = group.size() == 1 or (groups is not None and groups.has(group))
        if (is_gathered and not has_peers) or (
            convert.__name__ == _OBJECTS[1] and not is_own(given)
        ):
            raise SimulationError(
                f"{find_call_site()} receives an object from a rank that does not run, as "
                "torch.distributed.checkpoint does too: have each rank make it, leave checkpoints "
                "to code which the test does not run, have the ranks run by the name of their "
                "axis, real=, or run the test on real ranks, without simulate="
            )
        return convert(given, place, group, *options)

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
            # Since torch 2.15 stages that would tell each other their shapes refuse a fake group.
            is_real = groups is not None and group is not None and groups.has(group)
        if not is_real:
            return fake
        return dist.Backend.NCCL if is_cuda_used() else dist.Backend.GLOO

    return run


def _in_modes(start: Callable[[threading.Thread], None], tensors: SimulatedTensors) -> Any:
    """Have threads simulate too: torch knows modes of a thread alone."""

    @functools.wraps(start)
    def started(thread: threading.Thread) -> None:
        run = thread.run

        def simulate() -> None:
            with tensors:
                run()

        thread.run = simulate  # type: ignore[method-assign]  # whatever class it has
        start(thread)

    return started


def _made_fake(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have a group that asks for a backend, such as gloo or NCCL, exchange nothing."""

    def run(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        del backend
        return make(size, rank, ranks, "fake", *args, **kwargs | _FAKE_OPTIONS)

    return run


class LazyChunks(Sequence[torch.Tensor]):
    """As ``_chunk_with_empty`` of FSDP2: the chunks of a tensor, each made when it is looked at."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num, self._dim = tensor, num_chunks, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        number = range(self._num)[index]
        start, whole = number * self._length, self._tensor.size(self._dim)
        if whole and start >= whole:
            return self[0].new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, whole - start))


@functools.wraps(_COPY)
def _copied_as_it_is(own: torch.Tensor, memo: dict[int, Any]) -> Any:
    # With memory, as what the mesh of a DTensor's state is made of.
    with unset_fake_temporarily() if type(own) is torch.Tensor else contextlib.nullcontext():
        return _COPY(own, memo)


def _copied(own: FakeTensor, memo: dict[int, Any]) -> Any:
    if not own.is_leaf:
        return _COPY(own, memo)  # which refuses
    with torch.no_grad():
        made = own.clone()
    if isinstance(own, nn.Parameter):
        made = nn.Parameter(made, own.requires_grad)
    else:
        made.requires_grad_(own.requires_grad)
    memo[id(own)] = made
    made.grad = copy.deepcopy(own.grad, memo)
    return made


def _formatted(own: FakeTensor, spec: str) -> str:
    return format(own.detach().item() if own.dim() == 0 and spec else str(own), spec)


def _array(own: FakeTensor, *, force: bool = False) -> Any:
    del force
    first = own[(0,) * own.dim()].item() if own.numel() else 0  # noted, answered, or refused
    values: torch.Tensor = values_of(own.detach())
    with unset_fake_temporarily():
        if isinstance(values, FakeTensor):
            values = torch.full(own.shape, first, dtype=own.dtype, device="cpu")
        return values.numpy()


def _address(storage: torch.UntypedStorage) -> int:
    if storage.device.type != "meta":
        return _ADDRESS(storage)
    if not storage.nbytes():
        return 0
    start: int = vars(storage).setdefault(_PLACE, next(_addresses))
    return start


def _data_ptr(own: FakeTensor) -> int:
    if own.fake_device.type == "meta" or not own.numel():
        return 0
    return _address(own.untyped_storage()) + int(own.storage_offset()) * own.element_size()


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to read where a simulated storage is given, or the number of one."""

    @functools.wraps(function)
    def read(*args: Any) -> Any:
        for own in args:
            if (isinstance(own, int) and own >= _ADDRESSES) or (
                isinstance(own, torch.UntypedStorage) and own.device.type == "meta"
            ):
                _refuse()
        return function(*args)

    return read


def _exported(own: torch.Tensor, **how: Any) -> Any:
    values = values_of(own.detach())
    if isinstance(values, FakeTensor):
        _refuse()
    with unset_fake_temporarily():
        return values.__dlpack__(**how)


def _of_storage(
    convert: Callable[..., torch.Tensor], tensors: SimulatedTensors
) -> Callable[..., torch.Tensor]:
    # safetensors gives what it has read from a file.
    @functools.wraps(convert)
    def asarray(own: Any, **how: Any) -> torch.Tensor:
        if not isinstance(own, torch.UntypedStorage):
            return convert(own, **how)
        with unset_fake_temporarily():
            result = convert(own, **how)
        return tensors.known(result)

    return asarray


def _joined(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As ``torch.tensor``, also of lists that hold simulated tensors."""

    @functools.wraps(make)
    def run(
        data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **how: Any
    ) -> torch.Tensor:
        if not _holds_simulated(data):
            given = {"dtype": dtype, "device": device, "requires_grad": requires_grad, **how}
            return make(data, **{name: own for name, own in given.items() if own})
        parts = [own if isinstance(own, torch.Tensor) else run(own) for own in data]
        with torch.no_grad():
            return torch.stack(parts).to(device, dtype).requires_grad_(requires_grad)

    return run


def _holds_simulated(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and any(
        isinstance(own, FakeTensor) or _holds_simulated(own) for own in data
    )


def _split(split: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(split)
    def run(own: torch.Tensor, indices_or_sections: Any = None, dim: int = 0, **how: Any) -> Any:
        places = how.get("indices", indices_or_sections)
        return split(own, places.tolist() if isinstance(places, FakeTensor) else places, dim)

    return run


def _refuse(*_: Any) -> Any:
    raise SimulationError(
        f"{find_call_site()} reads the memory of a tensor, as what writes a checkpoint does, and a "
        "simulated one has none: leave that to code which the test does not run, or run the test "
        "on real ranks, without simulate="
    )


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _in_this_process(iterate: Callable[..., Any]) -> Callable[..., Any]:
    """Have a loader load without workers, which would have to send tensors through memory."""

    @functools.wraps(iterate)
    def run(loader: DataLoader[Any]) -> Any:
        settings = vars(loader)
        kept = {name: settings[name] for name in ("num_workers", "timeout")}
        settings.update(num_workers=0, timeout=0)
        try:
            return iterate(loader)
        finally:
            settings.update(kept)

    return run
