"""Describe changes in recordings and trees, in a failure text or a headline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.diff import Change, Comparison, NewCalls
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.causes import NO_BACKWARD
from pytest_fsdp_comm.comm.explanation.names import Renamed
from pytest_fsdp_comm.comm.explanation.sentences import (
    name_modules,
    name_place,
    sentence,
    timing_sentence,
)
from pytest_fsdp_comm.comm.explanation.states import count_of, nbytes_of
from pytest_fsdp_comm.comm.explanation.steps import WRITES, Replaced, Step
from pytest_fsdp_comm.comm.explanation.training import TrainingChange
from pytest_fsdp_comm.comm.profile import Row
from pytest_fsdp_comm.reports.cost_lines import cost_lines
from pytest_fsdp_comm.reports.explanation import FailureText
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import counted, show_nbytes, show_nbytes_change
from pytest_fsdp_comm.tree.diff import TreeChange

_MAX_CALLS: Final = 3
_MAX_LINES: Final = 3
_PASSES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD})


def render_comparison(
    comparison: Comparison, *, snapshot: str, notes: Sequence[str] = ()
) -> FailureText:
    """Explain a failed comparison of recordings, most important change first."""
    steps = comparison.reported
    new_calls = [_new_calls_of(step, comparison) for step in steps]
    sentences = [*map(sentence, steps)]
    # Changes in units are printed first, because changes in timing result from them.
    timings = () if comparison.explanation is None else comparison.explanation.timings
    if len(steps) == 1 and isinstance(steps[0], Renamed) and not (comparison.remaining or timings):
        sentences[0] += "; all communication is unchanged"
    lines = [
        f"{text}, at {_name_lines(calls)}" if _lines(calls) else text
        for text, calls in zip(sentences, new_calls, strict=True)
    ]
    num_of_training = len(comparison.training)
    cost = cost_lines(comparison.cost)
    # Do not list the peak again if the cost lines already report it.
    repeated = "memory" if any("peak gathered" in line for line in cost) else ""
    rows = sorted(
        (change for change in comparison.remaining if change.subject != repeated), key=weight
    )
    loud = [change for change in rows if change.subject != "reshard"] or rows
    quiet = [change for change in rows if change not in loud]
    summaries = tuple(
        "; likely: ".join(
            (text, *(cause.text for cause in comparison.causes if step in cause.steps))
        )
        for text, step in zip(sentences, steps, strict=True)
    )
    return FailureText(
        head=f"comm_mode differs from {snapshot}",
        compared="comm_mode",
        snapshot=snapshot,
        training=tuple(lines[:num_of_training]),
        cost=cost,
        changes=(
            *lines[num_of_training:],
            *map(_change_line, loud),
            *map(timing_sentence, timings),
            *map(_change_line, quiet),
        ),
        summaries=summaries,
        sent=tuple(_sent(comparison, new_calls, summaries)),
        causes=tuple(cause.text for cause in comparison.causes),
        notes=tuple(notes),
    )


def render_tree_changes(changes: Sequence[TreeChange], *, snapshot: str) -> FailureText:
    """Explain a failed comparison of trees, most important change first."""
    lines = [
        (breaks, f"{subject}: {', '.join(change.what for change in same)}")
        for (subject, breaks), same in groupby(
            changes, key=lambda change: (change.subject, change.breaks_training)
        )
    ]
    training = tuple(line for breaks, line in lines if breaks)
    return FailureText(
        head=f"fsdp_tree differs from {snapshot}",
        compared="fsdp_tree",
        snapshot=snapshot,
        training=training,
        changes=tuple(line for breaks, line in lines if not breaks),
        summaries=training,
        causes=tuple(dict.fromkeys(change.likely for change in changes if change.likely)),
    )


def _sent(
    comparison: Comparison, new_calls: Sequence[NewCalls], summaries: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield the call site and text of each change; if no site is known, take one from a row."""
    differing = [change for change in comparison.changes if _lines(change.new_calls)]
    num_of_training = len(comparison.training)
    pairs = [*zip(new_calls[num_of_training:], summaries[num_of_training:], strict=True)]
    pairs = [(calls, _with_lines(line, calls)) for calls, line in pairs]
    pairs += [
        (_without_backward(_new_lines(change, comparison)), _change_line(change))
        for change in comparison.remaining
    ]
    if not num_of_training and not any(_lines(calls) for calls, _ in pairs):
        new = [calls for row in differing if _lines(calls := _new_lines(row, comparison))][:1]
        pairs = [
            (calls, _with_lines([*summaries, headline(comparison.changes)][0], calls))
            for calls in new
        ]
    # Missing calls have no call site, so use the call site of new calls in backward, if any.
    backward = [change.new_calls for change in differing if change.phase is Phase.BACKWARD]
    first = [(calls, line) for calls in backward[:1] for line in summaries[:num_of_training]]
    for calls, text in (*first, *pairs):
        yield from ((line, text) for line in _lines(calls)[:_MAX_LINES])


