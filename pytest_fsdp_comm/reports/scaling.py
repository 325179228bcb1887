"""What a rank sends and holds in groups of several sizes, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_fsdp_comm.reports.cost_lines import show_seconds
from pytest_fsdp_comm.text.nbytes import show_growth, show_nbytes, show_nbytes_change

OWN_BYTES: Final = "bytes without padding"
_COLUMNS: Final[dict[str, Callable[[Any], str]]] = {
    "calls": str,
    "calls of unknown size": str,
    "bytes": show_nbytes,
    "padding": show_nbytes,
    "peak gathered": show_nbytes,
    "seconds without overlap": show_seconds,
}
"""How the numbers that have a column are shown, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One test in a group of one size."""

    world_size: int
    outcome: str
    """How the recording compares with its snapshot, or why the test failed."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Those that are known, by the names of columns, and others of which growth is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One value of a test in groups of several sizes."""

    test: str
    sizes: tuple[Size, ...]
    """Ascending."""

    def columns(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the name and the cells of each column."""
        yield "ranks", [str(size.world_size) for size in self.sizes]
        for name, show in _COLUMNS.items():
            found = [size.numbers.get(name) for size in self.sizes]
            if any(found) or name == "padding":
                lacking = ["not known" if size.numbers else "" for size in self.sizes]
                shown = ["" if number is None else show(number) for number in found]
                yield name, [cell or other for cell, other in zip(shown, lacking, strict=True)]
        yield "snapshot", [size.outcome for size in self.sizes]

    def lines(self) -> Iterator[str]:
        """Write the table for a terminal."""
        table = [[name, *cells] for name, cells in self.columns()]
        widths = [max(map(len, column)) for column in table]
        yield self.test
        for row in zip(*table, strict=True):
            yield f"  {'  '.join((*map(str.rjust, row[:-1], widths), row[-1]))}".rstrip()
        yield from (f"  {text}" for text in self.growth())

    def growth(self) -> list[str]:
        """Say what grows with the group, although it is one rank's."""
        recorded = {size.world_size: size.numbers for size in self.sizes if size.numbers}
        names = dict.fromkeys(name for numbers in recorded.values() for name in numbers)
        # A kind that is not sent has no calls; any other number is not known.
        known = [
            name
            for name in names
            if "calls" in name or all(name in numbers for numbers in recorded.values())
        ]
        # Calls are told by kind, and of bytes those without padding, if they are known.
        parts = {"calls", "seconds without overlap", *["bytes"] * (OWN_BYTES in known)}
        grown = []
        for name in (name for name in known if name not in parts):
            found = [(at, round(numbers.get(name, 0))) for at, numbers in recorded.items()]
            (least, old), (most, new) = found[0], max(found, key=lambda one: one[1])
            if new > old:
                change = f"{old} -> {new}" if "calls" in name else show_nbytes_change(old, new)
                by = f" ({show_growth(old, new)})" if old else ""
                grown.append(f"grows: {name} {change}{by} from {least} to {most} ranks")
        return grown or ["nothing grows that should be flat"] * (len(recorded) > 1)
