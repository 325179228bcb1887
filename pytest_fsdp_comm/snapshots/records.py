"""The records of a snapshot, alike for both kinds: folded names, a content, and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import MAX_RANKS, RANKS, read_some_ranks
from pytest_fsdp_comm.text.fqn import (
    MAX_NAMES,
    NO_MODULE,
    first_name,
    fold_fqns,
    natural_key,
    read_pattern,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_fsdp_comm.snapshots.lines import WorldReader

MAX_NAME_TEXT: Final = 1_000_000
"""The most characters that the names of all lines have: 100 for each of the most lines."""
MAX_NUMBERS: Final = 8
"""The most numbers in one name: ``layers.3.experts.7`` has two."""


def with_ranks(content: str, ranks: str) -> str:
    """A line's content with the ranks that share it, as they are written; empty for all ranks."""
    return f"{content} {RANKS}{ranks}" if ranks else content


def folded_lines(names_of: Mapping[str, Iterable[str | None]]) -> list[str]:
    """Folds the names of each content, of which None stands for no module.

    Returns:
        Pattern and content of each line, sorted naturally by first names, those of no module last.
    """
    lines: list[tuple[tuple[object, ...], str]] = []
    for content, names in names_of.items():
        found = list(names)
        for pattern in fold_fqns(name for name in found if name is not None):
            key = (False, natural_key(first_name(pattern)), content)
            lines.append((key, f"{pattern} {content}"))
        if None in found:
            lines.append(((True, natural_key(""), content), f"{NO_MODULE} {content}"))
    return [line for _, line in sorted(lines)]


class RecordReader:
    """Reads the parts of records that both kinds have, within the limits of the whole file.

    Its methods raise ValueError with what came and what was expected; the caller knows the line.
    """

    def __init__(self) -> None:
        """Counts from zero: one reader for each file."""
        self._name_text = 0
        self._names = 0
        self._ranks = 0
        self._rank_lists: dict[str, tuple[int, ...]] = {"": ()}

    def names(self, text: str) -> tuple[str, ...]:
        """Reads a pattern, whose names count for the whole file."""
        self._name_text += len(text)
        if self._name_text > MAX_NAME_TEXT:
            raise ValueError(f"too long: expected at most {MAX_NAME_TEXT} characters in all names")
        pattern = read_pattern(text)
        if len(pattern.box) > MAX_NUMBERS:
            raise ValueError(
                f"too many numbers in {quoted_part(text)}: expected at most {MAX_NUMBERS}"
            )
        self._names += pattern.size
        if self._names > MAX_NAMES:
            raise ValueError(f"too many names: expected at most {MAX_NAMES} in all lines together")
        return pattern.expand()

    def ranks(self, text: str, world: WorldReader) -> tuple[int, ...]:
        """Reads a list of some of the recorded ranks, such as ``0,2-3``; empty for all of them.

        Lines share the tuple of one text.
        """
        if text not in self._rank_lists:
            self._rank_lists[text] = ranks = read_some_ranks(text, world.size, world.ranks)
            self._ranks += len(ranks)
            if self._ranks > MAX_RANKS:
                raise ValueError(
                    f"too many ranks: expected at most {MAX_RANKS} in all lists together"
                )
        return self._rank_lists[text]

    def classes_of_ranks(self) -> Mapping[str, frozenset[int]]:
        """The ranks of each list as classes: those of one class are in the same of the lists.

        A file has few classes even where its lists have many ranks.
        """
        class_of: dict[int, int] = {}
        made = 0
        for ranks in self._rank_lists.values():
            parts: dict[int | None, int] = {}
            for rank in ranks:
                old = class_of.get(rank)
                if old not in parts:
                    parts[old] = made
                    made += 1
                class_of[rank] = parts[old]
        return {
            text: frozenset(class_of[rank] for rank in ranks)
            for text, ranks in self._rank_lists.items()
        }
