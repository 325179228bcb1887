"""Explains which rank waits for which, from where each is in the order of collectives.

A report is read on a screen: ranks in the same state share a line, and the rest is counted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.ranks.hangs.stacks import with_code
from pytest_fsdp_comm.ranks.wire.positions import ROOT_ROLES, Activity, IssuedCollective
from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks, write_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_fsdp_comm.ranks.wire.positions import GroupPosition, Position, UnrecordedCall

# Of whatever ranks do in different ways: beyond it only how many ways there are helps.
_MOST_WAYS: Final = 4
_MOST_STALLS: Final = 3
_MOST_STACKS: Final = 4
# Ranks that wait for one other rank each.
_MOST_PEERS: Final = 16
_OTHERS: Final = " other ranks"
_PEER: Final = re.compile(r"(send to|recv from) rank (\d+)")
_RELATIVE_PEER: Final = re.compile(r"(send to|recv from) rank r[+-]")

# Whose inputs torch wants of one shape on every rank. Those of scatter, gather and all-to-all may
# differ.
_EQUAL_SIZES: Final = ("all_reduce", "all_gather", "allgather", "reduce", "broadcast")


def explain_waiting(positions: Mapping[int, Position], *, blamed: Sequence[int] = ()) -> list[str]:
    """Explains a hang.

    Args:
        positions: Where each rank is; dead ranks are missing.
        blamed: Ranks that are known to have failed.

    Returns:
        A line like ``all wait for rank 3, at model.py:90 in forward`` where that is known; then
        lines like ``ranks 0-1 wait in all_gather #7 of dp for layers.3 (512 B) at model.py:88`` and
        ``rank 3 never issued it, and is at model.py:90``. Empty if no rank waits, or some wait for
        blamed ones.
    """
    stalls = [*_stalls(positions), *_call_stalls(positions)]
    links = _Links(stall for stall in stalls if not stall.is_aside)
    if links.guilty & {*blamed}:
        return []
    lines = [*_cause(links, positions)]
    stalls = [stall for stall in stalls if not stall.is_aside or not stall.missing & {*blamed}]
    # Parallel groups of a mesh, whose ranks do the same: one story.
    alike: defaultdict[str, list[_Stall]] = defaultdict(list)
    for stall in sorted(
        stalls, key=lambda stall: (stall.is_aside, not stall.missing & links.guilty)
    ):
        alike[stall.what].append(stall)
    stories = list(alike.values())
    for same in stories[:_MOST_STALLS]:
        lines += _explain_stalls(same, links.waiting)
    rest = {rank for same in stories[_MOST_STALLS:] for stall in same for rank in stall.waiting}
    if rest:
        wait = "waits" if len(rest) == 1 else "wait"
        lines.append(
            f"{name_ranks([*rest])} {wait} in {len(stories) - _MOST_STALLS} more, not shown"
        )
    return lines


def explain_mismatch(positions: Mapping[int, Position], failed: Iterable[int]) -> str:
    """Explains why a backend gave up, where what ranks called does not fit together.

    Args:
        positions: Where each rank is or, of one that the backend has ended, was.
        failed: The ranks whose last collective the backend may have given up.

    Returns:
        ``rank 3 called all_reduce of 400,000 float32, ranks 0-2 of 4 float32, in #1 of world at
        test_it.py:9 in test_it``, the rarest first; empty if nothing differs.
    """
    for label, _, issued in _by_group(positions):
        last = {one.seq for rank in failed for one in issued.get(rank, {}).values() if one.is_last}
        for seq in sorted(last):
            own = _issued(seq, issued)
            if _unequal(label, seq, own) or _unlike_roots(own):
                return _mismatch(f"#{seq} of {label}", own, positions)
    return ""


def _mismatch(
    what: str, own: Mapping[int, IssuedCollective], positions: Mapping[int, Position]
) -> str:
    kinds = {one.kind for one in own.values()}
    called = f"called {min(kinds)}" if len(kinds) == 1 else "called"
    # Known of some ranks only: told where it tells them apart.
    shows_root = bool(_unlike_roots(own))
    sent = {
        rank: " ".join(
            (
                *([one.kind] if len(kinds) > 1 else []),
                *([f"of {one.sent}"] if one.sent else []),
                *([_rooted(one)] if shows_root and one.root is not None else []),
            )
        )
        for rank, one in own.items()
    }
    # Of one that raised elsewhere later, or has gone on, the place is not known any more.
    sites = {
        rank: one.site or (positions[rank].site if positions[rank].is_waiting else "")
        for rank, one in own.items()
        if one.is_last
    }
    folded = [
        (ranks, {sites.get(rank, "") for rank in ranks} - {""}) for ranks, _ in fold_equal(sent)
    ]
    places = {place for _, known in folded for place in known}
    if len(places) == 1 and all(known for _, known in folded):
        what = f"{what} at {min(places)}"
    else:
        for ranks, known in folded:
            if len(known) == 1:
                sent |= {rank: f"{sent[rank]} at {min(known)}" for rank in ranks}
    return f"{_contrast(sent, called, called)}, in {what}"


def _contrast(texts: Mapping[int, str], verb: str, verb_of_several: str) -> str:
    """What each rank does differently: ``rank 3 <verb> this, ranks 0-2 that``, the rarest first."""
    folded = sorted(fold_equal(texts), key=lambda fold: len(fold[0]))
    most = _MOST_WAYS if len(folded) <= _MOST_WAYS else _MOST_WAYS - 1
    parts = [f"{name_ranks(ranks)} {text}" for ranks, text in folded[:most]]
    ranks, text = folded[0]
    parts[0] = f"{name_ranks(ranks)} {verb if len(ranks) == 1 else verb_of_several} {text}"
    rest = [rank for ranks, _ in folded[most:] for rank in ranks]
    if rest:
        parts.append(f"{name_ranks(rest)} in {len(folded) - most} other ways")
    return ", ".join(parts)


def list_stacks(stacks: Mapping[int, str], title: Callable[[Sequence[int]], str]) -> list[str]:
    """Lists where ranks are, those at the same place together.

    Args:
        stacks: The stack of each rank, a line for each frame; empty if unknown.
        title: What to write above a stack, given the ranks.
    """
    lines = []
    folded = fold_equal(stacks)
    most = _MOST_STACKS if len(folded) <= _MOST_STACKS else _MOST_STACKS - 1
    # The rarest first: the rank that all wait for is mostly alone.
    shown = {ranks[0] for ranks, _ in sorted(folded, key=lambda fold: len(fold[0]))[:most]}
    for ranks, stack in folded:
        if ranks[0] in shown:
            lines.append(title(ranks))
            lines += [f"    {line}" for line in (stack or "position unknown").splitlines()]
    rest = [rank for ranks, _ in folded if ranks[0] not in shown for rank in ranks]
    if rest:
        lines.append(f"{name_ranks(rest)} {_are(rest)} at {len(folded) - most} other places")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stall:
    """What ranks wait in together: a collective of a group, or a call."""

    what: str
    """In words; of parallel groups the same."""
    waiting: Mapping[int, tuple[str, str]]
    """The ranks that wait in it, with what each of them knows of it, and the line."""
    missing: frozenset[int]
    """The ranks that they wait for."""
    absences: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """What the ranks did that do not wait in it, to be read after the name of one or of several."""
    notes: tuple[str, ...] = ()
    """Why nobody need be missing."""
    is_aside: bool = False
    """Whether the main threads do something else."""


class _Links:
    """Who waits for whom in the end."""

    def __init__(self, stalls: Iterable[_Stall]) -> None:
        """Follows each rank that waits.

        Args:
            stalls: All of them.
        """
        following: defaultdict[int, set[int]] = defaultdict(set)
        for stall in stalls:
            for rank in stall.waiting:
                following[rank] |= stall.missing - {rank}
        self.waiting = frozenset(following)
        self.reached = {rank: _reachable(rank, following) for rank in following}
        self.guilty = frozenset().union(*self.reached.values()) - self.waiting
        """Those that are waited for and wait for nobody: the rest is their echo."""
        self.circle = frozenset(
            rank
            for rank, reached in self.reached.items()
            if rank in reached and not reached & self.guilty
        )
        """Those that wait for each other, and for nobody else."""


def _reachable(rank: int, following: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    waiting = [rank]
    while waiting:
        new = following.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _cause(links: _Links, positions: Mapping[int, Position]) -> Iterator[str]:
    folded = fold_equal({rank: _whereabouts([rank], positions) for rank in links.guilty})
    before: frozenset[int] = frozenset()
    for number, (ranks, _) in enumerate(folded):
        left = len(folded) - number
        if number == _MOST_WAYS - 1 and left > 1:
            rest = [rank for others, _ in folded[number:] for rank in others]
            yield f"  and for {name_ranks(rest)}, at {left} other places"
            break
        by = frozenset(rank for rank, reached in links.reached.items() if reached & {*ranks})
        who = "all wait" if by == links.waiting and len(by) > 1 else _waits(sorted(by))
        start = "  and" if by == before else who
        yield f"{start} for {name_ranks(ranks)}{_whereabouts(ranks, positions)}"
        before = by
    if links.circle:
        yield f"{name_ranks([*links.circle])} wait for each other"


def _waits(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _whereabouts(ranks: Sequence[int], positions: Mapping[int, Position]) -> str:
    """What ranks do that others wait for; all of them do the same."""
    is_one = len(ranks) == 1
    position = positions.get(ranks[0])
    if position is None:
        return f", which {_are(ranks)} dead"
    site = with_code(position.site, position.code)
    at = f" at {site}" if site else ""
    if position.activity is Activity.RUNS and at:
        return f",{at}"
    one, several = {
        Activity.RUNS: ("runs no code of the test", "run no code of the test"),
        Activity.REPORTS: ("failed{at}, and reports that", "failed{at}, and report that"),
        Activity.HAS_ENDED: ("has finished the test", "have finished the test"),
        Activity.HOLDS_GIL: ("holds the GIL{at}", "hold the GIL{at}"),
        Activity.STOPPED: (
            "is stopped (by SIGSTOP, Ctrl-Z or a debugger)",
            "are stopped (by SIGSTOP, Ctrl-Z or a debugger)",
        ),
        Activity.IN_KERNEL: (
            "is stuck in the kernel (a disk, a file server or a driver)",
            "are stuck in the kernel (a disk, a file server or a driver)",
        ),
        Activity.SILENT: ("does not respond", "do not respond"),
    }[position.activity]
    return f", which {(one if is_one else several).replace('{at}', at)}"


def _by_group(
    positions: Mapping[int, Position],
) -> Iterator[tuple[str, tuple[int, ...], Mapping[int, Mapping[int, IssuedCollective]]]]:
    """Each group's label, its ranks, and what each of them issued, by its number."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, GroupPosition]] = {}
    for rank, position in positions.items():
        for group in position.groups:
            groups.setdefault((group.name, group.ranks), {})[rank] = group
    labels = _labels(
        {key: min(by_rank.values(), key=_vagueness) for key, by_rank in groups.items()}
    )
    for key, by_rank in groups.items():
        issued = {
            rank: {one.seq: one for one in group.collectives} for rank, group in by_rank.items()
        }
        yield labels[key], key[1] or tuple(sorted(by_rank)), issued


