"""Changes of communication as the text of a failed test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.events import Phase
from pytest_fsdp_comm.fqn import fold_fqns
from pytest_fsdp_comm.nbytes import show_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_fsdp_comm.diff import Amount, Change, Comparison

MAX_CHANGES: Final = 20
"""Lines of changes that are shown; the rest is counted."""
_MAX_PATTERNS: Final = 3


def render_comparison(
    comparison: Comparison, *, snapshot: str, accept: str, notes: Sequence[str] = ()
) -> list[str]:
    """Writes the explanation of a failed comparison, the most important line first.

    Args:
        comparison: What differs.
        snapshot: Path of the snapshot, as the user would type it.
        accept: The command that accepts the change.
        notes: Circumstances of the recording.

    Returns:
        Lines without line ends.
    """
    lines = [f"comm_mode differs from {snapshot}"]
    # What was sent comes before what FSDP did to send it: unshards repeat their all-gathers.
    loud = [change for change in comparison.changes if change.subject != "reshard"]
    shown = loud or list(comparison.changes)
    lines += [f"  {line}" for change in shown[:MAX_CHANGES] for line in _change_lines(change)]
    hidden = len(shown) - MAX_CHANGES
    if hidden > 0:
        lines.append(f"  ... and {hidden} more")
    if len(shown) < len(comparison.changes):
        count = len(comparison.changes) - len(shown)
        lines.append(f"  (and {count} unshard or reshard {_plural('count', count)} with them)")
    lines += [f"  likely: {cause}" for cause in comparison.causes]
    lines += [f"  note: {note}" for note in notes]
    lines.append(f"  accept: {accept}")
    return lines


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _change_lines(change: Change) -> Iterable[str]:
    if change.phase is None:
        yield f"{change.what}: {change.old_text} -> {change.new_text}"
        return
    where = _owners(change.owners)
    line = f"{where} {change.phase}: {change.what} {_amounts(change)}"
    site = _site(change)
    yield f"{line}, {site}" if site else line


def _owners(owners: Sequence[str | None]) -> str:
    patterns = list(fold_fqns(name for name in owners if name is not None))
    if None in owners:
        patterns.append("(no module)")
    more = len(patterns) - _MAX_PATTERNS
    shown = ", ".join(patterns[:_MAX_PATTERNS])
    return f"{shown} and {more} more" if more > 0 else shown


def _amounts(change: Change) -> str:
    each = " each" if len(change.owners) > 1 else ""
    if len(change.before) <= 1 and len(change.after) <= 1 and not _by_rank(change):
        before = change.before[0] if change.before else None
        after = change.after[0] if change.after else None
        return f"{_simple(before, after)}{each}"
    return f"{_listed(change.before)} -> {_listed(change.after)}{each}"


def _by_rank(change: Change) -> bool:
    return any(amount.ranks for amount in (*change.before, *change.after))


def _simple(before: Amount | None, after: Amount | None) -> str:
    was, now = (before.count if before else 0), (after.count if after else 0)
    nbytes = (after.nbytes if after else 0) - (before.nbytes if before else 0)
    parts = []
    if now != was:
        parts.append(f"{now - was:+}")
    if nbytes:
        sign = "+" if nbytes > 0 else "-"
        parts.append(f"{sign}{show_nbytes(abs(nbytes))} per rank")
    return f"{was} -> {now} ({', '.join(parts)})" if now != was else f"{was} ({', '.join(parts)})"


def _listed(amounts: Sequence[Amount]) -> str:
    if not amounts:
        return "0"
    return " / ".join(
        f"{amount.count} ({show_nbytes(amount.nbytes)}) on {_ranks(amount.ranks)}"
        for amount in amounts
    )


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
