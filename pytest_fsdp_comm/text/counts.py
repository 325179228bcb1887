"""How counts of things are written."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``.

    Args:
        count: How many.
        noun: What, in the singular; takes an s.
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cut(text: str, most: int) -> str:
    """A text of several lines, or its beginning and how much more there is.

    Args:
        text: The text.
        most: Characters, at least 60.
    """
    if len(text) <= most:
        return text
    kept = text[: most - 40]
    return f"{kept}\n... and {len(text) - len(kept):_} more characters"
