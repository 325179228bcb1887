"""Read torch's flight recorder: what a backend was given to send, on any thread.

It watches the process below the dispatcher. It knows no point-to-point calls and no
``monitored_barrier``, and nothing of the fake group. NCCL has one of its own, in builds with CUDA.
Read in torch 2.13; the entries name the thread from then on (version 2.10 of the trace).
"""

from __future__ import annotations

import math
import pickle  # torch writes it in this process, in half the time of its JSON
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NAMES_THREADS: Final = (2, 10)
"""The first version of the trace whose entries name the thread."""

_SCALAR_TYPES: Final = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
"""ATen's names of scalar types, and torch's; the names of all others differ only in case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One collective, as the flight recorder knows it."""

    backend: str
    """``gloo`` or ``nccl``."""
    group: str
    """Name of the process group; empty under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    description: str
    """Description of the process group."""
    seq: int
    """Its number among the group's collectives, from 1; equal on all ranks of the group."""
    kind: str
    """What the backend ran; gloo runs a reduce-scatter as ``all_reduce``."""
    sent: tuple[tuple[str, int], ...]
    """Of each input tensor, the name of torch's dtype and the number of elements."""
    received: tuple[tuple[str, int], ...]
    """Likewise of the output tensors."""
    thread_id: int
    """As ``threading.get_ident()``."""
    thread_name: str
    """What the operating system calls the thread."""
    is_done: bool
    """Whether the backend has finished it, or gloo has failed in it."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's input tensors."""
        # Of a dtype that torch does not export, nothing is known.
        return sum(
            count * getattr(getattr(torch, name, None), "itemsize", 0) for name, count in self.sent
        )


Mark: TypeAlias = dict[tuple[str, str], int]
"""The end of the flight recorder at one moment: by dump and number of the process group, which is
never used again in a process, the number of the group's last collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flights:
    """What was issued after a `Mark`."""

    entries: tuple[Flight, ...]
    is_cut: bool
    """Whether the flight recorder may have dropped earlier ones."""
    num_kept: int
    """How many entries it has, of any time: 2,000 at most, or ``TORCH_FR_BUFFER_SIZE``."""


def flown(since_ns: int) -> list[Flight]:
    """The collectives of this process after a time of ``time.time_ns()``, as `issued_after`."""
    return [
        found
        for dump in _DUMPS
        for found in _flown(_dumped(dump, with_collectives=True), since_ns=since_ns)
    ]


def _flown(trace: Mapping[str, Any], *, since_ns: int) -> Iterator[Flight]:
    """The collectives of a dump, whichever backend wrote it."""
    for entry in trace.get("entries", ()):
        if not entry["is_p2p"] and entry["time_created_ns"] >= since_ns:
            yield _flight(entry)


def mark() -> Mark:
    """Mark the end of the flight recorder, in a few microseconds however full it is."""
    return {
        (dump, number): status["last_enqueued_collective"]
        for dump in _DUMPS
        for number, status in _status(dump).items()
    }


def issued_after(begin: Mark) -> Flights:
    """The collectives of this process since a mark, point-to-point calls left out, in order.

    None of them where torch has no flight recorder for the backend, where
    ``TORCH_FR_BUFFER_SIZE=0`` turns it off, and in older torch, which does not name the thread.
    """
    found: list[Flight] = []
    is_cut, num_kept = False, 0
    for dump in _DUMPS:
        # A dump takes 10 us an entry, and is all or nothing.
        if all(
            begin.get((dump, number)) == status["last_enqueued_collective"]
            for number, status in _status(dump).items()
        ):
            continue
        entries = _dumped(dump, with_collectives=True).get("entries", [])
        num_kept = max(num_kept, len(entries))
        new = [
            entry
            for entry in entries
            if entry["collective_seq_id"] > begin.get((dump, str(entry["pg_id"])), 0)
        ]
        is_cut |= bool(new) and new[0] is entries[0] and new[0]["record_id"] > 0
        found += [_flight(entry) for entry in new if not entry["is_p2p"]]
    return Flights(entries=tuple(found), is_cut=is_cut, num_kept=num_kept)


# Of gloo, and of NCCL. Private names, whose absence means that there is nothing to read.
_DUMPS: Final = ("_dump_fr_trace", "_dump_nccl_trace")


def _dumped(name: str, *, with_collectives: bool) -> dict[str, Any]:
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
    if dump is None:
        return {}
    text = dump(includeCollectives=with_collectives, includeStackTraces=False, onlyActive=False)
    found: dict[str, Any] = pickle.loads(text)  # noqa: S301  # torch has just written it
    version = tuple(map(int, found["version"].split(".")))
    return found if version >= _NAMES_THREADS else {}


def _status(name: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = _dumped(name, with_collectives=False).get("pg_status", {})
    return found


def _flight(entry: dict[str, Any]) -> Flight:
    backend, _, kind = entry["profiling_name"].partition(":")
    group, description = entry["process_group"]
    return Flight(
        backend=backend,
        group=group,
        description=description,
        seq=entry["collective_seq_id"],
        kind=kind,
        sent=_tensors(entry["input_sizes"], entry["input_dtypes"]),
        received=_tensors(entry["output_sizes"], entry["output_dtypes"]),
        thread_id=int(entry["thread_id"]),
        thread_name=entry.get("thread_name", ""),
        # NCCL retires an entry some time after the GPU has completed it.
        is_done=bool(entry["retired"]) or entry["state"] == "completed",
    )


def _tensors(sizes: list[list[int]], dtypes: list[str]) -> tuple[tuple[str, int], ...]:
    return tuple(
        (_SCALAR_TYPES.get(dtype, dtype.lower()), math.prod(size))
        for size, dtype in zip(sizes, dtypes, strict=False)
    )
