"""Processes that a test forked in a rank: copies of it, which must not report for it."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from os import getpid


def end_forked_child(rank_pid: int, error: BaseException | None) -> None:
    """Ends this process if it is not the rank, but comes to where only the rank may go on.

    At once: what follows (fixtures' teardown, exit handlers, coverage) is the rank's to do.

    Args:
        rank_pid: The rank's process.
        error: What the test raised in the child; None if it returned there.
    """
    if getpid() == rank_pid:
        return
    status = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        status = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
    os._exit(status)
