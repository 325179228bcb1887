"""Explains which rank waits for which, from where each is in the order of collectives."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from pytest_fsdp_comm.ranks.hangs.stacks import with_code
from pytest_fsdp_comm.ranks.wire.results import Activity, GroupPosition, IssuedCollective, Position
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks
from pytest_fsdp_comm.text.words import show_nbytes

# The report fits on a screen: ranks in the same state share a line. If that leaves too many lines,
# the rarest are shown, since the rank that all wait for is mostly alone.
_MOST_WAYS: Final = 4
_MOST_STALLS: Final = 3
# Their inputs must have one shape on every rank; those of scatter, gather and all-to-all need not.
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
"""By rank, what it waits in and the ranks that never issued it."""


def explain_waiting(positions: _Positions, *, blamed: Sequence[int] = ()) -> list[str]:
    """Explain a hang by where living ranks are, and which are known to have failed.

    Lines such as ``all wait for rank 3, at model.py:90 in forward`` and ``rank 3 never issued it``.
    Empty if no rank waits, or some wait for blamed ones.
    """
    stalls = [*_stalls(positions)]
    reached = _reached(stalls)
    guilty = set().union(*reached.values()) - reached.keys()
    if guilty & {*blamed}:
        return []
    lines = [*_cause(reached, guilty, positions)]
    # Parallel groups of a mesh, whose ranks do the same, share an explanation.
    alike: defaultdict[str, list[_Stall]] = defaultdict(list)
    for stall in sorted(stalls, key=lambda stall: not stall.missing & guilty):
        alike[stall.what].append(stall)
    same = list(alike.values())
    for shown in same[:_MOST_STALLS]:
        lines += _explain(shown, reached)
    rest = {rank for more in same[_MOST_STALLS:] for stall in more for rank in stall.waiting}
    if rest:
        lines.append(
            _say(f"{{ranks}} {{waits}} in {len(same) - _MOST_STALLS} more, not shown", [*rest])
        )
    return lines


def find_stranded(positions: _Positions, timeout_s: float) -> Stranded:
    """Find ranks that wait, for more than a time, for some that have finished the test."""
    ended = [rank for rank, at in positions.items() if at.activity is Activity.HAS_ENDED]
    groupless = tuple(rank for rank in ended if not positions[rank].groups)
    joining = [rank for rank, at in positions.items() if at.is_joining and groupless]
    stranded: Stranded = dict.fromkeys(joining, ("the process group", groupless))
    for group in _groups(positions):
        # Its last number tells whether a rank issued a collective: the first may be left out.
        last = {rank: max(group.issued.get(rank, {}), default=0) for rank in ended}
        for rank, by_seq in group.issued.items():
            for seq, one in by_seq.items():
                absent = tuple(rank for rank in ended if rank in group.ranks and last[rank] < seq)
                is_waiting = one.is_waited_in and positions[rank].activity is Activity.RUNS
                if is_waiting and one.timeout_s > timeout_s and absent:
                    stranded[rank] = (f"#{seq} of {group.label}", absent)
    return stranded


def explain_mismatch(positions: _Positions, failed: Iterable[int]) -> str:
    """Explain why a backend gave up in failed ranks' last collective; empty if calls are alike."""
    for group in _groups(positions):
        ended = [one for rank in failed for one in group.issued.get(rank, {}).values()]
        for seq in sorted({one.seq for one in ended if one.is_last}):
            what, own = f"#{seq} of {group.label}", group.issued_as(seq)
            if _unequal(what, own):
                return _mismatch(what, own, positions)
    return ""


def _mismatch(what: str, own: Mapping[int, IssuedCollective], positions: _Positions) -> str:
    kinds = {one.kind for one in own.values()}
    called = f"called {min(kinds)}" if len(kinds) == 1 else "called"
    sent = {
        rank: " ".join(
            ([one.kind] if len(kinds) > 1 else []) + ([f"of {one.sent}"] if one.sent else [])
        )
        for rank, one in own.items()
    }
    places = {positions[rank].site for rank, one in own.items() if one.is_last} - {""}
    at = f" at {min(places)}" if len(places) == 1 else ""
    (first, text), *others = _rarest(sent, "in {} other ways")
    parts = [f"{name_ranks(ranks)} {text}" for ranks, text in others]
    return f"{', '.join([f'{name_ranks(first)} {called} {text}', *parts])}, in {what}{at}"


def _rarest(texts: Mapping[int, str], others: str) -> list[tuple[list[int], str]]:
    """Group ranks by equal texts, the rarest first; of many, the last as `others` with a number."""
    folded = sorted(fold_equal(texts), key=lambda fold: len(fold[0]))
    if len(folded) <= _MOST_WAYS:
        return folded
    shown, rest = folded[: _MOST_WAYS - 1], folded[_MOST_WAYS - 1 :]
    return [*shown, (sorted(rank for ranks, _ in rest for rank in ranks), others.format(len(rest)))]


