"""Explains which ranks are waiting for which, from the collectives that each rank has called."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from pytest_fsdp_comm.comm.divergence import first_difference
from pytest_fsdp_comm.ranks.hangs.stacks import append_code
from pytest_fsdp_comm.ranks.wire.results import Activity, GroupPosition, IssuedCollective, Position
from pytest_fsdp_comm.text.rank_lists import (
    group_ranks_by_text,
    group_rarest_texts_first,
    name_ranks,
)
from pytest_fsdp_comm.text.words import show_nbytes

_MOST_STALLS: Final = 3
# Prefixes of collectives whose inputs must have the same shape on all ranks.
_EQUAL_SIZES: Final = ("all_reduce", "all_gather", "allgather", "reduce", "broadcast")

_PLURALS: Final = {
    "does": "do",
    "has": "have",
    "holds": "hold",
    "is": "are",
    "its": "their",
    "runs": "run",
    "waits": "wait",
    "was": "were",
}

_Positions: TypeAlias = Mapping[int, "Position"]
Stranded: TypeAlias = dict[int, tuple[str, tuple[int, ...]]]
"""For each stuck rank: the collective that it is waiting in, and the ranks that never called it."""


def explain_waiting(positions: _Positions, *, blamed: Sequence[int] = ()) -> list[str]:
    """Explain a hang, in lines such as ``all wait for rank 3, which is at model.py:90 in forward``.

    Return no lines if no rank is waiting, or if a rank is waiting for one of the `blamed` ranks,
    whose failure explains the hang.
    """
    stalls = [*_find_stalls(positions)]
    reached = _find_awaited_ranks(stalls)
    guilty = set().union(*reached.values()) - reached.keys()
    if guilty & {*blamed}:
        return []
    lines = [*_describe_cause(reached, guilty, positions)]
    # Parallel groups of a mesh usually wait in the same collective, so explain them together.
    by_collective: defaultdict[str, list[_Stall]] = defaultdict(list)
    for stall in sorted(stalls, key=lambda stall: not stall.missing & guilty):
        by_collective[stall.collective].append(stall)
    folded = list(by_collective.values())
    for parallel in folded[:_MOST_STALLS]:
        lines += _explain_stalls(parallel, reached)
    unlisted = [stall for parallel in folded[_MOST_STALLS:] for stall in parallel]
    ranks = {rank for stall in unlisted for rank in stall.waiting}
    if ranks:
        count = len(folded) - _MOST_STALLS
        lines.append(_fill_template(f"{{ranks}} {{waits}} in {count} other collectives", [*ranks]))
    return lines


def find_stranded(positions: _Positions, timeout_s: float) -> Stranded:
    """Find ranks that will wait longer than `timeout_s` for ranks that issue no more calls."""
    # A rank in a comparison continues only when all ranks have reached the comparison.
    over = Activity.HAS_ENDED, Activity.COMPARES
    ended = [rank for rank, position in positions.items() if position.activity in over]
    groupless = tuple(rank for rank in ended if not positions[rank].groups)
    joining = [rank for rank, where in positions.items() if where.is_joining and groupless]
    stranded: Stranded = dict.fromkeys(joining, ("the process group", groupless))
    for group in _merge_positions_by_group(positions):
        # A position lists only the last collectives, so a rank may have called a collective that
        # its position does not list. Compare the number of the rank's last call instead.
        last = {rank: max(group.calls.get(rank, {}), default=0) for rank in ended}
        for rank, by_seq in group.calls.items():
            for seq, call in by_seq.items():
                absent = tuple(rank for rank in ended if rank in group.ranks and last[rank] < seq)
                is_waiting = call.is_waited_in and positions[rank].activity is Activity.RUNS
                if is_waiting and call.timeout_s > timeout_s and absent:
                    stranded[rank] = (f"#{seq} of {group.label}", absent)
    return stranded


def explain_mismatch(positions: _Positions, failed: Iterable[int]) -> str:
    """Explain how the last calls of `failed` ranks differ from other ranks' calls; "" if equal."""
    for group in _merge_positions_by_group(positions):
        calls = [call for rank in failed for call in group.calls.get(rank, {}).values()]
        for seq in sorted({call.seq for call in calls if call.is_last}):
            collective, by_rank = f"#{seq} of {group.label}", group.calls_of(seq)
            if _describe_call_difference(collective, by_rank):
                return _describe_mismatch(collective, by_rank, positions)
    return ""


