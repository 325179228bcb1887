"""Reads where this rank is: its stack, its module, and the last collectives of its groups."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from traceback import FrameSummary
from types import CodeType, FrameType
from typing import Any, Final

from pytest_fsdp_comm.gathering import Exchange
from pytest_fsdp_comm.ranks.hangs.stacks import (
    drop_start_frames,
    find_innermost_user_frame,
    is_user_frame,
    show_code,
    show_site,
    show_stack,
)
from pytest_fsdp_comm.ranks.wire import channel
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.ranks.wire.messages import PositionAnswer, PositionQuestion
from pytest_fsdp_comm.ranks.wire.results import Activity, GroupPosition, IssuedCollective, Position

# The main thread may be stuck in a collective, so a separate thread reads the position; that thread
# can run because collectives release the GIL. torch's flight recorder lists the collectives in
# order. It is on by default for gloo and NCCL since torch 2.13, but records neither point-to-point
# calls nor calls on the fake backend. Positions only serve to explain hangs, so if a private name
# of torch or pytest has moved, we leave out that part of the position instead of raising an error.

# Report this many recent collectives per group; a slower rank may still be stuck in one of them.
_MOST_COLLECTIVES = 16

_TORCH: Final = re.compile(r"/torch/(?!utils/data/|multiprocessing/|serialization\.py)")
"""Matches torch's files, except files whose code waits for data loaders, processes or disks."""
_WAITING_CALL: Final = re.compile(
    r"\b(wait|wait_tensor|synchronize|item|tolist|cpu|cuda|numpy|to)\("
)
"""Matches calls of methods that wait in C++, without a torch frame on the Python stack."""
_LIMITED_WAIT: Final = re.compile(r"\bwait\([^)]")
"""Matches a call of ``Work.wait`` with a timeout."""
_JOINS: Final = "rank/process_group.py:join_group"
_UNSEEN = ("new_group", "split_group", "init_process_group", "monitored_barrier", "send", "recv")
"""Functions that wait for other ranks, but that the flight recorder does not record."""


