"""Changes of a sharded tree as the text of a failed test."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from pytest_fsdp_comm.reports.explanation import LIKELY, FailureText, fit_changes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.tree.diff import TreeChange


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
    return FailureText(
        short=fit_changes([head], lines, [*causes[:1], *command]),
        full=(head, *lines, *causes, *command),
        compared="fsdp_tree",
        snapshot=snapshot,
    )
