"""Record what one rank sends, from the time that it is issued."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_fsdp_comm.comm.events import (
    COLLECTIVE_KINDS,
    Answer,
    Collective,
    Gap,
    Phase,
    Recording,
    Redistribution,
    Reshard,
    Source,
)
from pytest_fsdp_comm.comm.mesh import merge_axes
from pytest_fsdp_comm.comm.questions import Names
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.recording import kernels, patches
from pytest_fsdp_comm.recording.active import entered, under_way
from pytest_fsdp_comm.recording.comm_debug import ModuleTracer, RecordedBlock, untraced
from pytest_fsdp_comm.recording.dtensors import RedistributionWatch
from pytest_fsdp_comm.recording.flight_recorder import Witness
from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.kernels import WatchingMode
from pytest_fsdp_comm.recording.mesh_axes import GroupNames, own_world, process_groups
from pytest_fsdp_comm.recording.operations import (
    BATCH,
    TIMING_CATEGORIES,
    Call,
    group_of,
    messages,
    parts_sent,
    shows_async,
    timing_categories,
)
from pytest_fsdp_comm.recording.owners.attribution import (
    Attribution,
    BackwardMap,
    attribute,
    attribute_on_thread,
    attribute_unit,
    leaves_of,
)
from pytest_fsdp_comm.recording.owners.fsdp import (
    ReshardAction,
    UnitWatch,
    fsdp_root,
    param_groups,
    replaced_methods,
)
from pytest_fsdp_comm.recording.owners.module_names import Modules
from pytest_fsdp_comm.recording.owners.stack import StackScan, scan_stack
from pytest_fsdp_comm.recording.owners.tensors import TensorOwners, redistributed
from pytest_fsdp_comm.recording.pending import Event, OwnerNames, Pending
from pytest_fsdp_comm.recording.value_dependence import (
    ValueReads,
    answers_of_process,
    is_told_of_values,
)
from pytest_fsdp_comm.text.fqn import escape
from pytest_fsdp_comm.text.words import counted

_numbers = itertools.count()


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
        self.lacks_root = not models
        """Whether no module is known yet that names are relative to."""
        self.idle: list[nn.Module] = []
        """The given models without a module that has run."""
        # An index is taken before the call: what the call itself causes comes after it.
        self._indices = itertools.count()
        self._pending: list[Pending[Any]] = []
        self._groups = GroupNames()
        self.backward = backward
        self.units = UnitWatch(self._note_reshard, self._groups)
        self._tracer = ModuleTracer(self.backward, self.units) if traces_operations else None
        self._redistribution_watch = RedistributionWatch(self._groups)
        self._seconds = dict.fromkeys(TIMING_CATEGORIES, 0.0)
        self._notes: list[str] = []
        self._witness = Witness()
        self.tensors = TensorOwners(self._roots)
        self.reads = ValueReads(self._where) if self._backend == "fake" else None
        self.answers: dict[Answer, None] = {}
        # Of each backward pass, the ids of the tensors to whose gradients it adds.
        self._backwards: list[set[int]] = []
        self._is_recording = False
        self.number = next(_numbers)
        # Of threads of earlier blocks, and at the end of kernels that others have registered.
        self._unseen: dict[Gap, None] = {}
        # .attribution on a thread that runs a callback which the block registered.
        self._here = threading.local()
        self._num_resumed = 0
        self._lock = threading.Lock()  # other threads record too

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._note_entry_state()
        self.backward.begin(self._roots)
        self._note_running(self.backward.modules)
        problem = kernels.register_collectives()
        if problem:
            also = "or known to torch's flight recorder at most"
            if self.reads is not None:
                also = "as is a warning of code that reads values"
            self._notes.append(
                f"{problem}, so a dispatch mode records this thread alone; what others send is "
                f"missing, {also}"
            )
        elif self.reads is not None and not is_told_of_values():
            kernels.register_value_reads()
        with contextlib.ExitStack() as block:
            block.enter_context(patches.watching())
            block.enter_context(under_way(self))
            if problem or self._tracer is not None:
                calls = kernels.communicating().values() if problem else ()
                block.enter_context(WatchingMode(self._tracer, calls))
            self._is_recording = True
            try:
                yield
            finally:
                self._witness.note_running_threads()
                with self._lock:
                    self._is_recording = False
                if not problem:
                    self._unseen.update(dict.fromkeys(kernels.gaps()))
                self._note_unseen_groups()
                self._witness.end(self._all(Collective))
                self._note_lost_owners()

    def finish(self) -> RecordedBlock:
        """Name everything, and keep no module and no group."""
        block = self._named()
        self._pending.clear()
        self.units.forget()
        self.tensors.forget()
        self.backward.end()
        self._roots.clear()
        self.idle.clear()
        self._tracer = None
        return block

    def so_far(self) -> RecordedBlock:
        """Name what was recorded up to now, and leave the block as it is."""
        roots, lacks_root = [*self._roots], self.lacks_root
        with self._groups.unchanged():
            block = self._named()
        self._roots[:], self.lacks_root = roots, lacks_root
        return block

    def owners_so_far(self) -> dict[tuple[str, int], str]:
        """Name owners by group and number in the flight recorder; callable on any thread."""
        names = OwnerNames([*self._roots], (), are_parts=self._has_given_root)
        recorded = sorted(self._all(Collective), key=attrgetter("index"))
        numbered = self._witness.numbered(recorded)
        return {at: names.owner(call.attribution) or "" for at, call in numbered.items()}

    def _all(self, record: type[Event]) -> list[Pending[Event]]:
        return [entry for entry in [*self._pending] if entry.record is record]

    def _named(self) -> RecordedBlock:
        if not self._backend:  # unless the block has made the group
            self._rank, self._world_size, self._backend = own_world()
        if not self._has_given_root:
            self._learn_roots()
        names = OwnerNames(self._roots, self._backwards, are_parts=self._has_given_root)
        units = [unit for _, unit in param_groups(names.modules.modules)]
        self._groups.learn_parameters(names.modules.modules)
        if self._is_recording:  # otherwise its end has
            self.tensors.settle()
        # By index: an event is held when its call returns, after what the call itself caused.
        pending = sorted(self._pending, key=attrgetter("index"))
        axes = self._groups.axes(entry.group for entry in pending if entry.group is not None)

        def named(record: type[Event]) -> tuple[Event, ...]:
            return tuple(entry.named(names, axes) for entry in pending if entry.record is record)

        collectives = named(Collective)
        answers = tuple(sorted({*answers_of_process, *self.answers}))
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
            timings=tuple(self._seconds.items()),
            notes=(
                *self._notes,
                *notes,
                *(gap.text for gap in gaps),
                *(f"{one.call_site} was answered {one.value} ({one.how})" for one in answers),
            ),
            peak_gathered_nbytes=self.units.peak_gathered_nbytes(units, names.modules.modules),
            gaps=gaps,
            answers=answers,
        )
        return RecordedBlock(
            recording=recording,
            names=self._names_to_query(names, units, collectives, axes),
            roots=tuple(map(weakref.ref, self._roots)),
            trace=(untraced if self._tracer is None else self._tracer.result)(
                self._roots, names.modules
            ),
        )

    def _gaps(self, used_groups: Iterable[str]) -> tuple[tuple[Gap, ...], Sequence[str]]:
        """What is known to be missing, and notes; only after the axes were named."""
        if self._is_recording:
            return (), ()
        unseen = self._witness.gaps(lambda: self._groups.known(used_groups)[0])
        of_values = () if self.reads is None else self.reads.gaps
        return (*unseen, *self._unseen, *of_values, *self._idle_gaps()), self._witness.notes

    def _idle_gaps(self) -> Iterator[Gap]:
        """The given models that did not run, where modules of others sent something."""
        # Clipping, an optimizer's step or a checkpoint run no module, so they need none that ran.
        if not self.idle:
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
        for model in self.idle:
            yield Gap(
                kind="idle_model",
                text=f"no module of the given {printable(type(model).__name__)} ran, while those "
                f"of another model{example} issued {counted(len(foreign), 'collective')}",
            )

    def _note_running(self, modules: Sequence[nn.Module]) -> None:
        ran = set(map(id, modules))
        if ran:
            # Ends at the model itself, which is nearly always the first to run.
            self.idle = [one for one in self.idle if ran.isdisjoint(map(id, one.modules()))]

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
        self,
        names: OwnerNames,
        units: Sequence[Any],
        recorded: Sequence[Collective],
        used_groups: Iterable[str],
    ) -> Names:
        """List the names that queries may use; only after the axes were named: it learns some."""
        if dist.is_initialized():  # the block may have destroyed it
            for unit in units:
                self._groups.learn_unit(unit)
        groups, axes = self._groups.known(used_groups)
        owners = {names.modules.joined(tuple(unit.modules)) for unit in units}
        owners |= {event.owner for event in recorded}
        return Names(
            modules=names.modules.by_path,
            owners=frozenset(names.modules.by_id.values()).union(
                name for name in owners if name is not None
            ),
            axes=axes.union(event.axis for event in recorded),
            groups=groups,
            kinds=frozenset(event.kind for event in recorded).difference(COLLECTIVE_KINDS),
            has_model=self._has_given_root,
        )

    # Called by patches, on a thread that has entered the recording.

    def enter_module(self, module: nn.Module) -> int:
        """A module runs from now on; returns what `backward.leave` takes."""
        depth = self.backward.enter(module)
        if self.idle or self.lacks_root:
            self._note_acting((module,), self.backward.outermost)
        return depth

    def enter_engine(self, outputs: Iterable[Any], inputs: Collection[Any], *, adds: bool) -> int:
        """The engine runs from now on, and adds to gradients or not; returns as `enter_module`."""
        if adds:
            # A backward within another one, as of a reentrant checkpoint, is a part of it.
            if not (self._backwards and self.backward.is_in_engine):
                self._backwards.append(set())
            self._backwards[-1] |= leaves_of(outputs, inputs)
        return self.backward.enter(None)

    # Called by kernels, on any thread.

    def run_collective(
        self, call: Call, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        __tracebackhide__ = True
        operation = call.operation
        bound = call.bind(args, kwargs)
        unit = self._attribute_unit() if call.may_be_units and not kwargs else None
        scan = StackScan() if unit is not None else scan_stack()
        given = redistributed(scan.redistribution)
        own = unit or self._attribute(scan, call.namespace)
        if unit is None:
            own.carried = self.tensors.carried(scan, operation, bound, own, given)
        call_site = find_call_site() if unit is not None else scan.call_site
        batch = len(bound["op_list"]) - 1 if operation.kind == BATCH else 0
        indices = [next(self._indices) for _ in range(1 + batch)]
        started = time.perf_counter()
        try:
            result = run()
        finally:
            seconds = time.perf_counter() - started
            for category in timing_categories(operation.kind, own.source):
                self._seconds[category] += seconds
        group = group_of(bound)
        key = None if group is None else self._groups.note(group)
        if own.carried is not None and own.carried.label is None:
            self.tensors.follow(operation, own, operation.tensors_received(bound, result))
        if self.reads is not None and not is_told_of_values() and operation.kind == "all_to_all":
            self.reads.note_splits(bound, call_site)
        parts = parts_sent(operation, bound)
        shown = {"op": call.op, "call_site": call_site, "after_backwards": len(self._backwards)}
        sent = messages(operation, group, bound, result)
        for index, message in zip(indices, sent, strict=True):
            self._hold(Pending(Collective, index, own, {**shown, **message}, key, parts))
        if scan.redistributing is None:
            self._redistribution_watch.last = None
            return result
        fields = self._redistribution_watch.note_collective(scan.redistributing)
        if fields is not None:
            fields |= {"is_explicit": given is not None, "call_site": call_site}
            self._hold(Pending(Redistribution, next(self._indices), own, fields))
        return result

    def _hold(self, entry: Pending[Any]) -> None:
        with self._lock:
            if self._is_recording:  # otherwise the block has ended while a callback's call ran
                self._pending.append(entry)
                if entry.group is not None:
                    self._witness.follow()

    def note_read(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self.reads is not None and not is_told_of_values():
            self.reads.note_operation(func, args, kwargs)

    def note_read_by_method(self, name: str) -> None:
        """A method is about to show values to Python without an operation that has a kernel."""
        if self.reads is not None and not is_told_of_values():
            self.reads.note(name)

    def note_outliving_thread(self, call: Call) -> None:
        """A thread that was started in an earlier block sends in this one."""
        name = printable(threading.current_thread().name)
        self.note_unseen(
            f"thread '{name}' of an earlier block sent {call.op} in this one, where it is not "
            "recorded; end it with the block that starts it"
        )

    def note_unseen(self, text: str) -> None:
        """Something is sent that is not recorded."""
        self._unseen[Gap(kind="unseen", text=text)] = None

    def _note_reshard(
        self, action: ReshardAction, modules: tuple[nn.Module, ...], nbytes: int, seconds: float
    ) -> None:
        own = self._attribute_unit() or self._attribute(scan_stack())
        if action == "reshard":
            self._seconds["resharding"] += seconds
            self._seconds["all"] += seconds
        if own.owner is not modules or own.source is not Source.FSDP:
            own = replace(own, owner=modules, source=Source.FSDP)
        fields = {"action": action, "nbytes": nbytes}
        self._pending.append(Pending(Reshard, next(self._indices), own, fields))

    @contextlib.contextmanager
    def resumed(self, attribution: Attribution) -> Iterator[None]:
        """Record a callback on any thread as part of what registered it."""
        before = getattr(self._here, "attribution", None)
        self._here.attribution = attribution
        self._num_resumed += 1
        try:
            yield
        finally:
            self._here.attribution = before
            self._num_resumed -= 1

    def attribute_callback(self) -> Attribution:
        """The attribution of what registers a callback now."""
        return self._attribute(scan_stack())

    def _where(self) -> tuple[Phase, str]:
        scan = scan_stack()
        return self._attribute(scan).phase, scan.call_site

    def _attribute_unit(self) -> Attribution | None:
        if self._num_resumed:
            return None
        found = attribute_unit(self.units, self.backward)
        if found is not None and (self.idle or not self._has_given_root):
            self._note_acting(found.acting, self.backward.outermost)
        return found

    def _attribute(self, scan: StackScan, namespace: str = "") -> Attribution:
        inherited: Attribution | None = getattr(self._here, "attribution", None)
        if inherited is not None:
            return replace(inherited)
        if self not in entered():
            return attribute_on_thread(scan, namespace)
        attribution = attribute(scan, self.units, self.backward, namespace)
        self._note_acting(attribution.acting, scan.outermost)
        return attribution

    def _note_acting(self, modules: Modules, outermost: nn.Module | None) -> None:
        if self.idle:
            self._note_running(modules)
        if not self._has_given_root and outermost is not None:
            self._add_root(outermost)

    def _add_root(self, module: nn.Module) -> None:
        if not any(module is known for root in self._roots for known in root.modules()):
            # A module that contains an earlier root replaces it.
            inside = {id(child) for child in module.modules()}
            self.lacks_root = False
            # The same list, since others hold it.
            self._roots[:] = [module if id(root) in inside else root for root in self._roots]
            if not any(root is module for root in self._roots):
                self._roots.append(module)

    def _note_unseen_groups(self) -> None:
        for group in process_groups():
            kind = type(group)
            # torch gives the module of its own in C++ as another one.
            if not kind.__module__.startswith(("torch._C", "torch.distributed.distributed_c10d")):
                self.note_unseen(
                    f"group {printable(group.group_desc)!r} is a {kind.__name__}, which is written "
                    "in Python and sends without any operation of torch"
                )

    def _note_entry_state(self) -> None:
        self._note_unseen_groups()
        unsharded = []
        for root in self._roots:
            self.idle.append(root)
            named = [*root.named_modules()]
            groups = [*param_groups(module for _, module in named)]
            self._note_replaced_methods(group for _, group in groups)
            gathered = {id(module) for module, group in groups if group.is_unsharded}
            if gathered:
                unsharded += [escape(name) for name, module in named if id(module) in gathered]
        if unsharded:
            self._notes.append(
                "already unsharded when the recording began, so their first all-gather is "
                f"missing: {', '.join(unsharded)}"
            )

    def _note_replaced_methods(self, groups: Iterable[Any]) -> None:
        names = sorted(replaced_methods(groups))
        if names:
            self.note_unseen(
                f"{', '.join(names)} of FSDP's units had been replaced before the block began, as "
                "FSDPMemTracker does, so that owners may be wrong; enter comm_mode first, and on a "
                "model that was not tracked before"
            )

    def _note_lost_owners(self) -> None:
        self.tensors.settle()
        owns = [entry.attribution for entry in self._all(Collective)]
        count = sum(own.lacks_forward and own.label is None for own in owns)
        if count:
            self._notes.append(
                "collectives of backward whose module is not known, because their forward ran "
                f"outside of `with comm_mode`: {count}"
            )
