"""Workflow commands, by which GitHub shows failures at their lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.words import cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.reports.ci.outcomes import FailedTest, Outcomes, Place

Level = Literal["error", "warning", "notice"]

# GitHub shows 10 of a level in a step: the last one says how many there are besides.
_MOST: Final = 9
_MAX_MESSAGE: Final = 4_000
_MAX_TITLE: Final = 200


def annotate(outcomes: Outcomes) -> list[str]:
    """The commands of a session, each a line of its standard output."""
    level: Level = "error" if outcomes.fails_for_unused else "warning"
    errors = [_of_test(test) for test in outcomes.failed]
    unused = [
        command(
            level,
            title="unused communication snapshot",
            message=f"{one.shown}: {one.reason}; pytest --snapshot-update deletes it",
            place=one.place,
        )
        for one in outcomes.unused
        if not outcomes.are_removed
    ]
    if level == "error":
        return _bounded("error", [*errors, *unused])
    return [*_bounded("error", errors), *_bounded("warning", unused)]


def _bounded(level: Level, commands: Sequence[str]) -> list[str]:
    more = len(commands) - _MOST
    if more <= 1:
        return list(commands)
    rest = command(
        level,
        title="communication",
        message=f"{more} more in the log and in the summary of the step",
        place=None,
    )
    return [*commands[:_MOST], rest]


def _of_test(test: FailedTest) -> str:
    accept = test.comparisons.accept
    lines = [*(test.comparisons.story or [test.reason]), *([f"accept: {accept}"] if accept else [])]
    return command(
        "error",
        title=f"{_name(test.nodeid)}: {test.reason}",
        message=cut("\n".join(lines), _MAX_MESSAGE),
        place=test.place,
    )


def _name(nodeid: str) -> str:
    """The name of a test, whose parameters may have ``::`` too."""
    head, bracket, parameters = nodeid.partition("::")[2].partition("[")
    return f"{head.rpartition('::')[2]}{bracket}{parameters}"


def command(level: Level, *, title: str, message: str, place: Place | None) -> str:
    """Write one workflow command: a title in one line, a message in one or more."""
    where = f"file={_property(place.path)},line={place.line}," if place is not None else ""
    return f"::{level} {where}title={_property(title[:_MAX_TITLE])}::{_data(message)}"


def _data(text: str) -> str:
    return printable(text, "\n").replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
