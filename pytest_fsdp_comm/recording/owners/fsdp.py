"""Watch FSDP's own units: what each sends, reshards, gathers ahead of its use, and holds."""

# Note [Acting units]
# torch's profiler labels carry the owner too, but their FQNs are relative to the FSDP root, empty
# with several roots or none, and absent before lazy initialisation. So the methods that issue
# collectives are watched, for the time of the recording only. Those that run now are a stack: the
# innermost that serves its own unit owns what is sent, the outermost is where it was issued, and
# under prefetch the two differ. Names and arguments were read in torch 2.6, 2.9, 2.11 and 2.13;
# tests/recording/test_contracts.py fails when one moves.

# Note [Reshard after forward]
# With reshard_after_forward=<int> a unit is kept over a smaller group between forward and backward:
# it holds 1/<int> of its bytes beyond its shard, and its backward gathers over that group, whose
# mesh torch leaves without names. mesh_axes.py names it after the axis that it is a part of.

# Note [Counting slots]
# Distance is counted in slots, not in time or bytes: each use of a unit, in forward or in backward,
# opens the next slot. A gather that a unit issues for itself has distance 0; one that is issued
# while the unit before it is used, 1. The count follows from the order of the calls alone, so that
# it is the same on every rank, on every backend and in every run.

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
"""An attribute of the functions that stand in for FSDP's."""

ReshardAction = Literal["unshard", "reshard"]

# The states of a unit that is used in forward, and in backward.
_FSDP1_STATES = "torch.distributed.fsdp._common_utils.HandleTrainingState FORWARD BACKWARD_PRE"
_FSDP2_STATES = (
    "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState FORWARD PRE_BACKWARD"
)


@dataclass(slots=True, eq=False)
class Gather:
    """One gather of a unit's parameters: what its events have in common, until they are named."""

    slot: int
    ahead: int | None = None
    """How many slots later its unit was used; None until then."""
    dtypes: list[list[Any]] = field(default_factory=list)
    """What FSDP2 gathers of each parameter, and sends as uint8 if they differ; else empty."""


class Prefetches:
    """Count slots, and the distance of each gather from its use. See Note [Counting slots]."""

    def __init__(self) -> None:
        self._slot = 0
        self._user: tuple[Any, Any] = (None, None)
        self._unused: dict[Any, Gather] = {}

    def open_slot(self, phase: Any, user: Any) -> None:
        """Open the next slot, unless the last one is of the same user in the same phase."""
        # So that the parameter groups of one module open one slot, as do calls of one module that
        # follow each other (a loss in chunks). By identity: modules may define equality.
        last_phase, last_user = self._user
        if phase != last_phase or user is not last_user:
            self._slot += 1
            self._user = (phase, user)

    def begin(self) -> Gather:
        return Gather(self._slot)

    def issued(self, unit: Any, gather: Gather) -> None:
        self._unused[unit] = gather

    def used(self, unit: Any) -> None:
        """A unit's parameters are used; only the first use of a gather counts."""
        gather = self._unused.pop(unit, None)
        if gather is not None:
            gather.ahead = self._slot - gather.slot

    def freed(self, unit: Any) -> None:
        """A unit's parameters were freed: if nothing has used them by now, nothing will."""
        self._unused.pop(unit, None)


class GatheredMemory:
    """Follow what each unit holds beyond its own shard, and keep the largest sum."""

    def __init__(self) -> None:
        self._nbytes: dict[Any, int] = {}
        self._total = 0
        self.peak = 0

    def learn(self, unit: Any, held: Callable[[Any], int]) -> None:
        """Add a unit that is not known yet, just before its first change or when all is over."""
        # What it holds by then, it has held all the time: the peak rises by it, whenever the peak
        # was. A step therefore has the same peak whether it gathers the root, or finds it gathered
        # by an earlier forward.
        if unit not in self._nbytes:
            nbytes = self._nbytes[unit] = held(unit)
            self._total += nbytes
            self.peak += nbytes

    def hold(self, unit: Any, nbytes: int) -> None:
        """Note what a known unit holds from now on; 0 if only its own shard."""
        self._total += nbytes - self._nbytes[unit]
        self._nbytes[unit] = nbytes
        self.peak = max(self.peak, self._total)


