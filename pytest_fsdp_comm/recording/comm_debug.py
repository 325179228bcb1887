"""The questions of torch's CommDebugMode, under its names, answered from a recording.

A test that was written for ``CommDebugMode`` moves over by using the fixture instead. Where the
two differ, the recording is right: ``tests/recording/test_comm_debug.py`` shows each difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.json import dump_recording
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.owners.module_names import clean_fqn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from pytest_fsdp_comm.comm.events import Collective, Recording

GLOBAL: Final = "Global"
"""CommDebugMode's name for everything together."""

ModuleCounts = dict[str, dict[str, dict[Any, int]]]


class CommDebugAnswers(ABC):
    """What `CommMode` answers under CommDebugMode's names. All values are copies."""

    @property
    @abstractmethod
    def recording(self) -> Recording:
        """All that this rank recorded."""

    @abstractmethod
    def _plain_roots(self) -> list[nn.Module]:
        """The modules that give plain names; empty if one of them no longer exists."""

    def get_comm_counts(self) -> dict[Any, int]:
        """Counts by operation, e.g. ``torch.ops.c10d._allgather_base_``.

        As CommDebugMode does, operations of ``_c10d_functional`` are counted under their names in
        ``c10d_functional``. Unlike it, point-to-point calls, barriers and in-place variants count.
        """
        return dict(Counter(map(_packet, self.recording.collectives)))

    def get_total_counts(self) -> int:
        """Number of all collectives."""
        return len(self.recording.collectives)

    def get_comm_module_counts(self) -> ModuleCounts:
        """Counts by module, then ``forward`` or ``backward``, then operation.

        A module's counts include those of the modules in it. The root's key is its class name, and
        ``Global`` has everything. A recomputation counts as forward, as do phases without a module.
        """
        name = self._root_name()
        counts: dict[str, dict[str, Counter[Any]]] = {GLOBAL: _empty()}
        for event in self.recording.collectives:
            direction = "backward" if event.phase is Phase.BACKWARD else "forward"
            for key in (GLOBAL, *_enclosing(event.owner, name)):
                counts.setdefault(key, _empty())[direction][_packet(event)] += 1
        return {
            key: {direction: dict(counted) for direction, counted in directions.items()}
            for key, directions in counts.items()
        }

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each module that has any of its own, by module and name.

        Raises:
            RecordingError: The model no longer exists.
        """
        return {
            key: {
                name: parameter.data for name, parameter in module.named_parameters(recurse=False)
            }
            for key, module in self._modules()
            if any(True for _ in module.parameters(recurse=False))
        }

    def get_sharding_info(self) -> dict[str, tuple[Any, ...]]:
        """The placements of each parameter that is a DTensor, by module and name.

        Raises:
            RecordingError: The model no longer exists.
        """
        return {
            f"{key}.{name}": tuple(parameter.placements)
            for key, parameters in self.get_parameter_info().items()
            for name, parameter in parameters.items()
            if hasattr(parameter, "placements")
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Counts by module as text.

        Args:
            noise_level: 0 for the counts; from 1 on also each call, in order.
        """
        lines = []
        for key, directions in self.get_comm_module_counts().items():
            lines.append(key)
            for direction, counted in directions.items():
                lines += [f"  {direction} {packet}: {count}" for packet, count in counted.items()]
        if noise_level > 0:
            lines += ["", *map(_described, self.recording.collectives)]
        return "\n".join(lines) + "\n"

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Writes the table to a file."""
        table = self.generate_comm_debug_tracing_table(noise_level)
        Path(file_name).write_text(table, encoding="utf-8")

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Writes the whole recording as versioned JSON; ``noise_level`` changes nothing."""
        del noise_level
        Path(file_name).write_text(dump_recording(self.recording), encoding="utf-8")

    def _root_name(self) -> str:
        roots = self._plain_roots()
        return type(roots[0]).__name__ if roots else ""

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        roots = self._plain_roots()
        if not roots:
            raise RecordingError(
                "the recorded model and its parameters no longer exist; keep a reference to the "
                "model until you have read them"
            )
        for root in roots:
            for name, module in root.named_modules():
                yield ".".join(filter(None, (type(roots[0]).__name__, clean_fqn(name)))), module


def _empty() -> dict[str, Counter[Any]]:
    return {"forward": Counter(), "backward": Counter()}


def _packet(event: Collective) -> Any:
    namespace, name = event.op.split(".", 1)
    if namespace == "_c10d_functional":
        legacy = getattr(torch.ops.c10d_functional, name, None)
        if legacy is not None:
            return legacy
    return getattr(getattr(torch.ops, namespace), name)


def _enclosing(owner: str | None, root: str) -> Iterator[str]:
    """The keys of a module and of those around it, the root first."""
    if owner is None:
        return
    if root:
        yield root
    segments = owner.split(".") if owner else []
    for length in range(1, len(segments) + 1):
        yield ".".join([*([root] if root else []), *segments[:length]])


def _described(event: Collective) -> str:
    owner = "no module" if event.owner is None else event.owner or "(root)"
    return (
        f"{event.phase} {owner}: {event.kind}[{event.axis}] {event.nbytes} B {event.dtype} "
        f"at {event.call_site or 'unknown'}"
    )
