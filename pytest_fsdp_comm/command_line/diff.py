"""``fsdp-comm diff``, and the diff driver for git: explain how snapshots differ."""

from __future__ import annotations

import argparse
import difflib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Final, cast

from pytest_fsdp_comm.comm.explanation.evidence import Evidence
from pytest_fsdp_comm.comm.profile import CommProfile, restrict
from pytest_fsdp_comm.command_line.documents import read_document, summary_lines
from pytest_fsdp_comm.command_line.terminal import (
    DIFFERENT,
    SAME,
    describe_problem,
    print_lines,
    print_note,
    print_problems,
)
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.reports.explanation import Failure, Statement
from pytest_fsdp_comm.snapshots.differences import evidence_of, explain_profiles, kind_of
from pytest_fsdp_comm.snapshots.documents import SnapshotText, body, divergence_of
from pytest_fsdp_comm.snapshots.names import SUFFIX, read_basename
from pytest_fsdp_comm.text.rank_lists import name_ranks

# The path that git passes for a file that does not exist on one side of the diff.
_NOWHERE: Final = "/dev/null"
# Number of arguments that git passes to the driver for a file that was not renamed.
_GIT_ARGUMENTS: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The old and the new text of one file; one of them is None if the file was added or removed.

    Raises:
        SnapshotFormatError: The old or the new text is not a valid snapshot.
    """

    old: SnapshotText | None
    new: SnapshotText | None
    old_path: str
    new_path: str
    """Differs from `old_path` if the file was renamed, or if the user named two files."""
    is_rename: bool = False

    def __post_init__(self) -> None:
        # Parse both sides now, because a later error would keep other pairs from being explained.
        for side in (self.old, self.new):
            _ = side and side.profile

    @property
    def newer(self) -> SnapshotText:
        """The new text, or the old one if the file was removed."""
        return cast("SnapshotText", self.new or self.old)


def run_diff(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm diff``."""
    pairs, problems = _read_pairs(options.old, options.new)
    differs, _ = print_explanations(pairs, with_lines=options.lines)
    return print_problems(problems) or (DIFFERENT if differs else SAME)