def _new_calls_of(step: TrainingChange | Step, comparison: Comparison) -> NewCalls:
    """Return the lines of code that issued a change's new calls; empty if they are unknown."""
    if not isinstance(step, Replaced) or step.kind in WRITES:
        return NewCalls()
    return NewCalls.join(
        _without_backward(comparison.new_calls(step, owner, key))
        for owner in step.facts.get("modules") or step.owners
        for key in step.rows[owner]
        if key.subject == "collective"
    )


def _without_backward(calls: NewCalls) -> NewCalls:
    """Remove lines that call ``.backward()``, because they issue all collectives of backward."""
    return replace(calls, sites=tuple(site for site in calls.sites if not site[1].is_of_backward))


def _new_lines(change: Change, comparison: Comparison) -> NewCalls:
    """Return a change's new calls; if added forwards are a cause, drop lines that had old calls."""
    calls, more = change.new_calls, count_of(change.after) - count_of(change.before)
    if all(cause.text != NO_BACKWARD for cause in comparison.causes):
        return calls
    # A line that issued more calls than were added must also have issued old calls.
    return replace(calls, sites=tuple(site for site in calls.sites if site[1].calls.count <= more))


def _with_lines(text: str, calls: NewCalls) -> str:
    return text if calls.is_certain else f"{text}, at {_name_lines(calls)}"


def _lines(calls: NewCalls) -> list[str]:
    return [*dict.fromkeys(site.call_site for _, site in calls.sites if site.call_site)]


def _name_lines(calls: NewCalls) -> str:
    """Format the lines that may have issued the calls: ``a.py:9 or b.py:17``."""
    lines = _lines(calls)
    more = len(lines) - _MAX_LINES
    listed = [*lines[:_MAX_LINES], *([f"{more} more"] if more > 0 else [])]
    word = "and" if calls.is_certain or more > 0 else "or"
    return f" {word} ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))


def _change_line(change: Change) -> str:
    site = _site(change)
    return f"{_change_text(change)}, {site}" if site else _change_text(change)


def _change_text(change: Change) -> str:
    if change.phase is None:
        return f"{change.what}: {change.old_text} -> {change.new_text}"
    where = name_place(change.owners, change.phase)
    each = ", each" if len(change.owners) > 1 else ""
    if change.subject == "collective":
        return f"{where}{each}: {change.what} {_amounts(change)}"
    verb = f"{change.what}ed"
    if change.subject == "redistribution":
        verb = f"redistributed {change.what.replace('->', ' -> ')}"
    often = "" if change.before and change.after else "now " if change.after else "no longer "
    return f"{where}{each}: {often}{verb}, {_amounts(change, ' times')}"


def _amounts(change: Change, times: str = "") -> str:
    differ = any(row.ranks for row in (*change.before, *change.after))
    if len(change.before) <= 1 and len(change.after) <= 1 and not differ:
        before = change.before[0] if change.before else None
        after = change.after[0] if change.after else None
        return _simple(before, after, times)
    return f"{_listed(change.before)} -> {_listed(change.after)}"


def _simple(before: Row | None, after: Row | None, times: str) -> str:
    was, now = (before.count if before else 0), (after.count if after else 0)
    text = f"{was} -> {now}{times} ({now - was:+})" if now != was else f"x{was}"
    old, new = (before.nbytes if before else 0), (after.nbytes if after else 0)
    unsized = (before.unsized if before else 0), (after.unsized if after else 0)
    parts = [text]
    if old != new:
        parts.append(f"{show_nbytes_change(old, new, unsized)} per rank")
    is_other_kind = before and after and _kinds(before) != _kinds(after)
    if before and after and before.calls and (is_other_kind or (was, old) == (now, new)):
        removed, added = _without(before, after), _without(after, before)
        if removed and added:
            # Both texts contain the count, so drop it from `parts` if no call is unchanged.
            is_all = was == now and set(before.calls).isdisjoint(after.calls)
            parts = [*parts[is_all:], f"{removed} -> {added}"]
        elif removed or added:
            parts.append(f"{'removed' if removed else 'added'} {removed or added}")
    return ", ".join(parts)


def _kinds(amount: Row) -> set[Calls]:
    """Return a row's calls without their counts and sizes."""
    return {replace(calls, count=0, nbytes=0) for calls in amount.calls}


