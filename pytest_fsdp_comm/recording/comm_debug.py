"""The questions of torch's CommDebugMode, under its names, answered from a recording.

A test that was written for ``CommDebugMode`` moves over by changing the name. Where the two differ,
the recording is right: ``tests/recording/test_comm_debug.py`` shows each difference.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.module_trace import GLOBAL, model_is_gone
from pytest_fsdp_comm.recording.tracing_table import (
    Noise,
    Pass,
    ShownModule,
    json_tree,
    render_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_fsdp_comm.comm.events import Collective, Recording
    from pytest_fsdp_comm.recording.module_trace import ModuleTrace, TracedModule, TracedOperation

ModuleCounts = dict[str, dict[str, defaultdict[Any, int]]]

_IN_BACKWARD: Final = (Phase.BACKWARD, Phase.RECOMPUTE)
_COLOR: Final = re.compile(r"\033\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTracker:
    """What CommDebugMode's ``advanced_module_tracker`` knows of the modules that were called."""

    module_helper_dict: dict[str, dict[str, Any]]
    """``Global`` and each module, with ``depth``, ``module_type`` and, of sharded parameters, the
    placements as text in ``parameters``."""
    module_parents_dict: dict[str, set[str]]
    """Each module's callers and itself."""
    parent_dict: dict[str, list[str]]
    """The modules that each module called."""
    sharding_dict: dict[str, tuple[Any, ...]]
    """As `CommDebugAnswers.get_sharding_info`."""


