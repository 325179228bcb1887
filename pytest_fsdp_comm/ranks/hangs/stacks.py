"""Reads the stacks that a rank dumped through `faulthandler`."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from pytest_fsdp_comm.text.paths import show_path

_PAUSE_S = 0.005
_SETTLED = 10
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
# Frames of what runs the test explain nothing about it.
_RUNNERS = re.compile(
    r"/(_pytest|pytest|pluggy|xdist|execnet|pytest_fsdp_comm/(ranks|plugin))[/.]|/bin/[^/]+$|runpy(\.py|>)$"
)
# Wherever it lies: of a clone, too.
_OWN = f"{Path(__file__).parents[2]}{os.sep}"
_HAS_FRAME = re.compile(r"^  File .*\n", re.MULTILINE)
_LIBRARY = re.compile(r"/(site-packages|dist-packages|lib/python\d\.\d+)/")
_LIBRARY_FRAMES = 1


def is_runner(path: str) -> bool:
    """Whether a file belongs to what runs the test: pytest, its plugins, or this one."""
    return path.startswith(_OWN) or _RUNNERS.search(path) is not None


def is_library(path: str) -> bool:
    """Whether a file is installed, and not the user's."""
    return _LIBRARY.search(path) is not None


def read_stacks(path: Path, *, until: float) -> str:
    """Waits until a rank has written its stacks.

    Args:
        path: Where the rank writes.
        until: When to give up (`time.monotonic`).

    Returns:
        The main thread's frames, innermost first, those of user code before those of libraries,
        without those of pytest; empty if none came.
    """
    text = ""
    unchanged = 0
    while True:
        previous, text = text, _read(path)
        unchanged = unchanged + 1 if text and text == previous else 0
        # It is written piece by piece. Where the signal met a thread that is not Python's, there is
        # no frame.
        if unchanged and (_HAS_FRAME.search(text) or unchanged > _SETTLED):
            break
        if time.monotonic() > until:
            break
        time.sleep(_PAUSE_S)
    return _main_thread(text)


def _read(path: Path) -> str:
    return path.read_text(errors="backslashreplace") if path.exists() else ""


def _main_thread(text: str) -> str:
    frames = [match for match in map(_FRAME.match, text.splitlines()) if match]
    kept = [frame for frame in frames if not is_runner(frame["path"])]
    users = [frame for frame in kept if not is_library(frame["path"])]
    inner = [frame for frame in kept if frame not in users][:_LIBRARY_FRAMES]
    shown = [f"{show_path(frame['path'])}:{frame['line']} in {frame['name']}" for frame in users]
    shown += [f"inside {frame['name']} ({frame['path']}:{frame['line']})" for frame in inner]
    return "\n".join(shown)