def list_stacks(stacks: Mapping[int, str], title: str) -> list[str]:
    """List ranks' stacks, empty if unknown, each below a title such as ``{ranks} {is} at:``."""
    lines = []
    for ranks, stack in sorted(_rarest(stacks, "{} other places")):
        lines.append(_say(title, ranks))
        lines += [f"    {line}" for line in (stack or "position unknown").splitlines()]
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stall:
    """A collective of a group that ranks wait in together."""

    what: str
    """In words; of parallel groups the same."""
    waiting: Mapping[int, str]
    """What each rank does, as a template of `_say`."""
    missing: frozenset[int]
    absent: Mapping[int, tuple[str, str]]
    """Of the ranks that do not wait in it and have answered, what they did with it, and where."""
    note: str
    """What must be equal and differs; empty if nothing does."""
    parting: tuple[str, dict[int, str]]
    """In words the first earlier call that ranks issued for different modules, and for which."""


# Note [Who waits for whom]: a rank points to those that are missing in the collective that it waits
# in. Following these arrows leads to ranks that wait for nobody: they are guilty, and every other
# wait is their echo. Ranks from which no guilty one is reached, but they themselves are, wait for
# each other in a circle.


def _reached(stalls: Iterable[_Stall]) -> dict[int, set[int]]:
    """The ranks that each waiting rank waits for, directly or through others."""
    reached: defaultdict[int, set[int]] = defaultdict(set)
    for stall in stalls:
        for rank in stall.waiting:
            reached[rank] |= stall.missing
    for via, further in reached.items():
        for found in reached.values():
            found.update(further if via in found else ())
    return dict(reached)


def _cause(
    reached: Mapping[int, set[int]], guilty: set[int], positions: _Positions
) -> Iterator[str]:
    doing = {rank: f", which {_doing(positions.get(rank))}" for rank in guilty}
    before: list[int] = []
    for ranks, text in sorted(_rarest(doing, ", at {} other places")):
        by = sorted(rank for rank, found in reached.items() if found & {*ranks})
        start = "all wait" if len(by) == len(reached) > 1 else _say("{ranks} {waits}", by)
        start = "  and" if by == before else start
        place = text.replace("which {is} at", "at", 1)
        yield _say(f"{start} for {{ranks}}{place}", ranks)
        before = by
    circle = [rank for rank, found in reached.items() if rank in found and not found & guilty]
    if circle:
        yield f"{name_ranks(circle)} wait for each other"


def _say(template: str, ranks: Sequence[int]) -> str:
    """Fill in a template, such as ``{ranks} {waits} in #2``, with verbs for one or several."""
    # Not str.format: paths and code may hold braces.
    for singular, plural in _PLURALS.items():
        template = template.replace(f"{{{singular}}}", singular if len(ranks) == 1 else plural)
    return template.replace("{ranks}", name_ranks(ranks))


