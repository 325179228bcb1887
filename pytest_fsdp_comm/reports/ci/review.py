"""Format a session's Markdown summary, and annotations for GitHub."""

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

# Limits on the parts of a summary. If the summaries of a step exceed 1 MiB in total, GitHub drops
# all of them.
_MAX_ROWS: Final = 200
_MAX_DETAILS: Final = 40
_MAX_NAMES: Final = 3
_MAX_DETAIL_NAMES: Final = 100
_MAX_CELL: Final = 400
_MAX_DETAIL: Final = 8_000
_MAX_UNUSED: Final = 50
# GitHub shows 10 annotations per step; the tenth is needed to say how many more there are.
_MAX_ANNOTATIONS: Final = 9
_MAX_MESSAGE: Final = 4_000
_MAX_TITLE: Final = 200
# Matches characters that Markdown or GitHub would turn into markup, links, mentions, references to
# issues, emoji or math. They ignore "_" inside a word.
_MARKUP: Final = re.compile(
    r"[`|<>&*\[\]\\~@#$]|:(?=[\w+-]+:)|(?<![^\W_])_|_(?![^\W_])|(?<=http):|(?<=https):|(?<=www)\."
)

# Matches the places, after one of these characters, where browsers may break a long id.
_SEPARATOR: Final = re.compile(r"(?<=[/_.:])(?!:)(?=.)")
BREAK: Final = "<wbr>"

_AMOUNTS: Final = "Numbers of the first test; those of the other tests differ"
_ACCEPT: Final = (
    "If the tests ran with `--comm-artifacts=DIRECTORY`, `fsdp-comm accept DIRECTORY` accepts all "
    "changes without another run.\n\n"
)


def render_summary(outcomes: Outcomes, origin: Origin) -> str:
    """Return a session's summary as Markdown that fits within GitHub's size limit."""
    parts = [f"{_headline(outcomes)}\n\n"]
    if outcomes.ended_early:
        parts += [f"{plain(outcomes.ended_early)}\n\n"]
    if outcomes.failed:
        changes = outcomes.changes
        parts += ["| test | what differs | cost |\n| --- | --- | --- |\n"]
        listed, more = first_of(changes, _MAX_ROWS)
        parts += [_row(tests, origin) for tests in listed]
        parts += [f"| {more} more | | |\n"] * bool(more) + ["\n"]
        explained = [tests for tests in changes if tests[0].comparisons.explanation]
        listed, more = first_of(explained, _MAX_DETAILS)
        parts += [_details(tests) for tests in listed]
        parts += [f"The explanations of {more} more changes are in the log.\n\n"] * bool(more)
        if any(tests[0].comparisons.accept for tests in explained):
            parts += [_ACCEPT]
    if outcomes.unused:
        files = counted(len(outcomes.unused), "snapshot file")
        parts += [f"{files} unused; the log has the command that removes them:\n\n"]
        paths, more = first_of(outcomes.unused, _MAX_UNUSED)
        parts += [f"- <code>{_cell(path)}</code>\n" for path in paths]
        parts += [f"- {more} more\n"] * bool(more) + ["\n"]
    return "".join(parts)


def _headline(outcomes: Outcomes) -> str:
    changed = sum(bool(test.comparisons.headline) for test in outcomes.failed)
    unrelated = len(outcomes.failed) - changed
    compared = (
        f"{counted(outcomes.compared_files, 'snapshot')} in "
        f"{counted(outcomes.compared_tests, 'test')}"
    )
    if not outcomes.has_news:
        return "No test compared a communication snapshot."
    if not outcomes.failed:
        equal = "all equal" if outcomes.compared_tests else "none compared"
        return f"Communication: {compared} compared, {equal}."
    differ = f"differs from the reviewed snapshots in {counted(changed, 'test')}" if changed else ""
    changes = len(outcomes.changes) - unrelated
    differ += f" by {counted(changes, 'change')}" if changes < changed else ""
    more = f"{counted(unrelated, 'test')} failed for another reason" if unrelated else ""
    title = ", ".join(filter(None, (differ, more)))
    return f"### Communication{'' if differ else ':'} {title}\n\n{compared} compared."


