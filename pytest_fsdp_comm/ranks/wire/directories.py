"""The directories of a session and of its rank sets: removed after use, or kept to be looked at."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

KEEP_VARIABLE: Final = "PYTEST_FSDP_COMM_KEEP"
"""Environment variable with a directory in which sessions leave theirs: logs, stacks, stores."""

_REMOVED_WITHIN_S = 1.0
_PAUSE_S = 0.02


def make_session_directory() -> Path:
    """A new directory for all rank sets of a session; made in the one that keeps them, if any."""
    kept = os.environ.get(KEEP_VARIABLE)
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="fsdp-comm-", dir=Path(kept).absolute() if kept else None))


def remove_directory(directory: Path) -> None:
    """Remove a session's or a rank set's directory, unless they are kept; never raise."""
    if os.environ.get(KEEP_VARIABLE):
        return
    until = time.monotonic() + _REMOVED_WITHIN_S
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if has_vanished(directory) or time.monotonic() > until:
            return
        # A process that was killed on a busy machine has written there meanwhile.
        time.sleep(_PAUSE_S)


def has_vanished(directory: Path) -> bool:
    """Whether there is no such directory any more; not where it only cannot be seen."""
    try:
        directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False
