"""Colours a failed comparison where pytest prints it, so that no report holds an escape code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pytest_fsdp_comm.reports.explanation import SECTION

_RED: Final = {"red": True}
_GREEN: Final = {"green": True}
_YELLOW: Final = {"yellow": True}
_BOLD: Final = {"bold": True}

# How lines begin that have a colour, the first that matches; commands and all others have none.
_STYLES: Final = tuple(
    (re.compile(pattern), markup)
    for pattern, markup in (
        (
            r"\s*(?:\S+: )?(?:[+-]<?[\d_.,]+ ?%|x[\d.]+ bytes|new bytes|peak gathered(?::| [+-]))",
            _YELLOW | _BOLD,
        ),
        (r"- ", _RED),
        (r"\+ ", _GREEN),
        (r"\s*(?:\S+: )?(?:likely|note|not compared): ", _YELLOW),
        (r"\s+.* -> 0(?: \(-|,|$)|\s+.*(?:no longer|any more|merged into|: removed| less$)", _RED),
        (r"\s+.*(?<!rank) 0 -> \d|\s+.*(?:: becomes|: added|split off| now[,:]| more$)", _GREEN),
        (r"\S", _BOLD),
    )
)


def markup_of(line: str) -> Mapping[str, bool]:
    """The markup of one line of an explanation or of the section below, as pytest names it."""
    return next((markup for pattern, markup in _STYLES if pattern.match(line)), {})


class Painter:
    """pytest's writer of the terminal, which prints a failed comparison line by line."""

    # Whether there are colours at all stays pytest's decision. It prints a failure's lines in bold
    # red, each after a mark, `E` and blanks; those after `assert` explain it, and are painted by
    # what they say. The section below comes as one text.

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._explains = False
        self._is_below = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def sep(self, sepchar: str, title: str | None = None, *args: Any, **markup: bool) -> None:
        self._is_below = title == SECTION
        self._writer.sep(sepchar, title, *args, **markup)

    def line(self, s: str = "", **markup: bool) -> None:
        """Write a line, or all lines of a section."""
        if self._is_below:
            for line in s.splitlines():
                self._writer.line(line, **markup_of(line))
        elif self._explains and markup == _RED | _BOLD:
            # pytest's mark of a failure stays as it is.
            blank = re.match(r"E? *", s)
            mark = blank[0][:-2] if blank else ""
            text = s.removeprefix(mark)
            self._writer.write(mark, **markup)
            self._writer.line(text, **markup_of(text))
        else:
            self._explains |= re.match(r"E +(?:AssertionError: )?assert ", s) is not None
            self._writer.line(s, **markup)
