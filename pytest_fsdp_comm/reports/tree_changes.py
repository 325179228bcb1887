"""Changes of a sharded tree as the text of a failed test."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.reports.explanation import (
    LEFT_OUT,
    LIKELY,
    SHORT_CHARACTERS,
    FailureText,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.tree.diff import TreeChange

_SHORT_CHANGES: Final = 4


def render_tree_changes(
    changes: Sequence[TreeChange], *, snapshot: str, accept: str
) -> FailureText:
    """Explain how trees differ, the most important line first; `accept` may be empty."""
    head = f"fsdp_tree differs from {snapshot}"
    lines = [
        f"  {subject}: {', '.join(change.what for change in same)}"
        for subject, same in groupby(changes, key=lambda change: change.subject)
    ]
    causes = [f"{LIKELY}{cause}" for cause in dict.fromkeys(c.likely for c in changes) if cause]
    command = [f"  accept: {accept}"] if accept else []
    tail = [*causes[:1], *command]
    full = (head, *lines, *causes, *command)
    room = SHORT_CHARACTERS - sum(map(len, (head, *tail)))
    shown: list[str] = []
    for line in lines[:_SHORT_CHANGES]:
        room -= len(line)
        if room < 0 and shown:
            break
        shown.append(line)
    left_out = len(lines) - len(shown)
    more = [f"{LEFT_OUT}{left_out} more, below"] if left_out else []
    short = (head, *shown, *more, *tail)
    return FailureText(short=short, full=full, compared="fsdp_tree", snapshot=snapshot)
