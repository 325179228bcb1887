"""Before and after, side by side: every row of a snapshot beside what was recorded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pytest_fsdp_comm.comm.cost import cost_of_change
from pytest_fsdp_comm.comm.diff import comparable
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import SUBJECTS
from pytest_fsdp_comm.text.fqn import name_owners, natural_key
from pytest_fsdp_comm.text.nbytes import show_growth, show_nbytes
from pytest_fsdp_comm.text.rank_lists import name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_fsdp_comm.comm.calls import Calls
    from pytest_fsdp_comm.comm.cost import Volume
    from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey

Mark = Literal["same", "changed", "new", "gone"]
MARKS: Final[dict[Mark, tuple[str, str]]] = {
    "same": ("=", "same"),
    "changed": ("≠", "changed"),
    "new": ("+", "new"),
    "gone": ("\N{MINUS SIGN}", "gone"),
}
"""How marks are shown: a sign, and the word that goes with it."""

TIMES: Final = "\N{MULTIPLICATION SIGN}"
NONE: Final = "none"
"""What stands where one side has nothing."""

_MAX_ROWS: Final = 300
_PHASES: Final = {phase: place for place, phase in enumerate(Phase)}

_Texts: TypeAlias = "dict[tuple[str | None, RowKey], tuple[str, ...]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRow:
    """What one side or both have, for all modules that have it alike."""

    mark: Mark
    phase: str
    modules: str
    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """All rows, those that differ first within each phase."""

    rows: tuple[SideRow, ...]
    left_out: int = 0
    """Rows beyond those that are shown."""

    @property
    def differing(self) -> tuple[SideRow, ...]:
        """The rows that are not the same on both sides."""
        return tuple(row for row in self.rows if row.mark != "same")

    @property
    def same(self) -> tuple[SideRow, ...]:
        """The rows that are."""
        return tuple(row for row in self.rows if row.mark == "same")


def sides_of_comm(old: CommProfile, new: CommProfile) -> Sides:
    """Puts the rows of two profiles beside each other, as a comparison does.

    Args:
        old: The snapshot.
        new: What was recorded.
    """
    old, new = comparable(old, new)
    rows = list(_rows(_by_key(old.rows), _by_key(new.rows)))
    rows.sort(key=lambda row: (_PHASES[Phase(row.phase)], row.mark == "same"))
    # What differs is never left out for what does not.
    kept = sorted(range(len(rows)), key=lambda at: rows[at].mark == "same")[:_MAX_ROWS]
    return Sides(
        rows=tuple(rows[at] for at in sorted(kept)), left_out=max(0, len(rows) - _MAX_ROWS)
    )


def differing_modules(old: CommProfile, new: CommProfile) -> frozenset[str | None]:
    """The modules that do not send and gather what the snapshot says."""
    old, new = comparable(old, new)
    before, after = _by_key(old.rows), _by_key(new.rows)
    return frozenset(
        owner
        for owner, key in {*before, *after}
        if before.get((owner, key)) != after.get((owner, key)) and key.subject != "redistribution"
    )


def _by_key(rows: Iterable[Row]) -> _Texts:
    found: defaultdict[tuple[str | None, RowKey], list[str]] = defaultdict(list)
    for row in rows:
        found[row.owner, row.key].append(_amount(row))
    return {key: tuple(texts) for key, texts in found.items()}


def _rows(old: _Texts, new: _Texts) -> Iterator[SideRow]:
    alike: defaultdict[tuple[RowKey, str, str], list[str | None]] = defaultdict(list)
    # What is gone stands last among its kind.
    for owner, key in sorted(dict.fromkeys((*new, *old)), key=lambda at: SUBJECTS.index(at[1][0])):
        before, after = (" / ".join(side.get((owner, key), ())) for side in (old, new))
        alike[key, before, after].append(owner)
    for (key, before, after), owners in alike.items():
        owners.sort(key=lambda owner: (owner is None, natural_key(owner or "")))
        mark: Mark = "same"
        if before != after:
            mark = "changed" if before and after else "new" if after else "gone"
        yield SideRow(
            mark=mark,
            phase=key.phase.value,
            modules=name_owners(owners),
            what=str(key),
            before=before or NONE,
            after=after or NONE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """What ranks do differently, for all modules in which they differ in the same way."""

    phase: str
    modules: str
    what: str
    amounts: tuple[tuple[str, str], ...]
    """Of which ranks, and what; ranks that are in none do nothing of it."""


def rank_rows(profile: CommProfile) -> tuple[RankRow, ...]:
    """What not every rank recorded alike; empty if all did."""
    found: defaultdict[tuple[str | None, RowKey], list[tuple[str, str]]] = defaultdict(list)
    for row in profile.rows:
        if row.ranks:
            found[row.owner, row.key].append((name_ranks(row.ranks), _calls(row)))
    alike: defaultdict[tuple[RowKey, tuple[tuple[str, str], ...]], list[str | None]]
    alike = defaultdict(list)
    for (owner, key), amounts in found.items():
        alike[key, tuple(amounts)].append(owner)
    shown = [
        RankRow(phase=key.phase.value, modules=name_owners(owners), what=str(key), amounts=amounts)
        for (key, amounts), owners in alike.items()
    ]
    peaks = tuple(
        (name_ranks(one.ranks), show_nbytes(one.nbytes)) for one in profile.peaks if one.ranks
    )
    if peaks:
        shown.append(RankRow(phase="", modules="", what="peak gathered", amounts=peaks))
    return tuple(shown)


def _calls(row: Row) -> str:
    return ", ".join(map(show_calls, row.calls))


def _amount(row: Row) -> str:
    return f"{_calls(row)} on {name_ranks(row.ranks)}" if row.ranks else _calls(row)


def show_calls(calls: Calls) -> str:
    """As snapshots write it, with bytes for people: ``x2 of 128.0 KiB float32 parameters``."""
    exact = f"of {calls.nbytes:_} B"
    return str(calls).replace(exact, f"of {show_nbytes(calls.nbytes)}").replace("x", TIMES, 1)


def sides_of_text(old: str, new: str) -> Sides:
    """Puts the lines of two snapshots beside each other, without those that frame them."""
    before, after = _body(old), _body(new)
    rows: list[SideRow] = []
    for _, i, to_i, j, to_j in SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes():
        for was, now in zip_longest(before[i:to_i], after[j:to_j], fillvalue=""):
            mark: Mark = "changed" if was and now else "new" if now else "gone"
            rows.append(
                SideRow(
                    mark="same" if was == now else mark,
                    phase="",
                    modules="",
                    what="",
                    before=was or NONE,
                    after=now or NONE,
                )
            )
    return Sides(rows=tuple(rows[:_MAX_ROWS]), left_out=max(0, len(rows) - _MAX_ROWS))


def _body(text: str) -> Sequence[str]:
    return [line for line in text.splitlines() if not line.startswith("#") and line != "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One number before and after."""

    label: str
    before: str
    after: str
    change: str
    """``+63 %``; empty if unchanged."""


