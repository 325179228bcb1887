"""Read and format the lines that both kinds of snapshot share, and report errors in any line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final

from pytest_fsdp_comm.comm.mesh import MeshAxis, axis_of, merge_axes
from pytest_fsdp_comm.errors import SnapshotFormatError, quote_text
from pytest_fsdp_comm.text.fqn import (
    NO_MODULE,
    escape,
    first_fqn,
    fold_fqns,
    natural_key,
    unescape,
)
from pytest_fsdp_comm.text.rank_lists import ranks_or_empty_if_all, read_ranks, write_ranks
from pytest_fsdp_comm.text.words import shell_word

# Note [Strict reading]: a reader parses a file with few checks, formats the result as text again,
# and compares this text with the file. It therefore accepts only files that the plugin itself could
# have written, and an error names the first line that differs. Two valid files never mean the same,
# unless they differ only in the arbitrary text at the end of line 1.

FORMAT_VERSION: Final = 2
"""Increase this if older readers would misread a new snapshot."""

MAX_BYTES: Final = 4 << 20
"""Size limit of a snapshot: eight times GitHub's limit for the diff of one file."""
MAX_WORLD_SIZE: Final = 131_072
"""Largest world size in a snapshot; equal to `pytest_fsdp_comm.options.MAX_SIMULATED`."""

END: Final = "end"
INDENT: Final = "  "
"""Indents each line of a tree that only some ranks have."""
RANKS: Final = "ranks "
_WORLD_SIZE: Final = "world_size "
_MESH: Final = "mesh "
_GROUPS: Final = " groups "

NUMBER: Final = r"[1-9][0-9]{0,17}"
REMEDY: Final = (
    "Nothing was overwritten: restore the file with `git checkout`, or delete it and record it "
    "again with --snapshot-update"
)
# If two lines have a common prefix longer than this, an error about them prints only the last
# `_MAX_COMMON // 2` characters of the prefix.
_MAX_COMMON: Final = 60

_HEADER: Final = re.compile(r"# pytest-fsdp-comm ([1-9][0-9]{0,8}) (comm|tree)(?: \|(.*))?")
_TORCH: Final = re.compile(r" torch ([0-9][0-9A-Za-z.+-]{0,39}),")
_CONFLICT: Final = re.compile(r"^(?:<{7}|\|{7}|={7}|>{7})", re.MULTILINE)


def header(kind: str, *, torch_version: str, backend: str) -> str:
    """Return the first line of a snapshot; `kind` is ``comm`` or ``tree``."""
    return (
        f"# pytest-fsdp-comm {FORMAT_VERSION} {kind} | torch {torch_version}, {backend} "
        "(not compared)"
    )


def line_error(where: str, number: int, problem: str, expected: str) -> SnapshotFormatError:
    """Return an error about one line of a file; its message also says how to recover."""
    return SnapshotFormatError(f"{where}, line {number}: {problem}; expected {expected}. {REMEDY}")


def too_large(where: str, nbytes: int) -> SnapshotFormatError:
    """Return an error about a file that is too large to be a snapshot."""
    expected = f"a snapshot of at most {MAX_BYTES} bytes"
    return line_error(where, 1, f"the file has {nbytes} bytes", expected)


