"""Compares what a block recorded with what torch's flight recorder saw of it.

The two are independent: a recording watches the dispatcher, the flight recorder the backend. What
the flight recorder has and the recording has not is a gap. The reverse is none, as the flight
recorder knows only some backends and no point-to-point calls.

gloo's entries are compared one by one. Those of NCCL, whose coalesced calls make more entries than
collectives, only say whether they came from a thread that was recorded at all.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_fsdp_comm.comm.events import Gap
from pytest_fsdp_comm.recording import flight_recorder
from pytest_fsdp_comm.recording.flight_recorder import Flight
from pytest_fsdp_comm.recording.operations import UNKNOWN, Message, tensors_in
from pytest_fsdp_comm.text.counts import counted
from pytest_fsdp_comm.text.nbytes import show_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_fsdp_comm.recording.operations import Operation

_RUN_AS: Final = {"reduce_scatter": "all_reduce", "sparse_all_reduce": "all_reduce"}
"""Kinds that gloo runs, or names, as another."""

_FROM_ONE: Final = frozenset({"broadcast", "scatter"})
"""Kinds of which most ranks only receive."""

_NOT_FLOWN: Final = frozenset({"send", "recv"})

_SENT_AS: Final = {"complex64": "float32", "complex128": "float64"}
"""gloo sends a complex number as two real ones."""

_SHOWN: Final = 4
"""How many different collectives one gap lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """What one call sent, in terms that both witnesses have."""

    kind: str
    dtypes: frozenset[str]
    nbytes: int

    def __str__(self) -> str:
        """As gaps show it."""
        dtype = "+".join(sorted(self.dtypes))
        return f"{self.kind} of {show_nbytes(self.nbytes)} {dtype}" if dtype else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """A message that was recorded, and is to be in the flight recorder."""

    group: str
    message: Message
    parts: tuple[tuple[str, int], ...]
    """Dtype and bytes of each tensor sent; empty if there is only one."""

    @property
    def kind(self) -> str:
        """What gloo runs."""
        return _RUN_AS.get(self.message.kind, self.message.kind)

    @property
    def whole(self) -> _Sent:
        """What it sends, if in one call."""
        message = self.message
        only_receives = message.kind in _FROM_ONE and not message.nbytes_sent
        return _Sent(
            kind=self.kind,
            dtypes=_alike(message.dtype.split("+") if message.dtype else ()),
            nbytes=message.nbytes_received if only_receives else message.nbytes_sent,
        )

    def ways(self) -> tuple[tuple[_Sent, ...], ...]:
        """What the backend may have made of it, the likelier first."""
        if not self.parts:
            return ((self.whole,),)
        parts = tuple(
            _Sent(kind=self.kind, dtypes=_alike([dtype]), nbytes=nbytes)
            for dtype, nbytes in self.parts
        )
        # gloo runs a reduce-scatter tensor by tensor, other kinds at once.
        if self.message.kind == "reduce_scatter":
            return (parts, (self.whole,))
        return ((self.whole,), parts)

    def may_be(self, sent: _Sent) -> bool:
        """Whether it is what was sent, though not as it was recorded."""
        if self.kind.startswith(UNKNOWN):
            return self.whole.nbytes == sent.nbytes
        return self.kind == sent.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unseen:
    """A collective that only the flight recorder has."""

    flight: Flight
    sent: _Sent
    recorded: _Issued | None
    """A collective that was recorded instead, but never sent as it was recorded."""


