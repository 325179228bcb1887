"""Watch FSDP units: their collectives, reshards, prefetch distances and gathered memory."""

# Note [Acting units]
# While a recording runs, the FSDP methods that issue collectives are wrapped. The units whose
# wrapped methods are running form a stack. The innermost unit that communicates for its parameters
# owns the collective; the outermost unit issued it. Under prefetch, the two differ. We do not read
# the owner from torch's profiler labels, because their FQNs are relative to the FSDP root, empty
# with several roots or none, and missing before lazy initialisation.

# Note [Reshard after forward]
# With reshard_after_forward=<int>, a unit stays sharded over a smaller group between forward and
# backward. In addition to its shard, it then holds 1/<int> of its bytes. Its backward gathers over
# that group. torch does not name the group's mesh; mesh_axes.py names it after the shard axis.

# Note [Counting slots]
# The prefetch distance is counted in slots, not in time or bytes: each use of a unit, in forward or
# backward, opens the next slot. A gather that a unit issues for itself has distance 0; a gather
# issued while the previous unit is in use has distance 1. The count depends only on the order of
# calls, so it is the same on every rank, on every backend and in every run.

from __future__ import annotations

import enum
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.recording.mesh_axes import GroupNames

IS_WATCHED: Final = "_fsdp_comm_is_watched"
"""Name of the attribute that marks our replacements of torch's methods."""

ReshardAction = Literal["unshard", "reshard"]

# torch's enum of training states, and the two states in which a unit is in use.
_FSDP1_STATES = "torch.distributed.fsdp._common_utils.HandleTrainingState FORWARD BACKWARD_PRE"
_FSDP2_STATES = (
    "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState FORWARD PRE_BACKWARD"
)


@dataclass(slots=True, eq=False)
class Gather:
    """One gather of a unit's parameters, which may take several collectives."""

    slot: int
    ahead: int | None = None
    """The number of slots between this gather and the unit's use; None until the unit is used."""
    dtypes: list[list[Any]] = field(default_factory=list)
    """The gathered dtypes of each parameter, if FSDP2 packed different dtypes into uint8."""


class Prefetches:
    """Count the slots between each gather and its use. See Note [Counting slots]."""

    def __init__(self) -> None:
        self._slot = 0
        self._user: tuple[Any, Any] = (None, None)
        self._unused: dict[Any, Gather] = {}

    def open_slot(self, phase: object, user: object) -> None:
        """Open the next slot, unless the current one has the same user and phase."""
        # The parameter groups of a module share a slot. So do consecutive calls of a module, as for
        # a loss computed in chunks. Compare with `is`, because modules may define `__eq__`.
        last_phase, last_user = self._user
        if phase != last_phase or user is not last_user:
            self._slot += 1
            self._user = (phase, user)

    def begin_gather(self) -> Gather:
        return Gather(self._slot)

    def note_gather(self, unit: object, gather: Gather) -> None:
        self._unused[unit] = gather

    def note_use(self, unit: object) -> None:
        """Record that a unit's parameters are used; only the first use after a gather counts."""
        gather = self._unused.pop(unit, None)
        if gather is not None:
            gather.ahead = self._slot - gather.slot

    def note_free(self, unit: object) -> None:
        """Record that a unit's parameters were freed: their next use needs another gather."""
        self._unused.pop(unit, None)


class GatheredMemory:
    """Track the bytes that units hold beyond their shards, and the peak of their sum."""

    def __init__(self) -> None:
        self._nbytes: dict[Any, int] = {}
        self._total = 0
        self.peak = 0

    def track_unit(self, unit: object, get_nbytes: Callable[[object], int]) -> None:
        """Start tracking a unit, just before its state first changes or at the end of the block."""
        # The unit has held these bytes since the block began, so add them to the peak as well. That
        # way, the peak is the same whether this step or an earlier forward gathered the root.
        if unit not in self._nbytes:
            nbytes = self._nbytes[unit] = get_nbytes(unit)
            self._total += nbytes
            self.peak += nbytes

    def set_gathered_nbytes(self, unit: object, nbytes: int) -> None:
        """Update the bytes that a tracked unit holds beyond its shard."""
        self._total += nbytes - self._nbytes[unit]
        self._nbytes[unit] = nbytes
        self.peak = max(self.peak, self._total)