class SnapshotLines:
    """The lines of one snapshot, and errors about them."""

    def __init__(self, text: str, *, where: str) -> None:
        """Check a file's size, its first and last lines, and that it has no merge conflict."""
        self.where = where
        self.before = 0
        """Number of lines that precede this section in the file."""
        if not text.strip():
            raise self.error(1, "the file is empty", "a snapshot")
        if len(text) > MAX_BYTES:
            raise too_large(where, len(text))
        conflict = _CONFLICT.search(text)
        if conflict is not None:
            number = 1 + text.count("\n", 0, conflict.start())
            line = text[conflict.start() :].partition("\n")[0]
            file = shell_word(where)
            raise SnapshotFormatError(
                f"{where}, line {number}: it reads {quote_text(line)}, a merge conflict marker; "
                "expected one side of the conflict. Nothing was overwritten: choose a side with "
                f"`git checkout --ours {file}` or `git checkout --theirs {file}` (if the markers "
                "are already committed, restore the file from an earlier commit: "
                f"`git checkout COMMIT -- {file}`), then run the test; if it fails and the "
                "change is intended, add --snapshot-update"
            )
        self.lines: list[str] = text.split("\n")
        """All lines up to `END`; errors number them from 1."""
        self.torch_version = ""
        """The torch version that recorded the snapshot; empty if the first line has none."""
        self.kind = self._read_header(self.lines[0])
        if self.lines[-2:] != [END, ""]:
            last = len(self.lines) - (self.lines[-1] == "" and len(self.lines) > 1)
            raise self.error(
                last,
                f"the file ends with {quote_text(self.lines[last - 1])}",
                f"{END!r} as the last line, with a newline after it",
            )
        self.lines.pop()

    def _read_header(self, line: str) -> str:
        match = _HEADER.fullmatch(line)
        if match is None:
            with self.locate_errors(1):
                raise ValueError("expected '# pytest-fsdp-comm <version> comm' or '... tree'")
        if match[1] != str(FORMAT_VERSION):
            expected = f"format {FORMAT_VERSION}, which this version of the plugin reads"
            raise self.error(1, f"the snapshot has format {match[1]}", expected)
        version = _TORCH.match(match[3] or "")
        self.torch_version = version[1] if version else ""
        return match[2]

    def line(self, number: int) -> str:
        """Return the line with this number; empty beyond the last line."""
        return self.lines[number - 1] if number <= len(self.lines) else ""

    def section(self, first: int, last: int) -> SnapshotLines:
        """Return lines `first` to `last`, unindented; the line above them becomes their header."""
        section = copy(self)
        section.lines = [line.removeprefix(INDENT) for line in self.lines[first - 2 : last]]
        section.before = self.before + first - 2
        return section

    @contextmanager
    def locate_errors(self, number: int) -> Iterator[None]:
        """Turn a ValueError with ``[<problem>: ]expected <text>`` into a SnapshotFormatError."""
        try:
            yield
        except ValueError as error:
            problem, is_ours, expected = f": {error}".partition(": expected ")
            if not is_ours:  # raised by Python, for example by int()
                problem, expected = "", "a line in the format of snapshots"
            line = quote_text(self.line(number))
            raise self.error(number, f"it reads {line}{problem}", expected) from None

    def error(self, number: int, problem: str, expected: str) -> SnapshotFormatError:
        """Return a `line_error` about a line of this snapshot."""
        return line_error(self.where, self.before + number, problem, expected)

    def check(self, written: Sequence[str]) -> None:
        """Raise SnapshotFormatError if the lines below the first differ from `written`."""
        if self.lines[1:] == [*written]:
            return
        pairs = enumerate(zip_longest(self.lines[1:], written, fillvalue=""), start=2)
        number, (read, line) = next(entry for entry in pairs if entry[1][0] != entry[1][1])
        is_total = "total" in (read.partition(" ")[0], line.partition(" ")[0])
        lost = "; the totals do not match the lines above: one was lost or edited by hand"
        letters = enumerate(zip_longest(read, line))
        same = next(index for index, pair in letters if pair[0] != pair[1])
        cut = same - _MAX_COMMON // 2 if same > _MAX_COMMON else 0
        read, line = (("..." if cut else "") + text[cut:] for text in (read, line))
        problem = f"it reads {quote_text(read)}{lost if is_total else ''}"
        raise self.error(number, problem, quote_text(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """World size, ranks and mesh, from the first lines of a snapshot."""

    size: int
    ranks: tuple[int, ...]
    """The recorded ranks, ascending; empty for all ranks."""
    mesh_axes: tuple[MeshAxis, ...]
    end: int
    """Number of the first line below the world size, ranks and mesh."""

    def read_ranks(self, text: str) -> tuple[int, ...]:
        """Parse a list of ranks; an empty `text` or result means all recorded ranks."""
        ranks = read_ranks(text, self.size) if text else ()
        return ranks_or_empty_if_all(ranks, len(self.ranks) or self.size)


def world_lines(world_size: int, ranks: Sequence[int], axes: Iterable[MeshAxis]) -> list[str]:
    """Return the lines below the header, which `read_world` parses into a `World`."""
    return [
        f"{_WORLD_SIZE}{world_size}",
        *([f"{RANKS}{write_ranks(ranks)}"] if ranks else []),
        *(f"{_MESH}{escape(axis.name)}={axis.layout}{_format_num_groups(axis)}" for axis in axes),
    ]


def _format_num_groups(axis: MeshAxis) -> str:
    return f"{_GROUPS}{axis.num_groups}" if axis.num_groups > 1 else ""


def read_world(lines: SnapshotLines) -> World:
    """Read the lines that `world_lines` returns (see Note [Strict reading])."""
    text = lines.line(2).removeprefix(_WORLD_SIZE)
    size = int(text) if re.fullmatch(NUMBER, text) else 0
    with lines.locate_errors(2):
        if not (lines.line(2).startswith(_WORLD_SIZE) and 0 < size <= MAX_WORLD_SIZE):
            raise ValueError(f"expected 'world_size <N>' with a number from 1 to {MAX_WORLD_SIZE}")
    number = 3
    ranks: tuple[int, ...] = ()
    if lines.line(number).startswith(RANKS):
        with lines.locate_errors(number):
            listed = read_ranks(lines.line(number).removeprefix(RANKS), size)
            ranks = ranks_or_empty_if_all(listed, size)
        number += 1
    axes: list[MeshAxis] = []
    while lines.line(number).startswith(_MESH):
        with lines.locate_errors(number):
            text, _, count = lines.line(number).removeprefix(_MESH).partition(_GROUPS)
            num_groups = int(count) if re.fullmatch(NUMBER, count) else 1
            axes += (replace(axis, num_groups=num_groups) for axis in _read_mesh_axes(text, size))
        number += 1
    return World(size=size, ranks=ranks, mesh_axes=merge_axes(axes), end=number)


def _read_mesh_axes(text: str, world_size: int) -> tuple[MeshAxis, ...]:
    escaped, _, layout = text.rpartition("=")
    name = unescape(escaped)
    shape, _, how = layout.partition(" ")
    kind, _, numbers = how.partition(" ")
    if kind == "ranks":
        groups = numbers.split(" | ")
        return merge_axes(axis_of(name, read_ranks(group, world_size)) for group in groups)
    sizes = [*map(int, shape.split("x"))]
    strides = [*map(int, numbers.split("x"))] if numbers else [1]
    if min(*sizes, *strides) < 1 or math.prod(sizes) > world_size:
        raise ValueError(
            "expected something like '<axis>=<size> stride <stride>', with sizes up to "
            f"{world_size}"
        )
    dims = [dim for dim in zip(sizes, strides, strict=True) if dim[0] > 1]
    return (MeshAxis(name=name, size=math.prod(sizes), dims=tuple(reversed(dims))),)


def append_ranks(content: str, ranks: str) -> str:
    """Append a list of ranks to a line's content; an empty list means all ranks."""
    return f"{content} {RANKS}{ranks}" if ranks else content


def folded_lines(names_of: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Fold names with equal content into patterns; return the patterns' lines, in natural order."""
    lines: list[tuple[tuple[object, ...], str]] = []
    for content, names in names_of.items():
        for pattern in fold_fqns(name for name in names if name is not None):
            key = (False, natural_key(first_fqn(pattern)), content)
            lines.append((key, f"{pattern} {content}"))
        if None in names:
            lines.append(((True, natural_key(""), content), f"{NO_MODULE} {content}"))
    return [line for _, line in sorted(lines)]
