"""Decide for each collective its owner, where it was issued, its phase and its source."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from pytest_fsdp_comm.comm.events import Phase, Role, Source
from pytest_fsdp_comm.recording.owners.fsdp import Gather, UnitWatch, own_parameters
from pytest_fsdp_comm.recording.owners.module_names import Modules
from pytest_fsdp_comm.recording.owners.stack import StackScan, compiled_module, is_graph, running
from pytest_fsdp_comm.upstream import look_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a tensor is."""

    parameter: torch.Tensor | None
    """Whose value or gradient; None if it may be that of several."""
    role: Role | None
    """None if it may be either."""


@dataclass(slots=True)
class Carried:
    """What a collective carries. Where its result goes may show that after its call."""

    label: Label | None = None
    """None if nothing proves it."""


@dataclass(slots=True)
class Attribution:
    """Which modules an event belongs to, and why it happened."""

    owner: Modules
    """The modules of the unit that it serves, or the one module; empty if none."""
    issued_in: Modules
    """The module that was running, or those of the unit whose hook was; empty if none."""
    phase: Phase
    source: Source
    lacks_forward: bool = False
    """It happened in backward, and the forward that would name its module was not recorded."""
    adds_gradient: bool = False
    """It is issued while the gradient of a parameter is added, and no unit of FSDP requested it."""
    is_from_hook: bool = False
    """Of DDP: Python code requested it, such as a communication hook, and not the reducer."""
    gather: Gather | None = None
    carried: Carried | None = None
    """What it carries, of a collective that no unit sends; None for any other."""

    @property
    def label(self) -> Label | None:
        return None if self.carried is None else self.carried.label

    @property
    def acting(self) -> Modules:
        return (*self.owner, *self.issued_in)


# Note [Backward map]
# In backward no module runs, so what is sent there belongs to the module whose forward made the
# autograd node that runs. A thread numbers its nodes, so the ones that a module makes lie between
# the numbers at its borders, less those at the borders of the modules that it calls: at each border
# the nodes since the last one are noted as those of what has run until then. That also holds for a
# node made in a forward pre-hook, before the module's first own operation, and for one of an
# autograd.Function, whose forward runs without grad mode. The node that adds a gradient, which no
# forward made, belongs to the module of its parameter. A node that a backward made
# (create_graph=True) belongs to the module that called this backward, if any did.
# A graph may run backward in a later block than the one that made it, so the notes live as long as
# their comm_mode, and hold modules weakly. What made a node between two blocks is not known. Each
# thread numbers its nodes from 0.


class Maker(Enum):
    """What made an autograd node, if no known module did."""

    NO_MODULE = auto()  # code outside of every module, or a module that no longer exists
    UNSEEN = auto()  # whatever ran while nothing was recorded


