"""Format and read the snapshot of a sharded tree: one unit or parameter per line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar, cast

from pytest_fsdp_comm.errors import quoted_part
from pytest_fsdp_comm.snapshots.lines import (
    END,
    INDENT,
    RANKS,
    SnapshotLines,
    World,
    folded_lines,
    header,
    read_world,
    world_lines,
)
from pytest_fsdp_comm.text.fqn import escape, expand, unescape
from pytest_fsdp_comm.text.rank_lists import read_ranks, write_ranks
from pytest_fsdp_comm.tree.model import Precision, UnitKind
from pytest_fsdp_comm.tree.profile import ParameterFacts, TreeFacts, TreeProfile, UnitFacts, merge

# The snapshot of a tree looks like this:
#
#     # pytest-fsdp-comm 2 tree | torch 2.13.0, gloo (not compared)
#     world_size 4
#     mesh dp=4 stride 1
#     unit (root) fsdp2 root shard=dp reshard_after_forward=false
#     unit layers.{0..3} fsdp2 shard=dp reshard_after_forward=true param_dtype=bfloat16
#     parameter layers.{0..3}.mlp.weight float32[64,64] dp=Shard(0) tied=head.weight
#     total 5 units, 4 parameters
#     end
#
# Siblings with equal content share a line. Bytes are omitted, because they follow from shapes,
# dtypes and policies. If ranks have different trees, each tree is indented below a line
# ``ranks 0,2-3``. Otherwise, if only some ranks were recorded, a line below ``world_size`` lists
# the recorded ranks.

_Facts = TypeVar("_Facts")


def _write_value(value: bool | float | str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return ",".join(map(escape, value))
    return escape(value) if isinstance(value, str) else str(value).lower()


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(map(unescape, text.split(",")))


def _read_reshard(text: str) -> bool | int:
    if text in {"true", "false"}:
        return text == "true"
    # Reject 1, because it equals True; a group of one rank would be meaningless anyway.
    if not text.isdecimal() or int(text) <= 1:
        raise ValueError("expected reshard_after_forward=true, =false or =<number of ranks>")
    return int(text)


_PRECISION: Final[dict[str, Callable[[str], Any] | None]] = {
    **dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"), unescape),
    "cast_forward_inputs": lambda _: False,
}
# A snapshot has ``<word>=<value>`` for each fact of a unit that differs from its default, in this
# order. This maps each word to the function that reads its value, or to None for a flag, which is
# written without a value.
_UNIT_WORDS: Final[dict[str, Callable[[str], Any] | None]] = {
    "group": int,
    "root": None,
    "shard": unescape,
    "replicate": unescape,
    "reshard_after_forward": _read_reshard,
    **_PRECISION,
    "offload": None,
    "gradient_divide_factor": float,
    "force_sum_reduction": None,
    **dict.fromkeys(("forward_prefetch", "backward_prefetch", "prefetch"), _read_names),
}
# The fields of `UnitFacts` whose names differ from their words in a snapshot, keyed by word.
_FIELDS: Final = {"root": "is_root", "shard": "shard_axis", "replicate": "replicate_axis"}
_DEFAULT: Final = UnitFacts(kind="fsdp2")


def _format_unit(unit: UnitFacts, group: int) -> str:
    """Format a unit's facts; `group` numbers the units of a module from 1."""
    words: list[str] = [unit.kind]
    for name, read in _UNIT_WORDS.items():
        value, default = (
            getattr(
                facts.precision if name in _PRECISION else facts, _FIELDS.get(name, name), group
            )
            for facts in (unit, _DEFAULT)
        )
        if value != (1 if name == "group" else default):
            words.append(name if read is None else f"{name}={_write_value(value)}")
    return " ".join(words)


def _read_unit(content: str) -> tuple[UnitFacts, int]:
    """Read a unit and its number, as `_format_unit` formats them (see Note [Strict reading])."""
    kind, *words = content.split(" ")
    values: dict[str, Any] = {}
    for text in words:
        name, equals, value = text.partition("=")
        read = _UNIT_WORDS.get(name)
        if name not in _UNIT_WORDS or (read is None) is bool(equals):
            raise ValueError(
                f"unknown policy {quoted_part(text)}: expected something like "
                "reshard_after_forward=true"
            )
        values[name] = read is None or read(value)
    group = values.pop("group", 1)
    precision = Precision(**{name: values.pop(name) for name in _PRECISION if name in values})
    facts = {_FIELDS.get(name, name): value for name, value in values.items()}
    return UnitFacts(kind=cast("UnitKind", kind), precision=precision, **facts), group


def _format_parameter(parameter: ParameterFacts) -> str:
    words = [f"{parameter.dtype}[{','.join(map(str, parameter.shape))}]"]
    words += [] if parameter.trainable else ["frozen"]
    words += [] if parameter.managed else ["unmanaged"]
    words += [f"{escape(axis)}={placement}" for axis, placement in parameter.placements]
    words += [f"tied={_write_value(parameter.tied)}"] if parameter.tied else []
    return " ".join(words)


