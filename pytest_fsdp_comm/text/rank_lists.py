"""Ranks as people write them, their runs folded."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def runs_of(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as first and last of each run: ``0, 1, 2, 5`` as ``(0, 2), (5, 5)``."""
    # Neighbours in a run have the same distance to their position in the list.
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return tuple((run[0], run[-1]) for run in runs)


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0-3`` or ``ranks 0, 2-3``."""
    text = write_ranks(runs_of(sorted(ranks)), separator=", ")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def write_ranks(runs: Iterable[tuple[int, int]], *, separator: str = ",") -> str:
    """``0,2-3``, from the first and last rank of each run."""
    return separator.join(f"{first}-{last}" if first < last else str(first) for first, last in runs)


def list_ranks(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Every rank by itself, from the first and last rank of each run."""
    return tuple(rank for first, last in runs for rank in range(first, last + 1))


def fold_equal(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Ranks with equal texts together, in order of their lowest rank."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    return [(ranks, text) for text, ranks in groups.items()]
