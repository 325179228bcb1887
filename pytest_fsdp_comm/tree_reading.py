"""Reads the snapshot of a sharded tree, and says where it is broken."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from pytest_fsdp_comm.document import END, read_header
from pytest_fsdp_comm.errors import SnapshotFormatError
from pytest_fsdp_comm.events import MeshAxis
from pytest_fsdp_comm.fqn import expand, unescape
from pytest_fsdp_comm.tree import Precision, UnitKind
from pytest_fsdp_comm.tree_facts import ParameterFacts, TreeFacts, UnitFacts

if TYPE_CHECKING:
    from collections.abc import Callable

PRECISION_WORDS: Final = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
"""The element types of a `Precision`, each a word of a unit's line where it is not None."""

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
_TENSOR: Final = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]")
_REMEDY: Final = (
    "Nothing was overwritten: restore the file with `git checkout`, or delete it and record it "
    "anew with --snapshot-update"
)


def total_text(units: int, parameters: int) -> str:
    """What the last line but one says, so that a lost line is noticed."""
    return f"{units} units, {parameters} parameters"


class TreeReader:
    """Reads one document and knows where it is, for the errors."""

    def __init__(self, where: str) -> None:
        """Has read nothing yet; `where` names the file in errors."""
        self.where = where
        self.number = 0
        self.world_size = 0
        self.mesh_axes: tuple[MeshAxis, ...] = ()
        self.units: dict[tuple[str, int], UnitFacts] = {}
        self.parameters: dict[str, ParameterFacts] = {}

    def read(self, text: str) -> TreeFacts:
        """Reads the lines in their order: header, world_size, mesh, units and parameters, total."""
        kind = read_header(text, where=self.where)
        self.number = 1
        if kind != "tree":
            raise self._problem("a snapshot of kind 'tree'", f"one of kind {kind!r}")
        # Not splitlines(): the document knows one line end, and names escape the others.
        lines = text.split("\n")[1:-2]
        read_line: dict[str, Callable[[str], None]] = {
            "world_size": self._read_world_size,
            "mesh": self._read_mesh,
            "unit": self._read_unit,
            "parameter": self._read_parameter,
            "total": self._read_total,
        }
        fixed = {0: "world_size", 1: "mesh", max(2, len(lines) - 1): "total"}
        for place in range(max(len(lines), 3)):
            self.number = place + 2
            line = lines[place] if place < len(lines) else END
            word, _, rest = line.partition(" ")
            expected = fixed.get(place)
            if word not in read_line or (expected or word) != word:
                raise self._problem(f"{expected or 'unit, parameter or total'} ...", line)
            read_line[word](rest)
        return TreeFacts(
            world_size=self.world_size,
            mesh_axes=self.mesh_axes,
            units=self.units,
            parameters=self.parameters,
        )

    def _problem(self, expected: str, got: str) -> SnapshotFormatError:
        return SnapshotFormatError(
            f"{self.where}, line {self.number}: expected {expected}, got {got!r}. {_REMEDY}"
        )

    def _read_world_size(self, rest: str) -> None:
        self.world_size = self._whole(rest, "world_size and a number")

    def _read_mesh(self, rest: str) -> None:
        axes = []
        for word in rest.split(" ") if rest else []:
            name, _, size = word.rpartition("=")
            axes.append(
                MeshAxis(name=self._name(name), size=self._whole(size, "mesh axes such as dp=4"))
            )
        self.mesh_axes = tuple(axes)

    def _read_unit(self, rest: str) -> None:
        pattern, kind, *words = [*rest.split(" "), ""][: max(2, rest.count(" ") + 1)]
        if kind not in get_args(UnitKind):
            raise self._problem(f"one of {', '.join(get_args(UnitKind))} after the unit", kind)
        given: dict[str, Any] = {}
        for word in words:
            key, equals, value = word.partition("=")
            if key not in _UNIT_WORDS or key in given or bool(equals) == (key in _UNIT_FLAGS):
                raise self._problem("a unit's policy such as reshard_after_forward=true", word)
            given[key] = value
        number = self._whole(given.pop("group", "1"), "a number such as group=2")
        unit = UnitFacts(
            kind=cast("UnitKind", kind),
            is_root="root" in given,
            shard_axis=self._optional_name(given.get("shard")),
            replicate_axis=self._optional_name(given.get("replicate")),
            reshard_after_forward=self._reshard(given.get("reshard_after_forward")),
            precision=Precision(
                **{name: given.get(name) for name in PRECISION_WORDS},
                cast_forward_inputs="cast_forward_inputs" not in given,
            ),
            offload="offload" in given,
            forward_prefetch=self._names(given.get("forward_prefetch")),
            backward_prefetch=self._names(given.get("backward_prefetch")),
            prefetch=tuple(given["prefetch"].split(",")) if "prefetch" in given else (),
        )
        for fqn in self._expanded(pattern):
            if (fqn, number) in self.units:
                raise self._problem("each unit once", pattern)
            self.units[fqn, number] = unit

    def _read_parameter(self, rest: str) -> None:
        pattern, tensor, *words = [*rest.split(" "), ""][: max(2, rest.count(" ") + 1)]
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            raise self._problem("a tensor such as float32[64,64] after the parameter", tensor)
        tied: tuple[str, ...] = ()
        if words and words[-1].startswith("tied=") and not words[-1].endswith(")"):
            tied = self._names(words.pop().removeprefix("tied="))
        flags = [word for word in words if word in {"frozen", "unmanaged"}]
        placements = []
        for word in words[len(flags) :]:
            axis, _, placement = word.rpartition("=")
            if not placement.endswith(")"):
                raise self._problem("placements such as dp=Shard(0)", word)
            placements.append((self._name(axis), placement))
        parameter = ParameterFacts(
            shape=tuple(map(int, match[2].split(","))) if match[2] else (),
            dtype=match[1],
            trainable="frozen" not in flags,
            managed="unmanaged" not in flags,
            placements=tuple(placements),
            tied=tied,
        )
        for fqn in self._expanded(pattern):
            if fqn in self.parameters:
                raise self._problem("each parameter once", pattern)
            self.parameters[fqn] = parameter

    def _read_total(self, rest: str) -> None:
        expected = total_text(len(self.units), len(self.parameters))
        if rest != expected:
            raise self._problem(f"total {expected}, as the lines above have", f"total {rest}")

    def _whole(self, text: str, expected: str) -> int:
        if not re.fullmatch(r"[1-9]\d{0,8}", text):
            raise self._problem(expected, text)
        return int(text)

    def _reshard(self, text: str | None) -> bool | int | None:
        if text is None:
            return None
        if text in {"true", "false"}:
            return text == "true"
        return self._whole(text, "reshard_after_forward=true, =false or a number of ranks")

    def _name(self, text: str) -> str:
        try:
            return unescape(text)
        except ValueError as problem:
            raise self._problem("a name", text) from problem

    def _optional_name(self, text: str | None) -> str | None:
        return None if text is None else self._name(text)

    def _names(self, text: str | None) -> tuple[str, ...]:
        return () if text is None else tuple(self._name(part) for part in text.split(","))

    def _expanded(self, pattern: str) -> tuple[str, ...]:
        try:
            return expand(pattern)
        except ValueError as problem:
            raise SnapshotFormatError(
                f"{self.where}, line {self.number}: {problem}. {_REMEDY}"
            ) from problem
