"""The questions of torch's CommDebugMode, under its names, answered from a recording."""

# Note [Module trace]
# Nothing here counts collectives or is compared. A module is noted with the first operation of its
# forward, so one that runs none is not in the trace.

# Note [Answers of CommDebugMode]
# torch's class writes its own answers: it is filled with what was recorded and is never entered.
# Entered, it would count by global module hooks, which lose a module that runs twice (IndexError),
# take a backward without its forward for a KeyError, book prefetched gathers on the module that
# runs, add views of their own to what they list, and keep the model alive. So the modules are those
# of the recording's stack walks, and tables, JSON and the tracker are torch's.

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
from torch._ops import OpOverload

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.events import Collective, Phase, Recording
from pytest_fsdp_comm.comm.questions import Names
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.dtensors import is_dtensor
from pytest_fsdp_comm.recording.owners.attribution import BackwardMap, Maker
from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch
from pytest_fsdp_comm.recording.owners.module_names import ModuleNames, clean_fqn, has_forward

GLOBAL: Final = "Global"
"""CommDebugMode's name for everything together, and for what runs in no module."""

Placements = tuple[Any, ...] | None
"""Those of a parameter that is a DTensor; None for a plain tensor."""


@dataclass(slots=True, eq=False)
class TracedModule:
    """A module that was called, or in whose backward an operation ran."""

    module: weakref.ref[nn.Module]
    module_type: str
    """Its class, as CommDebugMode writes it."""
    placements: dict[str, Placements]
    """Of its own parameters by name, when first seen or, if FSDP had gathered them, when named."""
    callers: tuple[TracedModule, ...] = ()
    """The modules that were running when it was first called, outermost first."""
    name: str = GLOBAL
    """CommDebugMode's, when the block ends: the class of its root, and its FQN there."""

    def settle(self, keys: Mapping[int, str]) -> None:
        """Name it, by the ``id`` of modules, and look again at what FSDP had gathered."""
        module = self.module()
        if module is not None:
            self.name = keys.get(id(module), type(module).__name__)
            # FSDP registers other tensors while the unit is gathered, as it may be during the call.
            now = _parameters(module)
            self.placements = {
                name: _placements(now.get(name)) if placed is None else placed
                for name, placed in self.placements.items()
            }

    def parameters(self) -> dict[str, torch.Tensor]:
        """Its own parameters by name; an error once the model no longer exists."""
        now = _parameters(self.module())
        if not now.keys() >= self.placements.keys():
            raise _model_is_gone()
        # `.data` is an operation, and a question must not be part of what it asks about: hide
        # it from the recording and a test's own modes. Read in torch 2.6 to 2.15.
        with upstream.look_up("torch.utils._python_dispatch", "_disable_current_modes")():
            return {name: now[name].data for name in self.placements}


