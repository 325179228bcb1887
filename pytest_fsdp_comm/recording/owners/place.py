"""Decides for each collective its owner, where it was issued, its phase and its source."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_fsdp_comm.comm.events import Phase, Source
from pytest_fsdp_comm.recording.owners.stack import Scan, innermost_module, scan_stack

if TYPE_CHECKING:
    from torch import nn

    from pytest_fsdp_comm.recording.owners.ddp import ParameterOwners
    from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch

Modules = tuple["nn.Module", ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where something happened, with modules instead of names."""

    owner: Modules
    issued_in: Modules
    phase: Phase
    source: Source
    scan: Scan


class BackwardMap:
    """Finds, in backward, the module whose forward made an autograd node.

    While forward runs, each dispatched operation notes the thread's next sequence number and the
    module that runs. A node takes its number before its operation is dispatched, so it belongs to
    the first note with a higher number. That also holds for a node made in a forward pre-hook,
    before the module's first own operation.
    """

    def __init__(self, parameters: ParameterOwners) -> None:
        """Knows no node yet.

        Args:
            parameters: Finds the module of a parameter, whose gradient no forward made.
        """
        self._parameters = parameters
        self._ends: list[int] = []  # highest number noted in each run of one module
        self._modules: list[nn.Module | None] = []

    def note_operation(self) -> None:
        """Notes the module that runs now, if a node was made since the last note."""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # noqa: SLF001  # read in torch 2.6 to 2.13, tested contract
        if self._ends and number <= self._ends[-1]:
            return
        module = innermost_module()
        if self._modules and self._modules[-1] is module:
            self._ends[-1] = number
        else:
            self._ends.append(number)
            self._modules.append(module)

    def module_of_current_node(self) -> nn.Module | None:
        """The module whose forward made the node that runs, or whose parameter's gradient it adds.

        Returns:
            The module; None if no node runs, or no module made it.
        """
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001  # read in torch 2.6 to 2.13, tested contract
        if node is None:
            return None
        parameter = getattr(node, "variable", None)  # of an AccumulateGrad
        if parameter is not None:
            return self._parameters.module_of(parameter)
        place = bisect_right(self._ends, node._sequence_nr())  # noqa: SLF001  # see above
        return self._modules[place] if place < len(self._modules) else None


def is_in_backward() -> bool:
    """Whether the autograd engine runs a graph task on this thread."""
    task: int = torch._C._current_graph_task_id()  # noqa: SLF001  # read in torch 2.6 to 2.13, tested contract
    return task != -1


def attribute(units: UnitWatch, backward: BackwardMap, namespace: str = "") -> Place:
    """Attributes what happens now.

    Args:
        units: The FSDP units that act.
        backward: Finds the modules of autograd nodes.
        namespace: Of the operation, e.g. ``c10d``; empty for what is no operation.
    """
    scan = scan_stack()
    in_backward = scan.is_in_engine or is_in_backward()
    phase = _phase(scan, in_backward=in_backward)
    running = _running(scan, units, backward, in_backward=in_backward)
    owner, source = units.owner, Source.FSDP
    if not owner:
        owner, source = running, _source(scan, namespace, in_backward=in_backward)
    return Place(owner=owner, issued_in=running, phase=phase, source=source, scan=scan)


def _phase(scan: Scan, *, in_backward: bool) -> Phase:
    if scan.is_in_optimizer:
        return Phase.OPTIMIZER
    if in_backward:
        return Phase.RECOMPUTE if scan.modules else Phase.BACKWARD
    return Phase.FORWARD if scan.modules else Phase.OUTSIDE


def _running(scan: Scan, units: UnitWatch, backward: BackwardMap, *, in_backward: bool) -> Modules:
    if scan.modules:
        return (scan.modules[0],)
    if not in_backward:
        return ()
    # FSDP's hooks hang on nodes of other modules, or on none; the unit whose hook runs is known.
    if units.issuer:
        return units.issuer
    module = backward.module_of_current_node()
    return () if module is None else (module,)


def _source(scan: Scan, namespace: str, *, in_backward: bool) -> Source:
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
