"""Kills ranks and their descendants, and removes their files; every wait has a time limit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from os import getpid
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

PATIENCE_S: Final = 10.0
"""How long to wait for killed ranks to end; freeing their memory can be slow."""
HURRIED_S: Final = 0.3
"""How long to wait for killed processes while pytest, or a user after Ctrl-C, is waiting."""

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_PAUSE_S = 0.005
# Long enough for `_CLEANERS` to finish.
_CLEANED_WITHIN_S = 4.0
# Processes that clean up after ranks. joblib's copy of the resource tracker has the same name.
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")

# Note [Ending a process tree]: a process that a rank started may have left the rank's process group
# and session, and its parent may be dead. So the fork server is a subreaper: the kernel makes it
# the parent of these orphans. (Outside Linux, the server can only kill the ranks' process groups.)
# The server kills the ranks first, and then gives cleaners, such as multiprocessing's resource
# tracker, time to clean up. Even SIGKILL does not end a process that is waiting for a driver or a
# file server, so each wait has a time limit, and processes that remain are reported. If the server
# itself is killed, the kernel kills the ranks, but not the processes that the ranks have started.


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to unreaped processes; a negative id stands for a process group."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Make this process adopt its orphaned descendants; return whether the system supports that."""
    return sys.platform == "linux" and not _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process, even after an exec, when its parent ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the call above


def kill_children(spared: Iterable[int], *, within_s: float) -> set[int]:
    """Kill and reap all children and orphans except `spared`; return the pids that remain."""
    spared = set(spared)
    remaining: set[int] = set()
    until = time.monotonic() + within_s
    cleaned_by = time.monotonic() + extend_under_load(_CLEANED_WITHIN_S)
    while time.monotonic() < until:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return set()  # no children, which is the usual case
        remaining = set(_list_child_pids(getpid())) - spared
        if not remaining:
            break
        cleaning = {pid for pid in remaining if _is_resource_cleaner(pid)}
        if cleaning == remaining and time.monotonic() < cleaned_by:
            until = max(until, cleaned_by + within_s)
        else:
            kill(remaining - cleaning or remaining)
        for pid in remaining:
            await_end(pid)
        time.sleep(_PAUSE_S)
    return remaining


def _is_resource_cleaner(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    # The command is empty during an exec, so a process without a command may become a cleaner.
    return not command or any(name in command for name in _CLEANERS)


def await_end(pid: int, *, within_s: float = 0.0) -> int | None:
    """Reap a child; return its exit status, or minus the number of the signal that killed it.

    Return None if it is still running after `within_s`, and 0 if it has been reaped elsewhere.
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


def _list_child_pids(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        # Linux lists children separately for each thread that started them.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
    return children


_REMOVED_WITHIN_S = 1.0


def remove_directory(directory: Path) -> None:
    """Remove the directory of a session or a rank set; never raise."""
    until = time.monotonic() + extend_under_load(_REMOVED_WITHIN_S)
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists() or time.monotonic() > until:
            return
        # A killed process may have written another file before it ended, so try again.
        time.sleep(_PAUSE_S)
