"""Explains which rank waits for which, from where each is in the order of collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from pytest_fsdp_comm.ranks.hangs.stacks import with_code
from pytest_fsdp_comm.ranks.wire.results import (
    PEER_ROLES,
    ROOT_ROLES,
    Activity,
    GroupPosition,
    IssuedCollective,
    Position,
    UnrecordedCall,
)
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks, write_ranks
from pytest_fsdp_comm.text.words import show_nbytes

# The report fits on a screen: ranks in the same state share a line. If that leaves too many lines,
# the rarest are shown, since the rank that all wait for is mostly alone.
_MOST_WAYS: Final = 4
_MOST_STALLS: Final = 3
_PEER_WORDS: Final = {"src": "from", "dst": "to"}
_PEER_CALLS: Final = tuple(f"{{waits}} in {name}" for name in PEER_ROLES)
# Their inputs must have one shape on every rank; those of scatter, gather and all-to-all need not.
_EQUAL_SIZES: Final = ("all_reduce", "all_gather", "allgather", "reduce", "broadcast")

_PLURALS: Final = {
    "does": "do",
    "has": "have",
    "holds": "hold",
    "is": "are",
    "its": "their",
    "reports": "report",
    "runs": "run",
    "waits": "wait",
    "was": "were",
}

_WHEREABOUTS: Final = {
    Activity.RUNS: "{runs} no code of the test",
    Activity.REPORTS: "failed{at}, and {reports} that",
    Activity.HAS_ENDED: "{has} finished the test",
    Activity.HOLDS_GIL: "{holds} the GIL{at}",
    Activity.STOPPED: "{is} stopped (by SIGSTOP, Ctrl-Z or a debugger)",
    Activity.IN_KERNEL: "{is} stuck in the kernel (a disk, a file server or a driver)",
    Activity.SILENT: "{does} not respond",
}

_Positions: TypeAlias = Mapping[int, "Position"]
_Words: TypeAlias = tuple[str, str]
"""What a rank does, in full and in short: templates of `_say`, without the name of the rank."""


def explain_waiting(positions: _Positions, *, blamed: Sequence[int] = ()) -> list[str]:
    """Explain a hang by where living ranks are, and which are known to have failed.

    Lines such as ``all wait for rank 3, at model.py:90 in forward`` and ``rank 3 never issued it``.
    Empty if no rank waits, or some wait for blamed ones.
    """
    stalls = [*_stalls(positions), *_call_stalls(positions)]
    reached = _reached(stalls)
    guilty = set().union(*reached.values()) - reached.keys()
    if guilty & {*blamed}:
        return []
    lines = [*_cause(reached, guilty, positions)]
    # Parallel groups of a mesh, whose ranks do the same, share an explanation.
    alike: defaultdict[str, list[_Stall]] = defaultdict(list)
    for stall in sorted(stalls, key=lambda stall: (stall.is_aside, not stall.missing & guilty)):
        if not stall.is_aside or not stall.missing & {*blamed}:
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


def explain_mismatch(positions: _Positions, failed: Iterable[int]) -> str:
    """Explain why a backend gave up in failed ranks' last collective; empty if calls are alike."""
    for group in _groups(positions):
        ended = [one for rank in failed for one in group.issued.get(rank, {}).values()]
        for seq in sorted({one.seq for one in ended if one.is_last}):
            what, own = f"#{seq} of {group.label}", group.issued_as(seq)
            if _unequal(what, own) or _unlike_roots(own):
                return _mismatch(what, own)
    return ""


