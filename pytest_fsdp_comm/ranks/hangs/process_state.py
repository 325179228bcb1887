"""What the kernel reports about a process that does not answer, or should be gone."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.ranks.wire.positions import Activity

# Every read of a disk is such a wait; only a lasting one counts.
_STUCK_AFTER_S: Final = 0.5
_PAUSE_S: Final = 0.02
# man 5 proc, counted from the state on.
_THREAD_COUNT, _STARTED = 17, 19


def silent_activity(pid: int) -> Activity:
    """Why a process may be silent; `Activity.SILENT` where the kernel names no reason."""
    until = time.monotonic() + _STUCK_AFTER_S
    while (state := _stat(pid)[:1]) == ["D"]:
        if time.monotonic() > until:
            return Activity.IN_KERNEL
        time.sleep(_PAUSE_S)
    return Activity.STOPPED if state in (["T"], ["t"]) else Activity.SILENT


def start_time(pid: int) -> str:
    """When a process started, which tells it from a later one of its number; empty if it ended."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return ""  # it is gone, or somebody else's by now
    fields = _stat(pid)
    if not fields:
        return "" if sys.platform == "linux" else "unknown"
    # A zombie has ended, unless the kernel does not release one of its other threads.
    has_ended = fields[0] in "ZX" and int(fields[_THREAD_COUNT]) <= 1
    return "" if has_ended else fields[_STARTED]


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; empty where there are none."""
    try:
        # The name before it may hold anything, parentheses and spaces included.
        _, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")
    except OSError:
        return []
    return rest.split()
