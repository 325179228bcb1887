"""What failed assertions about answers of ``comm_mode`` and about findings show."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from pytest_fsdp_comm.comm.events import Collective, Phase
from pytest_fsdp_comm.comm.questions import Answer
from pytest_fsdp_comm.text.fqn import NO_MODULE, NaturalKey, expand, fold_fqns, natural_key
from pytest_fsdp_comm.tree.finding import Findings

# A screen. pytest itself cuts an explanation at 8 lines, except in CI and with -vv.
_MAX_LINES: Final = 20
_MAX_SIZES: Final = 3
_PHASES: Final = tuple(Phase)

# Bytes of a call and how many calls have them, by bytes.
_Sizes: TypeAlias = tuple[tuple[int, int], ...]
# Whether there is no module, and the first module.
_Position: TypeAlias = "tuple[bool, NaturalKey]"


def explain_answer(operator: str, left: object, right: object) -> list[str]:
    """Say, in at most a screen of lines, what each `Answer` among two sides was counted from."""
    answers = [side for side in (left, right) if isinstance(side, Answer)]
    asked = " and ".join(f"{answer!r} is {answer.asked}" for answer in answers)
    lines = [f"{left!r} {operator} {right!r}, where {asked}"]
    for answer in answers:
        if len(answers) > 1:
            lines.append(f"{answer.asked}:")
        found = _grouped(answer.matching or answer.recorded)
        if not answer.recorded:
            found = ["the recording has no collectives"]
        elif not answer.matching:
            found.insert(0, "nothing matches; the recording has:")
        most = _MAX_LINES // len(answers)
        if len(found) > most:
            more = len(found) - most + 1
            found[most - 1 :] = [f"... and {more} more; comm_mode.events has all"]
        lines += found
    return lines


def _grouped(events: Sequence[Collective]) -> list[str]:
    """One line for all collectives that differ in nothing but numbers in their owners' names."""
    calls: defaultdict[tuple[Phase, str, str], defaultdict[str | None, list[int]]]
    calls = defaultdict(lambda: defaultdict(list))
    for event in events:
        what = f"{event.kind}[{event.axis}]"
        calls[event.phase, what, event.call_site][event.owner].append(event.nbytes)
    found = []
    for (phase, what, call_site), nbytes in calls.items():
        at = f" at {call_site}" if call_site else ""
        alike: defaultdict[_Sizes, list[str | None]] = defaultdict(list)
        for owner, own in nbytes.items():
            alike[tuple(sorted(Counter(own).items()))].append(owner)
        for sizes, owners in alike.items():
            for position, pattern in _patterns(owners):
                text = f"{phase} {pattern} {what} {_calls(sizes)}{at}"
                found.append((_PHASES.index(phase), position, what, call_site, text))
    return [text for *_, text in sorted(found)]


def _calls(sizes: _Sizes) -> str:
    """``x2 of 64 B, x1 of 8 B``, as in a snapshot; ``x9 of 8 to 64 B`` if there are many sizes."""
    if len(sizes) > _MAX_SIZES:
        count = sum(count for _, count in sizes)
        return f"x{count} of {sizes[0][0]:_} to {sizes[-1][0]:_} B"
    return ", ".join(
        f"x{count} of {nbytes:_} B" if nbytes else f"x{count}" for nbytes, count in sizes
    )


def _patterns(owners: Sequence[str | None]) -> Iterator[tuple[_Position, str]]:
    """The owners as patterns, each with its position; what has no module comes last."""
    for pattern in fold_fqns(owner for owner in owners if owner is not None):
        yield (False, natural_key(expand(pattern)[0])), pattern
    if None in owners:
        yield (True, natural_key("")), NO_MODULE


# How pytest says where a value in an assertion comes from (8.4 to 9.2); more spaces are nested.
_ORIGIN: Final = re.compile(r" \+( +)(?:where|and  ) (.*)")


def explain_findings(error: AssertionError) -> None:
    """Write the findings that an assertion was about into its message, if that shows any."""
    # pytest asks no hook about ``assert not tree.findings``, and shortens each value to one line of
    # 240 characters. What it wrote of where the findings come from is left out: the tree, the
    # model.
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    message: str = error.args[0]
    for shown, text in dict.fromkeys((repr(found), str(found)) for found in _findings(error)):
        explained = "\n".join(f"  {line}" for line in text.splitlines())
        if shown in message and explained not in message:
            message = "\n".join([*_without_origin(message, shown), explained])
    error.args = (message,)


def _findings(error: AssertionError) -> Iterator[Findings]:
    """What the failing frame holds, the values of parts of an assertion included."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    held = traceback.tb_frame.f_locals if traceback is not None else {}
    for value in held.values():
        # Never isinstance(), which runs the code of proxies.
        if issubclass(type(value), Findings) and value:
            yield value


def _without_origin(message: str, shown: str) -> Iterator[str]:
    """The lines of a message without those that say where a value comes from."""
    above = 0
    for line in message.split("\n"):
        origin = _ORIGIN.fullmatch(line)
        depth = len(origin[1]) if origin else 0
        if above and depth > above:
            continue
        above = depth if origin and origin[2].startswith(f"{shown} = ") else 0
        if not above:
            yield line
