"""Compare a recording with torch's flight recorder, to find collectives that were not recorded."""

# Note [Flight recorder]
# torch's flight recorder lists the collectives that a backend ran, on all threads. It does not list
# point-to-point calls, monitored_barrier, or calls on the fake group. NCCL has a separate flight
# recorder in CUDA builds. Since torch 2.13 (version 2.10 of the trace), entries contain their
# thread; we ignore older traces. The buffer has room for TORCH_FR_BUFFER_SIZE entries (2,000 by
# default; 0 disables the recorder). A dump includes all entries, and takes 10 us for each.

# Note [The witness]
# The recording watches the dispatcher; the flight recorder watches the backend. A collective that
# only the flight recorder lists is a gap. A collective that only the recording lists is not a gap,
# because the flight recorder lacks some backends and kinds. We compare gloo's entries one by one.
# NCCL merges several calls into one entry, so its entries can only reveal threads that were not
# recorded at all. If several collectives look the same, we match those from recorded threads
# first, so that any unmatched ones are from other threads.

from __future__ import annotations

import math
import pickle  # torch dumps this twice as fast as JSON; safe, because the dump is from this process
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
from pytest_fsdp_comm.text.words import show_count, show_nbytes

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
"""Maps ATen's dtype names to torch's. Names that are not listed differ only in case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A collective that the flight recorder lists."""

    backend: str
    group: str
    """Name of the process group; empty under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    description: str
    seq: int
    """Number of the collective in its group, starting at 1; the same on all ranks of the group."""
    kind: str
    """The kind that the backend ran; gloo runs a reduce-scatter as ``all_reduce``."""
    sent: tuple[tuple[str, int], ...]
    """Dtype (torch's name) and number of elements of each input tensor."""
    received: tuple[tuple[str, int], ...]
    thread_id: int
    """The value of ``threading.get_ident()`` on the thread that issued the collective."""
    is_done: bool
    """Whether the backend has finished the collective, or gloo has failed while running it."""
    timeout_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """The message size, as in `events.Collective`: for an all-gather, of the result."""
        # Dtypes that torch does not export count as 0 bytes.
        return max(
            sum(count * getattr(getattr(torch, name, None), "itemsize", 0) for name, count in side)
            for side in (self.sent, self.received)
        )


def read_flights(since_ns: int) -> tuple[list[Flight], int]:
    """Return the collectives that this process ran since `since_ns`, a ``time.time_ns()``."""
    # Also return the number of entries in the buffer if it may have dropped older ones, else 0.
    collectives: list[Flight] = []
    num_stored = 0
    for dump in _DUMPS:
        entries = _read_entries(dump)
        new = [entry for entry in entries if entry["time_created_ns"] >= since_ns]
        if new and new[0] is entries[0] and new[0]["record_id"] > 0:
            num_stored = max(num_stored, len(entries))
        collectives += parse_flights(new)
    return collectives, num_stored


# Private functions that dump the entries of gloo and NCCL. If torch lacks one, read no entries.
_DUMPS: Final = ("_dump_fr_trace", "_dump_nccl_trace")


def _read_entries(name: str) -> list[dict[str, Any]]:
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
    if dump is None:
        return []
    text = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    trace: dict[str, Any] = pickle.loads(text)  # noqa: S301  # torch has just written it
    version = tuple(map(int, trace["version"].split(".")))
    # See Note [Flight recorder].
    return trace.get("entries", []) if version >= (2, 10) else []


def parse_flights(entries: Iterable[dict[str, object]]) -> list[Flight]:
    """Convert the entries of a gloo or NCCL dump; skip point-to-point calls."""
    return [_parse_flight(entry) for entry in entries if not entry["is_p2p"]]


def _parse_flight(entry: dict[str, Any]) -> Flight:
    backend, _, kind = entry["profiling_name"].partition(":")
    group, description = entry["process_group"]
    return Flight(
        backend=backend,
        group=group,
        description=description,
        seq=entry["collective_seq_id"],
        kind=kind.removeprefix("_").removesuffix("_base"),  # NCCL's _all_gather_base
        sent=_parse_tensors(entry["input_sizes"], entry["input_dtypes"]),
        received=_parse_tensors(entry["output_sizes"], entry["output_dtypes"]),
        thread_id=int(entry["thread_id"]),
        # Check both: NCCL retires an entry some time after the GPU has finished the collective.
        is_done=bool(entry["retired"]) or entry["state"] == "completed",
        timeout_s=entry["timeout_ms"] / 1000,
    )


def _parse_tensors(sizes: list[list[int]], dtypes: list[str]) -> tuple[tuple[str, int], ...]:
    return tuple(
        (_SCALAR_TYPES.get(dtype, dtype.lower()), math.prod(size))
        for size, dtype in zip(sizes, dtypes, strict=False)
    )


_RUN_AS: Final = {"reduce_scatter": "all_reduce", "sparse_all_reduce": "all_reduce"}
"""Maps a kind to the kind that gloo lists for it, where the two differ."""

_SENT_AS: Final = {"complex64": "float32", "complex128": "float64"}
"""Maps a dtype to the dtype that gloo sends: it sends a complex number as two real numbers."""


class _Sent(NamedTuple):
    """The properties in which a recorded collective must match the flight recorder's entry."""

    kind: str
    dtypes: frozenset[str]
    nbytes: int

    def __str__(self) -> str:
        dtype = "+".join(sorted(self.dtypes))
        return f"{self.kind} of {show_nbytes(self.nbytes)} {dtype}" if dtype else self.kind


class Witness:
    """Find the collectives of a block that were not recorded. See Note [The witness]."""

    def __init__(self) -> None:
        self._begin_ns = time.time_ns()
        self._threads = {threading.get_ident()}
        self._running: set[int | None] = set()
        # Collectives that only the flight recorder lists.
        self._unseen: list[Flight] = []
        self.notes: list[str] = []

    def add_current_thread(self) -> None:
        self._threads.add(threading.get_ident())

    def note_running_threads(self) -> None:
        """Record which of the recorded threads are still running when the block ends."""
        # Calls of such threads that end after the block are not recorded: a note, but not a gap.
        alive = {thread.ident for thread in threading.enumerate()}
        self._running = alive & self._threads - {threading.get_ident()}

    def key_calls_by_sequence_number(
        self, recorded: Iterable[Pending[Collective]]
    ) -> dict[tuple[str, int], Pending[Collective]]:
        """Return the calls up to each group's first mismatch, keyed by group and `Flight.seq`."""
        issued: defaultdict[str | None, list[tuple[_Sent, Pending[Collective]]]] = defaultdict(list)
        for call in recorded:
            if _kind_listed_by_gloo(call):
                issued[call.group] += ((sent, call) for sent in _match_keys_of_call(call))
        numbered = {}
        for flight in read_flights(self._begin_ns)[0]:
            unmatched = issued[flight.group]
            if unmatched and unmatched[0][0] == _match_key_of_flight(flight):
                numbered[flight.group, flight.seq] = unmatched.pop(0)[1]
            else:
                unmatched.clear()
        return numbered

    def find_unseen(self, recorded: Sequence[Pending[Collective]]) -> None:
        """Compare the block's collectives with the flight recorder."""
        flights, num_stored = read_flights(self._begin_ns)
        if num_stored:
            self.notes.append(
                f"only the last {num_stored} collectives were checked against torch's flight "
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
            calls = [
                call for call in recorded if call.group == group and _kind_listed_by_gloo(call)
            ]
            self._add_unmatched_flights(calls, entries)
        count = len(self._unseen)
        self._unseen = [seen for seen in self._unseen if seen.thread_id not in self._running]
        if len(self._unseen) < count:
            self.notes.append(
                "a thread was still communicating when the block ended; its later collectives are "
                "not recorded"
            )

    def _add_unmatched_flights(
        self, issued: Iterable[Pending[Collective]], flights: Iterable[Flight]
    ) -> None:
        """Add one group's flights to `_unseen`, except those that match a recorded collective."""
        unmatched: defaultdict[_Sent, list[Flight]] = defaultdict(list)
        for flight in flights:
            unmatched[_match_key_of_flight(flight)].append(flight)
        for equal in unmatched.values():
            equal.sort(key=lambda flight: flight.thread_id not in self._threads)
        unknown = []
        for call in issued:
            if _kind_listed_by_gloo(call).startswith(UNKNOWN):
                unknown.append(call.fields["nbytes_sent"])
            for sent in _match_keys_of_call(call):
                del unmatched[sent][:1]
        for flight in (flight for equal in unmatched.values() for flight in equal):
            # Compare only the size of an operation that is not in the tables: its kind is unknown.
            nbytes = _match_key_of_flight(flight).nbytes
            if nbytes in unknown and flight.thread_id in self._threads:
                unknown.remove(nbytes)
            else:
                self._unseen.append(flight)

    def make_gaps(self, axes: Callable[[], Mapping[str, str]]) -> tuple[Gap, ...]:
        """Return the gaps; `axes` returns the names of axes, keyed by process group name."""
        if not self._unseen:
            return ()
        names = axes()
        whys: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for flight in self._unseen:
            sent = _match_key_of_flight(flight)._replace(kind=flight.kind)
            described = flight.description if flight.description != "undefined" else ""
            over = names.get(flight.group) or described or "a destroyed group"
            why = (
                "sent below torch's dispatcher (by a method of the backend, or from C++)"
                if flight.thread_id in self._threads
                else "sent on other threads, whose calls were not recorded"
            )
            whys[why][f"{sent} over {over}"] += 1
        return tuple(
            Gap(
                kind="unseen",
                text=f"{show_count(kinds.total(), 'collective')} {why}: {_show_kind_counts(kinds)}",
            )
            for why, kinds in sorted(whys.items())
        )


def _kind_listed_by_gloo(call: Pending[Collective]) -> str:
    """Return the kind under which gloo lists a call; empty if the flight recorder omits it."""
    kind: str = call.fields["kind"]
    return "" if kind in {"send", "recv"} else _RUN_AS.get(kind, kind)


def _match_keys_of_call(call: Pending[Collective]) -> list[_Sent]:
    """Return the collectives that the flight recorder lists for a recorded call under gloo."""
    kind, fields = _kind_listed_by_gloo(call), call.fields
    if call.parts:
        return [_Sent(kind, _map_to_gloo_dtypes([dtype]), nbytes) for dtype, nbytes in call.parts]
    dtypes = fields["dtype"].split("+") if fields["dtype"] else ()
    nbytes = fields["nbytes_sent"]
    if fields["kind"] in {"broadcast", "scatter"} and not nbytes:  # most ranks only receive
        nbytes = fields["nbytes_received"]
    return [_Sent(kind, _map_to_gloo_dtypes(dtypes), nbytes)]


def _match_key_of_flight(flight: Flight) -> _Sent:
    # A rank that only receives (most ranks of a scatter) reports no input.
    tensors = flight.sent or flight.received
    return _Sent(
        _RUN_AS.get(flight.kind, flight.kind),
        _map_to_gloo_dtypes(name for name, _ in tensors),
        sum(count * getattr(torch, name).itemsize for name, count in tensors),
    )


def _map_to_gloo_dtypes(dtypes: Iterable[str]) -> frozenset[str]:
    return frozenset(_SENT_AS.get(dtype, dtype) for dtype in dtypes)


def _show_kind_counts(kinds: Counter[str]) -> str:
    listed = [kind if count == 1 else f"{count} x {kind}" for kind, count in kinds.items()]
    first, more = listed[:4], listed[4:]
    return ", ".join(first) + (f" and {len(more)} more kinds" if more else "")
