"""Find the first call in which the ranks of a process group diverge."""

# Note [Diverging ranks]
# Backends match the calls of a process group by their order. If one rank gathers another unit than
# its peers, with equal sizes, nothing fails: each rank gets a mixture of both units. So these must
# be equal on all ranks of a group, call by call:
# - kind, dtype, root and reduction;
# - the message size, except in an all_to_all, whose splits may be uneven. In a gather or scatter,
#   the root has more bytes than the others, so compare the part of one rank. In an all_gather or
#   reduce_scatter of lists, parts may be uneven, but all ranks have the same total;
# - the parameters of a unit whose gradients are reduced;
# - the owner, if it is a unit of FSDP or DDP. Stages of a pipeline may reduce parameters with
#   different names together, for example a tied embedding. So other owners of parameters and
#   gradients must be equal only if both ranks make calls for both of them in this group.
# Not compared, because they may differ: sends and receives, operations of unknown kind, owners of
# activations, phases, and calls whose order depends on timing (`Collective.is_unordered`).

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, zip_longest
from typing import Final, NamedTuple, TypeVar

from pytest_fsdp_comm.comm.events import (
    COLLECTIVE_KINDS,
    REDUCING,
    Collective,
    Recording,
    Role,
    Source,
)
from pytest_fsdp_comm.comm.mesh import MeshAxis, first_rank_of_group
from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.text.fqn import escape, name_owners
from pytest_fsdp_comm.text.rank_lists import group_rarest_texts_first, name_ranks
from pytest_fsdp_comm.text.words import show_nbytes

_COMPARED: Final = frozenset(COLLECTIVE_KINDS) - {"send", "recv"}
_ROOT_NUMBER: Final = re.compile(r"(^|\+)@\d+\.?")
"""Matches the prefix that numbers a root: a rank may run further models than its peers."""
_VERBS: Final = {
    "all_gather": "gathers",
    "reduce_scatter": "reduces",
    "all_reduce": "reduces",
    "reduce": "reduces",
}
_FACTS: Final = ("kind", "dtype", "nbytes", "root_rank", "reduce_op", "parameters")

_Key = TypeVar("_Key", bound=Hashable)
_Rank = TypeVar("_Rank", bound=Hashable)
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The part of a collective that is compared between ranks. See Note [Diverging ranks]."""

    axis: str
    group_ranks: tuple[int, ...]
    """`Collective.group_ranks`."""
    group_number: int
    kind: str
    dtype: str
    nbytes: int
    root_rank: int | None
    reduce_op: str | None
    parameters: tuple[str, ...]
    """`Collective.parameters`."""
    owner: str | None
    """None if the owner is not compared."""
    is_of_unit: bool
    """Whether the owner is a unit of FSDP or DDP."""

    @property
    def facts(self) -> tuple[object, ...]:
        """The fields that must be equal on all ranks of the group."""
        return tuple(getattr(self, name) for name in _FACTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCalls:
    """The calls of one rank, in order, without the number of the rank."""

    axes: tuple[MeshAxis, ...]
    calls: tuple[Call, ...]

    @property
    def digest(self) -> str:
        """A text that is equal for ranks with equal calls."""
        return hashlib.sha256(repr(self).encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between the calls of ranks that share a process group."""

    subject: str
    """What differs, such as ``ranks diverge at call #2 over dp``."""
    acts: tuple[tuple[tuple[int, ...], str], ...]
    """Ranks, and what they do, in the singular: ``gathers layers.2``. Fewest ranks first."""

    def __str__(self) -> str:
        acts = []
        for ranks, act in self.acts:
            verb, space, rest = act.partition(" ")
            verb = verb if len(ranks) == 1 else verb.removesuffix("s")
            acts.append(f"{name_ranks(ranks)} {verb}{space}{rest}")
        return f"{self.subject}: {', '.join(acts)}"


def list_calls(recording: Recording) -> RankCalls:
    """Return the calls of a recording that are compared with those of other ranks."""
    calls = tuple(
        _make_comparable_call(event)
        for event in recording.collectives
        if event.kind in _COMPARED and event.group_size > 1 and not event.is_unordered
    )
    return RankCalls(axes=recording.mesh_axes, calls=calls)


