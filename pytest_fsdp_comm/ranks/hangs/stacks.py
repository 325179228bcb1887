"""Formats the stack of a rank, user code first, and parses stacks that `faulthandler` dumped."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import Final

from pytest_fsdp_comm.recording.frames import PACKAGE, find_author
from pytest_fsdp_comm.text.words import shorten_line, show_path

_PAUSE_S = 0.005
_SETTLED = 10
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
# Matches files of test runners. Their frames say nothing about the test, so they are omitted.
_RUNNERS = re.compile(r"/(_pytest|pytest|pluggy|xdist|execnet)[/.]|/bin/[^/]+$|runpy(\.py|>)$")
# The file from which ranks run tests. Its callers only started the rank, so they are omitted.
_ENTRY = f"{PACKAGE}ranks/rank/main.py"
_HAS_FRAME = re.compile(r"^  File .*\n", re.MULTILINE)
_LONGEST_CODE = 60
# A deep recursion would fill the screen, so print only the two ends of a long stack.
_INNERMOST_FRAMES: Final = 4
_OUTERMOST_FRAMES: Final = 1


def is_runner_file(path: str) -> bool:
    """Return whether a file belongs to pytest or one of its plugins, including this plugin."""
    return find_author(path) == "ours" or _RUNNERS.search(path) is not None


def is_user_frame(frame: FrameSummary) -> bool:
    """Return whether a frame is user code, not code of an installed package or a test runner."""
    return find_author(frame.filename) == "user" and not is_runner_file(frame.filename)


def find_innermost_user_frame(frames: Iterable[FrameSummary]) -> FrameSummary | None:
    """Return the first frame of user code; `frames` begin with the innermost."""
    return next(filter(is_user_frame, frames), None)


def drop_start_frames(frames: Iterable[FrameSummary]) -> list[FrameSummary]:
    """Drop the outermost frames, which only start the rank; `frames` begin with the innermost."""
    return list(itertools.takewhile(lambda frame: frame.filename != _ENTRY, frames))


def show_site(frame: FrameSummary | None) -> str:
    """Return ``path:line in function``; "" without a frame."""
    return f"{show_path(frame.filename)}:{frame.lineno} in {frame.name}" if frame else ""


def show_code(frame: FrameSummary | None) -> str:
    """Return a frame's line of source code, shortened if it is long; "" if it is unknown."""
    return shorten_line(" ".join((frame.line or "").split()), _LONGEST_CODE) if frame else ""


def append_code(site: str, code: str) -> str:
    """Append the line of source code to a site: ``model.py:9 in forward: lock.acquire()``."""
    return f"{site}: {code}" if site and code else site


def show_stack(frames: Sequence[FrameSummary]) -> tuple[str, ...]:
    """Format the frames of user code, innermost first, then the innermost library call."""
    users = [frame for frame in frames if is_user_frame(frame)]
    lines = [show_site(frame) for frame in users]
    lines[:1] = [append_code(line, show_code(users[0])) for line in lines[:1]]
    omitted = len(lines) - _INNERMOST_FRAMES - _OUTERMOST_FRAMES
    if omitted > 1:
        lines[_INNERMOST_FRAMES:-_OUTERMOST_FRAMES] = [f"... {omitted} more calls ..."]
    called = [
        frame
        for frame in itertools.takewhile(lambda frame: not is_user_frame(frame), frames)
        # If no user code is on the stack, the rank may hang in pytest, so keep pytest's frames.
        if not frame.filename.startswith("<") and not (users and is_runner_file(frame.filename))
    ]
    lines += [f"inside {frame.name} ({frame.filename}:{frame.lineno})" for frame in called[:1]]
    return tuple(lines)


def read_dump(path: Path, *, until: float) -> list[FrameSummary]:
    """Wait for a dump of `faulthandler`, at most until `until` (`time.monotonic`), and parse it."""
    text = ""
    unchanged = 0
    while True:
        previous = text
        text = path.read_text(errors="backslashreplace") if path.exists() else ""
        unchanged = unchanged + 1 if text and text == previous else 0
        # faulthandler writes piece by piece, so wait until the file stops growing. The dump has no
        # frame if a native thread received the signal, so do not wait forever for one.
        is_complete = unchanged and (_HAS_FRAME.search(text) or unchanged > _SETTLED)
        if is_complete or time.monotonic() > until:
            return parse_dump(text)
        time.sleep(_PAUSE_S)


def parse_dump(text: str) -> list[FrameSummary]:
    """Parse the frames in a dump of `faulthandler`."""
    return drop_start_frames(
        FrameSummary(match["path"], int(match["line"]), match["name"])
        for match in _FRAME.finditer(text)
    )
