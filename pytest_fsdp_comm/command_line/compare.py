"""``fsdp-comm diff``: the stories between files, directories or revisions of git."""

from __future__ import annotations

import re
import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from pytest_fsdp_comm.comm.profile import CommProfile, restrict
from pytest_fsdp_comm.command_line.documents import NOWHERE, describe_problem, read_document
from pytest_fsdp_comm.command_line.git import Repository, unknown_revision
from pytest_fsdp_comm.command_line.stories import Pair, cost_table, patch_lines, tell
from pytest_fsdp_comm.command_line.terminal import DIFFERENT, SAME, Printer, print_problems
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.documents import SnapshotText
from pytest_fsdp_comm.snapshots.files import decode_snapshot
from pytest_fsdp_comm.snapshots.names import SUFFIX
from pytest_fsdp_comm.text.rank_lists import name_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    from pytest_fsdp_comm.command_line.git import ChangedFile

# What to compare, and why other files could not be read.
Pairs: TypeAlias = tuple[list[Pair], list[str]]

_File = TypeVar("_File")

# Of a file that was not renamed.
_GIT_ARGUMENTS: Final = 7
_RANGE: Final = re.compile(r"(?P<old>.*?)(?P<dots>\.{2,3})(?P<new>.*)")
_HEAD: Final = "HEAD"


