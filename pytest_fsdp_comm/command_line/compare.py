"""``fsdp-comm diff``: the stories between files, directories or revisions of git."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.command_line.documents import (
    NOWHERE,
    describe_problem,
    document_of,
    read_document,
)
from pytest_fsdp_comm.command_line.errors import CommandError
from pytest_fsdp_comm.command_line.git import Repository, Revisions, unknown_revision
from pytest_fsdp_comm.command_line.stories import Pair, diff_lines, tell, unified
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.files import decode_snapshot
from pytest_fsdp_comm.snapshots.names import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.comm.links import Links
    from pytest_fsdp_comm.command_line.documents import Document
    from pytest_fsdp_comm.command_line.git import ChangedFile
    from pytest_fsdp_comm.command_line.terminal import Printer

_GIT_ARGUMENTS: Final = 7
"""Of a file that was not renamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The two sides of a comparison, file by file."""

    pairs: tuple[Pair, ...]
    problems: tuple[str, ...] = ()
    """Of files that could not be read."""


def pairs_of(arguments: Sequence[str], directory: Path) -> Compared:
    """Finds what the arguments of ``diff`` name.

    Args:
        arguments: Two files or directories; or revisions as for ``git diff``, then paths.
        directory: The working directory.

    Raises:
        CommandError: They name neither.
        FsdpCommError: A file is broken.
    """
    names, has_separator, paths = _split(arguments)
    if len(names) == 2 and not has_separator and all(_exists(directory, name) for name in names):  # noqa: PLR2004  # two sides
        return _pairs_on_disk(names, directory)
    is_one_file = len(names) == 1 and not has_separator and (directory / names[0]).is_file()
    if is_one_file:
        # As for git: that file, as it is, against its last commit.
        names, paths = [], names
    repository = Repository(directory)
    revisions, rest = _revisions(repository, names, directory, has_separator=has_separator)
    return _pairs_in_git(repository, revisions, [*rest, *paths])


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return list(arguments), False, []
    place = list(arguments).index("--")
    return list(arguments[:place]), True, list(arguments[place + 1 :])


def _exists(directory: Path, name: str) -> bool:
    return (directory / name).exists()


def _revisions(
    repository: Repository, names: Sequence[str], directory: Path, *, has_separator: bool
) -> tuple[Revisions, list[str]]:
    """The sides, and the names that are paths."""
    rest = list(names)
    if rest and (has_separator or not _exists(directory, rest[0])):
        revisions = repository.revisions(rest[0])
        if revisions is not None:
            return revisions, _paths(rest[1:], directory, has_separator=has_separator)
    sides: list[tuple[str, str]] = []
    while rest and len(sides) < 2:  # noqa: PLR2004  # two sides
        commit = repository.commit(rest[0])
        if commit is None:
            break
        sides.append((commit, rest.pop(0)))
    paths = _paths(rest, directory, has_separator=has_separator)
    if not sides:
        head = repository.commit("HEAD")
        if head is None:
            raise CommandError("this repository has no commit yet; name two files")
        sides = [(head, "HEAD")]
    new = sides[1] if len(sides) > 1 else ("", "the files on disk")
    return Revisions(old=sides[0][0], new=new[0], shown=(sides[0][1], new[1])), paths


def _paths(names: Sequence[str], directory: Path, *, has_separator: bool) -> list[str]:
    for name in names:
        if has_separator:
            raise CommandError(unknown_revision(name))
        # What is gone now may have been there: git then wants a "--" before it.
        if not _exists(directory, name):
            raise CommandError(
                f"{name!r} is neither a file or directory here nor a revision of git; expected "
                "two files, two directories, or revisions such as main..HEAD and then paths. Put "
                "-- before the path of a file that is gone"
            )
    return list(names)


def _pairs_on_disk(names: Sequence[str], directory: Path) -> Compared:
    old, new = names
    sides = (directory / old, directory / new)
    are_directories = [side.is_dir() for side in sides]
    if not any(are_directories):
        was, now = (
            read_document(side, where=name) for side, name in zip(sides, names, strict=True)
        )
        return Compared(pairs=(Pair(old=was, new=now, old_path=old, new_path=new),))
    if not all(are_directories):
        one, other = (old, new) if are_directories[0] else (new, old)
        raise CommandError(f"{one} is a directory and {other} is not; expected two of a kind")
    return pairs_in_directories(names, directory)


def pairs_in_directories(names: Sequence[str], directory: Path) -> Compared:
    """Pairs the files of two directories, of which one may be missing.

    Args:
        names: The older and the newer one.
        directory: The working directory.

    Raises:
        CommandError: There is no snapshot in either.
    """
    sides = [directory / name for name in names]
    found = [
        {str(file.relative_to(side)) for file in side.rglob(f"*{SUFFIX}") if file.is_file()}
        for side in sides
    ]
    if not any(found):
        raise CommandError(f"neither {names[0]} nor {names[1]} holds a snapshot (*{SUFFIX})")

    def read(path: str, place: int) -> Document | None:
        where = f"{names[place].rstrip('/')}/{path}"
        return read_document(sides[place] / path, where=where) if path in found[place] else None

    pairs, problems = [], []
    for path in sorted(found[0] | found[1]):
        try:
            pairs.append(Pair(old=read(path, 0), new=read(path, 1), old_path=path, new_path=path))
        except FsdpCommError as problem:
            problems.append(describe_problem(problem))
    return Compared(pairs=tuple(pairs), problems=tuple(problems))


def _pairs_in_git(repository: Repository, revisions: Revisions, paths: Sequence[str]) -> Compared:
    pairs, problems = [], []
    for changed in repository.changed_files(revisions, paths):
        try:
            pairs.append(_pair_in_git(repository, revisions, changed))
        except FsdpCommError as problem:
            problems.append(describe_problem(problem))
    return Compared(pairs=tuple(pairs), problems=tuple(problems))


def _pair_in_git(repository: Repository, revisions: Revisions, changed: ChangedFile) -> Pair:
    def decoded(content: bytes | None, path: str, revision: str) -> Document | None:
        if content is None:
            return None
        where = f"{revision}:{path}"
        return document_of(decode_snapshot(content, where=where), where=where)

    new: Document | None
    if changed.is_on_disk:
        new = read_document(repository.top / changed.new_path, where=changed.new_path)
    else:
        new = decoded(changed.new, changed.new_path, revisions.shown[1])
    return Pair(
        old=decoded(changed.old, changed.old_path, revisions.shown[0]),
        new=new,
        old_path=changed.old_path,
        new_path=changed.new_path,
        is_rename=changed.old_path != changed.new_path,
    )


def print_stories(
    compared: Compared, links: Links, printer: Printer, *, with_lines: bool = False
) -> bool:
    """Prints what differs; returns whether anything that is compared does."""
    stories = tell(compared.pairs, links)
    is_first = True
    for pair, story in zip(compared.pairs, stories, strict=True):
        if story.lines:
            printer.lines([*([] if is_first else [""]), *story.lines])
            printer.patch(diff_lines(pair) if with_lines else ())
            is_first = False
    return any(story.differs for story in stories)


def print_for_git(arguments: Sequence[str], links: Links, printer: Printer) -> None:
    """Prints what git shows of one file, when it runs this program as ``diff.<driver>.command``.

    A file that is no snapshot is shown as lines: git takes an error for the end of its own work.

    Args:
        arguments: As git gives them: path, then file, hash and mode of the old side and of the new
            one; after a rename the new path and a header. A path alone if it is unmerged.
        links: How fast axes are.
        printer: Where to.
    """
    old_path = new_path = arguments[0]
    if len(arguments) < _GIT_ARGUMENTS:
        printer.lines([f"{old_path}: unmerged; resolve the conflict, or take a side"])
        return
    if len(arguments) > _GIT_ARGUMENTS:
        new_path = arguments[_GIT_ARGUMENTS]
    files = [Path(arguments[1]), Path(arguments[4])]
    try:
        old, new = (
            None if str(file) == NOWHERE else read_document(file, where=path)
            for file, path in zip(files, (old_path, new_path), strict=True)
        )
    except FsdpCommError as problem:
        printer.lines([f"no story: {describe_problem(problem)}"])
        sides = [
            ("", "") if str(file) == NOWHERE else (_lenient(file), path)
            for file, path in zip(files, (old_path, new_path), strict=True)
        ]
        printer.patch(unified(*sides))
        return
    is_rename = old_path != new_path
    pair = Pair(old=old, new=new, old_path=old_path, new_path=new_path, is_rename=is_rename)
    print_stories(Compared(pairs=(pair,)), links, printer, with_lines=True)


def _lenient(file: Path) -> str:
    return file.read_bytes().decode("utf-8", "replace")
