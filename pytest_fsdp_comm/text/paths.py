"""Paths as people type them."""

from __future__ import annotations

from pathlib import Path


def show_path(path: str | Path, root: Path | None = None) -> str:
    """A path relative to a directory where it lies below it, and as it is elsewhere.

    Args:
        path: An absolute path.
        root: The directory; None for the working directory, which may be gone.
    """
    try:
        return str(Path(path).relative_to(root or Path.cwd()))
    except (ValueError, OSError):
        return str(path)
