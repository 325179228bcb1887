"""The records of a snapshot, alike for both kinds: folded names, a content, and ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import RANKS, read_some_ranks
from pytest_fsdp_comm.text.fqn import (
    MAX_NAMES,
    NO_MODULE,
    Pattern,
    first_name,
    fold_fqns,
    natural_key,
    read_pattern,
)
from pytest_fsdp_comm.text.name_patterns import Pieces, Steps
from pytest_fsdp_comm.text.rank_lists import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_fsdp_comm.snapshots.lines import SnapshotLines, WorldReader
    from pytest_fsdp_comm.text.fqn import Ranges

MAX_NAME_TEXT: Final = 1_000_000
"""The most characters that the names of all lines have: 100 for each of the most lines."""
MAX_NUMBERS: Final = 8
"""The most numbers in one name: ``layers.3.experts.7`` has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line that was read: the same for each of some names."""

    number: int
    """The line's."""
    names: Pattern
    content: str
    """What the writer writes after the names, without ranks."""
    ranks: str = ""
    """As they are written; empty for all ranks."""

    @property
    def words(self) -> str:
        """What the writer writes after the names."""
        return with_ranks(self.content, self.ranks)


def with_ranks(content: str, ranks: str) -> str:
    """A line's content with the ranks that share it, as they are written; empty for all ranks."""
    return f"{content} {RANKS}{ranks}" if ranks else content


def fold_names(names_of: Mapping[str, Iterable[str | None]]) -> dict[str, list[str]]:
    """Folds the names of each content, of which None stands for no module."""
    folded = {}
    for content, names in names_of.items():
        found = list(names)
        patterns = fold_fqns(name for name in found if name is not None)
        folded[content] = [*patterns, *([NO_MODULE] if None in found else [])]
    return folded


def sort_folded(patterns_of: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Puts lines into order: naturally by their first names, those of no module last.

    Args:
        patterns_of: The patterns of each content.

    Returns:
        Pattern and content of each line.
    """

    def key(line: tuple[str, str]) -> tuple[object, ...]:
        pattern, content = line
        if pattern == NO_MODULE:
            return (True, natural_key(""), content)
        return (False, natural_key(first_name(pattern)), content)

    lines = [(pattern, content) for content, found in patterns_of.items() for pattern in found]
    return sorted(lines, key=key)


class RecordReader:
    """Reads the parts of records that both kinds have, within the limits of the whole file.

    Its methods raise ValueError with what came and what was expected; the caller knows the line.
    """

    def __init__(self) -> None:
        """Counts from zero: one reader for each file."""
        self._steps = Steps()
        self._name_text = 0
        self._names = 0
        self._ranks = 0
        self._rank_lists: dict[str, tuple[int, ...]] = {"": ()}
        self._rank_classes: dict[str, Ranges] = {}

    def pattern(self, text: str) -> Pattern:
        """Reads names, which count for the whole file."""
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
        return pattern

    def ranks(self, text: str, world: WorldReader) -> tuple[int, ...]:
        """Reads a list of some of the recorded ranks, such as ``0,2-3``; empty for all of them.

        Lines share the tuple of one text.
        """
        if text not in self._rank_lists:
            self._rank_lists[text] = ranks = read_some_ranks(text, world.size, world.ranks)
            self._ranks += len(ranks)
            if self._ranks > MAX_NAMES:
                raise ValueError(
                    f"too many ranks: expected at most {MAX_NAMES} in all lists together"
                )
        return self._rank_lists[text]

    def _classes_of_ranks(self) -> Mapping[str, Ranges]:
        """The ranks of each list as numbers of classes, of which a list has all ranks or none.

        A file has few classes even where its lists have many ranks. The last class is of those in
        no list, so that all ranks have a number that no list has.
        """
        if self._rank_classes:
            return self._rank_classes
        class_of: dict[int, int] = {}
        made = 1  # class 0 is of the ranks in none of the lists so far
        for ranks in self._rank_lists.values():
            parts: dict[int, int] = {}
            for rank in ranks:
                old = class_of.get(rank, 0)
                if old not in parts:
                    parts[old] = made
                    made += 1
                class_of[rank] = parts[old]
        numbers: dict[int, int] = {}
        for rank in sorted(class_of):
            numbers.setdefault(class_of[rank], len(numbers))
        self._rank_classes = {
            text: runs_of(sorted({numbers[class_of[rank]] for rank in ranks}))
            for text, ranks in self._rank_lists.items()
        }
        self._rank_classes[""] = ((0, len(numbers)),)
        return self._rank_classes

    def cut(
        self,
        lines: SnapshotLines,
        records: Sequence[Record],
        *,
        once: str,
    ) -> Pieces:
        """Cuts the names of lines that differ in their contents only, when all lines are read.

        Args:
            lines: The snapshot, for errors.
            records: The lines.
            once: What is expected if two lines have the same name on the same rank.

        Raises:
            SnapshotFormatError: Two have, or there are too many steps.
        """
        names = [record.names for record in records]
        try:
            pieces = by_rank = Pieces(names, self._steps)
            if any(record.ranks for record in records):
                # The rank as one more number of the name.
                classes = self._classes_of_ranks()
                boxes = [(*record.names.box, classes[record.ranks]) for record in records]
                by_rank = Pieces(
                    [
                        Pattern(words=(*pattern.words, ""), box=box)
                        for pattern, box in zip(names, boxes, strict=True)
                    ],
                    self._steps,
                )
        except ValueError as error:
            raise lines.refused(records[0].number, error) from None
        seen: set[object] = set()
        for place, record in enumerate(records):
            held: list[object] = [*by_rank.of[place]]
            if by_rank is not pieces:
                # The same content belongs on one line, with all of its ranks.
                held += [(*piece, record.content) for piece in pieces.of[place]]
            if not seen.isdisjoint(held):
                raise lines.misread(record.number, once)
            seen.update(held)
        return pieces


def fold_pieces(records: Sequence[Record], pieces: Pieces) -> dict[str, list[str]]:
    """The patterns of each content, as the writer would fold them.

    Args:
        records: Lines that differ in their contents only.
        pieces: Those of their names.
    """
    places_of: defaultdict[str, list[int]] = defaultdict(list)
    for place, record in enumerate(records):
        places_of[record.words].append(place)
    return {words: pieces.fold(places) for words, places in places_of.items()}
