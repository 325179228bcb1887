"""Entry point of ``fsdp-comm``: parse the arguments, run a command, and print errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pytest_fsdp_comm.command_line.terminal import FAILED, describe_problem, print_problems
from pytest_fsdp_comm.errors import FsdpCommError

# Commands raise FsdpCommError, with a remedy, for every error that a user can cause, and `main`
# prints it. A command that reads several files prints an error about one of them, and continues.
#
# The program must start fast, because git starts it once for every file in a diff. It therefore
# uses argparse, which adds 7 ms to the interpreter's startup; click adds 29 ms, and typer 75 ms
# (CPU, Python 3.11).


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status; `arguments` defaults to ``sys.argv[1:]``."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    # Allow printing file names that are not UTF-8, and any text under a C locale. But `record` runs
    # a script in this process, and must not change the script's streams, errors and exit status.
    runs_script = command_line[:1] == ["record"]
    for stream in (sys.stdout, sys.stderr) if not runs_script else ():
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]  # both are text streams
    options = _make_parser().parse_args(command_line)
    # Import only the module of this command, so that the program starts fast.
    name, _, function = options.run.partition(":")
    try:
        module = import_module(name if name.startswith(".") else f".{name}", __package__)
        status: int = getattr(module, function or "run")(options)
        if not runs_script:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, for example `head`, closed the pipe. Redirect standard output, because Python
        # would otherwise raise again when it flushes the stream at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        if runs_script:
            raise
        return 130
    except FsdpCommError as problem:
        return print_problems([describe_problem(problem)])
    return status


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-comm",
        description="Show, compare, accept and record communication snapshots.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def declare(run: str, name: str, summary: str, **about: Any) -> argparse.ArgumentParser:
        about["description"] = f"{summary[0].upper()}{summary[1:]}."
        parser = commands.add_parser(name, help=summary, **about)
        parser.set_defaults(run=run)
        return parser

    show = declare("show", "show", "print a snapshot, a recording or a tree in columns")
    show.add_argument("files", nargs="+", metavar="FILE", help="a .comm or .json file")

    diff = declare(
        "diff:run_diff",
        "diff",
        "explain how snapshots differ: the changes, their cost and the likely cause",
        epilog="OLD and NEW are two snapshots, two recordings (.json) or two directories of "
        "snapshots. To compare revisions, run git diff A..B -- snapshots with the driver from "
        "docs/command-line.md. Exit status: 0 without differences (except in the first line), 1 "
        "with differences, 2 for errors.",
    )
    diff.add_argument("--lines", action="store_true", help="also print the lines that differ")
    diff.add_argument("old", metavar="OLD")
    diff.add_argument("new", metavar="NEW")

    accept = declare(
        "accept",
        "accept",
        "replace snapshots with those that CI received, and print the changes",
        epilog="Refuses files that cannot be read, that a symlink leads to, or that lie outside "
        "the snapshot directory. If it refuses a file, the exit status is 2.",
    )
    accept.add_argument("directory", metavar="DIR", help="the unpacked --comm-artifacts")
    text = (
        "accept only snapshots with this name, such as test_step, or path, such as 'test_llama/*'"
    )
    accept.add_argument("names", nargs="*", metavar="NAME", help=text)

    record = declare(
        "..record",
        "record",
        "run a training script and record the communication of a step",
        epilog="Ends the script after the step. Writes the snapshots of communication (.comm) and "
        "tree (.tree.comm), and a recording (.json). Writes nothing if a file would change, or "
        "if the recording is incomplete.",
        usage="fsdp-comm record [options] [-m] SCRIPT [ARGUMENT...]",
    )
    text = "step to record, at least 3, or a range such as 3-4 (default: 3)"
    record.add_argument("--step", default="3", metavar="N", help=text)
    text = "snapshot to write (default: step.comm)"
    record.add_argument("--out", default="step.comm", metavar="FILE", help=text)
    text = "replace files even if the recording differs from them"
    record.add_argument("--force", action="store_true", help=text)
    record.add_argument("--go-on", action="store_true", help="let the script run to its end")
    record.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    record.add_argument("--world-size", type=int, metavar="N", help="simulate one rank of N")
    text = "rank to simulate (default: 0)"
    record.add_argument("--rank", type=int, default=0, metavar="R", help=text)
    text = "ranks on each simulated host (default: 8)"
    record.add_argument("--local-world-size", type=int, metavar="L", help=text)
    text = "SCRIPT is a module, as with python -m"
    record.add_argument("-m", dest="module", action="store_true", help=text)
    record.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    test = declare("write_test", "test", "write a test and its snapshots from a recorded script")
    test.add_argument(
        "recording", metavar="RECORDING", help="a .json file that fsdp-comm record wrote"
    )
    text = "test to write (default: test_SCRIPT.py in a directory that pytest collects)"
    test.add_argument("-o", "--output", metavar="FILE", help=text)

    text = "explain changes of a file; git runs this as diff.<driver>.command"
    epilog = "See docs/command-line.md for the configuration of git."
    git_diff = declare("diff:run_git_diff", "git-diff", text, epilog=epilog)
    git_diff.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="as git passes them")
    return parser
