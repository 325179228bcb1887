"""Record what one rank sends, with one `TorchDispatchMode` and no global hooks."""

# Note [Subclasses pass through]
# A mode sees an operation before a tensor subclass does, and would record what the subclass then
# does otherwise. So DTensor and other wrappers are let through (NotImplemented): what they make of
# the operation comes back here on the tensors that they hold. A class with code of its own that
# nobody can take apart is let through too, but a collective that it is given is recorded as it is
# unless a second mode, entered just for it, sees the class send something in its place.

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pytest_fsdp_comm.comm.events import (
    COLLECTIVE_KINDS,
    Collective,
    Gap,
    HostDeviceCopy,
    Recording,
    Redistribution,
    Reshard,
    Source,
    Timing,
)
from pytest_fsdp_comm.comm.mesh import merge_axes
from pytest_fsdp_comm.comm.questions import Names
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.recording.mesh_axes import GroupNames, group_of, own_world
from pytest_fsdp_comm.recording.module_trace import ModuleTrace, ModuleTracer, untraced
from pytest_fsdp_comm.recording.operations import (
    NAMESPACES,
    TIMING_CATEGORIES,
    Operation,
    bind,
    copy_direction,
    look_up,
    may_copy,
    messages,
    parts_sent,
    shows_async,
    tensors_in,
    timing_category,
)
from pytest_fsdp_comm.recording.owners.attribution import (
    Attribution,
    BackwardMap,
    OwnerNames,
    attribute,
    attribute_on_thread,
)
from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch, fsdp_root, param_groups
from pytest_fsdp_comm.recording.owners.futures import following_callbacks
from pytest_fsdp_comm.recording.owners.stack import running_modules, scan_stack
from pytest_fsdp_comm.recording.pending import Event, Pending
from pytest_fsdp_comm.recording.redistributions import RedistributionWatch
from pytest_fsdp_comm.recording.subclasses import Dispatch, Subclasses, is_dtensor_class
from pytest_fsdp_comm.recording.threads import following_threads
from pytest_fsdp_comm.recording.value_dependence import ValueReads, reads_values
from pytest_fsdp_comm.recording.witness import Witness
from pytest_fsdp_comm.text.counts import counted
from pytest_fsdp_comm.text.fqn import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_fsdp_comm.comm.events import Phase
    from pytest_fsdp_comm.recording.owners.fsdp import ReshardAction
    from pytest_fsdp_comm.recording.owners.stack import StackScan

    _Run = Callable[[Any, Sequence[Any], dict[str, Any], "_ModeBelow | None"], Any]
    _Trace = Callable[[Any, Sequence[Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlock:
    """What is known of a block."""

    recording: Recording
    names: Names
    roots: tuple[weakref.ref[nn.Module], ...]
    """Names are relative to these, plain in the first; weak, so as to keep no model alive."""
    trace: ModuleTrace


# How an operation is treated that does not communicate. One that shows values of tensors to Python
# ("read") is of interest on the fake group only.
_NoCollective = Literal["copy", "read", "silent"]


class Recorder:
    """One recording: enter `watching`, run the code, leave, `finish`."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        backward: BackwardMap,
        earlier_roots: Sequence[weakref.ref[nn.Module]] = (),
        *,
        traces_operations: bool,
    ) -> None:
        """Prepare to name modules relative to `models`, or to the outermost ones that run.

        `backward` knows nodes of earlier blocks, `earlier_roots` hold what acts only in backward.
        """
        # Now, since the block may destroy the group.
        self._rank, self._world_size, self._backend = own_world()
        self._roots: list[nn.Module] = list(models)
        self._earlier_roots = earlier_roots
        self._has_given_root = bool(models)
        self._lacks_root = not models
        # The given models without a module that has run, each with the ids of its modules.
        self._idle = [(model, set(map(id, model.modules()))) for model in models]
        # An index is taken before the call: what the call itself causes comes after it.
        self._indices = itertools.count()
        self._pending: list[Pending[Any]] = []
        self._groups = GroupNames()
        self._backward = backward
        self._units = UnitWatch(self._note_reshard, self._groups)
        self._tracer = ModuleTracer(self._backward, self._units) if traces_operations else None
        self._redistribution_watch = RedistributionWatch(self._groups)
        self._seconds = dict.fromkeys((*TIMING_CATEGORIES, "all"), 0.0)
        self._notes: list[str] = []
        self._witness = Witness()
        self._reads = ValueReads(self._where) if self._backend == "fake" else None
        self._is_recording = False
        # .is_followed on a thread that was started in the block or runs a callback of it, which has
        # .attribution while it does.
        self._here = threading.local()
        self._lock = threading.Lock()  # other threads record too
        # Looked up for every operation of the block, so once, and by identity: torch's operations
        # hash slowly. Each is kept, so that its identity stays its own.
        self._known: dict[int, Operation | _NoCollective] = {}
        self._classified: list[Any] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self._note_entry_state()
        self._backward.begin(self._roots)
        self._is_recording = True
        try:
            with (
                self._units.watching(),
                following_callbacks(self._attribute, self._resumed),
                following_threads(self._watching_thread),
                contextlib.nullcontext() if self._reads is None else self._reads.watching(),
                _Mode(self.run, None if self._tracer is None else self._tracer.note),
            ):
                yield
        finally:
            self._witness.note_running_threads()
            with self._lock:
                self._is_recording = False
            self._witness.end(self._all(Collective))
            self._note_lost_owners()

    def finish(self) -> RecordedBlock:
        """Name everything, and keep no module and no group."""
        block = self._named()
        self._pending.clear()
        self._units.forget()
        self._backward.end()
        self._roots.clear()
        self._idle.clear()
        self._tracer = None
        return block

    def so_far(self) -> RecordedBlock:
        """Name what was recorded up to now, and leave the block as it is."""
        roots, lacks_root = [*self._roots], self._lacks_root
        with self._groups.unchanged():
            block = self._named()
        self._roots[:], self._lacks_root = roots, lacks_root
        return block

    def _all(self, record: type[Event]) -> list[Pending[Event]]:
        return [entry for entry in self._pending if entry.record is record]

    def _named(self) -> RecordedBlock:
        if not self._backend:  # unless the block has made the group
            self._rank, self._world_size, self._backend = own_world()
        if not self._has_given_root:
            self._learn_roots()
        names = OwnerNames(self._roots, are_parts=self._has_given_root)
        self._groups.learn_parameters(self._roots)
        # By index: an event is held when its call returns, after what the call itself caused.
        pending = sorted(self._pending, key=attrgetter("index"))
        axes = self._groups.axes(entry.group for entry in pending if entry.group is not None)

        def named(record: type[Event]) -> tuple[Event, ...]:
            return tuple(entry.named(names, axes) for entry in pending if entry.record is record)

        collectives = named(Collective)
        gaps, notes = self._gaps(axes)
        recording = Recording(
            rank=self._rank,
            world_size=self._world_size,
            backend=self._backend,
            torch_version=str(torch.__version__),
            mesh_axes=merge_axes(axes.values()),
            shows_async=shows_async(),
            collectives=collectives,
            reshards=named(Reshard),
            redistributions=named(Redistribution),
            copies=named(HostDeviceCopy),
            timings=tuple(Timing(category=name, seconds=s) for name, s in self._seconds.items()),
            notes=(*self._notes, *notes, *(gap.text for gap in gaps)),
            peak_gathered_nbytes=self._units.peak_gathered_nbytes(self._roots),
            gaps=gaps,
        )
        owners = {event.owner for event in collectives if event.owner is not None}
        return RecordedBlock(
            recording=recording,
            names=self._names_to_query(names, collectives, axes),
            roots=tuple(map(weakref.ref, self._roots)),
            trace=(untraced if self._tracer is None else self._tracer.result)(
                self._roots, names.modules, owners
            ),
        )

    def _gaps(self, used_groups: Iterable[str]) -> tuple[tuple[Gap, ...], Sequence[str]]:
        """What is known to be missing, and notes; only after the axes were named."""
        if self._is_recording:
            return (), ()
        unseen = self._witness.gaps(lambda: self._groups.known(used_groups)[0])
        of_values = () if self._reads is None else self._reads.gaps
        return (*unseen, *of_values, *self._idle_gaps()), self._witness.notes

    def _idle_gaps(self) -> Iterator[Gap]:
        """The given models that did not run, where modules of others sent something."""
        # Clipping, an optimizer's step or a checkpoint run no module, so they need none that ran.
        if not self._idle:
            return
        given = {id(module) for root in self._roots for module in root.modules()}
        foreign = [
            own.acting
            for own in (entry.attribution for entry in self._all(Collective))
            if (own.acting or own.adds_gradient) and given.isdisjoint(map(id, own.acting))
        ]
        if not foreign:
            return
        # Of a gradient that is added, the module may be unknown.
        found = next(filter(None, foreign), ())
        example = f", such as a {printable(type(found[0]).__name__)}," if found else ""
        for model, _ in self._idle:
            yield Gap(
                kind="idle_model",
                text=f"no module of the given {printable(type(model).__name__)} ran, while those "
                f"of another model{example} issued {counted(len(foreign), 'collective')}",
            )

    def _note_running(self, modules: Iterable[nn.Module]) -> None:
        ids = set(map(id, modules))
        self._idle = [entry for entry in self._idle if ids.isdisjoint(entry[1])]

    def _learn_roots(self) -> None:
        """Find the roots of modules whose forward did not run in the block."""
        known = {id(module) for root in self._roots for module in root.modules()}
        acts: list[Pending[Any]] = [*self._all(Collective), *self._all(Reshard)]
        for entry in sorted(acts, key=attrgetter("index")):
            for module in entry.attribution.acting:
                root = None if id(module) in known else self._root_above(module)
                if root is not None:
                    self._add_root(root)
                    known.update(map(id, root.modules()))

    def _root_above(self, module: nn.Module) -> nn.Module | None:
        for root in (earlier() for earlier in self._earlier_roots):
            if root is not None and any(module is child for child in root.modules()):
                return root
        return fsdp_root(module)

    def _names_to_query(
        self, names: OwnerNames, recorded: Sequence[Collective], used_groups: Iterable[str]
    ) -> Names:
        """List the names that queries may use; only after the axes were named: it learns some."""
        modules = (module for root in self._roots for module in root.modules())
        units = [unit for module in modules for unit in param_groups(module)]
        if dist.is_initialized():  # the block may have destroyed it
            for unit in units:
                self._groups.learn_unit(unit)
        groups, axes = self._groups.known(used_groups)
        owners = {names.modules.joined(tuple(unit.modules)) for unit in units}
        owners |= {event.owner for event in recorded}
        return Names(
            modules=names.modules.children(),
            owners=frozenset(names.modules.all_fqns()).union(
                name for name in owners if name is not None
            ),
            axes=axes.union(event.axis for event in recorded),
            groups=groups,
            kinds=frozenset(event.kind for event in recorded).difference(COLLECTIVE_KINDS),
            has_model=self._has_given_root,
        )

    # Called by the mode.

    def run(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        below: _ModeBelow | None = None,
    ) -> Any:
        """Run one operation, and record it if it communicates or copies."""
        # At the first operation, since DDP sends in backward only, where no module runs.
        if self._lacks_root:
            for outermost in running_modules()[:1]:
                self._add_root(outermost)
        if self._idle:
            self._note_running(running_modules())
        known = self._known.get(id(func)) or self._classify(func)
        self._backward.note_operation()
        if self._tracer is not None:
            self._tracer.note(func)
        if known == "silent":
            return func(*args, **kwargs)
        return self._run_known(known, func, args, kwargs, below)

    def run_on_other_thread(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        below: _ModeBelow | None = None,
    ) -> Any:
        """As `run`, on a thread that did not enter the recording, and may outlive it."""
        if not self._is_recording:
            return func(*args, **kwargs)
        # Nothing is noted for backward: see Note [Backward map].
        known = self._known.get(id(func)) or self._classify(func)
        return self._run_known(known, func, args, kwargs, below)

    def _run_known(
        self,
        known: Operation | _NoCollective,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        below: _ModeBelow | None,
    ) -> Any:
        if isinstance(known, Operation):
            return self._run_collective(known, func, args, kwargs, below)
        if known == "copy":
            direction = copy_direction(func, args, kwargs)
            if direction is not None:
                return self._run_copy(direction, func, args, kwargs)
        elif known == "read" and self._reads is not None:
            self._reads.note_operation(func, args, kwargs)
        return func(*args, **kwargs)

    def _run_collective(
        self,
        operation: Operation,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        below: _ModeBelow | None,
    ) -> Any:
        scan = scan_stack()
        attribution = self._attribute(scan, func.namespace)
        bound = bind(func, args, kwargs)
        index = next(self._indices)
        started = time.perf_counter()
        try:
            with below or contextlib.nullcontext():
                result = func(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - started
            if below is None or not below.has_sent:
                self._add_seconds(timing_category(operation.kind, attribution.source), seconds)
        if below is not None and below.has_sent:
            return result
        group = group_of(bound)
        sent = messages(operation, group, bound, result)
        parts = parts_sent(operation, bound)
        op = f"{func.namespace}.{func.overloadpacket.__name__}"
        with self._lock:
            if not self._is_recording:  # the block ended while a callback's collective ran
                return result
            self._pending.extend(
                Pending(
                    record=Collective,
                    index=next(self._indices) if number else index,
                    attribution=attribution,
                    fields={"op": op, "call_site": scan.call_site, **message},
                    group=None if group is None else self._groups.note(group),
                    parts=parts,
                )
                for number, message in enumerate(sent)
            )
            if group is not None:
                self._witness.follow()
        if self._reads is not None and operation.kind == "all_to_all":
            self._reads.note_splits(bound, scan.call_site)
        start = self._redistribution_watch.note_collective(scan.redistribution)
        if start is not None:
            self._hold(Redistribution, attribution, **start, call_site=scan.call_site)
        return result

    def _run_copy(
        self, direction: Literal["H2D", "D2H"], func: Any, args: Sequence[Any], kwargs: Any
    ) -> Any:
        scan = scan_stack()
        attribution = self._attribute(scan)
        index = next(self._indices)
        started = time.perf_counter()
        result = func(*args, **kwargs)
        self._add_seconds(direction, time.perf_counter() - started)
        nbytes = sum(tensor.nbytes for tensor in tensors_in(result))
        self._hold(
            HostDeviceCopy,
            attribution,
            index,
            direction=direction,
            nbytes=nbytes,
            call_site=scan.call_site,
        )
        return result

    def _note_reshard(
        self, action: ReshardAction, modules: tuple[nn.Module, ...], nbytes: int, seconds: float
    ) -> None:
        issued = self._attribute()
        if action == "reshard":
            self._add_seconds("resharding", seconds)
        own = replace(issued, owner=modules, source=Source.FSDP)
        self._hold(Reshard, own, action=action, nbytes=nbytes)

    def _hold(
        self, record: type[Any], own: Attribution, index: int | None = None, **fields: Any
    ) -> None:
        place = next(self._indices) if index is None else index
        self._pending.append(Pending(record=record, index=place, attribution=own, fields=fields))

    @contextlib.contextmanager
    def _resumed(self, attribution: Attribution) -> Iterator[None]:
        """Record a callback on any thread as part of what registered it."""
        before = getattr(self._here, "attribution", None)
        self._here.attribution = attribution
        try:
            with contextlib.ExitStack() as stack:
                if self._is_recording and not _is_watched():
                    stack.enter_context(self._watching_thread())
                yield
        finally:
            self._here.attribution = before

    def _watching_thread(self) -> contextlib.AbstractContextManager[object]:
        """Record what the current thread sends, which is not that of the block."""
        self._here.is_followed = True
        self._witness.follow()
        return _Mode(self.run_on_other_thread)

    def _where(self) -> tuple[Phase, str]:
        scan = scan_stack()
        return self._attribute(scan).phase, scan.call_site

    def _attribute(self, scan: StackScan | None = None, namespace: str = "") -> Attribution:
        scan = scan or scan_stack()
        inherited: Attribution | None = getattr(self._here, "attribution", None)
        if inherited is not None:
            return inherited
        if getattr(self._here, "is_followed", False):
            return attribute_on_thread(scan, namespace)
        attribution = attribute(scan, self._units, self._backward, namespace)
        if self._idle:
            self._note_running(attribution.acting)
        if not self._has_given_root and scan.outermost is not None:
            self._add_root(scan.outermost)
        return attribution

    def _add_root(self, module: nn.Module) -> None:
        if not any(module is known for root in self._roots for known in root.modules()):
            # A module that contains an earlier root replaces it.
            inside = {id(child) for child in module.modules()}
            self._lacks_root = False
            # The same list, since others hold it.
            self._roots[:] = [module if id(root) in inside else root for root in self._roots]
            if not any(root is module for root in self._roots):
                self._roots.append(module)

    def _add_seconds(self, category: str | None, seconds: float) -> None:
        self._seconds["all"] += seconds
        if category is not None:
            self._seconds[category] += seconds

    def _note_entry_state(self) -> None:
        unsharded = [
            escape(name)
            for root in self._roots
            for name, module in root.named_modules()
            for group in param_groups(module)
            if group.is_unsharded
        ]
        if unsharded:
            self._notes.append(
                "already unsharded when the recording began, so their first all-gather is "
                f"missing: {', '.join(unsharded)}"
            )

    def _note_lost_owners(self) -> None:
        count = sum(entry.attribution.lacks_forward for entry in self._all(Collective))
        if count:
            self._notes.append(
                "collectives of backward whose module is not known, because their forward ran "
                f"outside of `with comm_mode`: {count}"
            )

    def _classify(self, func: Any) -> Operation | _NoCollective:
        found: Operation | _NoCollective
        if getattr(func, "namespace", None) in NAMESPACES:
            found = look_up(func) or "silent"
        elif self._reads is not None and reads_values(func):
            found = "read"
        else:
            found = "copy" if may_copy(func) else "silent"
        self._classified.append(func)
        self._known[id(func)] = found
        return found


def _is_watched() -> bool:
    # Read in torch 2.6 to 2.15; a tested contract.
    return any(isinstance(mode, _Mode) for mode in _get_current_dispatch_mode_stack())


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """See every operation below autograd. See Note [Subclasses pass through]."""

    # Without it a higher-order operator in the block raises.
    supports_higher_order_operators = True

    def __init__(self, run: _Run, trace: _Trace | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._run = run
        self._trace = trace
        self._subclasses = Subclasses()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch.compile on under this mode (torch 2.9.1 and newer)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        below: _ModeBelow | None = None
        if types:
            dispatch = max(map(self._subclasses.__getitem__, types))
            if dispatch is Dispatch.WRAPPER:
                if self._trace is not None and any(map(is_dtensor_class, types)):
                    self._trace(func, args)
                return NotImplemented
            if dispatch is Dispatch.OPAQUE:
                if getattr(func, "namespace", None) not in NAMESPACES:
                    return NotImplemented
                below = _ModeBelow(self._run)
        return self._run(func, args, kwargs or {}, below)


class _ModeBelow(_Mode):  # type: ignore[no-untyped-call]  # as for _Mode
    """See what an opaque class makes of one collective. See Note [Subclasses pass through]."""

    def __init__(self, run: _Run) -> None:
        super().__init__(run)
        # Whether it has issued a collective, which is then recorded in place of the given one.
        self.has_sent = False
        self._is_entered = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_entered:  # the given one
            self._is_entered = True
            return NotImplemented
        is_namespaced = getattr(func, "namespace", None) in NAMESPACES
        self.has_sent = self.has_sent or (is_namespaced and look_up(func) is not None)
        return super().__torch_dispatch__(func, types, args, kwargs)
