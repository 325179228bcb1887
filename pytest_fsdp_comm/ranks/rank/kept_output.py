"""Shortens long output to its first and last part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

# Ranks shorten long strings before they send them. They write output directly to log files, which
# survive a crash; when a phase ends, only the first and last part of its output are read back.

KEPT_NBYTES: Final = 256 << 10
"""How many bytes or characters to keep at each end of a long text."""
# Do not shorten a text if that removes less than this. The note that replaces the removed part is
# shorter than this limit, so a shortened text is never shortened again.
_LONGEST_NOTE: Final = 256


def cut_middle(text: str) -> str:
    """Return `text`, or only its first and last part if it is too long."""
    left_out = len(text) - 2 * KEPT_NBYTES
    if left_out <= _LONGEST_NOTE:
        return text
    return f"{text[:KEPT_NBYTES]}{_describe_omission(left_out, 'characters')}{text[-KEPT_NBYTES:]}"


def cut_middles(data: Any) -> Any:
    """Shorten each string in a serialized report; treat a list under "lines" as one string."""
    if isinstance(data, str):
        return cut_middle(data)
    if isinstance(data, dict):
        return {
            name: _cut_middle_of_lines(value) if name == "lines" else cut_middles(value)
            for name, value in data.items()
        }
    return [cut_middles(value) for value in data] if isinstance(data, (list, tuple)) else data


def _cut_middle_of_lines(lines: Sequence[str]) -> Sequence[str]:
    if sum(map(len, lines)) <= 2 * KEPT_NBYTES:
        return lines
    # With --tb=native, each string ends in a line break, and some contain several lines.
    if lines[0].endswith("\n"):
        return [cut_middle("".join(lines))]
    return cut_middle("\n".join(lines)).split("\n")


def read_log_parts(descriptor: int, parts: Iterable[tuple[int, int]]) -> str:
    """Read (start, end) ranges of a file as one string, and shorten it if it is too long."""
    parts = [*parts]
    nbytes = sum(end - start for start, end in parts)
    left_out = nbytes - 2 * KEPT_NBYTES
    if left_out <= 0:
        return _read_and_decode(descriptor, parts, 0, nbytes)
    head = _read_and_decode(descriptor, parts, 0, KEPT_NBYTES)
    tail = _read_and_decode(descriptor, parts, nbytes - KEPT_NBYTES, nbytes)
    return f"{head}{_describe_omission(left_out, 'bytes')}{tail}"


def _read_and_decode(
    descriptor: int, parts: Iterable[tuple[int, int]], begin: int, end: int
) -> str:
    """Decode bytes `begin` to `end` of the concatenated parts."""
    data = []
    for start, stop in parts:
        first, last = max(begin, 0), min(end, stop - start)
        if first < last:
            data.append(os.pread(descriptor, last - first, start + first))
        begin, end = begin - (stop - start), end - (stop - start)
    # Each invalid byte becomes one character, so there are no more characters than bytes.
    return b"".join(data).decode("utf-8", "replace")


def _describe_omission(count: int, unit: str) -> str:
    return (
        f"\n[... {count:,} {unit} left out: only the first and last {KEPT_NBYTES >> 10} KiB are "
        "kept, see docs/ranks.md of pytest-fsdp-comm ...]\n"
    )
