"""Tells how documents differ, file by file; those of one test explain each other."""

from __future__ import annotations

import difflib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, cast

from pytest_fsdp_comm.comm.cost import cost_of_change
from pytest_fsdp_comm.comm.profile import CommProfile, comparable
from pytest_fsdp_comm.command_line.documents import NOWHERE
from pytest_fsdp_comm.reports.explanation import CURE
from pytest_fsdp_comm.reports.html.sides import cost_rows
from pytest_fsdp_comm.snapshots.differences import evidence_of, explain_profiles
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.names import read_basename
from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.text.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_fsdp_comm.comm.evidence import Evidence
    from pytest_fsdp_comm.reports.html.sides import CostRow
    from pytest_fsdp_comm.snapshots.documents import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two sides of one file; at least one is there, and each can be read to its end.

    Raises:
        SnapshotFormatError: One is broken.
    """

    old: SnapshotText | None
    new: SnapshotText | None
    old_path: str
    new_path: str
    """As `old_path`, unless the file was renamed, or two files were named."""
    is_rename: bool = False

    def __post_init__(self) -> None:
        """Read what would be read later, where a broken file would end the stories of all."""
        for side in (self.old, self.new):
            _ = side and side.profile

    @property
    def newer(self) -> SnapshotText:
        """The newer side that there is."""
        return cast("SnapshotText", self.new or self.old)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """How the sides of a pair differ."""

    lines: tuple[str, ...]
    """The first names the file; empty if there is nothing to tell."""
    differs: bool
    """Whether anything that is compared does."""


def tell(pairs: Sequence[Pair]) -> list[Story]:
    """Tell how each pair differs; the comm and tree snapshots of one test explain each other."""
    groups: defaultdict[object, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[test_of(pair)].append(pair)
    stories: dict[int, Story] = {}
    for group in groups.values():
        profiles = [(pair.old.profile, pair.new.profile) for pair in group if pair.old and pair.new]
        evidence = evidence_of(profiles)
        stories |= {id(pair): _tell(pair, evidence) for pair in group}
    return [stories[id(pair)] for pair in pairs]


def cost_table(pairs: Sequence[Pair]) -> list[str]:
    """What changed tests send and hold, one below the other; empty for fewer than two."""
    rows = [("bytes", "", "peak gathered", "", "snapshot")]
    for pair in pairs:
        sides = [side.profile for side in (pair.old, pair.new) if side is not None]
        match sides:
            case [CommProfile() as old, CommProfile() as new] if old != new:
                nbytes, peak = cost_rows(cost_of_change(*comparable(old, new)))[-2:]
                rows.append((*_words(nbytes), *_words(peak), pair.new_path))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return lines if len(rows) > 2 else []  # noqa: PLR2004  # the head, and one


def _words(row: CostRow) -> tuple[str, str]:
    if row.change:
        return f"{row.before} -> {row.after}", row.change
    return row.after, "unchanged"


def test_of(pair: Pair) -> object:
    """Equal for the comm and tree files of one test at one world size, or of one recording."""
    path = PurePath(pair.new_path)
    return path.parent, read_basename(path.stem) or path.stem.removesuffix(".tree")


def _tell(pair: Pair, evidence: Evidence | None) -> Story:
    name = pair.new_path
    if pair.old is None or pair.new is None:
        verb = "removed" if pair.new is None else "added"
        summary = "; ".join(summary_lines(pair.newer.profile))
        return Story(lines=(f"{name}: {verb}", f"  {summary}"), differs=True)
    head = f"{pair.old_path} -> {name}" if pair.old_path != name else name
    if pair.old == pair.new and not pair.is_rename:
        return Story(lines=(), differs=False)
    # All but the first line is compared.
    if pair.old.partition("\n")[2] == pair.new.partition("\n")[2]:
        first_line = "its first line alone, which is not compared"
        what = "renamed, nothing else" if pair.is_rename else first_line
        return Story(lines=(f"{head}: {what}",), differs=pair.is_rename)
    difference = explain_profiles(
        (pair.old.profile, pair.new.profile), where=name, evidence=evidence
    )
    explanation = difference.explanation
    body = [line for line in explanation.full[1:] if not line.startswith(CURE)]
    if not body:
        # An update may write in other words what compares as equal.
        body = [f"  {difference.text or 'nothing that is compared'}"]
    scope = f" ({explanation.scope})" if explanation.scope else ""
    differs = bool(difference.changes or difference.text) or pair.is_rename
    return Story(lines=(f"{head}:{scope}", *body), differs=differs)


def summary_lines(profile: Profile) -> Iterator[str]:
    """A snapshot in a few statements."""
    yield counted(profile.world_size, "rank")
    if isinstance(profile, CommProfile):
        for total in profile.totals():
            of_all = f" of {total.num_ranks} ranks together" if total.num_ranks > 1 else ""
            has_size = total.nbytes or total.unsized
            nbytes = f", {show_nbytes(total.nbytes, total.unsized)}" if has_size else ""
            yield f"{total.count} {total.kind}[{total.axis}]{nbytes}{of_all}"
        if profile.peaks:
            yield f"peak gathered {show_nbytes(max(peak.nbytes for peak in profile.peaks))}"
    elif profile.common is None:
        yield f"{len(profile.trees)} different trees"
    else:
        yield counted(sum(map(len, profile.common.units.values())), "unit")
        yield counted(len(profile.common.parameters), "parameter")


def patch_lines(old: str | None, new: str | None, old_path: str, new_path: str) -> Iterator[str]:
    """Yield the lines that differ, as ``git apply`` reads them; None is a missing file."""
    return difflib.unified_diff(
        (old or "").splitlines(),
        (new or "").splitlines(),
        NOWHERE if old is None else f"a/{old_path}",
        NOWHERE if new is None else f"b/{new_path}",
        lineterm="",
    )
