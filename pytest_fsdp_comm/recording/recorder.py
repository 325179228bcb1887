"""Records what one rank sends, with one `TorchDispatchMode` and no global hooks."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pytest_fsdp_comm.comm.events import (
    COLLECTIVE_KINDS,
    Collective,
    HostDeviceCopy,
    MeshAxis,
    Recording,
    Redistribution,
    Reshard,
    Source,
    Timing,
)
from pytest_fsdp_comm.comm.questions import NO_NAMES, Names
from pytest_fsdp_comm.recording import flight_recorder
from pytest_fsdp_comm.recording.measuring import (
    TIMING_CATEGORIES,
    collective,
    copy_direction,
    timing_category,
)
from pytest_fsdp_comm.recording.mesh_axes import GroupNames, group_of
from pytest_fsdp_comm.recording.operations import NAMESPACES, Operation, bind, look_up, tensors_in
from pytest_fsdp_comm.recording.owners.ddp import ParameterOwners, ReplicaOwners
from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch, param_groups
from pytest_fsdp_comm.recording.owners.futures import following_callbacks
from pytest_fsdp_comm.recording.owners.module_names import ModuleNames
from pytest_fsdp_comm.recording.owners.place import BackwardMap, Place, attribute
from pytest_fsdp_comm.recording.owners.stack import outermost_module, scan_stack
from pytest_fsdp_comm.recording.redistributions import RedistributionWatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn


@dataclass(slots=True)
class _Raw:
    """An event before its modules and groups have names."""

    event: Collective | Reshard | Redistribution | HostDeviceCopy | None
    """None until the call has returned, and for good if it raised."""
    place: Place
    group: str = ""


class Recorder:
    """One recording: enter, run the code, leave, `finish`."""

    def __init__(self, model: nn.Module | None) -> None:
        """Prepares.

        Args:
            model: Gives the FQNs; None takes the outermost modules that run.
        """
        # Asked now, since the block may destroy the group.
        has_group = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if has_group else 0
        self._world_size = dist.get_world_size() if has_group else 1
        self._backend = str(dist.get_backend()) if has_group else ""
        self._roots: list[nn.Module] = [] if model is None else [model]
        self._has_given_root = model is not None
        self._lacks_root = model is None
        self._raw: list[_Raw] = []
        self._groups = GroupNames()
        self._backward = BackwardMap(ParameterOwners(self._roots))
        self._units = UnitWatch(
            self._note_reshard, self._groups.learn_mesh, self._groups.learn_post_forward
        )
        self._redistributions = RedistributionWatch()
        self._seconds = dict.fromkeys((*TIMING_CATEGORIES, "all"), 0.0)
        self._notes: list[str] = []
        self.unseen = ""
        """What is known to be missing, as a sentence; empty if nothing is."""
        self.names = NO_NAMES
        """What can be asked of the recording; nothing before `finish`."""
        self._is_recording = False
        self._threads: set[int] = {threading.get_ident()}
        self._callback = threading.local()  # .place, while a callback of a future runs
        self._lock = threading.Lock()
        # Looked up for every operation of the block, so by identity and once.
        self._known: dict[Any, object] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Watches while the block runs."""
        self._note_entry_state()
        since_ns = flight_recorder.now_ns()
        self._is_recording = True
        try:
            with (
                self._units.watching(),
                following_callbacks(self._attribute, self._resumed),
                _Mode(self),
            ):
                yield
        finally:
            self._is_recording = False
            self._note_unseen(since_ns)

    @property
    def root(self) -> nn.Module | None:
        """The module that gives plain names; None if no module ran, and after `finish`."""
        return self._roots[0] if self._roots else None

    def finish(self) -> Recording:
        """Names everything and lets go of every module and group.

        Returns:
            The recording.
        """
        names = ModuleNames(self._roots)
        replicas = ReplicaOwners(self._roots)
        self._groups.learn_parameters(self._roots)
        by_type: dict[type, list[Any]] = {
            kind: [] for kind in (Collective, Reshard, Redistribution, HostDeviceCopy)
        }
        axes: dict[str, MeshAxis] = {}
        for raw in self._raw:
            if raw.event is None:
                continue
            changes = _named(raw, names, replicas)
            if isinstance(raw.event, Collective) and raw.group:
                axis = self._groups.axis(raw.group)
                axes[axis.name] = axis
                changes |= {"axis": axis.name, "group_size": axis.size}
            by_type[type(raw.event)].append(_replaced(raw.event, changes))
        self.names = self._what_to_ask(names, by_type[Collective])
        self._raw.clear()
        self._roots.clear()
        return Recording(
            rank=self._rank,
            world_size=self._world_size,
            backend=self._backend,
            torch_version=str(torch.__version__),
            mesh_axes=tuple(axes[name] for name in sorted(axes)),
            collectives=tuple(by_type[Collective]),
            reshards=tuple(by_type[Reshard]),
            redistributions=tuple(by_type[Redistribution]),
            copies=tuple(by_type[HostDeviceCopy]),
            timings=tuple(Timing(category=name, seconds=s) for name, s in self._seconds.items()),
            notes=tuple(self._notes),
        )

    def _what_to_ask(self, names: ModuleNames, recorded: Sequence[Collective]) -> Names:
        """The names to ask for; taken after the axes were named, which this must not change."""
        modules = (module for root in self._roots for module in root.modules())
        units = [unit for module in modules for unit in param_groups(module)]
        if dist.is_initialized():  # the block may have destroyed it
            for unit in units:
                self._units.learn_groups(unit)
        groups, axes = self._groups.known()
        owners = {names.joined(tuple(unit.modules)) for unit in units}
        owners |= {event.owner for event in recorded}
        return Names(
            modules=names.children(),
            owners=frozenset(names.all_fqns()).union(name for name in owners if name is not None),
            axes=axes.union(event.axis for event in recorded),
            groups=groups,
            kinds=frozenset(event.kind for event in recorded).difference(COLLECTIVE_KINDS),
            has_model=self._has_given_root,
        )

    # Called by the mode.

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs one operation, and records it if it communicates or copies."""
        if self._lacks_root:
            self._look_for_root()
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = _classify(func)
        # Without grad mode too: an autograd.Function has made its node when its forward runs so.
        self._backward.note_operation()
        if known is _COPY:
            direction = copy_direction(func, args, kwargs)
            if direction is not None:
                return self._run_copy(direction, func, args, kwargs)
        elif isinstance(known, Operation):
            return self._run_collective(known, func, args, kwargs)
        return func(*args, **kwargs)

    def _run_collective(
        self, operation: Operation, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        self._threads.add(threading.get_ident())
        place = self._attribute(func.namespace)
        bound = bind(func, args, kwargs)
        index = self._reserve(place)
        started = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - started
            self._add_seconds(timing_category(operation.kind, place.source), seconds)
        group = group_of(bound)
        event = collective(operation, func, bound, result, (index, place))
        with self._lock:
            if not self._is_recording:  # the block ended while a callback's collective ran
                return result
            self._raw[index].event = event
            self._raw[index].group = self._groups.note(group) if group is not None else ""
        redistribution = self._redistributions.begun(place.scan, self._groups.learn_mesh)
        if redistribution is not None:
            at = self._reserve(place)
            self._raw[at].event = redistribution.event(at, place)
        return result

    def _run_copy(
        self, direction: Literal["H2D", "D2H"], func: Any, args: Sequence[Any], kwargs: Any
    ) -> Any:
        place = self._attribute()
        index = self._reserve(place)
        started = time.perf_counter()
        result = func(*args, **kwargs)
        self._add_seconds(direction, time.perf_counter() - started)
        self._raw[index].event = HostDeviceCopy(
            index=index,
            direction=direction,
            owner=None,
            phase=place.phase,
            nbytes=sum(tensor.nbytes for tensor in tensors_in(result)),
            call_site=place.scan.call_site,
        )
        return result

    def _reserve(self, place: Place) -> int:
        """Takes the next index before the call: what the call itself causes comes after it."""
        with self._lock:  # callbacks record from other threads
            self._raw.append(_Raw(None, place))
            return len(self._raw) - 1

    def _note_reshard(
        self, action: str, modules: tuple[nn.Module, ...], nbytes: int, seconds: float
    ) -> None:
        place = self._attribute()
        if action == "reshard":
            self._add_seconds("resharding", seconds)
        owned = Place(modules, place.issued_in, place.phase, Source.FSDP, place.scan)
        index = self._reserve(owned)
        self._raw[index].event = Reshard(
            index=index,
            action="unshard" if action == "unshard" else "reshard",
            module="",
            issued_in=None,
            phase=place.phase,
            nbytes=nbytes,
        )

    @contextlib.contextmanager
    def _resumed(self, place: Place) -> Iterator[None]:
        """Records a callback on any thread as part of the place that registered it."""
        before = getattr(self._callback, "place", None)
        self._callback.place = place
        try:
            with contextlib.ExitStack() as stack:
                if self._is_recording and not _is_watched():
                    stack.enter_context(_Mode(self))
                yield
        finally:
            self._callback.place = before

    def _attribute(self, namespace: str = "") -> Place:
        inherited: Place | None = getattr(self._callback, "place", None)
        if inherited is not None:
            return dataclasses.replace(inherited, scan=scan_stack())
        place = attribute(self._units, self._backward, namespace)
        outermost = place.scan.outermost
        place.scan.outermost = None
        place.scan.modules = place.scan.modules[:1]
        if not self._has_given_root and outermost is not None:
            self._add_root(outermost)
        return place

    def _look_for_root(self) -> None:
        """Finds a root at the first operation: DDP sends in backward only, where none runs."""
        outermost = outermost_module()
        if outermost is not None:
            self._add_root(outermost)

    def _add_root(self, module: nn.Module) -> None:
        if not any(module is known for root in self._roots for known in root.modules()):
            # A module that contains an earlier root takes its place.
            inside = {id(child) for child in module.modules()}
            self._lacks_root = False
            # In place, since others hold the list.
            self._roots[:] = [module if id(root) in inside else root for root in self._roots]
            if not any(root is module for root in self._roots):
                self._roots.append(module)

    def _add_seconds(self, category: str | None, seconds: float) -> None:
        self._seconds["all"] += seconds
        if category is not None:
            self._seconds[category] += seconds

    def _note_entry_state(self) -> None:
        unsharded = [
            name or "(root)"
            for root in self._roots
            for name, module in root.named_modules()
            for group in param_groups(module)
            if group.is_unsharded
        ]
        if unsharded:
            self._notes.append(
                "already unsharded when the recording began, so that its first all-gather is "
                f"missing: {', '.join(unsharded)}"
            )

    def _note_unseen(self, since_ns: int) -> None:
        unseen = flight_recorder.unseen(since_ns=since_ns, seen_threads=self._threads)
        if unseen:
            threads = "; ".join(
                f"{thread}: {', '.join(f'{kind} {count}' for kind, count in kinds.items())}"
                for thread, kinds in unseen.items()
            )
            count = sum(kinds.total() for kinds in unseen.values())
            self.unseen = (
                f"{count} collectives of other threads are missing, since a recording covers the "
                f"thread that entered it ({threads}, as the flight recorder names them)"
            )
            self._notes.append(self.unseen)


def _is_watched() -> bool:
    """Whether a recording's mode is active on this thread."""
    # Read in torch 2.6 to 2.15; a tested contract.
    return any(isinstance(mode, _Mode) for mode in _get_current_dispatch_mode_stack())


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Sees every operation below autograd."""

    # Without it a higher-order operator in the block raises.
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keeps torch.compile on under this mode (torch 2.9.1 and newer)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(kind.__name__ == "DTensor" for kind in types):
            # DTensor first turns into local operations and collectives, which come back here.
            return NotImplemented
        return self._recorder.run(func, args, kwargs or {})


def _named(raw: _Raw, names: ModuleNames, replicas: ReplicaOwners) -> dict[str, Any]:
    place = raw.place
    is_replica = place.source is Source.DDP
    owner = names.joined(replicas.owner(place.issued_in) if is_replica else place.owner)
    issued_in = names.joined(place.issued_in[:1])
    if isinstance(raw.event, Reshard):
        return {"module": owner if owner is not None else "", "issued_in": issued_in}
    if isinstance(raw.event, HostDeviceCopy):
        return {"owner": owner}
    return {"owner": owner, "issued_in": issued_in}


def _replaced(event: Any, changes: dict[str, Any]) -> Any:
    return dataclasses.replace(event, **changes)


# How an operation is treated that does not communicate.
_COPY: Final = "copy"
_SILENT: Final = "silent"


def _classify(func: Any) -> object:
    """The `Operation` of a collective; otherwise one of the two marks above."""
    namespace = getattr(func, "namespace", None)
    if namespace in NAMESPACES:
        return look_up(func) or _SILENT
    is_copy = namespace == "aten" and func.overloadpacket.__name__ in {"_to_copy", "copy_"}
    return _COPY if is_copy else _SILENT
