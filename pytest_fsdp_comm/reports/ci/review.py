"""A session as reviewers read it: a summary in Markdown, and annotations of GitHub."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.reports.ci.outcomes import (
    FailedTest,
    Origin,
    Outcomes,
    Place,
    accept_all,
    has_other_amounts,
)
from pytest_fsdp_comm.text.words import counted, cut, first_of, shorten, without_amounts

# GitHub drops all summaries of a step beyond 1 MiB together.
_MAX_ROWS: Final = 200
_MAX_STORIES: Final = 40
_MAX_NAMES: Final = 3
_MAX_STORY_NAMES: Final = 100
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

_AMOUNTS: Final = "Amounts of the first test; the others have other amounts"
_ACCEPT: Final = (
    "`fsdp-comm accept DIRECTORY` accepts all of it without running the tests, from what "
    "`--comm-artifacts=DIRECTORY` kept.\n\n"
)


def render_summary(outcomes: Outcomes, origin: Origin) -> str:
    """Write the summary of a session, with as much as GitHub shows."""
    parts = [f"{_headline(outcomes)}\n\n"]
    if outcomes.ended_early:
        parts += [f"{plain(outcomes.ended_early)}\n\n"]
    if outcomes.failed:
        changes = outcomes.changes
        parts += ["| test | what differs | cost |\n| --- | --- | --- |\n"]
        shown, more = first_of(changes, _MAX_ROWS)
        parts += [_row(tests, origin) for tests in shown]
        parts += [f"| {more} more | | |\n"] * bool(more) + ["\n"]
        told = [tests for tests in changes if tests[0].comparisons.story]
        shown, more = first_of(told, _MAX_STORIES)
        parts += [_story(tests) for tests in shown]
        parts += [f"{more} more stories are in the log.\n\n"] * bool(more)
        if any(tests[0].comparisons.accept for tests in told):
            parts += [_ACCEPT]
    if outcomes.unused:
        files = counted(len(outcomes.unused), "snapshot file")
        parts += [f"{files} unused; the log has the command that removes them:\n\n"]
        paths, more = first_of(outcomes.unused, _MAX_UNUSED)
        parts += [f"- <code>{_cell(path)}</code>\n" for path in paths]
        parts += [f"- {more} more\n"] * bool(more) + ["\n"]
    return "".join(parts)


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
    changes = len(outcomes.changes) - others
    differ += f" by {counted(changes, 'change')}" if changes < told else ""
    more = f"{counted(others, 'test')} failed for another reason" if others else ""
    what = ", ".join(filter(None, (differ, more)))
    return f"### Communication: {what}\n\n{compared} compared."


def _row(tests: Sequence[FailedTest], origin: Origin) -> str:
    names = []
    shown, more = first_of(tests, _MAX_NAMES)
    for test in shown:
        # Otherwise the id, which is the longest word, leaves no room for the cost.
        name = f"<code>{_SEPARATOR.sub(BREAK, _cell(test.nodeid))}</code>"
        address = origin.line_address(test.place)
        names.append(f'<a href="{address}">{name}</a>' if address else name)
    names += [f"and {more} more"] * bool(more)
    comparisons = tests[0].comparisons
    # The headline has the first of several changes alone.
    costs = [*comparisons.cost, *([_AMOUNTS] if _has_other_amounts(tests) else [])]
    lines = comparisons.told or tests[0].reason.splitlines()
    told, cost = ("<br>".join(map(_cell, side)) for side in (lines, costs))
    return f"| {'<br>'.join(names)} | {told} | {cost} |\n"


def _has_other_amounts(tests: Sequence[FailedTest]) -> bool:
    return has_other_amounts(test.comparisons for test in tests)


def _story(tests: Sequence[FailedTest]) -> str:
    """Tell a change once, with all tests that it failed and one command that accepts it."""
    comparisons = tests[0].comparisons
    summary, names, story = f"<code>{_cell(tests[0].nodeid)}</code>", "", comparisons.story
    if len(tests) > 1:
        summary = f"{len(tests)} tests: {_cell(comparisons.summary)}"
        shown, more = first_of(tests, _MAX_STORY_NAMES)
        names = "\n".join(test.nodeid for test in shown) + f"\nand {more} more" * bool(more)
        names = f"{fenced(cut(names, _MAX_STORY))}\n\n"
        # The first line names the file of one of them.
        story = tuple(line.removeprefix("  ") for line in comparisons.story[1:])
        names += f"{_AMOUNTS}:\n\n" if _has_other_amounts(tests) else ""
    accept = accept_all([test.comparisons for test in tests])
    # A part of a long command would accept something else.
    is_shown = comparisons.accept and len(accept) < _MAX_STORY
    accept = f"\n\nTo accept it:\n\n{fenced(accept)}" if is_shown else ""
    # The blank lines make Markdown of what is inside.
    return (
        f"<details><summary>{summary}</summary>\n\n"
        f"{names}{fenced(cut(chr(10).join(story), _MAX_STORY))}{accept}\n\n</details>\n\n"
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
    """Annotate each cause once, at the line that sends, or at an assertion if none is known."""
    # Each with the text of its first test.
    causes: dict[tuple[Place, str], tuple[str, list[FailedTest]]] = {}
    for test in outcomes.failed:
        for place, text in test.sent:
            tests = causes.setdefault((place, without_amounts(text)), (text, []))[1]
            tests += [test] if test not in tests else []
    for tests in outcomes.changes:
        first = tests[0]
        is_unsent = first.comparisons.headline and not any(test.sent for test in tests)
        if outcomes.annotates_all and first.place and is_unsent:
            causes.setdefault((first.place, first.reason), (first.reason, []))[1].extend(tests)
    commands = [_annotation(place, text, tests) for (place, _), (text, tests) in causes.items()]
    more = len(commands) - _MAX_ANNOTATIONS
    if more <= 1:
        return commands
    rest = f"::error title=communication::{more} more in the log and in the summary of the step"
    return [*commands[:_MAX_ANNOTATIONS], rest]


def _annotation(place: Place, text: str, tests: Sequence[FailedTest]) -> str:
    first, more = tests[0], len(tests) - 1
    where = f"{first.nodeid} and {counted(more, 'more test')}" if more else first.nodeid
    # One for all tests, unless they need other options.
    commands = defaultdict(list)
    for test in tests:
        if test.comparisons.accept:
            commands[test.comparisons.command].append(test.comparisons)
    accepts = [f"accept: {accept_all(alike)}" for alike in commands.values()]
    # A part of a long command would accept something else.
    is_short = sum(map(len, accepts)) < _MAX_MESSAGE // 2
    message = cut("\n".join((text, f"fails {where}", *accepts * is_short)), _MAX_MESSAGE)
    title = _property(shorten(text.partition("\n")[0], _MAX_TITLE))
    at = f"file={_property(place.path)},line={place.line}"
    return f"::error {at},title={title}::{_data(message)}"


def _data(text: str) -> str:
    return printable(text, "\n").replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
