"""Why an assertion failed: the one place that builds this text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Final

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.words import shorten

# The title of the section below pytest's explanation.
SECTION: Final = "comparison"
LIKELY: Final = "  likely: "
NOTE: Final = "  note: "
CURE: Final = "  or "
ACCEPT: Final = "  accept: "
RECORD: Final = "  record it: "
READ: Final = "  then read the file, and commit it with the test"
"""How lines begin that name no change: causes, cures and commands."""

# pytest cuts an explanation at 8 lines or 640 characters outside CI, but not for less than what
# saying so takes: 2 lines and 46 characters (9.2; 70 in 8.4).
MOST_LINES: Final = 8
MOST_CHARACTERS: Final = 660
_MOST_COSTS: Final = 2
"""Of the whole, and of its parts."""
_LEAST_OF_A_LINE: Final = 80
"""Characters that are left of one that is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureText:
    """Why one comparison failed, by what its lines are."""

    head: str
    compared: str = ""
    """What differs, ``comm_mode`` or ``fsdp_tree``; empty if there was nothing to compare with."""
    snapshot: str = ""
    """The file that it differs from, as the user would type it; empty as above."""
    scope: str = ""
    """What the first line says of the whole, such as what is not compared; empty for most."""
    training: tuple[str, ...] = ()
    """What breaks training, the worst first."""
    cost: tuple[str, ...] = ()
    """What the changes cost."""
    changes: tuple[str, ...] = ()
    """All other changes, most important first."""
    told: tuple[str, ...] = ()
    """Each of `training`, then each other change of the whole, in a line with its probable cause.
    """
    sent: tuple[tuple[str, str], ...] = ()
    """Each change whose call site is known, as ``path:line`` and the text of the change."""
    causes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cures: tuple[str, ...] = ()
    """What else to do than to accept the change."""
    is_missing: bool = False
    """Whether the snapshot does not exist yet."""

    def __post_init__(self) -> None:
        # Names in a file may not be printable.
        object.__setattr__(self, "head", printable(self.head))
        for name in ("training", "cost", "changes", "causes", "notes"):
            object.__setattr__(self, name, tuple(map(printable, getattr(self, name))))

    @classmethod
    def of_text(cls, text: str) -> FailureText:
        """Make the text of a comparison that had nothing to compare with."""
        first, *others = text.splitlines()
        return cls(head=first, changes=tuple(others))

    @property
    def story(self) -> tuple[str, ...]:
        """What differs, in the order of all reports: training, cost, everything else."""
        return (*self.training, *self.cost, *self.changes)

    @property
    def body(self) -> tuple[str, ...]:
        """All lines between the first one and what to do, with what they begin with."""
        return (
            *_named("", self, self.story),
            *(f"{LIKELY}{cause}" for cause in self.causes),
            *(f"{NOTE}{note}" for note in self.notes),
        )

    @property
    def lines(self) -> tuple[str, ...]:
        return (self.head, *self.body, *(f"{CURE}{cure}" for cure in self.cures))

    def within(self, scope: str, cure: str = "") -> FailureText:
        """Add `scope` behind the snapshot's path, and another `cure`, which may be empty."""
        return replace(
            self,
            head=f"{self.head}, {scope}",
            scope=", ".join(filter(None, (self.scope, scope))),
            cures=(*self.cures, *([cure] if cure else [])),
        )


