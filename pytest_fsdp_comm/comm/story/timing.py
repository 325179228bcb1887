"""When collectives are issued: how far ahead of use units are gathered, and what is asynchronous.

These follow from the order of units, so that they change beside whatever changes units. They are
compared for what both profiles have, and told apart from counts and bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeAlias

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.story.facts import Owner
from pytest_fsdp_comm.comm.story.steps import AxisRenamed
from pytest_fsdp_comm.text.fqn import natural_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_fsdp_comm.comm.profile import CommProfile, Row
    from pytest_fsdp_comm.comm.story.steps import Step

Shares: TypeAlias = tuple[tuple[int, Fraction], ...]
"""Each value with its share of the calls, ascending; a share and no count, since that may differ
for other reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingChange:
    """Calls of some owners are issued earlier or later, or waited for differently."""

    subject: Literal["ahead", "async"]
    """``ahead``: how many units ahead of use. ``async``: whether the caller has to wait, 0 or 1."""
    phase: Phase
    kind: str
    axis: str
    owners: tuple[Owner, ...]
    """By their new names, in natural order."""
    before: Shares
    after: Shares


def find_timing_changes(
    old: CommProfile,
    new: CommProfile,
    names: Mapping[Owner, Owner],
    steps: Sequence[Step],
) -> tuple[TimingChange, ...]:
    """Compares the rows that both profiles have.

    Args:
        old: The snapshot.
        new: What was recorded.
        names: The new name of each owner of the old profile.
        steps: Of the story, among which axes may have other names.
    """
    axes = {step.old: step.new for step in steps if isinstance(step, AxisRenamed)}
    rows = {(row.key, row.owner, row.ranks): row for row in new.collectives}
    found: defaultdict[tuple[object, ...], list[Owner]] = defaultdict(list)
    values: dict[tuple[object, ...], tuple[Row, Shares, Shares]] = {}
    for row in old.collectives:
        owner = names.get(row.owner, row.owner)
        key = row.key._replace(axis=axes.get(row.axis, row.axis))
        now = rows.get((key, owner, row.ranks))
        if now is None or now.calls == row.calls:
            continue
        for subject in ("ahead", "async"):
            before, after = _shares(row, subject), _shares(now, subject)
            if before != after:
                place = (subject, now.phase, now.what, now.axis, before, after)
                found[place].append(owner)
                values[place] = now, before, after
    return tuple(
        TimingChange(
            subject="ahead" if place[0] == "ahead" else "async",
            phase=row.phase,
            kind=row.what,
            axis=row.axis,
            owners=tuple(
                sorted(
                    dict.fromkeys(found[place]),
                    key=lambda name: (name is None, natural_key(name or "")),
                )
            ),
            before=before,
            after=after,
        )
        for place, (row, before, after) in values.items()
    )


def _shares(row: Row, subject: str) -> Shares:
    counts: Counter[int] = Counter()
    for one in row.calls:
        counts[one.ahead if subject == "ahead" else int(one.is_async)] += one.count
    total = sum(counts.values())
    return tuple((value, Fraction(count, total)) for value, count in sorted(counts.items()))
