"""Describe the cost of a change in communication: bytes, calls and peak memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from pytest_fsdp_comm.comm.cost import Cost, PartCost, Volume
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import show_count, show_growth, show_nbytes, show_nbytes_change

_WIDTH: Final = 240
_MAX_RANKS_TEXT: Final = 24


def cost_lines(cost: Cost, *, width: int = _WIDTH) -> tuple[str, ...]:
    """Describe the total cost, then the cost of each kind, largest first; empty if unchanged."""
    # Example: ``+63 % bytes in all_gather[dp] (1.4 -> 2.3 MiB per rank), +32 % in all,
    # peak gathered unchanged``.
    by_bytes = _find_changed_parts(cost, lambda volume: volume.nbytes)
    by_count = _find_changed_parts(cost, lambda volume: volume.count)
    total: list[str] = []
    parts: list[str] = []
    if by_bytes:
        total, parts = _describe_byte_changes(cost, by_bytes)
    elif by_count:
        total, parts = _describe_call_changes(cost, by_count)
    if cost.exposed_before != cost.exposed_after:
        change = show_nbytes_change(cost.exposed_before, cost.exposed_after)
        total.append(f"exposed {change} per rank")
    total += _describe_peak_change(cost, by_bytes)
    if total and not by_bytes and cost.after.nbytes:
        total.insert(0, "bytes unchanged")
    total += _describe_calls_of_unknown_size(cost, is_alone=not total)
    return tuple(map(", ".join, filter(None, (total, _fit_on_one_line(parts, width)))))


def _find_changed_parts(cost: Cost, number: Callable[[Volume], int]) -> list[PartCost]:
    """Return the parts whose `number` (count or bytes) changed, largest change first."""

    def growth(part: PartCost) -> int:
        return number(part.after) - number(part.before)

    return sorted(filter(growth, cost.collectives), key=lambda part: -abs(growth(part)))


def _describe_byte_changes(cost: Cost, changed: Sequence[PartCost]) -> tuple[list[str], list[str]]:
    """Return statements about the total bytes, and about the bytes of each kind."""
    used = [part for part in cost.collectives if part.before.nbytes or part.after.nbytes]
    num_kinds = Counter(part.axis for part in used)
    axes = [
        f"{_show_bytes_growth(axis)} on {axis.axis}"
        for axis in cost.axes
        # Skip the only axis, because it would repeat the total, and an axis with only one kind,
        # because it would repeat that kind.
        if len(num_kinds) > 1
        and num_kinds[axis.axis] > 1
        and axis.before.nbytes != axis.after.nbytes
    ]
    split = [part for part in used if part not in changed and part.after.count > part.before.count]
    calls = [f"{_label(part)} {part.before.count} -> {part.after.count} calls" for part in split]
    ranks = _describe_ranks_of_cost(cost)
    all_calls = "all"
    if cost.before.unsized != cost.after.unsized:
        all_calls = "all calls of known size"
    if len(changed) == 1:
        in_all = [f"{_show_bytes_growth(cost)} in {all_calls}"] if len(used) > 1 else []
        (part,) = changed
        change = f"{_show_bytes_change(part)} {ranks}"
        head = f"{_show_bytes_growth(part)} bytes in {_label(part)} ({change})"
        if any(_count_calls_if_sizes_unknown(part)):
            head = f"bytes in {_label(part)}: {change}"
        return [head, *axes, *in_all], calls
    if cost.before.nbytes == cost.after.nbytes:
        nbytes = show_nbytes(cost.after.nbytes)
        head = f"bytes unchanged in {all_calls} ({nbytes} {ranks})"
        if cost.ranks:
            where = _name_ranks_briefly(cost.ranks)
            head = f"bytes unchanged in all on {where}, where kinds change most ({nbytes})"
    else:
        change = f"{_show_bytes_change(cost)} {ranks}"
        head = f"{_show_bytes_growth(cost)} bytes in {all_calls} ({change})"
        before, after = cost.before.nbytes, cost.after.nbytes
        if before and all(
            part.before.nbytes * after == part.after.nbytes * before for part in used
        ):
            return [head, "each kind by the same factor"], []
    parts = [
        f"{_label(part)} {_show_bytes_growth(part)} ({_show_bytes_change(part)})"
        for part in changed
    ]
    return [head, *axes], [*parts, *calls]


def _describe_call_changes(cost: Cost, changed: Sequence[PartCost]) -> tuple[list[str], list[str]]:
    """Return statements about the total calls, and about the calls of each kind."""
    ranks = _describe_ranks_of_cost(cost)

    def describe(part: PartCost | Cost, where: str) -> str:
        old, new = part.before.count, part.after.count
        if old == new:
            return f"calls unchanged {where} ({new} {ranks})"
        calls = f"{abs(new - old)} {'call' if abs(new - old) == 1 else 'calls'}"
        more = "more" if new > old else "fewer"
        return f"{calls} {more} {where} ({old} -> {new} {ranks})"

    if len(changed) == 1:
        return [describe(changed[0], f"in {_label(changed[0])}")], []
    return [describe(cost, "in all")], [
        f"{_label(part)} {part.before.count} -> {part.after.count} calls" for part in changed
    ]


def _describe_peak_change(cost: Cost, changed: Sequence[PartCost]) -> list[str]:
    before, after = cost.peak_before, cost.peak_after
    if before == after:
        # Changed all-gathers often change the peak, so also report a peak that is unchanged.
        has_gathers = before and any(part.kind == "all_gather" for part in changed)
        return ["peak gathered unchanged"] if has_gathers else []
    growth = f"{show_growth(before, after)} " if before else ""
    where = f"on {_name_ranks_briefly(cost.peak_ranks)}" if cost.peak_ranks else "per rank"
    return [f"peak gathered {growth}({show_nbytes_change(before, after)} {where})"]


def _describe_calls_of_unknown_size(cost: Cost, *, is_alone: bool) -> list[str]:
    old, new = cost.before.unsized, cost.after.unsized
    if old == new:
        return ["calls of unknown size not included"] if new and not is_alone else []
    whose = f" {_describe_ranks_of_cost(cost)}" if is_alone else ""
    return [f"calls of unknown size {old} -> {new}{whose} (not included)"]


def _fit_on_one_line(statements: Sequence[str], width: int) -> list[str]:
    """Return as many statements as fit on one line, but at least one."""
    for num_fitting in range(len(statements), 0, -1):
        hidden = len(statements) - num_fitting
        line = [
            *statements[:num_fitting],
            *([f"and {show_count(hidden, 'more kind')}"] if hidden else []),
        ]
        if len(", ".join(line)) <= width or num_fitting == 1:
            return line
    return []


def _label(part: PartCost) -> str:
    return f"{part.kind}[{part.axis}]"


def _show_bytes_growth(part: PartCost | Cost) -> str:
    if any(_count_calls_if_sizes_unknown(part)):
        return "unknown"
    growth = show_growth(part.before.nbytes, part.after.nbytes)
    # "<0.1 % fewer" would suggest that there are fewer calls, but there are more.
    is_more = growth.endswith("fewer") and part.after.count > part.before.count
    return "about as many" if is_more else growth


def _show_bytes_change(part: PartCost | Cost) -> str:
    before, after = part.before, part.after
    sides = show_nbytes_change(before.nbytes, after.nbytes, _count_calls_if_sizes_unknown(part))
    # Also print the number of calls if it grew and the bytes do not show that: either they did not
    # grow, or the average call is now less than half as large.
    is_split = after.count * before.nbytes > 2 * before.count * after.nbytes
    is_hidden = after.nbytes <= before.nbytes or (is_split and isinstance(part, PartCost))
    if is_hidden and after.count > before.count > 0:
        return f"{sides} in {before.count} -> {after.count} calls"
    return sides


def _count_calls_if_sizes_unknown(part: PartCost | Cost) -> tuple[int, int]:
    """Return each side's calls of unknown size, if all calls of one side have an unknown size."""
    if part.before.unsized and part.after.unsized:
        return 0, 0
    before, after = (0 if side.nbytes else side.unsized for side in (part.before, part.after))
    return before, after


def _describe_ranks_of_cost(cost: Cost) -> str:
    if not cost.ranks:
        return "per rank"
    largest = ", the largest change" if cost.is_largest else ""
    return f"on {_name_ranks_briefly(cost.ranks)}{largest}"


def _name_ranks_briefly(ranks: Sequence[int]) -> str:
    text = name_ranks(ranks)
    # A long list of ranks would fill the line.
    more = f"rank {ranks[0]} and {len(ranks) - 1} more"
    return text if len(text) <= _MAX_RANKS_TEXT else more