def failure_lines(
    texts: Mapping[str, FailureText], *, accept: str, everything: bool = False
) -> tuple[str, ...]:
    """Explain the failed comparisons of one assertion in 8 lines, or with everything.

    Args:
        texts: By the names of values; by "" where a single value was compared.
        accept: The command that accepts what differs; may be empty.
        everything: Show all lines, where pytest does not cut them either.
    """
    head = _head(texts)
    is_several = len(texts) > 1
    values = [(name if is_several else "", text) for name, text in texts.items()]
    has_own_heads = is_several and not _share_head(texts)
    first = [
        line
        for name, text in sorted(values, key=lambda value: _place(value[1]))
        for line in _named(name, text, text.training)
    ]
    costs = [line for name, text in values for line in _named(name, text, text.cost)]
    changes = _in_turn(
        [_named(name, text, (*[text.head] * has_own_heads, *text.changes)) for name, text in values]
    )
    causes, notes, cures = (
        [*dict.fromkeys(chain.from_iterable(getattr(one, name) for one in texts.values()))]
        for name in ("causes", "notes", "cures")
    )
    tail = [f"{CURE}{cure}" for cure in cures]
    if accept and all(text.is_missing for text in texts.values()):
        tail += [f"{RECORD}{accept}", READ]
    elif accept:
        tail += [f"{ACCEPT}{accept}"]
    likely = [f"{LIKELY}{cause}" for cause in causes]
    # An error is shown as it is.
    is_fitted = any(text.compared or text.is_missing for text in texts.values())
    if everything or not is_fitted:
        return (
            head,
            *first,
            *costs,
            *changes,
            *likely,
            *(f"{NOTE}{note}" for note in notes),
            *tail,
        )
    rows, further = [*first, *costs[:_MOST_COSTS], *changes], costs[_MOST_COSTS:]
    has_changes = any(text.compared for text in texts.values())
    least = min(len(texts), len(rows))
    lines: list[str] = []
    # The command, which comes last, must not be what pytest cuts.
    for shown in range(len(rows), least - 1, -1):
        hidden = rows[shown:] and [*rows[shown:], *further]
        # A line that stands for a single one says less than that one.
        if len(hidden) == 1 and shown > least:
            continue
        what = "changes" if has_changes and not set(hidden) & set(costs) else "lines"
        more = [f"  ... and {len(hidden)} more {what} (-vv)"] if hidden else []
        rest = [*more, *likely[:1], *tail]
        if 1 + shown + len(rest) > MOST_LINES:
            continue
        # What breaks training is never cut.
        whole, others = rows[: min(shown, len(first))], rows[len(first) : shown]
        room = MOST_CHARACTERS - sum(map(len, (head, *whole, *rest)))
        lines = [head, *whole, *_fitted(others, room), *rest]
        if sum(map(len, lines)) <= MOST_CHARACTERS:
            break
    return tuple(lines)


def _fitted(lines: Sequence[str], room: int) -> Sequence[str]:
    """Cut the longest of some lines so that all have room; none if too little would be left."""
    longest = max(map(len, lines), default=0)
    for most in range(longest, _LEAST_OF_A_LINE - 1, -1):
        if sum(min(len(line), most) for line in lines) <= room:
            return [_cut_before_place(line, most) for line in lines]
    return lines


def _cut_before_place(line: str, most: int) -> str:
    """Cut a line that may end with a place in the code, which stays."""
    text, at, place = line.rpartition(" at ")
    room = most - len(at) - len(place)
    return f"{shorten(text, room)}{at}{place}" if room > most // 2 else shorten(line, most)


def told_lines(texts: Iterable[FailureText]) -> tuple[str, ...]:
    """The changes of several comparisons in a line each, in the order of all reports."""
    ordered = sorted(texts, key=_place)
    return (
        *(line for text in ordered for line in text.told[: len(text.training)]),
        *(line for text in ordered for line in text.told[len(text.training) :]),
    )


def _place(text: FailureText) -> bool:
    """Sort trees after recordings, whose problems are worse."""
    return text.compared == "fsdp_tree"


def _head(texts: Mapping[str, FailureText]) -> str:
    if len(texts) == 1:
        return next(iter(texts.values())).head
    if not _share_head(texts):
        return f"{len(texts)} comparisons failed"
    what = " and ".join(dict.fromkeys(text.compared for text in texts.values()))
    where = os.path.commonprefix([text.snapshot for text in texts.values()])  # noqa: RUF071  # the names' beginning, no directory
    scopes = dict.fromkeys(f", {text.scope}" for text in texts.values() if text.scope)
    return f"{what} differ from {where.rstrip('.')} ({len(texts)} files){''.join(scopes)}"


def _share_head(texts: Mapping[str, FailureText]) -> bool:
    """Whether each has a snapshot that it differs from: then one head serves all."""
    return all(text.compared for text in texts.values())


def _named(name: str, text: FailureText, lines: Iterable[str]) -> list[str]:
    if name:
        return [f"  {name}: {line.strip()}" for line in lines]
    # An error is written as it is.
    return [f"  {line}" if text.compared else line for line in lines]


def _in_turn(values: Sequence[Sequence[str]]) -> list[str]:
    """One line of each value after the other, as long as there are some."""
    return [line for lines in zip_longest(*values) for line in lines if line is not None]
