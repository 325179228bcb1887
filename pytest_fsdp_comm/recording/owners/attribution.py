"""Decides for each collective its owner, where it was issued, its phase and its source."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.events import Phase, Source
from pytest_fsdp_comm.recording.owners.ddp import ReplicaOwners
from pytest_fsdp_comm.recording.owners.module_names import ModuleNames
from pytest_fsdp_comm.recording.owners.stack import innermost_module
from pytest_fsdp_comm.recording.prefetch import Gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from pytest_fsdp_comm.recording.owners.ddp import ParameterOwners
    from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch
    from pytest_fsdp_comm.recording.owners.stack import StackScan

Modules = tuple["nn.Module", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """It is issued while the gradient of a parameter is added, and no unit of FSDP asked for it."""
    gather: Gather | None = None
    """The gather of FSDP parameters that it belongs to; None if it belongs to none."""

    @property
    def acting(self) -> Modules:
        """All modules that it belongs to."""
        return (*self.owner, *self.issued_in)

    @property
    def ahead(self) -> int | None:
        """How far ahead of its use the gather was issued, once the recording has ended."""
        return None if self.gather is None else self.gather.ahead


class OwnerNames:
    """Names the modules of attributions, when a recording ends.

    Not before: bare recordings learn their roots as they run, and ``replicate`` makes its DDP in
    the first forward.
    """

    def __init__(self, roots: Sequence[nn.Module], *, are_parts: bool) -> None:
        """Names every module below the roots.

        Args:
            roots: As `ModuleNames` expects them.
            are_parts: Likewise.
        """
        self.modules = ModuleNames(roots, are_parts=are_parts)
        self._replicas = ReplicaOwners(roots)

    def owner(self, attribution: Attribution) -> str | None:
        """The FQN of the owner; None if there is none, or it is below no root."""
        if attribution.source is Source.DDP:
            return self.modules.joined(self._replicas.owner(attribution.issued_in))
        return self.modules.joined(attribution.owner)

    def issued_in(self, attribution: Attribution) -> str | None:
        """The FQN of the module that was running; None as in `owner`."""
        return self.modules.joined(attribution.issued_in[:1])


class _Maker(Enum):
    """Who made an autograd node, if no known module did."""

    NO_MODULE = auto()
    """Code outside of every module, or a module that no longer exists."""
    UNSEEN = auto()
    """Whatever ran while nothing was recorded."""


class NodeMakers:
    """Which module made each autograd node, over all blocks of one ``comm_mode``.

    A graph may run backward in a later block than the one that made it. Modules are held weakly.
    """

    def __init__(self) -> None:
        """Knows no node, so that the first block has to `begin`."""
        self.end = 0
        """The number after that of the last node whose maker is known."""
        # Of each run of nodes of one maker, the number after its last node, and the maker.
        self._ends: list[int] = []
        self._makers: list[weakref.ref[nn.Module] | _Maker] = []
        self._thread = 0

    def begin(self, number: int) -> None:
        """Begins a block: no recording saw who made the nodes since the last block.

        Args:
            number: Of the next node.
        """
        # Each thread numbers its nodes from 0.
        thread = threading.get_ident()
        if thread != self._thread:
            self._thread = thread
            self._ends.clear()
            self._makers.clear()
        self.end = number
        self._ends.append(number)
        self._makers.append(_Maker.UNSEEN)

    def add(self, number: int, maker: nn.Module | _Maker) -> None:
        """Adds the nodes between `end` and a number.

        Args:
            number: After that of the last of them.
            maker: Who made them.
        """
        self.end = number
        held = maker if isinstance(maker, _Maker) else weakref.ref(maker)
        # weakref.ref() of one module is one object.
        if self._makers[-1] is held:
            self._ends[-1] = number
        else:
            self._ends.append(number)
            self._makers.append(held)

    def maker(self, number: int) -> nn.Module | _Maker:
        """Who made the node with a number."""
        run = bisect_right(self._ends, number)
        if run == len(self._makers):
            return _Maker.NO_MODULE
        held = self._makers[run]
        return held if isinstance(held, _Maker) else _or_no_module(held())


def _or_no_module(module: nn.Module | None) -> nn.Module | _Maker:
    # Never the truth of a module, which is its length, or an error.
    return _Maker.NO_MODULE if module is None else module


class BackwardMap:
    """Finds, in backward, the module whose forward made an autograd node.

    While forward runs, each dispatched operation notes the thread's next sequence number and the
    module that runs. A node gets its number before its operation is dispatched, so it belongs to
    the first note with a higher number. That also holds for a node made in a forward pre-hook,
    before the module's first own operation. A node made in backward (``create_graph=True``) belongs
    to the module of the node whose backward made it.
    """

    def __init__(self, makers: NodeMakers, parameters: ParameterOwners) -> None:
        """Looks up what it needs of autograd (read in torch 2.6 to 2.13).

        Args:
            makers: Those of earlier blocks; the block's own are added.
            parameters: Finds the module of a parameter, whose gradient no forward made.

        Raises:
            UpstreamChangedError: torch has moved one of these names.
        """
        self._makers = makers
        self._parameters = parameters
        self._next_number: Callable[[], int] = _autograd("torch.autograd", "_get_sequence_nr")
        self._current_node: Callable[[], Any] = _autograd("torch._C", "_current_autograd_node")
        self._current_task: Callable[[], int] = _autograd("torch._C", "_current_graph_task_id")

    def begin(self) -> None:
        """Begins a block."""
        self._makers.begin(self._next_number())

    def note_operation(self) -> None:
        """Notes the module that runs now, if a node was made since the last note."""
        number = self._next_number()
        if number <= self._makers.end:
            return
        maker: nn.Module | _Maker | None = innermost_module()
        if maker is None:
            maker = self._maker_of_current_node() if self.is_in_backward() else _Maker.NO_MODULE
        self._makers.add(number, maker)

    def is_in_backward(self) -> bool:
        """Whether the autograd engine runs a graph task on this thread."""
        return self._current_task() != -1

    def module_of_current_node(self) -> nn.Module | None:
        """The module whose forward made the node that runs, or whose parameter's gradient it adds.

        Returns:
            The module; None if no node runs, no module made it, or nothing recorded who did.
        """
        maker = self._maker_of_current_node()
        return None if isinstance(maker, _Maker) else maker

    def adds_gradient(self) -> bool:
        """Whether the node that runs adds to the gradient of a parameter, so no forward made it."""
        return hasattr(self._current_node(), "variable")

    def is_current_node_unseen(self) -> bool:
        """Whether the node that runs was made while nothing was recorded."""
        return self._maker_of_current_node() is _Maker.UNSEEN

    def _maker_of_current_node(self) -> nn.Module | _Maker:
        node = self._current_node()
        if node is None:
            return _Maker.NO_MODULE
        parameter = getattr(node, "variable", None)  # of an AccumulateGrad
        if parameter is not None:
            return _or_no_module(self._parameters.module_of(parameter))
        return self._makers.maker(node._sequence_nr())


def attribute(
    scan: StackScan, units: UnitWatch, backward: BackwardMap, namespace: str = ""
) -> Attribution:
    """Attributes what happens now.

    Args:
        scan: The stack.
        units: The FSDP units that act.
        backward: Finds the modules of autograd nodes.
        namespace: Of the operation, e.g. ``c10d``; empty for what is no operation.
    """
    in_backward = scan.is_in_engine or backward.is_in_backward() or units.is_in_backward
    running = _running(scan, units, backward, in_backward=in_backward)
    owner, source = units.owner, Source.FSDP
    adds_gradient = not owner and in_backward and backward.adds_gradient()
    if not owner:
        owner, source = running, _source(scan, namespace, in_backward=in_backward)
    return Attribution(
        owner=owner,
        issued_in=running,
        phase=_phase(scan, in_backward=in_backward),
        source=source,
        lacks_forward=in_backward
        and not running
        and source is not Source.DDP
        and backward.is_current_node_unseen(),
        adds_gradient=adds_gradient,
        gather=units.gather,
    )


def attribute_on_thread(scan: StackScan, namespace: str) -> Attribution:
    """Attributes what happens now on a thread that did not enter the recording.

    It serves no module, as the units and graphs of which the recording knows are another thread's.

    Args:
        scan: The stack of the thread.
        namespace: As for `attribute`.
    """
    return Attribution(
        owner=(),
        issued_in=() if scan.innermost is None else (scan.innermost,),
        phase=_phase(scan, in_backward=scan.is_in_engine),
        source=_source(scan, namespace, in_backward=scan.is_in_engine),
    )


def _phase(scan: StackScan, *, in_backward: bool) -> Phase:
    if scan.is_in_optimizer:
        return Phase.OPTIMIZER
    if in_backward:
        return Phase.BACKWARD if scan.innermost is None else Phase.RECOMPUTE
    return Phase.OUTSIDE if scan.innermost is None else Phase.FORWARD


def _running(
    scan: StackScan, units: UnitWatch, backward: BackwardMap, *, in_backward: bool
) -> Modules:
    if scan.innermost is not None:
        return (scan.innermost,)
    if not in_backward:
        return ()
    # FSDP's hooks hang on nodes of other modules, or on none; the unit whose hook runs is known.
    if units.issuer:
        return units.issuer
    module = backward.module_of_current_node()
    return () if module is None else (module,)


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


def _autograd(module: str, name: str) -> Any:
    return upstream.look_up(
        "torch", module, name, "the recorder relies on to find the module in backward"
    )