def _without(amount: Row, excluded: Row) -> str:
    texts = [str(calls) for calls in amount.calls if calls not in excluded.calls]
    more = len(texts) - _MAX_CALLS
    return ", ".join(texts[:_MAX_CALLS]) + (f" and {more} more" if more > 0 else "")


def _listed(amounts: Sequence[Row]) -> str:
    listed = []
    for amount in amounts:
        calls = f"x{amount.count}, {show_nbytes(amount.nbytes, amount.unsized)} in total,"
        # List the calls if possible, because a sum hides differences between ranks, such as peers.
        if len(amount.calls) == 1:
            calls = str(amount.calls[0])
        ranks = name_ranks(amount.ranks) if amount.ranks else "all ranks"
        listed.append(f"{calls} on {ranks}")
    return " / ".join(listed) or "0"


def _site(change: Change) -> str:
    calls = change.new_calls
    issued_in = {site.issued_in for owner, site in calls.sites if site.issued_in != owner} - {None}
    if not issued_in:
        calls = _without_backward(calls)
    parts = []
    if issued_in:
        of = f"the {change.phase} of " if change.phase in _PASSES else ""
        parts.append(f"requested by {of}{name_modules(issued_in)}")
    if _lines(calls):
        parts.append(f"called from {_name_lines(calls)}")
    return ", ".join(parts)


def headline(changes: Sequence[Change | TreeChange]) -> str:
    """Summarize changes by the most important one: ``lm_head: +8 all_gather, 3 more``."""
    # Changes to the world size, mesh and the like come first, then the most important row. The same
    # change in several phases counts as one.
    sent = [change for change in changes if isinstance(change, Change)]
    # If anything else changed, ignore unshards and reshards: each unshard repeats an all-gather.
    loud = [change for change in sent if change.subject != "reshard"] or sent
    groups: dict[object, list[Change]] = {}
    for change in sorted(loud, key=lambda change: (change.subject != "frame", weight(change))):
        groups.setdefault((change.subject, change.owners, change.what), []).append(change)
    has_axes = len({change.what for change in loud if change.subject == "collective"}) > len(
        {_kind(change) for change in loud if change.subject == "collective"}
    )
    lines = [_describe(group, has_axes=has_axes) for group in groups.values()]
    trees = [change for change in changes if not isinstance(change, Change)]
    lines += [f"{change.subject}: {change.what}" for change in trees]
    return _and_more(lines[0], len(lines) - 1)


def headline_of_steps(comparison: Comparison) -> str:
    """Summarize a comparison by its first model-wide change; empty if `headline` is better."""
    # `headline` is better if the steps do not explain all rows. It is also shorter for a change to
    # only some modules, but it cannot name a different torch version as the cause.
    is_exact = comparison.explanation is not None and comparison.explanation.is_exact
    if not comparison.reported or not (comparison.training or is_exact):
        return ""
    first, *further = comparison.reported
    has_torchs = any(cause.is_of_torch for cause in comparison.causes)
    is_of_modules = isinstance(first, Replaced) and first.kind != "unit sizes"
    if is_of_modules and not (comparison.training or has_torchs):
        return ""
    more = len(further)
    if comparison.training:
        more += sum(change.subject not in {"reshard", "memory"} for change in comparison.remaining)
    return _and_more(sentence(first), more)


def _and_more(text: str, more: int) -> str:
    return f"{text}, {counted(more, 'more change')}" if more else text


def weight(change: Change) -> tuple[bool, bool, int]:
    """Return the sort key that puts the most important change first."""
    # Collectives come before unshards, which only repeat all-gathers, and before memory and assumed
    # values. In both groups, traffic that grows and gradients that shrink come before the rest.
    growth = (nbytes_of(change.after) - nbytes_of(change.before)) * len(change.owners)
    is_late = change.subject in {"reshard", "memory", "answer"}
    calls = [call for row in change.before for call in row.calls] if change.after else []
    is_less = growth < 0 and any(call.role == Role.GRADIENTS for call in calls)
    is_loud = change.subject == "frame" or growth > 0 or is_less
    return (is_late, not is_loud, -abs(growth))


def _describe(phases: Sequence[Change], *, has_axes: bool) -> str:
    """Summarize a change as a difference in count; if counts are equal, as in the failure text."""
    first = phases[0]
    before = [row for change in phases for row in change.before]
    after = [row for change in phases for row in change.after]
    count = count_of(after) - count_of(before)
    if first.phase is None or not count or any(row.ranks for row in (*before, *after)):
        return _change_text(first)
    operation = first.what if has_axes else _kind(first)
    each = " each" if len(first.owners) > 1 else ""
    return f"{name_modules(first.owners, most=1)}: {count:+} {operation}{each}"


def _kind(change: Change) -> str:
    return change.what.partition("[")[0]
