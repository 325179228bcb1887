"""Record the collectives of one rank as they are issued."""

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
    REDUCING,
    Answer,
    Collective,
    Gap,
    HostWait,
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
from pytest_fsdp_comm.recording.active import activate, entered_recorders
from pytest_fsdp_comm.recording.comm_debug import RecordedBlock
from pytest_fsdp_comm.recording.dtensors import RedistributionWatch
from pytest_fsdp_comm.recording.flight_recorder import Witness
from pytest_fsdp_comm.recording.frames import find_call_site
from pytest_fsdp_comm.recording.kernels import WatchingMode
from pytest_fsdp_comm.recording.mesh_axes import GroupNames, process_groups, rank_size_and_backend
from pytest_fsdp_comm.recording.module_trace import ModuleTracer, make_trace_without_operations
from pytest_fsdp_comm.recording.operations import (
    BATCH,
    TIMING_CATEGORIES,
    Call,
    group_of,
    has_async_flag,
    list_reduce_scatter_parts,
    message_fields,
    timing_categories,
)
from pytest_fsdp_comm.recording.overlap import (
    Overlap,
    follow_overlap,
    is_simulated,
    positions_of_last_collective,
)
from pytest_fsdp_comm.recording.owners.attribution import (
    Attribution,
    BackwardMap,
    attribute,
    attribute_on_other_thread,
    attribute_to_unit,
    find_leaf_ids,
)
from pytest_fsdp_comm.recording.owners.fsdp import (
    ReshardAction,
    UnitWatch,
    find_replaced_methods,
    fsdp_root,
    param_groups,
)
from pytest_fsdp_comm.recording.owners.module_names import Modules
from pytest_fsdp_comm.recording.owners.stack import StackScan, scan_stack
from pytest_fsdp_comm.recording.owners.tensors import TensorOwners, find_redistributed_dtensor
from pytest_fsdp_comm.recording.pending import Event, OwnerNames, Pending
from pytest_fsdp_comm.recording.private import READER
from pytest_fsdp_comm.recording.value_dependence import (
    ValueReads,
    answers_of_process,
)
from pytest_fsdp_comm.text.fqn import escape
from pytest_fsdp_comm.text.words import show_count
from pytest_fsdp_comm.upstream import private_names

_numbers = itertools.count()


