"""Decides for each collective its owner, where it was issued, its phase and its source."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.comm.events import Phase, Source
from pytest_fsdp_comm.recording.owners.ddp import ReplicaOwners
from pytest_fsdp_comm.recording.owners.module_names import ModuleNames
from pytest_fsdp_comm.recording.owners.stack import innermost_module

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


class OwnerNames:
    """Names the modules of attributions, when a recording ends.

    Not before: bare recordings learn their roots as they run, and ``replicate`` makes its DDP in
    the first forward.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        """Names every module below the roots.

        Args:
            roots: As `ModuleNames` expects them.
        """
        self.modules = ModuleNames(roots)
        self._replicas = ReplicaOwners(roots)

    def owner(self, attribution: Attribution) -> str | None:
        """The FQN of the owner; None if there is none, or it is below no root."""
        if attribution.source is Source.DDP:
            return self.modules.joined(self._replicas.owner(attribution.issued_in))
        return self.modules.joined(attribution.owner)

    def issued_in(self, attribution: Attribution) -> str | None:
        """The FQN of the module that was running; None as in `owner`."""
        return self.modules.joined(attribution.issued_in[:1])


class BackwardMap:
    """Finds, in backward, the module whose forward made an autograd node.

    While forward runs, each dispatched operation notes the thread's next sequence number and the
    module that runs. A node gets its number before its operation is dispatched, so it belongs to
    the first note with a higher number. That also holds for a node made in a forward pre-hook,
    before the module's first own operation.
    """

    def __init__(self, parameters: ParameterOwners) -> None:
        """Looks up what it needs of autograd (read in torch 2.6 to 2.13).

        Args:
            parameters: Finds the module of a parameter, whose gradient no forward made.

        Raises:
            UpstreamChangedError: torch has moved one of these names.
        """
        self._parameters = parameters
        self._next_number: Callable[[], int] = _autograd("torch.autograd", "_get_sequence_nr")
        self._current_node: Callable[[], Any] = _autograd("torch._C", "_current_autograd_node")
        self._current_task: Callable[[], int] = _autograd("torch._C", "_current_graph_task_id")
        # Of each run of operations of one module, the highest number and the module.
        self._ends: list[int] = []
        self._modules: list[nn.Module | None] = []

    def note_operation(self) -> None:
        """Notes the module that runs now, if a node was made since the last note."""
        number = self._next_number()
        if self._ends and number <= self._ends[-1]:
            return
        module = innermost_module()
        if self._modules and self._modules[-1] is module:
            self._ends[-1] = number
        else:
            self._ends.append(number)
            self._modules.append(module)

    def is_in_backward(self) -> bool:
        """Whether the autograd engine runs a graph task on this thread."""
        return self._current_task() != -1

    def module_of_current_node(self) -> nn.Module | None:
        """The module whose forward made the node that runs, or whose parameter's gradient it adds.

        Returns:
            The module; None if no node runs, or no module made it.
        """
        node = self._current_node()
        if node is None:
            return None
        parameter = getattr(node, "variable", None)  # of an AccumulateGrad
        if parameter is not None:
            return self._parameters.module_of(parameter)
        run = bisect_right(self._ends, node._sequence_nr())
        return self._modules[run] if run < len(self._modules) else None


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
    in_backward = scan.is_in_engine or backward.is_in_backward()
    running = _running(scan, units, backward, in_backward=in_backward)
    owner, source = units.owner, Source.FSDP
    if not owner:
        owner, source = running, _source(scan, namespace, in_backward=in_backward)
    return Attribution(
        owner=owner, issued_in=running, phase=_phase(scan, in_backward=in_backward), source=source
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
