"""A timeline as a list, in which what repeats stands once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.text.fqn import name_owners

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

    from pytest_fsdp_comm.reports.html.timeline import Timeline

_MAX_ROWS: Final = 300
_LONGEST_PERIOD: Final = 64
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRow:
    """An entry, or entries that repeat, each with another module."""

    place: str
    """``12``, or ``12, 17, ... 627`` by its first and last place."""
    times: int
    """How often it repeats."""
    what: str
    axis: str
    phase: str
    module: str
    nbytes: int
    """Of each."""
    site: str
    differs: bool
    """Whether a module of it differs from the snapshot."""
    opens: bool = False
    """Whether a group of entries that repeat together begins with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All entries in order."""

    rows: tuple[ListRow, ...]
    left_out: int
    """Rows beyond those that are shown."""


def list_entries(timeline: Timeline, differing: Collection[str | None] = ()) -> Listing:
    """Folds equal stretches: layers, steps.

    Args:
        timeline: What is listed.
        differing: Modules to mark.
    """
    rows = list(_rows(timeline, differing))
    return Listing(rows=tuple(rows[:_MAX_ROWS]), left_out=max(0, len(rows) - _MAX_ROWS))


def _rows(timeline: Timeline, differing: Collection[str | None]) -> Iterator[ListRow]:
    likeness = _likeness(timeline)
    at = 0
    while at < len(timeline):
        period, times = _repetition(likeness, at)
        for offset in range(period):
            places = range(at + offset, at + period * times, period)
            modules = list(dict.fromkeys(timeline.module(place) for place in places))
            first = places[0]
            yield ListRow(
                place=str(first + 1) if times == 1 else f"{first + 1}, ... {places[-1] + 1}",
                times=times,
                what=timeline.what(first),
                axis=timeline.axis(first),
                phase=timeline.phase(first),
                module=name_owners(modules),
                nbytes=timeline.nbytes[first],
                site=timeline.site(first),
                differs=any(module in differing for module in modules),
                opens=times > 1 and offset == 0,
            )
        at += period * times


def _likeness(timeline: Timeline) -> list[int]:
    """A number for each entry, equal for those that differ at most in numbers of modules."""
    numbers: dict[Hashable, int] = {}
    words = [_NUMBER.sub("#", name) for name in timeline.names]
    return [
        numbers.setdefault(
            (
                timeline.whats[at],
                words[timeline.modules[at]] if timeline.modules[at] >= 0 else None,
                timeline.phases[at],
                timeline.axes[at],
                timeline.nbytes[at],
            ),
            len(numbers),
        )
        for at in range(len(timeline))
    ]


def _repetition(likeness: Sequence[int], at: int) -> tuple[int, int]:
    """The period that repeats most from a place on, and how often; ``(1, 1)`` if none does."""
    best, covered = (1, 1), 1
    for period in range(1, min(_LONGEST_PERIOD, (len(likeness) - at) // 2) + 1):
        if likeness[at] != likeness[at + period]:
            continue
        end = at + period
        while end < len(likeness) and likeness[end] == likeness[end - period]:
            end += 1
        times = (end - at) // period
        if times > 1 and times * period > covered:
            best, covered = (period, times), times * period
    return best
