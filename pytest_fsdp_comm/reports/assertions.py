"""Explain failed assertions about findings, or about counts and bytes from ``comm_mode``."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from pytest_fsdp_comm.comm.events import Collective, Phase
from pytest_fsdp_comm.comm.questions import Answer
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.fqn import NO_MODULE, NaturalKey, expand, fold_fqns, natural_key
from pytest_fsdp_comm.tree.finding import Findings

# Maximum number of lines, so that an explanation fits on one screen. Except in CI and with -vv,
# pytest truncates it to 8 lines.
_MAX_LINES: Final = 20
_MAX_SIZES: Final = 3
_PHASES: Final = tuple(Phase)

# Pairs of the size of a call in bytes and the number of calls of that size, sorted.
_Sizes: TypeAlias = tuple[tuple[int, int], ...]
# Sort key of owners: modules in natural order, then calls outside any module.
_Position: TypeAlias = "tuple[bool, NaturalKey]"


def explain_answer(operator: str, left: object, right: object) -> list[str]:
    """List the collectives behind the counts or bytes in a comparison, in up to 20 lines."""
    answers = [side for side in (left, right) if isinstance(side, Answer)]
    calls = " and ".join(f"{answer!r} is {answer.expression}" for answer in answers)
    lines = [f"{left!r} {operator} {right!r}, where {calls}"]
    for answer in answers:
        if len(answers) > 1:
            lines.append(f"{answer.expression}:")
        rows = _describe_event_groups(answer.matching or answer.recorded)
        if not answer.recorded:
            rows = ["the recording has no collectives"]
        elif not answer.matching:
            rows.insert(0, "nothing matches; the recording has:")
        most = _MAX_LINES // len(answers)
        if len(rows) > most:
            more = len(rows) - most + 1
            rows[most - 1 :] = [f"... and {more} more; comm_mode.events has all"]
        lines += rows
    return [*map(printable, lines)]


def _describe_event_groups(events: Sequence[Collective]) -> list[str]:
    """Return a line for each group of equal collectives; owners are folded (``layers.{0..3}``)."""
    calls: defaultdict[tuple[Phase, str, str], defaultdict[str | None, list[int]]]
    calls = defaultdict(lambda: defaultdict(list))
    for event in events:
        operation = f"{event.kind}[{event.axis}]"
        calls[event.phase, operation, event.call_site][event.owner].append(event.nbytes)
    rows = []
    for (phase, operation, call_site), sizes_of in calls.items():
        at = f" at {call_site}" if call_site else ""
        owners_of: defaultdict[_Sizes, list[str | None]] = defaultdict(list)
        for owner, nbytes in sizes_of.items():
            owners_of[tuple(sorted(Counter(nbytes).items()))].append(owner)
        for sizes, owners in owners_of.items():
            for position, pattern in _list_owner_patterns(owners):
                text = f"{phase} {pattern} {operation} {_show_call_sizes(sizes)}{at}"
                rows.append((_PHASES.index(phase), position, operation, call_site, text))
    return [text for *_, text in sorted(rows)]


def _show_call_sizes(sizes: _Sizes) -> str:
    """Return ``x2 of 64 B, x1 of 8 B`` as in a snapshot, or ``x9 of 8 to 64 B`` for many sizes."""
    if len(sizes) > _MAX_SIZES:
        count = sum(count for _, count in sizes)
        return f"x{count} of {sizes[0][0]:_} to {sizes[-1][0]:_} B"
    return ", ".join(
        f"x{count} of {nbytes:_} B" if nbytes else f"x{count}" for nbytes, count in sizes
    )


def _list_owner_patterns(owners: Sequence[str | None]) -> Iterator[tuple[_Position, str]]:
    """Fold owners into patterns such as ``layers.{0..3}``; yield each with its sort key."""
    for pattern in fold_fqns(owner for owner in owners if owner is not None):
        yield (False, natural_key(expand(pattern)[0])), pattern
    if None in owners:
        yield (True, natural_key("")), NO_MODULE


# Matches a line in which pytest (8.4 to 9.2) explains where an asserted value came from, such as
# " +  where 1 = f()". A line with deeper indentation explains a subexpression of the line above.
_ORIGIN: Final = re.compile(r" \+( +)(?:where|and  ) (.*)")


def explain_findings(error: AssertionError) -> None:
    """If an assertion's message contains the repr of findings, append their full text."""
    # pytest calls no hook for ``assert not tree.findings``, and shortens each value to one line of
    # 240 characters. Remove pytest's lines that say where the findings, tree and model came from.
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    message: str = error.args[0]
    for label, text in dict.fromkeys(
        (repr(value), str(value)) for value in _find_asserted_findings(error)
    ):
        explained = "\n".join(f"  {line}" for line in text.splitlines())
        if label in message and explained not in message:
            message = "\n".join([*_drop_origin_lines(message, label), explained])
    error.args = (message,)


def _find_asserted_findings(error: AssertionError) -> Iterator[Findings]:
    """Yield the findings in the failing frame's variables, where pytest stores asserted values."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    variables = traceback.tb_frame.f_locals if traceback is not None else {}
    for value in variables.values():
        # Do not use isinstance(), which runs the code of proxies.
        if issubclass(type(value), Findings) and value:
            yield value


def _drop_origin_lines(message: str, label: str) -> Iterator[str]:
    """Remove pytest's lines that explain where the value with the repr `label` came from."""
    above = 0
    for line in message.split("\n"):
        origin = _ORIGIN.fullmatch(line)
        depth = len(origin[1]) if origin else 0
        if above and depth > above:
            continue
        above = depth if origin and origin[2].startswith(f"{label} = ") else 0
        if not above:
            yield line
