"""Which modules a block called and which operations ran in each: what CommDebugMode shows."""

# Note [Module trace]
# Nothing here counts collectives or is compared. A module is noted with the first operation of its
# forward, so one that runs none is not in the trace.

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch._ops import OpOverload

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.dtensors import is_dtensor
from pytest_fsdp_comm.recording.owners.module_names import clean_fqn, has_forward, named_modules
from pytest_fsdp_comm.recording.owners.stack import innermost_module, running_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pytest_fsdp_comm.recording.owners.attribution import BackwardMap
    from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch
    from pytest_fsdp_comm.recording.owners.module_names import ModuleNames

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
        # `.data` is an operation, and a question must not be part of what it asks about.
        with _unwatched():
            return {name: now[name].data for name in self.placements}


def _unwatched() -> AbstractContextManager[object]:
    """Hide what runs from the dispatch modes of this thread: the recording, and a test's own."""
    use = "the recorder relies on to answer within a block"
    # Read in torch 2.6 to 2.15.
    disable = upstream.look_up(
        "torch", "torch.utils._python_dispatch", "_disable_current_modes", use
    )
    unwatched: AbstractContextManager[object] = disable()
    return unwatched


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
    operations: Callable[[], Iterator[tuple[str, dict[str, Any]]]] | None = None
    """Makes each operation's module name and dictionary, in dispatch order; None if untraced."""


# A tuple for each of the many operations, and CommDebugMode's dictionary only where a test looks.
_Noted = tuple["TracedModule | None", Any, bool, bool, tuple[Any, ...]]


def _operation_dicts(operations: Iterable[_Noted]) -> Iterator[tuple[str, dict[str, Any]]]:
    for seen, func, is_backward, is_recompute, dtensors in operations:
        shapes, placements, mesh = dtensors or ((), (), "")
        yield (
            GLOBAL if seen is None else seen.name,
            {
                "name": func,
                "input_shape": [*shapes],
                "input_sharding": [*placements],
                "device_mesh": mesh,
                "is_bw": is_backward,
                "is_activation_checkpointing": is_recompute,
            },
        )


class ModuleTracer:
    """Notes operations while a block runs."""

    def __init__(self, backward: BackwardMap, units: UnitWatch) -> None:
        """Prepare to find the module of each operation."""
        self._backward = backward
        self._units = units
        use = "the recorder relies on to recognise operations on fake tensors"
        # Read in torch 2.13.
        mode_of = upstream.look_up("torch", "torch._C", "_get_dispatch_mode", use)
        key: Any = upstream.look_up("torch", "torch._C", "_TorchDispatchModeKey", use)
        self._fake_mode: Callable[[], Any] = functools.partial(mode_of, key.FAKE)
        self._operations: list[_Noted] = []
        self._seen: dict[int, TracedModule] = {}  # by identity, valid while the module lives
        self._called: dict[TracedModule, None] = {}

    def note(self, func: Any, dtensor_args: Sequence[Any] | None = None) -> None:
        """Note an operation that is dispatched now; with its arguments if DTensor is given it."""
        if not isinstance(func, OpOverload):  # a higher-order operator
            return
        running = innermost_module()
        is_backward = self._backward.is_in_backward()
        seen: TracedModule | None = None
        if running is not None:
            seen = self._note_module(running)
            if seen not in self._called and not is_backward:
                self._note_calls()
        elif is_backward:
            seen = self._acting_in_backward()
        # An operation on fake tensors does nothing: DTensor runs it to learn what it would return.
        if dtensor_args is None and self._fake_mode() is not None:
            return
        dtensors: tuple[Any, ...] = ()
        if dtensor_args is not None:
            found = [arg for arg in dtensor_args if is_dtensor(arg)]
            mesh = str(found[-1].device_mesh) if found else ""
            dtensors = ([arg.shape for arg in found], [arg.placements for arg in found], mesh)
        is_recompute = is_backward and running is not None
        self._operations.append((seen, func, is_backward, is_recompute, dtensors))

    def _acting_in_backward(self) -> TracedModule | None:
        issuer = self._units.issuer
        if issuer:
            return self._note_module(issuer[0])
        # To search the model for each parameter would take long; its gradient was just computed.
        if self._backward.adds_gradient() and self._operations:
            seen, _, is_backward, *_ = self._operations[-1]
            if is_backward:
                return seen
        module = self._backward.module_of_current_node()
        return None if module is None else self._note_module(module)

    def _note_module(self, module: nn.Module) -> TracedModule:
        seen = self._seen.get(id(module))
        # Another module may have had this identity.
        if seen is None or seen.module() is not module:
            seen = self._seen[id(module)] = _traced(module)
        return seen

    def _note_calls(self) -> None:
        callers: tuple[TracedModule, ...] = ()
        for seen in map(self._note_module, running_modules()):
            if seen not in self._called:
                seen.callers = callers
                self._called[seen] = None
            if seen not in callers:
                callers = (*callers, seen)

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
            operations=functools.partial(_operation_dicts, tuple(self._operations)),
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
        for path, module in named_modules(root):
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