def _issued(
    seq: int, issued: Mapping[int, Mapping[int, IssuedCollective]]
) -> dict[int, IssuedCollective]:
    """What the ranks issued as one collective."""
    own = {rank: by_seq[seq] for rank, by_seq in issued.items() if seq in by_seq}
    # Once it is done, nothing tells gloo's reduce-scatter from the all-reduce that it runs it as.
    if "reduce_scatter" in {one.kind for one in own.values()}:
        for rank, one in own.items():
            if one.is_done and one.kind == "all_reduce":
                own[rank] = replace(one, kind="reduce_scatter")
    return own


def _stalls(positions: Mapping[int, Position]) -> Iterator[_Stall]:
    for label, members, issued in _by_group(positions):
        told: set[int] = set()
        for waits in (_waits_in, _waits_aside):
            waited_in = {
                one.seq
                for rank, by_seq in issued.items()
                for one in by_seq.values()
                if waits(positions[rank], one)
            }
            if waited_in - told:
                yield _stall(label, min(waited_in - told), issued, members, positions)
            told |= waited_in


def _waits_in(position: Position, one: IssuedCollective) -> bool:
    if one.is_done or position.activity is not Activity.RUNS:
        return False
    return one.is_joined if one.thread else position.is_waiting and position.call is None


def _waits_aside(position: Position, one: IssuedCollective) -> bool:
    return bool(one.thread) and not one.is_done and position.activity is Activity.RUNS


