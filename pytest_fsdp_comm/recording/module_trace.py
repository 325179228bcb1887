"""Which modules a block called and which operations ran in each: what CommDebugMode's table shows.

Nothing here counts collectives or is compared. A module is noted with the first operation of its
forward, so one that runs none is not in the trace.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch._ops import OpOverload

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.owners.module_names import clean_fqn
from pytest_fsdp_comm.recording.owners.stack import innermost_module, running_modules
from pytest_fsdp_comm.recording.subclasses import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_fsdp_comm.recording.owners.attribution import BackwardMap
    from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch
    from pytest_fsdp_comm.recording.owners.module_names import ModuleNames

GLOBAL: Final = "Global"
"""CommDebugMode's name for everything together, and for what runs in no module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorInputs:
    """The DTensors among an operation's positional arguments."""

    shapes: tuple[torch.Size, ...]
    placements: tuple[tuple[Any, ...], ...]
    mesh: str
    """The mesh of the last of them, as torch prints it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperation:
    """One operation that was dispatched."""

    module: str
    """CommDebugMode's name of the module that ran; `GLOBAL` for none."""
    func: Any
    """The ``torch._ops.OpOverload``."""
    is_backward: bool
    is_recompute: bool
    """Whether a module's forward ran again in backward."""
    dtensors: DTensorInputs | None
    """None for an operation on plain tensors."""


