"""What `multiprocessing` does as a process exits, for ranks, which end without that."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

# A socket's path has 108 bytes on Linux and 104 on macOS; ``/listener-`` and 8 more are added.
_LONGEST_DIRECTORY = 85


def put_files_below(directory: Path) -> None:
    """Has managers, pools and servers put their sockets where they are removed in any case.

    Otherwise into a directory of each process, below ``TMPDIR``, that a killed one leaves behind.

    Args:
        directory: The rank set's.
    """
    process: Any = multiprocessing.process.current_process()
    config = getattr(process, "_config", None)
    # Private, read in Python 3.11 to 3.14: where it has moved, killed ranks leave directories.
    if isinstance(config, dict) and len(str(directory)) <= _LONGEST_DIRECTORY:
        config["tempdir"] = str(directory)


def run_finalizers() -> None:
    """Ends managers, pools and daemonic children, as at the exit of a process.

    Others are not joined: they are killed with the rank.
    """
    util: Any = multiprocessing.util
    run = getattr(util, "_run_finalizers", None)
    # Private, but what `multiprocessing` registers with `atexit` (read in Python 3.11 to 3.14).
    if run is None:
        return
    run(0)
    for child in multiprocessing.process.active_children():
        if child.daemon:
            child.terminate()
            child.join()
    run()
