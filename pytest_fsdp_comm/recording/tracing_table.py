"""Writes what CommDebugMode shows of each module: as a table, and as JSON for its browser view.

The layout, the keys and the noise levels are torch's (2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.recording.module_trace import TracedOperation

if TYPE_CHECKING:
    from collections.abc import Iterator


TRIVIAL: Final = frozenset(
    {
        "aten.detach.default",
        "aten.t.default",
        "aten.view.default",
        "aten._to_copy.default",
        "aten.as_strided.default",
        "aten.transpose.int",
    }
)
"""Operations that move no data or mean little: left out below `Noise.ALL`."""

_BRIGHT_YELLOW: Final = "\033[1;33m"
_BRIGHT_RED: Final = "\033[1;31m"
_RESET: Final = "\033[0m"


class Noise(IntEnum):
    """How much is shown. Each level adds to the one before it; others count as the nearest."""

    COLLECTIVES = 0
    """Modules, and how often each collective was called in them."""
    DTENSORS = 1
    """The modules' classes and sharded parameters, and operations on DTensors."""
    OPERATIONS = 2
    """Operations on plain tensors."""
    ALL = 3
    """`TRIVIAL` operations."""

    @classmethod
    def of(cls, level: int) -> Noise:
        """The level that a number stands for."""
        return cls(min(max(level, cls.COLLECTIVES), cls.ALL))

    def shows(self, operation: TracedOperation) -> bool:
        """Whether an operation is listed."""
        if self is Noise.COLLECTIVES:
            return False
        is_trivial = str(operation.func) in TRIVIAL
        is_wanted = self >= Noise.OPERATIONS or _has_inputs(operation)
        return is_wanted and (self is Noise.ALL or not is_trivial)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a module did in forward, in backward, or in forward run again."""

    title: str
    """As the table has it."""
    key: str
    """The last part of the JSON keys: ``forward`` in ``operations_forward``."""
    counts: Mapping[Any, int]
    """Calls of each collective."""
    operations: Sequence[TracedOperation]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownModule:
    """A module with all that the table and the JSON show of it."""

    name: str
    depth: int
    """Modules around it, ``Global`` included."""
    module_type: str
    """Empty for ``Global``, and for a module that was not called."""
    parameters: Mapping[str, str]
    """Placements of its sharded parameters, by name."""
    passes: Sequence[Pass]
    children: Sequence[str]
    """Names of the modules that it called."""


def render_table(modules: Mapping[str, ShownModule], noise: Noise) -> str:
    """Writes all modules as a table, coloured as on a terminal.

    Args:
        modules: By name, in order.
        noise: How much is shown.
    """
    return "".join(f"{line}\n" for shown in modules.values() for line in _lines(shown, noise))


def _lines(shown: ShownModule, noise: Noise) -> Iterator[str]:
    indent = "    " * shown.depth
    yield f"{indent}{shown.name}"
    if noise >= Noise.DTENSORS:
        if shown.module_type:
            yield f"{indent}*module type: {shown.module_type}"
        if shown.parameters:
            yield f"{indent}*Parameter List"
        for name, placements in shown.parameters.items():
            yield f"{indent} *{name}: {placements}"
    for part in shown.passes:
        yield from _pass_lines(part, indent, noise)


def _pass_lines(part: Pass, indent: str, noise: Noise) -> Iterator[str]:
    operations = [*filter(noise.shows, part.operations)]
    if part.counts or operations:  # torch also writes titles of which nothing follows
        yield f"{indent}  {part.title}"
    for packet, count in part.counts.items():
        yield f"{_BRIGHT_YELLOW}{indent}    *{packet}: {count}{_RESET}"
    for operation in operations:
        yield f"{_BRIGHT_YELLOW}{indent}    **{operation.func}{_RESET}"
        found = operation.dtensors
        if found is not None and found.shapes:
            for label, value in (
                ("shape", [*found.shapes]),
                ("sharding", [*found.placements]),
                ("device mesh", found.mesh),
            ):
                yield f"{_BRIGHT_RED}{indent}      {label}: {value}{_RESET}"


def json_tree(modules: Mapping[str, ShownModule], top: str, noise: Noise) -> dict[str, Any]:
    """What the browser view reads, from one module downwards.

    Args:
        modules: By name.
        top: Name of the module.
        noise: How much is shown.
    """
    shown = modules[top]
    shows_module = noise >= Noise.DTENSORS
    counts = {
        f"collectives_{part.key}": [[str(packet), count] for packet, count in part.counts.items()]
        for part in shown.passes
        if part.key != "checkpointing"
    }
    operations = {
        f"operations_{part.key}": [
            _json_operation(operation) for operation in part.operations if noise.shows(operation)
        ]
        for part in shown.passes
    }
    return {
        "fqn": shown.name,
        "module_type": shown.module_type if shows_module else "",
        "parameters": [list(item) for item in shown.parameters.items()] if shows_module else [],
        "children": [json_tree(modules, child, noise) for child in shown.children],
        **counts,
        **operations,
    }


def _json_operation(operation: TracedOperation) -> dict[str, Any]:
    found = operation.dtensors
    return {
        "name": str(operation.func),
        "input_shape": [str(shape) for shape in found.shapes] if found else [],
        "input_sharding": [str(placements) for placements in found.placements] if found else [],
        "device_mesh": found.mesh if found else "",
        "is_bw": operation.is_backward,
        "is_activation_checkpointing": operation.is_recompute,
    }


def _has_inputs(operation: TracedOperation) -> bool:
    return operation.dtensors is not None and bool(operation.dtensors.shapes)