class BackwardMap:
    """Find, in backward, the module whose forward made a node. See Note [Backward map]."""

    def __init__(self) -> None:
        """Look up what it needs of autograd (the same in torch 2.7 to 2.15)."""
        self._next_number: Callable[[], int] = look_up("torch.autograd", "_get_sequence_nr")
        self._current_node: Callable[[], Any] = look_up("torch._C", "_current_autograd_node")
        self._current_task: Callable[[], int] = look_up("torch._C", "_current_graph_task_id")
        self._roots: list[nn.Module] = []
        # By identity of a parameter, the first module that registered it; None if none did.
        self._registering: dict[int, nn.Module | None] = {}
        self._holders: list[nn.Module] = []
        # What is under way, outermost first: modules, and None for the engine.
        self._running: list[nn.Module | None] = []
        self._thread = 0
        self._end = 0  # the number after that of the last node whose maker is known
        # Of each run of nodes of one maker, the number after its last node, and the maker.
        self._ends: list[int] = []
        self._makers: list[weakref.ref[nn.Module] | Maker] = []

    def begin(self, roots: list[nn.Module]) -> None:
        """Begin a block, whose roots may still grow: what made nodes before was not recorded."""
        self._roots, self._registering, self._holders = roots, {}, []
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread = thread
            self._ends.clear()
            self._makers.clear()
        self._running = running()
        self._end = self._next_number()
        self._ends.append(self._end)
        self._makers.append(Maker.UNSEEN)

    def end(self) -> None:
        self._roots, self._registering, self._holders, self._running = [], {}, [], []

    @property
    def innermost(self) -> nn.Module | None:
        """The module that runs; in backward only one that a recomputation runs. None if none."""
        return self._running[-1] if self._running else None

    @property
    def is_in_engine(self) -> bool:
        """Whether Python called the engine further up, on whichever thread."""
        return any(module is None for module in self._running)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose calls are under way, outermost first."""
        return [module for module in self._running if module is not None]

    @property
    def outermost(self) -> nn.Module | None:
        return next(iter(self.modules), None)

    def enter(self, entered: nn.Module | None) -> int:
        """Note that a module runs from now on, or the engine (None); return what `leave` takes."""
        self.note_nodes()
        depth = len(self._running)
        if not is_graph(entered):
            # It is called by a method that was kept when it was compiled, which nothing watches.
            self._running.append(compiled_module(entered))
        return depth

    def leave(self, depth: int) -> None:
        """Note that what was entered then has returned or failed, and all that it entered."""
        self.note_nodes()
        del self._running[depth:]

    def leave_method(self, module: nn.Module) -> None:
        """As `leave`, of a method other than forward that is an entry of a unit."""
        if self.innermost is module:
            self.leave(len(self._running) - 1)

    def note_nodes(self) -> None:
        """Note the nodes that were made since this was last called, as those of what runs."""
        number = self._next_number()
        if number <= self._end:
            return
        modules = self.modules
        held = weakref.ref(modules[-1]) if modules else Maker.NO_MODULE
        self._end = number
        # weakref.ref() of one module is one object.
        if self._makers[-1] is held:
            self._ends[-1] = number
        else:
            self._ends.append(number)
            self._makers.append(held)

    def is_in_backward(self) -> bool:
        """Whether the autograd engine runs a graph task on this thread."""
        return self._current_task() != -1

    def adds_gradient(self) -> bool:
        """Whether the node that runs adds to the gradient of a parameter, so no forward made it."""
        return hasattr(self._current_node(), "variable")

    def maker_of_current_node(self) -> tuple[nn.Module | Maker, bool]:
        """Find what made the node that runs, and whether it adds to a parameter's gradient."""
        node = self._current_node()
        if node is None:
            return Maker.NO_MODULE, False
        parameter = getattr(node, "variable", None)  # of an AccumulateGrad
        if parameter is not None:
            module = self._module_of_parameter(parameter)
        else:
            run = bisect_right(self._ends, node._sequence_nr())
            held = self._makers[run] if run < len(self._makers) else Maker.NO_MODULE
            if isinstance(held, Maker):
                return held, False
            module = held()
        # Never the truth of a module, which is its length, or an error.
        return Maker.NO_MODULE if module is None else module, parameter is not None

    def _module_of_parameter(self, parameter: torch.Tensor) -> nn.Module | None:
        if id(parameter) not in self._registering:
            self._register()
        if id(parameter) not in self._registering:
            # To list them takes long, and each unit has new parameters once it is gathered.
            modules = (module for root in self._roots for module in root.modules())
            self._holders = [module for module in modules if module._parameters]
            self._register()
            # So that a foreign parameter costs one search only.
            self._registering.setdefault(id(parameter), None)
        return self._registering[id(parameter)]

    def _register(self) -> None:
        for module in self._holders:
            for own in own_parameters(module):
                self._registering.setdefault(id(own), module)