def read_position(since_ns: int, *, with_groups: bool) -> Position:
    """Return where the main thread is; ignore collectives before `since_ns` (`time.time_ns`)."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [frame for frame, _ in traceback.walk_stack(main)] if main else []
    raised = _find_reported_exception(frames)
    stack = _make_stack(frames) if raised is None else _raising_frames(raised)
    user, is_recorded = find_innermost_user_frame(stack), not any(map(_is_unrecorded_wait, frames))
    activity = Activity.COMPARES if any(map(_is_waiting_in_comparison, frames)) else Activity.RUNS
    return Position(
        site=show_site(user),
        code=show_code(user) if raised is None else "",
        stack=show_stack(stack),
        module=_find_running_module_fqn(frames),
        groups=_read_group_positions(
            since_ns,
            frames,
            waits=is_recorded and is_waiting(stack),
            is_limited=_LIMITED_WAIT.search(show_code(user)) is not None,
        )
        if with_groups
        else (),
        activity=activity if raised is None else Activity.REPORTS,
        is_joining=any(
            f"{frame.f_code.co_filename}:{frame.f_code.co_name}".endswith(_JOINS)
            for frame in frames
        ),
        is_reporting=raised is not None
        or (is_recorded and any(map(_is_comparing_or_reporting, frames))),
    )


def _make_stack(frames: Iterable[FrameType]) -> list[FrameSummary]:
    return drop_start_frames(_summarize_frame(frame.f_code, frame.f_lineno) for frame in frames)


def is_waiting(stack: Sequence[FrameSummary]) -> bool:
    """Return whether user code is inside a torch call that might be waiting for other ranks."""
    code = show_code(find_innermost_user_frame(stack))
    inner = itertools.takewhile(lambda frame: not is_user_frame(frame), stack)
    is_in_torch = any(_TORCH.search(frame.filename) for frame in inner)
    return is_in_torch or _WAITING_CALL.search(code) is not None


def _summarize_frame(code: CodeType, line: int | None) -> FrameSummary:
    # Read source code only where it is shown, because reading the code of all files takes long.
    return FrameSummary(code.co_filename, line or 0, code.co_name, lookup_line=False)


def _find_reported_exception(frames: Sequence[FrameType]) -> BaseException | None:
    # While `Channel.receive` is waiting, its frame is one of the five innermost frames.
    if any(frame.f_code.co_filename == channel.__file__ for frame in frames[:5]):
        # The rank is waiting for its next test, and `sys` still has the exception of its last test.
        return getattr(sys, "last_value", None)
    for frame in frames:
        if frame.f_code.co_name == "pytest_runtest_makereport":
            # Plugins' wrappers of this hook have the same name, but may lack the `call` argument.
            raised = getattr(getattr(frame.f_locals.get("call"), "excinfo", None), "value", None)
            if isinstance(raised, BaseException):
                return raised
    return None


def _is_comparing_or_reporting(frame: FrameType) -> bool:
    """Return whether a frame compares snapshots, formats a failure or saves coverage data."""
    module: str = frame.f_globals.get("__name__", "")
    return (
        module.startswith(("pytest_fsdp_comm.snapshots.", "_pytest._io.saferepr"))
        or module == "pytest_fsdp_comm.gathering"
        or frame.f_code.co_name in {"pytest_assertrepr_compare", "save_coverage"}
    )


def _raising_frames(error: BaseException) -> list[FrameSummary]:
    raising = [*traceback.walk_tb(error.__traceback__)]
    return [_summarize_frame(frame.f_code, line) for frame, line in reversed(raising)]


def find_raise_site(error: BaseException) -> str:
    """Return where user code raised an error, as ``path:line in function``; "" if unknown."""
    return show_site(find_innermost_user_frame(drop_start_frames(_raising_frames(error))))


def _is_c10d(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith("distributed_c10d.py")


def _is_waiting_in_comparison(frame: FrameType) -> bool:
    """Return whether a frame waits until other ranks reach the same comparison."""
    return frame.f_code is Exchange._wait_for_text.__code__


def _is_unrecorded_wait(frame: FrameType) -> bool:
    """Return whether a frame waits for other ranks in a call that the flight recorder misses."""
    return _is_waiting_in_comparison(frame) or (_is_c10d(frame) and frame.f_code.co_name in _UNSEEN)


def is_imported(*names: str) -> bool:
    """Return whether modules are imported completely.

    While the main thread imports torch, an import on this thread would make both imports fail.
    """
    modules = [sys.modules.get(name) for name in names]
    # importlib sets this attribute during an import (checked in CPython 3.11 to 3.13).
    return all(
        module is not None and not getattr(module.__spec__, "_initializing", False)
        for module in modules
    )


def _find_running_module_fqn(frames: Sequence[FrameType]) -> str:
    """Return the FQN of the module whose forward, or of the FSDP unit whose hook, is running."""
    if not is_imported("torch"):
        return ""
    from pytest_fsdp_comm.recording.owners.stack import called_module  # noqa: PLC0415  # loads torch

    called: list[Any] = []
    for frame in frames:
        self: Any = frame.f_locals.get("self")
        # FSDP sets _module_fqn when a unit first runs (torch 2.7 to 2.15), so it can be missing.
        unit = getattr(self, "_module_fqn", None) if type(self).__name__ == "FSDPParamGroup" else ""
        if isinstance(unit, str) and unit and not called:
            return unit
        module = called_module(frame)
        if module is not None:
            called.append(module)
    if not called:
        return ""
    innermost, outermost = called[0], called[-1]
    return next((name for name, child in outermost.named_modules() if child is innermost), "")


def _read_group_positions(
    since_ns: int, frames: Sequence[FrameType], *, waits: bool, is_limited: bool
) -> tuple[GroupPosition, ...]:
    if not is_imported("torch", "torch.distributed"):
        return ()
    import torch.distributed as dist  # noqa: PLC0415  # loaded already

    from pytest_fsdp_comm.recording import mesh_axes  # noqa: PLC0415  # loads torch
    from pytest_fsdp_comm.recording.active import owners_so_far  # noqa: PLC0415  # as above
    from pytest_fsdp_comm.recording.flight_recorder import read_flights  # noqa: PLC0415  # as above

    flights, _ = read_flights(since_ns)
    owners = owners_so_far()
    # The main thread can be waiting for a collective that one of autograd's native threads called,
    # but not for a collective that another Python thread called.
    python_threads = {
        thread.ident
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and type(thread).__name__ != "_DummyThread"
    }
    called = next((frame.f_code.co_name for frame in frames if _is_c10d(frame)), "")
    by_group: dict[str, list[IssuedCollective]] = {}
    for flight in flights:
        kind = flight.kind
        is_pending = not flight.is_done and flight.thread_id not in python_threads
        # gloo records a reduce-scatter as an all-reduce, so take the kind from the stack.
        if is_pending and kind == "all_reduce" and called.startswith("reduce_scatter"):
            kind = "reduce_scatter"
        counts: Counter[str] = Counter()
        for dtype, count in flight.sent:
            counts[dtype] += count
        by_group.setdefault(flight.group, []).append(
            IssuedCollective(
                seq=flight.seq,
                kind=kind,
                nbytes=flight.nbytes,
                is_done=flight.is_done,
                sent=" and ".join(f"{count:,} {dtype}" for dtype, count in counts.items()),
                owner=owners.get((flight.group, flight.seq), ""),
                is_last=flight is flights[-1],
                is_waited_in=is_pending and waits,
                timeout_s=0.0 if is_limited else flight.timeout_s,
            )
        )
    ranks: dict[str, tuple[int, ...]] = {}
    axes: dict[str, tuple[str, bool]] = {}
    # The main thread may create or destroy groups at the same time, so ignore errors.
    with contextlib.suppress(Exception):
        for group in mesh_axes.process_groups():
            ranks[group.group_name] = tuple(sorted(dist.get_process_group_ranks(group)))
    with contextlib.suppress(Exception):
        axes = mesh_axes.axes_of_groups()
    # Include groups on which this rank has called nothing: its peers may be waiting for it there.
    return tuple(
        GroupPosition(
            name=name,
            axis=axes[name][0] if name in axes else "",
            is_shape=name in axes and axes[name][1],
            ranks=ranks.get(name, ()),
            collectives=tuple(by_group.get(name, [])[-_MOST_COLLECTIVES:]),
        )
        for name in dict.fromkeys((*by_group, *ranks))
    )


_LAST_S: Final = 1.0


class Watchdog:
    """A thread that reports the rank's position on request, even while the main thread hangs."""

    def __init__(self, channel: Channel[PositionQuestion], *, ends_process: bool = False) -> None:
        """Start the thread; with `ends_process`, end this process when the supervisor is gone."""
        self._ends_process = ends_process
        self._began_ns = time.time_ns()
        self._channel = channel
        # Use `_thread`: a thread of `threading` would be visible to tests, and takes 3 ms to start.
        # Block all signals in the new thread: SIGUSR1 dumps the stack of the thread that receives
        # it, so the main thread has to receive it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self._answer_then_exit_on_hangup, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def begin_test(self) -> None:
        self._began_ns = time.time_ns()

    def read_position(self, *, with_groups: bool = True) -> Position:
        return read_position(self._began_ns, with_groups=with_groups)

    def _answer_then_exit_on_hangup(self) -> None:
        with contextlib.suppress(OSError):  # the supervisor has hung up
            while (question := self._channel.receive()) is not None:
                try:
                    position = self.read_position(with_groups=question.with_groups)
                except Exception:  # noqa: BLE001  # a hang is reported even without a position
                    position = Position(site="")
                self._channel.send(PositionAnswer(number=question.number, position=position))
        if self._ends_process:
            # Give the main thread time to print why this process ends.
            time.sleep(extend_under_load(_LAST_S))
            os._exit(1)
