"""Format and read lists of ranks: ``0-3``, ``0-62/2``, ``0-39:8/16``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pytest_fsdp_comm.errors import quoted_part

# There is exactly one way to write each set of ranks, and `read_ranks` rejects all others:
# - Consecutive ranks are a run, `0-3`.
# - From the left, `FOLDED` or more runs of equal length and distance are folded: `0-62/2` is every
#   second rank from 0 to 62, and `0-55:8/16` is the first 8 of every 16 ranks from 0 to 55. Ranks
#   that share some coordinates in a device mesh have this pattern.
# - All other runs are listed in ascending order: `0,2-3`.

# Fewer runs than this are listed, because `0,2,4` is easier to read than a stride.
FOLDED: Final = 4
# A message should fit on a screen, so ranks with equal texts share a line. If there are still more
# lines than this, only the rarest texts are listed: the rank that all others are waiting for is
# usually the only one in its state.
MOST_TEXTS: Final = 4
# Regular expression that matches every list of ranks, but also some invalid ones.
RANKS_PATTERN: Final = r"[0-9][0-9,:/-]*"

_NUMBER: Final = r"[1-9][0-9]{0,8}"
_ENTRY: Final = re.compile(rf"(0|{_NUMBER})(?:-({_NUMBER})(?:(?::({_NUMBER}))?/({_NUMBER}))?)?")


def find_runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the first and last number of each run: ``(0, 2), (5, 5)`` for ``0, 1, 2, 5``."""
    if not numbers:
        return ()
    runs = []
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            runs.append((first, last))
            first = number
        last = number
    return (*runs, (first, last))


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message: ``rank 2``, ``ranks 0-3`` or ``ranks 0, 2-3``."""
    text = write_ranks(sorted(ranks), separator=", ")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def write_ranks(ranks: Sequence[int], *, separator: str = ",") -> str:
    """Format ascending ranks as ``0,2-3``; return an empty string if there are none."""
    return separator.join(_write_entries(find_runs(ranks)))


def _write_entries(runs: Sequence[tuple[int, int]]) -> Iterator[str]:
    start = 0
    while start < len(runs):
        first, last = runs[start]
        distance = runs[start + 1][0] - first if start + 1 < len(runs) else 0
        end = start + 1
        while end < len(runs) and runs[end] == (runs[end - 1][0] + distance, last + distance):
            last += distance
            end += 1
        length = last - runs[end - 1][0] + 1
        if end - start >= FOLDED:
            yield f"{first}-{last}{f':{length}' if length > 1 else ''}/{distance}"
            start = end
        else:
            yield str(first) if length == 1 else f"{first}-{first + length - 1}"
            start += 1


def read_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Read the output of `write_ranks` for ranks below `world_size`, or raise ValueError."""
    ranks: list[int] = []
    for entry in text.split(","):
        listed = _read_entry(entry, world_size)
        if not listed or (ranks and listed[0] <= ranks[-1]):
            raise ValueError(
                f"bad ranks {quoted_part(text)}: expected ranks from 0 to {world_size - 1} in "
                "ascending order, such as 0,2-3"
            )
        ranks += listed
    written = write_ranks(ranks)
    if written != text:
        raise ValueError(f"bad ranks {quoted_part(text)}: expected {quoted_part(written)}")
    return tuple(ranks)


def _read_entry(entry: str, world_size: int) -> list[int]:
    """Return the ranks in an entry such as ``3`` or ``0-55:8/16``; empty if it is invalid."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        return []
    first = int(match[1])
    last = int(match[2] or first)
    distance = int(match[4] or max(1, last - first + 1))
    length = int(match[3] or (1 if match[4] else distance))
    starts = range(first, last + 1, distance)
    # Reject runs that overlap, and a last run that is shorter than the others.
    if last >= world_size or not starts or length > distance or last != starts[-1] + length - 1:
        return []
    return [rank for start in starts for rank in range(start, start + length)]


def ranks_or_empty_if_all(ranks: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `ranks` as a tuple, or an empty tuple if it contains all `count` ranks."""
    return () if len(ranks) == count else tuple(ranks)


def group_ranks_by_text(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Group ranks that have equal texts, and sort the groups by their lowest rank."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    return [(ranks, text) for text, ranks in groups.items()]


def group_rarest_texts_first(texts: Mapping[int, str], others: str) -> list[tuple[list[int], str]]:
    """Group ranks by text, rarest first; fill in ``{count}`` in `others` for the rest."""
    folded = sorted(group_ranks_by_text(texts), key=lambda fold: len(fold[0]))
    if len(folded) <= MOST_TEXTS:
        return folded
    listed, merged = folded[: MOST_TEXTS - 1], folded[MOST_TEXTS - 1 :]
    ranks = sorted(rank for group, _ in merged for rank in group)
    return [*listed, (ranks, others.replace("{count}", str(len(merged))))]


def prefix_texts_with_ranks(texts: Mapping[int, str]) -> list[str]:
    """Prefix each distinct message with the ranks that have it: ``ranks 0-1 passed``."""
    return [f"{name_ranks(ranks)} {text}" for ranks, text in group_ranks_by_text(texts)]
