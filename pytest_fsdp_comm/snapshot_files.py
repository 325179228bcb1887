"""Snapshot files on disk: written whole or not at all, shown as the user would type them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file all at once; whatever happens, the old one or the new one is there."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(unfinished).chmod(0o666 & ~umask)
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def shown_path(path: Path, rootdir: Path) -> str:
    """A path as the user would type it from the root directory."""
    try:
        return str(path.relative_to(rootdir))
    except ValueError:
        return str(path)
