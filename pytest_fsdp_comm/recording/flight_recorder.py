"""Read torch's flight recorder, and compare a block with it: what a backend sent, on any thread."""

# Note [Flight recorder]
# It watches the process below the dispatcher. It knows no point-to-point calls and no
# monitored_barrier, and nothing of the fake group. NCCL has one of its own, in builds with CUDA.
# Read in torch 2.13; the entries name the thread from then on (version 2.10 of the trace), and
# without that name an entry is of no use here. It keeps 2,000 entries, or TORCH_FR_BUFFER_SIZE, of
# which 0 turns it off. A dump takes 10 us an entry, and is all or nothing.

# Note [The witness]
# The two are independent: a recording watches the dispatcher, the flight recorder the backend. What
# the flight recorder has and the recording has not is a gap. The reverse is none, as the flight
# recorder knows only some backends and no point-to-point calls. gloo's entries are compared one by
# one; those of NCCL, whose coalesced calls make more entries than collectives, only show whether
# they came from a thread that was recorded at all. Calls of one size are interchangeable, so that
# the flights that remain are taken for those of threads that were not recorded.

from __future__ import annotations

import math
import pickle  # torch writes it in this process, in half the time of its JSON
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from pytest_fsdp_comm.comm.events import Collective, Gap
from pytest_fsdp_comm.recording.operations import UNKNOWN
from pytest_fsdp_comm.recording.pending import Pending
from pytest_fsdp_comm.text.words import counted, show_nbytes

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
    is_done: bool
    """Whether the backend has finished it, or gloo has failed in it."""
    timeout_s: float = 0.0
    """After which the backend gives up."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's input tensors."""
        # Of a dtype that torch does not export, nothing is known.
        return sum(
            count * getattr(getattr(torch, name, None), "itemsize", 0) for name, count in self.sent
        )


def flown(since_ns: int) -> tuple[list[Flight], int]:
    """List the collectives of this process from a time of ``time.time_ns()`` on, in order.

    Returns:
        The collectives, and how many are kept if some may be lost, else 0.
    """
    found: list[Flight] = []
    num_kept = 0
    for dump in _DUMPS:
        entries = _entries(dump)
        new = [entry for entry in entries if entry["time_created_ns"] >= since_ns]
        if new and new[0] is entries[0] and new[0]["record_id"] > 0:
            num_kept = max(num_kept, len(entries))
        found += flights(new)
    return found, num_kept


# Of gloo, and of NCCL. Private names, whose absence means that there is nothing to read.
_DUMPS: Final = ("_dump_fr_trace", "_dump_nccl_trace")


def _entries(name: str) -> list[dict[str, Any]]:
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
    if dump is None:
        return []
    text = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    found: dict[str, Any] = pickle.loads(text)  # noqa: S301  # torch has just written it
    version = tuple(map(int, found["version"].split(".")))
    # See Note [Flight recorder].
    return found.get("entries", []) if version >= (2, 10) else []


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
        # NCCL retires an entry some time after the GPU has completed it.
        is_done=bool(entry["retired"]) or entry["state"] == "completed",
        timeout_s=entry["timeout_ms"] / 1000,
    )


def _tensors(sizes: list[list[int]], dtypes: list[str]) -> tuple[tuple[str, int], ...]:
    return tuple(
        (_SCALAR_TYPES.get(dtype, dtype.lower()), math.prod(size))
        for size, dtype in zip(sizes, dtypes, strict=False)
    )


_RUN_AS: Final = {"reduce_scatter": "all_reduce", "sparse_all_reduce": "all_reduce"}
"""Kinds that gloo runs, or names, as another."""

_SENT_AS: Final = {"complex64": "float32", "complex128": "float64"}
"""gloo sends a complex number as two real ones."""


class _Sent(NamedTuple):
    """What one call sent, in terms that both witnesses have."""

    kind: str
    dtypes: frozenset[str]
    nbytes: int

    def __str__(self) -> str:
        dtype = "+".join(sorted(self.dtypes))
        return f"{self.kind} of {show_nbytes(self.nbytes)} {dtype}" if dtype else self.kind