def cost_rows(old: CommProfile, new: CommProfile) -> tuple[CostRow, ...]:
    """What a rank sends and holds, before and after.

    Args:
        old: The snapshot, or `new` if there is none.
        new: What was recorded.
    """
    cost = cost_of_change(*comparable(old, new), None)
    rows = [
        _row(f"{one.kind}[{one.axis}] calls", _count(one.before), _count(one.after), _grouped)
        for one in cost.collectives
    ]
    rows += [
        _row(f"bytes on {axis.axis}", axis.before.nbytes, axis.after.nbytes, show_nbytes)
        for axis in cost.axes
        if len(cost.axes) > 1
    ]
    rows.append(_row("bytes in all", cost.before.nbytes, cost.after.nbytes, show_nbytes))
    rows.append(_row("peak gathered", cost.peak_before, cost.peak_after, show_nbytes))
    return tuple(rows)


def growth(old: CommProfile, new: CommProfile) -> str:
    """How many more bytes are sent: ``+63 %``, ``unchanged``."""
    cost = cost_of_change(*comparable(old, new), None)
    return show_growth(cost.before.nbytes, cost.after.nbytes)


def peak(profile: CommProfile) -> int:
    """The most bytes of parameters that any rank had gathered at once."""
    return max((one.nbytes for one in profile.peaks), default=0)


def cost_ranks(old: CommProfile, new: CommProfile) -> str:
    """Whose numbers `cost_rows` are; empty for every rank's."""
    cost = cost_of_change(*comparable(old, new), None)
    return name_ranks(cost.ranks) if cost.ranks else ""


def _count(volume: Volume) -> int:
    return volume.count + volume.objects


def _row(label: str, before: int, after: int, show: Callable[[int], str]) -> CostRow:
    return CostRow(
        label=label,
        before=show(before),
        after=show(after),
        change=show_growth(before, after) if before != after else "",
    )


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
