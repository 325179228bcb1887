"""``fsdp-comm accept``: takes over what CI received, after showing what it changes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias
from urllib.parse import unquote

from pytest_fsdp_comm.comm.profile import has_further_ranks
from pytest_fsdp_comm.command_line.documents import describe_problem
from pytest_fsdp_comm.command_line.project import find_project
from pytest_fsdp_comm.command_line.stories import Pair, tell, test_of
from pytest_fsdp_comm.command_line.terminal import DIFFERENT, SAME, Printer
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.artifacts import RECEIVED, Artifacts
from pytest_fsdp_comm.snapshots.files import read_snapshot, write_atomically
from pytest_fsdp_comm.snapshots.names import (
    ABOVE,
    SUFFIX,
    function_of,
    module_exists,
    named_module,
    read_basename,
)
from pytest_fsdp_comm.snapshots.sources import read_module
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import anchor_of, counted, show_path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from pytest_fsdp_comm.snapshots.documents import SnapshotText

Answer = Literal["yes", "no", "all", "quit"]

_ANSWERS: Final[dict[str, Answer]] = {
    **dict.fromkeys(("y", "yes"), "yes"),
    **dict.fromkeys(("n", "no", "s", "skip"), "no"),
    **dict.fromkeys(("a", "all"), "all"),
    **dict.fromkeys(("q", "quit"), "quit"),
}
QUESTION: Final = "accept? [y]es, [n]o (skip), [a]ll, [q]uit: "


# Note [Artifacts of a fork]
# What CI received may come from anybody's pull request, whose author chose its names, texts and
# links. So no link in it is followed, neither to read nor to compare (`_received`,
# `_check_no_link`), and no name that steers a terminal is printed. A file is written only inside
# the snapshot directory, wherever links of ours lead, which is checked again right before the
# write, as the answer may take long (`_check_inside`); only over the text that CI compared with
# (`_change`); and only for a test that is here (`_check_test`), of its kind and its ranks. What
# fails a check is refused, and the rest goes on.

# The file that may be written, and what it is now beside what CI received.
_Change: TypeAlias = tuple[Path, Pair]


def run(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm accept``."""
    project = find_project(Path.cwd())
    chosen = project.snapshot_dir
    root = project.root
    if options.snapshots:
        chosen = Path(os.path.normpath(Path.cwd() / options.snapshots))
        root = find_project(chosen.parent).root
    # From a directory above the project, new files would land in a place that nothing reads.
    if not chosen.is_dir():
        raise FsdpCommError(
            f"there is no directory {show_path(chosen)}; expected that of the snapshots: run this "
            "in the directory of the project, or name it with --snapshots"
        )
    is_dry = not (options.yes or (sys.stdin.isatty() and sys.stdout.isatty()))
    done = accept(
        Path(options.directory),
        chosen,
        Printer("auto"),
        anchor=anchor_of(chosen, root),
        ask=(lambda: "all") if options.yes else (lambda: "no") if is_dry else ask_on_terminal,
    )
    rest = [
        f"{count} {word}"
        for count, word in ((done.skipped, "left as they are"), (done.refused, "refused"))
        if count
    ]
    print(", ".join([f"{counted(done.written, 'file')} accepted", *rest]))  # noqa: T201  # a program's output
    if is_dry and done.skipped:
        raise FsdpCommError("there is no terminal to ask on; --yes accepts all that is shown above")
    return DIFFERENT if rest else SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What came of it."""

    written: int
    skipped: int
    refused: int


def accept(  # each a choice of the user's
    directory: Path,
    snapshot_dir: Path,
    printer: Printer,
    *,
    anchor: Path,
    ask: Callable[[], Answer],
) -> Accepted:
    """Show what each test received, and write what is accepted, all of it below `snapshot_dir`."""
    # `ask` is not called again after `all`.
    groups, refused = _read_all(directory, snapshot_dir, anchor)
    unanswered = sum(map(len, groups.values()))
    written = skipped = 0
    answer: Answer = "no"
    for changes in groups.values():
        stories = tell([pair for _, pair in changes])
        for (target, pair), story in zip(changes, stories, strict=True):
            printer.lines([*story.lines, _effect(target, pair, snapshot_dir)])
        answer = answer if answer == "all" else ask()
        printer.lines([""])
        if answer == "quit":
            break
        unanswered -= len(changes)
        skipped += len(changes) * (answer == "no")
        for target, pair in changes if answer != "no" else ():
            try:
                _write(target, pair, snapshot_dir)
            except FsdpCommError as problem:
                refused[target.relative_to(snapshot_dir)] = str(problem)
            else:
                written += 1
    # Last, so that refusals are not overlooked.
    for path, why in refused.items():
        printer.lines([f"{path}: refused", f"  {why}", ""])
    return Accepted(written=written, skipped=skipped + unanswered, refused=len(refused))


def _read_all(
    directory: Path, snapshot_dir: Path, anchor: Path
) -> tuple[dict[object, list[_Change]], dict[Path, str]]:
    """The changes of each test, and why which files are refused."""
    groups: dict[object, list[_Change]] = {}
    refused: dict[Path, str] = {}
    texts: dict[Path, SnapshotText] = {}
    for path in _received(directory):
        try:
            _check_test(path, anchor)
            artifacts = Artifacts.of(directory, path)
            _check_no_link(directory, artifacts)
            change = _change(artifacts, snapshot_dir / path, snapshot_dir)
            if change is None:
                continue
            target, pair = change
            _check_alone(target, pair, texts)
        except FsdpCommError as problem:
            refused[path] = describe_problem(problem)
            continue
        groups.setdefault(test_of(pair), []).append(change)
    return groups, refused


def _received(directory: Path) -> Iterator[Path]:
    """The received files, relative to where they are."""
    received = directory / RECEIVED
    if received.is_symlink():
        raise FsdpCommError(
            f"{received} is a link to {received.resolve()}; expected the directory that pytest "
            "--comm-artifacts=DIR left. Nothing was accepted: name the directory that has it"
        )
    if not received.is_dir():
        raise FsdpCommError(
            f"{directory} has no directory {RECEIVED!r}; expected what pytest --comm-artifacts=DIR "
            "left, unpacked. If no comparison failed, it leaves nothing"
        )
    for file in sorted(received.rglob(f"*{SUFFIX}")):
        # See Note [Artifacts of a fork].
        if file.is_symlink() or not file.is_file() or not str(file).isprintable():
            raise FsdpCommError(f"{str(file)!r} is no plain file; nothing was accepted")
        yield file.relative_to(received)


def _change(artifacts: Artifacts, target: Path, snapshot_dir: Path) -> _Change | None:
    """What accepting a file changes; None if that is done already."""
    _check_inside(target, snapshot_dir)
    received = _read(artifacts.received)
    expected, current = _read(artifacts.expected), _read(target)
    if received in (None, current):
        return None
    name = show_path(target)
    # Of a broken file, the broken line says more than that it is out of date.
    pair = Pair(old=current, new=received, old_path=name, new_path=name)
    if _body(expected) != _body(current):
        raise FsdpCommError(_OTHER_BASE[current is None, expected is None].format(name))
    _check_kind_and_ranks(received, current, name)
    return target, pair


def _body(text: SnapshotText | None) -> str | None:
    return None if text is None else text.partition("\n")[2]


# By whether the file is missing here, and was missing in CI.
_OTHER_BASE: Final = {
    (False, False): "{} is not the file that CI compared with: it has changed since, or here. "
    "Check out the commit that CI ran, or run CI on this one",
    (False, True): "there is a {} now, and CI had none to compare with. Run CI again",
    (True, False): "CI compared with a {}, which is not here. Check out the commit that CI ran, or "
    "name the directory of the snapshots with --snapshots",
}


def _check_test(path: Path, anchor: Path) -> None:
    """Refuse a file whose test is not here, which no run would ever read."""
    test = read_basename(path.stem)
    if test is None:
        raise FsdpCommError(
            f"expected the name of a snapshot, <test>.ws<ranks>[.<name>]{SUFFIX}. Accept the "
            "directory as CI left it"
        )
    place = Path(*(".." if part == ABOVE else part for part in path.parent.parts))
    module = named_module(place, anchor)
    if module is None or not module_exists(place, anchor):
        raise FsdpCommError(
            f"expected its test in {show_path(module or anchor / place)}, which does not exist. "
            "Check out the commit that CI ran, or run this in the directory of the project"
        )
    function = function_of(test[0])
    # A notebook, say, is not read.
    if module.is_file() and read_module(module, anchor).find(function) is None:
        # Of a fork, it may hold what steers a terminal.
        shown = unquote(function) if unquote(function).isprintable() else function
        raise FsdpCommError(
            f"expected {shown} in {show_path(module)}, which defines no test of that "
            "name under any condition. Check out the commit that CI ran"
        )


def _check_kind_and_ranks(received: SnapshotText, current: SnapshotText | None, name: str) -> None:
    came = received.lines.kind
    kind = current.lines.kind if current is not None else came
    if came != kind:
        raise FsdpCommError(
            f"{name} is a {kind} snapshot, and CI received a {came} snapshot. If the test compares "
            "another value now, record it here: pytest --snapshot-update with its name"
        )
    _, variant = read_basename(Path(name).stem) or ("", "")
    world_size = int(variant.removeprefix("ws"))
    if world_size == 1:
        # A test without ranks may make a group itself.
        world_size = (current or received).profile.world_size
    if received.profile.world_size != world_size:
        raise FsdpCommError(
            f"expected a recording of {counted(world_size, 'rank')}, as {name} is one, and CI "
            f"received one of {received.profile.world_size}. Accept the directory as CI left it, "
            "or run CI again"
        )
    if current is not None and has_further_ranks(current.profile, received.profile):
        raise FsdpCommError(
            f"{name} was recorded on ranks that CI did not run: on {_ranks(current)}, and CI "
            f"recorded {_ranks(received)}. A recording never replaces one of further ranks: run "
            "CI on all of them, without --comm-backend fake"
        )


def _ranks(text: SnapshotText) -> str:
    ranks = text.profile.recorded_ranks
    return name_ranks(ranks) if ranks else f"all {text.profile.world_size} ranks"


def _check_no_link(directory: Path, artifacts: Artifacts) -> None:
    for path in (artifacts.received, artifacts.expected):
        real = Path(os.path.realpath(path))
        if real != directory.resolve() / path.relative_to(directory):
            raise FsdpCommError(
                f"{path} is reached by a link, to {real}; expected a file that pytest "
                "--comm-artifacts=DIR left. Put the file itself there, or run CI again"
            )


def _check_alone(target: Path, pair: Pair, texts: dict[Path, SnapshotText]) -> None:
    real = target.resolve()
    if texts.setdefault(real, pair.newer) != pair.newer:
        raise FsdpCommError(
            f"another file that CI received goes to {show_path(real)} too, by a link, and "
            "differs from this one. Give each of the tests a file of its own"
        )


def _effect(target: Path, pair: Pair, snapshot_dir: Path) -> str:
    real = target.resolve()
    verb = "adds" if pair.old is None else "overwrites"
    is_link = real != snapshot_dir.resolve() / target.relative_to(snapshot_dir)
    by_link = f", a link to {show_path(real)}" if is_link else ""
    return f"  accepting {verb} {show_path(target)}{by_link}"


def _check_inside(target: Path, snapshot_dir: Path) -> None:
    real = target.resolve()
    if not real.is_relative_to(snapshot_dir.resolve()):
        raise FsdpCommError(
            f"{target} is {real}, outside of {snapshot_dir}; only snapshots are written"
        )


def _read(path: Path) -> SnapshotText | None:
    return read_snapshot(path, where=show_path(path))


def _write(target: Path, pair: Pair, snapshot_dir: Path) -> None:
    _check_inside(target, snapshot_dir)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target.resolve(), str(pair.newer))
    except OSError as problem:
        raise FsdpCommError(
            f"cannot write {show_path(target)} ({problem.strerror or problem}); what was "
            "there is unchanged"
        ) from None


def ask_on_terminal() -> Answer:
    """Ask until the answer is one; the end of the input quits."""
    while True:
        sys.stdout.flush()
        try:
            given = input(QUESTION).strip().lower()
        except EOFError:
            return "quit"
        if given in _ANSWERS:
            return _ANSWERS[given]
