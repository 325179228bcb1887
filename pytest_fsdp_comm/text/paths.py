"""Paths as people type them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from pytest_fsdp_comm.errors import printable


def show_path(path: str | Path, root: Path | None = None) -> str:
    """A path relative to a directory where it lies below it, and whole elsewhere; `printable`.

    Args:
        path: An absolute path.
        root: The directory; None for the working directory, which may be gone.
    """
    try:
        return printable(str(Path(path).relative_to(root or Path.cwd())))
    except (ValueError, OSError):
        return printable(str(path))


def shell_word(text: str) -> str:
    """A word of a command as one types it: in bash's ``$'...'`` where it is not printable."""
    if text.isprintable():
        return shlex.quote(text)
    written = (
        character
        if character.isprintable() and character not in "\\'"
        else "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
        for character in text
    )
    return f"$'{''.join(written)}'"
