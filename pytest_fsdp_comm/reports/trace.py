"""Recordings as a trace that Perfetto and ``chrome://tracing`` open.

Ranks are processes, axes their threads. What a unit gathers is an asynchronous span from unshard to
reshard, since spans of units overlap, and a counter of bytes. A recording knows the order of what
it has, and no times: each record has the same time for itself, in the order of the rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pytest_fsdp_comm.text.fqn import NO_MODULE, escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_fsdp_comm.comm.events import (
        Collective,
        HostDeviceCopy,
        Phase,
        Recording,
        Redistribution,
        Reshard,
    )

    Event: TypeAlias = dict[str, Any]
    """An event as the format has it."""
    _Record: TypeAlias = Collective | Reshard | Redistribution | HostDeviceCopy

STEP_US: Final = 1_000
"""Microseconds for each record."""
_DURATION_US: Final = 800
"""Of a record: less than a step, so that those of one thread never overlap."""

_PHASES: Final = "phases"
_REDISTRIBUTIONS: Final = "redistributions"
_COPIES: Final = "host-device copies"
_GATHERED: Final = "gathered parameters"
_ABOUT: Final = "the order in which a rank issued its records, 1 ms for each; no durations"
_BEFORE: Final = -1
"""The place of what was there before the first record, whose place is 0."""


def dump_trace(recordings: Sequence[Recording]) -> str:
    """Writes a trace in the JSON format of Chrome's trace events.

    Args:
        recordings: What some ranks recorded in one block, in the order of the ranks.
    """
    events = [event for recording in recordings for event in _rank_events(recording)]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"time": _ABOUT}}
    return json.dumps(document, separators=(",", ":"))


def _rank_events(recording: Recording) -> Iterator[Event]:
    rank = recording.rank
    threads = {
        name: number
        for number, name in enumerate(
            (
                _PHASES,
                *sorted({one.axis for one in recording.collectives}),
                *([_REDISTRIBUTIONS] if recording.redistributions else []),
                *([_COPIES] if recording.copies else []),
            )
        )
    }
    layouts = {axis.name: axis.layout for axis in recording.mesh_axes}
    yield _named("process_name", rank, 0, f"rank {rank} of {recording.world_size}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for name, thread in threads.items():
        layout = f" ({layouts[name]})" if name in layouts else ""
        yield _named("thread_name", rank, thread, f"{name}{layout}")
        order = {"sort_index": thread}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": order}
    records = sorted(_records(recording), key=attrgetter("index"))
    yield from sorted(
        [
            *(_phase_event(rank, threads[_PHASES], *run) for run in _runs_of_phases(records)),
            *(_collective_event(one, rank, threads[one.axis]) for one in recording.collectives),
            *(
                _redistribution_event(one, rank, threads[_REDISTRIBUTIONS])
                for one in recording.redistributions
            ),
            *(_copy_event(one, rank, threads[_COPIES]) for one in recording.copies),
            *_gathered_events(recording, end=1 + records[-1].index if records else 0),
        ],
        # Where a span ends and one begins, the end comes first.
        key=lambda event: (event["ts"], event["ph"] != "e"),
    )


def _records(recording: Recording) -> Iterator[_Record]:
    yield from recording.collectives
    yield from recording.reshards
    yield from recording.redistributions
    yield from recording.copies


def _named(what: str, rank: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _span(record: _Record, rank: int, thread: int, name: str, arguments: Event) -> Event:
    """A span of a thread, of which the arguments that are not known are left out."""
    known = {key: value for key, value in arguments.items() if value not in {None, ""}}
    return {
        "ph": "X",
        "name": name,
        "cat": str(record.phase),
        "ts": _time_of(record.index),
        "dur": _DURATION_US,
        "pid": rank,
        "tid": thread,
        "args": {"phase": str(record.phase), **known},
    }


def _time_of(place: int) -> int:
    return (place - _BEFORE) * STEP_US


def _collective_event(one: Collective, rank: int, thread: int) -> Event:
    arguments = {
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
    return _span(one, rank, thread, f"{one.kind} {_name(one.owner)}", arguments)


def _redistribution_event(one: Redistribution, rank: int, thread: int) -> Event:
    source, target = (
        ", ".join(placements) for placements in (one.source_placements, one.target_placements)
    )
    arguments = {
        "owner": _name(one.owner),
        "axes": ", ".join(one.mesh_axes),
        "bytes before": one.nbytes,
        "at": one.call_site,
    }
    return _span(one, rank, thread, f"{source} -> {target}", arguments)


def _copy_event(one: HostDeviceCopy, rank: int, thread: int) -> Event:
    arguments = {"owner": _name(one.owner), "bytes": one.nbytes, "at": one.call_site}
    return _span(one, rank, thread, one.direction, arguments)


def _name(fqn: str | None) -> str:
    return NO_MODULE if fqn is None else escape(fqn)


def _runs_of_phases(records: Iterable[_Record]) -> Iterator[tuple[Phase, int, int]]:
    """Each phase with its first and last record, as often as it comes."""
    for phase, run in groupby(records, key=attrgetter("phase")):
        indices = [record.index for record in run]
        yield phase, indices[0], indices[-1]


def _phase_event(rank: int, thread: int, phase: Phase, first: int, last: int) -> Event:
    return {
        "ph": "X",
        "name": str(phase),
        "cat": "phase",
        "ts": _time_of(first),
        "dur": (last - first) * STEP_US + _DURATION_US,
        "pid": rank,
        "tid": thread,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """A unit that is gathered, from one record to another."""

    module: str | None
    first: int
    last: int
    nbytes: int


def gathered_spans(reshards: Sequence[Reshard], *, end: int) -> list[_Gathered]:
    """Pairs each unshard with the reshard that frees what it gathered.

    A unit that is resharded first was gathered before the recording, and one that is not resharded
    stays so beyond its end.

    Args:
        reshards: In order.
        end: The place after the last record.
    """
    spans: list[_Gathered] = []
    since: dict[str | None, Reshard] = {}
    for one in reshards:
        if one.action == "unshard":
            # While it is gathered, another unshard gathers nothing.
            since.setdefault(one.module, one)
            continue
        begun = since.pop(one.module, None)
        spans.append(
            _Gathered(
                module=one.module,
                first=begun.index if begun else _BEFORE,
                last=one.index,
                nbytes=begun.nbytes if begun else one.nbytes,
            )
        )
    spans += [
        _Gathered(module=module, first=one.index, last=end, nbytes=one.nbytes)
        for module, one in since.items()
    ]
    return sorted(spans, key=lambda span: (span.first, span.last))


def _gathered_events(recording: Recording, *, end: int) -> Iterator[Event]:
    rank = recording.rank
    changes: dict[int, int] = {}
    for number, span in enumerate(gathered_spans(recording.reshards, end=end)):
        common = {
            "cat": "gathered",
            "name": f"gathered {_name(span.module)}",
            # Spans of one name pair by their ids, which are those of all processes.
            "id": f"{rank}.{number}",
            "pid": rank,
            "tid": 0,
        }
        yield {**common, "ph": "b", "ts": _time_of(span.first), "args": {"bytes": span.nbytes}}
        yield {**common, "ph": "e", "ts": _time_of(span.last)}
        changes[span.first] = changes.get(span.first, 0) + span.nbytes
        changes[span.last] = changes.get(span.last, 0) - span.nbytes
    held = 0
    for index in sorted(changes):
        held += changes[index]
        yield {
            "ph": "C",
            "name": _GATHERED,
            "ts": _time_of(index),
            "pid": rank,
            "args": {"bytes": held},
        }
