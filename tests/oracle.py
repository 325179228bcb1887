"""Compare recordings with two independent witnesses: the flight recorder and torch.profiler.

The flight recorder watches the recorded run itself, below the dispatcher and on every thread, but
has no point-to-point calls, and nothing of the fake group. The profiler sees these too, but has to
watch a second run, as it sees each call twice under a dispatch mode.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from texts import parse_comm
from torch.profiler import ProfilerActivity, profile
from torch_facts import HAS_FLIGHT_RECORDER

from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.snapshots.comm_text import format_profile

SILENT = {"wait_tensor", "_wrap_tensor_autograd"}

# gloo runs these as another collective, which the flight recorder then shows.
RUN_AS = {
    "reduce_scatter": {"all_reduce", "_reduce_scatter_base", "reduce_scatter"},
    "reduce": {"all_reduce", "reduce"},
}

ITEM_SIZES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
}

# One rank sends these to the others: the flight recorder has the same input on all ranks.
FROM_ONE = {"broadcast", "scatter"}

POINT_TO_POINT = {"send", "recv"}

PROFILED = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "isend": "send",
    "irecv": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}


def gloo_and_fake(world_size: int) -> Any:
    """Run a test on gloo ranks, and again on the fake group."""
    backends = pytest.mark.parametrize(
        "backend",
        [
            pytest.param(backend, marks=pytest.mark.distributed(world_size, backend=backend))
            for backend in ("gloo", "fake")
        ],
        indirect=True,
    )

    def decorated(test: Any) -> Any:
        return backends(pytest.mark.usefixtures("backend")(test))

    return decorated


def lines(comm_mode: Any) -> list[str]:
    """Write events as ``phase owner kind[axis] nbytes < issued_in``; ``.`` the root, ``-`` none."""

    def label(name: str | None) -> str:
        return "-" if name is None else name or "."

    return [
        f"{event.phase.value} {label(event.owner)} {event.kind}[{event.axis}] {event.nbytes}"
        f" < {label(event.issued_in)}"
        for event in comm_mode.events
    ]


def owned_lines(comm_mode: Any) -> list[str]:
    """Return sorted `lines` without ``issued_in``, for comparison with lines of `derived`."""
    return sorted(line.partition(" < ")[0] for line in lines(comm_mode))


@dataclass(frozen=True)
class Flight:
    """One entry of the flight recorder."""

    record_id: int
    kind: str
    nbytes_in: int
    nbytes_out: int
    thread_id: int
    group: str
    """torch's name of the process group: ``mesh_tp``, ``default_pg``."""


def flights(*, after: int = -1) -> list[Flight]:
    """Return the collectives of this process's threads in order; none without a recorder."""
    if not HAS_FLIGHT_RECORDER:
        return []
    dumped = torch._C._distributed_c10d._dump_fr_trace_json(
        includeCollectives=True, onlyActive=False
    )
    return [
        Flight(
            record_id=entry["record_id"],
            kind=entry["profiling_name"].partition(":")[2],
            nbytes_in=_nbytes(entry["input_sizes"], entry["input_dtypes"]),
            nbytes_out=_nbytes(entry["output_sizes"], entry["output_dtypes"]),
            thread_id=int(entry["thread_id"]),
            group=entry["process_group"][1],
        )
        for entry in json.loads(dumped).get("entries", [])
        if entry["record_id"] > after and not entry["is_p2p"]
    ]


def _nbytes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    return sum(
        torch.Size(size).numel() * ITEM_SIZES[dtype]
        for size, dtype in zip(sizes, dtypes, strict=True)
    )


def last_flight() -> int:
    return max((flight.record_id for flight in flights()), default=-1)