def _make_comparable_call(event: Collective) -> Call:
    nbytes = event.nbytes
    if event.kind == "all_to_all":
        nbytes = 0
    elif event.kind == "gather":
        nbytes = event.nbytes_sent
    elif event.kind == "scatter":
        nbytes = event.nbytes_received
    # Compare with `is`: hashing an enum is slow, and recordings have thousands of events.
    is_of_unit = event.source is Source.FSDP or event.source is Source.DDP
    has_owner = is_of_unit or event.role is Role.PARAMETERS or event.role is Role.GRADIENTS
    owner = event.owner if has_owner else None
    return Call(
        axis=event.axis,
        group_ranks=event.group_ranks,
        group_number=event.group_number,
        kind=event.kind,
        dtype=event.dtype,
        nbytes=nbytes,
        root_rank=event.root_rank,
        reduce_op=event.reduce_op,
        owner=_ROOT_NUMBER.sub(r"\1", owner) if owner and "@" in owner else owner,
        is_of_unit=is_of_unit,
        parameters=tuple(_ROOT_NUMBER.sub("", name) for name in event.parameters),
    )


def find_divergence(calls: Mapping[int, RankCalls]) -> Divergence | None:
    """Return the first difference between ranks, or else a circle of calls; None without either.

    Args:
        calls: The calls of each rank. Pass equal calls as one object, which saves time.
    """
    # Ranks with equal calls do not differ in any group, whatever their groups are.
    if len({id(of_rank) for of_rank in calls.values()}) <= 1:
        return None
    groups = _collect_calls_of_process_groups(calls)
    differences = [difference for group in groups for difference in group.find_difference()]
    if differences:
        return min(differences, key=lambda difference: difference[0])[1]
    return _find_circular_wait(groups, calls)


def find_divergence_of(recordings: Sequence[Recording]) -> Divergence | None:
    """Return where the recordings of several ranks diverge; see `find_divergence`."""
    distinct: dict[RankCalls, RankCalls] = {}
    # Recordings that were read from one file share their collectives, if these are equal.
    by_id: dict[int, RankCalls] = {}
    calls = {}
    for recording in recordings:
        key = id(recording.collectives)
        if key not in by_id:
            listed = list_calls(recording)
            by_id[key] = distinct.setdefault(listed, listed)
        calls[recording.rank] = by_id[key]
    return find_divergence(calls)


def first_difference(
    sequences: Sequence[Sequence[_Value]], differ: Callable[[Sequence[_Value | None]], bool]
) -> int | None:
    """Return the first index at which sequences differ; an ended sequence has None there."""
    for index, values in enumerate(zip_longest(*sequences)):
        if differ(values):
            return index
    return None


class _GroupCalls(NamedTuple):
    """The calls of a rank on one group."""

    calls: tuple[Call, ...]
    indices: tuple[int, ...]
    """For each of `calls`: its index in `RankCalls.calls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A process group, and the calls that recorded ranks made on it."""

    axis: str
    number: int
    """`Collective.group_number`."""
    parts: Mapping[int, _GroupCalls]
    """The calls of each recorded rank of the group. Ranks with equal recordings share an object."""
    is_only: bool
    """Whether all recorded ranks are in the group."""

    def name_call(self, index: int) -> str:
        members = "" if self.is_only else f" ({name_ranks([*self.parts])})"
        number = "" if self.number == 1 else f", group {self.number} of these ranks"
        return f"#{index + 1} over {printable(self.axis)}{members}{number}"

    def find_difference(self) -> Iterator[tuple[int, Divergence]]:
        """Yield the first difference, after its earliest index in the recording of a rank."""
        distinct = [*{id(part): part.calls for part in self.parts.values()}.values()]
        if len(distinct) <= 1:
            return
        owners = [{call.owner for call in calls} for calls in distinct]
        index = first_difference(distinct, lambda calls: _have_diverged(calls, owners))
        if index is None:
            return
        by_rank = {
            rank: part.calls[index] if index < len(part.calls) else None
            for rank, part in self.parts.items()
        }
        yield (
            min(part.indices[index] for part in self.parts.values() if index < len(part.indices)),
            Divergence(
                subject=f"ranks diverge at call {self.name_call(index)}",
                acts=_group_ranks_by_act(_describe_differing_calls(by_rank)),
            ),
        )


