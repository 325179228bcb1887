"""When collectives are issued: how far ahead of use units are gathered, what is asynchronous."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.names import AxisRenamed, Renamed
from pytest_fsdp_comm.comm.explanation.states import Owner
from pytest_fsdp_comm.comm.explanation.steps import Step
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey
from pytest_fsdp_comm.text.fqn import natural_key

Subject: TypeAlias = Literal["ahead", "async"]
"""``ahead``: how many units ahead of use. ``async``: whether the caller has to wait, 0 or 1."""
Shares: TypeAlias = tuple[tuple[int, Fraction], ...]
"""Each value with its share of the calls, ascending; their count may differ for other reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingChange:
    """Calls of some owners are issued earlier or later, or waited for differently."""

    subject: Subject
    key: RowKey
    owners: tuple[Owner, ...]
    """By their new names, in natural order."""
    before: Shares
    after: Shares

    @property
    def cause(self) -> str:
        """Why it may have come about, where nothing else changed; empty if nothing is known."""
        way = self.key.phase
        is_later = self.after[-1][0] < self.before[-1][0]
        if self.subject == "ahead" and is_later and way in {Phase.FORWARD, Phase.BACKWARD}:
            return f"less {way} prefetching (set_modules_to_{way}_prefetch; FSDP1: {way}_prefetch)"
        return ""


def find_timing_changes(
    old: CommProfile, new: CommProfile, steps: Sequence[Step]
) -> tuple[TimingChange, ...]:
    """Compare the rows that both profiles have, by the names that steps give them."""
    rows = {(row.key, row.owner, row.ranks): row for row in new.collectives}
    found: defaultdict[tuple[Subject, RowKey, Shares, Shares], list[Owner]] = defaultdict(list)
    for row in old.collectives:
        owner, key = row.owner, row.key
        for step in steps:
            if isinstance(step, AxisRenamed) and key.axis == step.old:
                key = key._replace(axis=step.new)
            elif isinstance(step, Renamed):
                owner = step.name(owner)
        now = rows.get((key, owner, row.ranks))
        if now is None or now.calls == row.calls:
            continue
        for subject in get_args(Subject):
            before, after = _shares(row, subject), _shares(now, subject)
            if before != after:
                found[subject, key, before, after].append(owner)
    changes = []
    for (subject, key, before, after), alike in found.items():
        owners = sorted(set(alike), key=lambda name: (name is None, natural_key(name or "")))
        changes.append(
            TimingChange(subject=subject, key=key, owners=tuple(owners), before=before, after=after)
        )
    return tuple(changes)


def _shares(row: Row, subject: Subject) -> Shares:
    counts: Counter[int] = Counter()
    for one in row.calls:
        counts[one.ahead if subject == "ahead" else int(one.is_async)] += one.count
    total = sum(counts.values())
    return tuple((value, Fraction(count, total)) for value, count in sorted(counts.items()))