def _traced(module: nn.Module) -> TracedModule:
    module_type = str(type(module)).replace("<", "").replace(">", "")
    placements = {name: _placements(own) for name, own in _parameters(module).items()}
    return TracedModule(weakref.ref(module), module_type, placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """Which modules a block called, and which operations ran in them."""

    modules: Callable[[], tuple[TracedModule, ...]]
    """Callers first, in order of first operations; untraced, all with a forward, as registered."""
    keys: Callable[[str], tuple[str, ...]]
    """By an owner's FQN, CommDebugMode's names of it and of callables around it, from outside."""
    operations: Sequence[tuple[str, dict[str, Any]]] | None = None
    """Each operation's module name and dictionary, in dispatch order; None if untraced."""


class ModuleTracer:
    """Notes operations while a block runs."""

    def __init__(self, backward: BackwardMap, units: UnitWatch) -> None:
        self._backward = backward
        self._units = units
        # Read in torch 2.13.
        self._fake_mode = upstream.look_up("torch._guards", "active_fake_mode")
        self._operations: list[tuple[TracedModule | None, dict[str, Any]]] = []
        self._seen: dict[int, TracedModule] = {}  # by identity, valid while the module lives
        self._called: dict[TracedModule, None] = {}

    def note(self, func: Any, dtensor_args: Sequence[Any] | None = None) -> None:
        """Note an operation that is dispatched now; with its arguments if DTensor is given it."""
        if not isinstance(func, OpOverload):  # a higher-order operator
            return
        running = self._backward.innermost
        is_backward = self._backward.is_in_backward()
        seen: TracedModule | None = None
        if running is not None:
            seen = self._note_module(running)
            if seen not in self._called and not is_backward:
                callers: tuple[TracedModule, ...] = ()
                for caller in map(self._note_module, self._backward.modules):
                    if caller not in self._called:
                        caller.callers = callers
                        self._called[caller] = None
                    if caller not in callers:
                        callers = (*callers, caller)
        elif is_backward:
            seen = self._acting_in_backward()
        # An operation on fake tensors does nothing: DTensor runs it to learn what it would return.
        if dtensor_args is None and self._fake_mode() is not None:
            return
        found = [arg for arg in dtensor_args or () if is_dtensor(arg)]
        operation = {
            "name": func,
            "input_shape": [arg.shape for arg in found],
            "input_sharding": [arg.placements for arg in found],
            "device_mesh": str(found[-1].device_mesh) if found else "",
            "is_bw": is_backward,
            "is_activation_checkpointing": is_backward and running is not None,
        }
        self._operations.append((seen, operation))

    def _acting_in_backward(self) -> TracedModule | None:
        issuer = self._units.issuer
        if issuer:
            return self._note_module(issuer[0])
        # To search the model for each parameter would take long; its gradient was just computed.
        if self._backward.adds_gradient() and self._operations:
            seen, operation = self._operations[-1]
            if operation["is_bw"]:
                return seen
        maker, _ = self._backward.maker_of_current_node()
        return None if isinstance(maker, Maker) else self._note_module(maker)

    def _note_module(self, module: nn.Module) -> TracedModule:
        seen = self._seen.get(id(module))
        # Another module may have had this identity.
        if seen is None or seen.module() is not module:
            seen = self._seen[id(module)] = _traced(module)
        return seen

    def result(self, roots: Sequence[nn.Module], names: ModuleNames) -> ModuleTrace:
        """Name what was noted up to now, relative to the roots."""
        outermost = (seen.module() for seen in self._called if not seen.callers)
        keys = _keys((*roots, *(module for module in outermost if module is not None)))
        for seen in {*self._called, *(noted[0] for noted in self._operations)}:
            if seen is not None:
                seen.settle(keys)
        called = {seen.name: seen for seen in self._called if seen.module() is not None}
        return ModuleTrace(
            modules=lambda: tuple(called.values()),
            keys=_keys_of(names),
            operations=tuple(
                (GLOBAL if seen is None else seen.name, operation)
                for seen, operation in self._operations
            ),
        )


def untraced(roots: Sequence[nn.Module], names: ModuleNames) -> ModuleTrace:
    """What is known without a `ModuleTracer`."""
    return ModuleTrace(
        # Lazily: every block has a trace, and few tests look at it.
        modules=functools.partial(_modules_below, [weakref.ref(root) for root in roots]),
        keys=_keys_of(names),
    )


def _modules_below(held: Sequence[weakref.ref[nn.Module]]) -> tuple[TracedModule, ...]:
    roots = [root for root in (reference() for reference in held) if root is not None]
    if len(roots) < len(held):
        raise _model_is_gone()
    keys = _keys(roots)
    modules: dict[str, TracedModule] = {}
    for module in (module for root in roots for module in root.modules() if has_forward(module)):
        traced = _traced(module)
        traced.name = keys[id(module)]
        traced.callers = tuple(modules[key] for key in _around(traced.name) if key in modules)
        modules[traced.name] = traced
    return tuple(modules.values())


def _model_is_gone() -> RecordingError:
    return RecordingError(
        "the recorded model and its parameters no longer exist; keep a reference to the model "
        "until you have read them"
    )


def _placements(parameter: Any) -> Placements:
    return tuple(parameter.placements) if is_dtensor(parameter) else None


def _parameters(module: nn.Module | None) -> dict[str, torch.Tensor]:
    # Not by getattr(), which would run a property of the user.
    return {} if module is None else dict(module.named_parameters(recurse=False))


def _keys(roots: Iterable[nn.Module]) -> dict[int, str]:
    """CommDebugMode's name of each module below some roots, by its ``id``."""
    keys: dict[int, str] = {}
    for root in roots:
        for path, module in root.named_modules():
            keys.setdefault(id(module), _key(type(root).__name__, path))
    return keys


def _key(root: str, path: str) -> str:
    fqn = clean_fqn(path)
    return f"{root}.{fqn}" if fqn else root


def _keys_of(names: ModuleNames) -> Callable[[str], tuple[str, ...]]:
    # Without the modules, which nothing may keep alive. Lazily, as few tests ask.
    places = [(id(module), has_forward(module)) for module in names.modules]
    by_id, paths = names.by_id, names.paths

    @functools.cache
    def named() -> tuple[dict[str, str], set[str]]:
        first: dict[int, tuple[str, bool, str, str]] = {}
        for (module, is_callable), path in zip(places, paths, strict=True):
            first.setdefault(module, (by_id[module], is_callable, *path))
        keys = {fqn: _key(*path) for fqn, _, *path in first.values()}
        return keys, {_key(*path) for _, is_callable, *path in first.values() if is_callable}

    def keys_of(owner: str) -> Iterator[str]:
        keys, callable_ = named()
        # The owner is several modules if they are one unit.
        for fqn in [owner] if owner in keys else owner.split("+"):
            if fqn in keys:
                yield from (outer for outer in _around(keys[fqn]) if outer in callable_)
                yield keys[fqn]

    return functools.cache(lambda owner: tuple(dict.fromkeys(keys_of(owner))))


def _around(key: str) -> Iterator[str]:
    """The names of the modules around one, outermost first."""
    return (key[:at] for at, character in enumerate(key) if character == ".")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlock:
    """What is known of a block."""

    recording: Recording
    names: Names
    roots: tuple[weakref.ref[nn.Module], ...]
    """Names are relative to these, plain in the first; weak, so as to keep no model alive."""
    trace: ModuleTrace


ModuleCounts = dict[str, dict[str, defaultdict[Any, int]]]


class CommDebugAnswers(ABC):
    """What `CommMode` answers under CommDebugMode's names. All values are copies.

    Inside a block the answers are those up to now, after it those of the block.
    """

    @abstractmethod
    def _known_block(self) -> RecordedBlock: ...

    def get_comm_counts(self) -> dict[Any, int]:
        """Count by operation, e.g. ``torch.ops.c10d._allgather_base_``; 0 for any other.

        As CommDebugMode does, operations of ``_c10d_functional`` are counted under their names in
        ``c10d_functional``. Unlike it, point-to-point calls, barriers and in-place variants count.
        """
        counts: defaultdict[Any, int] = defaultdict(int)
        for event in self._known_block().recording.collectives:
            counts[_packet(event)] += 1
        return counts

    @property
    def comm_counts(self) -> dict[Any, int]:
        return self.get_comm_counts()

    def get_total_counts(self) -> int:
        return len(self._known_block().recording.collectives)

    def get_comm_module_counts(self) -> ModuleCounts:
        """Count by module, then ``forward`` or ``backward``, then operation.

        A module's counts include those of the modules in it. Names begin with the class of the
        root, and ``Global`` has everything. What a recomputation sends counts as backward, and what
        is sent in no phase as forward.
        """
        block = self._known_block()
        counts: ModuleCounts = {GLOBAL: _no_counts()}
        for event in block.recording.collectives:
            is_backward = event.phase in {Phase.BACKWARD, Phase.RECOMPUTE}
            direction = "backward" if is_backward else "forward"
            around = () if event.owner is None else block.trace.keys(event.owner)
            for key in (GLOBAL, *around):
                counts.setdefault(key, _no_counts())[direction][_packet(event)] += 1
        return counts

    @property
    def comm_module_counts(self) -> ModuleCounts:
        return self.get_comm_module_counts()

    @property
    def comm_module_operation_counts(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """The operations that ran in each module, in order; ``Global`` has those of no module.

        Raises:
            RecordingError: Operations were not traced.
        """
        operations = self._known_block().trace.operations
        if operations is None:
            raise RecordingError(
                "the operations of this block were not traced, which would slow every recording "
                "down; ask for it before: `with comm_mode(model, trace_operations=True):`. Counts, "
                "and the table of noise level 0, need no trace"
            )
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for module, operation in operations:
            listed = found.setdefault(module, {"operations_list": []})["operations_list"]
            listed.append(copy.deepcopy(operation))
        return found

    @property
    def advanced_module_tracker(self) -> Any:
        """The modules that were called, as CommDebugMode keeps them.

        Of torch's tracker, ``module_helper_dict`` has ``depth``, ``module_type`` and the placements
        of sharded ``parameters`` as text, ``module_parents_dict`` the callers of each module and
        itself, ``parent_dict`` the modules that each one called.
        """
        return self._answering().advanced_module_tracker

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each module that was called and has any of its own, by their names.

        Raises:
            RecordingError: The model no longer exists.
        """
        modules = self._known_block().trace.modules()
        return {module.name: module.parameters() for module in modules if module.placements}

    def get_sharding_info(self) -> dict[str, tuple[Any, ...]]:
        """The placements of each parameter that is a DTensor, by module and name."""
        return {
            f"{module.name}.{name}": placements
            for module in self._known_block().trace.modules()
            for name, placements in module.placements.items()
            if placements is not None
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Write counts and operations by module as text with colours.

        Args:
            noise_level: 0 for the counts of collectives; 1 adds the modules' classes, sharded
                parameters and operations on DTensors; 2 all operations but trivial ones such as
                views; 3 those too.

        Raises:
            RecordingError: Operations were not traced, which all levels but 0 show.
        """
        table: str = self._answering(noise_level).generate_comm_debug_tracing_table(noise_level)
        return table

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file, without colours."""
        self._answering(noise_level).log_comm_debug_tracing_table_to_file(file_name, noise_level)

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write what torch's browser view of CommDebugMode reads."""
        self._answering(noise_level).generate_json_dump(file_name, noise_level)

    def _answering(self, noise_level: int = 0) -> Any:
        """Fill torch's own class: see Note [Answers of CommDebugMode]."""
        from torch.distributed.tensor.debug import CommDebugMode  # noqa: PLC0415  # for few tests

        mode = CommDebugMode()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        mode.comm_counts.update(self.get_comm_counts())
        mode.comm_module_counts = self.get_comm_module_counts()
        if noise_level > 0:
            mode.comm_module_operation_counts = self.comm_module_operation_counts
        modules: dict[str, dict[str, Any]] = {GLOBAL: {"depth": 0}}
        parents: dict[str, set[str]] = {GLOBAL: set()}
        called: dict[str, list[str]] = {}
        for module in self._known_block().trace.modules():
            callers = [GLOBAL, *(caller.name for caller in module.callers)]
            modules[module.name] = {"module_type": module.module_type, "depth": len(callers)}
            sharded = {name: str(own) for name, own in module.placements.items() if own is not None}
            if sharded:
                modules[module.name]["parameters"] = sharded
            parents[module.name] = {*callers, module.name}
            called.setdefault(callers[-1], []).append(module.name)
        # Modules of which only the backward ran in the block.
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
        with contextlib.suppress(RecordingError):  # the model is gone, and only they with it
            tracker.module_parameters_dict = self.get_parameter_info()
        return mode


def _no_counts() -> dict[str, defaultdict[Any, int]]:
    return {"forward": defaultdict(int), "backward": defaultdict(int)}


def _packet(event: Collective) -> Any:
    namespace, name = event.op.split(".", 1)
    if namespace in {"_c10d_functional", "_c10d_functional_autograd"}:
        legacy = getattr(torch.ops.c10d_functional, name, None)
        if legacy is not None:
            return legacy
    return getattr(getattr(torch.ops, namespace), name)