def _collect_calls_of_process_groups(calls: Mapping[int, RankCalls]) -> list[_Group]:
    distinct = {id(of_rank): of_rank for of_rank in calls.values()}
    split = {key: _split_calls_by_group(of_rank) for key, of_rank in distinct.items()}
    # For each axis: the recorded ranks of each group, keyed by the group's first rank.
    groups_of_axis: dict[MeshAxis, defaultdict[int, list[int]]] = {}
    parts_of_groups: defaultdict[tuple[str, int, tuple[int, ...]], dict[int, _GroupCalls]]
    parts_of_groups = defaultdict(dict)
    for rank, of_rank in calls.items():
        axes = {axis.name: axis for axis in of_rank.axes}
        for (name, group_ranks, number), part in split[id(of_rank)].items():
            members = [other for other in group_ranks if other in calls]
            axis = axes.get(name)
            if not group_ranks and axis is not None:
                if axis not in groups_of_axis:
                    groups_of_axis[axis] = defaultdict(list)
                    for other in calls:
                        groups_of_axis[axis][first_rank_of_group(axis, other)].append(other)
                members = groups_of_axis[axis][first_rank_of_group(axis, rank)]
            parts_of_groups[name, number, tuple(members)][rank] = part
    nothing = _GroupCalls((), ())
    return [
        _Group(
            axis=name,
            number=number,
            parts={rank: parts.get(rank, nothing) for rank in members},
            is_only=len(members) == len(calls),
        )
        for (name, number, members), parts in parts_of_groups.items()
    ]


def _split_calls_by_group(calls: RankCalls) -> dict[tuple[str, tuple[int, ...], int], _GroupCalls]:
    """Return the calls on each group, keyed by axis, `Call.group_ranks` and number."""
    indices: defaultdict[tuple[str, tuple[int, ...], int], list[int]] = defaultdict(list)
    for index, call in enumerate(calls.calls):
        indices[call.axis, call.group_ranks, call.group_number].append(index)
    return {
        group: _GroupCalls(tuple(calls.calls[index] for index in listed), tuple(listed))
        for group, listed in indices.items()
    }


def _have_diverged(calls: Sequence[Call | None], owners: Sequence[Container[str | None]]) -> bool:
    """Return whether calls at the same index differ; `owners` are those of each rank's calls."""
    if len({None if call is None else call.facts for call in calls}) > 1:
        return True
    named = {
        (call.owner, call.is_of_unit): of_rank
        for call, of_rank in zip(calls, owners, strict=True)
        if call is not None and call.owner is not None
    }
    return any(
        owner != other
        and ((is_unit and is_others_unit) or (owner in others_owners and other in owners_of_rank))
        for ((owner, is_unit), owners_of_rank), ((other, is_others_unit), others_owners) in (
            combinations(named.items(), 2)
        )
    )


def _describe_differing_calls(calls: Mapping[int, Call | None]) -> dict[int, str]:
    """Say what each rank does, mentioning only what differs: ``gathers layers.2``."""
    made = [call for call in calls.values() if call is not None]
    differing = {
        name for name in (*_FACTS, "owner") if len({getattr(call, name) for call in made}) > 1
    }
    is_common_kind = "kind" not in differing

    def describe(call: Call | None) -> str:
        if call is None:
            return "makes no such call"
        owner = "" if call.owner is None else escape(call.owner)
        verb = _VERBS.get(call.kind) if owner and is_common_kind else None
        if verb is not None:
            sent = owner
            if "parameters" in differing and "owner" not in differing:
                sent = name_owners(call.parameters, noun="parameters") or f"all of {owner}"
            words = [f"{verb} {'gradients of ' if call.kind in REDUCING else ''}{sent}"]
        else:
            words = [f"calls {call.kind}", f"for {owner}" if owner else ""]
        if differing & {"nbytes", "dtype"} and call.dtype:
            words.append(f"({show_nbytes(call.nbytes)} {call.dtype})")
        if "root_rank" in differing:
            words.append(f"with root {call.root_rank}")
        if "reduce_op" in differing:
            words.append(f"with {call.reduce_op}")
        return " ".join(filter(None, words))

    return {rank: describe(call) for rank, call in calls.items()}


