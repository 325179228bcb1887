"""The program ``fsdp-comm``: its arguments, its errors, its exit statuses.

argparse, as git starts the program for every file that it shows: over an empty interpreter it costs
7 ms, click 29 and typer 75 (CPU, Python 3.11), and there is nothing here that only they can do.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from pytest_fsdp_comm.command_line.project import find_project
from pytest_fsdp_comm.command_line.terminal import Printer, When
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.text.counts import counted
from pytest_fsdp_comm.text.paths import anchor_of, show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_fsdp_comm.comm.events import Recording

SAME: Final = 0
DIFFERENT: Final = 1
FAILED: Final = 2
"""As diff(1): nothing differs, something does, or it could not be found out."""

_DIFF = """\
tell how snapshots differ: what a change costs, what changed and why

  fsdp-comm diff                     the last commit and the files on disk
  fsdp-comm diff main                a revision and the files on disk
  fsdp-comm diff main..HEAD [PATH]   two revisions; main...HEAD from where they parted
  fsdp-comm diff HEAD~1 HEAD [PATH]  the same
  fsdp-comm diff OLD NEW             two snapshots, recordings (.json) or directories

exit status: 0 if nothing that is compared differs, 1 if something does, 2 for errors
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        arguments: Without the program's name; None for those of the process.

    Returns:
        The exit status.
    """
    # A file's name may be no UTF-8, and a C locale no UTF-8 at all.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]  # a text stream
    given = list(sys.argv[1:] if arguments is None else arguments)
    # argparse drops a "--", which tells paths from revisions, and pytest's options from ours.
    end = (
        given.index("--")
        if given[:1] in (["diff"], ["report"], ["audit"]) and "--" in given
        else len(given)
    )
    options = _parser().parse_args(given[:end], argparse.Namespace(rest=given[end:]))
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        status = run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has read enough; Python must not complain of it again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return 130
    except FsdpCommError as problem:
        from pytest_fsdp_comm.command_line.documents import describe_problem  # noqa: PLC0415  # as below

        print(f"fsdp-comm: {describe_problem(problem)}", file=sys.stderr)  # noqa: T201  # an error's place
        return FAILED
    return status


# Each command imports what it needs when it runs.


def _show(options: argparse.Namespace) -> int:
    from pytest_fsdp_comm.command_line.show import show_file  # noqa: PLC0415  # as above

    printer = Printer("never")
    for number, name in enumerate(options.files):
        shown = show_file(Path(name), find_project(Path(name).absolute().parent).links)
        several = [*([""] if number else []), f"{name}:"] if len(options.files) > 1 else []
        printer.lines([*several, *shown])
    return SAME


def _diff(options: argparse.Namespace) -> int:
    from pytest_fsdp_comm.command_line.compare import pairs_of, print_stories  # noqa: PLC0415  # as above

    project = find_project(Path.cwd())
    pairs, problems = pairs_of([*options.sides, *options.rest], Path.cwd())
    printer = Printer(options.color)
    differs = print_stories(pairs, project.links, printer, with_lines=options.lines)
    return _failed(problems) or (DIFFERENT if differs else SAME)


def _failed(problems: Sequence[str]) -> int:
    """Prints problems with single files; returns the exit status if there are any, else 0."""
    for problem in problems:
        print(f"fsdp-comm: {problem}", file=sys.stderr)  # noqa: T201  # an error's place
    return FAILED if problems else SAME


def _accept(options: argparse.Namespace) -> int:
    from pytest_fsdp_comm.command_line.accept import accept, ask_on_terminal  # noqa: PLC0415  # as above

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
        project.links,
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


def _audit(options: argparse.Namespace) -> int:
    from pytest_fsdp_comm.command_line.audit import audit, collect  # noqa: PLC0415  # as above

    lines, has_faults = audit(list(collect([*options.arguments, *options.rest[1:]], options.sizes)))
    Printer("never").lines(lines)
    return DIFFERENT if has_faults else SAME


def _report(options: argparse.Namespace) -> int:
    from pytest_fsdp_comm.command_line.report import report, sides_of  # noqa: PLC0415  # as above

    pairs, problems = sides_of([*options.sides, *options.rest], Path.cwd())
    output = Path(options.output)
    command = shlex.join(["fsdp-comm", "report", *options.sides, *options.rest])
    try:
        pages = report(pairs, find_project(Path.cwd()).links, output, command=command)
    except OSError as error:
        raise FsdpCommError(f"cannot write {output} ({error.strerror or error})") from None
    status = _failed(problems)
    print(f"{output / 'index.html'}: {counted(pages, 'test')}")  # noqa: T201  # a program's output
    return status


def _trace(options: argparse.Namespace) -> int:
    from pytest_fsdp_comm.command_line.documents import read_json, sort_ranks  # noqa: PLC0415  # as above
    from pytest_fsdp_comm.reports.trace import dump_trace  # noqa: PLC0415  # as above

    recordings: list[Recording] = []
    for name in options.files:
        saved = read_json(Path(name), where=name)
        if not isinstance(saved, list):
            raise FsdpCommError(f"{name}: expected a recording, got a tree")
        recordings += saved
    recordings = sort_ranks(recordings, where=", ".join(options.files))
    first = Path(options.files[0])
    output = Path(options.output) if options.output else first.with_suffix(".trace.json")
    try:
        output.write_text(dump_trace(recordings), encoding="utf-8")
    except OSError as problem:
        raise FsdpCommError(f"cannot write {output} ({problem.strerror or problem})") from None
    print(f"{output}: open it at https://ui.perfetto.dev")  # noqa: T201  # a program's output
    return SAME


def _git_diff(options: argparse.Namespace) -> int:
    from pytest_fsdp_comm.command_line.compare import print_for_git  # noqa: PLC0415  # as above

    try:
        # git starts this at the top, whichever project the file is of.
        links = find_project(Path(options.arguments[0]).absolute().parent).links
    except FsdpCommError:
        # git must go on whatever the project's settings are.
        from pytest_fsdp_comm.comm.links import Links  # noqa: PLC0415  # as above

        links = Links()
    print_for_git(options.arguments, links, Printer("auto"))
    return SAME


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-comm",
        description="Shows, compares and accepts communication snapshots of pytest-fsdp-comm.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        run: Callable[[argparse.Namespace], int], name: str, summary: str, **about: Any
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, **about)
        added.set_defaults(run=run)
        return added

    show = command(_show, "show", "show a snapshot, a recording or a tree for reading")
    show.add_argument("files", nargs="+", metavar="FILE", help=".comm, or .json as tests save it")

    diff = command(
        _diff,
        "diff",
        "tell how snapshots, recordings or revisions of git differ",
        description=_DIFF,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="fsdp-comm diff [-h] [--lines] [--color WHEN] [OLD NEW | REVISION... [--] [PATH...]]",
    )
    diff.add_argument("--lines", action="store_true", help="also print the lines that differ")
    diff.add_argument(
        "--color",
        choices=get_args(When),
        default="auto",
        metavar="WHEN",
        help="auto, always, never",
    )
    diff.add_argument("sides", nargs="*", help=argparse.SUPPRESS)

    accept = command(
        _accept,
        "accept",
        "take over what CI received (pytest --comm-artifacts), after showing each change",
        description="Shows for each test what CI received instead of its snapshots, and asks. The "
        "exit status is 1 if something is left as it is or refused, and 2 for errors.",
    )
    accept.add_argument("directory", metavar="DIR", help="the artifacts, unpacked")
    accept.add_argument("--yes", action="store_true", help="accept all, without a question")
    accept.add_argument(
        "--snapshots",
        metavar="DIR",
        help="the directory of the snapshots (default: as pytest's settings have it, seen from the "
        "working directory)",
    )

    audit = command(
        _audit,
        "audit",
        "find snapshot files that are broken, of an old format, or of no test",
        description="Has pytest collect the tests, runs none, and checks every snapshot file. The "
        "exit status is 1 if a file has a fault, and 2 if pytest cannot collect.",
    )
    audit.add_argument(
        "--world-size",
        dest="sizes",
        action="append",
        default=[],
        metavar="N",
        help="a default world size that tests run with; may be given several times",
    )
    audit.add_argument(
        "arguments", nargs="*", metavar="PATH", help="what pytest collects (default: all tests)"
    )

    report = command(
        _report,
        "report",
        "make HTML pages of what CI received, or of what diff tells",
        description="Takes what pytest --comm-artifacts=DIR left, or what diff takes, and writes "
        "index.html with a page for each test.",
    )
    report.add_argument("sides", nargs="*", metavar="DIR | OLD NEW | REVISION")
    report.add_argument("-o", "--output", metavar="DIR", default="comm-report")

    trace = command(
        _trace,
        "trace",
        "make a trace of recordings that Perfetto opens",
        description="Reads what comm_mode.save(...json) wrote. A trace shows the order in which "
        "each rank issued what it sent, and which parameters are gathered when; it has no times.",
    )
    trace.add_argument("files", nargs="+", metavar="RECORDING", help="of one or several ranks")
    trace.add_argument(
        "-o", "--output", metavar="FILE", help="default: beside the first one, with .trace.json"
    )

    git_diff = command(
        _git_diff,
        "git-diff",
        "what git runs as diff.<driver>.command",
        description="See docs/command-line.md for the lines that tell git of it.",
    )
    git_diff.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="as git gives them")
    return parser
