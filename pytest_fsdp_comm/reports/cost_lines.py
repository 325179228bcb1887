"""What a change of communication costs, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pytest_fsdp_comm.comm.cost import Cost, PartCost, Volume
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import show_growth, show_nbytes, show_nbytes_change

_WIDTH: Final = 120
_MAX_RANKS_TEXT: Final = 24


def cost_lines(cost: Cost, *, width: int = _WIDTH) -> tuple[str, ...]:
    """State what a change costs, the whole first, then its parts, the largest first."""
    # For example ``+63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB per rank and step), +32 % in all,
    # peak gathered unchanged``. No lines if calls, bytes and peak are unchanged.
    by_bytes = _changed(cost, lambda volume: volume.nbytes)
    by_count = _changed(cost, lambda volume: volume.count)
    whole: list[str] = []
    parts: list[str] = []
    if by_bytes:
        whole, parts = _bytes(cost, by_bytes)
    elif by_count:
        whole, parts = _calls(cost, by_count)
    whole += _peak(cost, by_bytes)
    if whole and not by_bytes and cost.after.nbytes:
        whole.insert(0, "bytes unchanged")
    whole += _unsized(cost, is_alone=not whole)
    return tuple(
        line for statements in (whole, _cut(parts, width)) for line in _filled(statements, width)
    )


def _filled(statements: Iterable[str], width: int) -> list[str]:
    lines: list[str] = []
    for statement in statements:
        if lines and len(lines[-1]) + len(", ") + len(statement) <= width:
            lines[-1] += f", {statement}"
        else:
            lines.append(statement)
    return lines


def _changed(cost: Cost, number: Callable[[Volume], int]) -> list[PartCost]:
    """The kinds whose number differs, the largest difference first."""

    def growth(one: PartCost) -> int:
        return number(one.after) - number(one.before)

    return sorted(filter(growth, cost.collectives), key=lambda one: -abs(growth(one)))


def _bytes(cost: Cost, changed: Sequence[PartCost]) -> tuple[list[str], list[str]]:
    """What to say of the whole, and then of each kind."""
    used = [one for one in cost.collectives if one.before.nbytes or one.after.nbytes]
    num_kinds = Counter(one.axis for one in used)
    axes = [
        f"{_growth(axis)} on {axis.axis}"
        for axis in cost.axes
        # An axis alone is the whole, and one kind alone is the axis.
        if len(num_kinds) > 1
        and num_kinds[axis.axis] > 1
        and axis.before.nbytes != axis.after.nbytes
    ]
    split = [one for one in used if one not in changed and one.after.count > one.before.count]
    calls = [f"{_what(one)} {one.before.count} -> {one.after.count} calls" for one in split]
    if len(changed) == 1:
        in_all = [f"{_growth(cost)} in all"] if len(used) > 1 else []
        (one,) = changed
        return [
            f"{_growth(one)} bytes in {_what(one)} ({_sides(one)} {_whose(cost)})",
            *axes,
            *in_all,
        ], calls
    if cost.before.nbytes == cost.after.nbytes:
        head = f"bytes unchanged in all ({show_nbytes(cost.after.nbytes)} {_whose(cost)})"
    else:
        head = f"{_growth(cost)} bytes in all ({_sides(cost)} {_whose(cost)})"
        before, after = cost.before.nbytes, cost.after.nbytes
        if before and all(one.before.nbytes * after == one.after.nbytes * before for one in used):
            return [head, "alike in every kind"], []
    parts = [f"{_what(one)} {_growth(one)} ({_sides(one)})" for one in changed]
    return [head, *axes], [*parts, *calls]


def _calls(cost: Cost, changed: Sequence[PartCost]) -> tuple[list[str], list[str]]:
    """As `_bytes`."""

    def stated(one: PartCost | Cost, where: str) -> str:
        was, now = one.before.count, one.after.count
        if was == now:
            return f"calls unchanged {where} ({now} {_whose(cost)})"
        calls = f"{abs(now - was)} {'call' if abs(now - was) == 1 else 'calls'}"
        more = "more" if now > was else "fewer"
        return f"{calls} {more} {where} ({was} -> {now} {_whose(cost)})"

    if len(changed) == 1:
        return [stated(changed[0], f"in {_what(changed[0])}")], []
    return [stated(cost, "in all")], [
        f"{_what(one)} {one.before.count} -> {one.after.count} calls" for one in changed
    ]


def _peak(cost: Cost, changed: Sequence[PartCost]) -> list[str]:
    before, after = cost.peak_before, cost.peak_after
    if before == after:
        # What is gathered more often need not be held at once.
        is_expected = before and any(one.kind == "all_gather" for one in changed)
        return ["peak gathered unchanged"] if is_expected else []
    growth = f"{show_growth(before, after)} " if before else ""
    where = f"on {_named(cost.peak_ranks)}" if cost.peak_ranks else "per rank"
    return [f"peak gathered {growth}({show_nbytes_change(before, after)} {where})"]


def _unsized(cost: Cost, *, is_alone: bool) -> list[str]:
    was, now = cost.before.unsized, cost.after.unsized
    if was == now:
        return ["calls of unknown size left out"] if now and not is_alone else []
    whose = f" {_whose(cost)}" if is_alone else ""
    return [f"calls of unknown size {was} -> {now}{whose} (left out)"]


def _cut(statements: Sequence[str], width: int) -> list[str]:
    """As many statements as fit into a line, at least one."""
    for shown in range(len(statements), 0, -1):
        hidden = len(statements) - shown
        line = [*statements[:shown], *([f"and {hidden} more"] if hidden else [])]
        if len(", ".join(line)) <= width or shown == 1:
            return line
    return []


def _what(one: PartCost) -> str:
    return f"{one.kind}[{one.axis}]"


def _growth(one: PartCost | Cost) -> str:
    if any(_unknown(one)):
        return "unknown"
    growth = show_growth(one.before.nbytes, one.after.nbytes)
    # Of bytes alone, where there are more calls.
    is_more = growth.endswith("fewer") and one.after.count > one.before.count
    return "about as many" if is_more else growth


def _sides(one: PartCost | Cost) -> str:
    before, after = one.before, one.after
    sides = show_nbytes_change(before.nbytes, after.nbytes, _unknown(one))
    # Bytes hide many small calls more; those of the whole, if they do not grow.
    is_split = after.count * before.nbytes > 2 * before.count * after.nbytes
    is_hidden = after.nbytes <= before.nbytes or (is_split and isinstance(one, PartCost))
    if is_hidden and after.count > before.count > 0:
        return f"{sides} in {before.count} -> {after.count} calls"
    return sides


def _unknown(one: PartCost | Cost) -> tuple[int, int]:
    """How many calls each side has of unknown size, if it has no others."""
    before, after = (0 if side.nbytes else side.unsized for side in (one.before, one.after))
    return before, after


def _whose(cost: Cost) -> str:
    if not cost.ranks:
        return "per rank and step"
    return f"a step on {_named(cost.ranks)}, where most changes"


def _named(ranks: Sequence[int]) -> str:
    text = name_ranks(ranks)
    # Ranks with gaps fill lines and tell nothing.
    more = f"rank {ranks[0]} and {len(ranks) - 1} more"
    return text if len(text) <= _MAX_RANKS_TEXT else more
