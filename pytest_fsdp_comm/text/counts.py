"""How counts of things are written."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``.

    Args:
        count: How many.
        noun: What, in the singular; takes an s.
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
