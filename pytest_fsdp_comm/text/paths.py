"""Paths as people type them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from pytest_fsdp_comm.errors import printable


def show_path(path: str | Path, root: Path | None = None) -> str:
    """Write a path relative to `root` or the working directory if below it; `printable`."""
    try:
        return printable(str(Path(path).relative_to(root or Path.cwd())))
    except (ValueError, OSError):
        return printable(str(path))


def shell_word(text: str) -> str:
    """Quote a word of a command: in bash's ``$'...'`` where it is not printable."""
    if text.isprintable():
        return shlex.quote(text)
    written = (
        character
        if character.isprintable() and character not in "\\'"
        else "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
        for character in text
    )
    return f"$'{''.join(written)}'"


def anchor_of(snapshot_dir: Path, root: Path) -> Path:
    """The directory whose tree the snapshots mirror: pytest's root, mostly."""
    # Where several projects share a snapshot directory above theirs, the directory that it is in.
    above = snapshot_dir.parent
    shares = root.is_relative_to(above) or root.resolve().is_relative_to(above)
    return above if shares else root
