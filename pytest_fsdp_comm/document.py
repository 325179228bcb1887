"""The text of a communication snapshot: one record a line, for people and for ``git diff``.

::

    # pytest-fsdp-comm 1 comm | torch 2.13.0, gloo (not compared)
    world_size 4
    mesh dp=4
    forward layers.{0..3} all_gather[dp] x1 524_288 B
    backward layers.{0..3} unshard x1
    total all_gather[dp] x4 2_097_152 B
    end

Siblings with equal content share a line, with the numbers of one of them. No line depends on the
width of another, so that a change touches the lines that changed and no others. A line that not all
ranks share ends with ``ranks 0,2-3``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.errors import SnapshotFormatError
from pytest_fsdp_comm.events import MeshAxis, Phase
from pytest_fsdp_comm.fqn import NO_MODULE, expand, fold_fqns, natural_key
from pytest_fsdp_comm.profile import (
    CommProfile,
    CommRow,
    RedistributionRow,
    ReshardRow,
    sort_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FORMAT_VERSION: Final = 1
"""Rises when an older reader would misread a snapshot."""

END: Final = "end"
_BYTE: Final = 0xFF

_HEADER: Final = re.compile(r"# pytest-fsdp-comm (?P<version>\d+) (?P<kind>\w+)(?: \|.*)?")
_PHASES: Final = tuple(Phase)
_RANKS: Final = r"(?: ranks (?P<ranks>[\d,-]+))?"
_ROW: Final = re.compile(
    r"(?P<phase>\w+) (?P<names>\S+) (?P<kind>[^\s\[]+)\[(?P<axis>\S*)\] "
    r"x(?P<count>\d+) (?P<nbytes>[\d_]+) B" + _RANKS
)
_RESHARD: Final = re.compile(
    r"(?P<phase>\w+) (?P<names>\S+) (?P<action>unshard|reshard) x(?P<count>\d+)" + _RANKS
)
_REDISTRIBUTION: Final = re.compile(
    r"(?P<phase>\w+) (?P<names>\S+) redistribute (?P<change>\S+) x(?P<count>\d+)" + _RANKS
)


def header(kind: str, *, torch_version: str, backend: str) -> str:
    """The first line of a snapshot of a kind, ``comm`` or ``tree``."""
    return (
        f"# pytest-fsdp-comm {FORMAT_VERSION} {kind} | torch {torch_version}, {backend} "
        "(not compared)"
    )


def read_header(text: str, *, where: str) -> str:
    """Checks the first line and the last of a snapshot.

    Args:
        text: The whole file.
        where: The file's path, for the error.

    Returns:
        The kind: ``comm`` or ``tree``.

    Raises:
        SnapshotFormatError: It is empty, truncated, of a newer format, or no snapshot of ours.
    """
    first = text.partition("\n")[0]
    match = _HEADER.fullmatch(first)
    if not text.strip():
        raise _broken(where, 1, "the file is empty", "a snapshot")
    if match is None:
        raise _broken(where, 1, f"it reads {first[:80]!r}", "'# pytest-fsdp-comm <version> <kind>'")
    if int(match["version"]) > FORMAT_VERSION:
        raise SnapshotFormatError(
            f"{where}: the snapshot has format {match['version']}, this pytest-fsdp-comm reads "
            f"formats up to {FORMAT_VERSION}; upgrade pytest-fsdp-comm, or restore the file with "
            "`git checkout` if the newer format was a mistake"
        )
    lines = text.splitlines()
    if lines[-1] != END or not text.endswith("\n"):
        raise _broken(
            where, len(lines), f"the file ends with {lines[-1][:80]!r}", f"{END!r} as the last line"
        )
    return match["kind"]


def format_profile(profile: CommProfile) -> str:
    """Writes a profile as a snapshot; `parse_profile` reads it."""
    lines = [header("comm", torch_version=profile.torch_version, backend=profile.backend)]
    lines.append(f"world_size {profile.world_size}")
    axes = (f"{_word(axis.name)}={axis.size}" for axis in profile.mesh_axes)
    lines.append(" ".join(("mesh", *axes)))
    for phase in _PHASES:
        lines += _phase_lines(profile, phase)
    lines += [f"total {_content(row)}" for row in profile.totals()]
    lines.append(END)
    return "\n".join(lines) + "\n"


def _phase_lines(profile: CommProfile, phase: Phase) -> list[str]:
    """A phase's lines: each group of rows with equal content folds its names."""
    groups: defaultdict[tuple[int, str], list[str | None]] = defaultdict(list)
    sections: tuple[Sequence[Any], ...] = (
        profile.rows,
        profile.reshards,
        profile.redistributions,
    )
    for section, rows in enumerate(sections):
        for row in rows:
            if row.phase is phase:
                groups[section, _content(row) + _written_ranks(row.ranks)].append(row.key[1])
    entries: list[tuple[Any, str]] = []
    for (section, content), names in groups.items():
        named = [name for name in names if name is not None]
        for pattern in fold_fqns(named):
            key = (section, False, natural_key(expand(pattern)[0]), content)
            entries.append((key, f"{phase} {pattern} {content}"))
        if len(named) < len(names):
            key = (section, True, natural_key(""), content)
            entries.append((key, f"{phase} {NO_MODULE} {content}"))
    return [line for _, line in sorted(entries)]