@dataclass(slots=True)
class ActingUnit:
    """A unit whose watched method is running. See Note [Acting units]."""

    modules: tuple[nn.Module, ...]
    serves: bool = True
    """Whether the method communicates for this unit; False if it only prefetches other units."""
    is_in_backward: bool = False
    """True for a method of backward, even if a pipeline schedule calls it outside autograd."""
    gather: Gather | None = None
    reduced: tuple[tuple[nn.Module, str], ...] = ()
    """The module and name of each parameter whose gradient the method reduces. Empty if all of the
    unit's parameters have a gradient, and for methods that reduce none."""
    attribution: Any = None
    """The `Attribution` of all events in the method; None until `attribute_to_unit` finds it."""
    thread: int = field(default_factory=threading.get_ident)


Arguments = tuple[Any, ...]
"""The positional arguments of an FSDP method, without `self`."""

Around = Callable[["UnitWatch", Any, Arguments], "Iterator[ActingUnit | None]"]
"""A generator method of `UnitWatch` that wraps an FSDP method and gets its arguments. It yields the
unit that acts during the call. If the FSDP method does not raise, the code after the yield runs
while the unit is still acting."""


class UnitWatch:
    """Track which FSDP units are acting. See Note [Acting units]."""

    def __init__(
        self,
        on_reshard: Callable[[ReshardAction, tuple[nn.Module, ...], int, float], None],
        groups: GroupNames,
    ) -> None:
        """Call `on_reshard` when a unit unshards or reshards, and pass unit meshes to `groups`."""
        # `on_reshard` gets the action, the unit's modules, its bytes, and the seconds that the host
        # spent (0.0 for an unshard).
        self.acting: list[ActingUnit] = []
        """The acting units, outermost first."""
        self.running: set[tuple[str, int]] = set()
        """The watched methods that are running, each as its name and the ``id`` of its object."""
        self._on_reshard = on_reshard
        self._groups = groups
        self._prefetches = Prefetches()
        self._memory = GatheredMemory()
        self._unsharded_nbytes: dict[Any, int] = {}
        # For each FSDP2 unit that was gathered: the mesh over which forward reshards it.
        self._meshes: dict[Any, Any] = {}

    @property
    def owner(self) -> tuple[nn.Module, ...]:
        """The modules of the innermost unit that communicates for its parameters, if any."""
        return next((unit.modules for unit in reversed(self.acting) if unit.serves), ())

    @property
    def issuer(self) -> tuple[nn.Module, ...]:
        """The modules of the unit whose hook is running; under prefetch, it is not the owner."""
        return self.acting[0].modules if self.acting else ()

    @property
    def is_in_backward(self) -> bool:
        return any(unit.is_in_backward for unit in self.acting)

    @property
    def gather(self) -> Gather | None:
        return self.acting[-1].gather if self.acting else None

    @property
    def reduced(self) -> tuple[tuple[nn.Module, str], ...]:
        return self.acting[-1].reduced if self.acting else ()

    def peak_gathered_nbytes(self, groups: Iterable[Any], modules: Iterable[nn.Module]) -> int:
        """Return the most bytes that FSDP2 `groups` and FSDP1 `modules` had gathered at a time."""
        # Units that stayed gathered during the whole block are not tracked yet, so add them now.
        for group in groups:
            self._memory.track_unit(group, self._nbytes_held_beyond_shard)
        for handle in _list_fsdp1_handles(modules):
            self._memory.track_unit(handle, _gathered_nbytes_of_handle)
        return self._memory.peak

    def _unsharded_nbytes_of_group(self, group: Any) -> int:
        """Return the size in bytes of an FSDP2 unit's gathered parameters."""
        # Cache the result: every change of state needs it, and a gathered unit's dtypes are final.
        nbytes = self._unsharded_nbytes.get(group)
        if nbytes is None:
            nbytes = self._unsharded_nbytes[group] = _unsharded_nbytes_of_params(group.fsdp_params)
        return nbytes

    def _nbytes_held_beyond_shard(self, group: Any) -> int:
        """Return the bytes that an FSDP2 unit holds beyond its shard."""
        used = self._nbytes_held_for_use(group)
        # Check `used` first: `_unsharded_nbytes_of_group` caches its result, and a unit's dtypes
        # can still change until it first runs.
        if used and used == self._unsharded_nbytes_of_group(group):
            return used
        # From torch 2.15 on, a resharded parameter may keep its gathered storage for reuse.
        return used + _unsharded_nbytes_of_params(
            param
            for param in group.fsdp_params
            if getattr(param, "keep_unsharded_storage", False)
            and any(tensor.untyped_storage().size() for tensor in param.all_gather_outputs)
        )

    def _nbytes_held_for_use(self, group: Any) -> int:
        """Return the bytes that a fully or partly gathered unit holds for its next use, else 0."""
        if group.is_unsharded or group._all_gather_result is not None:
            return self._unsharded_nbytes_of_group(group)
        after = group.post_forward_mesh_info
        if group.is_sharded_post_forward and after is not None:
            # As everywhere else, count logical bytes, without padding.
            return self._unsharded_nbytes_of_group(group) // int(after.shard_mesh_size)
        return 0

    def forget(self) -> None:
        """Drop all references to units, because autograd graphs may keep this object alive."""
        self._prefetches = Prefetches()
        self._memory = GatheredMemory()
        self._unsharded_nbytes.clear()
        self._meshes.clear()

    def _watch_state_pre_backward(self, state: Any, _: Arguments) -> Iterator[ActingUnit]:
        yield ActingUnit(tuple(state._modules), serves=False, is_in_backward=True)

    def _watch_pre_backward(self, group: object, _: Arguments) -> Iterator[ActingUnit]:
        self._open_slot_on_new_state(_look_up_training_states(_FSDP2_STATES)[1], group)
        yield self._make_acting_backward_unit(group, serves=False)

    def _watch_post_backward(self, group: object, _: Arguments) -> Iterator[ActingUnit]:
        acting = self._make_acting_backward_unit(group, serves=True)
        acting.reduced = _list_reduced_params_unless_all(group)
        yield acting

    def _make_acting_backward_unit(self, group: Any, *, serves: bool) -> ActingUnit:
        if group not in self._meshes:
            self._groups.learn_mesh(group.mesh_info.mesh)
        return ActingUnit(tuple(group.modules), serves=serves, is_in_backward=True)

    def _watch_pre_forward(self, group: object, _: Arguments) -> Iterator[None]:
        self._open_slot_on_new_state(_look_up_training_states(_FSDP2_STATES)[0], group)
        yield

    def _open_slot_on_new_state(self, state: enum.Enum, group: Any) -> None:
        # FSDP2 calls pre_forward for each module of a unit (up to torch 2.11, only for the first),
        # and pre_backward for each output. Only the first call changes the state and begins a use.
        if group._training_state != state:
            self._prefetches.open_slot(state, group.modules)

    def _watch_unshard(self, group: Any, _: Arguments) -> Iterator[ActingUnit | None]:
        # A prefetched unit calls unshard again when it is used; this second call gathers nothing.
        prefetched = group._all_gather_result
        if prefetched is not None:
            yield None
            return
        after = group.post_forward_mesh_info  # set_reshard_after_forward() changes it
        if self._meshes.get(group, self) is not after:
            self._meshes[group] = after
            self._groups.learn_mesh_of_unit(group)
            self._memory.track_unit(group, self._nbytes_held_beyond_shard)
        modules, gather = tuple(group.modules), self._prefetches.begin_gather()
        yield ActingUnit(modules, gather=gather)
        result = group._all_gather_result
        # FSDP2 sets the result only if it issued a gather.
        if result is not None:
            nbytes = self._unsharded_nbytes_of_group(group)
            # Only uint8 output may mix dtypes; any other dtype is the dtype of all parameters.
            if result.all_gather_output.dtype is torch.uint8:
                gather.dtypes = result.param_all_gather_input_dtypes
            self._prefetches.note_gather(group, gather)
            self._memory.set_gathered_nbytes(group, nbytes)
            self._on_reshard("unshard", modules, nbytes, 0.0)

    def _watch_wait_for_unshard(self, group: Any, _: Arguments) -> Iterator[None]:
        # In any other state, user code waits for the gather but does not use the unit yet.
        if group._training_state in _look_up_training_states(_FSDP2_STATES):
            self._prefetches.note_use(group)
        yield

    def _watch_free(self, group: object, _: Arguments) -> Iterator[None]:
        if group not in self._meshes:  # otherwise `_watch_unshard` has already done this
            self._memory.track_unit(group, self._nbytes_held_beyond_shard)
        yield
        self._memory.set_gathered_nbytes(group, self._nbytes_held_beyond_shard(group))
        # Forget the freed gather, so that a use in backward is not matched with it: after
        # set_unshard_in_backward(False), backward does not gather the unit again.
        if not self._nbytes_held_for_use(group):
            self._prefetches.note_free(group)

    def _watch_reshard(self, group: Any, _: Arguments) -> Iterator[ActingUnit]:
        state, started = group._sharded_state, time.perf_counter()
        modules = tuple(group.modules)
        yield ActingUnit(modules)
        if group._sharded_state != state:
            seconds = time.perf_counter() - started
            self._on_reshard("reshard", modules, self._unsharded_nbytes_of_group(group), seconds)

    def _watch_handle_all_gather(self, handle: Any, args: Arguments) -> Iterator[ActingUnit]:
        self._memory.track_unit(handle, lambda _: 0)
        modules, gather = (handle._fully_sharded_module,), self._prefetches.begin_gather()
        yield ActingUnit(modules, gather=gather)
        nbytes = _unsharded_nbytes_of_handle(handle, args[0])
        self._prefetches.note_gather(handle, gather)
        self._memory.set_gathered_nbytes(handle, nbytes)
        self._on_reshard("unshard", modules, nbytes, 0.0)

    def _watch_handle_reshard(self, handle: Any, args: Arguments) -> Iterator[ActingUnit]:
        nbytes, modules = _gathered_nbytes_of_handle(handle), (handle._fully_sharded_module,)
        self._memory.track_unit(handle, lambda _: nbytes)
        frees = args[0] and handle.uses_sharded_strategy and not handle.needs_unshard()
        started = time.perf_counter()
        yield ActingUnit(modules)
        if frees:
            seconds = time.perf_counter() - started
            self._memory.set_gathered_nbytes(handle, 0)
            self._on_reshard("reshard", modules, nbytes, seconds)

    def _watch_handle_unshard_grad(self, handle: Any, _: Arguments) -> Iterator[ActingUnit]:
        yield ActingUnit((handle._fully_sharded_module,))

    def _watch_handle_reduce_grad(self, _: object, args: Arguments) -> Iterator[ActingUnit]:
        return self._watch_handle_unshard_grad(args[0], ())

    def _watch_handle_unshard(self, _: object, args: Arguments) -> Iterator[None]:
        # If another unit is acting, it is prefetching this unit, which is not in use yet.
        if not self.acting:
            self._open_slot_if_in_use(args[0])
        yield

    def _watch_prefetch_handle(self, _: object, args: Arguments) -> Iterator[ActingUnit]:
        handle = args[0]
        # FSDP1 calls this whenever it uses a gathered unit, to prefetch the next unit.
        if self._open_slot_if_in_use(handle):
            self._prefetches.note_use(handle)
        yield ActingUnit(() if handle is None else (handle._fully_sharded_module,), serves=False)

    def _open_slot_if_in_use(self, handle: Any) -> bool:
        """Open a slot if the handle's unit is in use; return whether it is."""
        # A unit is not in use after its backward, or while summon_full_params gathers it.
        if handle is None or handle._training_state not in _look_up_training_states(_FSDP1_STATES):
            return False
        self._prefetches.open_slot(handle._training_state, handle)
        return True