def _read_parameter(content: str) -> ParameterFacts:
    tensor, *words = content.split(" ")
    dtype, _, shape = tensor.removesuffix("]").partition("[")
    tied: tuple[str, ...] = ()
    if words and words[-1].startswith("tied=") and not words[-1].endswith(")"):
        tied = _read_names(words.pop().removeprefix("tied="))
    flags = [word for word in words if word in {"frozen", "unmanaged"}]
    placed = [word.rpartition("=") for word in words[len(flags) :]]
    return ParameterFacts(
        shape=tuple(map(int, shape.split(","))) if shape else (),
        dtype=dtype,
        trainable="frozen" not in flags,
        managed="unmanaged" not in flags,
        placements=tuple((unescape(axis), placement) for axis, _, placement in placed),
        tied=tied,
    )


def format_profile(profile: TreeProfile) -> str:
    """Return a profile as the text of a snapshot that `read_tree` can read."""
    first = header("tree", torch_version=profile.torch_version, backend=profile.backend)
    return "\n".join([first, *_list_lines_below_header(profile)]) + "\n"


def _list_lines_below_header(profile: TreeProfile) -> list[str]:
    """Return all lines of a snapshot except the first."""
    lines = []
    for ranks, facts in profile.trees.items():
        if not ranks:
            return _format_tree_lines(facts, profile.recorded_ranks)
        lines.append(RANKS + write_ranks(ranks))
        lines += [INDENT + line for line in _format_tree_lines(facts)]
    return [*lines, END]


def _format_tree_lines(facts: TreeFacts, recorded: Sequence[int] = ()) -> list[str]:
    """Return a tree's lines below the header; pass `recorded` only if all ranks share the tree."""
    units = (
        line
        for group, units_of_group in sorted(facts.units.items())
        for line in _format_and_fold(units_of_group, partial(_format_unit, group=group))
    )
    parameters = _format_and_fold(facts.parameters, _format_parameter)
    # Totals let `read_tree` detect that a merge lost a line.
    totals = sum(map(len, facts.units.values())), len(facts.parameters)
    return [
        *world_lines(facts.world_size, recorded, facts.mesh_axes),
        *(f"unit {line}" for line in units),
        *(f"parameter {line}" for line in parameters),
        f"total {totals[0]} units, {totals[1]} parameters",
        END,
    ]


def _format_and_fold(facts: Mapping[str, _Facts], content: Callable[[_Facts], str]) -> list[str]:
    names_of: defaultdict[str, list[str | None]] = defaultdict(list)
    for name, fact in facts.items():
        names_of[content(fact)].append(name)
    return folded_lines(names_of)


def read_tree(lines: SnapshotLines) -> TreeProfile:
    """Read the snapshot of a tree, or of one tree per set of ranks (see Note [Strict reading])."""
    if lines.line(2).startswith(RANKS):
        trees = {}
        starts = [number for number, line in enumerate(lines.lines, 1) if line.startswith(RANKS)]
        for start, end in pairwise([*starts, len(lines.lines)]):
            facts, world = _read_tree_and_world(lines.section(start + 1, end - 1))
            with lines.locate_errors(start):
                ranks = read_ranks(lines.line(start).removeprefix(RANKS), world.size)
            trees.update(dict.fromkeys(ranks, facts))
        profile = merge(dict(sorted(trees.items())), torch_version=lines.torch_version)
    else:
        facts, world = _read_tree_and_world(lines)
        profile = TreeProfile(
            trees={(): facts}, recorded_ranks=world.ranks, torch_version=lines.torch_version
        )
    lines.check(_list_lines_below_header(profile))
    return profile


def _read_tree_and_world(lines: SnapshotLines) -> tuple[TreeFacts, World]:
    world = read_world(lines)
    units: defaultdict[int, dict[str, UnitFacts]] = defaultdict(dict)
    parameters: dict[str, ParameterFacts] = {}
    for number, line in enumerate(lines.lines[world.end - 1 : -1], start=world.end):
        word, _, record = line.partition(" ")
        pattern, _, content = record.partition(" ")
        if word == "total":
            break
        with lines.locate_errors(number):
            if word not in {"unit", "parameter"} or not pattern:
                raise ValueError("expected 'unit ...', 'parameter ...' or 'total ...'")
            names = expand(pattern)
            if word == "unit":
                unit, group = _read_unit(content)
                units[group].update(dict.fromkeys(names, unit))
            else:
                parameters.update(dict.fromkeys(names, _read_parameter(content)))
    facts = TreeFacts(
        world_size=world.size, mesh_axes=world.mesh_axes, units=units, parameters=parameters
    )
    return facts, world
