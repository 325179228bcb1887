"""``fsdp-comm accept``: takes over what CI received, after showing what it changes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pytest_fsdp_comm.comm.profile import has_further_ranks
from pytest_fsdp_comm.command_line.documents import Document, describe_problem, document_of
from pytest_fsdp_comm.command_line.errors import CommandError
from pytest_fsdp_comm.command_line.stories import Pair, tell, test_of
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.artifacts import RECEIVED, Artifacts
from pytest_fsdp_comm.snapshots.files import read_snapshot, write_atomically
from pytest_fsdp_comm.snapshots.names import SUFFIX
from pytest_fsdp_comm.text.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_fsdp_comm.comm.links import Links
    from pytest_fsdp_comm.command_line.terminal import Printer

Answer = Literal["yes", "no", "all", "quit"]

_ANSWERS: Final[dict[str, Answer]] = {
    **dict.fromkeys(("y", "yes"), "yes"),
    **dict.fromkeys(("n", "no", "s", "skip"), "no"),
    **dict.fromkeys(("a", "all"), "all"),
    **dict.fromkeys(("q", "quit"), "quit"),
}
QUESTION: Final = "accept? [y]es, [n]o (skip), [a]ll, [q]uit: "


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One file that may be accepted."""

    target: Path
    pair: Pair
    text: str
    """What is to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What came of it."""

    written: int
    skipped: int
    refused: int


def accept(  # noqa: PLR0913  # each a choice of the user's
    directory: Path,
    snapshot_dir: Path,
    links: Links,
    printer: Printer,
    *,
    ask: Callable[[], Answer] | None,
    is_dry: bool,
) -> Accepted:
    """Shows what each test received, and writes what is accepted.

    Args:
        directory: As ``--comm-artifacts`` left it.
        snapshot_dir: The directory of the snapshots; absolute. Nothing outside of it is written.
        links: How fast axes are.
        printer: Where stories go.
        ask: Asks for each test; None accepts all.
        is_dry: Whether to write nothing.

    Raises:
        CommandError: The directory holds no artifacts.
    """
    groups: dict[object, list[_Change]] = {}
    refused = 0
    for path in _received(directory):
        try:
            change = _change(Artifacts.of(directory, path), path, snapshot_dir)
        except FsdpCommError as problem:
            refused += 1
            printer.lines([f"{path}: refused", f"  {describe_problem(problem)}", ""])
            continue
        if change is not None:
            groups.setdefault(test_of(change.pair), []).append(change)
    written = skipped = 0
    answer: Answer = "yes" if ask else "all"
    for changes in groups.values():
        for story in tell([change.pair for change in changes], links):
            printer.lines([*story.lines])
        if ask is not None and answer not in {"all", "quit"}:
            answer = ask()
        is_accepted = answer in {"yes", "all"} and not is_dry
        for change in changes if is_accepted else ():
            _write(change, snapshot_dir)
        written += len(changes) * is_accepted
        skipped += len(changes) * (not is_accepted)
        printer.lines([""])
        if answer == "quit":
            skipped = sum(map(len, groups.values())) - written
            break
    return Accepted(written=written, skipped=skipped, refused=refused)


def _received(directory: Path) -> Iterator[Path]:
    """The received files, relative to where they are."""
    received = directory / RECEIVED
    if not received.is_dir():
        raise CommandError(
            f"{directory} has no directory {RECEIVED!r}; expected what pytest --comm-artifacts=DIR "
            "left, unpacked. If no comparison failed, it leaves nothing"
        )
    for file in sorted(received.rglob(f"*{SUFFIX}")):
        # Artifacts may come from a fork: no link of theirs is followed, no odd name printed.
        if file.is_symlink() or not file.is_file() or not str(file).isprintable():
            raise CommandError(f"{str(file)!r} is no plain file; nothing was accepted")
        yield file.relative_to(received)


def _change(artifacts: Artifacts, path: Path, snapshot_dir: Path) -> _Change | None:
    """What accepting a file changes; None if that is done already."""
    target = snapshot_dir / path
    _check_inside(target, snapshot_dir)
    received = _read(artifacts.received)
    expected, current = _read(artifacts.expected), _read(target)
    if received is None or (current is not None and current.text == received.text):
        return None
    if (expected is None) != (current is None) or (
        expected is not None and current is not None and expected.body != current.body
    ):
        raise CommandError(_OTHER_BASE[current is None, expected is None].format(show_path(target)))
    name = show_path(target)
    if current is not None and has_further_ranks(current.profile, received.profile):
        raise CommandError(
            f"{name} was recorded on ranks that CI did not run, and a recording never replaces one "
            "of further ranks. Run CI on all of them, without --comm-backend fake"
        )
    return _Change(
        target=target,
        pair=Pair(old=current, new=received, old_path=name, new_path=name),
        text=str(received.text),
    )


_OTHER_BASE: Final = {
    (False, False): "{} is not the file that CI compared with: it has changed since, or here. "
    "Check out the commit that CI ran, or run CI on this one",
    (False, True): "there is a {} now, and CI had none to compare with. Run CI again",
    (True, False): "CI compared with a {}, which is not here. Check out the commit that CI ran, or "
    "name the directory of the snapshots with --snapshots",
}
"""By whether the file is missing here, and was missing in CI."""


def _check_inside(target: Path, snapshot_dir: Path) -> None:
    # A link in the directory of the snapshots may lead out of it, and so may the file itself.
    real = target.resolve()
    if not real.is_relative_to(snapshot_dir.resolve()):
        raise CommandError(
            f"{target} is {real}, outside of {snapshot_dir}; only snapshots are written"
        )


def _read(path: Path) -> Document | None:
    text = read_snapshot(path, where=show_path(path))
    return None if text is None else document_of(text, where=show_path(path))


def _write(change: _Change, snapshot_dir: Path) -> None:
    _check_inside(change.target, snapshot_dir)
    try:
        change.target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(change.target.resolve(), change.text)
    except OSError as problem:
        raise CommandError(
            f"cannot write {show_path(change.target)} ({problem.strerror or problem}); what was "
            "there is unchanged"
        ) from None


def ask_on_terminal() -> Answer:
    """Asks until the answer is one; the end of the input quits."""
    while True:
        sys.stdout.flush()
        try:
            given = input(QUESTION).strip().lower()
        except EOFError:
            return "quit"
        if given in _ANSWERS:
            return _ANSWERS[given]
