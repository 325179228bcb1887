"""A timeline as a drawing: what is gathered when, unit by unit, and what is sent over each axis.

A step to the right is one entry, not a time. Long rows are single paths, stretched by the browser;
short ones are bars with names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final, Literal

from pytest_fsdp_comm.reports.html.timeline import RESHARD, UNSHARD
from pytest_fsdp_comm.text.fqn import name_owners
from pytest_fsdp_comm.text.nbytes import show_nbytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pytest_fsdp_comm.reports.html.timeline import Timeline

Shape = Literal["gather", "scatter", "reduce", "other"]
_SHAPES: Final[dict[str, Shape]] = {
    "all_gather": "gather",
    "gather": "gather",
    "reduce_scatter": "scatter",
    "scatter": "scatter",
    "all_reduce": "reduce",
    "reduce": "reduce",
}
CHANGED: Final = "≠"
"""What marks modules that differ from the snapshot."""
_STROKES: Final[dict[Shape, str]] = {
    "gather": "20V3",
    "scatter": "20V37",
    "reduce": "6V34",
    "other": "15V25",
}
"""From where to where a stroke goes, on an axis at 20: its direction tells kinds apart."""

MAX_BARS: Final = 240
"""Bars that have names; more are drawn as one path."""
_MAX_LANES_HEIGHT: Final = 264
_LANE_HEIGHT: Final = 22
_HEADROOM: Final = 0.8
"""The part of the height that the peak reaches: its label stands above."""
_MIN_NAMED: Final = 3.0
"""Percent of the width below which no phase is named."""
_WIDTH: Final = 900
_CHARACTER: Final = 7
_MARGIN: Final = 10
"""Pixels of a drawing, of a character, and around a name: which names fit is decided by these."""
_END: Final = re.compile(r"^.*?((?:[^.]+\.)?\d+|[^.]*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Entries of one phase that follow each other."""

    phase: str
    x: str
    """Where it begins, in percent."""
    width: str
    is_named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A unit, from unshard to reshard."""

    x: str
    width: str
    y: int
    """In pixels."""
    phase: str
    name: str
    """Its end alone, as far as it tells units apart."""
    is_narrow: bool
    """Whether there is room for the name only when magnified."""
    sign: str
    """What stands there until then; empty for most."""
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
    """All entries of one phase that look alike, as the data of a path."""

    phase: str
    shape: str
    d: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRow:
    """What is sent over an axis."""

    name: str
    count: int
    nbytes: int
    strokes: tuple[Stroke, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A timeline, ready to be drawn."""

    count: int
    phases: tuple[str, ...]
    """In order of appearance."""
    spans: tuple[Span, ...]
    memory: str
    """Data of a path in a box of `count` by 100."""
    is_dense: bool
    grid: tuple[tuple[str, str], ...]
    """Height in percent and label of lines."""
    peak_at: int
    """The entry at which it is reached, from 0."""
    peak_x: str
    peak_y: str
    peak_label: str
    peak_is_right: bool
    peak_place: str
    """The same in words."""
    peak_note: str
    """Why the curve does not reach the recorded peak; empty if it does."""
    bars: tuple[Bar, ...]
    bar_paths: tuple[Stroke, ...]
    """In a box of `count` by the number of lanes; empty where there are `bars`."""
    lanes: int
    lane_height: int
    axes: tuple[AxisRow, ...]
    held: tuple[int, ...]
    """Bytes gathered after each entry."""


@dataclass(slots=True)
class _Interval:
    module: str | None
    start: int
    end: int
    phase: str
    nbytes: int
    lane: int = 0


