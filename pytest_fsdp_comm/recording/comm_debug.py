"""The questions of torch's CommDebugMode, under its names, answered from a recording."""

# Note [Answers of CommDebugMode]
# torch's class writes its own answers: it is filled with what was recorded and is never entered.
# Entered, it would count by global module hooks, which lose a module that runs twice (IndexError),
# take a backward without its forward for a KeyError, book prefetched gathers on the module that
# runs, add views of their own to what they list, and keep the model alive. So the modules are those
# of the recording's stack walks (module_trace.py), and tables, JSON and the tracker are torch's.

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.module_trace import GLOBAL

if TYPE_CHECKING:
    from pytest_fsdp_comm.comm.events import Collective
    from pytest_fsdp_comm.recording.recorder import RecordedBlock

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
        """As `get_comm_counts`."""
        return self.get_comm_counts()

    def get_total_counts(self) -> int:
        """Number of all collectives."""
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
        """As `get_comm_module_counts`."""
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
        for module, operation in operations():
            found.setdefault(module, {"operations_list": []})["operations_list"].append(operation)
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
