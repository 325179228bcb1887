"""Colours lines of a story, where the output goes to a terminal or to git's pager."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, Literal

from pytest_fsdp_comm.reports.coloring import markup_of

if TYPE_CHECKING:
    from collections.abc import Iterable

When = Literal["auto", "always", "never"]

_CODES: Final = {"bold": 1, "red": 31, "green": 32, "yellow": 33}


class Printer:
    """Writes lines to standard output."""

    def __init__(self, when: When) -> None:
        """Decides about colours.

        Args:
            when: ``auto`` for a terminal, or a pager that git started, unless ``NO_COLOR`` is set.
        """
        shows = sys.stdout.isatty() or os.environ.get("GIT_PAGER_IN_USE") == "true"
        # https://no-color.org: the variable's presence counts, unless it is empty.
        is_auto = shows and not os.environ.get("NO_COLOR")
        self._colors = is_auto if when == "auto" else when == "always"

    def lines(self, lines: Iterable[str]) -> None:
        """Prints lines, each in the colour of what it says."""
        for line in lines:
            markup = markup_of(line) if self._colors else {}
            codes = ";".join(str(_CODES[name]) for name in markup)
            print(f"\033[{codes}m{line}\033[0m" if codes else line)  # noqa: T201  # a program's output
