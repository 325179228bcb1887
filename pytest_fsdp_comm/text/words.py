"""Format counts, bytes, paths and shortened lines for messages."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from pytest_fsdp_comm.errors import printable

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP: Final = 1024
_PREFIXES: Final = ("", "k", "M", "G", "T", "P")
_KILO: Final = 1000
_T = TypeVar("_T")
_NBYTES: Final = rf"\d[\d_.]* (?:{'|'.join(_UNITS)})\b"
_NBYTES_CHANGE: Final = re.compile(
    r"(\d[\d_.]*)(?: (UNIT))? -> (\d[\d_.]*) (UNIT)\b".replace("UNIT", "|".join(_UNITS))
)
_AMOUNT: Final = re.compile(
    rf"(?:\d+ -> )?\d+ calls?\b(?:(?:, [+-]?| of ){_NBYTES})?(?: in (?:all|total))?"
    rf"|{_NBYTES}(?: in (?:all|total))?"
)

# The smallest ratio that `show_growth` formats as a factor instead of a percentage.
_FACTOR: Final = 3


def show_count(count: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``; `noun` is a singular whose plural adds an s."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cut_end(text: str, most: int) -> str:
    """Truncate text to `most` (at least 60) characters; the last line says how many were cut."""
    if len(text) <= most:
        return text
    beginning = text[: most - 40]
    return f"{beginning}\n... and {len(text) - len(beginning):_} more characters"


def take_first(entries: Sequence[_T], most: int) -> tuple[Sequence[_T], int]:
    """Return the first entries, at most ``most + 1``, and how many entries were left out."""
    # Never leave out a single entry, because "1 more" needs as much room as the entry.
    if len(entries) <= most + 1:
        return entries, 0
    return entries[:most], len(entries) - most


def join_first(texts: Sequence[str], most: int) -> str:
    """Join the first texts with commas, and count the rest: ``a, b and 2 more``."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def shorten_line(line: str, most: int) -> str:
    """Truncate a line to at most `most` characters, between words unless a word is long."""
    if len(line) <= most:
        return line
    beginning = line[: most - len("...")]
    words = beginning.rpartition(" ")[0].rstrip(",;:")
    return f"{words if len(words) > most // 2 else beginning}..."


def show_path(path: str | Path, root: Path | None = None) -> str:
    """Format a path relative to `root` (default: the working directory) if `root` contains it."""
    try:
        # Python keeps the dots of a script's path, for example in "tests/../train.py".
        return printable(str(Path(os.path.normpath(path)).relative_to(root or Path.cwd())))
    except (ValueError, OSError):
        return printable(str(path))


def shell_word(text: str) -> str:
    """Quote a word for a shell, using bash's ``$'...'`` if `printable` would change the word."""
    if printable(text) == text:
        return shlex.quote(text)
    written = (
        character
        if character.isprintable() and character not in "\\'#"
        else "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
        for character in text
    )
    return f"$'{''.join(written)}'"


def itemsize(dtype: str) -> int:
    """Return the element size of a dtype in bytes; 1 for names without digits, such as ``bool``."""
    # For several dtypes such as ``bfloat16+float32``, return the size of the largest one, because
    # FSDP reduces gradients in that dtype.
    names = (re.search(r"\d+", name) for name in dtype.split("+"))
    return max(int(bits[0]) // 8 if bits else 1 for bits in names)


def show_nbytes(nbytes: int, unsized: int = 0) -> str:
    """Format bytes with one decimal in the largest binary unit that fits: ``512.0 KiB``.

    `unsized` is the number of calls of unknown size; `nbytes` does not include them.
    """
    if unsized:
        sized = f"{show_nbytes(nbytes)} and " if nbytes else ""
        return f"{sized}{unsized} of unknown size"
    amount = float(nbytes)
    for unit in _UNITS[:-1]:
        # Avoid "1024.0 KiB": use the next unit.
        if abs(amount) < _STEP - 0.05:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= _STEP
    return f"{amount:.1f} {_UNITS[-1]}"


def show_flops(flops: int) -> str:
    """Format floating-point operations with one decimal: ``28.5 GFLOP``."""
    amount = float(flops)
    for prefix in _PREFIXES[:-1]:
        if amount < _KILO - 0.05:
            return f"{flops} FLOP" if not prefix else f"{amount:.1f} {prefix}FLOP"
        amount /= _KILO
    return f"{amount:.1f} {_PREFIXES[-1]}FLOP"


def show_nbytes_change(old: int, new: int, unsized: tuple[int, int] = (0, 0)) -> str:
    """Format old and new bytes, rounded as in `show_nbytes` unless they would look equal."""
    if any(unsized):
        return f"{show_nbytes(old, unsized[0])} -> {show_nbytes(new, unsized[1])}"
    # Examples: `1.4 -> 2.3 MiB`, `512 B -> 2.0 KiB`, `0 -> 2.0 KiB`, `74_000 -> 74_008 B`.
    before, after = show_nbytes(old), show_nbytes(new)
    if before == after and old != new:
        return f"{old:_} -> {new:_} B"
    amount, _, unit = before.partition(" ")
    # Write the unit once if both amounts have the same unit; 0 needs no unit.
    is_shared = unit == after.partition(" ")[2] or not old
    return f"{amount if is_shared else before} -> {after}"


def show_nbytes_of(part: int, whole: int) -> str:
    """Format a part of some bytes, rounded as in `show_nbytes`: ``3.1 of 51.3 GiB``."""
    amount, _, unit = show_nbytes(part).partition(" ")
    total = show_nbytes(whole)
    return f"{amount if total.endswith(f' {unit}') else f'{amount} {unit}'} of {total}"


def hide_amounts(line: str) -> str:
    """Replace byte and call counts with "some", and changes in bytes with "more" or "less"."""

    def direction(match: re.Match[str]) -> str:
        before, unit, after, unit_after = match.groups()
        old, new = (
            (_UNITS.index(unit), float(amount))
            for amount, unit in ((before, unit or unit_after), (after, unit_after))
        )
        return "more" if old < new else "less"

    return _AMOUNT.sub("some", _NBYTES_CHANGE.sub(direction, line))


def show_growth(old: float, new: float) -> str:
    """Format the growth of a number as ``+63 %``, ``x4.0``, ``new`` (from 0) or ``unchanged``."""
    # Never round a change to 0 % or -100 %, because that would mean no change, or nothing left.
    if old == new:
        return "unchanged"
    if not old:
        return "new"
    ratio = new / old
    if ratio >= _FACTOR:
        digits = int(ratio < 100)  # noqa: PLR2004  # three digits
        return f"x{ratio:.{digits}f}" if ratio < 1000 else "over x1000"  # noqa: PLR2004  # as above
    percent = (ratio - 1) * 100
    if abs(percent) < 0.1:  # noqa: PLR2004  # the last digit that is printed
        return f"<0.1 % {'more' if percent > 0 else 'fewer'}"
    if new and percent < -99:  # noqa: PLR2004  # would round to -100
        return f"{max(percent, -99.9):.1f} %"
    return f"{percent:+.1f} %" if abs(percent) < 9.95 else f"{percent:+.0f} %"  # noqa: PLR2004  # two digits
