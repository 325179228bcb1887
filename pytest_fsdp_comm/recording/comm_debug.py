"""Implement the methods of torch's CommDebugMode on top of a recording."""

# Note [Answers of CommDebugMode]
# We fill an instance of torch's class with recorded data and let it write the tables and the JSON,
# but we never enter it. An entered instance counts with global module hooks. These hooks raise an
# IndexError if a module runs twice and a KeyError if a backward runs without its forward, attribute
# prefetched gathers to the running module, record the views that they create themselves, and keep
# the model alive.

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.events import Collective, Phase, Recording
from pytest_fsdp_comm.comm.questions import Names
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.dtensors import is_dtensor
from pytest_fsdp_comm.recording.owners.attribution import BackwardMap, Maker
from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch
from pytest_fsdp_comm.recording.owners.module_names import ModuleNames, clean_fqn, has_forward
from pytest_fsdp_comm.recording.private import OpOverload

GLOBAL: Final = "Global"
"""The key under which CommDebugMode lists totals, and operations outside all modules."""

Placements = tuple[Any, ...] | None
"""The placements of a DTensor; None for a plain tensor."""


@dataclass(slots=True, eq=False)
class TracedModule:
    """A module that was called, or whose backward ran an operation."""

    module: weakref.ref[nn.Module]
    module_type: str
    """The module's class, in CommDebugMode's notation."""
    placements: dict[str, Placements]
    """Placements of the direct parameters, keyed by name. A gathered parameter has None until
    `settle` reads its placements."""
    callers: tuple[TracedModule, ...] = ()
    """The modules that were running when this one was first called, outermost first."""
    name: str = GLOBAL
    """The module's name in CommDebugMode: the root's class, then the FQN. `settle` sets it."""

    def settle(self, keys: Mapping[int, str]) -> None:
        """Set the name from `keys`, and fill in the placements of parameters that were gathered."""
        module = self.module()
        if module is not None:
            self.name = keys.get(id(module), type(module).__name__)
            # While a unit is gathered, FSDP registers plain tensors, which have no placements.
            now = _parameters(module)
            self.placements = {
                name: _placements(now.get(name)) if placed is None else placed
                for name, placed in self.placements.items()
            }

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the direct parameters, keyed by name; raise if the model no longer exists."""
        now = _parameters(self.module())
        if not now.keys() >= self.placements.keys():
            raise _make_model_gone_error()
        # Reading `.data` dispatches an operation: hide it from the recording and the test's modes.
        # Checked in torch 2.6 to 2.15.
        with upstream.look_up("torch.utils._python_dispatch", "_disable_current_modes")():
            return {name: now[name].data for name in self.placements}


def _trace_module(module: nn.Module) -> TracedModule:
    module_type = str(type(module)).replace("<", "").replace(">", "")
    placements = {name: _placements(param) for name, param in _parameters(module).items()}
    return TracedModule(weakref.ref(module), module_type, placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """The modules and operations that a block ran, under CommDebugMode's names."""

    modules: Callable[[], tuple[TracedModule, ...]]
    """Returns the modules that ran operations in forward, in the order of their first operations,
    callers first; without tracing, all modules that have a ``forward``."""
    keys: Callable[[str], tuple[str, ...]]
    """Maps an owner's FQN to CommDebugMode's names for the owner and its enclosing modules."""
    operations: Sequence[tuple[str, dict[str, Any]]] | None = None
    """Module name and description of each operation, in dispatch order; None without tracing."""