def _doing(position: Position | None) -> str:
    """What a rank does that does not wait with others, as a template of `_say`."""
    if position is None:
        return "{is} dead"
    site = with_code(position.site, position.code)
    at = f" at {site}" if site else ""
    return {
        Activity.RUNS: f"{{is}}{at}" if at else "{runs} no code of the test",
        Activity.REPORTS: f"failed{at}",
        Activity.HAS_ENDED: "{has} finished the test",
        Activity.HOLDS_GIL: f"{{holds}} the GIL{at}",
        Activity.SILENT: "{does} not respond",
    }[position.activity]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A process group, as all of its ranks see it."""

    label: str
    ranks: Sequence[int]
    issued: Mapping[int, Mapping[int, IssuedCollective]]
    """What each rank issued, by its number."""

    def issued_as(self, seq: int) -> dict[int, IssuedCollective]:
        own = {rank: by_seq[seq] for rank, by_seq in self.issued.items() if seq in by_seq}
        # Once it is done, nothing tells gloo's reduce-scatter from the all-reduce that it runs as.
        if "reduce_scatter" in {one.kind for one in own.values()}:
            for rank, one in own.items():
                if one.is_done and one.kind == "all_reduce":
                    own[rank] = replace(one, kind="reduce_scatter")
        return own


def _groups(positions: _Positions) -> Iterator[_Group]:
    seen: defaultdict[object, dict[int, GroupPosition]] = defaultdict(dict)
    for rank, position in positions.items():
        for group in position.groups:
            seen[group.name, group.ranks][rank] = group
    named = [next(iter(by_rank.values())) for by_rank in seen.values()]
    for group, by_rank in zip(named, seen.values(), strict=True):
        yield _Group(
            label=_label(group, [other for other in named if other.axis == group.axis]),
            ranks=group.ranks or sorted(by_rank),
            issued={rank: {one.seq: one for one in of.collectives} for rank, of in by_rank.items()},
        )


def _label(group: GroupPosition, namesakes: Iterable[GroupPosition]) -> str:
    members = name_ranks(group.ranks) if group.ranks else "unknown ranks"
    # Parallel groups of a mesh share a name on purpose. Others must be told apart.
    rivals = [other.ranks for other in namesakes if {*other.ranks} & {*group.ranks}]
    if rivals.count(group.ranks) > 1:
        members = f"{members}, torch's {group.name}"
    if not group.axis:
        return f"the group of {members}"
    return f"{group.axis} ({members})" if group.is_shape or len(rivals) > 1 else group.axis


def _stalls(positions: _Positions) -> Iterator[_Stall]:
    """On each group, the first collective that ranks wait in."""
    for group in _groups(positions):
        waiting = {
            (one.seq, rank)
            for rank, by_seq in group.issued.items()
            for one in by_seq.values()
            if one.is_waited_in and positions[rank].activity is Activity.RUNS
        }
        if waiting:
            seq = min(waiting)[0]
            yield _stall(group, seq, sorted(rank for at, rank in waiting if at == seq), positions)


def _stall(group: _Group, seq: int, inside: Sequence[int], positions: _Positions) -> _Stall:
    own = group.issued_as(seq)
    what = f"#{seq} of {group.label}"
    waiting = {}
    for rank in inside:
        one, module, site = own[rank], positions[rank].module, positions[rank].site
        serving, at = f" for {module}" if module else "", f" at {site}" if site else ""
        size = show_nbytes(one.nbytes)
        waiting[rank] = f"{{waits}} in {one.kind} {what}{serving} ({size}){at}"
    note = _unequal(what, own)
    elsewhere = [rank for rank in group.ranks if rank not in waiting]
    never = frozenset(rank for rank in elsewhere if rank not in own)
    gone_on = frozenset(rank for rank in elsewhere if rank in own and own[rank].is_done)
    absent = {}
    for rank in elsewhere:
        if rank not in positions or not positions[rank].activity.is_known:
            continue
        before, more = group.issued.get(rank, {}), ""
        if issued := own.get(rank):
            text = "finished it" if issued.is_done else "issued it"
            if note:
                more = f" ({issued.kind}, {show_nbytes(issued.nbytes)})"
        else:
            text = "never issued it"
            if before:
                last = before[max(before)]
                more = f" ({{its}} last of {group.label} was {last.kind} #{last.seq})"
        absent[rank] = (f"{text}{more}", f", and {_doing(positions[rank])}")
    return _Stall(
        what=what,
        waiting=waiting,
        # Gloo may let a sender go before its receivers have all: waited for only if nobody else is.
        missing=never or (frozenset() if note else gone_on),
        absent=absent,
        note=note,
        parting=_parting(group, seq),
    )


def _parting(group: _Group, before: int) -> tuple[str, dict[int, str]]:
    were_equal = False
    for seq in sorted(set().union(*group.issued.values())):
        owners = {rank: one.owner for rank, one in group.issued_as(seq).items() if one.owner}
        if seq < before and len({*owners.values()}) > 1:
            # Only the last calls are known, and only of a recording.
            since = "" if were_equal or seq == 1 else " or before"
            return f"ranks parted at #{seq} of {group.label}{since}", owners
        were_equal |= len(owners) > 1
    return "", {}


def _unequal(what: str, own: Mapping[int, IssuedCollective]) -> str:
    """Why a collective that all ranks have issued does not end; empty if unknown."""
    kinds = {one.kind for one in own.values()}
    if len(kinds) > 1:
        return f"  these differ: {what} must be the same collective on every rank"
    sizes = {one.nbytes for one in own.values()}
    if len(sizes) > 1 and next(iter(kinds)).lstrip("_").startswith(_EQUAL_SIZES):
        return f"  the sizes differ: {what} must have the same shape on every rank"
    return ""


def _explain(stalls: Sequence[_Stall], reached: Mapping[int, object]) -> Iterator[str]:
    for start in dict.fromkeys(stall.parting[0] for stall in stalls if stall.parting[0]):
        owners = ChainMap(*(stall.parting[1] for stall in stalls if stall.parting[0] == start))
        folded = sorted(_rarest(owners, "{} others"))
        parts = [f"{name_ranks(ranks)} for {owner}" for ranks, owner in folded]
        yield f"{start}: {', '.join(parts)}"
    waiting = {rank: text for stall in stalls for rank, text in stall.waiting.items()}
    yield from _told(waiting, dict.fromkeys(waiting, f"{{waits}} in {stalls[0].what}"))
    yield from dict.fromkeys(stall.note for stall in stalls if stall.note)
    absent = {rank: words for stall in stalls for rank, words in stall.absent.items()}
    did = {rank: text for rank, (text, _) in absent.items()}
    # A rank that waits in something else has its place in the line about that.
    at = {rank: "" if rank in reached else place for rank, (_, place) in absent.items()}
    yield from _told({rank: f"{text}{at[rank]}" for rank, text in did.items()}, did)


def _told(full: Mapping[int, str], short: Mapping[int, str]) -> Iterator[str]:
    """Ranks with equal templates together: the rarest in full, the others in short."""
    for ranks, text in sorted(_rarest(full, "")):
        folded = [(ranks, text)] if text else fold_equal({rank: short[rank] for rank in ranks})
        for same, told in folded:
            yield _say(f"{{ranks}} {told}", same)