def _stall(
    label: str,
    seq: int,
    issued: Mapping[int, Mapping[int, IssuedCollective]],
    members: Sequence[int],
    positions: Mapping[int, Position],
) -> _Stall:
    own = _issued(seq, issued)
    kept = {rank: one for rank, one in own.items() if _waits_in(positions[rank], one)}
    aside = {rank: one for rank, one in own.items() if _waits_aside(positions[rank], one)}
    waiting = kept or aside
    unequal = _unequal(label, seq, own)
    notes = unequal or _unlike_roots(own)
    absent = [rank for rank in members if rank not in waiting]
    never = frozenset(rank for rank in absent if rank not in own)
    gone_on = frozenset(rank for rank in absent if rank in own and own[rank].is_done)
    absences = {
        rank: _absences(label, seq, issued.get(rank, {}), positions[rank], is_sized=bool(unequal))
        for rank in absent
        if rank in positions and positions[rank].activity.is_known
    }
    return _Stall(
        what=f"#{seq} of {label}",
        waiting={
            rank: (
                _describe(label, one, positions[rank].module),
                one.site if one.thread else positions[rank].site,
            )
            for rank, one in waiting.items()
        },
        # Gloo may let a sender go before its receivers have all: waited for only if nobody else is.
        missing=never or (frozenset() if notes else gone_on),
        absences=absences,
        notes=notes,
        is_aside=not kept,
    )


