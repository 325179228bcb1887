"""Saves where a rank is when an uncaught C++ exception is about to end it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pytest_fsdp_comm.ranks.wire.results import Position
from pytest_fsdp_comm.text.codec import CodecError, dump_tagged, load_tagged

# If a peer's message has an unexpected size, gloo throws an exception on a thread of its own. No
# code catches it, so C++ calls its terminate handler, which ends the process. Then the flight
# recorder is lost, and with it the size of the rank's call. So this handler first saves the rank's
# position in a file. It is no signal handler: the heap is intact, and Python code may run. It costs
# nothing per collective.
_LIBRARY: Final = "libstdc++.so.6"
_SET_TERMINATE: Final = "_ZSt13set_terminatePFvvE"  # std::set_terminate(void (*)())
_HANDLER: Final = ctypes.CFUNCTYPE(None)
# C++ keeps only the address of a handler, so keep the handler itself alive here.
_handlers: Final[list[Any]] = []


def save_position_at_terminate(path: Path, read_position: Callable[[], Position]) -> None:
    """Make an uncaught C++ exception save this rank's position before it ends the process."""
    try:
        set_terminate = getattr(ctypes.CDLL(_LIBRARY), _SET_TERMINATE)
    except (OSError, AttributeError):  # another C++ library, as on macOS
        return
    rank_pid = os.getpid()

    def save_position() -> None:
        # A child that the test forked has this handler, too, but it is not the rank.
        if os.getpid() == rank_pid:
            with contextlib.suppress(BaseException):  # raising would not return to C++
                path.write_text(dump_tagged(read_position()), encoding="utf-8")
        previous()

    set_terminate.restype = ctypes.c_void_p
    _handlers.append(_HANDLER(save_position))
    previous = _HANDLER(set_terminate(_handlers[-1]))


def load_position(path: Path) -> Position | None:
    """Return the position that a rank saved before it died; None if it saved none."""
    with contextlib.suppress(OSError, CodecError, UnicodeDecodeError):
        position: Position = load_tagged({"Position": Position}, path.read_text(encoding="utf-8"))
        return position
    return None
