"""Determine the owner of each collective, the module that issued it, its phase and its source."""

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
from pytest_fsdp_comm.recording.owners.fsdp import Gather, UnitWatch, direct_parameters
from pytest_fsdp_comm.recording.owners.module_names import Modules
from pytest_fsdp_comm.recording.owners.stack import (
    StackScan,
    is_compiled_graph,
    running_modules,
    unwrap_compiled_module,
)
from pytest_fsdp_comm.upstream import look_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The parameter that a tensor belongs to, and whether the tensor is its value or gradient."""

    parameter: torch.Tensor | None
    """None if the tensor may belong to any of several parameters."""
    role: Role | None
    """None if the tensor may be either a value or a gradient."""


@dataclass(slots=True)
class Carried:
    """The parameter or gradient that a collective carries, which may become known only later."""

    label: Label | None = None
    """None until we find the parameter, perhaps only when a gradient uses the result's storage."""


@dataclass(slots=True)
class Attribution:
    """The modules, phase and source to which an event is attributed."""

    owner: Modules
    """The modules of the unit that communicated, or a single module; empty if there is no owner."""
    issued_in: Modules
    """The running module, or the modules of the unit whose hook ran; empty if there is neither."""
    phase: Phase
    source: Source
    lacks_forward: bool = False
    """Whether the event happened in the backward of a module whose forward was not recorded."""
    adds_gradient: bool = False
    """Whether code other than an FSDP unit issued the event while an AccumulateGrad node ran."""
    is_from_hook: bool = False
    """For DDP: True if Python code, such as a hook, issued the call; False for the reducer."""
    gather: Gather | None = None
    reduced: tuple[tuple[nn.Module, str], ...] = ()
    """`ActingUnit.reduced` of the acting FSDP2 unit."""
    carried: Carried | None = None
    """None for FSDP, DDP and object collectives, and for events that are not collectives."""

    @property
    def label(self) -> Label | None:
        return None if self.carried is None else self.carried.label

    @property
    def acting(self) -> Modules:
        return (*self.owner, *self.issued_in)


# Note [Backward map]
# No module runs in backward, so we attribute a collective to the module whose forward created the
# running autograd node. Autograd numbers each thread's nodes, starting at 0. Whenever a module
# call starts or ends, the map assigns the numbers issued since the previous start or end to the
# module that was running in between. This includes the nodes of a forward pre-hook, and the node of
# an autograd.Function, whose forward runs without grad mode. AccumulateGrad nodes are not created
# in forward; they belong to the module of their parameter. A node created in backward
# (create_graph=True) belongs to the module that called that backward, if any.
# A later block may run backward through an earlier block's graph, so the map lives as long as its
# comm_mode and refers to modules weakly. Nodes created between blocks have no known module.


class Maker(Enum):
    """The origin of an autograd node whose module is unknown."""

    NO_MODULE = auto()  # code outside all modules, or a module that no longer exists
    UNSEEN = auto()  # code that ran while nothing was recorded


