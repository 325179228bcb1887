"""Numbers of bytes, and how people read them."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP: Final = 1024

# From here on people compare factors rather than percents.
_FACTOR: Final = 3


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
