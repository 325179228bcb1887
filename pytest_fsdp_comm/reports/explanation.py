"""Build the text of failed comparisons; no other module decides how it looks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Final

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.words import shorten

# The title of the section that is added to pytest's failure report.
SECTION: Final = "comparison"
LIKELY: Final = "  likely: "
NOTE: Final = "  note: "
CURE: Final = "  fix: "
ACCEPT: Final = "  accept: "
RECORD: Final = "  record it: "
READ: Final = "  then read the file, and commit it with the test"
"""Prefixes of the lines that do not describe a change: causes, notes, cures and commands."""

# pytest prints an explanation within these limits in full. Outside CI, it truncates longer ones to
# 8 lines or 640 characters, and adds a notice of 2 lines and 46 characters (pytest 9.2; 70 in 8.4).
# It does not truncate if the notice would be longer than the text that it replaces.
MOST_LINES: Final = 8
MOST_CHARACTERS: Final = 660
# A shortened explanation has at most two lines about the cost: the total, and its parts.
_MOST_COSTS: Final = 2
# Minimum length of a shortened line.
_SHORTEST_LINE: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureText:
    """The lines of one failed comparison."""

    head: str
    compared: str = ""
    """``comm_mode`` or ``fsdp_tree``; empty if nothing was compared."""
    snapshot: str = ""
    """The snapshot's path, relative to pytest's root; empty if nothing was compared."""
    scope: str = ""
    """The part of `head` about different torch versions or ignored sizes; usually empty."""
    training: tuple[str, ...] = ()
    """Changes that break training, worst first."""
    cost: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    """Changes that do not break training, most important first."""
    summaries: tuple[str, ...] = ()
    """A line for each change in `training`, then for each other model-wide change, with the likely
    cause if it is known."""
    sent: tuple[tuple[str, str], ...] = ()
    """For each change whose call site is known: ``path:line`` and the text of the change."""
    causes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cures: tuple[str, ...] = ()
    """How to change the test instead of accepting the change."""
    is_missing: bool = False
    """Whether the snapshot does not exist yet."""

    def __post_init__(self) -> None:
        # Names in a snapshot may contain control characters.
        object.__setattr__(self, "head", printable(self.head))
        for name in ("training", "cost", "changes", "causes", "notes"):
            object.__setattr__(self, name, tuple(map(printable, getattr(self, name))))

    @classmethod
    def of_text(cls, text: str) -> FailureText:
        """Create a text from the message of an error that prevented the comparison."""
        first, *further = text.splitlines()
        return cls(head=first, changes=tuple(further))

    @property
    def differences(self) -> tuple[str, ...]:
        """All changes and their cost, in the order that all reports use."""
        return (*self.training, *self.cost, *self.changes)

    @property
    def body(self) -> tuple[str, ...]:
        """All lines between `head` and `cures`, as they are printed."""
        return (
            *_named("", self, self.differences),
            *(f"{LIKELY}{cause}" for cause in self.causes),
            *(f"{NOTE}{note}" for note in self.notes),
        )

    @property
    def lines(self) -> tuple[str, ...]:
        return (self.head, *self.body, *(f"{CURE}{cure}" for cure in self.cures))

    def within(self, scope: str, cure: str = "") -> FailureText:
        """Return a copy with `scope` at the end of its first line, and with one more `cure`."""
        return replace(
            self,
            head=f"{self.head}, {scope}",
            scope=", ".join(filter(None, (self.scope, scope))),
            cures=(*self.cures, *([cure] if cure else [])),
        )


def failure_lines(
    texts: Mapping[str, FailureText], *, accept: str, everything: bool = False
) -> tuple[str, ...]:
    """Explain the failed comparisons of one assertion in up to 8 lines, or completely.

    Args:
        texts: The failed comparisons, keyed by value name; "" for a single value.
        accept: The command that accepts the changes; may be empty.
        everything: Whether to return all lines, because pytest will not truncate them.
    """
    head = _head(texts)
    is_several = len(texts) > 1
    values = [(name if is_several else "", text) for name, text in texts.items()]
    names_heads = is_several and not _share_head(texts)
    first = [
        line
        for name, text in sorted(values, key=lambda value: _place(value[1]))
        for line in _named(name, text, text.training)
    ]
    costs = [line for name, text in values for line in _named(name, text, text.cost)]
    changes = _in_turn(
        [_named(name, text, (*[text.head] * names_heads, *text.changes)) for name, text in values]
    )
    causes, notes, cures = (
        [*dict.fromkeys(chain.from_iterable(getattr(text, name) for text in texts.values()))]
        for name in ("causes", "notes", "cures")
    )
    tail = [f"{CURE}{cure}" for cure in cures]
    if accept and all(text.is_missing for text in texts.values()):
        tail += [f"{RECORD}{accept}", READ]
    elif accept:
        tail += [f"{ACCEPT}{accept}"]
    likely = [f"{LIKELY}{cause}" for cause in causes]
    # Errors are never shortened.
    is_fitted = any(text.compared or text.is_missing for text in texts.values())
    if everything or not is_fitted:
        noted = (f"{NOTE}{note}" for note in notes)
        return (head, *first, *costs, *changes, *likely, *noted, *tail)
    rows, further = [*first, *costs[:_MOST_COSTS], *changes], costs[_MOST_COSTS:]
    has_changes = any(text.compared for text in texts.values())
    least = min(len(texts), len(rows))
    lines: list[str] = []
    # Print only as many rows as fit, because pytest would cut off the command, which comes last.
    for num_rows in range(len(rows), least - 1, -1):
        hidden = rows[num_rows:] and [*rows[num_rows:], *further]
        # Do not hide a single row, because "... and 1 more" would take up a line itself.
        if len(hidden) == 1 and num_rows > least:
            continue
        noun = "changes" if has_changes and not set(hidden) & set(costs) else "lines"
        more = [f"  ... and {len(hidden)} more {noun} (-vv)"] if hidden else []
        end = [*more, *likely[:1], *tail]
        if 1 + num_rows + len(end) > MOST_LINES:
            continue
        # Lines about training are never shortened.
        training, further_rows = rows[: min(num_rows, len(first))], rows[len(first) : num_rows]
        room = MOST_CHARACTERS - sum(map(len, (head, *training, *end)))
        lines = [head, *training, *_fitted(further_rows, room), *end]
        if sum(map(len, lines)) <= MOST_CHARACTERS:
            break
    return tuple(lines)


def _fitted(lines: Sequence[str], room: int) -> Sequence[str]:
    """Shorten the longest lines until all fit into `room`, unless they would become too short."""
    longest = max(map(len, lines), default=0)
    for most in range(longest, _SHORTEST_LINE - 1, -1):
        if sum(min(len(line), most) for line in lines) <= room:
            return [_cut_before_place(line, most) for line in lines]
    return lines


def _cut_before_place(line: str, most: int) -> str:
    """Shorten a line, but keep the call site at its end, if there is one."""
    word = " called from " if " called from " in line else " at "
    text, at, place = line.rpartition(word)
    room = most - len(at) - len(place)
    return f"{shorten(text, room)}{at}{place}" if room > most // 2 else shorten(line, most)


def summary_lines(texts: Iterable[FailureText]) -> tuple[str, ...]:
    """Join the summaries of several comparisons, in the order that all reports use."""
    ordered = sorted(texts, key=_place)
    return (
        *(line for text in ordered for line in text.summaries[: len(text.training)]),
        *(line for text in ordered for line in text.summaries[len(text.training) :]),
    )


def _place(text: FailureText) -> bool:
    """Return the sort key that puts recordings before trees, because they matter more."""
    return text.compared == "fsdp_tree"


def _head(texts: Mapping[str, FailureText]) -> str:
    if len(texts) == 1:
        return next(iter(texts.values())).head
    if not _share_head(texts):
        return f"{len(texts)} comparisons failed"
    names = " and ".join(dict.fromkeys(text.compared for text in texts.values()))
    where = os.path.commonprefix([text.snapshot for text in texts.values()])  # noqa: RUF071  # a prefix of file names
    scopes = dict.fromkeys(f", {text.scope}" for text in texts.values() if text.scope)
    return f"{names} differ from {where.rstrip('.')} ({len(texts)} files){''.join(scopes)}"


def _share_head(texts: Mapping[str, FailureText]) -> bool:
    """Return whether all comparisons found a difference, so that they can share a first line."""
    return all(text.compared for text in texts.values())


def _named(name: str, text: FailureText, lines: Iterable[str]) -> list[str]:
    if name:
        return [f"  {name}: {line.strip()}" for line in lines]
    # The lines of an error are already indented.
    return [f"  {line}" if text.compared else line for line in lines]


def _in_turn(values: Sequence[Sequence[str]]) -> list[str]:
    """Interleave the lines of all values: first lines, then second lines, and so on."""
    return [line for lines in zip_longest(*values) for line in lines if line is not None]