class BackwardMap:
    """Map a backward node to the module whose forward created it. See Note [Backward map]."""

    def __init__(self) -> None:
        self._next_number: Callable[[], int] = look_up("torch.autograd", "_get_sequence_nr")
        self._current_node: Callable[[], Any] = look_up("torch._C", "_current_autograd_node")
        self._current_task: Callable[[], int] = look_up("torch._C", "_current_graph_task_id")
        self._roots: list[nn.Module] = []
        # The first module that registered each parameter, keyed by parameter id; None if none did.
        self._registering: dict[int, nn.Module | None] = {}
        self._holders: list[nn.Module] = []
        # The running calls, outermost first: modules, and None for the autograd engine.
        self._running: list[nn.Module | None] = []
        self._thread = 0
        self._end = 0  # the number of the first node that is not assigned yet
        # For each run of nodes that one module created: the run's end (exclusive), and the module.
        self._ends: list[int] = []
        self._makers: list[weakref.ref[nn.Module] | Maker] = []

    def begin(self, roots: list[nn.Module]) -> None:
        """Begin a block; nodes created since the last block are `UNSEEN`. `roots` may grow."""
        self._roots, self._registering, self._holders = roots, {}, []
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread = thread
            self._ends.clear()
            self._makers.clear()
        self._running = running_modules()
        self._end = self._next_number()
        self._ends.append(self._end)
        self._makers.append(Maker.UNSEEN)

    def end(self) -> None:
        self._roots, self._registering, self._holders, self._running = [], {}, [], []

    @property
    def innermost(self) -> nn.Module | None:
        """The innermost running module, if any; in backward, modules run only for recomputation."""
        return self._running[-1] if self._running else None

    @property
    def is_in_engine(self) -> bool:
        """Whether a call into the autograd engine runs; the engine may use other threads."""
        return any(module is None for module in self._running)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are running, outermost first."""
        return [module for module in self._running if module is not None]

    @property
    def outermost(self) -> nn.Module | None:
        return next(iter(self.modules), None)

    def enter(self, entered: nn.Module | None) -> int:
        """Record that a module or the engine (None) starts to run; return the depth for `leave`."""
        self.assign_new_nodes()
        depth = len(self._running)
        if not is_compiled_graph(entered):
            # Enter the inner module of torch.compile's wrapper here: the wrapper calls it through a
            # bound method, which our patch does not see.
            self._running.append(unwrap_compiled_module(entered))
        return depth

    def leave(self, depth: int) -> None:
        """Record that the call entered at `depth`, and all calls in it, have returned or raised."""
        self.assign_new_nodes()
        del self._running[depth:]

    def leave_method(self, module: nn.Module) -> None:
        """Record that a method registered with `register_fsdp_forward_method` has returned."""
        if self.innermost is module:
            self.leave(len(self._running) - 1)

    def assign_new_nodes(self) -> None:
        """Assign the nodes created since the last call of this method to the running module."""
        number = self._next_number()
        if number <= self._end:
            return
        modules = self.modules
        maker = weakref.ref(modules[-1]) if modules else Maker.NO_MODULE
        self._end = number
        # weakref.ref() returns the same object for the same module, so `is` works.
        if self._makers[-1] is maker:
            self._ends[-1] = number
        else:
            self._ends.append(number)
            self._makers.append(maker)

    def is_in_backward(self) -> bool:
        """Whether the autograd engine is running a graph task on this thread."""
        return self._current_task() != -1

    def adds_gradient(self) -> bool:
        """Whether the running autograd node is an AccumulateGrad, which adds to a `.grad`."""
        return hasattr(self._current_node(), "variable")

    def maker_of_current_node(self) -> tuple[nn.Module | Maker, bool]:
        """Return the running node's module, and whether the node is an AccumulateGrad."""
        node = self._current_node()
        if node is None:
            return Maker.NO_MODULE, False
        parameter = getattr(node, "variable", None)  # only an AccumulateGrad has one
        if parameter is not None:
            module = self._find_registering_module(parameter)
        else:
            run = bisect_right(self._ends, node._sequence_nr())
            maker = self._makers[run] if run < len(self._makers) else Maker.NO_MODULE
            if isinstance(maker, Maker):
                return maker, False
            module = maker()
        # Compare with None: bool() of a module may be its length, or raise.
        return Maker.NO_MODULE if module is None else module, parameter is not None

    def _find_registering_module(self, parameter: torch.Tensor) -> nn.Module | None:
        if id(parameter) not in self._registering:
            self._map_parameters_to_holders()
        if id(parameter) not in self._registering:
            # Listing the modules is slow, so cache the list. Units register new parameters when
            # they are gathered, so read the parameters of the listed modules again.
            modules = (module for root in self._roots for module in root.modules())
            self._holders = [module for module in modules if module._parameters]
            self._map_parameters_to_holders()
            # For a parameter of a different model, store None, so that we search only once.
            self._registering.setdefault(id(parameter), None)
        return self._registering[id(parameter)]

    def _map_parameters_to_holders(self) -> None:
        for module in self._holders:
            for parameter in direct_parameters(module):
                self._registering.setdefault(id(parameter), module)


def find_leaf_ids(outputs: Iterable[Any], inputs: Collection[object]) -> set[int]:
    """Return the ids of the tensors whose `.grad` a backward adds to: `inputs`, or all leaves."""
    if inputs:
        return set(map(id, inputs))
    # This misses leaves inside a reentrant checkpoint; the checkpoint's backward adds them. Only an
    # AccumulateGrad has a variable.
    return {id(getattr(node, "variable", None)) for node in find_graph_nodes(outputs)}