def draw(timeline: Timeline, differing: Collection[str | None] = ()) -> Chart:
    """Draws a timeline.

    Args:
        timeline: Of at least one entry.
        differing: Modules to mark.
    """
    count = len(timeline)
    intervals, held = _gathered(timeline)
    lanes = _pack(intervals)
    lane_height = max(2, min(_LANE_HEIGHT, _MAX_LANES_HEIGHT // max(1, lanes)))
    has_names = len(intervals) <= MAX_BARS and lane_height == _LANE_HEIGHT
    top = max(held, default=0)
    peak_at = held.index(top) if held else 0
    is_dense = count > MAX_BARS * 2
    return Chart(
        count=count,
        phases=tuple(dict.fromkeys(map(timeline.phase, range(count)))),
        spans=tuple(_spans(timeline)),
        memory=_area(held, top),
        is_dense=is_dense,
        grid=_grid(top),
        peak_at=peak_at,
        peak_x=_percent(peak_at + 0.5, count),
        peak_y=_number(100 - 100 * _HEADROOM),
        peak_label=show_nbytes(top),
        peak_is_right=peak_at > count / 2,
        peak_place=f"entry {peak_at + 1} of {count}, {_entry(timeline, peak_at)}",
        peak_note=_peak_note(timeline, top),
        bars=tuple(_bars(intervals, count, lane_height, differing)) if has_names else (),
        bar_paths=() if has_names else tuple(_bar_paths(intervals)),
        lanes=lanes,
        lane_height=lane_height,
        axes=tuple(_axes(timeline)),
        held=tuple(held),
    )


def _entry(timeline: Timeline, at: int) -> str:
    return f"{timeline.what(at)} of {name_owners([timeline.module(at)])} in {timeline.phase(at)}"


def _percent(value: float, whole: float) -> str:
    return _number(100 * value / whole)


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _spans(timeline: Timeline) -> Iterator[Span]:
    count, at = len(timeline), 0
    for phase, run in groupby(map(timeline.phase, range(count))):
        length = sum(1 for _ in run)
        yield Span(
            phase=phase,
            x=_percent(at, count),
            width=_percent(length, count),
            is_named=100 * length / count >= _MIN_NAMED,
        )
        at += length


def _gathered(timeline: Timeline) -> tuple[list[_Interval], list[int]]:
    """When each unit is gathered, and how many bytes of all are after each entry."""
    count = len(timeline)
    open_units: dict[str | None, _Interval] = {}
    seen: set[str | None] = set()
    intervals: list[_Interval] = []
    changes = [0] * (count + 1)
    for at in range(count):
        what, module, nbytes = timeline.what(at), timeline.module(at), timeline.nbytes[at]
        if what == UNSHARD and module not in open_units:
            open_units[module] = _Interval(
                module=module, start=at, end=count, phase=timeline.phase(at), nbytes=nbytes
            )
            changes[at] += nbytes
        elif what == RESHARD:
            held = open_units.pop(module, None)
            if held is None and module not in seen:
                # It was gathered when the recording began.
                held = _Interval(module=module, start=0, end=at, phase="outside", nbytes=nbytes)
                changes[0] += nbytes
            if held is not None:
                held.end = at
                changes[at] -= held.nbytes
                intervals.append(held)
        else:
            continue
        seen.add(module)
    intervals += open_units.values()
    intervals.sort(key=lambda one: (one.start, -one.end))
    total, held_bytes = 0, []
    for change in changes[:count]:
        total += change
        held_bytes.append(total)
    return intervals, held_bytes


def _pack(intervals: Sequence[_Interval]) -> int:
    """Gives each interval the first lane that is free; returns how many there are."""
    free: list[int] = []
    for one in intervals:
        lane = next((at for at, end in enumerate(free) if end <= one.start), len(free))
        free[lane : lane + 1] = [one.end]
        one.lane = lane
    return len(free)


def _area(held: Sequence[int], top: int) -> str:
    if not top:
        return ""
    parts, last = ["M0 100"], -1
    for at, nbytes in enumerate(held):
        if nbytes != last:
            parts.append(f"H{at}V{_number(100 - 100 * _HEADROOM * nbytes / top)}")
            last = nbytes
    return f"{''.join(parts)}H{len(held)}V100Z"


def _grid(top: int) -> tuple[tuple[str, str], ...]:
    """A line at half of the peak; the peak has a mark of its own."""
    if not top:
        return ()
    half = 1 << max(0, (top // 2).bit_length() - 1) if top > 1 else 1
    lines = [at for at in (half, 2 * half) if at <= 0.92 * top]
    return tuple((_number(100 - 100 * _HEADROOM * at / top), show_nbytes(at)) for at in lines)


def _peak_note(timeline: Timeline, top: int) -> str:
    if timeline.left_out and timeline.peak > top:
        return f"the recorded peak, {show_nbytes(timeline.peak)}, comes after the cut"
    if timeline.peak != top:
        return (
            f"the recorded peak is {show_nbytes(timeline.peak)}: it also counts what was gathered "
            "before the block, and what a partial reshard leaves"
        )
    return ""


def _bars(
    intervals: Sequence[_Interval],
    count: int,
    lane_height: int,
    differing: Collection[str | None],
) -> Iterator[Bar]:
    for one in intervals:
        name, width = name_owners([one.module]), max(one.end - one.start, 1)
        sign = f"{CHANGED} " if one.module in differing else ""
        room = _WIDTH * width / count
        end = sign + _END.sub(r"\1", name)
        is_narrow = room < _MARGIN + _CHARACTER * len(end)
        yield Bar(
            x=_percent(one.start, count),
            width=_percent(width, count),
            y=one.lane * lane_height,
            phase=one.phase,
            name=end,
            is_narrow=is_narrow,
            sign=sign.strip() if is_narrow and room >= 2 * _CHARACTER else "",
            title=f"{sign}{name}, {show_nbytes(one.nbytes)}: entries {one.start + 1} to {one.end}",
        )


def _bar_paths(intervals: Sequence[_Interval]) -> Iterator[Stroke]:
    by_phase: dict[str, list[str]] = {}
    for one in intervals:
        width = max(one.end - one.start, 1)
        part = f"M{one.start} {one.lane}h{width}v.86h-{width}z"
        by_phase.setdefault(one.phase, []).append(part)
    for phase, parts in by_phase.items():
        yield Stroke(phase=phase, shape="bar", d="".join(parts))


def _axes(timeline: Timeline) -> Iterator[AxisRow]:
    found: dict[str, dict[tuple[str, Shape], list[str]]] = {}
    totals: dict[str, list[int]] = {}
    for at in range(len(timeline)):
        axis = timeline.axis(at)
        if not axis:
            continue
        shape = _SHAPES.get(timeline.what(at), "other")
        # In whole numbers, which are short: the box has two units for an entry.
        part = f"M{2 * at + 1} {_STROKES[shape]}"
        found.setdefault(axis, {}).setdefault((timeline.phase(at), shape), []).append(part)
        total = totals.setdefault(axis, [0, 0])
        total[0] += 1
        total[1] += timeline.nbytes[at]
    for axis in sorted(found):
        yield AxisRow(
            name=axis,
            count=totals[axis][0],
            nbytes=totals[axis][1],
            strokes=tuple(
                Stroke(phase=phase, shape=shape, d="".join(parts))
                for (phase, shape), parts in found[axis].items()
            ),
        )