def _unequal(label: str, seq: int, own: Mapping[int, IssuedCollective]) -> tuple[str, ...]:
    """Why a collective that all ranks have issued does not end."""
    kinds = {one.kind for one in own.values()}
    if len(kinds) > 1:
        return (f"  these differ: #{seq} of {label} must be the same collective on every rank",)
    sizes = {one.nbytes for one in own.values()}
    if len(sizes) > 1 and next(iter(kinds)).lstrip("_").startswith(_EQUAL_SIZES):
        return (f"  the sizes differ: #{seq} of {label} must have the same shape on every rank",)
    return ()


def _unlike_roots(own: Mapping[int, IssuedCollective]) -> tuple[str, ...]:
    """Likewise, of collectives of one kind."""
    roots = {rank: one for rank, one in own.items() if one.root is not None}
    if len({one.root for one in roots.values()}) <= 1:
        return ()
    kind = min(one.kind for one in roots.values())
    differ = "destinations" if ROOT_ROLES[kind] == "dst" else "sources"
    to = {rank: _rooted(one) for rank, one in roots.items()}
    return (f"  the {differ} differ: {_contrast(to, f'{kind}s', kind)}",)


def _rooted(one: IssuedCollective) -> str:
    return f"{'to' if ROOT_ROLES[one.kind] == 'dst' else 'from'} {one.root}"


def _call_stalls(positions: Mapping[int, Position]) -> Iterator[_Stall]:
    calls = {
        rank: position.call
        for rank, position in positions.items()
        if position.call is not None and position.activity is Activity.RUNS
    }
    peers = _peers(calls, positions)
    for call in dict.fromkeys(calls.values()):
        inside = [rank for rank, other in calls.items() if other == call]
        missing = frozenset(call.ranks).difference(inside)
        of = f" of {name_ranks(call.ranks)}" if call.is_mutual and call.ranks else ""
        absences = {
            rank: _with_place("has not called it", "have not called it", positions[rank])
            for rank in sorted(missing)
            if call.is_mutual and rank in positions and positions[rank].activity.is_known
        }
        yield _Stall(
            # Sends, and receives, are told together: they may be links of a chain.
            what=_PEER.sub(rf"\1{_OTHERS}", f"{call.name}{of}"),
            waiting={
                rank: (peers.get(rank, f"{call.name}{of}"), positions[rank].site) for rank in inside
            },
            missing=missing,
            absences=absences,
        )


def _peers(
    calls: Mapping[int, UnrecordedCall], positions: Mapping[int, Position]
) -> dict[int, str]:
    """Sends and receives in words relative to the rank, where many ranks do alike."""
    steps = {
        rank: (match[1], int(match[2]) - rank, positions[rank].site)
        for rank, call in calls.items()
        if (match := _PEER.fullmatch(call.name))
    }
    counts = Counter(steps.values())
    # With the one that closes a ring, more than are listed one by one.
    return {
        rank: f"{step[0]} rank r{step[1]:+}"
        for rank, step in steps.items()
        if counts[step] >= _MOST_WAYS - 1 and len(steps) >= _MOST_WAYS
    }


def _labels(
    groups: Mapping[tuple[str, tuple[int, ...]], GroupPosition],
) -> dict[tuple[str, tuple[int, ...]], str]:
    """What people call each group."""
    by_name: defaultdict[str, list[GroupPosition]] = defaultdict(list)
    for group in groups.values():
        by_name[group.axis].append(group)
    return {key: _label(group, by_name[group.axis]) for key, group in groups.items()}