def list_watched_methods() -> Iterator[tuple[object, str, Around]]:
    """Yield each FSDP method to wrap: its class or module, its name and its `UnitWatch` wrapper."""
    for holder, name, around in [*_list_fsdp2_methods(), *_list_fsdp1_methods()]:
        if name not in vars(holder):
            module = getattr(holder, "__module__", "")  # Python modules lack this attribute
            moved = f"{module}.{holder.__name__}.{name}".lstrip(".")
            raise upstream.moved_error("torch", moved)
        yield holder, name, around


def find_replaced_methods(groups: Iterable[object]) -> set[str]:
    """Return the names of watched methods that a library has replaced on FSDP2 units."""
    watched = {name for _, name, *_ in _list_fsdp2_methods()}
    return {
        name
        for group in groups
        for name, method in vars(group).items()
        if name in watched and not hasattr(method, IS_WATCHED)
    }


def _list_fsdp2_methods() -> list[tuple[Any, str, Around]]:
    package = "torch.distributed.fsdp._fully_shard"
    state = upstream.look_up(f"{package}._fsdp_state", "FSDPState")
    group = upstream.look_up(f"{package}._fsdp_param_group", "FSDPParamGroup")
    return [
        # Wrap the state's method: it issues explicit prefetches after the group's `pre_backward`.
        (state, "_pre_backward", UnitWatch._watch_state_pre_backward),
        (group, "pre_forward", UnitWatch._watch_pre_forward),
        (group, "unshard", UnitWatch._watch_unshard),
        (group, "wait_for_unshard", UnitWatch._watch_wait_for_unshard),
        (group, "reshard", UnitWatch._watch_reshard),
        (group, "pre_backward", UnitWatch._watch_pre_backward),
        (group, "post_backward", UnitWatch._watch_post_backward),
        # `reshard` calls these two methods, but so do state-dict hooks.
        (group, "_to_sharded", UnitWatch._watch_free),
        (group, "_to_sharded_post_forward", UnitWatch._watch_free),
        # This method frees units that backward prefetched but never used.
        (group, "finalize_backward", UnitWatch._watch_free),
    ]


