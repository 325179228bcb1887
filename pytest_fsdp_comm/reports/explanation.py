"""Why an assertion failed, in the room that there is: a screen, or all of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.words import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# The title of the section below pytest's explanation.
SECTION: Final = "comparison"
LIKELY: Final = "  likely: "
LEFT_OUT: Final = "  ... and "
CURE: Final = "  or "
ACCEPT: Final = "  accept: "
RECORD: Final = "  record it: "
BESIDE: Final = "  not compared: "
READ: Final = "  then read the file, and commit it with the test"
"""How lines begin that name no change: causes, what is left out, cures and commands."""

# pytest cuts an explanation at 8 lines or 640 characters outside CI, but not for less than what
# saying so takes: 2 lines and 46 characters (9.2; 70 in 8.4).
SHORT_LINES: Final = 8
SHORT_CHARACTERS: Final = 660
_PYTESTS_CHARACTERS: Final = 686

_SCREEN_ROWS: Final = 24
_SCREEN_COLUMNS: Final = 80
_MARGIN: Final = 10
"""What pytest puts before a line of its explanation: ``E`` and blanks."""
_TITLE_AND_HINT_ROWS: Final = 2
_LONGEST: Final = 3 * _SCREEN_COLUMNS
"""The most characters of a change on a screen; neither a command nor a remedy is ever cut."""
_COMMANDS: Final = (ACCEPT, RECORD, READ)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureText:
    """Why a comparison failed, at two lengths."""

    short: tuple[str, ...]
    """What fits where pytest cuts: the first changes, the first cause, the command."""
    full: tuple[str, ...]
    compared: str = ""
    """What differs, ``comm_mode`` or ``fsdp_tree``; empty if there was nothing to compare with."""
    snapshot: str = ""
    """The file that it differs from, as the user would type it; empty as above."""
    cost: tuple[str, ...] = ()
    """The lines of `short` that say what the changes cost."""
    told: tuple[str, ...] = ()
    """Each change of the whole in one line with its probable cause, those of regressions first."""
    sent: tuple[tuple[str, str], ...] = ()
    """Each change whose call site is known, as ``path:line`` and the text of the change."""
    scope: str = ""
    """What the first line says of the whole, such as what is not compared; empty for most."""

    def __post_init__(self) -> None:
        """Make every line printable, as the names in a file may not be."""
        for name in ("short", "full", "cost"):
            lines = tuple(map(printable, getattr(self, name)))
            object.__setattr__(self, name, lines)

    def within(self, scope: str, cure: str = "") -> FailureText:
        """Add `scope` behind the snapshot's path, and another `cure`, which may be empty."""
        cures = (f"{CURE}{cure}",) if cure else ()

        def scoped(lines: tuple[str, ...]) -> tuple[str, ...]:
            commands = tuple(line for line in lines if line.startswith(_COMMANDS))
            body = tuple(line for line in lines[1:] if line not in commands)
            return (f"{lines[0]}, {scope}", *body, *cures, *commands)

        scopes = ", ".join(filter(None, (self.scope, scope)))
        return replace(self, short=scoped(self.short), full=scoped(self.full), scope=scopes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One of the comparisons of an assertion, failed."""

    name: str
    """The value's, where a dict was compared; empty otherwise."""
    explanation: FailureText
    difference: tuple[str, ...] = ()
    """The lines of the file that differ; empty if there is none to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is shown of a failed assertion. No line is in both."""

    lines: tuple[str, ...]
    """As pytest's explanation."""
    below: tuple[str, ...]
    """As a section of the report; empty for none."""


def fit_changes(
    head: Sequence[str], changes: Sequence[str], tail: Sequence[str], *, left_out: int = 0
) -> tuple[str, ...]:
    """Keep as many changes as pytest does not cut, at least one, and count those left out."""
    left_out = left_out or len(changes)
    text = [*head, *tail]
    for shown in range(len(changes), 0, -1):
        hidden = left_out - shown
        what = "change" if hidden == 1 else "changes"
        more = [f"{LEFT_OUT}{hidden} more {what}, below"] if hidden else []
        text = [*head, *changes[:shown], *more, *tail]
        if fits(text):
            break
    return tuple(text)


def fits(text: Sequence[str]) -> bool:
    """Whether pytest shows all of a text."""
    return len(text) <= SHORT_LINES and sum(map(len, text)) <= SHORT_CHARACTERS


def show_on_screen(failures: Sequence[Failure], *, accept: str, beside: str = "") -> Shown:
    """Fit failures on a screen of 24 lines of 80 characters, the most important line first."""
    is_alone = len(failures) == 1
    short = failures[0].explanation.short if is_alone else combine(failures, accept=accept)
    above = _fitted(_with_beside(short, beside))
    lines = tuple(map(_clipped, above))
    room = _SCREEN_ROWS - _TITLE_AND_HINT_ROWS - sum(_rows(line, _MARGIN) for line in lines)
    rest = {failure.name: _not_shown(failure, above) for failure in failures}
    return Shown(lines=lines, below=tuple(_below(failures, rest, room)))


def show_everything(failures: Sequence[Failure], *, accept: str, beside: str = "") -> Shown:
    """Show all changes and causes, and the lines of the files that differ."""
    if len(failures) == 1:
        full = _with_beside(failures[0].explanation.full, beside)
        return Shown(lines=tuple(full), below=failures[0].difference)
    tail = _commands(failures, accept)
    first = int(_all_compared(failures))
    bodies = [
        (failure.name, line) for failure in failures for line in failure.explanation.full[first:]
    ]
    causes = [line for _, line in bodies if line.startswith(LIKELY)]
    cures = _cures(line for _, line in bodies)
    shared = {*causes, *cures}
    changes = [
        f"  {name}: {line.strip()}"
        for name, line in bodies
        if line not in shared and not line.startswith(_COMMANDS)
    ]
    lines = _with_beside((_head(failures), *changes, *dict.fromkeys(causes), *cures, *tail), beside)
    below = [
        line
        for failure in failures
        if failure.difference
        for line in (_heading(failure), *failure.difference)
    ]
    return Shown(lines=tuple(lines), below=tuple(below))


def combine(failures: Sequence[Failure], *, accept: str) -> tuple[str, ...]:
    """Explain failed comparisons of one assertion in the space of one; `accept` may be empty."""
    head = _head(failures)
    first = int(_all_compared(failures))
    # What a change costs comes first, whatever the order of the values.
    failures = sorted(failures, key=lambda failure: not failure.explanation.cost)
    bodies = {failure.name: list(failure.explanation.short[first:]) for failure in failures}
    left_out = {line for line in chain(*bodies.values()) if line.startswith(LEFT_OUT)}
    causes = [line for line in chain(*bodies.values()) if line.startswith(LIKELY)]
    costs = {failure.name: failure.explanation.cost for failure in failures}
    cures = _cures(chain(*bodies.values()))
    tail = [*causes[:1], *cures, *_commands(failures, accept)]
    shared = (*left_out, *causes, *cures, *chain(*costs.values()), *_COMMANDS)
    bodies = {
        name: [line for line in body if not line.startswith(shared)]
        for name, body in bodies.items()
    }
    # Costs come before changes, but make room for them.
    for name, body in bodies.items():
        body[1:1] = costs[name]
    shown: dict[str, list[str]] = {name: [] for name in bodies}
    room = SHORT_CHARACTERS - sum(map(len, (head, *tail)))
    for _ in range(SHORT_LINES):
        for name, body in bodies.items():
            count = sum(map(len, shown.values())) + 1 + len(tail)
            line = f"  {name}: {body[0].strip()}" if body else ""
            # One line of each, whatever its length.
            if line and (not shown[name] or (count < SHORT_LINES - 1 and len(line) <= room)):
                shown[name].append(line)
                room -= len(line)
                body.pop(0)
    for name, lines in shown.items():
        told_first = {f"  {name}: {line.strip()}" for line in costs[name]}
        lines.sort(key=told_first.__contains__, reverse=True)
    is_cut = any(bodies.values()) or left_out or len(causes) > 1
    more = [f"{LEFT_OUT}more, below"] if is_cut else []
    return (head, *chain(*shown.values()), *more, *tail)


def _with_beside(lines: Sequence[str], beside: str) -> list[str]:
    """Put a line before the command, which comes last."""
    place = next(
        (place for place, line in enumerate(lines) if line.startswith(_COMMANDS)), len(lines)
    )
    return [*lines[:place], *([beside] if beside else []), *lines[place:]]


def _commands(failures: Sequence[Failure], accept: str) -> list[str]:
    """What several failures say to do, once: to record, if nothing was compared."""
    recording = [
        [line for line in failure.explanation.short if line.startswith((RECORD, READ))]
        for failure in failures
    ]
    if all(recording):
        return [*dict.fromkeys(chain(*recording))]
    return [f"{ACCEPT}{accept}"] if accept else []


def _fitted(above: Sequence[str]) -> list[str]:
    """Leave out the last changes where pytest would cut the end, which has the command."""
    lines = list(above)
    kept = (LIKELY, LEFT_OUT, CURE, BESIDE, *_COMMANDS)
    changes = [line for line in lines if line.startswith("  ") and not line.startswith(kept)]
    while len(changes) > 1 and (
        len(lines) > SHORT_LINES + 1 or sum(map(len, lines)) > _PYTESTS_CHARACTERS
    ):
        place = lines.index(changes.pop())
        is_said = lines[place + 1 : place + 2] and lines[place + 1].startswith(LEFT_OUT)
        lines[place : place + 1 + bool(is_said)] = [f"{LEFT_OUT}more, below"]
    return lines


def _head(failures: Sequence[Failure]) -> str:
    explained = [failure.explanation for failure in failures]
    if not _all_compared(failures):
        return f"{len(explained)} comparisons failed"
    what = " and ".join(dict.fromkeys(explanation.compared for explanation in explained))
    where = os.path.commonprefix([one.snapshot for one in explained])  # noqa: RUF071  # the names' beginning, no directory
    scopes = [f", {one.scope}" for one in explained if one.scope]
    files = f"({len(explained)} files)"
    return f"{what} differ from {where.rstrip('.')} {files}{''.join(dict.fromkeys(scopes))}"


def _cures(lines: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(line for line in lines if line.startswith(CURE))]


def _all_compared(failures: Sequence[Failure]) -> bool:
    """Whether each has a snapshot that it differs from: then one head serves all."""
    return all(failure.explanation.compared for failure in failures)


def _not_shown(failure: Failure, above: Sequence[str]) -> list[str]:
    """List the lines of a failure that are not above, causes first."""
    full = failure.explanation.full
    lines = full[1:] if failure.explanation.compared else full
    rest = [
        line
        for line in lines
        if not {line, f"  {failure.name}: {line.strip()}"} & {*above}
        and not line.startswith(_COMMANDS)
    ]
    return sorted(rest, key=lambda line: not line.startswith(LIKELY))


def _below(failures: Sequence[Failure], rest: dict[str, list[str]], room: int) -> Iterable[str]:
    """Yield what the lines above do not say, as far as there is room, and what is left out."""
    several = len(failures) > 1
    room -= len(failures) if several else 0
    kept, hidden = _in_turn(rest, room)
    room -= sum(map(_rows, chain(*kept.values())))
    files = 0
    for failure in failures:
        lines: Sequence[str] = failure.difference
        if lines and (hidden or sum(map(_rows, lines)) > room):
            files += 1
            is_explained = any(
                not line.startswith(_COMMANDS) for line in failure.explanation.full[1:]
            )
            used = accumulate(map(_rows, lines))
            fitting = [line for line, rows in zip(lines, used, strict=True) if rows <= room]
            lines = () if is_explained else fitting
        room -= sum(map(_rows, lines))
        kept[failure.name] += lines
    for failure in failures:
        yield from [_heading(failure)] if several and kept[failure.name] else []
        yield from kept[failure.name]
    if hidden or files:
        more = [f"{hidden} more {'change' if hidden == 1 else 'changes'}"] if hidden else []
        more += [f"the lines{f' of {files} files' if files > 1 else ''} that differ"] * bool(files)
        yield f"-vv shows {' and '.join(more)}"


def _in_turn(rest: Mapping[str, Sequence[str]], room: int) -> tuple[dict[str, list[str]], int]:
    """Keep the first lines of each, a line of each in turn; count those besides."""
    lines = [
        (name, _clipped(lines[number]))
        for number in range(max(map(len, rest.values())))
        for name, lines in rest.items()
        if number < len(lines)
    ]
    kept: dict[str, list[str]] = {name: [] for name in rest}
    for place, (name, line) in enumerate(lines):
        room -= _rows(line)
        if room < 0:
            return kept, len(lines) - place
        kept[name].append(line)
    return kept, 0


def _heading(failure: Failure) -> str:
    return f"{failure.name}: {failure.explanation.snapshot}".rstrip()


def _rows(line: str, margin: int = 0) -> int:
    return max(1, -(-(margin + len(line)) // _SCREEN_COLUMNS))


def _clipped(line: str) -> str:
    is_change = line.startswith("  ") and not line.startswith(_COMMANDS)
    return shorten(line, _LONGEST) if is_change else line
