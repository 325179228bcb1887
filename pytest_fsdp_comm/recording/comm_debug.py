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
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_fsdp_comm.comm.events import Collective, Phase, Recording
from pytest_fsdp_comm.comm.questions import Names
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.module_trace import GLOBAL, ModuleTrace


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
    def _read_block(self) -> RecordedBlock: ...

    def get_comm_counts(self) -> dict[object, int]:
        """Return the number of collectives per operation, e.g. ``torch.ops.c10d._allgather_base_``.

        As in CommDebugMode, operations of ``_c10d_functional`` are counted under their names in
        ``c10d_functional``. Point-to-point calls, barriers and in-place variants count too. An
        operation that did not run has a count of 0.
        """
        counts: defaultdict[Any, int] = defaultdict(int)
        for event in self._read_block().recording.collectives:
            counts[_op_packet_of(event)] += 1
        return counts

    @property
    def comm_counts(self) -> dict[object, int]:
        return self.get_comm_counts()

    def get_total_counts(self) -> int:
        return len(self._read_block().recording.collectives)

    def get_comm_module_counts(self) -> ModuleCounts:
        """Return counts of collectives, keyed by module, direction and operation.

        The direction is ``forward`` or ``backward``. A module's counts include those of its
        submodules. Names begin with the class of the root; ``Global`` has the totals. Collectives
        in recomputation count as backward. Collectives in the optimizer or outside all phases count
        as forward.
        """
        block = self._read_block()
        counts: ModuleCounts = {GLOBAL: _make_empty_counts()}
        for event in block.recording.collectives:
            is_backward = event.phase in {Phase.BACKWARD, Phase.RECOMPUTE}
            direction = "backward" if is_backward else "forward"
            around = () if event.owner is None else block.trace.keys(event.owner)
            for key in (GLOBAL, *around):
                counts.setdefault(key, _make_empty_counts())[direction][_op_packet_of(event)] += 1
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
        operations = self._read_block().trace.operations
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
        return self._build_debug_mode().advanced_module_tracker

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the direct parameters of each called module, keyed by module, then parameter name.

        Raises:
            RecordingError: The model no longer exists.
        """
        modules = self._read_block().trace.modules()
        # As in CommDebugMode, modules without direct parameters have no entry.
        return {module.name: module.parameters() for module in modules if module.placements}

    def get_sharding_info(self) -> dict[str, tuple[object, ...]]:
        """Return the placements of each DTensor parameter, keyed by its FQN."""
        return {
            f"{module.name}.{name}": placements
            for module in self._read_block().trace.modules()
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
        table: str = self._build_debug_mode(noise_level).generate_comm_debug_tracing_table(
            noise_level
        )
        return table

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file, without colours."""
        self._build_debug_mode(noise_level).log_comm_debug_tracing_table_to_file(
            file_name, noise_level
        )

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the JSON file that torch's browser view of CommDebugMode reads."""
        self._build_debug_mode(noise_level).generate_json_dump(file_name, noise_level)

    def _build_debug_mode(self, noise_level: int = 0) -> Any:
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
        for module in self._read_block().trace.modules():
            callers = [GLOBAL, *(caller.name for caller in module.callers)]
            modules[module.name] = {"module_type": module.module_type, "depth": len(callers)}
            placements = module.placements.items()
            sharded = {name: str(value) for name, value in placements if value is not None}
            if sharded:
                modules[module.name]["parameters"] = sharded
            parents[module.name] = {*callers, module.name}
            called.setdefault(callers[-1], []).append(module.name)
        # Add the modules whose backward ran in the block, but whose forward did not.
        for name in (*mode.comm_module_counts, *mode.comm_module_operation_counts):
            if name not in modules:
                enclosing = name.rpartition(".")[0]
                caller = enclosing if enclosing in modules else GLOBAL
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


def _op_packet_of(event: Collective) -> object:
    namespace, name = event.op.split(".", 1)
    if namespace in {"_c10d_functional", "_c10d_functional_autograd"}:
        legacy = getattr(torch.ops.c10d_functional, name, None)
        if legacy is not None:
            return legacy
    return getattr(getattr(torch.ops, namespace), name)
