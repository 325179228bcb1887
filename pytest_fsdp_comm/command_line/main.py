"""The program ``fsdp-comm``: its arguments, its errors, its exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from pytest_fsdp_comm.command_line.terminal import FAILED
from pytest_fsdp_comm.errors import FsdpCommError

# Every command, and what it calls, raises FsdpCommError for whatever a user can cause, with the
# remedy; `main` alone catches it, except where the problem of one file must not hide the others.
#
# Why argparse: git starts the program for every file that it shows. Over an empty interpreter it
# costs 7 ms, click 29 and typer 75 (CPU, Python 3.11), and nothing here needs either of them.

_DIFF = """\
explain how snapshots differ: what a change costs, what changed and why

Compares two snapshots, two recordings (.json), or two directories of snapshots. For revisions, use
git diff A..B -- snapshots with the driver that docs/command-line.md describes.

exit status: 0 if nothing that is compared differs, 1 if something does, 2 for errors
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with the arguments of the process, or others; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # A file's name may be no UTF-8, and a C locale no UTF-8 at all. What `record` runs writes, and
    # ends, as it would by itself.
    runs_script = given[:1] == ["record"]
    for stream in (sys.stdout, sys.stderr) if not runs_script else ():
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]  # a text stream
    options = _parser().parse_args(given)
    # A command's file imports what the command needs, and no other is imported.
    module, _, name = options.run.partition(":")
    try:
        found = import_module(module if module.startswith(".") else f".{module}", __package__)
        status: int = getattr(found, name or "run")(options)
        if not runs_script:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has read enough; Python must not complain of it again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        if runs_script:
            raise
        return 130
    except FsdpCommError as problem:
        from pytest_fsdp_comm.command_line.documents import describe_problem  # noqa: PLC0415  # read by then

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
        added = commands.add_parser(name, help=summary, **about)
        added.set_defaults(run=run)
        return added

    show = command("show", "show", "show a snapshot, a recording or a tree for reading")
    show.add_argument("files", nargs="+", metavar="FILE", help=".comm, or .json as tests save it")

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
        "copy what CI received (pytest --comm-artifacts) over the snapshots",
        description="Copies the received snapshots, and prints what changed. The exit status is 2 "
        "if a file is refused: one that is behind a link, is outside of the snapshot directory, or "
        "cannot be read.",
    )
    accept.add_argument("directory", metavar="DIR", help="the artifacts, unpacked")

    record = command(
        "..record",
        "record",
        "run a training script, and record what one of its steps sends",
        description="Runs the script unchanged, records a step, and ends the script there. "
        "Writes a snapshot (.comm), the sharded tree (.tree.comm) and a recording (.json).",
        usage="fsdp-comm record [options] [-m] SCRIPT [ARGUMENT...]",
    )
    record.add_argument("--step", default="3", metavar="N", help="from 3 on, or 3-4 (default: 3)")
    record.add_argument("--out", default="step.comm", metavar="FILE", help="default: step.comm")
    record.add_argument("--go-on", action="store_true", help="let the script run to its end")
    record.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    record.add_argument("--world-size", type=int, metavar="N", help="simulate one rank of N")
    record.add_argument("--rank", type=int, default=0, metavar="R", help="the simulated rank")
    record.add_argument(
        "--local-world-size", type=int, metavar="L", help="ranks of each simulated host, 8 if unset"
    )
    record.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module, as of python -m"
    )
    record.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    test = command("write_test", "test", "write a test, and its snapshots, from what record wrote")
    test.add_argument("recording", metavar="RECORDING", help=".json, with the tree beside it")
    test.add_argument(
        "-o", "--output", metavar="FILE", help="default: test_SCRIPT.py, where pytest collects"
    )

    git_diff = command(
        "diff:run_git_diff",
        "git-diff",
        "what git runs as diff.<driver>.command",
        description="See docs/command-line.md for the lines that tell git of it.",
    )
    git_diff.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="as git gives them")
    return parser
