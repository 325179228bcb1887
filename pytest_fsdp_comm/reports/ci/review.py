"""Format a session's Markdown summary, and annotations for GitHub."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.reports.ci.outcomes import (
    FailedTest,
    FileLine,
    Origin,
    Outcomes,
    has_other_amounts,
    make_joint_accept_command,
    summarize_group,
)
from pytest_fsdp_comm.reports.explanation import failure_sort_key, summarize_changes
from pytest_fsdp_comm.text.words import cut_end, hide_amounts, shorten_line, show_count, take_first

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


def render_summary(outcomes: Outcomes, origin: Origin) -> str:
    """Return a session's summary as Markdown that fits within GitHub's size limit."""
    parts = [f"{_write_summary_heading(outcomes)}\n\n"]
    if outcomes.ended_early:
        parts += [f"{escape_text(outcomes.ended_early)}\n\n"]
    if outcomes.failed:
        changes = outcomes.changes
        parts += ["| test | what differs | cost |\n| --- | --- | --- |\n"]
        listed, more = take_first(changes, _MAX_ROWS)
        parts += [_write_table_row(tests, origin) for tests in listed]
        parts += [f"| {more} more | | |\n\n" if more else "\n"]
        explained = [tests for tests in changes if tests[0].failure]
        can_accept = any(tests[0].failure and tests[0].failure.accept for tests in explained)
        if outcomes.directory and can_accept:
            directory = f"<code>{_shorten_and_escape(outcomes.directory)}</code>"
            parts += [f"Run the commands in {directory}.\n\n"]
        listed, more = take_first(explained, _MAX_DETAILS)
        parts += [_write_details_section(tests) for tests in listed]
        parts += [f"The explanations of {more} more changes are in the log.\n\n"] if more else []
        parts += _describe_artifacts(outcomes, origin, can_accept=can_accept)
    if outcomes.unused:
        files = show_count(len(outcomes.unused), "snapshot file")
        parts += [f"{files} unused; the log has the command that removes them:\n\n"]
        paths, more = take_first(outcomes.unused, _MAX_UNUSED)
        parts += [f"- <code>{_shorten_and_escape(path)}</code>\n" for path in paths]
        parts += [f"- {more} more\n\n" if more else "\n"]
    return "".join(parts)


def _write_summary_heading(outcomes: Outcomes) -> str:
    changed = sum(test.failure is not None for test in outcomes.failed)
    unrelated = len(outcomes.failed) - changed
    compared = (
        f"{show_count(outcomes.compared_files, 'snapshot')} in "
        f"{show_count(outcomes.compared_tests, 'test')}"
    )
    if not outcomes.has_news:
        return "No test compared a communication snapshot."
    if not outcomes.failed:
        equal = "all equal" if outcomes.compared_tests else "none compared"
        return f"Communication: {compared} compared, {equal}."
    if not changed:
        title = f": {show_count(unrelated, 'test')} failed"
    else:
        title = f" differs from the reviewed snapshots in {show_count(changed, 'test')}"
        title += f", {show_count(unrelated, 'more test')} failed" if unrelated else ""
    return f"### Communication{title}\n\n{compared} compared."


def _describe_artifacts(outcomes: Outcomes, origin: Origin, *, can_accept: bool) -> Iterator[str]:
    """Yield what to do with the directories that the session wrote, if the job saves them."""
    saved = "the artifacts of this run"
    if origin.run_address:
        saved = f'<a href="{origin.run_address}">{saved}</a>'
    if outcomes.report:
        # An absolute path exists only on the runner.
        path = Path(outcomes.report)
        shown = path.name if path.is_absolute() else outcomes.report
        report = f"<code>{_shorten_and_escape(shown)}</code>"
        yield f"The report {report} is in {saved}, if the job saves it.\n\n"
    if outcomes.artifacts and can_accept:
        # The directory has a different path on the author's machine.
        yield (
            f"To accept these changes without another run, download the differences from {saved} "
            "to a directory <code>differences</code>, then run <code>fsdp-comm accept "
            "differences</code>.\n\n"
        )


def _write_table_row(tests: Sequence[FailedTest], origin: Origin) -> str:
    names = []
    listed, more = take_first(tests, _MAX_NAMES)
    for test in listed:
        # Let browsers break a long id, because an unbroken id would leave no room for the cost.
        name = f"<code>{_SEPARATOR.sub(BREAK, _shorten_and_escape(test.nodeid))}</code>"
        address = origin.line_address(test.location)
        names.append(f'<a href="{address}">{name}</a>' if address else name)
    names += [f"and {more} more"] if more else []
    failure = tests[0].failure
    costs = [entry.text for entry in failure.select("cost")] if failure else []
    costs += [_AMOUNTS] if has_other_amounts(test.failure for test in tests) else []
    # Prefer the summaries, because the headline in `reason` has only the first of several changes.
    lines = summarize_changes(failure) if failure else tests[0].reason.splitlines()
    changes, cost = ("<br>".join(map(_shorten_and_escape, side)) for side in (lines, costs))
    return f"| {'<br>'.join(names)} | {changes} | {cost} |\n"


def _write_details_section(tests: Sequence[FailedTest]) -> str:
    """Format a section about a change: the tests that fail because of it, and how to accept it."""
    failures = [test.failure for test in tests if test.failure]
    first = failures[0]
    summary, names, lines = f"<code>{_shorten_and_escape(tests[0].nodeid)}</code>", "", first.lines
    if len(tests) > 1:
        summary = f"{len(tests)} tests: {_shorten_and_escape(summarize_group(first))}"
        listed, more = take_first(tests, _MAX_DETAIL_NAMES)
        nodeids = [*(test.nodeid for test in listed), *([f"and {more} more"] if more else [])]
        names = f"{fence(cut_end(chr(10).join(nodeids), _MAX_DETAIL))}\n\n"
        # Drop the first line, which names only the first test's snapshot.
        lines = tuple(line.removeprefix("  ") for line in first.lines[1:])
        names += f"{_AMOUNTS}:\n\n" if has_other_amounts(failures) else ""
    accept = make_joint_accept_command(failures)
    how = "To record it" if first.is_missing else f"To accept it{first.although}"
    # Omit a command that is too long: a truncated command would accept something else.
    is_complete = first.accept and len(accept) < _MAX_DETAIL
    accept = f"\n\n{how}:\n\n{fence(accept)}" if is_complete else ""
    # GitHub only renders Markdown inside HTML after a blank line.
    return (
        f"<details><summary>{summary}</summary>\n\n"
        f"{names}{fence(cut_end(chr(10).join(lines), _MAX_DETAIL))}{accept}\n\n</details>\n\n"
    )


def _shorten_and_escape(text: str) -> str:
    return escape_text(shorten_line(text, _MAX_CELL))


def escape_text(text: str) -> str:
    """Escape text so that Markdown (including tables) and HTML show it literally, on one line."""
    line = printable(" ".join(text.split()))
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", line)


def fence(text: str) -> str:
    """Format text as a code block, even if it contains backticks."""
    content = printable(text, "\n\t")
    longest = max(map(len, re.findall(r"`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{content}\n{fence}"


def annotate(outcomes: Outcomes) -> list[str]:
    """Return one annotation for each change, at its call site or else at a failed assertion."""
    # Tests may have a change with different amounts, so keep only the first text of each change.
    causes: dict[tuple[FileLine, str], tuple[str, list[FailedTest]]] = {}
    for test in sorted(outcomes.failed, key=lambda test: failure_sort_key(test.failure)):
        for location, text in test.sent:
            tests = causes.setdefault((location, hide_amounts(text)), (text, []))[1]
            tests += [test] if test not in tests else []
    for tests in outcomes.changes:
        first = tests[0]
        is_unsent = first.failure and not any(test.sent for test in tests)
        if outcomes.annotates_all and first.location and is_unsent:
            causes.setdefault((first.location, first.reason), (first.reason, []))[1].extend(tests)
    commands = [_write_annotation(line, text, tests) for (line, _), (text, tests) in causes.items()]
    more = len(commands) - _MAX_ANNOTATIONS
    if more <= 1:
        return commands
    last = f"::error title=communication::{more} more problems are in the log and step summary"
    return [*commands[:_MAX_ANNOTATIONS], last]


def _write_annotation(location: FileLine, text: str, tests: Sequence[FailedTest]) -> str:
    first, more = tests[0], len(tests) - 1
    where = f"{first.nodeid} and {show_count(more, 'more test')}" if more else first.nodeid
    # Tests that need the same options share a command.
    groups = defaultdict(list)
    for test in tests:
        if test.failure and test.failure.accept and not test.failure.is_missing:
            groups[test.failure.although, test.failure.command].append(test.failure)
    accepts = [
        f"accept{although}: {make_joint_accept_command(same)}"
        for (although, _), same in groups.items()
    ]
    is_short = sum(map(len, accepts)) < _MAX_MESSAGE // 2
    lines = (text, f"fails {where}", *(accepts if is_short else ()))
    message = cut_end("\n".join(lines), _MAX_MESSAGE)
    title = shorten_line(text.partition("\n")[0], _MAX_TITLE)
    at = f"file={_escape_property(location.path)},line={location.line}"
    return f"::error {at},title={_escape_property(title)}::{_escape_message(message)}"


def _escape_message(text: str) -> str:
    return printable(text, "\n").replace("%", "%25").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_message(text).replace(":", "%3A").replace(",", "%2C")