_NO_MODULE: Final = -1
Noted = tuple[int, Any, bool, bool, DTensorInputs | None]
"""An operation as it is noted: the number of its module, then as in `TracedOperation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedParameter:
    """A parameter of a module that was called."""

    placements: tuple[Any, ...] | None
    """When the module was first called or, if FSDP had gathered it then, now; None for a plain
    tensor."""
    tensor: Callable[[], torch.Tensor | None]
    """The parameter; None once it no longer exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModule:
    """A module whose forward ran."""

    name: str
    """CommDebugMode's: the class of its root, and its FQN there."""
    module_type: str
    """Its class, as CommDebugMode writes it."""
    callers: tuple[str, ...]
    """Names of the modules that were running when it was first called, outermost first."""
    parameters: Mapping[str, TracedParameter]
    """Its own, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """What `ModuleTracer` found in a block."""

    modules: Callable[[], tuple[TracedModule, ...]]
    """The modules in the order of their first operations, callers first. Where operations were not
    traced, all that have a forward, in the order of registration, as long as they exist."""
    keys: Mapping[str, tuple[str, ...]]
    """FQN of each owner -> CommDebugMode's names of the module and of those around it that have a
    forward, outermost first."""
    has_operations: bool = True
    """Whether operations were traced."""
    noted: tuple[Noted, ...] = ()
    """What `operations` are made of."""
    names: tuple[str, ...] = ()
    """CommDebugMode's names of the modules that `noted` numbers."""

    def operations(self) -> Iterator[TracedOperation]:
        """The operations in the order of dispatch; made when asked for, since most tests do not."""
        for number, func, is_backward, is_recompute, dtensors in self.noted:
            yield TracedOperation(
                module=GLOBAL if number == _NO_MODULE else self.names[number],
                func=func,
                is_backward=is_backward,
                is_recompute=is_recompute,
                dtensors=dtensors,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A module on the way."""

    module: weakref.ref[nn.Module]
    placements: dict[str, tuple[Any, ...] | None]
    """Those of its own parameters, by name."""


class ModuleTracer:
    """Notes operations while a block runs."""

    def __init__(self, backward: BackwardMap, units: UnitWatch) -> None:
        """Sets up where to ask for the module in backward.

        Args:
            backward: Finds the modules of autograd nodes.
            units: The FSDP units that act.

        Raises:
            UpstreamChangedError: torch has moved a name that this relies on (read in torch 2.13).
        """
        self._backward = backward
        self._units = units
        use = "the recorder relies on to tell operations on fake tensors"
        mode_of = upstream.look_up("torch", "torch._C", "_get_dispatch_mode", use)
        key: Any = upstream.look_up("torch", "torch._C", "_TorchDispatchModeKey", use)
        self._fake_mode: Callable[[], Any] = functools.partial(mode_of, key.FAKE)
        # For each operation of the block, so tuples, and modules as numbers.
        self._noted: list[Noted] = []
        self._seen: list[_Seen] = []
        # Of each module whose forward ran, in order, the modules that were running.
        self._callers: dict[int, tuple[int, ...]] = {}
        self._numbers: dict[int, int] = {}  # by identity, valid while the module lives
        self._mesh_texts: dict[int, tuple[Any, str]] = {}  # by identity, so the mesh is kept alive

    def note(self, func: Any, dtensor_args: Sequence[Any] | None = None) -> None:
        """Notes an operation that is dispatched now.

        Args:
            func: A ``torch._ops.OpOverload``, or a higher-order operator, which is left out.
            dtensor_args: Its positional arguments, if it is given to DTensor.
        """
        if not isinstance(func, OpOverload):
            return
        running = innermost_module()
        is_backward = self._backward.is_in_backward()
        if running is None and is_backward:
            number = self._number_in_backward()
        else:
            number = _NO_MODULE if running is None else self._number(running, is_backward)
        # On fake tensors nothing is done: DTensor asks so what an operation would return.
        if dtensor_args is not None or self._fake_mode() is None:
            dtensors = None if dtensor_args is None else self._dtensors(dtensor_args)
            is_recompute = is_backward and running is not None
            self._noted.append((number, func, is_backward, is_recompute, dtensors))

    def _number_in_backward(self) -> int:
        issuer = self._units.issuer
        if issuer:
            return self._number(issuer[0], is_backward=True)
        # To search the model for each parameter would take long; its gradient was just computed.
        if self._backward.adds_gradient() and self._noted and self._noted[-1][2]:
            return self._noted[-1][0]
        module = self._backward.module_of_current_node()
        return _NO_MODULE if module is None else self._number(module, is_backward=True)

    def _number(self, module: nn.Module, is_backward: bool) -> int:
        number = self._known(module)
        if number is None:
            number = self._add(module)
        if not is_backward and number not in self._callers:
            self._note_calls(running_modules())
        return number

    def _known(self, module: nn.Module) -> int | None:
        number = self._numbers.get(id(module))
        # Another module may have had this identity.
        return number if number is not None and self._seen[number].module() is module else None

    def _add(self, module: nn.Module) -> int:
        number = self._numbers[id(module)] = len(self._seen)
        placements = {name: _placements(own) for name, own in _parameters(module).items()}
        self._seen.append(_Seen(module=weakref.ref(module), placements=placements))
        return number

    def _note_calls(self, running: Sequence[nn.Module]) -> None:
        callers: tuple[int, ...] = ()
        for module in running:
            number = self._known(module)
            if number is None:
                number = self._add(module)
            self._callers.setdefault(number, callers)
            if number not in callers:
                callers = (*callers, number)

    def _dtensors(self, args: Sequence[Any]) -> DTensorInputs:
        found = [arg for arg in args if is_dtensor(arg)]
        return DTensorInputs(
            shapes=tuple(arg.shape for arg in found),
            placements=tuple(tuple(arg.placements) for arg in found),
            mesh=self._mesh_text(found[-1].device_mesh) if found else "",
        )

    def _mesh_text(self, mesh: Any) -> str:
        known = self._mesh_texts.get(id(mesh))
        if known is None:
            known = self._mesh_texts[id(mesh)] = (mesh, str(mesh))
        return known[1]

    def result(
        self,
        roots: Sequence[nn.Module],
        names: ModuleNames,
        owners: Iterable[str],
    ) -> ModuleTrace:
        """Names what was noted up to now.

        Args:
            roots: The modules that names are relative to.
            names: The names of their modules.
            owners: FQNs of the owners of collectives.
        """
        alive = [seen.module() for seen in self._seen]
        outermost = (alive[number] for number, callers in self._callers.items() if not callers)
        keys = _keys((*roots, *(module for module in outermost if module is not None)))
        shown = [
            GLOBAL if module is None else keys.get(id(module), type(module).__name__)
            for module in alive
        ]
        modules = {
            shown[number]: TracedModule(
                name=shown[number],
                module_type=_module_type(module),
                callers=tuple(shown[caller] for caller in callers),
                parameters=dict(_trace_parameters(module, self._seen[number].placements)),
            )
            for number, callers in self._callers.items()
            if (module := alive[number]) is not None
        }
        called = tuple(modules.values())
        return ModuleTrace(
            modules=lambda: called,
            keys=_keys_of_owners(owners, roots, names, keys),
            noted=tuple(self._noted),
            names=tuple(shown),
        )

    def clear(self) -> None:
        """Lets go of everything."""
        self._noted.clear()
        self._seen.clear()
        self._callers.clear()
        self._numbers.clear()
        self._mesh_texts.clear()


def untraced(roots: Sequence[nn.Module], names: ModuleNames, owners: Iterable[str]) -> ModuleTrace:
    """What is known without a tracer; arguments as for `ModuleTracer.result`."""
    return ModuleTrace(
        # For every block, and few tests ask.
        modules=functools.partial(_modules_below, [weakref.ref(root) for root in roots]),
        keys=_keys_of_owners(owners, roots, names, _keys(roots)),
        has_operations=False,
    )


def _modules_below(held: Sequence[weakref.ref[nn.Module]]) -> tuple[TracedModule, ...]:
    roots = [root for root in (reference() for reference in held) if root is not None]
    if len(roots) < len(held):
        raise model_is_gone()
    keys = _keys(roots)
    modules: dict[str, TracedModule] = {}
    for module in (module for root in roots for module in root.modules() if _is_callable(module)):
        name = keys[id(module)]
        own: dict[str, tuple[Any, ...] | None] = dict.fromkeys(_parameters(module))
        modules[name] = TracedModule(
            name=name,
            module_type=_module_type(module),
            callers=tuple(outer for outer in _around(name) if outer in modules),
            parameters=dict(_trace_parameters(module, own)),
        )
    return tuple(modules.values())


def model_is_gone() -> RecordingError:
    """The error of a question for modules that no longer exist."""
    return RecordingError(
        "the recorded model and its parameters no longer exist; keep a reference to the model "
        "until you have read them"
    )


def _keys_of_owners(
    owners: Iterable[str],
    roots: Sequence[nn.Module],
    names: ModuleNames,
    keys: Mapping[int, str],
) -> dict[str, tuple[str, ...]]:
    below = [module for root in roots for module in root.modules()]
    own = {fqn: keys[id(module)] for module in below if (fqn := names.fqn(module)) is not None}
    callable_ = {keys[id(module)] for module in below if _is_callable(module)}
    return {owner: tuple(_keys_of(owner, own, callable_)) for owner in owners}


def _is_callable(module: nn.Module) -> bool:
    """Whether it has a forward, unlike a ModuleList."""
    return type(module).forward is not nn.Module.forward


def _module_type(module: nn.Module) -> str:
    return str(type(module)).replace("<", "").replace(">", "")


def _placements(parameter: Any) -> tuple[Any, ...] | None:
    return tuple(parameter.placements) if is_dtensor(parameter) else None


def _trace_parameters(
    module: nn.Module, placements: Mapping[str, tuple[Any, ...] | None]
) -> Iterator[tuple[str, TracedParameter]]:
    held = weakref.ref(module)
    # FSDP registers other tensors while the unit is gathered, as it may be during the call.
    now = _parameters(module)
    for name, placed in placements.items():
        yield (
            name,
            TracedParameter(
                placements=_placements(now.get(name)) if placed is None else placed,
                tensor=functools.partial(_find, held, name),
            ),
        )


def _find(held: weakref.ref[nn.Module], name: str) -> torch.Tensor | None:
    return _parameters(held()).get(name)


def _parameters(module: nn.Module | None) -> dict[str, torch.Tensor]:
    # Not by getattr(), which would run a property of the user.
    return {} if module is None else dict(module.named_parameters(recurse=False))


def _keys(roots: Iterable[nn.Module]) -> dict[int, str]:
    """CommDebugMode's name of each module below some roots, by its ``id``."""
    keys: dict[int, str] = {}
    for root in roots:
        for name, module in root.named_modules():
            fqn = clean_fqn(name)
            keys.setdefault(id(module), type(root).__name__ + (f".{fqn}" if fqn else ""))
    return keys


def _keys_of(owner: str, keys: Mapping[str, str], callable_: set[str]) -> Iterator[str]:
    """The names of an owner, of several modules if it is their unit, and of those around it."""
    yielded: set[str] = set()
    for member in [owner] if owner in keys else owner.split("+"):
        key = keys.get(member)
        if key is None:
            continue
        for name in (*_around(key), key):
            if name not in yielded and (name == key or name in callable_):
                yielded.add(name)
                yield name


def _around(key: str) -> Iterator[str]:
    """The names of the modules around one, outermost first."""
    return (key[:at] for at, character in enumerate(key) if character == ".")
