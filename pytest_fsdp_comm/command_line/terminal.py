"""Output and exit statuses of the program ``fsdp-comm``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from pytest_fsdp_comm.errors import FsdpCommError, printable

SAME: Final = 0
DIFFERENT: Final = 1
FAILED: Final = 2
"""Exit statuses for no differences, some differences, and errors, as in diff(1)."""


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to standard output, with control characters and commands to CI escaped."""
    for line in lines:
        print(printable(line, "\t"))  # noqa: T201  # the program's output


def describe_problem(problem: FsdpCommError) -> str:
    """Return an error's message without the remedy that applies only to failed tests."""
    return str(problem).partition(". Nothing was overwritten")[0]


def print_problems(problems: Iterable[str]) -> int:
    """Print problems to standard error; return `FAILED` if there are any, otherwise `SAME`."""
    status = SAME
    for problem in problems:
        print_note(problem)
        status = FAILED
    return status


def print_note(text: str) -> None:
    """Print a line to standard error, like `print_lines`."""
    print(f"fsdp-comm: {printable(text, chr(10))}", file=sys.stderr)  # noqa: T201  # not a result