def find_graph_nodes(outputs: Iterable[Any]) -> set[Any]:
    """Return the autograd nodes that a backward from `outputs` runs."""
    # This is fast: it takes a few hundred nanoseconds per node, for a few thousand nodes.
    pending = list_output_nodes(outputs)
    nodes = {*pending}
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                pending.append(node)
    return nodes


def list_output_nodes(outputs: Iterable[Any]) -> list[Any]:
    """Return the autograd nodes of tensors or gradient edges; leave out tensors without a node."""
    roots = [edge.node if isinstance(edge, GradientEdge) else edge.grad_fn for edge in outputs]
    return [root for root in roots if root is not None]


def attribute_to_unit(units: UnitWatch, backward: BackwardMap) -> Attribution | None:
    """Attribute the current event to the acting unit; None if that requires reading the stack."""
    acting = units.acting[-1] if units.acting else None
    if acting is None or acting.thread != threading.get_ident():
        return None
    attribution: Attribution | None = acting.attribution
    if attribution is not None:
        return attribution
    owner = acting.modules if acting.serves else units.owner
    innermost = backward.innermost
    in_backward = backward.is_in_engine or units.is_in_backward
    if not owner or (innermost is None and not in_backward):
        return None
    phase = _decide_phase(innermost, in_step=False, in_backward=in_backward)
    issuer = units.issuer if innermost is None else (innermost,)
    attribution = acting.attribution = Attribution(
        owner, issuer, phase, Source.FSDP, gather=acting.gather, reduced=acting.reduced
    )
    return attribution


def attribute(
    scan: StackScan, units: UnitWatch, backward: BackwardMap, namespace: str = ""
) -> Attribution:
    """Attribute the current event; `namespace` is its operator's, or empty without an operator."""
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
        # FSDP's hooks run in nodes of other modules or outside any node, so prefer the unit.
        running = running or units.issuer
        if not (running and units.owner):
            maker, adds_gradient = backward.maker_of_current_node()
        if not (running or maker is None or isinstance(maker, Maker)):
            running = (maker,)
    owner, source = units.owner, Source.FSDP
    if not owner:
        owner, source = running, _classify_issuing_code(scan, namespace, in_backward=in_backward)
    return Attribution(
        owner=owner,
        issued_in=running,
        phase=_decide_phase(scan.innermost, in_step=scan.is_in_optimizer, in_backward=in_backward),
        source=source,
        lacks_forward=not running and source is not Source.DDP and maker is Maker.UNSEEN,
        adds_gradient=adds_gradient and source is not Source.FSDP,
        is_from_hook=scan.is_from_ddp,
        gather=units.gather,
        reduced=units.reduced,
    )


def attribute_on_other_thread(scan: StackScan, namespace: str) -> Attribution:
    """Attribute the current event on a thread that did not enter the recording."""
    # The owner is unknown, because the recording's units and nodes belong to another thread.
    return Attribution(
        owner=(),
        issued_in=() if scan.innermost is None else (scan.innermost,),
        phase=_decide_phase(
            scan.innermost, in_step=scan.is_in_optimizer, in_backward=scan.is_in_engine
        ),
        source=_classify_issuing_code(scan, namespace, in_backward=scan.is_in_engine),
        is_from_hook=scan.is_from_ddp,
    )


def _decide_phase(innermost: nn.Module | None, *, in_step: bool, in_backward: bool) -> Phase:
    if in_step:
        return Phase.OPTIMIZER
    if in_backward:
        return Phase.BACKWARD if innermost is None else Phase.RECOMPUTE
    return Phase.OUTSIDE if innermost is None else Phase.FORWARD


def _classify_issuing_code(scan: StackScan, namespace: str, *, in_backward: bool) -> Source:
    if scan.is_from_dtensor:
        return Source.DTENSOR
    if scan.is_object:
        return Source.OBJECT
    if scan.is_from_ddp:
        return Source.DDP
    # In backward, c10d calls from C++ are from DDP's reducer: compiled code calls functional ops.
    if in_backward and scan.is_from_cpp and namespace == "c10d":
        return Source.DDP
    return Source.USER
