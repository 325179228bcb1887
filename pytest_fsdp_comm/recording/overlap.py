"""Connects recordings to the simulation that knows which computation can hide each collective."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from pytest_fsdp_comm.recording.operations import Call, group_of, message_fields


class Overlap(Protocol):
    """The order of everything that was issued since the outermost recording began."""

    def issue(self, group: object, message: Mapping[str, object], result: object) -> object:
        """Issue one message of a collective, and return its position for `work_beside`."""
        ...

    def work_beside(self, position: Any) -> Iterable[tuple[nn.Module | None, int]]:
        """Yield the running module and the FLOPs of each operation that can hide a collective."""
        ...

    def use_forward_streams(
        self, outputs: Iterable[object]
    ) -> contextlib.AbstractContextManager[None]:
        """Run each autograd node of a backward on the stream of its forward."""
        ...


class _Thread(threading.local):
    positions: Sequence[Any] = ()


_thread = _Thread()
_begin: Callable[[], Overlap] | None = None
_overlap: Overlap | None = None
_num_recordings = 0


@contextlib.contextmanager
def provide_overlap(begin: Callable[[], Overlap]) -> Iterator[None]:
    """Make recordings in the block show overlap; `begin` begins with an empty order."""
    global _begin  # noqa: PLW0603  # the whole process shares it, like the patches
    outer, _begin = _begin, begin
    try:
        yield
    finally:
        _begin = outer


def is_simulated() -> bool:
    """Whether this rank is simulated, in a block of `provide_overlap`."""
    return _begin is not None


@contextlib.contextmanager
def follow_overlap() -> Iterator[Overlap | None]:
    """Follow the order of calls during a recording; yield None if nobody knows it."""
    global _overlap, _num_recordings  # noqa: PLW0603  # as above
    if not _num_recordings:
        _overlap = None if _begin is None else _begin()
    _num_recordings += 1
    try:
        yield _overlap
    finally:
        _num_recordings -= 1
        if not _num_recordings:
            _overlap = None


def current_overlap() -> Overlap | None:
    """Return the order of calls, from the start of the outermost recording; None outside one."""
    return _overlap


def run_and_issue(
    overlap: Overlap,
    call: Call,
    args: Sequence[object],
    kwargs: dict[str, object],
    run: Callable[[], object],
) -> object:
    """Run a collective, and issue its messages."""
    __tracebackhide__ = True
    result = run()
    bound = call.bind(args, kwargs)
    group = group_of(bound)
    sent = message_fields(call.operation, group, bound, result)
    _thread.positions = [overlap.issue(group, message, result) for message in sent]
    return result


def positions_of_last_collective(num_messages: int) -> Sequence[object]:
    """Return the stream positions of the messages of the collective that this thread just ran."""
    return _thread.positions if _overlap is not None else [None] * num_messages