def _mismatch(what: str, own: Mapping[int, IssuedCollective]) -> str:
    kinds = {one.kind for one in own.values()}
    called = f"called {min(kinds)}" if len(kinds) == 1 else "called"
    # Known of some ranks only: shown where it distinguishes them.
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
    # The place is no longer known of a rank that has gone on, or raised elsewhere later.
    folded = [
        (ranks, {own[rank].site for rank in ranks if own[rank].is_last} - {""})
        for ranks, _ in fold_equal(sent)
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
    """``rank 3 <verb> this, ranks 0-2 that``, the rarest first."""
    shown, ways, rest = _rarest(texts)
    parts = [f"{name_ranks(ranks)} {text}" for ranks, text in shown]
    ranks, text = shown[0]
    parts[0] = f"{name_ranks(ranks)} {verb if len(ranks) == 1 else verb_of_several} {text}"
    if rest:
        parts.append(f"{name_ranks(rest)} in {ways} other ways")
    return ", ".join(parts)


_Folds: TypeAlias = list[tuple[list[int], str]]


def _rarest(texts: Mapping[int, str]) -> tuple[_Folds, int, list[int]]:
    """The rarest texts, how many others there are (never one), and the ranks of these."""
    folded = sorted(fold_equal(texts), key=lambda fold: len(fold[0]))
    shown = folded if len(folded) <= _MOST_WAYS else folded[: _MOST_WAYS - 1]
    rest = [rank for ranks, _ in folded[len(shown) :] for rank in ranks]
    return shown, len(folded) - len(shown), rest


def list_stacks(stacks: Mapping[int, str], title: str) -> list[str]:
    """List ranks' stacks, empty if unknown, each below a title such as ``{ranks} {is} at:``."""
    lines = []
    shown, places, rest = _rarest(stacks)
    for ranks, stack in sorted(shown):
        lines.append(_say(title, ranks))
        lines += [f"    {line}" for line in (stack or "position unknown").splitlines()]
    if rest:
        lines.append(_say(f"{{ranks}} {{is}} at {places} other places", rest))
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stall:
    """What ranks wait in together: a collective of a group, or a call."""

    what: str
    """In words; of parallel groups the same."""
    waiting: Mapping[int, _Words]
    missing: frozenset[int]
    absent: Mapping[int, _Words]
    """The ranks that do not wait in it and have answered, and what they did instead."""
    notes: tuple[str, ...] = ()
    is_aside: bool = False
    """Whether the main threads do something else."""


# Note [Who waits for whom]: a rank points to those that are missing where it waits, in a collective
# or a call. Following these arrows leads to ranks that wait for nobody: they are guilty, and every
# other wait is their echo. Ranks from which no guilty one is reached, but they themselves are, wait
# for each other in a circle. What only another thread waits in points nowhere: it keeps no rank.


def _reached(stalls: Iterable[_Stall]) -> dict[int, set[int]]:
    """The ranks that each waiting rank waits for, directly or through others."""
    reached: defaultdict[int, set[int]] = defaultdict(set)
    for stall in stalls:
        for rank in () if stall.is_aside else stall.waiting:
            reached[rank] |= stall.missing - {rank}
    for via, further in reached.items():
        for found in reached.values():
            found.update(further if via in found else ())
    return dict(reached)


def _cause(
    reached: Mapping[int, set[int]], guilty: set[int], positions: _Positions
) -> Iterator[str]:
    shown, places, rest = _rarest({rank: _whereabouts([rank], positions) for rank in guilty})
    before: list[int] = []
    for ranks, _ in sorted(shown):
        by = sorted(rank for rank, found in reached.items() if found & {*ranks})
        start = "all wait" if len(by) == len(reached) > 1 else _say("{ranks} {waits}", by)
        start = "  and" if by == before else start
        yield f"{start} for {name_ranks(ranks)}{_whereabouts(ranks, positions)}"
        before = by
    if rest:
        yield f"  and for {name_ranks(rest)}, at {places} other places"
    circle = [rank for rank, found in reached.items() if rank in found and not found & guilty]
    if circle:
        yield f"{name_ranks(circle)} wait for each other"


def _say(template: str, ranks: Sequence[int]) -> str:
    """Fill in a template, such as ``{ranks} {waits} in recv``, with verbs for one or several."""
    # Not str.format: paths and code may hold braces.
    for singular, plural in _PLURALS.items():
        template = template.replace(f"{{{singular}}}", singular if len(ranks) == 1 else plural)
    return template.replace("{ranks}", name_ranks(ranks))


def _whereabouts(ranks: Sequence[int], positions: _Positions) -> str:
    # All of them do the same.
    position = positions.get(ranks[0])
    if position is None:
        return _say(", which {is} dead", ranks)
    site = with_code(position.site, position.code)
    at = f" at {site}" if site else ""
    if position.activity is Activity.RUNS and at:
        return f",{at}"
    return _say(f", which {_WHEREABOUTS[position.activity]}", ranks).replace("{at}", at)


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
    named = [min(by_rank.values(), key=_vagueness) for by_rank in seen.values()]
    for group, by_rank in zip(named, seen.values(), strict=True):
        yield _Group(
            label=_label(group, [other for other in named if other.axis == group.axis]),
            ranks=group.ranks or sorted(by_rank),
            issued={rank: {one.seq: one for one in of.collectives} for rank, of in by_rank.items()},
        )


def _label(group: GroupPosition, namesakes: Iterable[GroupPosition]) -> str:
    members = name_ranks(group.ranks) if group.ranks else "unknown ranks"
    name = group.axis or f"group of {members}"
    # Parallel groups of a mesh share a name on purpose. Others must be told apart.
    rivals = [other for other in namesakes if {*other.ranks} & {*group.ranks}]
    if group.axis and (group.is_shape or any(other.ranks != group.ranks for other in rivals)):
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


def _stalls(positions: _Positions) -> Iterator[_Stall]:
    """On each group, the first collective that main threads wait in, and that of other threads."""
    for group in _groups(positions):
        of_main_threads: set[int] = set()
        for is_aside in (False, True):
            waiting = {
                (one.seq, rank)
                for rank, by_seq in group.issued.items()
                for one in by_seq.values()
                if (one.thread if is_aside else one.is_waited_in)
                and one.seq not in of_main_threads
                and not one.is_done
                and positions[rank].activity is Activity.RUNS
            }
            if waiting:
                seq = min(waiting)[0]
                ranks = sorted(rank for other, rank in waiting if other == seq)
                yield _stall(group, seq, ranks, positions, is_aside=is_aside)
            of_main_threads = {seq for seq, _ in waiting}


def _stall(
    group: _Group, seq: int, inside: Sequence[int], positions: _Positions, *, is_aside: bool
) -> _Stall:
    own = group.issued_as(seq)
    what = f"#{seq} of {group.label}"
    waiting = {}
    for rank in inside:
        one, module = own[rank], positions[rank].module
        serving = f" for {module}" if module and not one.thread else ""
        thread = f" in thread {one.thread}" if one.thread else ""
        text = f"{one.kind} {what}{serving} ({show_nbytes(one.nbytes)}){thread}"
        waiting[rank] = _waits(text, one.site, what)
    unequal = _unequal(what, own)
    notes = unequal or _unlike_roots(own)
    elsewhere = [rank for rank in group.ranks if rank not in waiting]
    never = frozenset(rank for rank in elsewhere if rank not in own)
    gone_on = frozenset(rank for rank in elsewhere if rank in own and own[rank].is_done)
    absent = {}
    for rank in _answering(elsewhere, positions):
        before, more = group.issued.get(rank, {}), ""
        if issued := own.get(rank):
            thread = f" in thread {issued.thread}" if issued.thread else ""
            text = "finished it" if issued.is_done else f"issued it{thread}"
            if unequal:
                more = f" ({issued.kind}, {show_nbytes(issued.nbytes)})"
        else:
            text = "never issued it"
            if before:
                last = before[max(before)]
                more = f" ({{its}} last of {group.label} was {last.kind} #{last.seq})"
        absent[rank] = (f"{text}{more}{_place(positions[rank])}", f"{text}{more}")
    return _Stall(
        what=what,
        waiting=waiting,
        # Gloo may let a sender go before its receivers have all: waited for only if nobody else is.
        missing=never or (frozenset() if notes else gone_on),
        absent=absent,
        notes=notes,
        is_aside=is_aside,
    )


def _answering(ranks: Iterable[int], positions: _Positions) -> Iterator[int]:
    return (rank for rank in ranks if rank in positions and positions[rank].activity.is_known)


def _waits(text: str, site: str, what: str) -> _Words:
    return f"{{waits}} in {text}{f' at {site}' if site else ''}", f"{{waits}} in {what}"


def _place(position: Position) -> str:
    """Where a rank is that does not wait with others, as part of a template."""
    if position.activity is Activity.HAS_ENDED:
        return ", and {has} finished the test"
    site = with_code(position.site, position.code)
    if position.activity is Activity.REPORTS:
        return f", and failed at {site}"
    return f", and {{is}} at {site}" if site else ""


def _unequal(what: str, own: Mapping[int, IssuedCollective]) -> tuple[str, ...]:
    """A note on why a collective that all ranks have issued does not end; empty if none."""
    kinds = {one.kind for one in own.values()}
    if len(kinds) > 1:
        return (f"  these differ: {what} must be the same collective on every rank",)
    sizes = {one.nbytes for one in own.values()}
    if len(sizes) > 1 and next(iter(kinds)).lstrip("_").startswith(_EQUAL_SIZES):
        return (f"  the sizes differ: {what} must have the same shape on every rank",)
    return ()


def _unlike_roots(own: Mapping[int, IssuedCollective]) -> tuple[str, ...]:
    roots = {rank: one for rank, one in own.items() if one.root is not None}
    if len({one.root for one in roots.values()}) <= 1:
        return ()
    kind = min(one.kind for one in roots.values())
    differ = "destinations" if ROOT_ROLES[kind] == "dst" else "sources"
    to = {rank: _rooted(one) for rank, one in roots.items()}
    return (f"  the {differ} differ: {_contrast(to, f'{kind}s', kind)}",)


def _rooted(one: IssuedCollective) -> str:
    return f"{'to' if ROOT_ROLES[one.kind] == 'dst' else 'from'} {one.root}"


def _call_stalls(positions: _Positions) -> Iterator[_Stall]:
    calls = {
        rank: position.call
        for rank, position in positions.items()
        if position.call is not None and position.activity is Activity.RUNS
    }
    peers = _peers(calls, positions)
    not_called = "{has} not called it"
    for call in dict.fromkeys(calls.values()):
        inside = [rank for rank, other in calls.items() if other == call]
        missing = frozenset(call.ranks).difference(inside)
        what = f"{call.name} of {name_ranks(call.ranks)}" if call.is_mutual else call.name
        texts = dict.fromkeys(inside, what)
        if call.name in PEER_ROLES and call.ranks:
            name = f"{call.name} {_PEER_WORDS[PEER_ROLES[call.name]]}"
            texts = {rank: f"{name} rank {peers.get(rank, call.ranks[0])}" for rank in inside}
            # Explained together: they may be links of a chain.
            what = f"{name} other ranks"
        yield _Stall(
            what=what,
            waiting={
                rank: _waits(text, positions[rank].site, what) for rank, text in texts.items()
            },
            missing=missing,
            absent={
                rank: (f"{not_called}{_place(positions[rank])}", not_called)
                for rank in _answering(missing if call.is_mutual else (), positions)
            },
        )


def _peers(calls: Mapping[int, UnrecordedCall], positions: _Positions) -> dict[int, str]:
    """The other rank relative to the rank, ``r-1``, where many ranks send or receive alike."""
    steps = {
        rank: (call.name, call.ranks[0] - rank, positions[rank].site)
        for rank, call in calls.items()
        if call.name in PEER_ROLES and call.ranks
    }
    counts = Counter(steps.values())
    # With the one that closes a ring, more than are listed one by one.
    return {
        rank: f"r{step:+}"
        for rank, (name, step, site) in steps.items()
        if counts[name, step, site] >= _MOST_WAYS - 1 and len(steps) >= _MOST_WAYS
    }


def _explain(stalls: Sequence[_Stall], reached: Mapping[int, object]) -> Iterator[str]:
    waits = {rank: words for stall in stalls for rank, words in stall.waiting.items()}
    for ranks, words in _folded(waits):
        if " rank r" in words and words.startswith(_PEER_CALLS):
            each = f"each rank r of {write_ranks(ranks, separator=', ')}"
            yield _say(f"{each} {words}", ranks[:1])
        else:
            yield _say(f"{{ranks}} {words}", ranks)
    yield from dict.fromkeys(note for stall in stalls for note in stall.notes)
    # A rank that waits in something else has its place in the line about that.
    absent = {
        rank: (short, short) if rank in reached else (full, short)
        for stall in stalls
        for rank, (full, short) in stall.absent.items()
    }
    for ranks, text in _folded(absent):
        yield _say(f"{{ranks}} {text}", ranks)


def _folded(words: Mapping[int, _Words]) -> _Folds:
    """Ranks with equal words together: the rarest words in full, the others in short."""
    shown, _, rest = _rarest({rank: full for rank, (full, _) in words.items()})
    return [*sorted(shown), *fold_equal({rank: words[rank][1] for rank in rest})]
