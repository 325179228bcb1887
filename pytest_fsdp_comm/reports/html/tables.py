"""The tables of a page: rows of both sides, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Final, Literal

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import Cost
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import SUBJECTS, CommProfile, Row, RowKey
from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import show_growth, show_nbytes

Mark = Literal["same", "changed", "new", "gone"]
MARKS: Final[dict[Mark, tuple[str, str]]] = {
    "same": ("=", "same"),
    "changed": ("≠", "changed"),
    "new": ("+", "new"),
    "gone": ("\N{MINUS SIGN}", "gone"),
}
"""How marks are shown: a sign, and the word that goes with it."""

_PHASES: Final = {phase: place for place, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRow:
    """What one side or both have, for all modules that have it alike, or a line of a text."""

    before: str
    """Empty if the snapshot has nothing of it."""
    after: str
    """Empty if nothing of it was recorded."""
    key: RowKey | None = None
    """None for a line."""
    owners: tuple[str | None, ...] = ()
    """In natural order; empty for a line."""

    @property
    def mark(self) -> Mark:
        """How the sides differ."""
        if self.before == self.after:
            return "same"
        return "changed" if self.before and self.after else "new" if self.after else "gone"


def side_rows(old: CommProfile, new: CommProfile) -> list[SideRow]:
    """Put the rows of `comparable` profiles side by side, in each phase first those that differ."""
    places: defaultdict[tuple[str | None, RowKey], tuple[list[str], list[str]]]
    places = defaultdict(lambda: ([], []))
    # What is gone comes last among its kind.
    for side, profile in ((1, new), (0, old)):
        for row in profile.rows:
            places[row.owner, row.key][side].append(_amount(row))
    # Modules that have the same on both sides share a row.
    owners_of: defaultdict[tuple[RowKey, str, str], list[str | None]] = defaultdict(list)
    for (owner, key), (before, after) in places.items():
        owners_of[key, " / ".join(before), " / ".join(after)].append(owner)
    rows = []
    for (key, was, now), owners in owners_of.items():
        owners.sort(key=lambda owner: (owner is None, natural_key(owner or "")))
        rows.append(SideRow(before=was, after=now, key=key, owners=tuple(owners)))
    rows.sort(
        key=lambda row: (
            (_PHASES[row.key.phase], row.mark == "same", SUBJECTS.index(row.key.subject))
            if row.key
            else (0, False, 0)
        )
    )
    return rows


def line_rows(old: str, new: str) -> list[SideRow]:
    """Put the lines of two snapshots side by side, without those that frame them."""
    before, after = (
        [line for line in text.splitlines() if not line.startswith("#") and line != "end"]
        for text in (old, new)
    )
    matcher = SequenceMatcher(a=before, b=after, autojunk=False)
    return [
        SideRow(before=was, after=now)
        for _, i, to_i, j, to_j in matcher.get_opcodes()
        for was, now in zip_longest(before[i:to_i], after[j:to_j], fillvalue="")
    ]


def differing_modules(rows: Iterable[SideRow]) -> set[str | None]:
    """The modules that do not send and gather what the snapshot says."""
    return {
        owner
        for row in rows
        if row.mark != "same" and row.key and row.key.subject != "redistribution"
        for owner in row.owners
    }


def _amount(row: Row) -> str:
    calls = ", ".join(map(show_calls, row.calls))
    return f"{calls} on {name_ranks(row.ranks)}" if row.ranks else calls


def show_calls(calls: Calls) -> str:
    """As snapshots write it, with bytes for people: ``x2 of 128.0 KiB float32 parameters``."""
    exact = f"of {calls.nbytes:_} B"
    return str(calls).replace(exact, f"of {show_nbytes(calls.nbytes)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One number before and after."""

    label: str
    before: str
    after: str
    change: str
    """``+63 %``; empty if unchanged."""


def cost_rows(cost: Cost) -> list[CostRow]:
    """What a rank sends and holds, before and after."""

    def row(
        label: str, before: int, after: int, was_unsized: int = 0, now_unsized: int = 0
    ) -> CostRow:
        return CostRow(
            label=label,
            before=show_nbytes(before, was_unsized),
            after=show_nbytes(after, now_unsized),
            change=show_growth(before, after) if before != after else "",
        )

    axes = [(f"bytes on {one.axis}", one) for one in cost.axes] if len(cost.axes) > 1 else []
    return [
        *(
            row(label, was.nbytes, now.nbytes, was.unsized, now.unsized)
            for label, was, now in (
                *((label, one.before, one.after) for label, one in axes),
                ("bytes in all", cost.before, cost.after),
            )
        ),
        row("peak gathered", cost.peak_before, cost.peak_after),
    ]