class CommDebugAnswers(ABC):
    """What `CommMode` answers under CommDebugMode's names. All values are copies.

    Inside a block the answers are those up to now, after it those of the block.
    """

    @property
    @abstractmethod
    def recording(self) -> Recording:
        """All that this rank recorded."""

    @abstractmethod
    def _trace(self) -> ModuleTrace:
        """The modules that were called."""

    def get_comm_counts(self) -> dict[Any, int]:
        """Counts by operation, e.g. ``torch.ops.c10d._allgather_base_``; 0 for any other.

        As CommDebugMode does, operations of ``_c10d_functional`` are counted under their names in
        ``c10d_functional``. Unlike it, point-to-point calls, barriers and in-place variants count.
        """
        counts: defaultdict[Any, int] = defaultdict(int)
        for event in self.recording.collectives:
            counts[_packet(event)] += 1
        return counts

    @property
    def comm_counts(self) -> dict[Any, int]:
        """As `get_comm_counts`."""
        return self.get_comm_counts()

    def get_total_counts(self) -> int:
        """Number of all collectives."""
        return len(self.recording.collectives)

    def get_comm_module_counts(self) -> ModuleCounts:
        """Counts by module, then ``forward`` or ``backward``, then operation.

        A module's counts include those of the modules in it. Names begin with the class of the
        root, and ``Global`` has everything. What a recomputation sends counts as backward, and what
        is sent in no phase as forward.
        """
        recorded, keys = self.recording.collectives, self._trace().keys
        counts: ModuleCounts = {GLOBAL: _no_counts()}
        for event in recorded:
            direction = "backward" if event.phase in _IN_BACKWARD else "forward"
            around = () if event.owner is None else keys.get(event.owner, ())
            for key in (GLOBAL, *around):
                counts.setdefault(key, _no_counts())[direction][_packet(event)] += 1
        return counts

    @property
    def comm_module_counts(self) -> ModuleCounts:
        """As `get_comm_module_counts`."""
        return self.get_comm_module_counts()

    def _operations(self) -> Iterator[TracedOperation]:
        trace = self._trace()
        if not trace.has_operations:
            raise RecordingError(
                "the operations of this block were not traced, which would slow every recording "
                "down; ask for it before: `with comm_mode(model, trace_operations=True):`. Counts, "
                "and the table of noise level 0, need no trace"
            )
        return trace.operations()

    @property
    def comm_module_operation_counts(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """The operations that ran in each module, in order; ``Global`` has those of no module."""
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for operation in self._operations():
            listed = found.setdefault(operation.module, {"operations_list": []})
            listed["operations_list"].append(_operation_dict(operation))
        return found

    @property
    def advanced_module_tracker(self) -> ModuleTracker:
        """The modules that were called, as CommDebugMode keeps them."""
        called = self._trace().modules()
        children: dict[str, list[str]] = {}
        helper: dict[str, dict[str, Any]] = {GLOBAL: {"depth": 0}}
        for module in called:
            children.setdefault(module.callers[-1] if module.callers else GLOBAL, []).append(
                module.name
            )
            entry = {"module_type": module.module_type, "depth": len(module.callers) + 1}
            sharded = _sharded(module)
            helper[module.name] = {**entry, "parameters": sharded} if sharded else entry
        return ModuleTracker(
            module_helper_dict=helper,
            module_parents_dict={
                GLOBAL: set(),
                **{module.name: {GLOBAL, *module.callers, module.name} for module in called},
            },
            parent_dict=children,
            sharding_dict=self.get_sharding_info(),
        )

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each module that was called and has any of its own, by their names.

        Raises:
            RecordingError: The model no longer exists.
        """
        return {
            module.name: {
                name: _alive(parameter.tensor()).data
                for name, parameter in module.parameters.items()
            }
            for module in self._trace().modules()
            if module.parameters
        }

    def get_sharding_info(self) -> dict[str, tuple[Any, ...]]:
        """The placements of each parameter that is a DTensor, by module and name."""
        return {
            f"{module.name}.{name}": parameter.placements
            for module in self._trace().modules()
            for name, parameter in module.parameters.items()
            if parameter.placements is not None
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Counts and operations by module, as text with colours.

        Args:
            noise_level: 0 for the counts of collectives; 1 adds the modules' classes, sharded
                parameters and operations on DTensors; 2 all operations but trivial ones such as
                views; 3 those too.

        Raises:
            RecordingError: Operations were not traced, which all levels but 0 show.
        """
        noise = Noise.of(noise_level)
        return render_table(self._shown(noise), noise)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Writes the table to a file, without colours."""
        table = self.generate_comm_debug_tracing_table(noise_level)
        Path(file_name).write_text(_COLOR.sub("", table), encoding="utf-8")

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Writes what torch's browser view of CommDebugMode reads.

        Args:
            file_name: Where to.
            noise_level: As for the table.
        """
        noise = Noise.of(noise_level)
        tree = json_tree(self._shown(noise), GLOBAL, noise)
        Path(file_name).write_text(json.dumps(tree, indent=4), encoding="utf-8")

    def _shown(self, noise: Noise) -> dict[str, ShownModule]:
        """Everything, then each module in the order of the calls, then owners never called."""
        tracker, counts = self.advanced_module_tracker, self.get_comm_module_counts()
        operations: dict[str, list[TracedOperation]] = {}
        for operation in () if noise is Noise.COLLECTIVES else self._operations():
            operations.setdefault(operation.module, []).append(operation)
        children = {name: [*names] for name, names in tracker.parent_dict.items()}
        helper = dict(tracker.module_helper_dict)
        # Where only the backward ran in the block.
        for name in (*counts, *operations):
            if name not in helper:
                above = name.rpartition(".")[0]
                parent = above if above in helper else GLOBAL
                helper[name] = {"depth": helper[parent]["depth"] + 1}
                children.setdefault(parent, []).append(name)
        return {
            name: ShownModule(
                name=name,
                depth=entry["depth"],
                module_type=entry.get("module_type", ""),
                parameters=entry.get("parameters", {}),
                passes=_passes(counts.get(name, _no_counts()), operations.get(name, [])),
                children=children.get(name, []),
            )
            for name, entry in helper.items()
        }


def _no_counts() -> dict[str, defaultdict[Any, int]]:
    return {"forward": defaultdict(int), "backward": defaultdict(int)}


def _passes(
    counts: Mapping[str, Mapping[Any, int]], operations: list[TracedOperation]
) -> tuple[Pass, ...]:
    return (
        Pass(
            title="FORWARD PASS",
            key="forward",
            counts=counts["forward"],
            operations=[ran for ran in operations if not ran.is_backward],
        ),
        Pass(
            title="BACKWARD PASS",
            key="backward",
            counts=counts["backward"],
            operations=[ran for ran in operations if ran.is_backward and not ran.is_recompute],
        ),
        Pass(
            title="ACTIVATION CHECKPOINTING",
            key="checkpointing",
            counts={},
            operations=[ran for ran in operations if ran.is_recompute],
        ),
    )


def _operation_dict(operation: TracedOperation) -> dict[str, Any]:
    found = operation.dtensors
    return {
        "name": operation.func,
        "input_shape": [*found.shapes] if found else [],
        "input_sharding": [*found.placements] if found else [],
        "device_mesh": found.mesh if found else "",
        "is_bw": operation.is_backward,
        "is_activation_checkpointing": operation.is_recompute,
    }


def _sharded(module: TracedModule) -> dict[str, str]:
    return {
        name: str(parameter.placements)
        for name, parameter in module.parameters.items()
        if parameter.placements is not None
    }


def _alive(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise model_is_gone()
    return tensor


def _packet(event: Collective) -> Any:
    namespace, name = event.op.split(".", 1)
    if namespace in {"_c10d_functional", "_c10d_functional_autograd"}:
        legacy = getattr(torch.ops.c10d_functional, name, None)
        if legacy is not None:
            return legacy
    return getattr(getattr(torch.ops, namespace), name)