def _row(tests: Sequence[FailedTest], origin: Origin) -> str:
    names = []
    listed, more = first_of(tests, _MAX_NAMES)
    for test in listed:
        # Let browsers break a long id, because an unbroken id would leave no room for the cost.
        name = f"<code>{_SEPARATOR.sub(BREAK, _cell(test.nodeid))}</code>"
        address = origin.line_address(test.place)
        names.append(f'<a href="{address}">{name}</a>' if address else name)
    names += [f"and {more} more"] * bool(more)
    comparisons = tests[0].comparisons
    costs = [*comparisons.cost, *([_AMOUNTS] if _has_other_amounts(tests) else [])]
    # Prefer the summaries, because the headline in `reason` has only the first of several changes.
    lines = comparisons.summaries or tests[0].reason.splitlines()
    changes, cost = ("<br>".join(map(_cell, side)) for side in (lines, costs))
    return f"| {'<br>'.join(names)} | {changes} | {cost} |\n"


def _has_other_amounts(tests: Sequence[FailedTest]) -> bool:
    return has_other_amounts(test.comparisons for test in tests)


def _details(tests: Sequence[FailedTest]) -> str:
    """Format a section about a change: the tests that fail because of it, and how to accept it."""
    comparisons = tests[0].comparisons
    summary, names, lines = f"<code>{_cell(tests[0].nodeid)}</code>", "", comparisons.explanation
    if len(tests) > 1:
        summary = f"{len(tests)} tests: {_cell(comparisons.summary)}"
        listed, more = first_of(tests, _MAX_DETAIL_NAMES)
        names = "\n".join(test.nodeid for test in listed) + f"\nand {more} more" * bool(more)
        names = f"{fenced(cut(names, _MAX_DETAIL))}\n\n"
        # Drop the first line, which names only the first test's snapshot.
        lines = tuple(line.removeprefix("  ") for line in comparisons.explanation[1:])
        names += f"{_AMOUNTS}:\n\n" if _has_other_amounts(tests) else ""
    accept = accept_all([test.comparisons for test in tests])
    # Omit a command that is too long: a truncated command would accept something else.
    is_complete = comparisons.accept and len(accept) < _MAX_DETAIL
    accept = f"\n\nTo accept it:\n\n{fenced(accept)}" if is_complete else ""
    # GitHub only renders Markdown inside HTML after a blank line.
    return (
        f"<details><summary>{summary}</summary>\n\n"
        f"{names}{fenced(cut(chr(10).join(lines), _MAX_DETAIL))}{accept}\n\n</details>\n\n"
    )


def _cell(text: str) -> str:
    return plain(shorten(text, _MAX_CELL))


def plain(text: str) -> str:
    """Escape text so that Markdown (including tables) and HTML show it literally, on one line."""
    line = printable(" ".join(text.split()))
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", line)


def fenced(text: str) -> str:
    """Format text as a code block, even if it contains backticks."""
    content = printable(text, "\n\t")
    longest = max(map(len, re.findall(r"`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{content}\n{fence}"


def annotate(outcomes: Outcomes) -> list[str]:
    """Return one annotation for each change, at its call site or else at a failed assertion."""
    # Tests may have a change with different amounts, so keep only the first text of each change.
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
    last = f"::error title=communication::{more} more problems are in the log and step summary"
    return [*commands[:_MAX_ANNOTATIONS], last]


def _annotation(place: Place, text: str, tests: Sequence[FailedTest]) -> str:
    first, more = tests[0], len(tests) - 1
    where = f"{first.nodeid} and {counted(more, 'more test')}" if more else first.nodeid
    # Tests that need the same options share a command.
    commands = defaultdict(list)
    for test in tests:
        if test.comparisons.accept:
            commands[test.comparisons.command].append(test.comparisons)
    accepts = [f"accept: {accept_all(group)}" for group in commands.values()]
    is_short = sum(map(len, accepts)) < _MAX_MESSAGE // 2
    message = cut("\n".join((text, f"fails {where}", *accepts * is_short)), _MAX_MESSAGE)
    title = _property(shorten(text.partition("\n")[0], _MAX_TITLE))
    at = f"file={_property(place.path)},line={place.line}"
    return f"::error {at},title={title}::{_data(message)}"


def _data(text: str) -> str:
    return printable(text, "\n").replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
