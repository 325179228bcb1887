"""The snapshot of a sharded tree: one record a line, siblings of equal content folded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, get_args

from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import END, INDENT, NUMBER, header
from pytest_fsdp_comm.snapshots.records import (
    RANKS,
    RecordReader,
    folded_lines,
    read_world,
    world_lines,
)
from pytest_fsdp_comm.text.fqn import escape, unescape
from pytest_fsdp_comm.text.rank_lists import ranks_or_empty_if_all, write_ranks
from pytest_fsdp_comm.tree.model import Precision, UnitKind
from pytest_fsdp_comm.tree.profile import ParameterFacts, TreeFacts, TreeProfile, UnitFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_fsdp_comm.snapshots.lines import SnapshotLines
    from pytest_fsdp_comm.snapshots.records import World


# Note [Text of a tree]:
#
#     # pytest-fsdp-comm 2 tree | torch 2.13.0, gloo (not compared)
#     world_size 4
#     mesh dp=4 stride 1
#     unit (root) fsdp2 root shard=dp reshard_after_forward=false
#     unit layers.{0..3} fsdp2 shard=dp reshard_after_forward=true param_dtype=bfloat16
#     parameter embed.weight float32[512,64] dp=Shard(0) tied=head.weight
#     parameter layers.{0..3}.mlp.weight float32[64,64] dp=Shard(0)
#     total 5 units, 5 parameters
#     end
#
# Bytes are not written: they follow from shapes, element types and policies. Where the ranks' trees
# differ, each tree is indented below a line ``ranks 0,2-3``; where they do not, such a line below
# the world's size says which were recorded, if not all were.

_Facts = TypeVar("_Facts")

# The words of a record: how they are written and read.


def _checked(
    pattern: str, what: str, expected: str, read: Callable[[str], Any] = str
) -> Callable[[str], Any]:
    shape = re.compile(pattern)

    def read_checked(text: str) -> Any:
        if shape.fullmatch(text) is None:
            raise ValueError(f"bad {what} {quoted_part(text)}: expected {expected}")
        return read(text)

    return read_checked


def _write_names(names: Iterable[str]) -> str:
    return ",".join(map(escape, names))


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(map(unescape, text.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """One fact of a unit, written as ``<word>=<value>`` where it is not the default."""

    default: Any = None
    write: Callable[[Any], str] = str
    read: Callable[[str], Any] | None = None
    """None for a flag, which is written without a value."""


_FLAG: Final = _Word(default=False)
_AXIS: Final = _Word(write=escape, read=unescape)
_NAMES: Final = _Word(default=(), write=_write_names, read=_read_names)
_DTYPE: Final = _Word(
    read=_checked(r"[A-Za-z0-9_]+(?:\+[A-Za-z0-9_]+)*", "element type", "one such as bfloat16")
)
_GROUP: Final = _Word(default=1, read=_checked(NUMBER, "number", "a number such as group=2", int))
_RESHARD: Final = _Word(
    write=lambda value: str(value).lower(),
    read=_checked(
        # One rank is no group, and 1 equals True.
        f"true|false|(?!1$){NUMBER}",
        "number",
        "reshard_after_forward=true, =false or a number of ranks",
        lambda text: int(text) if text.isdigit() else text == "true",
    ),
)
_POLICIES: Final = _Word(
    default=(),
    write=",".join,
    read=_checked(
        "[A-Z_]+(?:,[A-Z_]+)*",
        "prefetch",
        "policies such as BACKWARD_PRE,FORWARD",
        lambda text: tuple(text.split(",")),
    ),
)
_PRECISION: Final = {
    **dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"), _DTYPE),
    "cast_forward_inputs": _Word(default=True, write=lambda _: "false", read=lambda _: False),
}
# In the order in which they are written.
_UNIT_WORDS: Final = {
    "group": _GROUP,
    "root": _FLAG,
    "shard": _AXIS,
    "replicate": _AXIS,
    "reshard_after_forward": _RESHARD,
    **_PRECISION,
    "offload": _FLAG,
    "forward_prefetch": _NAMES,
    "backward_prefetch": _NAMES,
    "prefetch": _POLICIES,
}
# The fields of `UnitFacts` whose names are not their words.
_FIELDS: Final = {"root": "is_root", "shard": "shard_axis", "replicate": "replicate_axis"}
_read_tensor: Final = _checked(
    r"[A-Za-z0-9_]+\[(?:[0-9]{1,18}(?:,[0-9]{1,18})*)?\]",
    "tensor",
    "one such as float32[64,64] after the parameter",
)
_read_placement: Final = _checked(
    r".+=\w+\([^ ()=]*\)", "placement", "placements such as dp=Shard(0)"
)


def _unit_content(unit: UnitFacts, group: int) -> str:
    """What a line says of a unit, the given one of those of its modules."""
    words: list[str] = [unit.kind]
    for name, word in _UNIT_WORDS.items():
        whose = unit.precision if name in _PRECISION else unit
        value = group if word is _GROUP else getattr(whose, _FIELDS.get(name, name))
        if value != word.default:
            words.append(name if word.read is None else f"{name}={word.write(value)}")
    return " ".join(words)


def _read_unit(content: str) -> tuple[UnitFacts, int]:
    """Read what `_unit_content` wrote; the caller checks it by writing it again."""
    kind, *words = content.split(" ")
    if kind not in get_args(UnitKind):
        raise ValueError(
            f"unknown unit {quoted_part(kind)}: expected one of "
            f"{', '.join(get_args(UnitKind))} after its name"
        )
    given: dict[str, Any] = {}
    for text in words:
        name, equals, value = text.partition("=")
        word = _UNIT_WORDS.get(name)
        if word is None or (word.read is None) is bool(equals):
            raise ValueError(
                f"unknown policy {quoted_part(text)}: expected a unit's policy such as "
                "reshard_after_forward=true"
            )
        given[name] = word.read is None or word.read(value)
    group = given.pop("group", 1)
    precision = Precision(**{name: given.pop(name) for name in _PRECISION if name in given})
    facts = {_FIELDS.get(name, name): value for name, value in given.items()}
    return UnitFacts(kind=cast("UnitKind", kind), precision=precision, **facts), group


def _parameter_content(parameter: ParameterFacts) -> str:
    words = [f"{parameter.dtype}[{','.join(map(str, parameter.shape))}]"]
    words += [] if parameter.trainable else ["frozen"]
    words += [] if parameter.managed else ["unmanaged"]
    words += [f"{escape(axis)}={placement}" for axis, placement in parameter.placements]
    words += [f"tied={_write_names(parameter.tied)}"] if parameter.tied else []
    return " ".join(words)


def _read_parameter(content: str) -> ParameterFacts:
    tensor, *words = content.split(" ")
    dtype, _, shape = _read_tensor(tensor).removesuffix("]").partition("[")
    tied: tuple[str, ...] = ()
    if words and words[-1].startswith("tied=") and not words[-1].endswith(")"):
        tied = _read_names(words.pop().removeprefix("tied="))
    flags = [word for word in words if word in {"frozen", "unmanaged"}]
    placed = (_read_placement(word).rpartition("=") for word in words[len(flags) :])
    return ParameterFacts(
        shape=tuple(map(int, shape.split(","))) if shape else (),
        dtype=dtype,
        trainable="frozen" not in flags,
        managed="unmanaged" not in flags,
        placements=tuple((unescape(axis), placement) for axis, _, placement in placed),
        tied=tied,
    )


def format_profile(profile: TreeProfile) -> str:
    """Write a profile as a snapshot, which `read_tree` reads."""
    lines = [header("tree", torch_version=profile.torch_version, backend=profile.backend)]
    for ranks, facts in profile.trees.items():
        if not ranks:
            return "\n".join([*lines, *_tree_lines(facts, profile.recorded_ranks)]) + "\n"
        lines.append(RANKS + write_ranks(ranks))
        lines += [INDENT + line for line in _tree_lines(facts)]
    return "\n".join([*lines, END]) + "\n"


def _tree_lines(facts: TreeFacts, recorded: Sequence[int] = ()) -> list[str]:
    """All lines of one tree but the first; ranks only where trees do not stand below theirs."""
    units = (
        line
        for group, held in sorted(facts.units.items())
        for line in _folded(held, partial(_unit_content, group=group))
    )
    parameters = _folded(facts.parameters, _parameter_content)
    # So that a lost line is noticed.
    totals = sum(map(len, facts.units.values())), len(facts.parameters)
    return [
        *world_lines(facts.world_size, recorded, facts.mesh_axes),
        *(f"unit {line}" for line in units),
        *(f"parameter {line}" for line in parameters),
        f"total {totals[0]} units, {totals[1]} parameters",
        END,
    ]


def _folded(facts: Mapping[str, _Facts], content: Callable[[_Facts], str]) -> list[str]:
    names_of: defaultdict[str, list[str | None]] = defaultdict(list)
    for name, one in facts.items():
        names_of[content(one)].append(name)
    return folded_lines(names_of)


def read_tree(lines: SnapshotLines) -> TreeProfile:
    """Read the snapshot of a sharded tree, or of several (see Note [Strict reading])."""
    reader = RecordReader()
    if lines.line(2).startswith(RANKS):
        trees = _read_trees(lines, reader)
        recorded = tuple(sorted(chain.from_iterable(trees)))
        world_size = next(iter(trees.values())).world_size
        ranks = ranks_or_empty_if_all(recorded, world_size)
    else:
        facts, world = _read_facts(lines, reader)
        trees, ranks = {(): facts}, world.ranks
    return TreeProfile(trees=trees, recorded_ranks=ranks, torch_version=lines.torch_version)


def _read_trees(lines: SnapshotLines, reader: RecordReader) -> dict[tuple[int, ...], TreeFacts]:
    starts = [at for at, line in enumerate(lines.lines, 1) if line.startswith(RANKS)]
    if len(starts) == 1:
        with lines.at(2):
            raise ValueError("expected a line 'ranks <N>,...' above each of several trees")
    trees: dict[tuple[int, ...], TreeFacts] = {}
    bodies: set[tuple[str, ...]] = set()
    for start, end in pairwise([*starts, len(lines.lines)]):
        for number in range(start + 1, end):
            with lines.at(number):
                if not lines.line(number).startswith(INDENT):
                    raise ValueError("expected two spaces first, below the ranks of a tree")
        with lines.at(end - 1):
            if lines.line(end - 1) != INDENT + END:
                raise ValueError(f"expected {INDENT + END!r} as the last line of a tree")
        section = lines.section(start + 1, end - 1)
        facts, world = _read_facts(section, reader)
        body = tuple(section.lines[1:])
        with lines.at(start):
            ranks = reader.ranks(lines.line(start).removeprefix(RANKS), world)
            before = next(reversed(trees), ())
            if ranks <= before or not set(ranks).isdisjoint(chain.from_iterable(trees)):
                raise ValueError("expected each rank once, trees in the order of their first ranks")
            if body in bodies:
                raise ValueError("expected each tree once, with all of its ranks")
        trees[ranks] = facts
        bodies.add(body)
    return trees


def _read_facts(lines: SnapshotLines, reader: RecordReader) -> tuple[TreeFacts, World]:
    world = read_world(lines)
    if world.ranks and lines.before:
        with lines.at(3):
            raise ValueError("expected no further list of ranks in one tree of several")
    units: defaultdict[int, dict[str, UnitFacts]] = defaultdict(dict)
    parameters: dict[str, ParameterFacts] = {}
    for number, line in enumerate(lines.lines[world.end - 1 : -1], start=world.end):
        word, _, rest = line.partition(" ")
        pattern, _, content = rest.partition(" ")
        if word == "total":
            break
        with lines.at(number):
            if word not in {"unit", "parameter"} or not pattern:
                raise ValueError("expected 'unit ...', 'parameter ...' or 'total ...'")
            known: dict[str, Any]
            value: Any
            if word == "unit":
                value, group = _read_unit(content)
                known, written = units[group], _unit_content(value, group)
            else:
                value = _read_parameter(content)
                known, written = parameters, _parameter_content(value)
            names = reader.names(pattern)
            lines.check(number, f"{word} {pattern} {written}")
            if not known.keys().isdisjoint(names):
                raise ValueError(f"expected each {word} once")
            known.update(dict.fromkeys(names, value))
    facts = TreeFacts(
        world_size=world.size, mesh_axes=world.mesh_axes, units=units, parameters=parameters
    )
    lines.check_all(_tree_lines(facts, world.ranks))
    return facts, world
