"""Describes a rank from outside: its stack, user code first."""

from __future__ import annotations

import itertools
import linecache
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.recording.frames import PACKAGE, whose
from pytest_fsdp_comm.text.words import show_path

_PAUSE_S = 0.005
_SETTLED = 10
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
# Frames of what runs the test explain nothing about it.
_RUNNERS = re.compile(r"/(_pytest|pytest|pluggy|xdist|execnet)[/.]|/bin/[^/]+$|runpy(\.py|>)$")
# What a rank runs its tests from: the frames around it are those of whoever has started pytest.
_ENTRY = f"{PACKAGE}ranks/rank/main.py"
_HAS_FRAME = re.compile(r"^  File .*\n", re.MULTILINE)
_LONGEST_CODE = 60
# Of a recursion, the innermost frames and where it began.
_INNERMOST_FRAMES: Final = 4
_OUTERMOST_FRAMES: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One call that has not returned."""

    path: str
    line: int
    name: str
    code: str = ""
    """Its line of source; empty if unknown."""

    @property
    def is_users(self) -> bool:
        """Whether it is the user's code, neither installed nor part of what runs the test."""
        return whose(self.path) == "user" and not is_runner(self.path)

    @property
    def site(self) -> str:
        return f"{show_path(self.path)}:{self.line} in {self.name}"


def is_runner(path: str) -> bool:
    """Whether a file belongs to what runs the test: pytest, its plugins, or this one."""
    return whose(path) == "ours" or _RUNNERS.search(path) is not None


def of_test(frames: Iterable[StackFrame]) -> list[StackFrame]:
    """The frames of a stack, innermost first, up to the one that started the rank."""
    return list(itertools.takewhile(lambda frame: frame.path != _ENTRY, frames))


def with_source(frame: StackFrame) -> StackFrame:
    """Add a frame's line of source, if short, else its beginning."""
    line = " ".join(linecache.getline(frame.path, frame.line).split())
    is_long = len(line) > _LONGEST_CODE
    return replace(frame, code=f"{line[: _LONGEST_CODE - 3]}..." if is_long else line)


def with_code(site: str, code: str) -> str:
    """A place and its line of source: ``model.py:9 in forward: lock.acquire()``."""
    return f"{site}: {code}" if site and code else site


def show_stack(frames: Sequence[StackFrame]) -> tuple[str, ...]:
    """The frames of user code, innermost first, then the innermost of what that called."""
    users = [frame for frame in frames if frame.is_users]
    shown = [frame.site for frame in users]
    shown[:1] = [with_code(frame.site, frame.code) for frame in users[:1]]
    omitted = len(shown) - _INNERMOST_FRAMES - _OUTERMOST_FRAMES
    if omitted > 1:
        shown[_INNERMOST_FRAMES:-_OUTERMOST_FRAMES] = [f"... {omitted} more calls ..."]
    called = [
        frame
        for frame in itertools.takewhile(lambda frame: not frame.is_users, frames)
        # Without user code, what runs the test may be what does not end.
        if not frame.path.startswith("<") and not (users and is_runner(frame.path))
    ]
    shown += [f"inside {frame.name} ({frame.path}:{frame.line})" for frame in called[:1]]
    return tuple(shown)


def read_dump(path: Path, *, until: float) -> list[StackFrame]:
    """Wait until `time.monotonic` for `faulthandler`'s frames, innermost first; empty if none."""
    text = ""
    unchanged = 0
    while True:
        previous = text
        text = path.read_text(errors="backslashreplace") if path.exists() else ""
        unchanged = unchanged + 1 if text and text == previous else 0
        # faulthandler writes piece by piece, and no frame at all where the signal met a thread that
        # is not Python's.
        is_whole = unchanged and (_HAS_FRAME.search(text) or unchanged > _SETTLED)
        if is_whole or time.monotonic() > until:
            return parse_dump(text)
        time.sleep(_PAUSE_S)


def parse_dump(text: str) -> list[StackFrame]:
    """The frames that `faulthandler` wrote."""
    return of_test(
        with_source(StackFrame(path=found["path"], line=int(found["line"]), name=found["name"]))
        for found in _FRAME.finditer(text)
    )
