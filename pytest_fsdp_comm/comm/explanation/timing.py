"""Find calls that are issued earlier or later, or are now synchronous or asynchronous."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

from pytest_fsdp_comm.comm.calls import UNTIMED, Calls
from pytest_fsdp_comm.comm.events import Role
from pytest_fsdp_comm.comm.explanation.evidence import list_gathers
from pytest_fsdp_comm.comm.explanation.states import Owner, role_of, sort_owners
from pytest_fsdp_comm.comm.explanation.steps import Step
from pytest_fsdp_comm.comm.explanation.words import name_with_phase
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey

Subject: TypeAlias = Literal["ahead", "is_async"]
"""A field of `Calls` that describes timing, and so is compared separately."""
Shares: TypeAlias = tuple[tuple[int, Fraction], ...]
"""Each value of a timing field, ascending, and the share of calls that have it. Unlike counts,
shares stay the same if all calls are repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingChange:
    """Calls of some owners are issued earlier or later, or are now synchronous or asynchronous."""

    subject: Subject
    key: RowKey
    owners: tuple[Owner, ...]
    """The new names of the owners, in natural order."""
    before: Shares
    after: Shares

    def has_changed(self, calls: Calls) -> bool:
        """Whether calls of the new recording have a new timing."""
        return bool(getattr(calls, self.subject) == self.after[-1][0])

    def describe(self) -> str:
        """Describe when calls are issued now, or whether they are asynchronous."""
        where, calls = name_with_phase(self.owners, self.key.phase), str(self.key)
        if self.subject == "ahead":
            some, how = _describe_prefetching_change(self.before, self.after)
            before, after = (
                " or ".join(str(ahead) for ahead, _ in shares)
                for shares in (self.before, self.after)
            )
            change = f" ({before} -> {after} units ahead of use)" if before != after else ""
            return f"{where}: {some}{calls} {how}{change}"
        last, share = self.after[-1]
        if len(self.after) > 1:
            return f"{where}: {calls} now asynchronous in {share} of its calls"
        if last:
            return f"{where}: {calls} now asynchronous (async_op=True)"
        return f"{where}: {calls} now synchronous: the caller waits for it"


def _describe_prefetching_change(old: Shares, new: Shares) -> tuple[str, str]:
    """Describe a change in prefetching; a gather 0 units ahead of its use is not prefetched."""
    (old_least, old_most), (new_least, new_most) = (
        (side[0][0], side[-1][0]) for side in (old, new)
    )
    if new_most == 0 or new_least == 0 < old_least:
        return "some " if new_most else "", "no longer prefetched"
    if old_most == 0:
        return "" if new_least else "some ", "now prefetched"
    if old_least == 0 < new_least:
        return "", "now always prefetched"
    old_mean, new_mean = (sum(ahead * share for ahead, share in side) for side in (old, new))
    how = "at other times"
    if old_mean != new_mean:
        how = "later" if new_mean < old_mean else "earlier"
    return "", f"prefetched {how}"


def find_timing_changes(
    old: CommProfile, new: CommProfile, steps: Sequence[Step]
) -> tuple[TimingChange, ...]:
    """Compare the timing of rows that both profiles have, after applying the steps' renames."""
    rows = {(row.key, row.owner, row.ranks): row for row in new.collectives}
    num_units = [len({owner for owner, *_ in list_gathers(side)}) for side in (old, new)]
    trained = [
        {row.owner for row in side.collectives if role_of((row,)) == Role.GRADIENTS}
        for side in (old, new)
    ]
    by_change: defaultdict[tuple[Subject, RowKey, Shares, Shares], list[Owner]] = defaultdict(list)
    for row in old.collectives:
        owner, key = row.owner, row.key
        for step in steps:
            owner = step.rename_owner(owner)
            key = key._replace(axis=step.rename_axis(key.axis))
        now = rows.get((key, owner, row.ranks))
        if now is None or now.calls == row.calls:
            continue
        for subject in get_args(Subject):
            before, after = (_compute_timing_shares(side.calls, subject) for side in (row, now))
            # With more or fewer units in between, the same gather is another distance ahead.
            is_prefetched = subject == "ahead" and before[0][0] and after[0][0]
            if before == after or (is_prefetched and num_units[0] != num_units[1]):
                continue
            # Backward may still gather a frozen unit ahead, and not use it.
            is_frozen = row.owner in trained[0] and owner not in trained[1]
            if subject == "ahead" and not after[-1][0] and is_frozen:
                continue
            # If calls of one size were added or removed, the timing of others did not change.
            kinds = [_compute_timing_shares_by_kind(side, subject) for side in (row, now)]
            shared = kinds[0].keys() & kinds[1].keys()
            if not shared or any(kinds[0][kind] != kinds[1][kind] for kind in shared):
                by_change[subject, key, before, after].append(owner)
    return tuple(
        TimingChange(subject=subject, key=key, owners=sort_owners(owners), before=was, after=now)
        for (subject, key, was, now), owners in by_change.items()
    )


def _compute_timing_shares_by_kind(row: Row, subject: Subject) -> dict[Calls, Shares]:
    kinds: defaultdict[Calls, list[Calls]] = defaultdict(list)
    for calls in row.calls:
        kinds[replace(calls, count=0, **UNTIMED)].append(calls)
    return {kind: _compute_timing_shares(calls, subject) for kind, calls in kinds.items()}


def _compute_timing_shares(calls: Iterable[Calls], subject: Subject) -> Shares:
    counts: Counter[int] = Counter()
    for kind in calls:
        counts[getattr(kind, subject)] += kind.count
    total = sum(counts.values())
    return tuple((value, Fraction(count, total)) for value, count in sorted(counts.items()))
