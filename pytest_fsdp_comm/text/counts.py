"""How counts of things are written."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Write ``1 rank``, ``2 ranks``; the noun is in the singular, and takes an s."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cut(text: str, most: int) -> str:
    """Cut a text to so many characters, at least 60, and say how many more there are."""
    if len(text) <= most:
        return text
    kept = text[: most - 40]
    return f"{kept}\n... and {len(text) - len(kept):_} more characters"


def shorten(line: str, most: int) -> str:
    """Cut a line to at most so many characters."""
    return line if len(line) <= most else f"{line[: most - 3]}..."
