"""``fsdp-comm diff``, and what git starts as a diff driver: explain how snapshots differ."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Final, cast

from pytest_fsdp_comm.comm.explanation.steps import Evidence
from pytest_fsdp_comm.comm.profile import CommProfile, restrict
from pytest_fsdp_comm.command_line.documents import describe_problem, read_document, summary_lines
from pytest_fsdp_comm.command_line.terminal import DIFFERENT, SAME, print_lines, print_problems
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.reports.explanation import FailureText
from pytest_fsdp_comm.snapshots.differences import evidence_of, explain_profiles
from pytest_fsdp_comm.snapshots.documents import SnapshotText, body
from pytest_fsdp_comm.snapshots.names import SUFFIX, read_basename
from pytest_fsdp_comm.text.rank_lists import name_ranks

# What git calls the file of a side that has none.
_NOWHERE: Final = "/dev/null"
# git gives the driver so many arguments for a file that was not renamed.
_GIT_ARGUMENTS: Final = 7


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
        # Now, since a broken file must not end the explanation of all others.
        for side in (self.old, self.new):
            _ = side and side.profile

    @property
    def newer(self) -> SnapshotText:
        """The newer side that there is."""
        return cast("SnapshotText", self.new or self.old)


def run_diff(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm diff``."""
    pairs, problems = _pairs_of(options.old, options.new)
    differs = print_stories(pairs, with_lines=options.lines)
    return print_problems(problems) or (DIFFERENT if differs else SAME)