class Witness:
    """Find, at the end of a block, what else was sent. See Note [The witness]."""

    def __init__(self) -> None:
        self._begin_ns = time.time_ns()
        self._threads = {threading.get_ident()}
        self._running: set[int | None] = set()
        # What only the flight recorder has.
        self._unseen: list[Flight] = []
        self.notes: list[str] = []
        """What could not be checked."""

    def follow(self) -> None:
        self._threads.add(threading.get_ident())

    def note_running_threads(self) -> None:
        """Note which other threads still run, as the block is about to end."""
        # What they have issued by now may return later, and what they issue later is not recorded.
        alive = {thread.ident for thread in threading.enumerate()}
        self._running = alive & self._threads - {threading.get_ident()}

    def numbered(
        self, recorded: Iterable[Pending[Collective]]
    ) -> dict[tuple[str, int], Pending[Collective]]:
        """Find recorded calls by group and number, as long as both know the same of a group."""
        issued: defaultdict[str | None, list[tuple[_Sent, Pending[Collective]]]] = defaultdict(list)
        for call in recorded:
            if _kind(call):
                issued[call.group] += ((sent, call) for sent in _sent_by(call))
        numbered = {}
        for flight in flown(self._begin_ns)[0]:
            left = issued[flight.group]
            if left and left[0][0] == _sent(flight):
                numbered[flight.group, flight.seq] = left.pop(0)[1]
            else:
                left.clear()
        return numbered

    def end(self, recorded: Sequence[Pending[Collective]]) -> None:
        """Compare the block's collectives, as they returned, with the flight recorder."""
        flights, num_kept = flown(self._begin_ns)
        if num_kept:
            self.notes.append(
                f"only the last {num_kept} collectives were checked against torch's flight "
                "recorder, which keeps no more"
            )
        by_group: defaultdict[str, list[Flight]] = defaultdict(list)
        for flight in flights:
            if flight.backend == "gloo":
                by_group[flight.group].append(flight)
            elif flight.thread_id not in self._threads:
                self._unseen.append(flight)
        if by_group.pop("", ()):
            self.notes.append(
                "nothing was checked against torch's flight recorder, which names no groups under "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL"
            )
        for group, entries in by_group.items():
            own = [call for call in recorded if call.group == group and _kind(call)]
            self._compare(own, entries)
        count = len(self._unseen)
        self._unseen = [own for own in self._unseen if own.thread_id not in self._running]
        if len(self._unseen) < count:
            self.notes.append(
                "a thread of the block was still sending when it ended, and is recorded up to then"
            )

    def _compare(self, issued: Iterable[Pending[Collective]], flights: Iterable[Flight]) -> None:
        """Find the flights of one group that no recorded collective accounts for."""
        left: defaultdict[_Sent, list[Flight]] = defaultdict(list)
        for flight in flights:
            left[_sent(flight)].append(flight)
        for equal in left.values():
            equal.sort(key=lambda flight: flight.thread_id not in self._threads)
        unknown = []
        for call in issued:
            if _kind(call).startswith(UNKNOWN):
                unknown.append(call.fields["nbytes_sent"])
            for sent in _sent_by(call):
                del left[sent][:1]
        for flight in (flight for equal in left.values() for flight in equal):
            # Of an operation that no table knows, only the size can be compared.
            nbytes = _sent(flight).nbytes
            if nbytes in unknown and flight.thread_id in self._threads:
                unknown.remove(nbytes)
            else:
                self._unseen.append(flight)

    def gaps(self, axes: Callable[[], Mapping[str, str]]) -> tuple[Gap, ...]:
        """What was sent and not recorded as it was sent, with the name of each group."""
        if not self._unseen:
            return ()
        names = axes()
        whys: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for flight in self._unseen:
            sent = _sent(flight)
            described = flight.description if flight.description != "undefined" else ""
            over = names.get(flight.group) or described or "a group that is gone"
            why = (
                "sent below torch's dispatcher (by a backend's own method, or from C++)"
                if flight.thread_id in self._threads
                else "of other threads, of which nothing was recorded"
            )
            whys[why][f"{sent} over {over}"] += 1
        return tuple(
            Gap(
                kind="unseen",
                text=f"{counted(kinds.total(), 'collective')} {why}: {_listed(kinds)}",
            )
            for why, kinds in sorted(whys.items())
        )


def _kind(call: Pending[Collective]) -> str:
    """What gloo runs; empty for what the flight recorder does not keep."""
    kind: str = call.fields["kind"]
    return "" if kind in {"send", "recv"} else _RUN_AS.get(kind, kind)


def _sent_by(call: Pending[Collective]) -> list[_Sent]:
    """What gloo makes of a recorded collective."""
    if call.parts:
        return [_Sent(_kind(call), _alike([dtype]), nbytes) for dtype, nbytes in call.parts]
    dtype, nbytes = call.fields["dtype"], call.fields["nbytes_sent"]
    if call.fields["kind"] in {"broadcast", "scatter"} and not nbytes:  # most ranks only receive
        nbytes = call.fields["nbytes_received"]
    return [_Sent(_kind(call), _alike(dtype.split("+") if dtype else ()), nbytes)]


def _sent(flight: Flight) -> _Sent:
    # A rank that only receives, as most do of a scatter, shows no input.
    tensors = flight.sent or flight.received
    return _Sent(
        _RUN_AS.get(flight.kind, flight.kind),
        _alike(name for name, _ in tensors),
        sum(count * getattr(torch, name).itemsize for name, count in tensors),
    )


def _alike(dtypes: Iterable[str]) -> frozenset[str]:
    return frozenset(_SENT_AS.get(dtype, dtype) for dtype in dtypes)


def _listed(kinds: Counter[str]) -> str:
    listed = [kind if count == 1 else f"{count} x {kind}" for kind, count in kinds.items()]
    shown, more = listed[:4], listed[4:]
    return ", ".join(shown) + (f" and {len(more)} more kinds" if more else "")
