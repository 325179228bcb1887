"""Recordings as a trace that Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Final, TypeAlias

from pytest_fsdp_comm.comm.events import Collective, Recording, Reshard
from pytest_fsdp_comm.text.fqn import NO_MODULE, escape

# An event as the format has it.
Event: TypeAlias = dict[str, Any]

# Note [Time in a trace]
# Ranks are processes, axes their threads. What a unit gathers is an asynchronous span from unshard
# to reshard, since spans of units overlap, and a counter of bytes. A recording knows the order of
# what it has, and no times: each record gets a step of its own, in the order of the rank.

# Microseconds for each record.
STEP_US: Final = 1_000
# Of a record: less than a step, so that those of one thread never overlap.
_DURATION_US: Final = 800

_PHASES: Final = "phases"
_ABOUT: Final = "the order in which a rank issued its records, 1 ms for each; no durations"
_BEFORE: Final = -1
"""The place of what was there before the first record, whose place is 0."""


def dump_trace(recordings: Sequence[Recording]) -> str:
    """Write what ranks recorded in one block, in their order, as Chrome's trace events in JSON."""
    events = [event for recording in recordings for event in _rank_events(recording)]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"time": _ABOUT}}
    return json.dumps(document, separators=(",", ":"))


def _rank_events(recording: Recording) -> Iterator[Event]:
    rank = recording.rank
    records: list[Collective | Reshard] = [*recording.collectives, *recording.reshards]
    records.sort(key=attrgetter("index"))
    # In the order in which Perfetto shows them.
    threads = [_PHASES, *sorted({one.axis for one in recording.collectives})]
    yield from _named("process", f"rank {rank} of {recording.world_size}", rank, pid=rank, tid=0)
    layouts = {axis.name: f" ({axis.layout})" for axis in recording.mesh_axes}
    for number, name in enumerate(threads):
        yield from _named("thread", name + layouts.get(name, ""), number, pid=rank, tid=number)
    events = [
        {**event, "pid": rank, "tid": threads.index(thread)}
        for thread, event in (*_phase_spans(records), *map(_sent_span, recording.collectives))
    ]
    end = 1 + records[-1].index if records else 0
    events += _gathered_events(recording, end=end)
    # Where a span ends and one begins, the end comes first.
    yield from sorted(events, key=lambda event: (event["ts"], event["ph"] != "e"))


def _named(what: str, name: str, place: int, **whose: int) -> Iterator[Event]:
    yield {"ph": "M", "name": f"{what}_name", **whose, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", **whose, "args": {"sort_index": place}}


def _span(name: str, category: str, first: int, last: int) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": _time_of(first),
        "dur": (last - first) * STEP_US + _DURATION_US,
    }


def _time_of(place: int) -> int:
    return (place - _BEFORE) * STEP_US


def _phase_spans(records: Sequence[Collective | Reshard]) -> Iterator[tuple[str, Event]]:
    """Each phase from its first to its last record, as often as it comes."""
    for phase, run in groupby(records, key=attrgetter("phase")):
        indices = [record.index for record in run]
        yield _PHASES, _span(str(phase), "phase", indices[0], indices[-1])


def _sent_span(one: Collective) -> tuple[str, Event]:
    """The thread and the span of a record, without the arguments that are not known."""
    arguments = {
        "phase": str(one.phase),
        "owner": _name(one.owner),
        "issued in": None if one.issued_in == one.owner else _name(one.issued_in),
        "bytes": one.nbytes,
        "dtype": one.dtype,
        "carries": None if one.role is None else str(one.role),
        "ranks of the group": one.group_size,
        "async": one.is_async,
        "units ahead of use": one.ahead,
        "peer": one.peer,
        "root": one.root_rank,
        "reduction": one.reduce_op,
        "by": str(one.source),
        "at": one.call_site,
    }
    known = {key: value for key, value in arguments.items() if value not in {None, ""}}
    span = _span(f"{one.kind} {_name(one.owner)}", str(one.phase), one.index, one.index)
    return one.axis, {**span, "args": known}


def _name(fqn: str | None) -> str:
    return NO_MODULE if fqn is None else escape(fqn)


def gathered_spans(
    reshards: Sequence[Reshard], *, end: int
) -> list[tuple[int, int, str | None, int]]:
    """Pair each unshard with its reshard: the places of both, the module, the bytes between."""
    # A unit that is resharded first was gathered before the recording, and one that is not
    # resharded stays so until `end`, the place after the last record.
    spans: list[tuple[int, int, str | None, int]] = []
    since: dict[str | None, Reshard] = {}
    for one in reshards:
        if one.action == "unshard":
            # While it is gathered, another unshard gathers nothing.
            since.setdefault(one.module, one)
        else:
            begun = since.pop(one.module, None)
            first, nbytes = (begun.index, begun.nbytes) if begun else (_BEFORE, one.nbytes)
            spans.append((first, one.index, one.module, nbytes))
    spans += [(one.index, end, module, one.nbytes) for module, one in since.items()]
    return sorted(spans, key=itemgetter(0, 1))


def _gathered_events(recording: Recording, *, end: int) -> Iterator[Event]:
    rank = recording.rank
    changes: dict[int, int] = {}
    spans = gathered_spans(recording.reshards, end=end)
    for number, (first, last, module, nbytes) in enumerate(spans):
        common = {
            "cat": "gathered",
            "name": f"gathered {_name(module)}",
            # Spans of one name pair by their ids, which are those of all processes.
            "id": f"{rank}.{number}",
            "pid": rank,
            "tid": 0,
        }
        yield {**common, "ph": "b", "ts": _time_of(first), "args": {"bytes": nbytes}}
        yield {**common, "ph": "e", "ts": _time_of(last)}
        changes[first] = changes.get(first, 0) + nbytes
        changes[last] = changes.get(last, 0) - nbytes
    held = 0
    for index in sorted(changes):
        held += changes[index]
        yield {
            "ph": "C",
            "name": "gathered parameters",
            "ts": _time_of(index),
            "pid": rank,
            "args": {"bytes": held},
        }
