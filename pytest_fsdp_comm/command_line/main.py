"""The program ``fsdp-comm``: arguments, errors and exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pytest_fsdp_comm.command_line.terminal import FAILED
from pytest_fsdp_comm.errors import FsdpCommError

# Commands raise FsdpCommError, with a remedy, for every error that a user can cause. Only `main`
# catches it, except where an error in one file must not hide other files.
#
# Why argparse: git starts the program for every file in a diff. argparse adds 7 ms to the start of
# the interpreter, click 29 and typer 75 (CPU, Python 3.11).

_DIFF = """\
explain how snapshots differ: the changes, their cost and the likely cause

Compares two snapshots, two recordings (.json), or two directories of snapshots. To compare
revisions, use git diff A..B -- snapshots with the driver from docs/command-line.md.

exit status: 0 without differences (except in the first line), 1 with differences, 2 for errors
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (default: the process's); return the exit status."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    # Do not fail at file names that are not UTF-8, or under a C locale. `record` must leave the
    # script's streams, errors and exit status unchanged.
    runs_script = command_line[:1] == ["record"]
    for stream in (sys.stdout, sys.stderr) if not runs_script else ():
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]  # a text stream
    options = _parser().parse_args(command_line)
    # Start fast: import only the module of this command.
    name, _, function = options.run.partition(":")
    try:
        module = import_module(name if name.startswith(".") else f".{name}", __package__)
        status: int = getattr(module, function or "run")(options)
        if not runs_script:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Prevent a second error when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        if runs_script:
            raise
        return 130
    except FsdpCommError as problem:
        from pytest_fsdp_comm.command_line.documents import describe_problem  # noqa: PLC0415  # already loaded

        print(f"fsdp-comm: {describe_problem(problem)}", file=sys.stderr)  # noqa: T201  # an error's place
        return FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-comm",
        description="Shows, compares and accepts communication snapshots of pytest-fsdp-comm.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: str, name: str, summary: str, **about: Any) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=summary, **about)
        parser.set_defaults(run=run)
        return parser

    show = command("show", "show", "print a snapshot, a recording or a tree for reading")
    show.add_argument("files", nargs="+", metavar="FILE", help=".comm or .json")

    diff = command(
        "diff:run_diff",
        "diff",
        "explain how two snapshots or recordings differ",
        description=_DIFF,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    diff.add_argument("--lines", action="store_true", help="also print the lines that differ")
    diff.add_argument("old", metavar="OLD")
    diff.add_argument("new", metavar="NEW")

    accept = command(
        "accept",
        "accept",
        "copy snapshots that CI received (pytest --comm-artifacts) over the project's",
        description="Copies received snapshots and prints what changed. The exit status is 2 if it "
        "refuses a file, which is behind a link, outside the snapshot directory or unreadable.",
    )
    accept.add_argument("directory", metavar="DIR", help="the artifacts, unpacked")

    record = command(
        "..record",
        "record",
        "run a training script and record the communication of a step",
        description="Runs the script unchanged, records a step, and ends the script there. "
        "Writes a snapshot (.comm), the sharded tree (.tree.comm) and a recording (.json).",
        usage="fsdp-comm record [options] [-m] SCRIPT [ARGUMENT...]",
    )
    record.add_argument("--step", default="3", metavar="N", help="from 3 on; or 3-4 (default: 3)")
    record.add_argument(
        "--out", default="step.comm", metavar="FILE", help="snapshot, step.comm if unset"
    )
    record.add_argument("--go-on", action="store_true", help="let the script run to its end")
    record.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    record.add_argument("--world-size", type=int, metavar="N", help="simulate one rank of N")
    record.add_argument("--rank", type=int, default=0, metavar="R", help="the simulated rank")
    record.add_argument(
        "--local-world-size", type=int, metavar="L", help="ranks of each simulated host, 8 if unset"
    )
    record.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m"
    )
    record.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    test = command("write_test", "test", "write a test and its snapshots from a recorded script")
    test.add_argument("recording", metavar="RECORDING", help=".json, next to its .tree.comm")
    test.add_argument(
        "-o", "--output", metavar="FILE", help="default: test_SCRIPT.py, where pytest collects"
    )

    git_diff = command(
        "diff:run_git_diff",
        "git-diff",
        "explain a file for git, which runs this as diff.<driver>.command",
        description="See docs/command-line.md for the configuration of git.",
    )
    git_diff.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="as git passes them")
    return parser
