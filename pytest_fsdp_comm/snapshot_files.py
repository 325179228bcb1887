"""Snapshot files on disk: written whole or not at all, shown as the user would type them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file all at once; whatever happens, the old one or the new one is there.

    Where the file system can (``O_TMPFILE``), the new one has no name before it is whole, so that
    whoever is killed meanwhile leaves nothing behind. A file that is there already can only be
    replaced by one with a name: it has one between two system calls, and the next write of the file
    removes it, should the process be killed just there.

    Raises:
        OSError: The directory cannot be written, or the disk is full.
    """
    unfinished = path.with_name(f".{path.name[:200]}.unfinished")
    unfinished.unlink(missing_ok=True)
    content = text.encode()
    try:
        descriptor = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o666)
    except (AttributeError, OSError):  # not Linux, or e.g. NFS
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor, is_named = os.open(unfinished, flags, 0o666), True
    else:
        is_named = False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if not is_named:
                try:
                    _name(descriptor, path)
                except FileExistsError:
                    _name(descriptor, unfinished)
                    is_named = True
        if is_named:
            unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _name(descriptor: int, path: Path) -> None:
    """Gives a name to a file that has none."""
    # Only with a directory's descriptor, which an absolute path needs not, does Python follow.
    here = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=here)
    finally:
        os.close(here)


def shown_path(path: Path, rootdir: Path) -> str:
    """A path as the user would type it from the root directory."""
    try:
        return str(path.relative_to(rootdir))
    except ValueError:
        return str(path)