def _group_ranks_by_act(acts: Mapping[int, str]) -> tuple[tuple[tuple[int, ...], str], ...]:
    folded = group_rarest_texts_first(acts, "acts in {count} other ways")
    return tuple((tuple(ranks), act) for ranks, act in folded)


# A circle: rank 0 calls #1 over dp before #1 over tp, and rank 1 calls them the other way round.
# To find circles, issue all calls: a call completes once it is the next one on all ranks that make
# it. Ranks that get stuck wait for each other. With many ranks this takes long, so first treat
# groups of an axis as one group if their members make the same calls. A circle of ranks is a circle
# of these merged groups, too.


def _find_circular_wait(
    groups: Sequence[_Group], calls: Mapping[int, RankCalls]
) -> Divergence | None:
    parts_of_ranks: defaultdict[int, dict[int, _GroupCalls]] = defaultdict(dict)
    kinds: list[Hashable] = []
    for number, group in enumerate(groups):
        kinds.append((group.axis, group.number, frozenset(id(calls[rank]) for rank in group.parts)))
        for rank, part in group.parts.items():
            parts_of_ranks[rank][number] = part
    merged: dict[Hashable, list[tuple[Hashable, _GroupCalls]]] = {}
    for parts in parts_of_ranks.values():
        kinds_of_parts = [(kinds[number], part) for number, part in parts.items()]
        merged[frozenset((kind, id(part)) for kind, part in kinds_of_parts)] = kinds_of_parts
    if not _find_stuck_ranks(
        {key: _list_calls_in_order(kinds_of_parts) for key, kinds_of_parts in merged.items()}
    ):
        return None
    orders = {rank: _list_calls_in_order(parts.items()) for rank, parts in parts_of_ranks.items()}
    stuck = _find_stuck_ranks(orders)
    if not stuck:
        return None
    # Follow the ranks: each waits for a rank that makes another call first.
    heads = {rank: orders[rank][index] for rank, index in stuck.items()}
    waiting = [min(heads)]
    while True:
        awaited = heads[waiting[-1]]
        blocking = min(
            rank for rank in groups[awaited[0]].parts if rank in heads and heads[rank] != awaited
        )
        if blocking in waiting:
            circle = [*waiting[waiting.index(blocking) :], blocking]
            break
        waiting.append(blocking)

    def name(step: tuple[int, int]) -> str:
        number, index = step
        call = next(iter(groups[number].parts.values())).calls[index]
        return f"{call.kind} {groups[number].name_call(index)}"

    acts = {
        rank: f"calls {name(heads[rank])} before {name(heads[previous])}"
        for previous, rank in pairwise(circle)
    }
    return Divergence(
        subject="ranks call several groups in different orders, which can hang on NCCL",
        acts=_group_ranks_by_act(acts),
    )


def _list_calls_in_order(parts: Iterable[tuple[_Key, _GroupCalls]]) -> list[tuple[_Key, int]]:
    """Return the group and index of each call of a rank, in the order of the calls."""
    steps = {index: (key, count) for key, part in parts for count, index in enumerate(part.indices)}
    return [steps[index] for index in sorted(steps)]


def _find_stuck_ranks(orders: Mapping[_Rank, Sequence[tuple[_Key, int]]]) -> dict[_Rank, int]:
    """Issue all calls in the given order; return where ranks get stuck, if any do.

    Args:
        orders: For each rank, the result of `_list_calls_in_order`.
    """
    missing = Counter(step for order in orders.values() for step in order)
    arrived: defaultdict[tuple[_Key, int], list[_Rank]] = defaultdict(list)
    indices = dict.fromkeys(orders, 0)
    moving = [*orders]
    while moving:
        rank = moving.pop()
        if indices[rank] == len(orders[rank]):
            del indices[rank]
            continue
        step = orders[rank][indices[rank]]
        arrived[step].append(rank)
        missing[step] -= 1
        if not missing[step]:
            for waiting in arrived.pop(step):
                indices[waiting] += 1
                moving.append(waiting)
    return indices
