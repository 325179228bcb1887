"""A difference in one line, which may be cut at its end."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.diff import Change
from pytest_fsdp_comm.comm.explanation.sentences import sentence
from pytest_fsdp_comm.comm.explanation.states import count_of, nbytes_of
from pytest_fsdp_comm.comm.explanation.steps import Replaced
from pytest_fsdp_comm.text.fqn import name_owners
from pytest_fsdp_comm.text.nbytes import show_nbytes_change
from pytest_fsdp_comm.text.rank_lists import name_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.comm.diff import Comparison
    from pytest_fsdp_comm.comm.profile import Row
    from pytest_fsdp_comm.tree.diff import TreeChange

_PHRASE: Final = re.compile(r"(?:ahead|peer|root) \S+|\S+")


def headline(changes: Sequence[Change | TreeChange]) -> str:
    """Name the module and the change to know of first: ``lm_head: +8 all_gather, 3 more``."""
    # A frame, such as the world size, comes before everything that follows from it; then the
    # largest change, over all phases of the step.
    sent = [change for change in changes if isinstance(change, Change)]
    # Unshards repeat their all-gathers.
    loud = [change for change in sent if change.subject != "reshard"] or sent
    groups: dict[object, list[Change]] = {}
    for change in sorted(loud, key=lambda change: (change.subject != "frame", weight(change))):
        groups.setdefault((change.subject, change.owners, change.what), []).append(change)
    has_axes = len({change.what for change in loud if change.subject == "collective"}) > len(
        {_kind(change) for change in loud if change.subject == "collective"}
    )
    lines = [_describe(group, has_axes=has_axes) for group in groups.values()]
    lines += [f"{one.subject}: {one.what}" for one in changes if not isinstance(one, Change)]
    return f"{lines[0]}, {len(lines) - 1} more" if len(lines) > 1 else lines[0]


def headline_of_steps(comparison: Comparison) -> str:
    """Tell the first step in one line; empty for single modules and inexact explanations."""
    # Of single modules, the largest of their changes says as much in fewer words.
    if (
        not comparison.steps
        or comparison.explanation is None
        or not comparison.explanation.is_exact
    ):
        return ""
    first, *others = comparison.steps
    # Unless that is what another torch changed.
    has_torchs = any(cause.is_of_torch for cause in comparison.causes)
    if isinstance(first, Replaced) and first.kind != "unit sizes" and not has_torchs:
        return ""
    return f"{sentence(first)}, {len(others)} more" if others else sentence(first)


def weight(change: Change) -> tuple[bool, bool, int]:
    """Sort what costs most to the front."""
    # What was sent comes before what FSDP did to send it, since unshards repeat their all-gathers,
    # and before what this held in memory; what is new comes before what is gone.
    growth = (nbytes_of(change.after) - nbytes_of(change.before)) * len(change.owners)
    is_late = change.subject in {"reshard", "memory", "answer"}
    return (is_late, change.subject != "frame" and growth <= 0, -abs(growth))


def _describe(phases: Sequence[Change], *, has_axes: bool) -> str:
    first = phases[0]
    if first.phase is None:
        return f"{first.what}: {first.old_text} -> {first.new_text}"
    what = first.what if has_axes else _kind(first)
    where = name_owners(first.owners, most=1)
    each = " each" if len(first.owners) > 1 else ""
    before = [amount for change in phases for amount in change.before]
    after = [amount for change in phases for amount in change.after]
    if any(amount.ranks for amount in (*before, *after)):
        return f"{where}: {what} {_by_rank(first.before)} -> {_by_rank(first.after)}{each}"
    count = count_of(after) - count_of(before)
    if count:
        return f"{where}: {count:+} {what}{each}"
    if nbytes_of(before) != nbytes_of(after):
        unsized = sum(row.unsized for row in before), sum(row.unsized for row in after)
        change = show_nbytes_change(nbytes_of(before), nbytes_of(after), unsized)
        return f"{where}: {what} {change}{each}"
    moved = count_of(first.after) - count_of(first.before)
    if moved:
        return f"{where}: {moved:+} {what} in {first.phase}{each}"
    return f"{where}: {what} {_calls(first)}{each}"


def _kind(change: Change) -> str:
    return change.what.partition("[")[0]


def _by_rank(amounts: Sequence[Row]) -> str:
    counts = [
        f"{amount.count} on {name_ranks(amount.ranks)}" if amount.ranks else str(amount.count)
        for amount in amounts
    ]
    return " / ".join(counts) or "0"


def _calls(change: Change) -> str:
    """How calls differ that are as many and as large as before: ``float32 -> bfloat16``."""
    before, after = _phrases(change.before), _phrases(change.after)
    gone = " ".join(phrase for phrase in before if phrase not in after)
    came = " ".join(phrase for phrase in after if phrase not in before)
    if gone and came:
        return f"{gone} -> {came}"
    return f"now {came}" if came else f"no longer {gone}" if gone else "in other calls"


def _phrases(amounts: Sequence[Row]) -> dict[str, None]:
    calls = (str(one) for amount in amounts for one in amount.calls)
    return dict.fromkeys(phrase for one in calls for phrase in _PHRASE.findall(one))
