"""Patches process groups and meshes while a rank is simulated."""

# The rank numbers of a mesh and the bytes of pickled objects stay real tensors, because torch reads
# their values.

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh, distributed_c10d
from torch.utils._pytree import tree_map_only

from pytest_fsdp_comm.recording.frames import find_call_site, is_outside_torch
from pytest_fsdp_comm.recording.patches import Replacement, wrap_attribute
from pytest_fsdp_comm.simulation.devices import is_cuda_used
from pytest_fsdp_comm.simulation.groups import RealGroups
from pytest_fsdp_comm.simulation.memory import SimulationError
from pytest_fsdp_comm.simulation.values import (
    SimulatedTensors,
    await_and_view_values,
    is_known_without_peers,
)

_MESHES_OF = frozenset({"__getitem__", "_concatenate"})
_GATHERS = {"all_gather_object", "gather_object"}
_OBJECTS = ("_object_to_tensor", "_tensor_to_object")  # checked in torch 2.13 and 2.15
_MAKE_GROUP = "_new_process_group_helper"  # checked in torch 2.7 to 2.15
_FAKE_OPTIONS = {"backend_options": None, "device_id": None}
_PIPELINES = "torch.distributed.pipelining."
_SENDS_BY_BACKEND = {"torch.distributed.nn.functional", "torch.distributed.distributed_c10d"}
"""torch modules that communicate differently for different backends."""


def group_patches(tensors: SimulatedTensors, groups: RealGroups | None) -> Iterator[Replacement]:
    """Yield what to replace in torch's process groups and meshes; `groups` are the real peers."""
    mesh = device_mesh.DeviceMesh
    for name, attribute in vars(mesh).items():
        if name.startswith("__") and name not in {"__init__", "__getitem__"}:
            continue
        real = _wrap_attribute_with_memory(attribute)
        if groups is not None and name == "__init__":
            real = _wrap_mesh_init_with_check(real, groups)
        if real is not None:
            yield mesh, name, _cache_meshes(real) if name in _MESHES_OF else real
    for name in _OBJECTS:
        real = wrap_with_memory(getattr(distributed_c10d, name), tensors.simulate)
        yield distributed_c10d, name, functools.partial(_simulated_convert_object, real, groups)
    requested: dict[str, str] = {}
    get_backend = functools.partial(_simulated_get_backend, groups, requested)
    get_backend_config = functools.partial(_simulated_get_backend_config, requested)
    for module in (dist, distributed_c10d):
        yield wrap_attribute(module, "get_backend", get_backend)
        yield wrap_attribute(module, "get_backend_config", get_backend_config)
    yield FakeWork, "is_completed", lambda _: True
    make_group = functools.partial(_simulated_make_group, requested)
    yield wrap_attribute(distributed_c10d, _MAKE_GROUP, make_group)
    timeout = distributed_c10d.default_pg_timeout
    yield distributed_c10d, "_get_default_timeout", lambda _: timeout


def _wrap_attribute_with_memory(attribute: object) -> object:
    """Make a mesh's method or property use tensors with memory; return None for anything else."""
    if isinstance(attribute, property) and attribute.fget is not None:
        return property(wrap_with_memory(attribute.fget), attribute.fset, attribute.fdel)
    if isinstance(attribute, staticmethod):
        return staticmethod(wrap_with_memory(attribute.__func__))
    if callable(attribute) and not isinstance(attribute, type):
        return wrap_with_memory(attribute)
    return None


def _cache_meshes(make: Any) -> object:
    """Cache the meshes that `make` returns, because FSDP requests a mesh for each parameter."""
    # Equal meshes that are separate objects would be slow: torch compares them rank by rank.
    made: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    is_static = isinstance(make, staticmethod)

    def run(*args: Any) -> object:
        flat = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
        key = tuple(part if isinstance(part, str) else id(part) for part in flat)
        if key not in made:
            made[key] = (make(*args), *flat)  # references to the arguments keep their ids unique
        return made[key][0]

    return staticmethod(run) if is_static else run


