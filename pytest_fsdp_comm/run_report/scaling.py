"""Brings together what a session recorded of each test at several world sizes."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.cost import cost_of_change
from pytest_fsdp_comm.comm.profile import CommProfile, ranks_of
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.reports.scaling import OWN_BYTES, Scaling, Size
from pytest_fsdp_comm.run_report.writing import read_profile
from pytest_fsdp_comm.text.counts import shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from pytest_fsdp_comm.comm.links import Links
    from pytest_fsdp_comm.reports.html.values import Compared, Result

_SIZE: Final = re.compile(r"(?:\[|-)ws(\d+)\]$")
_VERDICTS: Final = {"same": "as reviewed", "updated": "written", "uncompared": "none"}
_MAX_OUTCOME: Final = 60


def scalings_of(
    results: Iterable[Result], links: Links, asked: Collection[int]
) -> Iterator[Scaling]:
    """Yield what was recorded of tests that were simulated at two sizes or more.

    Sizes of ``--comm-scaling`` (`asked`) at which such a test did not run are told.
    """
    groups: defaultdict[str, dict[int, Result]] = defaultdict(dict)
    for result in results:
        # Without a backend, it did not come to its ranks.
        if (match := _SIZE.search(result.nodeid)) and result.record.backend in {"", "fake"}:
            test = result.nodeid[: match.start()] + "]" * (match[0][0] == "-")
            groups[test][int(match[1])] = result
    for test, by_size in groups.items():
        sizes = sorted({*by_size, *(asked if by_size.keys() & {*asked} else ())})
        values = {
            size: [one for one in result.record.compared if one.kind == "comm"]
            for size, result in by_size.items()
        }
        is_simulated = any(result.record.backend for result in by_size.values())
        most = max(1, *map(len, values.values())) if is_simulated and len(sizes) > 1 else 0
        for place in range(most):
            yield Scaling(
                test=test if most == 1 else f"{test}, recording {place + 1}",
                sizes=tuple(
                    _size(size, by_size[size], values[size][place : place + 1], links)
                    if size in by_size
                    else Size(world_size=size, outcome="not run")
                    for size in sizes
                ),
            )


def _size(world_size: int, result: Result, found: list[Compared], links: Links) -> Size:
    verdict = found[0].verdict if found else "uncompared"
    outcome = _VERDICTS.get(verdict, verdict)
    if result.outcome != "passed" and verdict != "differs":
        outcome = shorten(f"{result.outcome}: {result.message}", _MAX_OUTCOME).rstrip(": ")
    try:
        profile = read_profile(found[0].new) if found and found[0].new else None
    except FsdpCommError:
        profile = None
    if not isinstance(profile, CommProfile):
        return Size(world_size=world_size, outcome=outcome)
    cost = cost_of_change(profile, profile, links)
    sent, padding, parts = cost.after, found[0].padding_nbytes, cost.collectives
    numbers: dict[str, float] = {
        f"calls of {part.kind}[{part.axis}]": part.after.count + part.after.unsized
        for part in parts
    }
    numbers |= {
        "calls": sent.count + sent.unsized,
        "calls of unknown size": sent.unsized,
        "bytes": sent.nbytes,
        "peak gathered": cost.peak_after,
    }
    if sent.seconds is not None and not any(
        part.after.count and part.after.seconds is None for part in parts
    ):
        numbers["seconds without overlap"] = sent.seconds
    # It is that of the lowest rank, and the cost perhaps another's.
    if padding is not None and (not cost.ranks or min(ranks_of(profile)) in cost.ranks):
        numbers |= {"padding": padding, OWN_BYTES: sent.nbytes - padding}
    return Size(world_size=world_size, outcome=outcome, numbers=numbers)