class Recorder:
    """One recording. Enter `watch`, run the code, leave `watch`, and call `finish`."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        backward: BackwardMap,
        earlier_roots: Sequence[weakref.ref[nn.Module]] = (),
        *,
        traces_operations: bool,
    ) -> None:
        """Prepare a recording; without `models`, FQNs are relative to the outermost modules."""
        # `backward` also maps autograd nodes of earlier blocks to modules below `earlier_roots`.
        # Read rank and world size now, because the block may destroy the process group.
        self._rank, self._world_size, self._backend = rank_size_and_backend()
        self._roots: list[nn.Module] = list(models)
        self._earlier_roots = earlier_roots
        self._has_models = bool(models)
        self.lacks_root = not models
        self.idle: list[nn.Module] = []
        """Models passed by the user that have not run yet, not even one of their submodules."""
        # A call takes its index before it runs, so events that the call causes have higher indices.
        self._indices = itertools.count()
        self._pending: list[Pending[Any]] = []
        self._groups = GroupNames()
        self.backward = backward
        self.units = UnitWatch(self._add_reshard_event, self._groups)
        self._tracer = ModuleTracer(self.backward, self.units) if traces_operations else None
        self._redistribution_watch = RedistributionWatch(self._groups)
        self._seconds = dict.fromkeys(TIMING_CATEGORIES, 0.0)
        self._notes: list[str] = []
        self._witness = Witness()
        self.tensors = TensorOwners(self._roots)
        self.reads: ValueReads | None = None
        if self._backend == "fake" and not is_simulated():
            self.reads = ValueReads(self._find_phase_and_call_site)
        self.answers: dict[Answer, None] = {}
        # For each backward pass: the ids of the tensors whose `.grad` it accumulates into.
        self._backwards: list[set[int]] = []
        self._is_recording = False
        self._overlap: Overlap | None = None
        self.number = next(_numbers)
        # Gaps for unrecorded communication, except those that torch's flight recorder reveals.
        self._unseen: dict[Gap, None] = {}
        # While a thread runs a Future callback: the attribution of the code that registered it.
        self._here = threading.local()
        self._num_resumed = 0
        self._lock = threading.Lock()  # several threads may record at once

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        self._note_state_at_entry()
        self.backward.begin(self._roots)
        self._remove_from_idle_models(self.backward.modules)
        problem = kernels.register_collective_kernels()
        if problem:
            also = "or listed only by torch's flight recorder"
            if self.reads is not None:
                also = "and so are warnings about code that reads values"
            self._notes.append(
                f"{problem}, so a dispatch mode records only this thread; collectives of other "
                f"threads are missing, {also}"
            )
        elif self.reads is not None:
            kernels.register_value_read_kernels()
        with contextlib.ExitStack() as block:
            block.enter_context(patches.watch_torch())
            self._overlap = block.enter_context(follow_overlap())
            block.enter_context(activate(self))
            if problem or self._tracer is not None:
                block.enter_context(WatchingMode(self._tracer, records=bool(problem)))
            self._is_recording = True
            try:
                yield
            finally:
                self._witness.note_running_threads()
                with self._lock:
                    self._is_recording = False
                if not problem:
                    self._unseen.update(dict.fromkeys(kernels.find_gaps()))
                self._note_python_process_groups()
                self._witness.find_unseen(self._list_pending(Collective))
                self._note_lost_owners()

    def finish(self) -> RecordedBlock:
        """Return the recorded block, and drop every reference to modules and process groups."""
        block = self._build_block()
        self._pending.clear()
        self.units.forget()
        self.tensors.forget()
        self.backward.end()
        self._roots.clear()
        self.idle.clear()
        self._tracer = self._overlap = None
        return block

    def build_block_so_far(self) -> RecordedBlock:
        """Return the block as recorded so far, without ending the recording."""
        roots, lacks_root = [*self._roots], self.lacks_root
        with self._groups.restore_on_exit():
            block = self._build_block()
        self._roots[:], self.lacks_root = roots, lacks_root
        return block

    def owners_so_far(self) -> dict[tuple[str, int], str]:
        """Return each collective's owner, keyed by group and sequence number; thread-safe."""
        names = OwnerNames([*self._roots], (), None, are_parts=self._has_models)
        recorded = sorted(self._list_pending(Collective), key=attrgetter("index"))
        numbered = self._witness.key_calls_by_sequence_number(recorded)
        return {key: names.owner(call.attribution) or "" for key, call in numbered.items()}

    def _list_pending(self, record: type[Event]) -> list[Pending[Event]]:
        return [entry for entry in [*self._pending] if entry.record is record]

    @private_names(READER)
    def _build_block(self) -> RecordedBlock:
        if not self._backend:  # the block may have created the process group
            self._rank, self._world_size, self._backend = rank_size_and_backend()
        if not self._has_models:
            self._add_roots_without_forward()
        names = OwnerNames(self._roots, self._backwards, self._overlap, are_parts=self._has_models)
        units = [unit for _, unit in param_groups(names.modules.modules)]
        self._groups.learn_meshes_of_parameters(names.modules.modules)
        if self._is_recording:  # otherwise `_note_lost_owners` has already done this
            self.tensors.attribute_results()
        # Sort by index: events are appended when their calls return, so nested events come first.
        pending = sorted(self._pending, key=attrgetter("index"))
        sent = [entry for entry in pending if entry.group is not None]
        # Equal meshes share DTensor's caches, so DTensors may use groups of an earlier test's mesh.
        counted = {e.group for e in sent if e.attribution.source is not Source.DTENSOR}
        axes = self._groups.axes((entry.group for entry in sent if entry.group), counted)
        members = self._groups.group_members(axes)

        def finish_events(record: type[Event]) -> tuple[Event, ...]:
            entries = [entry for entry in pending if entry.record is record]
            return tuple([entry.finish(names, axes, members) for entry in entries])

        collectives = finish_events(Collective)
        answers = tuple(sorted({*answers_of_process, *self.answers}))
        gaps, notes = self._collect_gaps_and_notes(axes)
        recording = Recording(
            rank=self._rank,
            world_size=self._world_size,
            backend=self._backend,
            torch_version=str(torch.__version__),
            mesh_axes=merge_axes(axes.values()),
            shows_async=has_async_flag(),
            shows_overlap=self._overlap is not None,
            collectives=collectives,
            reshards=finish_events(Reshard),
            redistributions=finish_events(Redistribution),
            host_waits=finish_events(HostWait),
            timings=tuple(self._seconds.items()),
            notes=(
                *dict.fromkeys(self._notes),
                *notes,
                *(gap.text for gap in gaps),
                *(answer.note for answer in answers),
            ),
            peak_gathered_nbytes=self.units.peak_gathered_nbytes(units, names.modules.modules),
            gaps=gaps,
            answers=answers,
        )
        return RecordedBlock(
            recording=recording,
            names=self._collect_names_to_query(names, units, collectives, axes),
            roots=tuple(map(weakref.ref, self._roots)),
            trace=make_trace_without_operations(self._roots, names.modules)
            if self._tracer is None
            else self._tracer.make_trace(names.modules),
        )

    def _collect_gaps_and_notes(
        self, used_groups: Iterable[str]
    ) -> tuple[tuple[Gap, ...], Sequence[str]]:
        """Return the gaps and notes; both are empty while recording. Call it after naming axes."""
        if self._is_recording:
            return (), ()
        unseen = self._witness.make_gaps(lambda: self._groups.groups_and_axes(used_groups)[0])
        of_values = () if self.reads is None else self.reads.gaps
        return (
            *unseen,
            *self._unseen,
            *of_values,
            *self._make_idle_model_gaps(),
        ), self._witness.notes

    def _make_idle_model_gaps(self) -> Iterator[Gap]:
        """Yield a gap for each model that did not run while another model communicated."""
        # Clipping, optimizer steps and checkpoints involve no module, so they cause no gap.
        if not self.idle:
            return
        module_ids = {id(module) for root in self._roots for module in root.modules()}
        foreign = [
            call.acting
            for call in (entry.attribution for entry in self._list_pending(Collective))
            if (call.acting or call.adds_gradient) and module_ids.isdisjoint(map(id, call.acting))
        ]
        if not foreign:
            return
        # Calls in gradient hooks have no module, so choose the first call that has one.
        modules = next(filter(None, foreign), ())
        example = f" (for example, a {printable(type(modules[0]).__name__)})" if modules else ""
        for model in self.idle:
            yield Gap(
                kind="idle_model",
                text=f"no module of the {printable(type(model).__name__)} passed to comm_mode ran, "
                f"but another model{example} issued {show_count(len(foreign), 'collective')}",
            )

    def _remove_from_idle_models(self, modules: Sequence[nn.Module]) -> None:
        ran = set(map(id, modules))
        if ran:
            # This is fast: usually the model itself runs first, and `isdisjoint` stops at it.
            self.idle = [model for model in self.idle if ran.isdisjoint(map(id, model.modules()))]

    def _add_roots_without_forward(self) -> None:
        """Add the roots of modules that communicated without running forward in the block."""
        below_roots = {id(module) for root in self._roots for module in root.modules()}
        acts: list[Pending[Any]] = [*self._list_pending(Collective), *self._list_pending(Reshard)]
        for entry in sorted(acts, key=attrgetter("index")):
            for module in entry.attribution.acting:
                root = None if id(module) in below_roots else self._find_root_above(module)
                if root is not None:
                    self._add_root(root)
                    below_roots.update(map(id, root.modules()))

    def _find_root_above(self, module: nn.Module) -> nn.Module | None:
        for root in (earlier() for earlier in self._earlier_roots):
            if root is not None and any(module is child for child in root.modules()):
                return root
        return fsdp_root(module)

    def _collect_names_to_query(
        self,
        names: OwnerNames,
        units: Sequence[Any],
        recorded: Sequence[Collective],
        used_groups: Iterable[str],
    ) -> Names:
        """Return the names that `counts` and `nbytes` accept. Call this after naming the axes."""
        if dist.is_initialized():  # the block may have destroyed the process group
            for unit in units:
                self._groups.learn_mesh_of_unit(unit)
        groups, axes = self._groups.groups_and_axes(used_groups)
        owners = {names.modules.join_fqns(tuple(unit.modules)) for unit in units}
        owners |= {event.owner for event in recorded}
        return Names(
            modules=names.modules.by_path,
            owners=frozenset(names.modules.by_id.values()).union(
                name for name in owners if name is not None
            ),
            axes=axes.union(event.axis for event in recorded),
            groups=groups,
            kinds=frozenset(event.kind for event in recorded).difference(COLLECTIVE_KINDS),
            has_model=self._has_models,
        )

    # `patches` calls the next two methods, on a thread that has entered the recording.

    def enter_module(self, module: nn.Module) -> int:
        """Record that a module starts to run; return the depth to pass to `backward.leave`."""
        depth = self.backward.enter(module)
        if self.idle or self.lacks_root:
            self._update_idle_and_roots((module,), self.backward.outermost)
        return depth

    def enter_engine(
        self, outputs: Iterable[object], inputs: Collection[object], *, adds: bool
    ) -> int:
        """Record that a backward starts, and whether it `adds` to `.grad`; return the depth."""
        if adds:
            # A nested backward, as in a reentrant checkpoint, is part of the outer backward.
            if not (self._backwards and self.backward.is_in_engine):
                self._backwards.append(set())
            self._backwards[-1] |= find_leaf_ids(outputs, inputs)
        return self.backward.enter(None)

    # `kernels` and `patches` call the following methods, on any thread.

    def run_collective(
        self,
        call: Call,
        args: Sequence[object],
        kwargs: dict[str, object],
        run: Callable[[], object],
    ) -> Any:
        __tracebackhide__ = True
        operation = call.operation
        bound = call.bind(args, kwargs)
        unit = self._attribute_from_unit() if call.may_come_from_unit and not kwargs else None
        if unit is not None:
            scan, dtensor, attribution = StackScan(), None, unit
            call_site, is_of_backward = find_call_site(), unit.phase is Phase.BACKWARD
            if operation.kind in REDUCING:
                self.tensors.expect_new_gradients()
        else:
            scan = scan_stack()
            dtensor = find_redistributed_dtensor(scan.redistribution)
            attribution = self._attribute_from_stack(scan, call.namespace)
            attribution.carried = self.tensors.find_carried_parameter(
                scan, operation, bound, attribution, dtensor
            )
            call_site, is_of_backward = scan.call_site, scan.is_of_backward
        is_callback = getattr(self._here, "attribution", None) is not None
        is_unordered = is_callback or self not in entered_recorders()
        batch = len(bound["op_list"]) - 1 if operation.kind == BATCH else 0
        indices = [next(self._indices) for _ in range(1 + batch)]
        started = time.perf_counter()
        try:
            result = run()
        finally:
            seconds = time.perf_counter() - started
            for category in timing_categories(operation.kind, attribution.source):
                self._seconds[category] += seconds
        positions = positions_of_last_collective(len(indices))
        group = group_of(bound)
        key = None if group is None else self._groups.add_group(group)
        if attribution.carried is not None and attribution.carried.label is None:
            self.tensors.follow(operation, attribution, operation.tensors_received(bound, result))
        if self.reads is not None and operation.kind == "all_to_all":
            self.reads.note_splits(bound, call_site)
        parts = list_reduce_scatter_parts(operation, bound)
        common = {
            "op": call.op,
            "call_site": call_site,
            "is_of_backward": is_of_backward,
            "after_backwards": len(self._backwards),
            "is_unordered": is_unordered,
        }
        sent = message_fields(operation, group, bound, result)
        for index, message, position in zip(indices, sent, positions, strict=True):
            fields = {**common, **message}
            self._add_event(Pending(Collective, index, attribution, fields, key, parts, position))
        if scan.redistributing is None:
            self._redistribution_watch.last = None
            return result
        move = self._redistribution_watch.describe_new_redistribution(scan.redistributing)
        if move is not None:
            move |= {"is_explicit": dtensor is not None, "call_site": call_site}
            self._add_event(Pending(Redistribution, next(self._indices), attribution, move))
        return result

    def _add_event(self, entry: Pending[Any]) -> None:
        with self._lock:
            if self._is_recording:  # a call in a callback may return after the block
                self._pending.append(entry)
                if entry.group is not None:
                    self._witness.add_current_thread()

    def note_gather_backward(self) -> None:
        """Note a call that depends on the backend, unless a simulation chooses what NCCL sends."""
        if not is_simulated() and rank_size_and_backend()[2] == "fake":
            self._notes.append(
                f"{find_call_site()} runs the backward of torch.distributed.nn.functional."
                "all_gather, which sends all_to_all on the fake backend, but reduce_scatter on NCCL"
            )

    def note_host_wait(self, way: str) -> None:
        """Record that the host waits for the GPU."""
        scan = scan_stack()
        attribution = self._attribute_from_unit() or self._attribute_from_stack(scan)
        fields = {"way": way, "call_site": scan.call_site}
        self._add_event(Pending(HostWait, next(self._indices), attribution, fields))

    def running_module(self) -> nn.Module | None:
        """Return the module whose forward or backward runs on this thread, if it is known."""
        innermost = self.backward.innermost
        if innermost is not None or not self.backward.is_in_engine:
            return innermost
        maker, _ = self.backward.maker_of_current_node()
        return maker if isinstance(maker, nn.Module) else None

    def note_outliving_thread(self, call: Call) -> None:
        name = printable(threading.current_thread().name)
        self.note_unseen(
            f"thread '{name}' from an earlier block sent {call.op}, which is not recorded; join "
            "the thread in the block that starts it"
        )

    def note_unseen(self, text: str) -> None:
        """Add a gap for communication that is not recorded."""
        self._unseen[Gap(kind="unseen", text=text)] = None

    def _add_reshard_event(
        self, action: ReshardAction, modules: tuple[nn.Module, ...], nbytes: int, seconds: float
    ) -> None:
        attribution = self._attribute_from_unit() or self._attribute_from_stack(scan_stack())
        if action == "reshard":
            self._seconds["resharding"] += seconds
            self._seconds["all"] += seconds
        if attribution.owner is not modules or attribution.source is not Source.FSDP:
            attribution = replace(attribution, owner=modules, source=Source.FSDP)
        fields = {"action": action, "nbytes": nbytes}
        self._pending.append(Pending(Reshard, next(self._indices), attribution, fields))

    @contextlib.contextmanager
    def use_attribution(self, attribution: Attribution) -> Iterator[None]:
        """While the block runs a callback, attribute its events to the code that registered it."""
        previous = getattr(self._here, "attribution", None)
        self._here.attribution = attribution
        self._num_resumed += 1
        try:
            yield
        finally:
            self._here.attribution = previous
            self._num_resumed -= 1

    def attribute_callback(self) -> Attribution:
        return self._attribute_from_stack(scan_stack())

    def _find_phase_and_call_site(self) -> tuple[Phase, str]:
        scan = scan_stack()
        return self._attribute_from_stack(scan).phase, scan.call_site

    def _attribute_from_unit(self) -> Attribution | None:
        if self._num_resumed:
            return None
        attribution = attribute_to_unit(self.units, self.backward)
        if attribution is not None and (self.idle or not self._has_models):
            self._update_idle_and_roots(attribution.acting, self.backward.outermost)
        return attribution

    def _attribute_from_stack(self, scan: StackScan, namespace: str = "") -> Attribution:
        inherited: Attribution | None = getattr(self._here, "attribution", None)
        if inherited is not None:
            return replace(inherited)
        if self not in entered_recorders():
            return attribute_on_other_thread(scan, namespace)
        attribution = attribute(scan, self.units, self.backward, namespace)
        self._update_idle_and_roots(attribution.acting, scan.outermost)
        return attribution

    def _update_idle_and_roots(self, modules: Modules, outermost: nn.Module | None) -> None:
        if self.idle:
            self._remove_from_idle_models(modules)
        if not self._has_models and outermost is not None:
            self._add_root(outermost)

    def _add_root(self, module: nn.Module) -> None:
        if not any(module is child for root in self._roots for child in root.modules()):
            # A module that contains an earlier root replaces it.
            inside = {id(child) for child in module.modules()}
            self.lacks_root = False
            # Change the list in place: `tensors` and `backward` refer to it.
            self._roots[:] = [module if id(root) in inside else root for root in self._roots]
            if not any(root is module for root in self._roots):
                self._roots.append(module)

    def _note_python_process_groups(self) -> None:
        for group in process_groups():
            kind = type(group)
            # Process group classes written in C++ are in one of these two modules.
            if not kind.__module__.startswith(("torch._C", "torch.distributed.distributed_c10d")):
                self.note_unseen(
                    f"group {printable(group.group_desc)!r} is a {kind.__name__}, written in "
                    "Python, whose methods bypass the torch operations that comm_mode records"
                )

    def _note_state_at_entry(self) -> None:
        self._note_python_process_groups()
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
                "the first all-gather is missing for units that were already unsharded when the "
                "recording began, e.g. after a forward without a backward, or with "
                "set_reshard_after_backward(False); reshard() before the block would undo that: "
                f"{', '.join(unsharded)}"
            )

    def _note_replaced_methods(self, groups: Iterable[object]) -> None:
        names = sorted(find_replaced_methods(groups))
        if names:
            self.note_unseen(
                f"{', '.join(names)} of FSDP units had been replaced before the block began (for "
                "example, by FSDPMemTracker), so owners may be wrong; enter comm_mode first, with "
                "a model that was not tracked before"
            )

    def _note_lost_owners(self) -> None:
        self.tensors.attribute_results()
        calls = [entry.attribution for entry in self._list_pending(Collective)]
        count = sum(call.lacks_forward and call.label is None for call in calls)
        if count:
            self._notes.append(
                f"no owner for {show_count(count, 'collective')} in backward, because the forward "
                "ran outside `with comm_mode`"
            )
