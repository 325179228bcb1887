"""Words of messages: counts, bytes, cut lines and paths."""

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
_T = TypeVar("_T")
_NBYTES: Final = rf"\d[\d_.]* (?:{'|'.join(_UNITS)})\b"
_NBYTES_CHANGE: Final = re.compile(
    r"(\d[\d_.]*)(?: (UNIT))? -> (\d[\d_.]*) (UNIT)\b".replace("UNIT", "|".join(_UNITS))
)
_AMOUNT: Final = re.compile(
    rf"(?:\d+ -> )?\d+ calls?\b(?:(?:,| of) {_NBYTES})?(?: in all)?|{_NBYTES}(?: in all)?"
)

# From here on people compare factors rather than percents.
_FACTOR: Final = 3


def counted(count: int, noun: str) -> str:
    """Write ``1 rank``, ``2 ranks``; the noun is in the singular, and takes an s."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cut(text: str, most: int) -> str:
    """Cut a text to so many characters, at least 60, and say how many more there are."""
    if len(text) <= most:
        return text
    kept = text[: most - 40]
    return f"{kept}\n... and {len(text) - len(kept):_} more characters"


def first_of(entries: Sequence[_T], most: int) -> tuple[Sequence[_T], int]:
    """So many entries, and how many more there are: never one, which takes as much room."""
    if len(entries) <= most + 1:
        return entries, 0
    return entries[:most], len(entries) - most


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


def itemsize(dtype: str) -> int:
    """Bytes of one element; 1 if the name, such as ``bool``, has no number of bits."""
    # The largest of several, in which gradients are reduced too.
    names = (re.search(r"\d+", name) for name in dtype.split("+"))
    return max(int(bits[0]) // 8 if bits else 1 for bits in names)


def show_nbytes(nbytes: int, unsized: int = 0) -> str:
    """Round to one decimal in the largest binary unit that leaves at least 1: ``512.0 KiB``.

    Of calls together, `unsized` is the number of those whose size is unknown.
    """
    if unsized:
        sized = f"{show_nbytes(nbytes)} and " if nbytes else ""
        return f"{sized}{unsized} of unknown size"
    amount = float(nbytes)
    for unit in _UNITS[:-1]:
        # Rounds up to the next unit rather than write "1024.0 KiB".
        if abs(amount) < _STEP - 0.05:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= _STEP
    return f"{amount:.1f} {_UNITS[-1]}"


def show_nbytes_change(old: int, new: int, unsized: tuple[int, int] = (0, 0)) -> str:
    """Write both sides, rounded as by `show_nbytes` unless that makes them equal."""
    if any(unsized):
        return f"{show_nbytes(old, unsized[0])} -> {show_nbytes(new, unsized[1])}"
    # `1.4 -> 2.3 MiB`, `512 B -> 2.0 KiB`, `0 -> 2.0 KiB`, `74_000 -> 74_008 B`.
    before, after = show_nbytes(old), show_nbytes(new)
    if before == after and old != new:
        return f"{old:_} -> {new:_} B"
    amount, _, unit = before.partition(" ")
    # Nothing has no unit, except where the other side has none to share either.
    is_shared = unit == after.partition(" ")[2] or not old
    return f"{amount if is_shared else before} -> {after}"


def without_amounts(line: str) -> str:
    """Leave out of a line how many bytes and calls there are, but not whether bytes grew."""

    def direction(match: re.Match[str]) -> str:
        before, unit, after, unit_after = match.groups()
        was, now = (
            (_UNITS.index(unit), float(amount))
            for amount, unit in ((before, unit or unit_after), (after, unit_after))
        )
        return "more" if was < now else "less"

    return _AMOUNT.sub("some", _NBYTES_CHANGE.sub(direction, line))


def show_growth(old: float, new: float) -> str:
    """Say how much more or less one number is than another, so that no change looks like none."""
    # `+63 %`, `-0.3 %`, `x4.0` from three times on, `unchanged`, `new` where there was nothing.
    if old == new:
        return "unchanged"
    if not old:
        return "new"
    ratio = new / old
    if ratio >= _FACTOR:
        return f"x{ratio:.1f}" if ratio < 100 else f"x{ratio:.0f}"  # noqa: PLR2004  # three digits
    percent = (ratio - 1) * 100
    if abs(percent) < 0.1:  # noqa: PLR2004  # the last digit that is shown
        return f"<0.1 % {'more' if percent > 0 else 'fewer'}"
    # What is left of something is not nothing.
    if new and percent < -99:  # noqa: PLR2004  # rounds to -100
        return f"{max(percent, -99.9):.1f} %"
    return f"{percent:+.1f} %" if abs(percent) < 9.95 else f"{percent:+.0f} %"  # noqa: PLR2004  # two digits