def run_git_diff(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm git-diff``, which git starts for a file as ``diff.<driver>.command``."""
    # git gives a path, then file, hash and mode of the old side and of the new one; after a rename
    # the new path and a header; a path alone if it is unmerged. Any exit status but 0 ends git's
    # own work, so a broken file is shown as lines.
    arguments = options.arguments
    old_path = arguments[0]
    if len(arguments) < _GIT_ARGUMENTS:
        print_lines([f"{old_path}: unmerged; resolve the conflict, or take a side"])
        return SAME
    new_path = arguments[_GIT_ARGUMENTS] if len(arguments) > _GIT_ARGUMENTS else old_path
    old, new = (None if name == _NOWHERE else Path(name) for name in (arguments[1], arguments[4]))
    try:
        pair = Pair(
            old=read_document(old, where=old_path) if old else None,
            new=read_document(new, where=new_path) if new else None,
            old_path=old_path,
            new_path=new_path,
            is_rename=old_path != new_path,
        )
    except FsdpCommError as problem:
        print_lines([f"no story: {describe_problem(problem)}"])
        was, now = (
            file.read_bytes().decode("utf-8", "replace") if file else None for file in (old, new)
        )
        print_lines(_patch_lines(was, now, old_path, new_path))
    else:
        print_stories([pair], with_lines=True)
    return SAME


def _pairs_of(old: str, new: str) -> tuple[list[Pair], list[str]]:
    """Pair two files and the trees beside them, or two directories; and why others are broken."""
    are_directories = [Path(side).is_dir() for side in (old, new)]
    if all(are_directories):
        return _pairs_in_directories(old, new)
    if any(are_directories):
        one, other = (old, new) if are_directories[0] else (new, old)
        raise FsdpCommError(f"{one} is a directory and {other} is not; expected two of a kind")
    pairs = [_pair_of_files(old, new)]
    trees = [_tree_beside(old), _tree_beside(new)]
    # They explain each other, and a job is judged by both.
    if trees[0] != old and trees[1] != new and all(Path(tree).is_file() for tree in trees):
        pairs.append(_pair_of_files(*trees))
    return pairs, []


def _tree_beside(name: str) -> str:
    return f"{name.removesuffix(SUFFIX).removesuffix('.json').removesuffix('.tree')}.tree{SUFFIX}"


def _pair_of_files(old: str, new: str) -> Pair:
    was, now = (read_document(Path(name), where=name) for name in (old, new))
    ranks, profile = was.profile.recorded_ranks, now.profile
    # One simulated rank is compared with the same one of a job.
    if ranks and not profile.recorded_ranks and was.profile.world_size == profile.world_size:
        of_ranks = (
            restrict(profile, ranks)
            if isinstance(profile, CommProfile)
            else profile.restricted(ranks)
        )
        now = SnapshotText.of(of_ranks, where=new)
        only = f"{new} is compared on {name_ranks(ranks)} alone, as {old} has no other"
        print(f"fsdp-comm: {only}", file=sys.stderr)  # noqa: T201  # beside the story
    return Pair(old=was, new=now, old_path=old, new_path=new)


def _pairs_in_directories(*names: str) -> tuple[list[Pair], list[str]]:
    sides = [Path(name) for name in names]
    files = [
        {str(file.relative_to(side)) for file in side.rglob(f"*{SUFFIX}") if file.is_file()}
        for side in sides
    ]
    if not any(files):
        raise FsdpCommError(f"neither {names[0]} nor {names[1]} holds a snapshot (*{SUFFIX})")

    def read(path: str, place: int) -> SnapshotText | None:
        where = f"{names[place].rstrip('/')}/{path}"
        return read_document(sides[place] / path, where=where) if path in files[place] else None

    pairs, problems = [], []
    for path in sorted(files[0] | files[1]):
        try:
            pairs.append(Pair(old=read(path, 0), new=read(path, 1), old_path=path, new_path=path))
        except FsdpCommError as problem:
            problems.append(describe_problem(problem))
    return pairs, problems


def print_stories(pairs: Sequence[Pair], *, with_lines: bool = False) -> bool:
    """Print what differs; return whether anything that is compared does."""
    # The comm and tree snapshots of one test explain each other.
    groups: defaultdict[object, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[_test_of(pair)].append(pair)
    evidence = {
        test: evidence_of(
            (one.old.profile, one.new.profile) for one in group if one.old and one.new
        )
        for test, group in groups.items()
    }
    is_first, differs = True, False
    for pair in pairs:
        text, is_change = _tell(pair, evidence[_test_of(pair)])
        differs |= is_change
        if text is not None:
            print_lines([*([] if is_first else [""]), text.head, *text.body])
            if with_lines:
                print_lines(_patch_lines(pair.old, pair.new, pair.old_path, pair.new_path))
            is_first = False
    return differs


def _test_of(pair: Pair) -> object:
    """Equal for the comm and tree files of one test at one world size, or of one recording."""
    path = PurePath(pair.new_path)
    return path.parent, read_basename(path.stem) or path.stem.removesuffix(".tree")


def _tell(pair: Pair, evidence: Evidence | None) -> tuple[FailureText | None, bool]:
    """How the sides differ, None if they do not, and whether anything that is compared does."""
    name = pair.new_path
    if pair.old is None or pair.new is None:
        head = f"{name}: {'removed' if pair.new is None else 'added'}"
        summary = f"  {'; '.join(summary_lines(pair.newer.profile))}"
        return FailureText(head=head, changes=(summary,)), True
    head = f"{pair.old_path} -> {name}" if pair.old_path != name else name
    if pair.old == pair.new and not pair.is_rename:
        return None, False
    # All but the first line is compared.
    if body(pair.old) == body(pair.new):
        first_line = "its first line alone, which is not compared"
        what = "renamed, nothing else" if pair.is_rename else first_line
        return FailureText(head=f"{head}: {what}"), pair.is_rename
    difference = explain_profiles(
        (pair.old.profile, pair.new.profile), where=name, evidence=evidence
    )
    text = difference.explanation
    scope = f" ({text.scope})" if text.scope else ""
    # An update may write in other words what compares as equal.
    changes = text.changes if text.body else (difference.text or "nothing that is compared",)
    is_change = bool(difference.changes or difference.text) or pair.is_rename
    return replace(text, head=f"{head}:{scope}", changes=changes, cures=()), is_change


def _patch_lines(old: str | None, new: str | None, old_path: str, new_path: str) -> Iterator[str]:
    """The lines that differ, as ``git apply`` reads them; None is a missing file."""
    return difflib.unified_diff(
        (old or "").splitlines(),
        (new or "").splitlines(),
        _NOWHERE if old is None else f"a/{old_path}",
        _NOWHERE if new is None else f"b/{new_path}",
        lineterm="",
    )
