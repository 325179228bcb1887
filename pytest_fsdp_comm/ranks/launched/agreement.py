"""Compares the tests that launched processes collected, which may differ in their order only."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fsdp_comm.ranks.wire.messages import PlannedTest

USUAL_REASONS = (
    "Usual reasons: names or files that depend on the rank (RANK, LOCAL_RANK), the host or chance; "
    "files that only some machines have; another version of the checkout or of a package; options "
    "that differ (--lf, -k, PYTEST_ADDOPTS); or pytest sessions that are not the same, in the same "
    "order, on every rank. `pytest --collect-only -q` on both shows what each collects"
)

_MOST_SHOWN = 4


def positions(theirs: Sequence[PlannedTest], ours: Sequence[PlannedTest]) -> list[int] | None:
    """Where each of the leader's tests is among a follower's; None if the sets differ."""
    if Counter(theirs) != Counter(ours):
        return None
    # One test may be there several times (--keep-duplicates).
    places: dict[PlannedTest, deque[int]] = defaultdict(deque)
    for place, test in enumerate(ours):
        places[test].append(place)
    return [places[test].popleft() for test in theirs]


def describe_difference(theirs: Sequence[PlannedTest], ours: Sequence[PlannedTest]) -> str:
    """What a follower lacks and has of its own, to be read after its rank; empty if nothing."""
    lacked = Counter(theirs) - Counter(ours)
    added = Counter(ours) - Counter(theirs)
    # A test with other settings is one test, not two.
    expected = {test.nodeid: test.settings for test in lacked}
    changed = {
        test.nodeid: f"{test.nodeid} on {test.settings or 'no rank'}, rank 0 on "
        f"{expected[test.nodeid] or 'no rank'}"
        for test in added
        if test.nodeid in expected
    }
    gone, new = (
        [test.nodeid for test in tests.elements() if test.nodeid not in changed]
        for tests in (lacked, added)
    )
    parts = []
    if gone:
        parts.append(f"lacks {len(gone)} of rank 0's {len(theirs)} tests:{_shown(gone)}")
    if new:
        parts.append(f"has {len(new)} that rank 0 lacks:{_shown(new)}")
    if changed:
        lines = [*changed.values()]
        parts.append(f"runs {len(lines)} in another way:{_shown(lines)}")
    return "\n  and ".join(parts)


def _shown(lines: list[str]) -> str:
    more = len(lines) - _MOST_SHOWN
    shown = [*lines[:_MOST_SHOWN], *([f"... and {more} more"] if more > 0 else [])]
    return "".join(f"\n    {line}" for line in shown)