def _wrap_mesh_init_with_check(init: Any, groups: RealGroups) -> Callable[..., None]:
    @functools.wraps(init)
    def run(self: device_mesh.DeviceMesh, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        with unset_fake_temporarily():
            groups.check_mesh(self)

    return run


def wrap_with_memory(
    function: Callable[..., object], result_of: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Callable[..., object]:
    """Make a function compute with tensors that have memory, as outside a simulation.

    Args:
        function: The function to wrap.
        result_of: Applied to each tensor that the function returns; None to return it as it is.
    """

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        # The search for tensors is slow, so skip it for the most common argument, a single mesh.
        if kwargs or [*map(type, args)] != [device_mesh.DeviceMesh]:
            args, kwargs = tree_map_only(torch.Tensor, await_and_view_values, (args, kwargs))
        with unset_fake_temporarily():
            result = function(*args, **kwargs)
            return result if result_of is None else tree_map_only(torch.Tensor, result_of, result)

    return run


def _simulated_convert_object(
    convert: Callable[..., object],
    groups: RealGroups | None,
    value: Any,
    device: object,
    group: Any,
    *options: object,  # torch 2.15 adds one
) -> object:
    # Raise before the objects of thousands of ranks are read, which would take minutes.
    is_gathered = sys._getframe(1).f_code.co_name in _GATHERS
    group = group or distributed_c10d.GroupMember.WORLD
    has_peers = group.size() == 1 or (groups is not None and groups.has_ranks_of(group))
    if (is_gathered and not has_peers) or (
        convert.__name__ == _OBJECTS[1] and not is_known_without_peers(value)
    ):
        raise SimulationError(
            f"{find_call_site()} receives an object from a rank that does not run (as "
            "torch.distributed.checkpoint does): create the object on every rank, keep "
            "checkpoints out of the test, run these ranks with real={'<axis>': <size>}, or run "
            "the test on real ranks, without simulate="
        )
    return convert(value, device, group, *options)


def _simulated_get_backend(
    groups: RealGroups | None,
    requested: Mapping[str, str],
    get_backend: Callable[..., str],
    group: Any = None,
) -> str:
    """Make code outside torch see the backend that the caller requested for a group.

    Without a request, code sees the backend that a real rank would use.
    """
    fake = get_backend(group)
    frame = sys._getframe(2)  # the caller of the wrapper
    asks: str = frame.f_globals.get("__name__", "")
    is_real = is_outside_torch(frame) or asks in _SENDS_BY_BACKEND
    if asks.startswith(_PIPELINES):
        # Since torch 2.15, pipeline stages that exchange their shapes reject a fake group.
        is_real = groups is not None and group is not None and groups.has_ranks_of(group)
    if not is_real:
        return fake
    if (backend := _find_requested_backend(group, requested)) is not None:
        return dist.Backend(backend)  # torch compares it with `is`
    return dist.Backend.NCCL if is_cuda_used() else dist.Backend.GLOO


def _simulated_get_backend_config(
    requested: Mapping[str, str], get_config: Callable[..., str], group: Any = None
) -> str:
    backend = _find_requested_backend(group, requested)
    if backend is None or not is_outside_torch(sys._getframe(2)):
        return get_config(group)
    return str(distributed_c10d.BackendConfig(dist.Backend(backend)))


def _find_requested_backend(group: dist.ProcessGroup, requested: Mapping[str, str]) -> str | None:
    world = distributed_c10d.GroupMember.WORLD
    names = (member.group_name for member in (group, world) if member is not None)
    return next(filter(None, map(requested.get, names)), None)


def _simulated_make_group(
    requested: dict[str, str], make: Callable[..., Any], *args: Any, **kwargs: object
) -> object:
    """Make new process groups use the fake backend; keep the requested backends by group name."""
    size, rank, ranks, backend, *others = args
    made = make(size, rank, ranks, "fake", *others, **kwargs | _FAKE_OPTIONS)
    # torch requests the fake backend to make further groups like the default group. It returns no
    # group to ranks outside the group.
    if str(backend) != "fake" and isinstance(made[0], dist.ProcessGroup):
        requested[made[0].group_name] = str(backend)
    return made
