"""A failed comparison, its text and its headline; no other module decides how they look."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Final, Literal, get_args

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.words import show_count, take_first

Severity = Literal[
    "ranks diverge", "breaks training", "change", "likely", "cost", "error", "rest", "note", "fix"
]
"""What a statement is about, in the order of all reports. ``error``: a line of an error, printed as
it is. ``rest``: a change that is less important than those of the severity ``change``. ``fix``: how
to change the test instead of accepting the change."""

# The title of the section that is added to pytest's failure report.
SECTION: Final = "comparison"
NO_SNAPSHOT: Final = "no snapshot yet"
"""The `Failure.problem` of a test whose snapshot does not exist yet."""

_ORDER: Final[tuple[Severity, ...]] = get_args(Severity)
_CHANGES: Final = frozenset[Severity]({"ranks diverge", "breaks training", "change"})
BREAKS: Final = "breaks training: "
"""Begins a statement about a change that breaks training."""
_MARKS: Final[dict[Severity, str]] = {
    "breaks training": BREAKS,
    "likely": "likely: ",
    "cost": "cost: ",
    "note": "note: ",
    "fix": "fix: ",
}
_UNNAMED: Final = frozenset[Severity]({"likely", "note", "fix"})
MOVE_COMMAND: Final = re.compile(r"(?:mkdir -p \S.* && )?mv -n .+")
"""Matches the command that `snapshots.neighbours.describe_neighbour` suggests."""
_SERIOUS: Final = frozenset[Severity]({"ranks diverge", "breaks training"})

# pytest prints an explanation within these limits in full. Outside CI, it truncates longer ones to
# 8 lines or 640 characters, and adds a notice of 2 lines and 46 characters (pytest 9.2; 70 in 8.4).
# It does not truncate if the notice would be longer than the text that it replaces.
MOST_LINES: Final = 8
MOST_CHARACTERS: Final = 660
_MOST_SUMMARIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A sentence about a failed comparison."""

    severity: Severity
    text: str
    place: str = ""
    """The code that issues the calls, such as ``at train.py:7``; printed after `text`."""
    causes: tuple[str, ...] = ()
    """The likely causes of this change, which are also statements of their own."""
    sites: tuple[str, ...] = ()
    """The lines that new calls come from, as ``path:line``, for annotations."""
    is_effect: bool = False
    """Whether the change follows from changed parameters, which a tree describes better."""
    value: str = ""
    """The name of the compared value, if a test compared several and the name is needed."""

    def __post_init__(self) -> None:
        # Names in a snapshot may contain control characters.
        for name in ("text", "place", "value"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        object.__setattr__(self, "causes", tuple(map(printable, self.causes)))

    @property
    def marked_text(self) -> str:
        """The text with its mark, without its place: ``breaks training: tree: lora: ...``."""
        name = f"{self.value}: " if self.value else ""
        return f"{_MARKS.get(self.severity, '')}{name}{self.text}"

    @property
    def summary(self) -> str:
        """The text with its mark, its place and its likely causes."""
        return "; likely: ".join((self.placed_text, *self.causes))

    @property
    def placed_text(self) -> str:
        """The text with its mark and its place."""
        return f"{self.marked_text}, {self.place}" if self.place else self.marked_text

    def line(self) -> str:
        """Return the statement as it is printed."""
        if self.severity == "error":
            return self.text
        return f"  {self.placed_text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed comparison of one value, or of all values in an assertion.

    Ranks and xdist workers send it to the pytest process with the test's report.
    """

    head: str
    heads: tuple[str, ...] = ()
    """The first line of each value, if the values cannot share `head`; otherwise empty."""
    compared: str = ""
    """``comm_mode``, ``fsdp_tree`` or both; empty if nothing was compared."""
    snapshot: str = ""
    """The snapshot's path, relative to pytest's root; empty if nothing was compared."""
    scope: str = ""
    """The part of `head` about different torch versions or ignored sizes; usually empty."""
    problem: str = ""
    """Why values were not compared, for the headline; empty if all were compared."""
    statements: tuple[Statement, ...] = ()
    """All statements, sorted by severity; within a severity, the most important one first."""
    command: str = ""
    """The command that accepts the change, up to the test's name; empty if an update would fail."""
    test: str = ""
    """The test's name, quoted for a shell."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", printable(self.head))
        ordered = sorted(self.statements, key=lambda entry: _ORDER.index(entry.severity))
        object.__setattr__(self, "statements", tuple(ordered))

    def select(self, *severities: Severity) -> tuple[Statement, ...]:
        """Return the statements of these severities."""
        return tuple(entry for entry in self.statements if entry.severity in severities)

    @property
    def severity(self) -> Severity:
        """The severity of the worst change; ``error`` if nothing was compared."""
        return self.changes[0].severity if self.changes else "error"

    @property
    def changes(self) -> tuple[Statement, ...]:
        """The changes that the headline and summaries name, without the rest."""
        return self.select(*_CHANGES)

    @property
    def amounts(self) -> tuple[str, ...]:
        """The texts that may differ between tests with the same change."""
        return tuple(entry.marked_text for entry in (*self.changes, *self.select("cost")))

    @property
    def is_missing(self) -> bool:
        """Whether no snapshot exists yet, so that there is nothing to compare with."""
        return self.problem == NO_SNAPSHOT and not self.changes

    @property
    def accept(self) -> str:
        """The command that accepts the change; empty if an update would fail."""
        return self.command and f"{self.command}{self.test}"

    @property
    def is_serious(self) -> bool:
        """Whether the change makes training wrong."""
        return self.severity in _SERIOUS

    @property
    def although(self) -> str:
        """What to consider before accepting: ``, although it breaks training``; usually empty."""
        return ", although it breaks training" if self.severity == "breaks training" else ""

    @property
    def rows(self) -> tuple[Statement, ...]:
        """All statements except those about fixing the test."""
        return tuple(entry for entry in self.statements if entry.severity != "fix")

    @property
    def body(self) -> tuple[str, ...]:
        """The lines of `rows`."""
        return tuple(row.line() for row in self.rows)

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines, except those about accepting the change."""
        return (self.head, *self.heads, *self.body, *self.fixes)

    @property
    def fixes(self) -> tuple[str, ...]:
        """The lines that say how to change the test."""
        return tuple(entry.line() for entry in self.select("fix"))

    @property
    def accept_lines(self) -> tuple[str, ...]:
        """The lines that say how to accept the change, or how to record the first snapshot."""
        if not self.accept:
            return ()
        if self.is_missing:
            read = "  then read the file, and commit it with the test"
            return (f"  record it: {self.accept}", read)
        return (f"  accept{self.although}: {self.accept}",)

    @classmethod
    def from_error(cls, text: str, problem: str = "") -> Failure:
        """Create a failure from the message of an error that prevented the comparison."""
        first, *further = text.splitlines()
        statements = tuple(Statement(severity="error", text=line) for line in further)
        return cls(head=first, statements=statements, problem=problem)


def failure_sort_key(failure: Failure | None) -> int:
    """Return a sort key that puts failures first if training is wrong; None is another failure."""
    is_serious = failure is not None and failure.is_serious
    return _ORDER.index(failure.severity) if failure and is_serious else len(_SERIOUS)


def write_headline(failure: Failure) -> str:
    """Return one line: the worst change and the number of others, or why nothing was compared."""
    if not failure.changes:
        return failure.problem
    more = len(failure.changes) + len(failure.select("rest")) - 1
    text = failure.changes[0].marked_text
    text = f"{text}, {show_count(more, 'more change')}" if more else text
    return f"{text}; {failure.problem}" if failure.problem else text


def summarize_changes(failure: Failure) -> tuple[str, ...]:
    """Return a line for each change, with its likely causes; if there is none, the headline."""
    listed, more = take_first(failure.changes, _MOST_SUMMARIES)
    more += len(failure.select("rest")) if listed else 0
    lines = [entry.summary for entry in listed]
    lines += [show_count(more, "more change")] if more else []
    return (*lines, *filter(None, [failure.problem]))


def join_failures(failures: Mapping[str, Failure], *, command: str, test: str) -> Failure:
    """Join the failures of the values in one assertion, keyed by their names."""
    if len(failures) == 1:
        return replace(next(iter(failures.values())), command=command, test=test)
    values = list(failures.values())
    named = _name_and_sort_statements(failures)
    # Several values may have the same cause.
    others = dict.fromkeys(
        entry for entry in chain.from_iterable(named) if entry.severity != "change"
    )
    compared = " and ".join(dict.fromkeys(value.compared for value in values if value.compared))
    problems = [f"{name}: {value.problem}" for name, value in failures.items() if value.problem]
    is_same_problem = len({value.problem for value in values}) == 1
    is_all_missing = all(value.is_missing for value in values)
    joined = Failure(
        head=f"{len(values)} {'snapshots are missing' if is_all_missing else 'comparisons failed'}",
        heads=tuple(f"  {name}: {value.head}" for name, value in failures.items()),
        compared=compared,
        problem=values[0].problem if is_same_problem else "; ".join(problems),
        statements=(*others, *_interleave_changes(named)),
        command=command,
        test=test,
    )
    if not all(value.compared for value in values):
        return joined
    where = os.path.commonprefix([value.snapshot for value in values])  # noqa: RUF071  # a prefix of file names
    scopes = dict.fromkeys(f", {value.scope}" for value in values if value.scope)
    head = f"{compared} differ from {where.rstrip('.')} ({len(values)} files){''.join(scopes)}"
    return replace(joined, head=head, heads=())


def _name_and_sort_statements(failures: Mapping[str, Failure]) -> list[list[Statement]]:
    """Return the statements of each value with its name, and those of trees last."""
    recordings, trees = (
        {name: value for name, value in failures.items() if (value.compared == "fsdp_tree") == side}
        for side in (False, True)
    )
    recorded = {
        entry.text
        for value in recordings.values()
        for entry in value.statements
        if value.compared == "comm_mode"
    }
    texts = " ".join(recorded)
    num_recordings = sum(value.compared == "comm_mode" for value in recordings.values())

    def is_repeated(entry: Statement) -> bool:
        subject = entry.text.partition(": ")[0]
        return entry.value in trees and (subject.startswith("mesh") or subject in texts)

    has_mesh = any(text.startswith("mesh") for text in recorded)
    named = []
    for name, value in {**recordings, **trees}.items():
        # The only recording needs no name.
        label = "" if value.compared == "comm_mode" and num_recordings == 1 else name
        entries = [
            _add_name_to_statement(entry, name, label)
            for entry in value.statements
            # A tree repeats changes of the mesh and of the world size.
            if not (
                name in trees
                and entry.severity == "change"
                and (entry.text in recorded or (has_mesh and entry.text.startswith("mesh: ")))
            )
        ]
        # A tree often repeats what a recording says about the same modules: print that last.
        named.append(sorted(entries, key=lambda entry: (entry.is_effect, is_repeated(entry))))
    return named


def _interleave_changes(named: Iterable[Sequence[Statement]]) -> list[Statement]:
    """Take changes from all values in turn, so that each value has one of the first lines."""
    changes: list[list[Statement | None]]
    changes = [[entry for entry in entries if entry.severity == "change"] for entries in named]
    changes.sort(key=lambda entries: all(entry and entry.is_effect for entry in entries))
    first = changes[0][0] if changes[0] else None
    first_causes = " ".join(first.causes) if first is not None else ""
    # If the cause says what the tree shows, another change of the recording comes second.
    changes[1:] = [
        [None, *entries] if entries and _is_named_in_causes(entries[0], first_causes) else entries
        for entries in changes[1:]
    ]
    return [entry for row in zip_longest(*changes) for entry in row if entry is not None]


def _is_named_in_causes(change: Statement | None, causes: str) -> bool:
    """Whether the causes of another change contain what a tree says about a module."""
    what = change.text.partition(": ")[2] if change is not None else ""
    return bool(what) and what in causes


def _add_name_to_statement(statement: Statement, name: str, label: str) -> Statement:
    if statement.severity == "error":
        return replace(statement, text=f"  {name}: {statement.text.strip()}")
    # Causes, notes and fixes say themselves what they are about.
    return replace(statement, value="" if statement.severity in _UNNAMED else label)


def failure_lines(failure: Failure) -> tuple[str, ...]:
    """Explain a failure completely."""
    return (*failure.lines, *failure.accept_lines)


def split_failure_lines(failure: Failure) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split an explanation into the lines that pytest does not truncate, and the rest.

    The first part ends with the command that accepts the change, unless the command is too long.
    """
    complete = failure_lines(failure)
    # Errors are never split.
    if _is_within_limits(complete) or not (failure.compared or failure.is_missing):
        return complete, ()
    lines, accept = failure.lines, failure.accept_lines
    for number in range(len(lines) - 1, 0, -1):
        more = f"  ... and {show_count(len(lines) - number, 'more line')} below"
        shown = (*lines[:number], more, *accept)
        if _is_within_limits(shown):
            return shown, lines[number:]
    return (failure.head, "  ... the other lines are below"), complete[1:]


def _is_within_limits(lines: Sequence[str]) -> bool:
    return len(lines) <= MOST_LINES and sum(map(len, lines)) <= MOST_CHARACTERS
