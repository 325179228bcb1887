"""Reads the snapshot of a sharded tree, and says where it is broken."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import END, INDENT, NUMBER, RANKS, WorldReader
from pytest_fsdp_comm.snapshots.records import RecordReader
from pytest_fsdp_comm.snapshots.tree_text import (
    PRECISION_WORDS,
    parameter_content,
    tree_lines,
    unit_content,
)
from pytest_fsdp_comm.text.fqn import unescape
from pytest_fsdp_comm.text.rank_lists import ranks_or_empty_if_all
from pytest_fsdp_comm.tree.facts import ParameterFacts, TreeFacts, UnitFacts
from pytest_fsdp_comm.tree.model import Precision, UnitKind
from pytest_fsdp_comm.tree.profile import TreeProfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
_NUMBER: Final = re.compile(NUMBER)
_TENSOR: Final = re.compile(r"([A-Za-z0-9_]+)\[((?:[0-9]{1,18}(?:,[0-9]{1,18})*)?)\]")
_DTYPE: Final = re.compile(r"[A-Za-z0-9_]+")
_POLICIES: Final = re.compile(r"[A-Z_]+(?:,[A-Z_]+)*")
_PLACEMENT: Final = re.compile(r"\w+\([^ ()]*\)")


def read_tree(lines: SnapshotLines) -> TreeProfile:
    """Reads the snapshot of a sharded tree, or of several, and checks it by writing it again.

    Args:
        lines: Of the whole file.

    Raises:
        SnapshotFormatError: A line is not as `tree_text.tree_lines` writes it.
    """
    trees = _read_trees(lines)
    common = trees.get(())
    recorded = (
        common.world.ranks if common is not None else tuple(sorted(chain.from_iterable(trees)))
    )
    world_size = next(iter(trees.values())).world.size
    return TreeProfile(
        trees={ranks: tree.facts for ranks, tree in trees.items()},
        recorded_ranks=ranks_or_empty_if_all(recorded, world_size),
        torch_version=lines.torch_version,
    )


def _read_trees(lines: SnapshotLines) -> dict[tuple[int, ...], _TreeReader]:
    """Reads trees by the ranks that have them; by no ranks if all ranks have the same."""
    reader = RecordReader()
    if not lines.lines[1].startswith(RANKS):
        return {(): _TreeReader(lines, reader)}
    starts = [at for at, line in enumerate(lines.lines, 1) if line.startswith(RANKS)]
    if len(starts) == 1:
        raise lines.misread_error(2, "a line 'ranks <N>,...' above each of several trees")
    trees: dict[tuple[int, ...], _TreeReader] = {}
    bodies: dict[tuple[str, ...], int] = {}
    seen: set[int] = set()
    before: tuple[int, ...] = ()
    for start, end in pairwise([*starts, len(lines.lines)]):
        section = _indented(lines, start, end)
        tree = _TreeReader(section, reader)
        try:
            ranks = reader.ranks(lines.lines[start - 1].removeprefix(RANKS), tree.world)
        except ValueError as error:
            raise lines.refused_error(start, error) from None
        if not seen.isdisjoint(ranks) or ranks <= before:
            raise lines.misread_error(
                start, "each rank once, trees in the order of their first ranks"
            )
        if bodies.setdefault(tuple(section.lines[1:]), start) != start:
            raise lines.misread_error(start, "each tree once, with all of its ranks")
        trees[ranks] = tree
        seen.update(ranks)
        before = ranks
    return trees


def _indented(lines: SnapshotLines, start: int, end: int) -> SnapshotLines:
    """The lines of one tree, below its ranks."""
    for number in range(start + 1, end):
        if not lines.lines[number - 1].startswith(INDENT):
            raise lines.misread_error(number, "two spaces first, below the ranks of a tree")
    if lines.lines[end - 2] != INDENT + END:
        raise lines.misread_error(end - 1, f"{INDENT + END!r} as the last line of a tree")
    return lines.section(start + 1, end - 1)


class _TreeReader:
    """Reads one tree."""

    def __init__(self, lines: SnapshotLines, reader: RecordReader) -> None:
        self.world = WorldReader(lines)
        if self.world.ranks and lines.before:
            raise lines.misread_error(3, "no further list of ranks in one tree of several")
        units: defaultdict[int, dict[str, UnitFacts]] = defaultdict(dict)
        parameters: dict[str, ParameterFacts] = {}
        self.facts = TreeFacts(
            world_size=self.world.size,
            mesh_axes=self.world.mesh_axes,
            units=units,
            parameters=parameters,
        )
        for number, line in enumerate(lines.lines[self.world.end - 1 : -1], start=self.world.end):
            word, *words = line.split(" ")
            if word == "total":
                break
            if word not in {"unit", "parameter"} or not words or not words[0]:
                raise lines.misread_error(number, "'unit ...', 'parameter ...' or 'total ...'")
            try:
                if word == "unit":
                    group, unit = _read_unit(words[1:] or [""])
                    content = unit_content(unit, group)
                else:
                    parameter = _read_parameter(words[1:] or [""])
                    content = parameter_content(parameter)
                names = reader.names(words[0])
            except ValueError as error:
                raise lines.refused_error(number, error) from None
            if content != " ".join(words[1:]):
                raise lines.differs_error(number, f"{word} {words[0]} {content}")
            known: dict[str, Any] = units[group] if word == "unit" else parameters
            if not known.keys().isdisjoint(names):
                raise lines.misread_error(number, f"each {word} once")
            known.update(dict.fromkeys(names, unit if word == "unit" else parameter))
        lines.compare(tree_lines(self.facts, self.world.ranks))


def _read_unit(line: Sequence[str]) -> tuple[int, UnitFacts]:
    """Reads what stands after a unit's names: its number among those of its module, and it."""
    kind, *words = line
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
    return group, unit


def _read_parameter(line: Sequence[str]) -> ParameterFacts:
    """Reads what stands after a parameter's names."""
    tensor, *words = line
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
    return ParameterFacts(
        shape=tuple(map(int, match[2].split(","))) if match[2] else (),
        dtype=match[1],
        trainable="frozen" not in flags,
        managed="unmanaged" not in flags,
        placements=tuple(_placements(words[len(flags) :])),
        tied=tied,
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
        raise ValueError(
            f"bad prefetch {quoted_part(text)}: expected policies such as BACKWARD_PRE,FORWARD"
        )
    return tuple(text.split(",")) if text is not None else ()


def _optional_name(text: str | None) -> str | None:
    return None if text is None else unescape(text)


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(map(unescape, text.split(",")))
