"""Words of messages: counts, cut lines, paths, and what a misspelt name probably meant."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from pytest_fsdp_comm.errors import printable


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


def closest(asked: str, known: Iterable[str]) -> str:
    """The known name that is most like another one; empty if none is."""
    import difflib  # noqa: PLC0415  # needed only on the way to an error

    return next(iter(difflib.get_close_matches(asked, known, n=1)), "")


def did_you_mean(meant: str) -> str:
    """The end of an error about a name; empty if nothing is like it."""
    return f"; did you mean {meant!r}?" if meant else ""
