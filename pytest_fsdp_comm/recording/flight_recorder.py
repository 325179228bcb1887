"""Read torch's flight recorder: what a backend was given to send, on any thread."""

# Note [Flight recorder]
# It watches the process below the dispatcher. It knows no point-to-point calls and no
# monitored_barrier, and nothing of the fake group. NCCL has one of its own, in builds with CUDA.
# Read in torch 2.13; the entries name the thread from then on (version 2.10 of the trace), and
# without that name an entry is of no use here. It keeps 2,000 entries, or TORCH_FR_BUFFER_SIZE, of
# which 0 turns it off. A dump takes 10 us an entry, and is all or nothing.

from __future__ import annotations

import itertools
import math
import pickle  # torch writes it in this process, in half the time of its JSON
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def flown(since_ns: int) -> list[Flight]:
    """List the collectives of this process after a time of ``time.time_ns()``, in order."""
    dumped = itertools.chain.from_iterable(map(_entries, _DUMPS))
    return flights(entry for entry in dumped if entry["time_created_ns"] >= since_ns)


def mark() -> dict[tuple[str, str], int]:
    """Mark the end of the flight recorder, in a few microseconds however full it is.

    By dump and number of a group, which is never used again, comes its last collective.
    """
    return {
        (dump, number): status["last_enqueued_collective"]
        for dump in _DUMPS
        for number, status in _dumped(dump, with_collectives=False).get("pg_status", {}).items()
    }


def issued_after(begin: dict[tuple[str, str], int]) -> tuple[list[Flight], int]:
    """List collectives since a mark, in order, and how many remain if some may be lost, else 0."""
    found: list[Flight] = []
    num_kept, end = 0, mark()
    for dump in _DUMPS:
        if all(begin.get(key) == last for key, last in end.items() if key[0] == dump):
            continue
        entries = _entries(dump)
        new = [
            entry
            for entry in entries
            if entry["collective_seq_id"] > begin.get((dump, str(entry["pg_id"])), 0)
        ]
        if new and new[0] is entries[0] and new[0]["record_id"] > 0:
            num_kept = max(num_kept, len(entries))
        found += flights(new)
    return found, num_kept


# Of gloo, and of NCCL. Private names, whose absence means that there is nothing to read.
_DUMPS: Final = ("_dump_fr_trace", "_dump_nccl_trace")


def _dumped(name: str, *, with_collectives: bool) -> dict[str, Any]:
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
    if dump is None:
        return {}
    text = dump(includeCollectives=with_collectives, includeStackTraces=False, onlyActive=False)
    found: dict[str, Any] = pickle.loads(text)  # noqa: S301  # torch has just written it
    version = tuple(map(int, found["version"].split(".")))
    return found if version >= (2, 10) else {}  # see Note [Flight recorder]


def _entries(name: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = _dumped(name, with_collectives=True).get("entries", [])
    return entries


def flights(entries: Iterable[dict[str, Any]]) -> list[Flight]:
    """Read a dump's entries, whichever backend wrote it; point-to-point calls are left out."""
    return [_flight(entry) for entry in entries if not entry["is_p2p"]]


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