@dataclass(slots=True)
class ActingUnit:
    """A unit with a method that runs now. See Note [Acting units]."""

    modules: tuple[nn.Module, ...]
    serves: bool = True
    """Whether it sends for its own parameters; False while it only triggers others' prefetch."""
    is_in_backward: bool = False
    """Whether the method belongs to backward. A pipeline schedule calls it outside of autograd."""
    gather: Gather | None = None
    attribution: Any = None
    """The `Attribution` of all that happens in the method, once something has; None before."""
    thread: int = field(default_factory=threading.get_ident)


Arguments = tuple[Any, ...]
"""What a method of FSDP is given, but for what it is a method of, in the order of the call."""

Around = Callable[["UnitWatch", Any, Arguments], "Iterator[ActingUnit | None]"]
"""A method of `UnitWatch` that is given what a method of FSDP is: yields the unit that acts, and
goes on while that still acts, unless the method of FSDP has failed."""


class UnitWatch:
    """Watch which FSDP units act at each moment. See Note [Acting units]."""

    def __init__(
        self,
        on_reshard: Callable[[ReshardAction, tuple[nn.Module, ...], int, float], None],
        groups: GroupNames,
    ) -> None:
        """Prepare to call `on_reshard` as a unit's state changes; `groups` learns their meshes.

        It is given the unit's modules and bytes, and a reshard's host seconds: 0.0 for an unshard.
        """
        self.acting: list[ActingUnit] = []
        """The units with a method that runs, outermost first."""
        self.running: set[tuple[str, int]] = set()
        """The watched methods that run: the name of each, and the ``id`` of its object."""
        self._on_reshard = on_reshard
        self._groups = groups
        self._prefetches = Prefetches()
        self._memory = GatheredMemory()
        self._unsharded_nbytes: dict[Any, int] = {}
        # Of each unit of FSDP2 that was gathered, the mesh over which forward leaves it.
        self._known: dict[Any, Any] = {}

    @property
    def owner(self) -> tuple[nn.Module, ...]:
        """The modules of the unit whose parameters are being sent; empty if none is."""
        for unit in reversed(self.acting):
            if unit.serves:
                return unit.modules
        return ()

    @property
    def issuer(self) -> tuple[nn.Module, ...]:
        """The modules of the unit whose hook runs, which under prefetch is not the owner."""
        return self.acting[0].modules if self.acting else ()

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward hook of a unit runs."""
        return any(unit.is_in_backward for unit in self.acting)

    @property
    def gather(self) -> Gather | None:
        return self.acting[-1].gather if self.acting else None

    def peak_gathered_nbytes(self, groups: Iterable[Any], modules: Iterable[nn.Module]) -> int:
        """The most bytes of parameters that were gathered at once in the block.

        Given are the parameter groups of FSDP2, and all modules.
        """
        # Units that were gathered all the time, without any change, count too.
        for group in groups:
            self._memory.learn(group, self._gathered_nbytes)
        for handle in _handles_of(modules):
            self._memory.learn(handle, _gathered_nbytes_of_handle)
        return self._memory.peak

    def _nbytes_of(self, group: Any) -> int:
        """Bytes of a unit of FSDP2 when it is gathered."""
        # Kept, since each change needs it. Dtypes are settled by the time of the first gather.
        found = self._unsharded_nbytes.get(group)
        if found is None:
            found = self._unsharded_nbytes[group] = _gathered_nbytes_of(group.fsdp_params)
        return found

    def _gathered_nbytes(self, group: Any) -> int:
        """What a unit of FSDP2 holds beyond its own shard."""
        used = self._used_nbytes(group)
        # Of a unit that never ran, the dtypes are not settled.
        if used and used == self._nbytes_of(group):
            return used
        # What is not used is gathered again, into the same storage; new in torch 2.15.
        return used + _gathered_nbytes_of(
            param
            for param in group.fsdp_params
            if getattr(param, "keep_unsharded_storage", False)
            and any(tensor.untyped_storage().size() for tensor in param.all_gather_outputs)
        )

    def _used_nbytes(self, group: Any) -> int:
        """What of it a use of the unit would not gather."""
        if group.is_unsharded or group._all_gather_result is not None:
            return self._nbytes_of(group)
        after = group.post_forward_mesh_info
        if group.is_sharded_post_forward and after is not None:
            # Logical bytes, as everywhere: without the padding that lets every rank have as much.
            return self._nbytes_of(group) // int(after.shard_mesh_size)
        return 0

    def forget(self) -> None:
        """Let go of all units: graphs that outlive the block keep this object alive."""
        self._prefetches = Prefetches()
        self._memory = GatheredMemory()
        self._unsharded_nbytes.clear()
        self._known.clear()

    def _before_backward(self, state: Any, _: Arguments) -> Iterator[ActingUnit]:
        yield ActingUnit(tuple(state._modules), serves=False, is_in_backward=True)

    def _trigger_in_backward(self, group: Any, _: Arguments) -> Iterator[ActingUnit]:
        self._use(_states(_FSDP2_STATES)[1], group)
        yield self._in_backward(group, serves=False)

    def _serve_in_backward(self, group: Any, _: Arguments) -> Iterator[ActingUnit]:
        yield self._in_backward(group, serves=True)

    def _in_backward(self, group: Any, *, serves: bool) -> ActingUnit:
        if group not in self._known:
            self._groups.learn_mesh(group.mesh_info.mesh)
        return ActingUnit(tuple(group.modules), serves=serves, is_in_backward=True)

    def _use_in_forward(self, group: Any, _: Arguments) -> Iterator[None]:
        self._use(_states(_FSDP2_STATES)[0], group)
        yield

    def _use(self, state: enum.Enum, group: Any) -> None:
        # Otherwise the unit is in use already, and this is for another of its modules, or of their
        # outputs. Until torch 2.11 only the first module comes here.
        if group._training_state != state:
            self._prefetches.open_slot(state, group.modules)

    def _unshard(self, group: Any, _: Arguments) -> Iterator[ActingUnit | None]:
        # It is asked for again where its gather was prefetched, which does nothing.
        prefetched = group._all_gather_result
        if prefetched is not None:
            yield None
            return
        after = group.post_forward_mesh_info  # set_reshard_after_forward() changes it
        if self._known.get(group, self) is not after:
            self._known[group] = after
            self._groups.learn_unit(group)
            self._memory.learn(group, self._gathered_nbytes)
        modules, gather = tuple(group.modules), self._prefetches.begin()
        yield ActingUnit(modules, gather=gather)
        result = group._all_gather_result
        # Set by a gather that was really issued, and only then.
        if result is not None:
            nbytes = self._nbytes_of(group)
            # Otherwise all are what was sent: a list for each parameter less to keep.
            if result.all_gather_output.dtype is torch.uint8:
                gather.dtypes = result.param_all_gather_input_dtypes
            self._prefetches.issued(group, gather)
            self._memory.hold(group, nbytes)
            self._on_reshard("unshard", modules, nbytes, 0.0)

    def _wait(self, group: Any, _: Arguments) -> Iterator[None]:
        # Otherwise user code waits, which is no use of the unit yet.
        if group._training_state in _states(_FSDP2_STATES):
            self._prefetches.used(group)
        yield

    def _free(self, group: Any, _: Arguments) -> Iterator[None]:
        if group not in self._known:  # otherwise its gather has
            self._memory.learn(group, self._gathered_nbytes)
        yield
        self._memory.hold(group, self._gathered_nbytes(group))
        # Its next use may gather nothing: backward does without a unit that it does not need
        # (set_unshard_in_backward).
        if not self._used_nbytes(group):
            self._prefetches.freed(group)

    def _reshard(self, group: Any, _: Arguments) -> Iterator[ActingUnit]:
        state, started = group._sharded_state, time.perf_counter()
        modules = tuple(group.modules)
        yield ActingUnit(modules)
        if group._sharded_state != state:
            seconds = time.perf_counter() - started
            self._on_reshard("reshard", modules, self._nbytes_of(group), seconds)

    def _gather_handle(self, handle: Any, given: Arguments) -> Iterator[ActingUnit]:
        self._memory.learn(handle, lambda _: 0)
        modules, gather = (handle._fully_sharded_module,), self._prefetches.begin()
        yield ActingUnit(modules, gather=gather)
        nbytes = _unsharded_nbytes_of_handle(handle, given[0])
        self._prefetches.issued(handle, gather)
        self._memory.hold(handle, nbytes)
        self._on_reshard("unshard", modules, nbytes, 0.0)

    def _reshard_handle(self, handle: Any, given: Arguments) -> Iterator[ActingUnit]:
        held, modules = _gathered_nbytes_of_handle(handle), (handle._fully_sharded_module,)
        self._memory.learn(handle, lambda _: held)
        frees = given[0] and handle.uses_sharded_strategy and not handle.needs_unshard()
        started = time.perf_counter()
        yield ActingUnit(modules)
        if frees:
            seconds = time.perf_counter() - started
            self._memory.hold(handle, 0)
            self._on_reshard("reshard", modules, held, seconds)

    def _serve_handle(self, handle: Any, _: Arguments) -> Iterator[ActingUnit]:
        yield ActingUnit((handle._fully_sharded_module,))

    def _serve_second(self, _: Any, given: Arguments) -> Iterator[ActingUnit]:
        return self._serve_handle(given[0], ())

    def _unshard_handle(self, _: Any, given: Arguments) -> Iterator[None]:
        # While another unit acts, it prefetches this one.
        if not self.acting:
            self._open_slot_of_handle(given[0])
        yield

    def _prefetch_handle(self, _: Any, given: Arguments) -> Iterator[ActingUnit]:
        handle = given[0]
        # Each use of a unit, after it was gathered, also looks for what it should prefetch.
        if self._open_slot_of_handle(handle):
            self._prefetches.used(handle)
        yield ActingUnit(() if handle is None else (handle._fully_sharded_module,), serves=False)

    def _open_slot_of_handle(self, handle: Any) -> bool:
        """Open the slot in which a unit is used; returns whether it is used at all."""
        # Not after its backward, nor in summon_full_params.
        if handle is None or handle._training_state not in _states(_FSDP1_STATES):
            return False
        self._prefetches.open_slot(handle._training_state, handle)
        return True


def watched_methods() -> Iterator[tuple[Any, str, Around]]:
    """Each method of FSDP's units by its holder and name, and what `UnitWatch` does around it."""
    for holder, name, around in [*_fsdp2(), *_fsdp1()]:
        if name not in vars(holder):
            module = getattr(holder, "__module__", "")  # a module itself has none
            moved = f"{module}.{holder.__name__}.{name}".lstrip(".")
            raise upstream.moved_error("torch", moved)
        yield holder, name, around