def _content(row: Any) -> str:
    if isinstance(row, CommRow):
        return f"{_word(row.kind)}[{_word(row.axis)}] x{row.count} {row.nbytes:_} B"
    if isinstance(row, ReshardRow):
        return f"{row.action} x{row.count}"
    return f"redistribute {_word(row.change)} x{row.count}"


def _word(text: str) -> str:
    """Keeps a name from a user's mesh in one word of a line."""
    return re.sub(
        r"[\s\[\]%]",
        lambda match: (
            f"%{ord(match[0]):02X}" if ord(match[0]) <= _BYTE else f"%u{ord(match[0]):04X}"
        ),
        text,
    )


def _unword(text: str) -> str:
    return re.sub(
        r"%(?:u([0-9A-F]{4})|([0-9A-F]{2}))",
        lambda match: chr(int(match[1] or match[2], 16)),
        text,
    )


def _written_ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    written = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f" ranks {','.join(written)}"


def parse_profile(text: str, *, where: str = "snapshot") -> CommProfile:
    """Reads what `format_profile` wrote.

    Args:
        text: The whole file.
        where: The file's path, for errors.

    Raises:
        SnapshotFormatError: A line is not as `format_profile` writes it; the text says which.
    """
    kind = read_header(text, where=where)
    if kind != "comm":
        raise _broken(where, 1, f"it is a snapshot of kind {kind!r}", "one of kind 'comm'")
    lines = text.splitlines()
    world_size = _read_world_size(lines, where)
    axes = _read_mesh(lines, where)
    rows: list[CommRow] = []
    reshards: list[ReshardRow] = []
    redistributions: list[RedistributionRow] = []
    totals = []
    for number, line in enumerate(lines[3:-1], start=4):
        if line.startswith("total "):
            totals.append(line)
            continue
        try:
            parsed = list(_read_rows(line))
        except ValueError as error:
            raise _broken(
                where, number, str(error), "a record such as a newer update writes"
            ) from None
        if not parsed:
            expected = "'<phase> <module> <collective>[<axis>] x<count> <bytes> B'"
            raise _broken(where, number, f"it reads {line[:120]!r}", expected)
        target: Any = {CommRow: rows, ReshardRow: reshards}.get(type(parsed[0]), redistributions)
        target += parsed
    profile = CommProfile(
        world_size=world_size,
        mesh_axes=axes,
        rows=sort_rows(rows),
        reshards=sort_rows(reshards),
        redistributions=sort_rows(redistributions),
    )
    expected_totals = [f"total {_content(row)}" for row in profile.totals()]
    if totals != expected_totals:
        raise _broken(
            where,
            len(lines) - 1,
            "the totals do not fit the records; a line was lost, or edited by hand",
            "; ".join(expected_totals) or "no totals",
        )
    return profile


def _read_world_size(lines: Sequence[str], where: str) -> int:
    match = re.fullmatch(r"world_size (\d+)", lines[1] if len(lines) > 1 else "")
    if match is None:
        raise _broken(where, 2, f"it reads {lines[1:2]}", "'world_size <N>'")
    return int(match[1])


def _read_mesh(lines: Sequence[str], where: str) -> tuple[MeshAxis, ...]:
    word, *axes = lines[2].split(" ") if len(lines) > 2 else [""]  # noqa: PLR2004  # the third line
    pairs = [re.fullmatch(r"(\S+)=(\d+)", axis) for axis in axes]
    if word != "mesh" or not all(pairs):
        raise _broken(where, 3, f"it reads {lines[2:3]}", "'mesh <axis>=<size> ...'")
    return tuple(
        MeshAxis(name=_unword(pair[1]), size=int(pair[2])) for pair in pairs if pair is not None
    )


def _read_rows(line: str) -> Iterable[Any]:
    """The rows of one line; none if it is no record.

    Raises:
        ValueError: It looks like a record, but a part of it does not make sense.
    """
    for pattern, make in (
        (_ROW, _comm_row),
        (_RESHARD, _reshard_row),
        (_REDISTRIBUTION, _move_row),
    ):
        match = pattern.fullmatch(line)
        if match is not None:
            if match["phase"] not in _PHASES:
                raise ValueError(f"there is no phase {match['phase']!r}")
            names: Sequence[str | None] = (
                [None] if match["names"] == NO_MODULE else expand(match["names"])
            )
            for name in names:
                yield make(match, name)
            return


def _common(match: re.Match[str]) -> dict[str, Any]:
    return {
        "phase": Phase(match["phase"]),
        "count": int(match["count"]),
        "ranks": _read_ranks(match["ranks"]),
    }


def _comm_row(match: re.Match[str], name: str | None) -> CommRow:
    return CommRow(
        owner=name,
        kind=_unword(match["kind"]),
        axis=_unword(match["axis"]),
        nbytes=int(match["nbytes"]),
        **_common(match),
    )


def _reshard_row(match: re.Match[str], name: str | None) -> ReshardRow:
    return ReshardRow(module=name or "", action=match["action"], **_common(match))


def _move_row(match: re.Match[str], name: str | None) -> RedistributionRow:
    return RedistributionRow(owner=name, change=_unword(match["change"]), **_common(match))


def _read_ranks(text: str | None) -> tuple[int, ...]:
    ranks: list[int] = []
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError(f"bad ranks {text!r}")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)


def _broken(where: str, line: int, came: str, expected: str) -> SnapshotFormatError:
    return SnapshotFormatError(
        f"{where}, line {line}: {came}; expected {expected}. Nothing was overwritten: restore the "
        "file with `git checkout`, or delete it and record it anew with --snapshot-update"
    )