def run_diff(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm diff``."""
    pairs, problems = pairs_of([*options.sides, *options.rest])
    differs = _print_stories(pairs, Printer(options.color), with_lines=options.lines)
    return print_problems(problems) or (DIFFERENT if differs else SAME)


def pairs_of(arguments: Sequence[str]) -> Pairs:
    """Find what the arguments of ``diff`` name: files, directories, or revisions and then paths."""
    has_separator = "--" in arguments
    place = list(arguments).index("--") if has_separator else len(arguments)
    names, paths = list(arguments[:place]), list(arguments[place + 1 :])
    if not has_separator:
        if len(names) == 2 and all(Path(name).exists() for name in names):  # noqa: PLR2004  # two sides
            return _pairs_on_disk(names)
        if len(names) == 1 and Path(names[0]).is_file():
            # As for git: that file, as it is, against its last commit.
            names, paths = [], names
    return _pairs_in_git(names, paths, has_separator=has_separator)


def _pairs_in_git(names: Sequence[str], paths: Sequence[str], *, has_separator: bool) -> Pairs:
    repository = Repository()
    is_path = bool(names) and not has_separator and Path(names[0]).exists()
    found = _RANGE.fullmatch(names[0]) if names and not is_path else None
    if found:
        shown, rest = [found["old"] or _HEAD, found["new"] or _HEAD], names[1:]
        commits = [repository.known_commit(name) for name in shown]
        if found["dots"] == "...":
            base = repository.merge_base(*commits)
            if base is None:
                raise FsdpCommError(f"{shown[0]} and {shown[1]} have no common ancestor in git")
            commits[0] = base
    else:
        known = takewhile(bool, map(repository.commit, names[:2]))
        commits = [commit for commit in known if commit]
        shown, rest = list(names[: len(commits)]), names[len(commits) :]
    _check_paths(rest, has_separator=has_separator)
    if not commits:
        head = repository.commit(_HEAD)
        if head is None:
            raise FsdpCommError("this repository has no commit yet; name two files")
        commits, shown = [head], [_HEAD]

    def read(content: bytes | Path | None, path: str, revision: str) -> SnapshotText | None:
        if isinstance(content, Path):
            return read_document(content, where=path)
        where = f"{revision}:{path}"
        return None if content is None else decode_snapshot(content, where=where)

    def pair_of(changed: ChangedFile) -> Pair:
        return Pair(
            old=read(changed.old, changed.old_path, shown[0]),
            new=read(changed.new, changed.new_path, shown[-1]),
            old_path=changed.old_path,
            new_path=changed.new_path,
            is_rename=changed.old_path != changed.new_path,
        )

    return _read_all(repository.changed_files(commits, [*rest, *paths]), pair_of)


def _read_all(files: Iterable[_File], pair_of: Callable[[_File], Pair]) -> Pairs:
    pairs, problems = [], []
    for file in files:
        try:
            pairs.append(pair_of(file))
        except FsdpCommError as problem:
            problems.append(describe_problem(problem))
    return pairs, problems


def _check_paths(names: Sequence[str], *, has_separator: bool) -> None:
    for name in names:
        if has_separator:
            raise unknown_revision(name)
        # What is gone now may have been there: git then wants a "--" before it.
        if not Path(name).exists():
            raise FsdpCommError(
                f"{name!r} is neither a file or directory here nor a revision of git; expected "
                "two files, two directories, or revisions such as main..HEAD and then paths. Put "
                "-- before the path of a file that is gone"
            )


def _pairs_on_disk(names: Sequence[str]) -> Pairs:
    old, new = names
    sides = [Path(name) for name in names]
    are_directories = [side.is_dir() for side in sides]
    if all(are_directories):
        return pairs_in_directories(names)
    if any(are_directories):
        one, other = (old, new) if are_directories[0] else (new, old)
        raise FsdpCommError(f"{one} is a directory and {other} is not; expected two of a kind")
    pairs = [_pair_of(old, new)]
    trees = [_tree_beside(name) for name in names]
    # They explain each other, and a job is judged by both.
    if trees[0] != old and trees[1] != new and all(Path(tree).is_file() for tree in trees):
        pairs.append(_pair_of(*trees))
    return pairs, []


def _tree_beside(name: str) -> str:
    return f"{name.removesuffix(SUFFIX).removesuffix('.json').removesuffix('.tree')}.tree{SUFFIX}"


def _pair_of(old: str, new: str) -> Pair:
    was, now = (read_document(Path(name), where=name) for name in (old, new))
    ranks, profile = was.profile.recorded_ranks, now.profile
    # One simulated rank is compared with the same one of a job.
    if ranks and not profile.recorded_ranks and was.profile.world_size == profile.world_size:
        of_ranks = (
            restrict(profile, ranks)
            if isinstance(profile, CommProfile)
            else (profile.restricted(ranks))
        )
        now = SnapshotText.of(of_ranks, where=new)
        only = f"{new} is compared on {name_ranks(ranks)} alone, as {old} has no other"
        print(f"fsdp-comm: {only}", file=sys.stderr)  # noqa: T201  # beside the story
    return Pair(old=was, new=now, old_path=old, new_path=new)


def pairs_in_directories(names: Sequence[str]) -> Pairs:
    """Pair the files of an older and a newer directory, one of which may be missing."""
    sides = [Path(name) for name in names]
    found = [
        {str(file.relative_to(side)) for file in side.rglob(f"*{SUFFIX}") if file.is_file()}
        for side in sides
    ]
    if not any(found):
        raise FsdpCommError(f"neither {names[0]} nor {names[1]} holds a snapshot (*{SUFFIX})")

    def read(path: str, place: int) -> SnapshotText | None:
        where = f"{names[place].rstrip('/')}/{path}"
        return read_document(sides[place] / path, where=where) if path in found[place] else None

    def pair_of(path: str) -> Pair:
        return Pair(old=read(path, 0), new=read(path, 1), old_path=path, new_path=path)

    return _read_all(sorted(found[0] | found[1]), pair_of)


def _print_stories(pairs: Sequence[Pair], printer: Printer, *, with_lines: bool = False) -> bool:
    """Print what differs; return whether anything that is compared does."""
    stories = tell(pairs)
    is_first = True
    for pair, story in zip(pairs, stories, strict=True):
        if story.lines:
            printer.lines([*([] if is_first else [""]), *story.lines])
            if with_lines:
                printer.patch(patch_lines(pair.old, pair.new, pair.old_path, pair.new_path))
            is_first = False
    table = cost_table(pairs)
    printer.lines([*[""][: len(table)], *table])
    return any(story.differs for story in stories)


def run_git_diff(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm git-diff``, what git starts for a file as ``diff.<driver>.command``."""
    # git gives a path, then file, hash and mode of the old side and of the new one; after a rename
    # the new path and a header; a path alone if it is unmerged. It takes an exit status other than
    # 0 for the end of its own work, so a file that is no snapshot is shown as lines.
    printer, arguments = Printer("auto"), options.arguments
    old_path = arguments[0]
    if len(arguments) < _GIT_ARGUMENTS:
        printer.lines([f"{old_path}: unmerged; resolve the conflict, or take a side"])
        return SAME
    new_path = arguments[_GIT_ARGUMENTS] if len(arguments) > _GIT_ARGUMENTS else old_path
    old_file, new_file = (
        None if name == NOWHERE else Path(name) for name in (arguments[1], arguments[4])
    )
    try:
        pair = Pair(
            old=read_document(old_file, where=old_path) if old_file else None,
            new=read_document(new_file, where=new_path) if new_file else None,
            old_path=old_path,
            new_path=new_path,
            is_rename=old_path != new_path,
        )
    except FsdpCommError as problem:
        printer.lines([f"no story: {describe_problem(problem)}"])
        old, new = (
            file.read_bytes().decode("utf-8", "replace") if file else None
            for file in (old_file, new_file)
        )
        printer.patch(patch_lines(old, new, old_path, new_path))
    else:
        _print_stories([pair], printer, with_lines=True)
    return SAME