class ModuleTracer:
    """Record which operations a block dispatches, and in which modules."""

    def __init__(self, backward: BackwardMap, units: UnitWatch) -> None:
        self._backward = backward
        self._units = units
        # Checked in torch 2.13.
        self._fake_mode = upstream.look_up("torch._guards", "active_fake_mode")
        self._operations: list[tuple[TracedModule | None, dict[str, Any]]] = []
        self._traced: dict[int, TracedModule] = {}  # keyed by id, valid while the module exists
        self._called: dict[TracedModule, None] = {}

    def note(self, func: object, dtensor_args: Sequence[Any] | None = None) -> None:
        """Record an operation; `dtensor_args` are its arguments if DTensor handles it."""
        if not isinstance(func, OpOverload):  # a higher-order operator
            return
        running = self._backward.innermost
        is_backward = self._backward.is_in_backward()
        traced: TracedModule | None = None
        if running is not None:
            traced = self._get_traced_module(running)
            if traced not in self._called and not is_backward:
                callers: tuple[TracedModule, ...] = ()
                for caller in map(self._get_traced_module, self._backward.modules):
                    if caller not in self._called:
                        caller.callers = callers
                        self._called[caller] = None
                    if caller not in callers:
                        callers = (*callers, caller)
        elif is_backward:
            traced = self._find_backward_module()
        # Skip operations on fake tensors: DTensor runs them to infer the shapes of results.
        if dtensor_args is None and self._fake_mode() is not None:
            return
        dtensors = [arg for arg in dtensor_args or () if is_dtensor(arg)]
        operation = {
            "name": func,
            "input_shape": [arg.shape for arg in dtensors],
            "input_sharding": [arg.placements for arg in dtensors],
            "device_mesh": str(dtensors[-1].device_mesh) if dtensors else "",
            "is_bw": is_backward,
            "is_activation_checkpointing": is_backward and running is not None,
        }
        self._operations.append((traced, operation))

    def _find_backward_module(self) -> TracedModule | None:
        issuer = self._units.issuer
        if issuer:
            return self._get_traced_module(issuer[0])
        # The previous operation computed this gradient: use its module, and avoid a slow search.
        if self._backward.adds_gradient() and self._operations:
            traced, operation = self._operations[-1]
            if operation["is_bw"]:
                return traced
        maker, _ = self._backward.maker_of_current_node()
        return None if isinstance(maker, Maker) else self._get_traced_module(maker)

    def _get_traced_module(self, module: nn.Module) -> TracedModule:
        traced = self._traced.get(id(module))
        # Compare the modules, because a module that no longer exists may have had this id.
        if traced is None or traced.module() is not module:
            traced = self._traced[id(module)] = _trace_module(module)
        return traced

    def result(self, roots: Sequence[nn.Module], names: ModuleNames) -> ModuleTrace:
        """Return the trace so far, with names relative to the roots."""
        outermost = (traced.module() for traced in self._called if not traced.callers)
        keys = _map_ids_to_debug_names(
            (*roots, *(module for module in outermost if module is not None))
        )
        for traced in {*self._called, *(noted[0] for noted in self._operations)}:
            if traced is not None:
                traced.settle(keys)
        called = {traced.name: traced for traced in self._called if traced.module() is not None}
        return ModuleTrace(
            modules=lambda: tuple(called.values()),
            keys=_make_debug_name_finder(names),
            operations=tuple(
                (GLOBAL if traced is None else traced.name, operation)
                for traced, operation in self._operations
            ),
        )


def make_trace_without_operations(roots: Sequence[nn.Module], names: ModuleNames) -> ModuleTrace:
    """Return the trace of a block that ran without a `ModuleTracer`: modules, but no operations."""
    return ModuleTrace(
        # Build the list lazily: every block has a trace, but few tests read it.
        modules=functools.partial(_modules_below, [weakref.ref(root) for root in roots]),
        keys=_make_debug_name_finder(names),
    )


def _modules_below(references: Sequence[weakref.ref[nn.Module]]) -> tuple[TracedModule, ...]:
    roots = [root for root in (reference() for reference in references) if root is not None]
    if len(roots) < len(references):
        raise _make_model_gone_error()
    keys = _map_ids_to_debug_names(roots)
    modules: dict[str, TracedModule] = {}
    for module in (module for root in roots for module in root.modules() if has_forward(module)):
        traced = _trace_module(module)
        traced.name = keys[id(module)]
        traced.callers = tuple(
            modules[key] for key in _list_enclosing_names(traced.name) if key in modules
        )
        modules[traced.name] = traced
    return tuple(modules.values())


def _make_model_gone_error() -> RecordingError:
    return RecordingError(
        "the recorded model no longer exists; keep a reference to it until you have read its "
        "modules and parameters"
    )


def _placements(parameter: Any) -> Placements:
    return tuple(parameter.placements) if is_dtensor(parameter) else None


def _parameters(module: nn.Module | None) -> dict[str, torch.Tensor]:
    # Do not use getattr(), which could run a property of the user's class.
    return {} if module is None else dict(module.named_parameters(recurse=False))


def _map_ids_to_debug_names(roots: Iterable[nn.Module]) -> dict[int, str]:
    """Return CommDebugMode's names for all modules below the roots, keyed by module ``id``."""
    keys: dict[int, str] = {}
    for root in roots:
        for path, module in root.named_modules():
            keys.setdefault(id(module), _make_debug_name(type(root).__name__, path))
    return keys


