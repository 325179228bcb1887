"""What a number of ``comm_mode`` was counted from, as the text of a failed comparison."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.questions import Answer
from pytest_fsdp_comm.text.fqn import NO_MODULE, NaturalKey, expand, fold_fqns, natural_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_fsdp_comm.comm.events import Collective
    from pytest_fsdp_comm.comm.questions import Evidence

# A screen. pytest itself cuts an explanation at 8 lines, except in CI and with -vv.
_MAX_LINES: Final = 20
_PHASES: Final = tuple(Phase)

_Position: TypeAlias = "tuple[bool, NaturalKey]"
"""Whether there is no module, and the first module."""


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
        return ["the recording has no collectives"]
    return ["nothing matches; the recording has:", *_grouped(evidence.recorded)]


def _grouped(events: Sequence[Collective]) -> list[str]:
    """One line for all collectives that differ in nothing but numbers in their owners' names."""
    by_owner: defaultdict[_Line, defaultdict[str | None, list[int]]]
    by_owner = defaultdict(lambda: defaultdict(list))
    for event in events:
        line = _Line(
            phase=event.phase, what=f"{event.kind}[{event.axis}]", call_site=event.call_site
        )
        by_owner[line][event.owner].append(event.nbytes)
    found = [
        (*line.order(position), line.text(pattern, count, nbytes))
        for line, sizes in by_owner.items()
        for (count, nbytes), owners in _alike(sizes).items()
        for position, pattern in _patterns(owners)
    ]
    return [text for *_, text in sorted(found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """What collectives have in common that share a line."""

    phase: Phase
    what: str
    call_site: str

    def order(self, position: _Position) -> tuple[int, _Position, str, str]:
        """Where the line stands among the others."""
        return _PHASES.index(self.phase), position, self.what, self.call_site

    def text(self, owners: str, count: int, nbytes: int) -> str:
        """The line."""
        at = f" at {self.call_site}" if self.call_site else ""
        return f"{self.phase} {owners} {self.what} x{count} {nbytes:_} B{at}"


def _alike(sizes: Mapping[str | None, Sequence[int]]) -> dict[tuple[int, int], list[str | None]]:
    """The owners that sent as much in as many calls."""
    owners: defaultdict[tuple[int, int], list[str | None]] = defaultdict(list)
    for owner, own in sizes.items():
        owners[len(own), sum(own)].append(owner)
    return owners


def _patterns(owners: Sequence[str | None]) -> Iterator[tuple[_Position, str]]:
    """The owners as patterns, each with its position; what has no module comes last."""
    for pattern in fold_fqns(owner for owner in owners if owner is not None):
        yield (False, natural_key(expand(pattern)[0])), pattern
    if None in owners:
        yield (True, natural_key("")), NO_MODULE


def _cut(lines: Sequence[str], most: int) -> list[str]:
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 1], f"... and {len(lines) - most + 1} more; comm_mode.events has all"]
