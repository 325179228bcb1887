"""What a number of ``comm_mode`` was counted from, as the text of a failed comparison."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.questions import Answer
from pytest_fsdp_comm.text.fqn import NO_MODULE, expand, fold_fqns, natural_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_fsdp_comm.comm.events import Collective
    from pytest_fsdp_comm.comm.questions import Evidence

# A screen. pytest itself cuts an explanation at 8 lines, except in CI and with -vv.
_MAX_LINES: Final = 20
_PHASES: Final = tuple(Phase)


def explain_answer(operator: str, left: object, right: object) -> list[str]:
    """Says what was counted, one line for each kind of collective.

    Args:
        operator: Of the comparison that failed: ``==``.
        left: Its left side.
        right: Its right side; one of the two, or both, is an `Answer`.

    Returns:
        The comparison and at most a screen of lines.
    """
    answers = [side for side in (left, right) if isinstance(side, Answer)]
    asked = " and ".join(f"{answer!r} is {answer.evidence.asked}" for answer in answers)
    lines = [f"{left!r} {operator} {right!r}, where {asked}"]
    for answer in answers:
        if len(answers) > 1:
            lines.append(f"{answer.evidence.asked}:")
        lines += _cut(_evidence_lines(answer.evidence), _MAX_LINES // len(answers))
    return lines


def _evidence_lines(evidence: Evidence) -> list[str]:
    if evidence.matching:
        return _grouped(evidence.matching)
    if not evidence.recorded:
        return ["the recording has not one collective"]
    return ["nothing matches; the recording has:", *_grouped(evidence.recorded)]


def _grouped(events: Sequence[Collective]) -> list[str]:
    """One line for all collectives that differ in nothing but numbers in their owners' names."""
    counts: Counter[Any] = Counter()
    nbytes: Counter[Any] = Counter()
    for event in events:
        key = (event.owner, event.phase, f"{event.kind}[{event.axis}]", event.call_site)
        counts[key] += 1
        nbytes[key] += event.nbytes
    owners: defaultdict[Any, list[str | None]] = defaultdict(list)
    for key, count in counts.items():
        owner, *rest = key
        owners[*rest, count, nbytes[key]].append(owner)
    found = [
        (_PHASES.index(phase), place, what, site, f"{phase} {pattern} {what} x{count} {size:_} B")
        for (phase, what, site, count, size), names in owners.items()
        for place, pattern in _patterns(names)
    ]
    return [f"{line} at {site}" if site else line for *_, site, line in sorted(found)]


def _patterns(owners: Sequence[str | None]) -> Iterator[tuple[Any, str]]:
    """The owners as patterns, each with its place in the order; what has no module comes last."""
    for pattern in fold_fqns(owner for owner in owners if owner is not None):
        yield (False, natural_key(expand(pattern)[0])), pattern
    if None in owners:
        yield (True, natural_key("")), NO_MODULE


def _cut(lines: Sequence[str], most: int) -> list[str]:
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 1], f"... and {len(lines) - most + 1} more; comm_mode.events has all"]