def _list_fsdp1_methods() -> list[tuple[object, str, Around]]:
    runtime: Any = sys.modules.get("torch.distributed.fsdp._runtime_utils")
    if runtime is None:
        return []
    handle = sys.modules["torch.distributed.fsdp._flat_param"].FlatParamHandle
    return [
        (handle, "_all_gather_flat_param", UnitWatch._watch_handle_all_gather),
        (handle, "unshard_grad", UnitWatch._watch_handle_unshard_grad),
        (handle, "reshard", UnitWatch._watch_handle_reshard),
        (runtime, "_reduce_grad", UnitWatch._watch_handle_reduce_grad),
        (runtime, "_reduce_grad_no_shard", UnitWatch._watch_handle_reduce_grad),
        # Do not wrap _pre_backward_hook: graphs created before the block call the original.
        (runtime, "_unshard", UnitWatch._watch_handle_unshard),
        (runtime, "_prefetch_handle", UnitWatch._watch_prefetch_handle),
    ]


def param_groups(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """Yield each module passed to `fully_shard` with each of its parameter groups."""
    for module in modules:
        # Look at the class: on an nn.Module, a missing attribute is slow to look up.
        get_state = getattr(type(module), "_get_fsdp_state", None)
        if get_state is not None:
            for group in groups_of_state(get_state(module)):
                yield module, group


def registered_parameters(roots: Iterable[nn.Module]) -> Iterator[tuple[torch.Tensor, nn.Module]]:
    """Yield each parameter, sharded and unsharded, with each module that registered it."""
    modules = [module for root in roots for module in root.modules()]
    for module in modules:
        for parameter in direct_parameters(module):
            yield parameter, module
    for _, group in param_groups(modules):
        for managed in group.fsdp_params:
            info = managed._module_info
            for owner in (info.module, *info.shared_modules):
                yield managed.sharded_param, owner
                if hasattr(managed, "_unsharded_param"):  # absent until the first gather
                    yield managed._unsharded_param, owner


def unit_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[Any, torch.Tensor]]:
    """For each FSDP parameter that gets gradients, yield its unit's modules and the parameter."""
    for _, group in param_groups(modules):
        for managed in group.fsdp_params:
            if hasattr(managed, "_unsharded_param"):  # absent until the first gather
                yield group.modules, managed._unsharded_param
    for handle in _list_fsdp1_handles(modules):
        yield (handle._fully_sharded_module,), handle.flat_param


