"""A session as reviewers read it: a summary in Markdown, and annotations of GitHub."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.reports.ci.outcomes import FailedTest, Origin, Outcomes, Place
from pytest_fsdp_comm.text.words import counted, cut, shorten

# GitHub drops all summaries of a step beyond 1 MiB together.
_MAX_ROWS: Final = 200
_MAX_STORIES: Final = 40
_MAX_CELL: Final = 400
_MAX_STORY: Final = 8_000
_MAX_UNUSED: Final = 50
# GitHub shows 10 annotations of a step: the last one says how many there are besides.
_MAX_ANNOTATIONS: Final = 9
_MAX_MESSAGE: Final = 4_000
_MAX_TITLE: Final = 200
# Links, mentions, numbers of issues, emoji and mathematics are GitHub's; in a word, "_" is none.
_MARKUP: Final = re.compile(
    r"[`|<>&*\[\]\\~@#$]|:(?=[\w+-]+:)|(?<![^\W_])_|_(?![^\W_])|(?<=http):|(?<=https):|(?<=www)\."
)

# After which a long id may be broken.
_SEPARATOR: Final = re.compile(r"(?<=[/_.:])(?!:)(?=.)")
BREAK: Final = "<wbr>"


def render_summary(outcomes: Outcomes, origin: Origin) -> str:
    """Write the summary of a session, with as much as GitHub shows."""
    parts = [f"{_headline(outcomes)}\n\n"]
    if outcomes.ended_early:
        parts += [f"{plain(outcomes.ended_early)}\n\n"]
    if outcomes.failed:
        parts += ["| test | what differs | cost |\n| --- | --- | --- |\n"]
        rows = [_row(test, origin) for test in outcomes.failed[:_MAX_ROWS]]
        parts += [*rows, *_more(outcomes.failed, _MAX_ROWS, "| {} more | | |\n"), "\n"]
        told = [test for test in outcomes.failed if test.comparisons.story]
        parts += map(_story, told[:_MAX_STORIES])
        parts += _more(told, _MAX_STORIES, "{} more stories are in the log.\n\n")
    if outcomes.unused:
        files = counted(len(outcomes.unused), "snapshot file")
        parts += [f"{files} unused; the log has the command that removes them:\n\n"]
        parts += [f"- <code>{_cell(path)}</code>\n" for path in outcomes.unused[:_MAX_UNUSED]]
        parts += [*_more(outcomes.unused, _MAX_UNUSED, "- {} more\n"), "\n"]
    return "".join(parts)


def _more(entries: Sequence[object], most: int, text: str) -> list[str]:
    return [text.format(len(entries) - most)] if len(entries) > most else []


def _headline(outcomes: Outcomes) -> str:
    told = sum(bool(test.comparisons.headline) for test in outcomes.failed)
    others = len(outcomes.failed) - told
    compared = (
        f"{counted(outcomes.compared_files, 'snapshot')} in "
        f"{counted(outcomes.compared_tests, 'test')}"
    )
    if not outcomes.has_news:
        return "No test compared anything with a communication snapshot."
    if not outcomes.failed:
        equal = "all equal" if outcomes.compared_tests else "none compared"
        return f"Communication: {compared} compared, {equal}."
    differ = f"differs from the reviewed snapshots in {counted(told, 'test')}" if told else ""
    more = f"{counted(others, 'test')} failed for another reason" if others else ""
    what = ", ".join(filter(None, (differ, more)))
    return f"### Communication: {what}\n\n{compared} compared."


def _row(test: FailedTest, origin: Origin) -> str:
    # Otherwise the id, which is the longest word, leaves no room for the cost.
    name = f"<code>{_SEPARATOR.sub(BREAK, _cell(test.nodeid))}</code>"
    if address := origin.line_address(test.place):
        name = f'<a href="{address}">{name}</a>'
    # The headline has the first of several changes alone.
    told, cost = (
        "<br>".join(map(_cell, lines)) for lines in (test.comparisons.told, test.comparisons.cost)
    )
    return f"| {name} | {told or _cell(test.reason)} | {cost} |\n"


def _story(test: FailedTest) -> str:
    comparisons = test.comparisons
    accept = f"\n\nTo accept it:\n\n{fenced(comparisons.accept)}" if comparisons.accept else ""
    story = cut("\n".join(comparisons.story), _MAX_STORY)
    # The blank lines make Markdown of what is inside.
    return (
        f"<details><summary><code>{_cell(test.nodeid)}</code></summary>\n\n"
        f"{fenced(story)}{accept}\n\n</details>\n\n"
    )


def _cell(text: str) -> str:
    return plain(shorten(text, _MAX_CELL))


def plain(text: str) -> str:
    """Write a text as one line that Markdown and HTML show as it is, in tables too."""
    line = printable(" ".join(text.split()))
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", line)


def fenced(text: str) -> str:
    """Write a text as a block of code, whatever backticks it has."""
    shown = printable(text, "\n\t")
    longest = max(map(len, re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"


def annotate(outcomes: Outcomes) -> list[str]:
    """Annotate each cause once, at the line that sends, in GitHub's workflow commands."""
    causes: defaultdict[tuple[Place, str], list[FailedTest]] = defaultdict(list)
    for test in outcomes.failed:
        for cause in test.sent:
            causes[cause].append(test)
    commands = [_annotation(place, text, tests) for (place, text), tests in causes.items()]
    more = len(commands) - _MAX_ANNOTATIONS
    if more <= 1:
        return commands
    rest = f"::error title=communication::{more} more in the log and in the summary of the step"
    return [*commands[:_MAX_ANNOTATIONS], rest]


def _annotation(place: Place, text: str, tests: Sequence[FailedTest]) -> str:
    first, more = tests[0], len(tests) - 1
    where = f"{first.nodeid} and {counted(more, 'more test')}" if more else first.nodeid
    accept = [f"accept: {first.comparisons.accept}"] if first.comparisons.accept else []
    message = cut("\n".join((text, f"fails {where}", *accept)), _MAX_MESSAGE)
    title = _property(shorten(text, _MAX_TITLE))
    at = f"file={_property(place.path)},line={place.line}"
    return f"::error {at},title={title}::{_data(message)}"


def _data(text: str) -> str:
    return printable(text, "\n").replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