def leaves_of(outputs: Iterable[Any], inputs: Collection[Any]) -> set[int]:
    """The ids of the tensors to whose gradients a backward adds: of `inputs`, or of all leaves."""
    if inputs:
        return set(map(id, inputs))
    # A reentrant checkpoint hides leaves, which the backward within it reaches.
    reached = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in outputs]
    seen, leaves = {None, *reached}, set[int]()
    # Each node costs a few hundred nanoseconds, of some thousands in a backward.
    while reached:
        node = reached.pop()
        following = node.next_functions if node is not None else ()
        if not following:
            leaves.add(id(getattr(node, "variable", None)))  # of an AccumulateGrad
        for after, _ in following:
            if after not in seen:
                seen.add(after)
                reached.append(after)
    return leaves


def attribute_unit(units: UnitWatch, backward: BackwardMap) -> Attribution | None:
    """As `attribute`, without a look at the stack; None if that is needed."""
    acting = units.acting[-1] if units.acting else None
    if acting is None or acting.thread != threading.get_ident():
        return None
    found: Attribution | None = acting.attribution
    if found is not None:
        return found
    owner = acting.modules if acting.serves else units.owner
    innermost = backward.innermost
    in_backward = backward.is_in_engine or units.is_in_backward
    if not owner or (innermost is None and not in_backward):
        return None
    phase = _phase(innermost, in_step=False, in_backward=in_backward)
    issuer = units.issuer if innermost is None else (innermost,)
    found = acting.attribution = Attribution(
        owner, issuer, phase, Source.FSDP, gather=acting.gather
    )
    return found


def attribute(
    scan: StackScan, units: UnitWatch, backward: BackwardMap, namespace: str = ""
) -> Attribution:
    """Attribute what happens now; `namespace` is empty for what is no operation."""
    in_backward = (
        scan.is_in_engine
        or backward.is_in_backward()
        or units.is_in_backward
        or backward.is_in_engine
    )
    running: Modules = () if scan.innermost is None else (scan.innermost,)
    maker: nn.Module | Maker | None = None
    adds_gradient = False
    if in_backward:
        # FSDP's hooks hang on nodes of other modules, or on none; the unit whose hook runs is
        # known.
        running = running or units.issuer
        if not (running and units.owner):
            maker, adds_gradient = backward.maker_of_current_node()
        if not (running or maker is None or isinstance(maker, Maker)):
            running = (maker,)
    owner, source = units.owner, Source.FSDP
    if not owner:
        owner, source = running, _source(scan, namespace, in_backward=in_backward)
    return Attribution(
        owner=owner,
        issued_in=running,
        phase=_phase(scan.innermost, in_step=scan.is_in_optimizer, in_backward=in_backward),
        source=source,
        lacks_forward=not running and source is not Source.DDP and maker is Maker.UNSEEN,
        adds_gradient=adds_gradient and source is not Source.FSDP,
        is_from_hook=scan.is_from_ddp,
        gather=units.gather,
    )


def attribute_on_thread(scan: StackScan, namespace: str) -> Attribution:
    """Attribute what happens now on a thread that did not enter the recording."""
    # It serves no module: the units and graphs that the recording knows are another thread's.
    return Attribution(
        owner=(),
        issued_in=() if scan.innermost is None else (scan.innermost,),
        phase=_phase(scan.innermost, in_step=scan.is_in_optimizer, in_backward=scan.is_in_engine),
        source=_source(scan, namespace, in_backward=scan.is_in_engine),
        is_from_hook=scan.is_from_ddp,
    )


def _phase(innermost: nn.Module | None, *, in_step: bool, in_backward: bool) -> Phase:
    if in_step:
        return Phase.OPTIMIZER
    if in_backward:
        return Phase.BACKWARD if innermost is None else Phase.RECOMPUTE
    return Phase.OUTSIDE if innermost is None else Phase.FORWARD


def _source(scan: StackScan, namespace: str, *, in_backward: bool) -> Source:
    if scan.is_from_dtensor:
        return Source.DTENSOR
    if scan.is_object:
        return Source.OBJECT
    if scan.is_from_ddp:
        return Source.DDP
    # DDP's reducer calls from C++, and never the functional collectives of compiled code.
    if in_backward and scan.is_from_cpp and namespace == "c10d":
        return Source.DDP
    return Source.USER