def run_git_diff(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm git-diff``, which git starts for each file as ``diff.<driver>.command``."""
    # git passes a path, then the file, hash and mode of the old side and of the new side. After a
    # rename, it adds the new path and a header. For an unmerged file, it passes only the path. If
    # the exit status is not 0, git aborts, so print a broken file's lines without an explanation.
    arguments = options.arguments
    old_path = arguments[0]
    if len(arguments) < _GIT_ARGUMENTS:
        print_lines([f"{old_path}: unmerged; resolve the conflict, or check out one side"])
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
        print_lines([f"no explanation: {describe_problem(problem)}"])
        old_text, new_text = (
            file.read_bytes().decode("utf-8", "replace") if file else None for file in (old, new)
        )
        print_lines(_make_patch(old_text, new_text, old_path, new_path))
    else:
        print_explanations([pair], with_lines=True)
    return SAME


def _read_pairs(old: str, new: str) -> tuple[list[Pair], list[str]]:
    """Pair two files and their trees, or the files of two directories; also return errors."""
    are_directories = [Path(side).is_dir() for side in (old, new)]
    if all(are_directories):
        return _read_pairs_in_directories(old, new)
    if any(are_directories):
        directory, file = (old, new) if are_directories[0] else (new, old)
        raise FsdpCommError(
            f"{directory} is a directory and {file} is not; expected two files or two directories"
        )
    pairs = [_read_pair_of_files(old, new)]
    trees = [_make_tree_path(old), _make_tree_path(new)]
    # Also compare the trees, because they help to explain the communication.
    if trees[0] != old and trees[1] != new and all(Path(tree).is_file() for tree in trees):
        pairs.append(_read_pair_of_files(*trees))
    return pairs, []


def _make_tree_path(name: str) -> str:
    return f"{name.removesuffix(SUFFIX).removesuffix('.json').removesuffix('.tree')}.tree{SUFFIX}"


def _read_pair_of_files(old: str, new: str) -> Pair:
    old_text, new_text = (read_document(Path(name), where=name) for name in (old, new))
    ranks, profile = old_text.profile.recorded_ranks, new_text.profile
    if (old_kind := kind_of(old_text.profile)) != (new_kind := kind_of(profile)):
        raise FsdpCommError(
            f"{old} is a {old_kind} snapshot and {new} is a {new_kind} snapshot; expected two of "
            "the same kind"
        )
    # If the new file has all ranks but the old one does not, compare only the ranks of the old one.
    if ranks and not profile.recorded_ranks and old_text.profile.world_size == profile.world_size:
        of_ranks = (
            restrict(profile, ranks)
            if isinstance(profile, CommProfile)
            else profile.restrict(ranks)
        )
        new_text = SnapshotText.from_profile(of_ranks, where=new)
        scope = f"compares only {name_ranks(ranks)} of {new}, because {old} has no other rank"
        print_note(scope)  # not part of the explanation
    return Pair(old=old_text, new=new_text, old_path=old, new_path=new)


def _read_pairs_in_directories(*names: str) -> tuple[list[Pair], list[str]]:
    sides = [Path(name) for name in names]
    files = [
        {str(file.relative_to(side)) for file in side.rglob(f"*{SUFFIX}") if file.is_file()}
        for side in sides
    ]
    if not any(files):
        raise FsdpCommError(f"neither {names[0]} nor {names[1]} contains a snapshot (*{SUFFIX})")

    def read(path: str, side: int) -> SnapshotText | None:
        where = f"{names[side].rstrip('/')}/{path}"
        return read_document(sides[side] / path, where=where) if path in files[side] else None

    pairs, problems = [], []
    for path in sorted(files[0] | files[1]):
        try:
            pairs.append(Pair(old=read(path, 0), new=read(path, 1), old_path=path, new_path=path))
        except FsdpCommError as problem:
            problems.append(describe_problem(problem))
    return pairs, problems


def print_explanations(
    pairs: Sequence[Pair], *, with_lines: bool = False
) -> tuple[bool, list[Failure]]:
    """Print an explanation of each difference.

    Returns:
        Whether any compared content differs, and the explanations.
    """
    # Group the snapshots by test, because a test's trees help to explain its communication.
    groups: defaultdict[object, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[_make_test_key(pair)].append(pair)
    evidence = {
        test: evidence_of(
            [(pair.old.profile, pair.new.profile) for pair in group if pair.old and pair.new]
        )
        for test, group in groups.items()
    }
    differs = is_next = False
    failures: list[Failure] = []
    for pair in pairs:
        failure, is_change = _explain_pair(pair, evidence[_make_test_key(pair)])
        diverged = [*_list_divergences(pair, has_failure=failure is not None)]
        differs |= is_change or bool(diverged)
        if failure is not None or diverged:
            explained = [] if failure is None else [failure.head, *failure.body]
            print_lines([*([""] if is_next else []), *diverged, *explained])
            is_next = True
            if with_lines:
                print_lines(_make_patch(pair.old, pair.new, pair.old_path, pair.new_path))
            failures += filter(None, [failure])
    return differs, failures


def _list_divergences(pair: Pair, *, has_failure: bool) -> Iterator[str]:
    """Yield a line for each recording of ranks that diverge; snapshots do not contain that.

    A failure already contains the line about the new recording.
    """
    sides = [(pair.old_path, pair.old), *([] if has_failure else [(pair.new_path, pair.new)])]
    for path, side in dict.fromkeys(sides):
        diverged = "" if side is None else divergence_of(side.profile)
        if diverged:
            yield f"{path}: {diverged}"


def _make_test_key(pair: Pair) -> object:
    """Return the key of a test and world size, which is the same for its comm and tree files."""
    path = PurePath(pair.new_path)
    return path.parent, read_basename(path.stem) or path.stem.removesuffix(".tree")


def _explain_pair(pair: Pair, evidence: Evidence | None) -> tuple[Failure | None, bool]:
    """Return an explanation (None if both texts are equal) and whether compared content differs."""
    name = pair.new_path
    if pair.old is None or pair.new is None:
        summary = "; ".join(summary_lines(pair.newer.profile))
        change = "removed" if pair.new is None else "added"
        return Failure.from_error(f"{name}: {change}\n  {summary}"), True
    head = f"{pair.old_path} -> {name}" if pair.old_path != name else name
    if pair.old == pair.new and not pair.is_rename:
        return None, False
    if body(pair.old) == body(pair.new):
        first_line = "only its first line differs, which is not compared"
        change = "renamed, otherwise unchanged" if pair.is_rename else first_line
        return Failure(head=f"{head}: {change}"), pair.is_rename
    failure = explain_profiles((pair.old.profile, pair.new.profile), where=name, evidence=evidence)
    scope = f" ({failure.scope})" if failure.scope else ""
    # Files can differ even if all compared facts are equal, for example if one has fewer ranks.
    nothing = (Statement(severity="rest", text="no compared fact differs"),)
    statements = failure.rows or nothing
    is_change = bool(failure.changes) or pair.is_rename
    return replace(failure, head=f"{head}:{scope}", statements=statements), is_change


def _make_patch(old: str | None, new: str | None, old_path: str, new_path: str) -> Iterator[str]:
    """Return a unified diff that ``git apply`` accepts; the text of a missing file is None."""
    return difflib.unified_diff(
        (old or "").splitlines(),
        (new or "").splitlines(),
        _NOWHERE if old is None else f"a/{old_path}",
        _NOWHERE if new is None else f"b/{new_path}",
        lineterm="",
    )
