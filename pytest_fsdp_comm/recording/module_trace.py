"""Trace which modules a block calls and which operations they run, as CommDebugMode names them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.owners.attribution import BackwardMap, Maker
from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch
from pytest_fsdp_comm.recording.owners.module_names import (
    ModuleNames,
    has_forward,
    make_debug_name,
)
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
    `resolve` reads its placements."""
    callers: tuple[TracedModule, ...] = ()
    """The modules that were running when this one was first called, outermost first."""
    name: str = GLOBAL
    """The module's name in CommDebugMode: the root's class, then the FQN. `resolve` sets it."""

    def resolve(self, keys: Mapping[int, str]) -> None:
        """Set the name from `keys`, and fill in the placements of parameters that were gathered."""
        module = self.module()
        if module is not None:
            self.name = keys.get(id(module), type(module).__name__)
            # While a unit is gathered, FSDP registers plain tensors, which have no placements.
            now = _direct_parameters(module)
            self.placements = {
                name: _placements(now.get(name)) if placed is None else placed
                for name, placed in self.placements.items()
            }

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the direct parameters, keyed by name; raise if the model no longer exists."""
        now = _direct_parameters(self.module())
        if not now.keys() >= self.placements.keys():
            raise _make_model_gone_error()
        # Reading `.data` dispatches an operation: hide it from the recording and the test's modes.
        with upstream.look_up("torch.utils._python_dispatch", "_disable_current_modes")():
            return {name: now[name].data for name in self.placements}


def _make_traced_module(module: nn.Module) -> TracedModule:
    module_type = str(type(module)).replace("<", "").replace(">", "")
    placements = {name: _placements(param) for name, param in _direct_parameters(module).items()}
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
        self._fake_mode = upstream.look_up("torch._guards", "active_fake_mode")
        self._operations: list[tuple[TracedModule | None, dict[str, Any]]] = []
        self._traced: dict[int, TracedModule] = {}  # keyed by id, valid while the module exists
        self._called: dict[TracedModule, None] = {}

    def trace_operation(self, func: object, dtensor_args: Sequence[Any] | None = None) -> None:
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
        dtensors = [arg for arg in dtensor_args or () if isinstance(arg, DTensor)]
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
            traced = self._traced[id(module)] = _make_traced_module(module)
        return traced

    def make_trace(self, names: ModuleNames) -> ModuleTrace:
        """Return the trace so far."""
        outermost = (traced.module() for traced in self._called if not traced.callers)
        outside = _map_ids_to_debug_names(module for module in outermost if module is not None)
        keys = {**outside, **names.debug_names}
        for traced in {*self._called, *(traced for traced, _ in self._operations)}:
            if traced is not None:
                traced.resolve(keys)
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
        modules=functools.partial(_list_traced_modules, [weakref.ref(root) for root in roots]),
        keys=_make_debug_name_finder(names),
    )


def _list_traced_modules(references: Sequence[weakref.ref[nn.Module]]) -> tuple[TracedModule, ...]:
    roots = [root for root in (reference() for reference in references) if root is not None]
    if len(roots) < len(references):
        raise _make_model_gone_error()
    keys = _map_ids_to_debug_names(roots)
    modules: dict[str, TracedModule] = {}
    for module in (module for root in roots for module in root.modules() if has_forward(module)):
        traced = _make_traced_module(module)
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
    return tuple(parameter.placements) if isinstance(parameter, DTensor) else None


def _direct_parameters(module: nn.Module | None) -> dict[str, torch.Tensor]:
    # Do not use getattr(), which could run a property of the user's class.
    return {} if module is None else dict(module.named_parameters(recurse=False))


def _map_ids_to_debug_names(roots: Iterable[nn.Module]) -> dict[int, str]:
    keys: dict[int, str] = {}
    for root in roots:
        for path, module in root.named_modules():
            keys.setdefault(id(module), make_debug_name(root, path))
    return keys


def _make_debug_name_finder(names: ModuleNames) -> Callable[[str], tuple[str, ...]]:
    # Refer to names, not to modules, so that no model is kept alive.
    by_fqn = {names.by_id[key]: name for key, name in names.debug_names.items()}
    called = {names.debug_names[id(module)] for module in names.modules if has_forward(module)}

    @functools.cache
    def find_debug_names(owner: str) -> tuple[str, ...]:
        # If a unit has several modules, its name is their FQNs, joined with ``+``.
        fqns = [owner] if owner in by_fqn else owner.split("+")
        inner = [by_fqn[fqn] for fqn in fqns if fqn in by_fqn]
        around = (
            (*filter(called.__contains__, _list_enclosing_names(name)), name) for name in inner
        )
        return tuple(dict.fromkeys(chain.from_iterable(around)))

    return find_debug_names


def _list_enclosing_names(key: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module, outermost first."""
    return (key[:index] for index, character in enumerate(key) if character == ".")