def _describe_mismatch(
    collective: str, calls: Mapping[int, IssuedCollective], positions: _Positions
) -> str:
    kinds = {call.kind for call in calls.values()}
    called = f"called {min(kinds)}" if len(kinds) == 1 else "called"
    sent = {
        rank: " ".join(
            ([call.kind] if len(kinds) > 1 else []) + ([f"of {call.sent}"] if call.sent else [])
        )
        for rank, call in calls.items()
    }
    sites = {positions[rank].site for rank, call in calls.items() if call.is_last} - {""}
    place = f" at {min(sites)}" if len(sites) == 1 else ""
    (first, text), *others = group_rarest_texts_first(sent, "in {count} other ways")
    parts = [f"{name_ranks(ranks)} {text}" for ranks, text in others]
    start = ", ".join([f"{name_ranks(first)} {called} {text}", *parts])
    return f"{start}: mismatch in {collective}{place}"


def format_stacks(stacks: Mapping[int, str], title: str) -> list[str]:
    """Format the stack of each rank ("" if unknown) under a title such as ``{ranks} {is} at:``."""
    lines = []
    for ranks, stack in sorted(group_rarest_texts_first(stacks, "{count} other places")):
        lines.append(_fill_template(title, ranks))
        lines += [f"    {line}" for line in (stack or "position unknown").splitlines()]
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stall:
    """A collective on a process group, and the ranks that are waiting in it."""

    collective: str
    """The collective in words, such as ``#2 of dp``; parallel groups of a mesh share it."""
    waiting: Mapping[int, str]
    """For each waiting rank: what it is doing, as a template for `_fill_template`."""
    missing: frozenset[int]
    """The ranks that the waiting ranks are waiting for."""
    absent: Mapping[int, tuple[str, str]]
    """For each rank that is not waiting here: whether it called the collective, and where it is."""
    difference: str
    """How the ranks' calls differ; empty unless the difference blocks the collective."""
    divergence: tuple[str, dict[int, str]]
    """The first collective that ranks called for different modules (in words), and the module for
    which each rank called it; both are empty if the ranks did not diverge."""


# Waiting ranks form a graph: each has an edge to every rank that is missing from its collective.
# A path either ends at a guilty rank, which is not waiting for anybody, or runs in a circle. A rank
# is part of a circle if it reaches itself but no guilty rank.


def _find_awaited_ranks(stalls: Iterable[_Stall]) -> dict[int, set[int]]:
    """Return, for each waiting rank, the ranks that it is waiting for, directly or indirectly."""
    reached: defaultdict[int, set[int]] = defaultdict(set)
    for stall in stalls:
        for rank in stall.waiting:
            reached[rank] |= stall.missing
    for via, further in reached.items():
        for ranks in reached.values():
            ranks.update(further if via in ranks else ())
    return dict(reached)


def _describe_cause(
    reached: Mapping[int, set[int]], guilty: set[int], positions: _Positions
) -> Iterator[str]:
    doing = {rank: f"which {_describe_activity(positions.get(rank))}" for rank in guilty}
    previous: list[int] = []
    grouped = group_rarest_texts_first(doing, "which {is} at {count} other places")
    for ranks, text in sorted(grouped):
        waiting = sorted(rank for rank, missing in reached.items() if missing & {*ranks})
        is_all = len(waiting) == len(reached) > 1
        start = "all wait" if is_all else _fill_template("{ranks} {waits}", waiting)
        start = "  and" if waiting == previous else start
        yield _fill_template(f"{start} for {{ranks}}, {text}", ranks)
        previous = waiting
    circle = [rank for rank, missing in reached.items() if rank in missing and not missing & guilty]
    if circle:
        yield f"{name_ranks(circle)} wait for each other"


def _fill_template(template: str, ranks: Sequence[int]) -> str:
    """Fill in a template such as ``{ranks} {waits} in #2``: ``ranks 1, 3 wait in #2``."""
    # Do not use str.format, because paths and lines of code can contain braces.
    for singular, plural in _PLURALS.items():
        template = template.replace(f"{{{singular}}}", singular if len(ranks) == 1 else plural)
    return template.replace("{ranks}", name_ranks(ranks))


