"""A rank as a process: forks, streams, and what `multiprocessing` does as a process exits."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import sys
import traceback
import warnings
from os import getpid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_fsdp_comm.ranks.wire.rank_set import RankSetSpec

# A socket's path has 108 bytes on Linux and 104 on macOS; ``/listener-`` and 8 more are added.
_LONGEST_DIRECTORY = 85


def fork_quietly() -> int:
    """`os.fork` without the warning that Python 3.12 gives wherever a thread lives."""
    # An xdist worker always has one, which never holds a lock that a rank needs.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def flush_streams() -> None:
    """Flush both output streams, unless a test has closed them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()


def redirect_output(spec: RankSetSpec, rank: int) -> None:
    """Send descriptors 1 and 2 to files of a rank, which survive a crash."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        log = os.open(spec.log_path(rank, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, descriptor)
        os.close(log)


def end_forked_child(rank_pid: int, error: BaseException | None) -> None:
    """End this process if it is not the rank's, but a test forked it, and it left the test."""
    if getpid() == rank_pid:
        return
    # At once: what follows (fixtures' teardown, exit handlers, coverage) is the rank's to do.
    status = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        status = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    flush_streams()
    os._exit(status)


def put_sockets_below(directory: Path) -> None:
    """Make managers, pools and servers put their sockets where they are removed in any case."""
    # Otherwise each process has a directory below TMPDIR, which a killed one leaves behind.
    process: Any = multiprocessing.process.current_process()
    config = getattr(process, "_config", None)
    # Private, read in Python 3.11 to 3.14: where it has moved, killed ranks leave directories.
    if isinstance(config, dict) and len(str(directory)) <= _LONGEST_DIRECTORY:
        config["tempdir"] = str(directory)


def run_finalizers() -> None:
    """End managers, pools and daemonic children; the other children are killed with the rank."""
    # Private, but what `multiprocessing` registers with `atexit` (read in Python 3.11 to 3.14).
    run: Any = getattr(multiprocessing.util, "_run_finalizers", None)
    if run is None:
        return
    run(0)
    for child in multiprocessing.process.active_children():
        if child.daemon:
            child.terminate()
            child.join()
    run()
