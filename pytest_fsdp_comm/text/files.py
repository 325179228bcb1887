"""Write files atomically, and name the directories of ``--comm-artifacts``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# Subdirectories of ``--comm-artifacts``, organized like the snapshot directory. `RECEIVED` contains
# what failed tests recorded; `EXPECTED` contains the snapshots that the recordings did not match.
RECEIVED: Final = "received"
EXPECTED: Final = "expected"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's text, or raise OSError; readers never see a partly written file."""
    write_all_atomically({path: text})


def write_all_atomically(texts: Mapping[Path, str]) -> None:
    """Replace several files; if one of them cannot be written, raise OSError and replace none."""
    # Processes on several machines can have equal ids, so use a random suffix.
    token = os.urandom(4).hex()
    unfinished = {
        path: path.with_name(f".{path.name[:200]}.{token}")
        for path in texts
        if path.is_file() or not path.exists()  # devices and pipes cannot be replaced
    }
    try:
        for path, text in texts.items():
            unfinished.get(path, path).write_text(text, encoding="utf-8", newline="\n")
        for path, file in unfinished.items():
            file.replace(path)
    finally:
        for file in unfinished.values():
            file.unlink(missing_ok=True)


def is_nested(path: Path, other: Path) -> bool:
    """Return whether one path is equal to or inside the other, after following links."""
    path, other = (Path(os.path.realpath(link)) for link in (path, other))
    return path.is_relative_to(other) or other.is_relative_to(path)