def _profiled_events(step: Callable[[], object]) -> list[Any]:
    """Profile a run of `step`; return the events in the order of their starts."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
        # gloo's thread ends an operation's record after it has woken the waiters. Reading the
        # results at that moment crashed a rank once in some thousand runs (torch 2.13), so wait
        # while the profiler is still on.
        time.sleep(extend_under_load(0.02))
    return sorted(profiler.events(), key=lambda event: event.time_range.start)


def profiled(step: Callable[[], object]) -> list[str]:
    """Return the kinds of the collectives that the profiler sees in a run of `step`."""
    return [
        PROFILED[event.name.partition("::")[2]]
        for event in _profiled_events(step)
        if _is_collective(event) and not _has_collective_above(event)
    ]


def profiled_distances(step: Callable[[], object]) -> list[tuple[str, int]]:
    """Read from FSDP2's labels how far ahead of its use it gathers each unit in a run of `step`.

    Returns:
        Unit, as torch names it, and distance of each gather, in the order of issue.

    Raises:
        ValueError: A gathered unit is not used.
    """
    label = re.compile(r"FSDP::(all_gather|pre_forward|pre_backward)(?: \(([^)]*)\))?(?: \[.*)?")
    slots: list[tuple[str, str | None]] = [("before the first", None)]
    gathers: list[tuple[str, int]] = []
    for event in _profiled_events(step):
        match = label.fullmatch(event.name)
        if match is None:
            continue
        action, unit = match[1], match[2] or ""
        if action == "all_gather":
            gathers.append((unit, len(slots) - 1))
        elif slots[-1] != (action, unit):
            slots.append((action, unit))
    users = [user for _, user in slots]
    return [(unit, users.index(unit, issued) - issued) for unit, issued in gathers]


def _is_collective(event: Any) -> bool:
    namespace, _, name = event.name.partition("::")
    return namespace in {"c10d", "_c10d_functional", "_dtensor"} and name not in SILENT


def _has_collective_above(event: Any) -> bool:
    """Whether a functional collective called this c10d operation, in C++; count it once."""
    above = event.cpu_parent
    while above is not None:
        if _is_collective(above):
            return True
        above = above.cpu_parent
    return False


def witnessed(
    comm_mode: Any,
    model: Any,
    step: Callable[[], object],
    *,
    warm_up: int = 0,
    profiler: bool = True,
) -> None:
    """Record `step`, and assert that both witnesses saw the same.

    Args:
        comm_mode: The fixture; holds the recording afterwards.
        model: As in ``comm_mode(model)``; None for the bare mode.
        step: The function to record; also runs ``warm_up`` times before, and once for the profiler.
        warm_up: Runs before the recording.
        profiler: False if two runs of `step` do not send the same.
    """
    for _ in range(warm_up):
        step()
    since = last_flight()
    with comm_mode if model is None else comm_mode(model):
        step()
    assert comm_mode.events, "nothing was recorded, so the comparison would prove nothing"
    if HAS_FLIGHT_RECORDER and dist.get_backend() != "fake":
        assert_flown(comm_mode.events, flights(after=since))
    if profiler:
        assert [event.kind for event in comm_mode.events] == profiled(step)


def witnessed_twice(
    comm_mode: Any, model: Any, step: Callable[[], object], *, warm_up: int = 0
) -> None:
    """Like `witnessed`; also assert that a second recording has the same, readable snapshot.

    Args:
        comm_mode: The fixture; holds the second recording afterwards.
        model: As in ``comm_mode(model)``.
        step: Sends the same each time; runs three times after the warm-up.
        warm_up: As in `witnessed`.
    """
    witnessed(comm_mode, model, step, warm_up=warm_up)
    first = comm_mode.merged_profile()
    with comm_mode(model):
        step()
    assert comm_mode.merged_profile() == first
    assert parse_comm(format_profile(first)) == first


def assert_flown(events: Iterable[Any], flown: Sequence[Flight]) -> None:
    """Assert that recorded collectives equal the flight recorder's: kind, size, group."""
    entries = list(flown)
    recorded = [event for event in events if event.kind not in POINT_TO_POINT]
    for event in recorded:
        assert entries, f"the flight recorder did not see {event}"
        parts = [entries.pop(0)]
        if event.op.endswith(("_coalesced_", "_coalesced", "c10d.reduce_scatter_")):
            # Gloo runs a reduce-scatter of several tensors tensor by tensor.
            while sum(part.nbytes_in for part in parts) < event.nbytes_sent and entries:
                parts.append(entries.pop(0))
        kinds = RUN_AS.get(event.kind, {event.kind})
        assert {part.kind for part in parts} <= kinds, f"{event} != {parts}"
        sizes = [
            max(part.nbytes_in, part.nbytes_out) if event.kind in FROM_ONE else part.nbytes_in
            for part in parts
        ]
        expected = event.nbytes if event.kind in FROM_ONE else event.nbytes_sent
        assert sum(sizes) == expected, f"{event} != {parts}"
        assert {_group_of(event, part) for part in parts} == {event.axis}, f"{event} != {parts}"
    assert not entries, f"not recorded: {entries}"


def _group_of(event: Any, part: Flight) -> str:
    """Return the axis from torch's name of the group; else the recorded axis."""
    if part.group == "default_pg":
        # torch uses it for any axis of all ranks.
        assert event.group_size == dist.get_world_size()
    is_named = part.group.startswith("mesh_") and not part.group.startswith("mesh_dim_")
    return part.group.removeprefix("mesh_") if is_named else event.axis
