"""What the kernel says of a process that does not answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.ranks.wire.positions import Activity

# Each read of a disk is such a wait; one that lasts is meant.
_STUCK_AFTER_S: Final = 0.5
_PAUSE_S: Final = 0.02


def silent_activity(pid: int) -> Activity:
    """Why a process may be silent; `Activity.SILENT` where the kernel names no reason."""
    until = time.monotonic() + _STUCK_AFTER_S
    while (letter := _state(pid)) == "D":
        if time.monotonic() > until:
            return Activity.IN_KERNEL
        time.sleep(_PAUSE_S)
    return Activity.STOPPED if letter in ("T", "t") else Activity.SILENT


def _state(pid: int) -> str:
    """The process's state as one letter (man 5 proc); empty where there is none."""
    try:
        # The name before it may hold anything, parentheses and spaces included.
        _, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")
    except OSError:
        return ""
    return rest[:1]
