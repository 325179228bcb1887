"""What the kernel says of a process that does not answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.ranks.wire.positions import Activity

# Each read of a disk is such a wait; one that lasts is meant.
_STUCK_AFTER_S: Final = 0.5
_PAUSE_S: Final = 0.02
_FLAGS: Final = 6
# linux/sched.h
_PF_EXITING: Final = 0x4


def silent_activity(pid: int) -> Activity:
    """Why a process may be silent; `Activity.SILENT` where the kernel names no reason."""
    until = time.monotonic() + _STUCK_AFTER_S
    while (letter := _state(pid)) == "D":
        if time.monotonic() > until:
            return Activity.IN_KERNEL
        time.sleep(_PAUSE_S)
    return Activity.STOPPED if letter in ("T", "t") else Activity.SILENT


def is_alive(pid: int) -> bool:
    """Whether a process runs, and has not begun to exit; False where the kernel does not say."""
    # Set before the process's connections are closed, at which others may fail.
    fields = _stat(pid).split()
    return len(fields) > _FLAGS and fields[0] not in "ZX" and not int(fields[_FLAGS]) & _PF_EXITING


def _state(pid: int) -> str:
    """The process's state as one letter; empty where there is none."""
    return _stat(pid)[:1]


def _stat(pid: int) -> str:
    """The fields of man 5 proc from the third on; empty where there are none."""
    try:
        # The name before it may hold anything, parentheses and spaces included.
        _, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")
    except OSError:
        return ""
    return rest