def direct_parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters that are registered directly on a module."""
    for parameter in module._parameters.values():
        # Skip lazy parameters: they have no shape or storage until the first forward.
        if parameter is not None and not is_lazy(parameter):
            yield parameter


def _list_reduced_params_unless_all(group: Any) -> tuple[tuple[nn.Module, str], ...]:
    """Return the `ActingUnit.reduced` of an FSDP2 unit whose backward has just ended."""
    # As in FSDPParamGroup.post_backward of torch 2.7 to 2.15. Since 2.13, a unit may be told to
    # reduce zeros for parameters that were not used.
    reduces_unused = getattr(group, "reduce_scatter_unused_params", False)
    infos = tuple(
        param._module_info
        for param in group.fsdp_params
        if param.unsharded_accumulated_grad is not None
        or (
            hasattr(param, "_unsharded_param")
            and (
                param._unsharded_param.grad is not None
                or (reduces_unused and param._unsharded_param.requires_grad)
            )
        )
    )
    if len(infos) == len(group.fsdp_params):
        return ()
    return tuple((info.module, info.param_name) for info in infos)


def groups_of_state(state: object) -> list[Any]:
    """Return the parameter groups of an FSDP2 state."""
    # Since torch 2.13, a state may have several groups; up to 2.11, it had one.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        raise upstream.moved_error("torch", f"{type(state).__name__}._fsdp_param_groups")
    group = state._fsdp_param_group
    return [] if group is None else [group]


def fsdp_root(module: nn.Module) -> nn.Module | None:
    """Return the FSDP root of a module; None if it is not a unit, or if no unit has run."""
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return None
    try:
        states = get_state()._state_ctx.all_states
        return next((state._modules[0] for state in states if state._is_root), None)
    except AttributeError as problem:
        raise upstream.misread_error("torch", "FSDPState", problem) from problem


def _list_fsdp1_handles(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the handles of FSDP1 wrappers that manage parameters."""
    wrapper = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
    for module in modules:
        if isinstance(module, wrapper) and module._handle is not None:
            yield module._handle


def _unsharded_nbytes_of_handle(handle: Any, padded: torch.Tensor) -> int:
    """Return the bytes of an FSDP1 unit without padding, in the dtype of `padded`."""
    numel: int = sum(handle.flat_param._numels)
    return numel * padded.element_size()


def _unsharded_nbytes_of_params(params: Iterable[Any]) -> int:
    nbytes = [
        param._orig_size.numel() * (param.param_dtype or param.orig_dtype).itemsize
        for param in params
    ]
    return sum(nbytes)


def _gathered_nbytes_of_handle(handle: Any) -> int:
    # Depending on the precision, FSDP1 gathers into one of these two tensors; the first forward
    # creates both.
    for name in ("_full_param_padded", "_full_prec_full_param_padded"):
        padded = getattr(handle.flat_param, name, None)
        if padded is not None and padded.untyped_storage().size():
            return _unsharded_nbytes_of_handle(handle, padded)
    return 0


@functools.cache
def _look_up_training_states(names: str) -> list[enum.Enum]:
    """Return members of a torch enum; `names` is the enum's path, then the members' names."""
    name, *members = names.split()
    module, _, kind = name.rpartition(".")
    return [upstream.look_up(module, f"{kind}.{member}") for member in members]
