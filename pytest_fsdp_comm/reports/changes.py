"""Changes of communication and of trees as the text of a failed test."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.sentences import sentence, timing_sentence
from pytest_fsdp_comm.comm.explanation.steps import Replaced
from pytest_fsdp_comm.reports.cost_lines import cost_lines
from pytest_fsdp_comm.reports.explanation import FailureText
from pytest_fsdp_comm.reports.headline import headline, weight
from pytest_fsdp_comm.text.fqn import fold_fqns, name_owners
from pytest_fsdp_comm.text.nbytes import show_nbytes, show_nbytes_change
from pytest_fsdp_comm.text.rank_lists import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_fsdp_comm.comm.calls import Calls
    from pytest_fsdp_comm.comm.diff import Change, Comparison, Sites
    from pytest_fsdp_comm.comm.explanation.steps import Step
    from pytest_fsdp_comm.comm.profile import Row
    from pytest_fsdp_comm.tree.diff import TreeChange

_MAX_CALLS: Final = 3


def render_comparison(
    comparison: Comparison, *, snapshot: str, notes: Sequence[str] = ()
) -> FailureText:
    """Explain a failed comparison of recordings, the most important change first."""
    sites = [_site_of(step, comparison.sites) for step in comparison.steps]
    steps = [
        f"{sentence(step)}, at {site}" if site else sentence(step)
        for step, site in zip(comparison.steps, sites, strict=True)
    ]
    cost = cost_lines(comparison.cost)
    # The lines about the cost say it better.
    told_twice = "memory" if any("peak gathered" in line for line in cost) else ""
    left = sorted((one for one in comparison.left if one.subject != told_twice), key=weight)
    loud = [one for one in left if one.subject != "reshard"] or left
    quiet = [one for one in left if one not in loud]
    # What is issued earlier or later follows from which units there are.
    timings = () if comparison.explanation is None else comparison.explanation.timings
    told = tuple(
        "; likely: ".join(
            (sentence(step), *(cause.text for cause in comparison.causes if step in cause.steps))
        )
        for step in comparison.steps
    )
    return FailureText(
        head=f"comm_mode differs from {snapshot}",
        compared="comm_mode",
        snapshot=snapshot,
        cost=cost,
        changes=(
            *steps,
            *map(_change_line, loud),
            *map(timing_sentence, timings),
            *map(_change_line, quiet),
        ),
        told=told,
        sent=tuple(_sent(comparison, sites, told)),
        causes=tuple(cause.text for cause in comparison.causes),
        notes=tuple(notes),
    )


def render_tree_changes(changes: Sequence[TreeChange], *, snapshot: str) -> FailureText:
    """Explain how trees differ, the most important change first."""
    return FailureText(
        head=f"fsdp_tree differs from {snapshot}",
        compared="fsdp_tree",
        snapshot=snapshot,
        changes=tuple(
            f"{subject}: {', '.join(change.what for change in same)}"
            for subject, same in groupby(changes, key=lambda change: change.subject)
        ),
        causes=tuple(dict.fromkeys(one.likely for one in changes if one.likely)),
    )


def _sent(
    comparison: Comparison, sites: Sequence[str], lines: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield each change with the line that sends; without any, the first place that differs."""
    found = [(site, line) for site, line in zip(sites, lines, strict=True) if site]
    found += [
        (change.sites[0].call_site, _change_line(change))
        for change in comparison.left
        if change.sites and change.sites[0].call_site and change.phase is not Phase.BACKWARD
    ]
    if not found:
        places = (site.call_site for change in comparison.changes for site in change.sites)
        if first := next(filter(None, places), ""):
            found = [(first, next(iter(lines), "") or headline(comparison.changes))]
    yield from found


def _site_of(step: Step, sites: Sites) -> str:
    """Where the first collective that a step adds was issued."""
    if not isinstance(step, Replaced) or step.writes == "sizes":
        return ""
    for owner in step.about or step.owners:
        for key, rows in step.rows[owner].items():
            if key.subject != "collective" or key.phase is Phase.BACKWARD or not rows:
                continue
            found = sites.get((owner, key), ())
            if found and found[0].call_site:
                return found[0].call_site
    return ""


def _change_line(change: Change) -> str:
    if change.phase is None:
        return f"{change.what}: {change.old_text} -> {change.new_text}"
    where = name_owners(change.owners)
    line = f"{where} {change.phase}: {change.what} {_amounts(change)}"
    site = _site(change)
    return f"{line}, {site}" if site else line


def _amounts(change: Change) -> str:
    each = ", each" if len(change.owners) > 1 else ""
    differ = any(amount.ranks for amount in (*change.before, *change.after))
    if len(change.before) <= 1 and len(change.after) <= 1 and not differ:
        before = change.before[0] if change.before else None
        after = change.after[0] if change.after else None
        return f"{_simple(before, after)}{each}"
    return f"{_listed(change.before)} -> {_listed(change.after)}{each}"


def _simple(before: Row | None, after: Row | None) -> str:
    was, now = (before.count if before else 0), (after.count if after else 0)
    text = f"{was} -> {now} ({now - was:+})" if now != was else f"{was}"
    old, new = (before.nbytes if before else 0), (after.nbytes if after else 0)
    in_all = " in all" if max(was, now) > 1 else ""
    unsized = (before.unsized if before else 0), (after.unsized if after else 0)
    change = f"{show_nbytes_change(old, new, unsized)}{in_all} per rank"
    parts = [text] if old == new else [text, change]
    if before and after and (_kinds(before) != _kinds(after) or (was, old) == (now, new)):
        gone, came = _without(before, after), _without(after, before)
        parts += [f"{gone} -> {came}"] if before.calls else []
    return ", ".join(parts)


def _kinds(amount: Row) -> set[Calls]:
    """What the calls are, apart from how many and how large."""
    return {replace(calls, count=0, nbytes=0) for calls in amount.calls}


def _without(amount: Row, other: Row) -> str:
    left = [str(calls) for calls in amount.calls if calls not in other.calls]
    more = len(left) - _MAX_CALLS
    return ", ".join(left[:_MAX_CALLS]) + (f" and {more} more" if more > 0 else "") or "none"


def _listed(amounts: Sequence[Row]) -> str:
    listed = []
    for amount in amounts:
        calls = f"{show_nbytes(amount.nbytes, amount.unsized)} in all"
        # Ranks may differ in what a sum does not show, such as their peers.
        if len(amount.calls) == 1:
            calls = str(amount.calls[0]).partition(" ")[2] or "no bytes"
        ranks = name_ranks(amount.ranks) if amount.ranks else "all ranks"
        listed.append(f"{amount.count} ({calls}) on {ranks}")
    return " / ".join(listed) or "0"


def _site(change: Change) -> str:
    if not change.sites:
        return ""
    site = change.sites[0]
    owner = change.owners[0] if change.owners else None
    parts = []
    if site.issued_in is not None and site.issued_in != owner:
        parts.append(f"in {fold_fqns([site.issued_in])[0]}")
    if site.call_site:
        parts.append(f"at {site.call_site}")
    # In backward every call site is the line with .backward(), which says nothing.
    if change.phase is Phase.BACKWARD and site.issued_in in {owner, None}:
        return ""
    return f"issued {' '.join(parts)}" if parts else ""
