"""Ends processes of ranks and removes what they left, without ever waiting for long."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from os import getpid
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 10.0
"""How long killed ranks have to be gone: the kernel frees much memory slowly on a busy machine."""
HURRIED_S: Final = 0.3
"""The same where the session was interrupted, and its user waits."""

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_PAUSE_S = 0.005
# A Python process that imports nothing, on a busy machine.
_CLEANED_WITHIN_S = 4.0
# joblib has a copy of the first.
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")

# Note [Ending a process tree]: what a rank started may have left its process group and session, and
# lost its parent. So the fork server adopts orphans (a subreaper), and finds whatever a dead rank
# left among its own children; on other systems than Linux it can only kill the ranks' groups. Ranks
# are killed first and alone: what cleans up after others (the resource tracker of multiprocessing,
# and torch's) does so once these are gone, and has time for it. A killed process may still not go,
# while a driver or a file server does not respond: each wait is bounded, and what remains is
# reported. If the server itself is killed, the kernel ends its ranks, but not what they started.


def kill(pids: Iterable[int]) -> None:
    """Kill processes that nobody has waited for yet, or groups of them, by negative ids."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Make this process the parent of each descendant that loses its own, if the system can."""
    return sys.platform == "linux" and not _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Make the kernel end this process, and a program that it becomes, when its parent ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the line above


def kill_children(spared: Iterable[int], *, within_s: float) -> set[int]:
    """Kill and reap all other children of this process, and theirs; return those that remain.

    Those that clean up after others have some seconds more than `within_s`.
    """
    spared = set(spared)
    left: set[int] = set()
    until = time.monotonic() + within_s
    cleaned_by = time.monotonic() + _CLEANED_WITHIN_S
    while time.monotonic() < until:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return set()  # as after nearly every test
        left = set(_children(getpid())) - spared
        if not left:
            break
        cleaning = {pid for pid in left if _cleans_up(pid)}
        if cleaning == left and time.monotonic() < cleaned_by:
            until = max(until, cleaned_by + within_s)
        else:
            kill(left - cleaning or left)
        for pid in left:
            await_end(pid)
        time.sleep(_PAUSE_S)
    return left


def _cleans_up(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    # Of a process that has only just become another program, the kernel shows no command yet.
    return not command or any(name in command for name in _CLEANERS)


def await_end(pid: int, *, within_s: float = 0.0) -> int | None:
    """Reap a child; return its exit status, or minus the signal that ended it.

    Returns None if it still runs, and 0 if somebody else has reaped it.
    """
    until = time.monotonic() + within_s
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(_PAUSE_S)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        # Each thread has its own.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


_REMOVED_WITHIN_S = 1.0


def make_session_directory() -> Path:
    """A new directory for all rank sets of a session."""
    return Path(tempfile.mkdtemp(prefix="fsdp-comm-"))


def remove_directory(directory: Path) -> None:
    """Remove a session's or a rank set's directory; never raise."""
    until = time.monotonic() + _REMOVED_WITHIN_S
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists() or time.monotonic() > until:
            return
        # A process that was killed on a busy machine has written there meanwhile.
        time.sleep(_PAUSE_S)
