"""Classify stack frames and find the line of a caller, without importing torch or pytest."""

from __future__ import annotations

import functools
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, Literal

from pytest_fsdp_comm.text.words import show_path

Whose = Literal["user", "library", "torch", "stdlib", "ours"]

PACKAGE: Final = f"{Path(__file__).parents[1]}/"
_STDLIB: Final = sysconfig.get_path("stdlib") + "/"
_SITE_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


@functools.cache
def torch_path_prefix() -> str:
    """Return the path prefix of torch's files; without torch, a prefix that matches no file."""
    spec = importlib.util.find_spec("torch")  # does not import it
    return f"{Path(spec.origin).parent}/" if spec and spec.origin else "\0"


@functools.cache
def find_author(path: str) -> Whose:
    """Return who wrote a source file, judging by its path."""
    if path.startswith(PACKAGE):
        return "ours"
    if path.startswith(torch_path_prefix()):
        return "torch"
    # Check this before the standard library: outside a virtual environment, it contains packages.
    if any(directory in path for directory in _SITE_PACKAGES):
        return "library"
    return "stdlib" if path.startswith((_STDLIB, "<")) else "user"


def is_outside_torch(frame: FrameType) -> bool:
    """Whether a frame runs code of a user or of a library other than torch."""
    return find_author(frame.f_code.co_filename) in {"user", "library"}


# We do not use traceback.walk_stack(), because it looks up the line of each frame, which is slow.
def walk_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def find_caller() -> FrameType | None:
    """Return the innermost frame of user code, or else of a library; None if there is neither."""
    # Callers must not store the frame, which keeps the tensors in its variables alive.
    library, frame = None, sys._getframe(1).f_back
    while frame is not None:
        owner = find_author(frame.f_code.co_filename)
        if owner == "user":
            return frame
        if owner == "library":
            library = library or frame
        frame = frame.f_back
    return library


def find_call_site() -> str:
    """Return the line where `find_caller`'s frame is, as ``path:line``; empty without a frame."""
    return call_site_of(find_caller())


def call_site_of(frame: FrameType | None) -> str:
    """Return a frame's current line as ``path:line``; empty for None."""
    if frame is None:
        return ""
    return f"{_show_path(frame.f_code.co_filename)}:{frame.f_lineno}"


_show_path = functools.cache(show_path)
