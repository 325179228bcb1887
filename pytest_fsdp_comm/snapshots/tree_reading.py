"""Reads the snapshot of a sharded tree, and says where it is broken."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, cast, get_args

from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import END, INDENT, NUMBER, RANKS, WorldReader, world_lines
from pytest_fsdp_comm.snapshots.records import Record, RecordReader, fold_pieces
from pytest_fsdp_comm.snapshots.tree_writing import (
    PRECISION_WORDS,
    parameter_content,
    tree_lines,
    unit_content,
)
from pytest_fsdp_comm.text.fqn import unescape
from pytest_fsdp_comm.text.rank_lists import unless_all
from pytest_fsdp_comm.tree.facts import ParameterFacts, TreeFacts, UnitFacts
from pytest_fsdp_comm.tree.model import Precision, UnitKind
from pytest_fsdp_comm.tree.profile import TreeProfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_fsdp_comm.snapshots.lines import SnapshotLines

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
_PARAMETERS: Final = 0
"""Stands for the parameters, beside the numbers of units, which begin with 1."""
_NUMBER: Final = re.compile(NUMBER)
_TENSOR: Final = re.compile(r"([A-Za-z0-9_]+)\[((?:[0-9]{1,18}(?:,[0-9]{1,18})*)?)\]")
_DTYPE: Final = re.compile(r"[A-Za-z0-9_]+")
_POLICIES: Final = re.compile(r"[A-Z_]+(?:,[A-Z_]+)*")
_PLACEMENT: Final = re.compile(r"\w+\([^ ()]*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitRecord(Record):
    facts: UnitFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParameterRecord(Record):
    facts: ParameterFacts


class TreeDocument:
    """The snapshot of a sharded tree, or of several where ranks differ, checked."""

    def __init__(self, lines: SnapshotLines) -> None:
        """Reads and checks the lines, and builds nothing.

        Args:
            lines: Of the whole file.

        Raises:
            SnapshotFormatError: A line is not as `tree_lines` writes it.
        """
        self.lines = lines
        self._trees = _read_trees(lines)

    def profile(self) -> TreeProfile:
        """What the document holds."""
        common = self._trees.get(())
        recorded = (
            common.world.ranks
            if common is not None
            else tuple(sorted(chain.from_iterable(self._trees)))
        )
        trees = {ranks: tree.facts() for ranks, tree in self._trees.items()}
        world_size = next(iter(trees.values())).world_size
        return TreeProfile(trees=trees, recorded_ranks=unless_all(recorded, world_size))


def _read_trees(lines: SnapshotLines) -> dict[tuple[int, ...], _Tree]:
    """Reads trees by the ranks that have them; by no ranks if all ranks have the same."""
    reader = RecordReader()
    if not lines.lines[1].startswith(RANKS):
        return {(): _Tree(lines, reader)}
    starts = [at for at, line in enumerate(lines.lines, 1) if line.startswith(RANKS)]
    if len(starts) == 1:
        raise lines.misread(2, "a line 'ranks <N>,...' above each of several trees")
    trees: dict[tuple[int, ...], _Tree] = {}
    bodies: dict[tuple[str, ...], int] = {}
    seen: set[int] = set()
    before: tuple[int, ...] = ()
    for start, end in pairwise([*starts, len(lines.lines)]):
        section = _indented(lines, start, end)
        tree = _Tree(section, reader)
        try:
            ranks = reader.ranks(lines.lines[start - 1].removeprefix(RANKS), tree.world)
        except ValueError as error:
            raise lines.refused(start, error) from None
        if not seen.isdisjoint(ranks) or ranks <= before:
            raise lines.misread(start, "each rank once, trees in the order of their first ranks")
        if bodies.setdefault(tuple(section.lines[1:]), start) != start:
            raise lines.misread(start, "each tree once, with all of its ranks")
        trees[ranks] = tree
        seen.update(ranks)
        before = ranks
    return trees


def _indented(lines: SnapshotLines, start: int, end: int) -> SnapshotLines:
    """The lines of one tree, below its ranks."""
    for number in range(start + 1, end):
        if not lines.lines[number - 1].startswith(INDENT):
            raise lines.misread(number, "two spaces first, below the ranks of a tree")
    if lines.lines[end - 2] != INDENT + END:
        raise lines.misread(end - 1, f"{INDENT + END!r} as the last line of a tree")
    return lines.section(start + 1, end - 1)


class _Tree:
    """The records of one tree, checked."""

    def __init__(self, lines: SnapshotLines, reader: RecordReader) -> None:
        self._lines = lines
        self._reader = reader
        self.world = WorldReader(lines)
        if self.world.ranks and lines.before:
            raise lines.misread(3, "no further list of ranks in one tree of several")
        self._units: defaultdict[int, list[_UnitRecord]] = defaultdict(list)
        self._parameters: list[_ParameterRecord] = []
        # In the order of their first lines, which decides what error comes first.
        groups: defaultdict[int, list[Record]] = defaultdict(list)
        for number, line in enumerate(lines.lines[self.world.end - 1 : -1], start=self.world.end):
            word, *words = line.split(" ")
            if word == "total":
                break
            if word not in {"unit", "parameter"} or not words or not words[0]:
                raise lines.misread(number, "'unit ...', 'parameter ...' or 'total ...'")
            try:
                group, record = (
                    self._read_unit(number, words)
                    if word == "unit"
                    else self._read_parameter(number, words)
                )
            except ValueError as error:
                raise lines.refused(number, error) from None
            if record.words != " ".join(words[1:]):
                raise lines.differs(number, f"{word} {words[0]} {record.words}")
            groups[group].append(record)
        self._check(groups)

    def facts(self) -> TreeFacts:
        """What the lines hold."""
        return TreeFacts(
            world_size=self.world.size,
            mesh_axes=self.world.mesh_axes,
            units={
                group: {fqn: record.facts for record in records for fqn in record.names.expand()}
                for group, records in self._units.items()
            },
            parameters={
                fqn: record.facts for record in self._parameters for fqn in record.names.expand()
            },
        )

    def _check(self, groups: Mapping[int, Sequence[Record]]) -> None:
        """Checks that the lines are folded, ordered and counted as they would be written."""
        folded = {}
        for group, records in groups.items():
            once = f"each {'parameter' if group == _PARAMETERS else 'unit'} once"
            pieces = self._reader.cut(self._lines, records, once=once)
            folded[group] = fold_pieces(records, pieces)
        parameters = folded.pop(_PARAMETERS, {})
        units = [record for records in self._units.values() for record in records]
        self._lines.compare(
            tree_lines(
                world=world_lines(self.world.size, self.world.ranks, self.world.mesh_axes),
                units=folded,
                parameters=parameters,
                totals=(
                    sum(record.names.size for record in units),
                    sum(record.names.size for record in self._parameters),
                ),
            )
        )

    def _read_unit(self, number: int, line: list[str]) -> tuple[int, Record]:
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
        record = _UnitRecord(
            number=number,
            names=self._reader.pattern(pattern),
            content=unit_content(unit, group),
            facts=unit,
        )
        self._units[group].append(record)
        return group, record

    def _read_parameter(self, number: int, line: list[str]) -> tuple[int, Record]:
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
        record = _ParameterRecord(
            number=number,
            names=self._reader.pattern(pattern),
            content=parameter_content(parameter),
            facts=parameter,
        )
        self._parameters.append(record)
        return _PARAMETERS, record


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
        raise ValueError(
            f"bad prefetch {quoted_part(text)}: expected policies such as BACKWARD_PRE,FORWARD"
        )
    return tuple(text.split(",")) if text is not None else ()


def _optional_name(text: str | None) -> str | None:
    return None if text is None else unescape(text)


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(map(unescape, text.split(",")))
