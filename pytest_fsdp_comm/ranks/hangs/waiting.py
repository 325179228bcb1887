"""Explains which rank waits for which, from where each is in the order of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fsdp_comm.ranks.wire.positions import Activity, IssuedCollective
from pytest_fsdp_comm.text.nbytes import show_nbytes
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_fsdp_comm.ranks.wire.positions import GroupPosition, Position


def explain_waiting(positions: Mapping[int, Position], *, blamed: Sequence[int] = ()) -> list[str]:
    """Explains a hang.

    Args:
        positions: Where each rank is; dead ranks are missing.
        blamed: Ranks that are known to have failed.

    Returns:
        A line like ``all wait for rank 3, at model.py:90 in forward`` where that is known; then
        lines like ``ranks 0-1 wait in all_gather #7 of dp for layers.3 (512 B) at model.py:88`` and
        ``rank 3 never issued it, and is at model.py:90``. Empty if no rank waits, or all wait for
        blamed ones.
    """
    lines: list[str] = []
    waiting: set[int] = set()
    absent: set[int] = set()
    for stall in _stalls(positions):
        lines += _explain_stall(stall, positions)
        waiting |= stall.waiting.keys()
        absent |= {*stall.members} - stall.waiting.keys()
    guilty = absent - waiting
    if guilty and guilty <= set(blamed):
        return []
    return [*_cause(guilty, positions), *lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stall:
    """The first collective of a process group that a rank waits in."""

    axis: str
    """What people call the group."""
    members: tuple[int, ...]
    """The group's ranks; empty if unknown."""
    seq: int
    """The collective's number in the group's order."""
    issued: Mapping[int, Mapping[int, IssuedCollective]]
    """What each rank issued on the group, by number."""

    @property
    def waiting(self) -> dict[int, IssuedCollective]:
        """The ranks that wait in it."""
        return {
            rank: own[self.seq]
            for rank, own in self.issued.items()
            if self.seq in own and not own[self.seq].is_done
        }


def _stalls(positions: Mapping[int, Position]) -> Iterator[_Stall]:
    groups: dict[str, dict[int, GroupPosition]] = {}
    for rank, position in positions.items():
        for group in position.groups:
            groups.setdefault(group.name, {})[rank] = group
    labels = _labels(min(by_rank.values(), key=_vagueness) for by_rank in groups.values())
    for name, by_rank in groups.items():
        waited_in = [
            issued.seq
            for group in by_rank.values()
            for issued in group.collectives
            if not issued.is_done
        ]
        if waited_in:
            first = next(iter(by_rank.values()))
            yield _Stall(
                axis=labels[name],
                members=first.ranks,
                seq=min(waited_in),
                issued={
                    rank: {issued.seq: issued for issued in group.collectives}
                    for rank, group in by_rank.items()
                },
            )


def _labels(groups: Iterable[GroupPosition]) -> dict[str, str]:
    """What people call each group, by its name."""
    labels = {group.name: _label(group) for group in groups}
    seen = Counter(labels.values())
    # Meshes name groups alike that have no rank in common; others need their number.
    return {
        name: f"{label}, torch's group {name}" if "(" in label and seen[label] > 1 else label
        for name, label in labels.items()
    }


def _vagueness(group: GroupPosition) -> int:
    """How little a rank's name for a group says: some ranks may keep no mesh."""
    if group.is_shape or not group.axis:
        return 2
    return 1 if group.axis == "world" else 0


def _label(group: GroupPosition) -> str:
    members = name_ranks(group.ranks) if group.ranks else ""
    if group.axis and not group.is_shape:
        return group.axis
    if group.axis:
        return f"{group.axis} ({members})"
    return f"the group of {members}" if members else "a group"


def _cause(guilty: set[int], positions: Mapping[int, Position]) -> Iterator[str]:
    """Those that are waited for and wait for nobody: the rest is their echo."""
    for ranks, _ in fold_equal({rank: _whereabouts([rank], positions) for rank in guilty}):
        yield f"all wait for {name_ranks(ranks)}{_whereabouts(ranks, positions)}"


def _whereabouts(ranks: Sequence[int], positions: Mapping[int, Position]) -> str:
    """What ranks do that others wait for; all of them do the same."""
    is_one = len(ranks) == 1
    position = positions.get(ranks[0])
    if position is None:
        return f", which {'is' if is_one else 'are'} dead"
    if position.activity is Activity.HAS_ENDED:
        return f", which {'has' if is_one else 'have'} finished the test"
    at = f" at {position.site}" if position.site else ""
    if position.activity is Activity.HOLDS_GIL:
        return f", which {'holds' if is_one else 'hold'} the GIL{at}"
    return f",{at}" if at else ""


def _explain_stall(stall: _Stall, positions: Mapping[int, Position]) -> Iterator[str]:
    waiting = stall.waiting
    what = {rank: _describe(stall, issued, positions[rank]) for rank, issued in waiting.items()}
    for ranks, text in fold_equal(what):
        yield f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {text}"
    if len({issued.kind for issued in waiting.values()}) > 1:
        yield (
            f"  these differ: #{stall.seq} of {stall.axis} must be the same collective on every "
            "rank"
        )
    elif len({issued.nbytes for issued in waiting.values()}) > 1:
        yield (
            f"  the sizes differ: #{stall.seq} of {stall.axis} must have the same shape on every "
            "rank"
        )
    absent = [
        rank
        for rank in stall.members or sorted(stall.issued)
        if rank not in waiting
        and rank in positions
        and positions[rank].activity is not Activity.HOLDS_GIL
    ]
    for ranks, _ in fold_equal({rank: _absence([rank], stall, positions) for rank in absent}):
        yield f"{name_ranks(ranks)} {_absence(ranks, stall, positions)}"


def _describe(stall: _Stall, issued: IssuedCollective, position: Position) -> str:
    module = f" for {position.module}" if position.module else ""
    is_there = position.site and position.activity is not Activity.HAS_ENDED
    at = f" at {position.site}" if is_there else ""
    return f"{issued.kind} #{stall.seq} of {stall.axis}{module} ({show_nbytes(issued.nbytes)}){at}"


def _absence(ranks: Sequence[int], stall: _Stall, positions: Mapping[int, Position]) -> str:
    """How ranks are past a collective that others wait in, or before it; all of them alike."""
    is_one = len(ranks) == 1
    own = stall.issued.get(ranks[0], {})
    position = positions[ranks[0]]
    if stall.seq in own:
        text = "finished it"
    elif own:
        last = own[max(own)]
        whose = "its" if is_one else "their"
        text = f"never issued it ({whose} last of {stall.axis} was {last.kind} #{last.seq})"
    else:
        text = "never issued it"
    if position.activity is Activity.HAS_ENDED:
        return f"{text}, and {'has' if is_one else 'have'} finished the test"
    if position.site:
        return f"{text}, and {'is' if is_one else 'are'} at {position.site}"
    return text
