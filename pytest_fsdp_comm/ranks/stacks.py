"""Reads the stacks that a rank dumped through `faulthandler`."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PAUSE_S = 0.005
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
# Frames of those that run the test say nothing about it.
_RUNNERS = re.compile(
    r"/(_pytest|pytest|pluggy|xdist|execnet|pytest_fsdp_comm/(ranks|plugin))[/.]|/bin/[^/]+$|runpy(\.py|>)$"
)
_LIBRARY = re.compile(r"/(site-packages|dist-packages|lib/python\d\.\d+)/")
_LIBRARY_FRAMES = 1


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
    while time.monotonic() < until:
        previous, text = text, _read(path)
        # The dump ends with the main thread's outermost frame, that of the pytest process's start.
        if text and text == previous:
            break
        time.sleep(_PAUSE_S)
    return _main_thread(text)


def _read(path: Path) -> str:
    return path.read_text(errors="backslashreplace") if path.exists() else ""


def _main_thread(text: str) -> str:
    # faulthandler writes the thread that got the signal, the main one, last or as "Current".
    parts = re.split(r"^(?=(?:Current )?[Tt]hread 0x)", text, flags=re.MULTILINE)
    current = [part for part in parts if part.startswith("Current")] or parts[-1:]
    frames = [match for match in map(_FRAME.match, current[0].splitlines()) if match]
    kept = [frame for frame in frames if not _RUNNERS.search(frame["path"])]
    users = [frame for frame in kept if not _LIBRARY.search(frame["path"])]
    inner = [frame for frame in kept if frame not in users][:_LIBRARY_FRAMES]
    shown = [f"{frame['path']}:{frame['line']} in {frame['name']}" for frame in users]
    shown += [f"inside {frame['name']} ({frame['path']}:{frame['line']})" for frame in inner]
    return "\n".join(shown)
