"""Reads the snapshot of a sharded tree, and says where it is broken."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import (
    END,
    INDENT,
    NUMBER,
    RecordReader,
    SnapshotLines,
    read_mesh,
    read_world_size,
)
from pytest_fsdp_comm.snapshots.tree_writing import (
    PRECISION_WORDS,
    parameter_words,
    tree_lines,
    unit_words,
)
from pytest_fsdp_comm.text.fqn import Pattern, unescape
from pytest_fsdp_comm.text.name_patterns import Pieces
from pytest_fsdp_comm.tree.facts import ParameterFacts, TreeFacts, UnitFacts
from pytest_fsdp_comm.tree.model import Precision, UnitKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_UNIT_FLAGS: Final = frozenset({"root", "offload"})
_UNIT_WORDS: Final = _UNIT_FLAGS | {
    "group",
    "shard",
    "replicate",
    "reshard_after_forward",
    *PRECISION_WORDS,
    "cast_forward_inputs",
    "forward_prefetch",
    "backward_prefetch",
    "prefetch",
}
_RANKS: Final = "ranks "
_NUMBER: Final = re.compile(NUMBER)
_TENSOR: Final = re.compile(r"([A-Za-z0-9_]+)\[((?:[0-9]{1,18}(?:,[0-9]{1,18})*)?)\]")
_DTYPE: Final = re.compile(r"[A-Za-z0-9_]+")
_POLICIES: Final = re.compile(r"[A-Z_]+(?:,[A-Z_]+)*")
_PLACEMENT: Final = re.compile(r"\w+\([^ ()]*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One line: the same facts for each of some names."""

    number: int
    """The line's."""
    names: Pattern
    group: int
    """0 for a parameter; for a unit, which of those with its name it is, from 1."""
    words: str
    facts: Any


def read_trees(lines: SnapshotLines) -> dict[tuple[int, ...], TreeDocument]:
    """Reads the tree of a snapshot, or those of the ranks that it tells apart.

    Returns:
        The trees by the ranks that have them; by no ranks if all ranks have the same.

    Raises:
        SnapshotFormatError: A line is not as `pytest_fsdp_comm.snapshots.tree_text` writes it.
    """
    reader = RecordReader()
    starts = [at for at, line in enumerate(lines.lines, 1) if line.startswith(_RANKS)]
    if not starts:
        return {(): TreeDocument(lines, reader)}
    if starts[0] != 2 or len(starts) == 1:  # noqa: PLR2004  # the line below the header
        raise lines.misread(2, "a line 'ranks <N>,...' above each of several trees")
    trees: dict[tuple[int, ...], TreeDocument] = {}
    bodies: dict[tuple[str, ...], int] = {}
    for start, end in pairwise([*starts, len(lines.lines)]):
        part = _indented(lines, start, end)
        tree = TreeDocument(part, reader)
        try:
            ranges = reader.ranks(lines.lines[start - 1].removeprefix(_RANKS), tree.world_size)
        except ValueError as error:
            raise lines.refused(start, error) from None
        ranks = tuple(rank for first, last in ranges for rank in range(first, last + 1))
        seen = {rank for held in trees for rank in held}
        if not seen.isdisjoint(ranks) or ranks < max(trees, default=()):
            raise lines.misread(start, "each rank once, trees in the order of their first ranks")
        if bodies.setdefault(tuple(part.lines[1:]), start) != start:
            raise lines.misread(start, "each tree once, with all of its ranks")
        trees[ranks] = tree
    return trees


def _indented(lines: SnapshotLines, start: int, end: int) -> SnapshotLines:
    """The lines of one tree, below its ranks."""
    for number in range(start + 1, end):
        if not lines.lines[number - 1].startswith(INDENT):
            raise lines.misread(number, "two spaces first, below the ranks of a tree")
    if lines.lines[end - 2] != INDENT + END:
        raise lines.misread(end - 1, f"{INDENT + END!r} as the last line of a tree")
    return lines.part(start + 1, end - 1)