def _label(group: GroupPosition, namesakes: Iterable[GroupPosition]) -> str:
    members = name_ranks(group.ranks) if group.ranks else "unknown ranks"
    name = group.axis or f"group of {members}"
    if group.axis and group.is_shape:
        name = f"{group.axis} ({members})"
    # Parallel groups of a mesh share a name on purpose. Others must be told apart.
    rivals = [other for other in namesakes if {*other.ranks} & {*group.ranks}]
    if any(other.ranks != group.ranks for other in rivals) and not group.is_shape and group.axis:
        name = f"{group.axis} ({members})"
    equals = [other.ordinal for other in rivals if other.ranks == group.ranks]
    if len(equals) > 1:
        return f"the {_ordinal(sorted(equals).index(group.ordinal) + 1)} {name}"
    return name if group.axis else f"the {name}"


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _vagueness(group: GroupPosition) -> int:
    """How little a rank's name for a group says: some ranks may keep no mesh."""
    if group.is_shape or not group.axis:
        return 2
    return 1 if group.axis == "world" else 0


def _describe(label: str, issued: IssuedCollective, module: str) -> str:
    serving = f" for {module}" if module and not issued.thread else ""
    thread = f" in thread {issued.thread}" if issued.thread else ""
    size = show_nbytes(issued.nbytes)
    return f"{issued.kind} #{issued.seq} of {label}{serving} ({size}){thread}"


def _absences(
    label: str,
    seq: int,
    own: Mapping[int, IssuedCollective],
    position: Position,
    *,
    is_sized: bool,
) -> tuple[str, str]:
    """How ranks are past a collective that others wait in, or before it."""
    if seq in own:
        thread = f" in thread {own[seq].thread}" if own[seq].thread else ""
        text = "finished it" if own[seq].is_done else f"issued it{thread}"
        if is_sized:
            text += f" ({own[seq].kind}, {show_nbytes(own[seq].nbytes)})"
        return _with_place(text, text, position)
    if not own:
        return _with_place("never issued it", "never issued it", position)
    last = own[max(own)]
    return _with_place(
        f"never issued it (its last of {label} was {last.kind} #{last.seq})",
        f"never issued it (their last of {label} was {last.kind} #{last.seq})",
        position,
    )


def _with_place(of_one: str, of_several: str, position: Position) -> tuple[str, str]:
    if position.activity is Activity.HAS_ENDED:
        return f"{of_one}, and has finished the test", f"{of_several}, and have finished the test"
    site = with_code(position.site, position.code)
    if position.activity is Activity.REPORTS:
        return f"{of_one}, and failed at {site}", f"{of_several}, and failed at {site}"
    if site:
        return f"{of_one}, and is at {site}", f"{of_several}, and are at {site}"
    return of_one, of_several


def _explain_stalls(stalls: Sequence[_Stall], waiting: frozenset[int]) -> Iterator[str]:
    """Explains one stall, or those of parallel groups."""
    waits = {rank: wait for stall in stalls for rank, wait in stall.waiting.items()}
    described = {rank: text for rank, (text, _) in waits.items()}
    placed = {rank: f"{text} at {site}" if site else text for rank, (text, site) in waits.items()}
    whats = {rank: stall.what for stall in stalls for rank in stall.waiting}
    most = _MOST_PEERS if stalls[0].what.endswith(_OTHERS) else _MOST_WAYS
    for ranks, text in _folded(placed, described, whats, most=most):
        each = f"each rank r of {write_ranks(ranks, separator=', ')} waits"
        yield f"{each if _RELATIVE_PEER.match(text) else _waits(ranks)} in {text}"
    yield from dict.fromkeys(note for stall in stalls for note in stall.notes)
    # Where a rank is that waits in something else is said there.
    absences = {
        rank: _cut(texts, ", and ") if rank in waiting else texts
        for stall in stalls
        for rank, texts in stall.absences.items()
    }
    for ranks, pair in _folded(
        *(
            {rank: "\n".join(_cut(texts, end)) for rank, texts in absences.items()}
            for end in ("\n", ", and ", " (")
        )
    ):
        of_one, _, of_several = pair.partition("\n")
        yield f"{name_ranks(ranks)} {of_one if len(ranks) == 1 else of_several}"


def _cut(texts: tuple[str, str], end: str) -> tuple[str, str]:
    return texts[0].partition(end)[0], texts[1].partition(end)[0]


def _folded(*texts: Mapping[int, str], most: int = _MOST_WAYS) -> list[tuple[list[int], str]]:
    """Ranks with equal texts together; where these are too many, by the next, vaguer texts."""
    folded: list[tuple[list[int], str]] = []
    for by_rank in texts:
        folded = fold_equal(by_rank)
        if len(folded) <= most:
            break
    return folded