def replaced_methods(groups: Iterable[Any]) -> set[str]:
    """Names of the watched methods that a library has replaced on groups themselves."""
    watched = {name for _, name, *_ in _fsdp2()}
    return {
        name
        for group in groups
        for name, method in vars(group).items()
        if name in watched and not hasattr(method, IS_WATCHED)
    }


def _fsdp2() -> list[tuple[Any, str, Around]]:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import (  # noqa: PLC0415  # loads torch.distributed
        FSDPParamGroup,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import (  # noqa: PLC0415  # see above
        FSDPState,
    )

    return [
        # Around the group's own: explicit prefetch is issued after that has returned.
        (FSDPState, "_pre_backward", UnitWatch._before_backward),
        (FSDPParamGroup, "pre_forward", UnitWatch._use_in_forward),
        (FSDPParamGroup, "unshard", UnitWatch._unshard),
        (FSDPParamGroup, "wait_for_unshard", UnitWatch._wait),
        (FSDPParamGroup, "reshard", UnitWatch._reshard),
        (FSDPParamGroup, "pre_backward", UnitWatch._trigger_in_backward),
        (FSDPParamGroup, "post_backward", UnitWatch._serve_in_backward),
        # Called by `reshard`, but by the hooks of state dicts too.
        (FSDPParamGroup, "_to_sharded", UnitWatch._free),
        (FSDPParamGroup, "_to_sharded_post_forward", UnitWatch._free),
        # Drops what backward prefetched for nothing.
        (FSDPParamGroup, "finalize_backward", UnitWatch._free),
    ]


def _fsdp1() -> list[tuple[Any, str, Around]]:
    runtime: Any = sys.modules.get("torch.distributed.fsdp._runtime_utils")
    if runtime is None:
        return []
    handle = sys.modules["torch.distributed.fsdp._flat_param"].FlatParamHandle
    return [
        (handle, "_all_gather_flat_param", UnitWatch._gather_handle),
        (handle, "unshard_grad", UnitWatch._serve_handle),
        (handle, "reshard", UnitWatch._reshard_handle),
        (runtime, "_reduce_grad", UnitWatch._serve_second),
        (runtime, "_reduce_grad_no_shard", UnitWatch._serve_second),
        # Not _pre_backward_hook: a graph made before the block has captured the original.
        (runtime, "_unshard", UnitWatch._unshard_handle),
        (runtime, "_prefetch_handle", UnitWatch._prefetch_handle),
    ]


def param_groups(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """FSDP2's parameter groups of the modules that are units of their own, and these modules."""
    for module in modules:
        # Of the class: a module that has no such attribute is slow to say so.
        get_state = getattr(type(module), "_get_fsdp_state", None)
        if get_state is not None:
            for group in groups_of_state(get_state(module)):
                yield module, group


def registered_parameters(roots: Iterable[nn.Module]) -> Iterator[tuple[torch.Tensor, nn.Module]]:
    """Each parameter with each module that registered it, also where FSDP puts another one."""
    modules = [module for root in roots for module in root.modules()]
    for module in modules:
        for parameter in own_parameters(module):
            yield parameter, module
    for _, group in param_groups(modules):
        for managed in group.fsdp_params:
            info = managed._module_info
            for owner in (info.module, *info.shared_modules):
                yield managed.sharded_param, owner
                if hasattr(managed, "_unsharded_param"):  # not before the first gather
                    yield managed._unsharded_param, owner


def unit_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The modules of each unit, with each parameter to whose gradient its backward adds."""
    for _, group in param_groups(modules):
        for managed in group.fsdp_params:
            if hasattr(managed, "_unsharded_param"):  # not before the first gather
                yield group.modules, managed._unsharded_param
    for handle in _handles_of(modules):
        yield (handle._fully_sharded_module,), handle.flat_param


def own_parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters that a module registered itself."""
    for parameter in module._parameters.values():
        # That of a lazy module has neither shape nor bytes before its first forward.
        if parameter is not None and not is_lazy(parameter):
            yield parameter


def groups_of_state(state: Any) -> list[Any]:
    """The parameter groups of a state of FSDP2."""
    # New in torch 2.13; to 2.11 a state had one group.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def fsdp_root(module: nn.Module) -> nn.Module | None:
    """The root above a unit of FSDP2; None if it is no unit, or none of its model has run yet."""
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return None
    try:
        states = get_state()._state_ctx.all_states
        return next((state._modules[0] for state in states if state._is_root), None)
    except AttributeError as problem:
        raise upstream.misread_error("torch", "FSDPState", problem) from problem


def _handles_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The handles of those that are wrappers of FSDP1 with parameters of their own."""
    wrapper = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
    for module in modules:
        if isinstance(module, wrapper) and module._handle is not None:
            yield module._handle


def _unsharded_nbytes_of_handle(handle: Any, padded: torch.Tensor) -> int:
    """Bytes of a unit's parameters in FSDP1, without padding, in the dtype of what gathers them."""
    numel: int = sum(handle.flat_param._numels)
    return numel * padded.element_size()


def _gathered_nbytes_of(params: Iterable[Any]) -> int:
    nbytes = [
        param._orig_size.numel() * (param.param_dtype or param.orig_dtype).itemsize
        for param in params
    ]
    return sum(nbytes)


def _gathered_nbytes_of_handle(handle: Any) -> int:
    # Where the unit is gathered, in mixed and in full precision. Its first forward makes them.
    for name in ("_full_param_padded", "_full_prec_full_param_padded"):
        padded = getattr(handle.flat_param, name, None)
        if padded is not None and padded.untyped_storage().size():
            return _unsharded_nbytes_of_handle(handle, padded)
    return 0


@functools.cache
def _states(names: str) -> list[enum.Enum]:
    """Members of an enum of torch, in `names` the enum's name and theirs, by spaces."""
    name, *members = names.split()
    module, _, kind = name.rpartition(".")
    states = upstream.look_up(module, kind)
    for member in members:
        if not hasattr(states, member):
            raise upstream.moved_error("torch", f"{name}.{member}")
    return [getattr(states, member) for member in members]
