"""How a case of history is declared: where it is told, what it cost, and what its failure says."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from regressions.table import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(Case):
    """A regression that a project had, replayed: what its code did, and what it should do."""

    threads: tuple[str, ...]
    """Where it is told, below `https://github.com/`."""
    happened: str
    cost: str = ""
    """As a thread measured it; empty if none did."""
    first: str = ""
    """The first line of the failure; empty if both sides communicate the same."""
    likely: str = ""
    """The cause that the failure names; empty for none."""
    tree: str = ""
    """The first line about the tree, where that says more."""
    more: "Mapping[str, int]" = field(default_factory=dict)
    """How many more collectives of each kind rank 0 sends in a step, derived by hand."""
    neighbour: "Callable[[], tuple[nn.Module | Sequence[nn.Module], Callable[[], object]]] | None" = None
    """An innocent change of the same code, which sends what the reviewed one sends."""
    is_regression: bool = field(default=True, init=False)


HISTORY: dict[str, Reported] = {}


def reported(*threads, **facts):
    """Adds a case, named as its function."""

    def add(build):
        name = build.__name__
        assert name not in HISTORY, name
        HISTORY[name] = Reported(name=name, build=build, threads=threads, **facts)
        return build

    return add
