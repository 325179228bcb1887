"""Track the running recordings, and decide which of them record a call on a given thread."""

# All recordings share our dispatcher kernels and our patches of torch; with separate kernels and
# patches, overlapping recordings would lose events. On each call, a kernel or patch looks up which
# recordings the current thread has entered. That list is in torch's thread-local state, because the
# autograd engine copies it to its device threads, where a threading.local would be empty.

# Note [Whose call]
# A recording includes the collectives of all threads. A collective has no owner if its thread has
# not entered the recording, because the recording knows only the FSDP units and autograd graphs of
# the thread that entered it. A thread belongs only to the recordings that were running when it
# started. If the thread still communicates during a later block, that block's recording omits the
# collectives, and gets a gap that names the thread.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.upstream import look_up

if TYPE_CHECKING:
    from pytest_fsdp_comm.recording.recorder import Recorder

_KEY: Final = "pytest_fsdp_comm.recordings"
_STARTED_IN: Final = "_fsdp_comm_recordings"
"""Thread attribute that holds the numbers of the recordings running when the thread started."""

_lock = threading.Lock()
_recorders: tuple[Recorder, ...] = ()

_is_stashed: Callable[[str], bool] = look_up("torch._C", "_is_key_in_tls")
_stashed: Callable[[str], tuple[Recorder, ...]] = look_up("torch._C", "_get_obj_in_tls")
_stash: Callable[[str, tuple[Recorder, ...]], None] = look_up("torch._C", "_stash_obj_in_tls")

# A cache of torch's thread-local state, keyed by thread id, because a training step looks up its
# recordings about a thousand times.
_entered: Final[dict[int, tuple[Recorder, ...]]] = {}


def has_running_recording() -> bool:
    """Whether any thread has a running recording."""
    return bool(_recorders)


def owners_so_far() -> dict[tuple[str, int], str]:
    """Return the owners of the newest running recording's collectives so far, or an empty dict."""
    return _recorders[-1].owners_so_far() if _recorders else {}


def entered_recorders() -> tuple[Recorder, ...]:
    """Return the recordings that this thread entered, or whose backward it runs, oldest first."""
    if not _recorders:
        return ()
    recorders = _entered.get(threading.get_ident())
    if recorders is not None:
        return recorders
    return _stashed(_KEY) if _is_stashed(_KEY) else ()


def _set_entered_recorders(recorders: tuple[Recorder, ...]) -> None:
    _entered[threading.get_ident()] = recorders
    _stash(_KEY, recorders)
    if not recorders:
        del _entered[threading.get_ident()]


@contextlib.contextmanager
def activate(recorder: Recorder) -> Iterator[None]:
    """Make a recording active, in the process and on this thread, while the block runs."""
    global _recorders  # noqa: PLW0603  # the whole process shares kernels and patches
    with _lock:
        _recorders = (*_recorders, recorder)
    # Drop recordings that another thread has ended: torch's state may still list them.
    _set_entered_recorders(
        (*(active for active in entered_recorders() if active in _recorders), recorder)
    )
    thread = threading.get_ident()
    try:
        yield
    finally:
        remaining = tuple(active for active in _entered.get(thread, ()) if active is not recorder)
        if thread == threading.get_ident():
            _set_entered_recorders(remaining)
        else:  # a block in a generator or fixture may end on another thread
            _entered[thread] = remaining
        with _lock:
            _recorders = tuple(active for active in _recorders if active is not recorder)


def find_recorders_of_call() -> tuple[tuple[Recorder, ...], tuple[Recorder, ...]]:
    """Return which recordings include this call, and which get a gap. See Note [Whose call]."""
    if entered_recorders():
        return _recorders, ()
    # Do not call threading.current_thread(): on a C++ thread, it would register a dummy thread.
    ident = threading.get_ident()
    thread = next((entry for entry in threading.enumerate() if entry.ident == ident), None)
    started_in = getattr(thread, _STARTED_IN, None)
    if started_in is None:
        return _recorders, ()
    recording = tuple(recorder for recorder in _recorders if recorder.number in started_in)
    return recording, tuple(recorder for recorder in _recorders if recorder not in recording)


def store_recordings_on_thread(thread: threading.Thread) -> None:
    """Store the numbers of the running recordings on a thread that is about to start."""
    vars(thread)[_STARTED_IN] = frozenset(recorder.number for recorder in _recorders)
