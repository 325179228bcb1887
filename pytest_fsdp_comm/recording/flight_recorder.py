"""Asks torch's flight recorder for collectives that other threads issued.

A ``TorchDispatchMode`` watches the thread that entered it and the autograd threads that this one
starts. The flight recorder watches the process, below the dispatcher; it knows no point-to-point
calls, and nothing of the fake group. Its entries name the thread from torch 2.13 on (version 2.10
of the trace; read in 2.13 and 2.15).
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import torch

_ITEM_SIZES: Final = {
    "Bool": 1,
    "Byte": 1,
    "Char": 1,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightEntry:
    """One collective, as the flight recorder knows it."""

    group: str
    """Name of the process group."""
    description: str
    """Description of the process group, e.g. ``mesh_dp``."""
    seq: int
    """Its number among the group's collectives, from 1; equal on all ranks of the group."""
    kind: str
    """What the backend ran; gloo runs a reduce-scatter as ``all_reduce``."""
    nbytes: int
    """Bytes of this rank's input tensors."""
    is_done: bool
    """Whether the backend has finished it."""


def flown(since_ns: int) -> list[FlightEntry]:
    """The collectives of this process, point-to-point calls left out, in order.

    Args:
        since_ns: Only those issued after this time, on the clock of `now_ns`.

    Returns:
        Empty where torch has no flight recorder for the backend.
    """
    return [
        FlightEntry(
            group=entry["process_group"][0],
            description=entry["process_group"][1],
            seq=entry["collective_seq_id"],
            kind=entry["profiling_name"].partition(":")[2],
            nbytes=_nbytes(entry),
            is_done=bool(entry["retired"]),
        )
        for entry in _entries()
        if not entry["is_p2p"] and entry["time_created_ns"] >= since_ns
    ]


def now_ns() -> int:
    """The clock of the flight recorder's entries, in nanoseconds."""
    return time.time_ns()


def unseen(*, since_ns: int, seen_threads: set[int]) -> dict[str, Counter[str]]:
    """Counts the collectives that were issued on threads which the recording did not watch.

    Args:
        since_ns: Only those issued after this time, on the clock of `now_ns`.
        seen_threads: ``threading.get_ident()`` of the threads that were watched.

    Returns:
        For each such thread its name, with the number of collectives by kind. Empty if there are
        none, and where torch has no flight recorder or does not record the thread.
    """
    found: dict[str, Counter[str]] = {}
    for entry in _entries():
        thread = entry.get("thread_id")
        if thread is None or entry["is_p2p"] or entry["time_created_ns"] < since_ns:
            continue
        if int(thread) not in seen_threads:
            name = entry.get("thread_name") or f"thread {thread}"
            kind = entry["profiling_name"].partition(":")[2]
            found.setdefault(name, Counter())[kind] += 1
    return found


def _nbytes(entry: dict[str, Any]) -> int:
    total = 0
    for size, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False):
        # Names of ATen's scalar types; what is not listed counts nothing.
        total += math.prod(size) * _ITEM_SIZES.get(dtype, 0)
    return total


def _entries() -> list[dict[str, Any]]:
    dump = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(dump, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    trace: dict[str, Any] = json.loads(dump(includeCollectives=True, onlyActive=False) or "{}")
    entries: list[dict[str, Any]] = trace.get("entries", [])
    return entries
