"""Decides which computation can hide each collective, from the order of calls alone."""

# Two operations can run at the same time if neither has to finish before the other starts. Streams
# and waits impose this order, whatever the operations' durations, so a simulated rank knows it.

# Note [Clocks]: Each collective and each operation with FLOPs has a position on its stream, counted
# from 1. A clock has a position for each stream: everything up to these positions finishes before
# whatever has the clock. A stream's next operation has the stream's clock. When a stream waits for
# an event, its clock takes the later position of each stream from its own clock and the event's.
# When the host waits, everything that is issued afterwards, on any stream, does the same.
#
# A collective C at position p of its stream finishes before exactly the operations whose clocks
# have at least p for that stream. Clocks only grow along a stream, so the operations of another
# stream come in three runs: those in C's clock, which finish before C starts; then those that can
# run at the same time; then those whose clocks contain C. Only the second run can hide C.

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias, TypeVar

Stream: TypeAlias = Hashable
Clock: TypeAlias = Mapping[Stream, int]
"""See Note [Clocks]. Never changed, since operations and events share it. Streams at 0 are left
out."""
Work = TypeVar("Work")

NOTHING: Final[Clock] = {}
"""The clock of an event that comes after nothing."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a collective is on its stream."""

    stream: Stream
    position: int
    clock: Clock
    """What finishes before the collective starts."""

    @property
    def end(self) -> Clock:
        """The clock of an event that comes right after the collective."""
        return {**self.clock, self.stream: self.position}


@dataclass(slots=True)
class _Line(Generic[Work]):
    """The operations of one stream."""

    clock: Clock = field(default_factory=dict)
    """What finishes before the next operation starts, except operations of this stream."""
    position: int = 0
    """The position of the last operation."""
    after_host: Clock = field(default_factory=dict)
    """The host's clock that `clock` contains; compared by identity."""
    positions: list[int] = field(default_factory=list)
    """The positions of the operations with FLOPs; `clocks` and `works` belong to them."""
    clocks: list[Clock] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


class Timeline(Generic[Work]):
    """The order of everything that was issued. `Work` describes an operation with FLOPs."""

    def __init__(self) -> None:
        self._lines: dict[Stream, _Line[Work]] = {}
        self._communicators: dict[Hashable, Clock] = {}
        self._host: Clock = NOTHING

    def compute(self, stream: Stream, work: Work) -> None:
        """Issue an operation with FLOPs."""
        line = self._get_line_after_host(stream)
        line.position += 1
        line.positions.append(line.position)
        line.clocks.append(line.clock)
        line.works.append(work)

    def communicate(self, stream: Stream, communicator: Hashable) -> StreamPosition:
        """Issue a collective; those of one communicator run one after the other."""
        self.wait(stream, self._communicators.get(communicator, NOTHING))
        line = self._get_line_after_host(stream)
        before = self.record(stream)
        line.position += 1
        position = StreamPosition(stream, line.position, before)
        self._communicators[communicator] = position.end
        return position

    def record(self, stream: Stream) -> Clock:
        """Return the clock of an event that comes after everything on the stream so far."""
        line = self._get_line_after_host(stream)
        return {**line.clock, stream: line.position} if line.position else line.clock

    def record_all(self) -> Clock:
        """Return the clock of an event that comes after everything on all streams so far."""
        return {stream: line.position for stream, line in self._lines.items() if line.position}

    def wait(self, stream: Stream, event: Clock) -> None:
        """Make everything that the stream runs from now on wait for an event."""
        line = self._get_line_after_host(stream)
        line.clock = _join_clocks(line.clock, event)

    def wait_on_host(self, event: Clock) -> None:
        """Make everything that is issued from now on, on any stream, wait for an event."""
        self._host = _join_clocks(self._host, event)

    def work_beside(self, call: StreamPosition) -> Iterator[Work]:
        """Yield the operations on other streams that can run at the same time as a collective."""
        for stream, line in self._lines.items():
            if stream != call.stream:
                first = bisect_right(line.positions, call.clock.get(stream, 0))
                end = bisect_left(
                    line.clocks, call.position, key=lambda clock: clock.get(call.stream, 0)
                )
                yield from line.works[first:end]

    def _get_line_after_host(self, stream: Stream) -> _Line[Work]:
        line = self._lines.get(stream)
        if line is None:
            line = self._lines[stream] = _Line()
        if line.after_host is not self._host:
            line.after_host = self._host
            line.clock = _join_clocks(line.clock, self._host)
        return line


def _join_clocks(first: Clock, second: Clock) -> Clock:
    later = {stream: n for stream, n in second.items() if n > first.get(stream, 0)}
    return {**first, **later} if later else first
