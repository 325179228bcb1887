"""The recordings under way in this process, and whose call a thread makes."""

# Note [Active recordings]
# Kernels and patches belong to the process, not to a recording: with one each, recordings that
# overlap would lose events. So they look up at each call whom it serves. That is kept with torch's
# thread-local state, which the autograd engine takes along to the threads of its devices, where an
# ordinary thread-local value would be missing.

# Note [Whose call]
# Every recording has what any thread sends while it is under way, but what a thread sends that has
# not entered it serves no module: the units and graphs that it knows are its own thread's. A thread
# that was started during recordings is left to these, so that one that outlives its block sends
# nothing in a later one; a gap of the later recording names the thread.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from torch import nn

from pytest_fsdp_comm.comm.events import Answer
from pytest_fsdp_comm.recording.operations import Call
from pytest_fsdp_comm.recording.owners.attribution import Attribution, BackwardMap
from pytest_fsdp_comm.recording.owners.fsdp import UnitWatch
from pytest_fsdp_comm.recording.owners.tensors import TensorOwners
from pytest_fsdp_comm.upstream import look_up


class Recorder(Protocol):
    """What kernels and patches ask of a recording."""

    number: int
    backward: BackwardMap
    units: UnitWatch
    tensors: TensorOwners
    answers: dict[Answer, None]

    def owners_so_far(self) -> dict[tuple[str, int], str]: ...

    def enter_module(self, module: nn.Module) -> int: ...

    def enter_engine(
        self, outputs: Iterable[Any], inputs: Collection[Any], *, adds: bool
    ) -> int: ...

    def run_collective(
        self, call: Call, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any: ...

    def note_read(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None: ...

    def note_read_by_method(self, name: str) -> None: ...

    def note_outliving_thread(self, call: Call) -> None: ...

    def note_unseen(self, text: str) -> None: ...

    def attribute_callback(self) -> Attribution: ...

    def resumed(self, attribution: Attribution) -> AbstractContextManager[None]: ...


_KEY: Final = "pytest_fsdp_comm.recordings"
_STARTED_IN: Final = "_fsdp_comm_recordings"
"""The attribute of a thread with the numbers of the recordings during which it was started."""

_lock = threading.Lock()
_recorders: tuple[Recorder, ...] = ()


# Read in torch 2.6 to 2.15.
_is_stashed: Callable[[str], bool] = look_up("torch._C", "_is_key_in_tls")
_stashed: Callable[[str], tuple[Recorder, ...]] = look_up("torch._C", "_get_obj_in_tls")
_stash: Callable[[str, tuple[Recorder, ...]], None] = look_up("torch._C", "_stash_obj_in_tls")

# As torch's, by thread: asked a thousand times a step, where each call counts.
_entered: Final[dict[int, tuple[Recorder, ...]]] = {}


def is_any() -> bool:
    """Whether any recording is under way, on whichever thread."""
    return bool(_recorders)


def owners_so_far() -> dict[tuple[str, int], str]:
    """The owners that the latest recording knows; empty if nothing records."""
    return _recorders[-1].owners_so_far() if _recorders else {}


def entered() -> tuple[Recorder, ...]:
    """The recordings that this thread entered, or the one whose backward it runs; oldest first."""
    if not _recorders:
        return ()
    found = _entered.get(threading.get_ident())
    if found is not None:
        return found
    return _stashed(_KEY) if _is_stashed(_KEY) else ()


def _enter(recorders: tuple[Recorder, ...]) -> None:
    _entered[threading.get_ident()] = recorders
    _stash(_KEY, recorders)
    if not recorders:
        del _entered[threading.get_ident()]


@contextlib.contextmanager
def under_way(recorder: Recorder) -> Iterator[None]:
    """Make a recording one of this thread's, and of the process's, while the block runs."""
    global _recorders  # noqa: PLW0603  # kernels and patches serve all of the process
    with _lock:
        _recorders = (*_recorders, recorder)
    # What another thread has left is still torch's here.
    _enter((*(other for other in entered() if other in _recorders), recorder))
    thread = threading.get_ident()
    try:
        yield
    finally:
        left = tuple(other for other in _entered.get(thread, ()) if other is not recorder)
        if thread == threading.get_ident():
            _enter(left)
        else:  # a generator may be resumed, and a fixture torn down, elsewhere
            _entered[thread] = left
        with _lock:
            _recorders = tuple(other for other in _recorders if other is not recorder)


def whose_call() -> tuple[tuple[Recorder, ...], tuple[Recorder, ...]]:
    """Who records what this thread sends now, and who only learns that it did.

    See Note [Whose call].
    """
    if entered():
        return _recorders, ()
    # Not threading.current_thread(), which makes a record of each thread of C++ that it sees.
    own = threading.get_ident()
    thread = next((one for one in threading.enumerate() if one.ident == own), None)
    started_in = getattr(thread, _STARTED_IN, None)
    if started_in is None:
        return _recorders, ()
    recording = tuple(recorder for recorder in _recorders if recorder.number in started_in)
    return recording, tuple(other for other in _recorders if other not in recording)


def note_start(thread: threading.Thread) -> None:
    """Note during which recordings a thread starts."""
    vars(thread)[_STARTED_IN] = frozenset(recorder.number for recorder in _recorders)