def _make_debug_name(root: str, path: str) -> str:
    fqn = clean_fqn(path)
    return f"{root}.{fqn}" if fqn else root


def _make_debug_name_finder(names: ModuleNames) -> Callable[[str], tuple[str, ...]]:
    # Store ids, not modules, so that no model is kept alive. Few tests need the names, so compute
    # them lazily.
    places = [(id(module), has_forward(module)) for module in names.modules]
    by_id, paths = names.by_id, names.paths

    @functools.cache
    def name_modules() -> tuple[dict[str, str], set[str]]:
        first: dict[int, tuple[str, bool, str, str]] = {}
        for (module, is_callable), path in zip(places, paths, strict=True):
            first.setdefault(module, (by_id[module], is_callable, *path))
        keys = {fqn: _make_debug_name(*path) for fqn, _, *path in first.values()}
        return keys, {
            _make_debug_name(*path) for _, is_callable, *path in first.values() if is_callable
        }

    def find_debug_names(owner: str) -> Iterator[str]:
        keys, callable_ = name_modules()
        # If a unit has several modules, its name is their FQNs, joined with ``+``.
        for fqn in [owner] if owner in keys else owner.split("+"):
            if fqn in keys:
                yield from (
                    outer for outer in _list_enclosing_names(keys[fqn]) if outer in callable_
                )
                yield keys[fqn]

    return functools.cache(lambda owner: tuple(dict.fromkeys(find_debug_names(owner))))


