"""Patterns compared and folded without listing their names.

The patterns of a group are cut at each other's borders into pieces, which each pattern holds whole
or not at all. ``layers.{0..79}.experts.{0..255}`` alone is one piece, beside
``layers.7.experts.{0..99}`` it is two; its 20,480 names are never made. So a snapshot is checked
before anything is built from it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from typing import TYPE_CHECKING, Final, TypeAlias

from pytest_fsdp_comm.text.fqn import count_numbers, fold_points, join_words, write_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_fsdp_comm.text.fqn import Pattern, Ranges

MAX_STEPS: Final = 300_000
"""The most steps for cutting the patterns of a snapshot: 30 for each line of the longest. Real
patterns need one or two, since layers differ in few ways."""

Piece: TypeAlias = tuple[int, ...]
"""The class of the number at each place, after the place of the words."""


class Steps:
    """Limits what cutting costs, whatever the text."""

    def __init__(self) -> None:
        """Starts at zero, for one snapshot."""
        self._done = 0

    def add(self, count: int) -> None:
        """Counts further steps.

        Raises:
            ValueError: That is more than `MAX_STEPS`.
        """
        self._done += count
        if self._done > MAX_STEPS:
            raise ValueError(
                "the names on lines of one kind overlap in too many ways: expected folded lines"
            )


class Pieces:
    """The pieces of a group of patterns."""

    def __init__(self, patterns: Sequence[Pattern], steps: Steps) -> None:
        """Cuts the patterns.

        Raises:
            ValueError: There are too many steps.
        """
        self.of: list[list[Piece]] = [[] for _ in patterns]
        """The pieces of each pattern."""
        self._words: list[tuple[str, ...]] = []
        self._classes: list[list[list[Ranges]]] = []
        groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for place, pattern in enumerate(patterns):
            groups[pattern.words].append(place)
        for words, places in groups.items():
            axes = [
                _classes([patterns[place].box[axis] for place in places], steps)
                for axis in range(len(words) - 1)
            ]
            for place in places:
                box = patterns[place].box
                held = [classes[ranges] for (_, classes), ranges in zip(axes, box, strict=True)]
                count = 1
                for classes_held in held:
                    count *= len(classes_held)
                    steps.add(count)
                self.of[place] = [(len(self._words), *numbers) for numbers in product(*held)]
            self._words.append(words)
            self._classes.append([members for members, _ in axes])

    def size(self, piece: Piece) -> int:
        """How many names a piece has."""
        size = 1
        for members, number in zip(self._classes[piece[0]], piece[1:], strict=True):
            size *= count_numbers(members[number])
        return size

    def fold(self, places: Iterable[int]) -> list[str]:
        """The patterns that `text.fqn.fold_fqns` writes for all names of some patterns.

        Args:
            places: Of the patterns in the group; no two of them share a piece.
        """
        points: defaultdict[int, list[Piece]] = defaultdict(list)
        for place in places:
            for words, *numbers in self.of[place]:
                points[words].append(tuple(numbers))
        return [
            join_words(
                self._words[words],
                [
                    write_ranges(_united(members[number] for number in numbers))
                    for members, numbers in zip(self._classes[words], box, strict=True)
                ],
            )
            for words, found in points.items()
            for box in fold_points(found)
        ]


def _classes(
    lists: Sequence[Ranges], steps: Steps
) -> tuple[list[Ranges], dict[Ranges, tuple[int, ...]]]:
    """Puts the numbers at one place into classes: two of a class are in the same of the lists.

    Returns:
        The numbers of each class, and the classes of each list.
    """
    distinct = list(dict.fromkeys(lists))
    if len(distinct) == 1:
        return distinct, {distinct[0]: (0,)}
    edges: defaultdict[int, list[int]] = defaultdict(list)
    for place, ranges in enumerate(distinct):
        for first, last in ranges:
            edges[first].append(place)
            edges[last + 1].append(place)
    inside: set[int] = set()
    members: defaultdict[frozenset[int], list[tuple[int, int]]] = defaultdict(list)
    for first, end in pairwise(sorted(edges)):
        inside.symmetric_difference_update(edges[first])
        steps.add(len(inside))
        if inside:
            members[frozenset(inside)].append((first, end - 1))
    classes_of: defaultdict[int, list[int]] = defaultdict(list)
    for number, places in enumerate(members):
        for place in places:
            classes_of[place].append(number)
    return (
        [tuple(ranges) for ranges in members.values()],
        {distinct[place]: tuple(numbers) for place, numbers in classes_of.items()},
    )


def _united(ranges: Iterable[Ranges]) -> Ranges:
    runs: list[tuple[int, int]] = []
    for first, last in sorted(run for part in ranges for run in part):
        if runs and runs[-1][1] + 1 == first:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return tuple(runs)