class Witness:
    """Notes the collectives of one block, and finds at its end what else was sent."""

    def __init__(self) -> None:
        """Marks the end of the flight recorder: the block begins."""
        self._begin = flight_recorder.mark()
        self._issued: list[_Issued] = []
        self._threads = {threading.get_ident()}
        self._running_on: dict[int | None, str] = {}
        self._thread_names = _thread_names()
        self._unseen: list[_Unseen] = []
        self.notes: list[str] = []
        """What could not be checked."""

    def note(
        self, operation: Operation, bound: dict[str, Any], group: str, messages: Iterable[Message]
    ) -> None:
        """Notes a collective that is recorded, and that its thread is.

        Args:
            operation: What it is.
            bound: Its arguments by name.
            group: The name of its process group.
            messages: What it sent.
        """
        self._threads.add(threading.get_ident())
        tensors = list(tensors_in(bound.get(operation.sent)))
        parts = tuple(
            (str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size())
            for tensor in (tensors if len(tensors) > 1 else ())
        )
        self._issued += [
            _Issued(group=group, message=message, parts=parts)
            for message in messages
            if message.kind not in _NOT_FLOWN
        ]

    def follow(self) -> None:
        """Notes that the current thread is recorded from now on."""
        self._threads.add(threading.get_ident())

    def note_running_threads(self) -> None:
        """Notes which other threads still run, as the block is about to end.

        What they have issued by then may return later, and what they issue later is not recorded.
        """
        own = threading.get_ident()
        self._running_on = {
            thread.ident: thread.name
            for thread in threading.enumerate()
            if thread.ident in self._threads and thread.ident != own
        }

    def end(self) -> None:
        """Compares with the flight recorder: the block has ended."""
        flights = flight_recorder.issued_after(self._begin)
        if flights.is_cut:
            self.notes.append(
                f"only the last {flights.num_kept} collectives were checked against torch's flight "
                "recorder, which keeps no more"
            )
        flown: defaultdict[str, list[Flight]] = defaultdict(list)
        for flight in flights.entries:
            if flight.backend == "gloo":
                flown[flight.group].append(flight)
            elif flight.thread_id not in self._threads:
                self._unseen.append(_Unseen(flight=flight, sent=_sent(flight), recorded=None))
        if flown.pop("", ()):
            self.notes.append(
                "nothing was checked against torch's flight recorder, which names no groups under "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL"
            )
        for group, entries in flown.items():
            self._compare([issued for issued in self._issued if issued.group == group], entries)
        late = {
            self._running_on[unseen.flight.thread_id]: None
            for unseen in self._unseen
            if unseen.flight.thread_id in self._running_on
        }
        self._unseen = [
            unseen for unseen in self._unseen if unseen.flight.thread_id not in self._running_on
        ]
        self.notes += [
            f"thread {name!r} was still sending when the block ended, and is recorded up to then"
            for name in late
        ]
        self._issued.clear()
        if self._unseen:
            self._thread_names |= _thread_names()

    def _compare(self, issued: Iterable[_Issued], flights: Iterable[Flight]) -> None:
        """Finds the flights of one group that no recorded collective accounts for."""
        left: defaultdict[_Sent, list[Flight]] = defaultdict(list)
        for flight in flights:
            left[_sent(flight)].append(flight)
        for equal in left.values():
            # Those that were not recorded are more likely of a thread that was not.
            equal.sort(key=lambda flight: flight.thread_id not in self._threads)
        unsent = [entry for entry in issued if not any(_take(way, left) for way in entry.ways())]
        for sent, equal in left.items():
            for flight in equal:
                # What was recorded was sent by a thread that was.
                is_watched = flight.thread_id in self._threads
                alike = [entry for entry in unsent if is_watched and entry.may_be(sent)]
                recorded = alike[0] if alike else None
                if recorded is not None:
                    unsent.remove(recorded)
                    # Of an operation that no table knows, only the size can be compared.
                    if recorded.kind.startswith(UNKNOWN):
                        continue
                self._unseen.append(_Unseen(flight=flight, sent=sent, recorded=recorded))

    def gaps(self, axes: Callable[[], Mapping[str, str]]) -> tuple[Gap, ...]:
        """What was sent and not recorded, or not as it was sent; to be asked after `end`.

        Args:
            axes: Names the axis that each process group is, by the group's name. Asked only if
                there is a gap.
        """
        if not self._unseen:
            return ()
        names = axes()
        whys: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for unseen in self._unseen:
            flight = unseen.flight
            described = flight.description if flight.description != "undefined" else ""
            over = names.get(flight.group) or described or "a group that is gone"
            if unseen.recorded is not None:
                recorded = unseen.recorded.whole
                whys["not sent as recorded"][f"{recorded} over {over} was {unseen.sent}"] += 1
            else:
                whys[self._why(flight)][f"{unseen.sent} over {over}"] += 1
        return tuple(
            Gap(kind="unseen", text=f"{_count(kinds.total())} {why}: {_listed(kinds)}")
            for why, kinds in sorted(whys.items())
        )

    def _why(self, flight: Flight) -> str:
        if flight.thread_id in self._threads:
            return "sent below torch's dispatcher (by a backend's own method, or from C++)"
        name = self._thread_names.get(flight.thread_id) or flight.thread_name
        return (
            f"of thread {name!r}, which was running before the recording began or was not started "
            "by threading.Thread"
        )


def _thread_names() -> dict[int | None, str]:
    # The system's name of a thread, which the flight recorder has, is often that of the process.
    return {thread.ident: thread.name for thread in threading.enumerate()}


def _take(way: tuple[_Sent, ...], left: dict[_Sent, list[Flight]]) -> bool:
    """Removes the flights that one recorded collective made; none unless all of them are there."""
    if any(len(left.get(sent, ())) < count for sent, count in Counter(way).items()):
        return False
    for sent in way:
        left[sent].pop(0)
    return True


def _sent(flight: Flight) -> _Sent:
    # A rank that only receives, as most do of a scatter, shows no input.
    tensors = flight.sent or flight.received
    return _Sent(
        kind=_RUN_AS.get(flight.kind, flight.kind),
        dtypes=_alike(name for name, _ in tensors),
        nbytes=sum(count * getattr(torch, name).itemsize for name, count in tensors),
    )


def _alike(dtypes: Iterable[str]) -> frozenset[str]:
    return frozenset(_SENT_AS.get(dtype, dtype) for dtype in dtypes)


def _count(number: int) -> str:
    return counted(number, "collective")


def _listed(kinds: Counter[str]) -> str:
    shown = [kind if count == 1 else f"{count} x {kind}" for kind, count in kinds.items()]
    more = f" and {len(shown) - _SHOWN} more kinds" if len(shown) > _SHOWN else ""
    return f"{', '.join(shown[:_SHOWN])}{more}"