def _list_enclosing_names(key: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module, outermost first."""
    return (key[:at] for at, character in enumerate(key) if character == ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlock:
    """The results of a block, without references that keep its model alive."""

    recording: Recording
    names: Names
    roots: tuple[weakref.ref[nn.Module], ...]
    """The modules that FQNs are relative to; weak references, so that no model is kept alive."""
    trace: ModuleTrace


ModuleCounts = dict[str, dict[str, defaultdict[Any, int]]]


class CommDebugAnswers(ABC):
    """The methods that `CommMode` shares with CommDebugMode. All results are copies.

    Inside a block, the results cover the block so far; outside, the last block.
    """

    @abstractmethod
    def _current_block(self) -> RecordedBlock: ...

    def get_comm_counts(self) -> dict[object, int]:
        """Return the number of collectives per operation, e.g. ``torch.ops.c10d._allgather_base_``.

        As in CommDebugMode, operations of ``_c10d_functional`` are counted under their names in
        ``c10d_functional``. Point-to-point calls, barriers and in-place variants count too. An
        operation that did not run has a count of 0.
        """
        counts: defaultdict[Any, int] = defaultdict(int)
        for event in self._current_block().recording.collectives:
            counts[_find_packet(event)] += 1
        return counts

    @property
    def comm_counts(self) -> dict[object, int]:
        return self.get_comm_counts()

    def get_total_counts(self) -> int:
        return len(self._current_block().recording.collectives)

    def get_comm_module_counts(self) -> ModuleCounts:
        """Return counts of collectives, keyed by module, direction and operation.

        The direction is ``forward`` or ``backward``. A module's counts include those of its
        submodules. Names begin with the class of the root; ``Global`` has the totals. Collectives
        in recomputation count as backward. Collectives in the optimizer or outside all phases count
        as forward.
        """
        block = self._current_block()
        counts: ModuleCounts = {GLOBAL: _make_empty_counts()}
        for event in block.recording.collectives:
            is_backward = event.phase in {Phase.BACKWARD, Phase.RECOMPUTE}
            direction = "backward" if is_backward else "forward"
            around = () if event.owner is None else block.trace.keys(event.owner)
            for key in (GLOBAL, *around):
                counts.setdefault(key, _make_empty_counts())[direction][_find_packet(event)] += 1
        return counts

    @property
    def comm_module_counts(self) -> ModuleCounts:
        return self.get_comm_module_counts()

    @property
    def comm_module_operation_counts(self) -> dict[str, dict[str, list[dict[str, object]]]]:
        """The operations that each module ran, in order; ``Global`` lists those outside modules.

        Raises:
            RecordingError: The block did not trace operations.
        """
        operations = self._current_block().trace.operations
        if operations is None:
            raise RecordingError(
                "the operations of this block were not traced, because tracing is slow; to trace "
                "them, use `with comm_mode(model, trace_operations=True):`. Counts, and the table "
                "at noise level 0, do not need tracing"
            )
        by_module: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for module, operation in operations:
            listed = by_module.setdefault(module, {"operations_list": []})["operations_list"]
            listed.append(copy.deepcopy(operation))
        return by_module

    @property
    def advanced_module_tracker(self) -> object:
        """The modules that were called, as an instance of torch's tracker.

        It provides ``module_helper_dict`` (``depth``, ``module_type``, and the placements of
        sharded ``parameters`` as text), ``module_parents_dict`` (each module's callers and itself)
        and ``parent_dict`` (the modules that each module called).
        """
        return self._fill_debug_mode().advanced_module_tracker

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the direct parameters of each called module, keyed by module, then parameter name.

        Raises:
            RecordingError: The model no longer exists.
        """
        modules = self._current_block().trace.modules()
        return {module.name: module.parameters() for module in modules if module.placements}

    def get_sharding_info(self) -> dict[str, tuple[object, ...]]:
        """Return the placements of each DTensor parameter, keyed by its FQN."""
        return {
            f"{module.name}.{name}": placements
            for module in self._current_block().trace.modules()
            for name, placements in module.placements.items()
            if placements is not None
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table of each module's counts and operations, with colours for a terminal.

        Args:
            noise_level: 0 for the counts of collectives; 1 adds the modules' classes, sharded
                parameters and operations on DTensors; 2 adds all operations except trivial ones
                such as views; 3 adds the trivial ones.

        Raises:
            RecordingError: The level is not 0, and the block did not trace operations.
        """
        table: str = self._fill_debug_mode(noise_level).generate_comm_debug_tracing_table(
            noise_level
        )
        return table

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file, without colours."""
        self._fill_debug_mode(noise_level).log_comm_debug_tracing_table_to_file(
            file_name, noise_level
        )

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the JSON file that torch's browser view of CommDebugMode reads."""
        self._fill_debug_mode(noise_level).generate_json_dump(file_name, noise_level)

    def _fill_debug_mode(self, noise_level: int = 0) -> Any:
        """Return a CommDebugMode filled with our data. See Note [Answers of CommDebugMode]."""
        from torch.distributed.tensor.debug import CommDebugMode  # noqa: PLC0415  # for few tests

        mode = CommDebugMode()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        mode.comm_counts.update(self.get_comm_counts())
        mode.comm_module_counts = self.get_comm_module_counts()
        if noise_level > 0:
            mode.comm_module_operation_counts = self.comm_module_operation_counts
        modules: dict[str, dict[str, Any]] = {GLOBAL: {"depth": 0}}
        parents: dict[str, set[str]] = {GLOBAL: set()}
        called: dict[str, list[str]] = {}
        for module in self._current_block().trace.modules():
            callers = [GLOBAL, *(caller.name for caller in module.callers)]
            modules[module.name] = {"module_type": module.module_type, "depth": len(callers)}
            placements = module.placements.items()
            sharded = {name: str(places) for name, places in placements if places is not None}
            if sharded:
                modules[module.name]["parameters"] = sharded
            parents[module.name] = {*callers, module.name}
            called.setdefault(callers[-1], []).append(module.name)
        # Add the modules whose backward ran in the block, but whose forward did not.
        for name in (*mode.comm_module_counts, *mode.comm_module_operation_counts):
            if name not in modules:
                above = name.rpartition(".")[0]
                caller = above if above in modules else GLOBAL
                modules[name] = {"depth": modules[caller]["depth"] + 1}
                parents[name] = parents[caller] | {GLOBAL, name}
                called.setdefault(caller, []).append(name)
        tracker = mode.advanced_module_tracker
        tracker.module_helper_dict, tracker.module_parents_dict = modules, parents
        tracker.parent_dict, tracker.sharding_dict = called, self.get_sharding_info()
        with contextlib.suppress(RecordingError):  # omit them if the model no longer exists
            tracker.module_parameters_dict = self.get_parameter_info()
        return mode


def _make_empty_counts() -> dict[str, defaultdict[object, int]]:
    return {"forward": defaultdict(int), "backward": defaultdict(int)}


def _find_packet(event: Collective) -> object:
    namespace, name = event.op.split(".", 1)
    if namespace in {"_c10d_functional", "_c10d_functional_autograd"}:
        legacy = getattr(torch.ops.c10d_functional, name, None)
        if legacy is not None:
            return legacy
    return getattr(getattr(torch.ops, namespace), name)
