"""Colours lines of a story, where the output goes to a terminal or to git's pager."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Final

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.reports.coloring import markup_of

SAME: Final = 0
DIFFERENT: Final = 1
FAILED: Final = 2
"""Exit statuses as diff(1) has them: no difference, a difference, or trouble."""

_CODES: Final = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
_PATCH: Final = {"-": "red", "+": "green", "@": "cyan"}


class Printer:
    """Writes lines to standard output."""

    def __init__(self, *, is_plain: bool = False) -> None:
        """Colour on a terminal or in git's pager, without ``NO_COLOR``; nothing if it is plain."""
        shows = sys.stdout.isatty() or os.environ.get("GIT_PAGER_IN_USE") == "true"
        # https://no-color.org: the variable's presence counts, unless it is empty.
        self._colors = shows and not (is_plain or os.environ.get("NO_COLOR"))

    def lines(self, lines: Iterable[str]) -> None:
        """Print lines of a story, each in the colour of what it says."""
        for line in lines:
            self._line(line, markup_of(line))

    def patch(self, lines: Iterable[str]) -> None:
        """Print lines of a patch in git's colours."""
        for line in lines:
            name = "bold" if line.startswith(("---", "+++")) else _PATCH.get(line[:1], "")
            self._line(line, [name] if name else [])

    def _line(self, line: str, markup: Iterable[str]) -> None:
        line = printable(line, "\t")
        codes = ";".join(str(_CODES[name]) for name in markup) if self._colors else ""
        print(f"\033[{codes}m{line}\033[0m" if codes else line)  # noqa: T201  # a program's output


def print_problems(problems: Iterable[str]) -> int:
    """Print problems with single files on standard error; return the exit status."""
    status = SAME
    for problem in problems:
        print(f"fsdp-comm: {problem}", file=sys.stderr)  # noqa: T201  # an error's place
        status = FAILED
    return status