def _describe_activity(position: Position | None) -> str:
    """Return a template that says what a rank outside a stuck collective is doing."""
    if position is None:
        return "{is} dead"
    site = append_code(position.site, position.code)
    place = f" at {site}" if site else ""
    return {
        Activity.RUNS: f"{{is}}{place}" if place else "{is} outside the test's code",
        Activity.REPORTS: f"failed{place}",
        Activity.COMPARES: f"{{waits}} until all ranks reach {site or 'a comparison'}",
        Activity.HAS_ENDED: "{has} finished the test",
        Activity.HOLDS_GIL: f"{{holds}} the GIL{place}",
        Activity.STARTS: f"{{is}} still importing or collecting{place}",
        Activity.SILENT: "{does} not respond",
    }[position.activity]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A process group, merged from the positions of its ranks."""

    label: str
    ranks: Sequence[int]
    calls: Mapping[int, Mapping[int, IssuedCollective]]
    """For each rank, the collectives that it called, keyed by number."""

    def calls_of(self, seq: int) -> dict[int, IssuedCollective]:
        calls = {rank: by_seq[seq] for rank, by_seq in self.calls.items() if seq in by_seq}
        # gloo runs a reduce-scatter as an all-reduce, and only ranks that are still in the call
        # report its real kind. So correct the kind for ranks that have left the call.
        if "reduce_scatter" in {call.kind for call in calls.values()}:
            for rank, call in calls.items():
                if call.is_done and call.kind == "all_reduce":
                    calls[rank] = replace(call, kind="reduce_scatter")
        return calls


def _merge_positions_by_group(positions: _Positions) -> Iterator[_Group]:
    by_group: defaultdict[object, dict[int, GroupPosition]] = defaultdict(dict)
    for rank, position in positions.items():
        for group in position.groups:
            by_group[group.name, group.ranks][rank] = group
    groups = [next(iter(by_rank.values())) for by_rank in by_group.values()]
    for group, by_rank in zip(groups, by_group.values(), strict=True):
        yield _Group(
            label=_label_group(group, [other for other in groups if other.axis == group.axis]),
            ranks=group.ranks or sorted(by_rank),
            calls={
                rank: {call.seq: call for call in by_rank[rank].collectives} for rank in by_rank
            },
        )


def _label_group(group: GroupPosition, namesakes: Iterable[GroupPosition]) -> str:
    members = name_ranks(group.ranks) if group.ranks else "unknown ranks"
    # Parallel groups of a mesh deliberately share a label, but overlapping groups must not.
    overlapping = [other.ranks for other in namesakes if {*other.ranks} & {*group.ranks}]
    if overlapping.count(group.ranks) > 1:
        members = f"{members}, torch's {group.name}"
    if not group.axis:
        return f"the group of {members}"
    return f"{group.axis} ({members})" if group.is_shape or len(overlapping) > 1 else group.axis


def _find_stalls(positions: _Positions) -> Iterator[_Stall]:
    """For each group that ranks are waiting on, yield the first collective they are waiting in."""
    for group in _merge_positions_by_group(positions):
        waiting = {
            (call.seq, rank)
            for rank, by_seq in group.calls.items()
            for call in by_seq.values()
            if call.is_waited_in and positions[rank].activity is Activity.RUNS
        }
        if waiting:
            seq = min(waiting)[0]
            yield _make_stall(
                group, seq, sorted(rank for number, rank in waiting if number == seq), positions
            )


def _make_stall(group: _Group, seq: int, inside: Sequence[int], positions: _Positions) -> _Stall:
    calls = group.calls_of(seq)
    collective = f"#{seq} of {group.label}"
    waiting = {}
    for rank in inside:
        call, module, site = calls[rank], positions[rank].module, positions[rank].site
        owner, place = f" for {module}" if module else "", f" at {site}" if site else ""
        size = show_nbytes(call.nbytes)
        waiting[rank] = f"{{waits}} in {call.kind} {collective}{owner} ({size}){place}"
    difference = _describe_call_difference(collective, calls)
    elsewhere = [rank for rank in group.ranks if rank not in waiting]
    never = frozenset(rank for rank in elsewhere if rank not in calls)
    finished = frozenset(rank for rank in elsewhere if rank in calls and calls[rank].is_done)
    absent = {}
    for rank in elsewhere:
        if rank not in positions or not positions[rank].activity.is_known:
            continue
        by_seq, detail = group.calls.get(rank, {}), ""
        if rank in calls:
            text = "finished it" if calls[rank].is_done else "called it"
            if difference:
                detail = f" ({calls[rank].kind}, {show_nbytes(calls[rank].nbytes)})"
        else:
            text = "never called it"
            if by_seq:
                last = by_seq[max(by_seq)]
                detail = f" ({{its}} last call on {group.label} was {last.kind} #{last.seq})"
        absent[rank] = (f"{text}{detail}", f", and {_describe_activity(positions[rank])}")
    return _Stall(
        collective=collective,
        waiting=waiting,
        # gloo may let a rank finish a collective before its peers do. So if some ranks never called
        # the collective, blame them, not the ranks that have finished.
        missing=never or (frozenset() if difference else finished),
        absent=absent,
        difference=difference,
        divergence=_find_divergence(group, seq),
    )


def _find_divergence(group: _Group, before: int) -> tuple[str, dict[int, str]]:
    numbers = sorted(seq for seq in set().union(*group.calls.values()) if seq < before)
    calls = [group.calls_of(seq) for seq in numbers]
    owners = [
        [of_ranks[rank].owner if rank in of_ranks else "" for of_ranks in calls]
        for rank in group.calls
    ]
    first = first_difference(owners, lambda named: len({*filter(None, named)}) > 1)
    if first is None:
        return "", {}
    # Positions list only the last calls. If no earlier call that they list was for the same module
    # on all ranks, the ranks may have diverged even earlier.
    were_equal = any(sum(map(bool, named)) > 1 for named in [*zip(*owners, strict=True)][:first])
    earlier = "" if were_equal or numbers[first] == 1 else " or earlier"
    diverging = {rank: call.owner for rank, call in calls[first].items() if call.owner}
    return f"ranks diverged at #{numbers[first]} of {group.label}{earlier}", diverging


def _describe_call_difference(collective: str, calls: Mapping[int, IssuedCollective]) -> str:
    """Describe a difference between the ranks' calls that makes a collective fail or hang."""
    kinds = {call.kind for call in calls.values()}
    if len(kinds) > 1:
        return f"  the collectives differ: all ranks must call the same one as {collective}"
    sizes = {call.nbytes for call in calls.values()}
    if len(sizes) > 1 and next(iter(kinds)).lstrip("_").startswith(_EQUAL_SIZES):
        return f"  the sizes differ: all ranks must pass the same shape to {collective}"
    return ""


