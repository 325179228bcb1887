"""Numbers of bytes as people read them."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP: Final = 1024


def show_nbytes(nbytes: int) -> str:
    """Rounds to one decimal in the largest binary unit that leaves at least 1: ``512.0 KiB``."""
    amount = float(nbytes)
    for unit in _UNITS[:-1]:
        # Rounds up to the next unit rather than write "1024.0 KiB".
        if abs(amount) < _STEP - 0.05:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= _STEP
    return f"{amount:.1f} {_UNITS[-1]}"


def show_nbytes_change(old: int, new: int) -> str:
    """Rounds both as `show_nbytes`, unless that would show them as equal."""
    before, after = show_nbytes(old), show_nbytes(new)
    return f"{before} -> {after}" if before != after else f"{old:_} B -> {new:_} B"