class TreeDocument:
    """The records of one tree, checked."""

    def __init__(self, lines: SnapshotLines, reader: RecordReader) -> None:
        """Reads and checks the lines, and builds nothing.

        Args:
            lines: Of the tree, below a first one that is not its.
            reader: Counts what the whole file holds.

        Raises:
            SnapshotFormatError: A line is not as `tree_lines` writes it.
        """
        self._lines = lines
        self._reader = reader
        body = lines.lines[1:-1]
        self.world_size = read_world_size(lines, 2, body[0] if body else END)
        self.mesh_axes = read_mesh(
            lines, 3, body[1] if len(body) > 1 else END, world_size=self.world_size, name=unescape
        )
        read: dict[str, Callable[[int, list[str]], _Record]] = {
            "unit": self._read_unit,
            "parameter": self._read_parameter,
        }
        self._records: list[_Record] = []
        for number, line in enumerate(body[2:], start=4):
            word, *words = line.split(" ")
            if word == "total":
                break
            if word not in read or not words or not words[0]:
                raise lines.misread(number, "'unit ...', 'parameter ...' or 'total ...'")
            try:
                record = read[word](number, words)
            except ValueError as error:
                raise lines.refused(number, error) from None
            if record.words != " ".join(words[1:]):
                raise lines.differs(number, f"{word} {words[0]} {record.words}")
            self._records.append(record)
        self._check()

    def facts(self) -> TreeFacts:
        """What the document holds."""
        units: dict[tuple[str, int], UnitFacts] = {}
        parameters: dict[str, ParameterFacts] = {}
        for record in self._records:
            if record.group:
                found = ((fqn, record.group) for fqn in record.names.expand())
                units.update(dict.fromkeys(found, record.facts))
            else:
                parameters.update(dict.fromkeys(record.names.expand(), record.facts))
        return TreeFacts(
            world_size=self.world_size,
            mesh_axes=self.mesh_axes,
            units=units,
            parameters=parameters,
        )

    def _check(self) -> None:
        groups: defaultdict[int, list[_Record]] = defaultdict(list)
        for record in self._records:
            groups[record.group].append(record)
        folded = {group: self._fold(records) for group, records in groups.items()}
        parameters = folded.pop(0, {})
        sizes = [(record.group > 0, record.names.size) for record in self._records]
        self._lines.compare(
            tree_lines(
                world_size=self.world_size,
                mesh_axes=self.mesh_axes,
                units=folded,
                parameters=parameters,
                totals=(
                    sum(size for is_unit, size in sizes if is_unit),
                    sum(size for is_unit, size in sizes if not is_unit),
                ),
            )
        )

    def _fold(self, records: Sequence[_Record]) -> dict[str, list[str]]:
        """The patterns of each content, as the lines should have them."""
        try:
            pieces = Pieces([record.names for record in records], self._reader.steps)
        except ValueError as error:
            raise self._lines.refused(records[0].number, error) from None
        seen: set[Any] = set()
        places_of: defaultdict[str, list[int]] = defaultdict(list)
        for place, record in enumerate(records):
            if not seen.isdisjoint(pieces.of[place]):
                what = "unit" if record.group else "parameter"
                raise self._lines.misread(record.number, f"each {what} once")
            seen.update(pieces.of[place])
            places_of[record.words].append(place)
        return {words: pieces.fold(places) for words, places in places_of.items()}

    def _read_unit(self, number: int, line: list[str]) -> _Record:
        pattern, kind, *words = [*line, ""][: max(2, len(line))]
        if kind not in get_args(UnitKind):
            raise ValueError(
                f"unknown unit {quoted_part(kind)}: expected one of "
                f"{', '.join(get_args(UnitKind))} after its name"
            )
        given: dict[str, str] = {}
        for word in words:
            key, equals, value = word.partition("=")
            if key not in _UNIT_WORDS or key in given or bool(equals) == (key in _UNIT_FLAGS):
                raise ValueError(
                    f"unknown policy {quoted_part(word)}: expected a unit's policy such as "
                    "reshard_after_forward=true"
                )
            given[key] = value
        group = _whole(given.get("group", "1"), "a number such as group=2")
        unit = UnitFacts(
            kind=cast("UnitKind", kind),
            is_root="root" in given,
            shard_axis=_optional_name(given.get("shard")),
            replicate_axis=_optional_name(given.get("replicate")),
            reshard_after_forward=_reshard(given.get("reshard_after_forward")),
            precision=Precision(
                **{name: _dtype(given.get(name)) for name in PRECISION_WORDS},
                cast_forward_inputs="cast_forward_inputs" not in given,
            ),
            offload="offload" in given,
            forward_prefetch=_names(given.get("forward_prefetch")),
            backward_prefetch=_names(given.get("backward_prefetch")),
            prefetch=_policies(given.get("prefetch")),
        )
        return _Record(
            number=number,
            names=self._reader.pattern(pattern),
            group=group,
            words=unit_words(unit, group),
            facts=unit,
        )

    def _read_parameter(self, number: int, line: list[str]) -> _Record:
        pattern, tensor, *words = [*line, ""][: max(2, len(line))]
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            raise ValueError(
                f"bad tensor {quoted_part(tensor)}: expected one such as float32[64,64] after the "
                "parameter"
            )
        tied: tuple[str, ...] = ()
        if words and words[-1].startswith("tied=") and not words[-1].endswith(")"):
            tied = _names(words.pop().removeprefix("tied="))
        flags = [word for word in words if word in {"frozen", "unmanaged"}]
        parameter = ParameterFacts(
            shape=tuple(map(int, match[2].split(","))) if match[2] else (),
            dtype=match[1],
            trainable="frozen" not in flags,
            managed="unmanaged" not in flags,
            placements=tuple(_placements(words[len(flags) :])),
            tied=tied,
        )
        return _Record(
            number=number,
            names=self._reader.pattern(pattern),
            group=0,
            words=parameter_words(parameter),
            facts=parameter,
        )


def _placements(words: Iterable[str]) -> Iterable[tuple[str, str]]:
    for word in words:
        axis, _, placement = word.rpartition("=")
        if not axis or not _PLACEMENT.fullmatch(placement):
            raise ValueError(
                f"bad placement {quoted_part(word)}: expected placements such as dp=Shard(0)"
            )
        yield unescape(axis), placement


def _whole(text: str, expected: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"bad number {quoted_part(text)}: expected {expected}")
    return int(text)


def _reshard(text: str | None) -> bool | int | None:
    if text is None:
        return None
    if text in {"true", "false"}:
        return text == "true"
    number = _whole(text, expected := "reshard_after_forward=true, =false or a number of ranks")
    # One rank is no group, and 1 equals True.
    if number == 1:
        raise ValueError(f"bad number {quoted_part(text)}: expected {expected}")
    return number


def _dtype(text: str | None) -> str | None:
    if text is not None and not _DTYPE.fullmatch(text):
        raise ValueError(f"bad element type {quoted_part(text)}: expected one such as bfloat16")
    return text


def _policies(text: str | None) -> tuple[str, ...]:
    if text is not None and not _POLICIES.fullmatch(text):
        raise ValueError(f"bad prefetch {quoted_part(text)}: expected such as BACKWARD_PRE,FORWARD")
    return tuple(text.split(",")) if text is not None else ()


def _optional_name(text: str | None) -> str | None:
    return None if text is None else unescape(text)


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(map(unescape, text.split(",")))