def _explain_stalls(stalls: Sequence[_Stall], reached: Mapping[int, object]) -> Iterator[str]:
    for start in dict.fromkeys(stall.divergence[0] for stall in stalls if stall.divergence[0]):
        by_rank = [stall.divergence[1] for stall in stalls if stall.divergence[0] == start]
        folded = sorted(group_rarest_texts_first(ChainMap(*by_rank), "{count} others"))
        parts = [f"{name_ranks(ranks)} for {owner}" for ranks, owner in folded]
        yield f"{start}: called on {', on '.join(parts)}"
    waiting = {rank: text for stall in stalls for rank, text in stall.waiting.items()}
    yield from _fold_texts(waiting, dict.fromkeys(waiting, f"{{waits}} in {stalls[0].collective}"))
    yield from dict.fromkeys(stall.difference for stall in stalls if stall.difference)
    absent = {rank: texts for stall in stalls for rank, texts in stall.absent.items()}
    did = {rank: text for rank, (text, _) in absent.items()}
    # If an absent rank is waiting in another collective, the line about that collective says where,
    # so do not repeat it.
    doing = {rank: "" if rank in reached else text for rank, (_, text) in absent.items()}
    yield from _fold_texts({rank: f"{text}{doing[rank]}" for rank, text in did.items()}, did)


def _fold_texts(full: Mapping[int, str], short: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each of the rarest texts in `full`, and lines from `short` for the rest."""
    for ranks, text in sorted(group_rarest_texts_first(full, "")):
        folded = (
            [(ranks, text)] if text else group_ranks_by_text({rank: short[rank] for rank in ranks})
        )
        for same, template in folded:
            yield _fill_template(f"{{ranks}} {template}", same)
