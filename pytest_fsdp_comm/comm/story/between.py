"""What differs between a state and the one that is to be reached, and questions to contents.

The proposals of steps are inferred from it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.profile import RowKey
from pytest_fsdp_comm.comm.story.facts import count_of, once
from pytest_fsdp_comm.comm.story.steps import is_of_gradients, is_of_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_fsdp_comm.comm.mesh import MeshAxis
    from pytest_fsdp_comm.comm.story.facts import Content, Fact, Facts, Owner, State

Rows = dict["Owner", dict[RowKey, "Facts"]]


EMPTY: Final[Facts] = {}


class Between:
    """Two states, and what differs between them."""

    def __init__(
        self,
        state: State,
        target: State,
        origin: State,
        axes: tuple[tuple[MeshAxis, ...], tuple[MeshAxis, ...]],
    ) -> None:
        """Compares the states, by identity of contents.

        Args:
            state: What is known to be so far.
            target: What is to be reached.
            origin: What the first step began with.
            axes: Of the old and the new profile.
        """
        self.state = state
        self.target = target
        self.origin = origin
        self.axes = axes
        self.owners = [
            owner
            for owner in dict.fromkeys((*state, *target))
            if state.get(owner) is not target.get(owner)
        ]
        self.gone = [owner for owner in self.owners if owner not in target]
        self.came = [owner for owner in self.owners if owner not in state]
        self.changed = [owner for owner in self.owners if owner in state and owner in target]

    def pairs(self) -> Sequence[tuple[Owner, RowKey, Facts, Facts]]:
        """Each row that differs, with its facts on both sides."""
        return self._pairs

    @cached_property
    def _pairs(self) -> list[tuple[Owner, RowKey, Facts, Facts]]:
        return [
            (owner, key, before, after)
            for change in self.changes
            for owner in change.owners
            for key, before, after in change.rows
        ]

    @cached_property
    def changes(self) -> list[Change]:
        """What differs, once for all owners in which the same does."""
        owners: dict[tuple[int, int], list[Owner]] = {}
        for owner in self.owners:
            place = id(self.state.get(owner)), id(self.target.get(owner))
            owners.setdefault(place, []).append(owner)
        return [
            Change(
                owners=alike,
                content=self.state.get(alike[0]),
                rows=list(_different(self.state.get(alike[0]), self.target.get(alike[0]))),
            )
            for alike in owners.values()
        ]


class Change(NamedTuple):
    """What differs in some modules."""

    owners: list[Owner]
    content: Content | None
    """Before."""
    rows: list[tuple[RowKey, Facts, Facts]]
    """Those that differ, with their facts on both sides."""


def _different(old: Content | None, new: Content | None) -> Iterator[tuple[RowKey, Facts, Facts]]:
    rows = {**(new.rows if new else {}), **(old.rows if old else {})}
    for key in rows:
        before, after = old.row(key) if old else EMPTY, new.row(key) if new else EMPTY
        if before != after:
            yield key, before, after


def role_of(facts: Facts) -> str:
    """The role of all calls; empty if they have several, or none."""
    roles = {fact.role for fact in facts}
    return roles.pop() if len(roles) == 1 else ""


def sizes_of(before: Facts, after: Facts) -> tuple[int, int] | None:
    """Bytes of a call, where each side has calls of one size."""
    old, new = {fact.nbytes for fact in before}, {fact.nbytes for fact in after}
    return (old.pop(), new.pop()) if len(old) == len(new) == 1 else None


def consists_of(test: Callable[[Fact], bool], facts: Facts) -> bool:
    """Whether there are facts, and all are such."""
    return bool(facts) and all(map(test, facts))


@once
def gathers_of(content: Content | None, phase: Phase) -> dict[RowKey, Facts]:
    """The rows of a phase in which parameters are gathered."""
    return {
        key: facts
        for key, facts in (content.rows.items() if content is not None else ())
        if key.phase is phase and consists_of(carries_parameters, facts)
    }


def carries_parameters(fact: Fact) -> bool:
    """Whether a fact sends parameters."""
    return fact.role == Role.PARAMETERS


@once
def unit_rows(content: Content | None) -> dict[RowKey, Facts]:
    """All rows that a unit of FSDP has."""
    return {
        key: facts
        for key, facts in (content.rows.items() if content is not None else ())
        if key.subject == "reshard" or consists_of(is_of_parameters, facts)
    }


@once
def reductions_of(content: Content | None) -> dict[RowKey, Facts]:
    """The rows about gradients of parameters."""
    return {
        key: facts
        for key, facts in (content.rows.items() if content is not None else ())
        if key.phase is not Phase.FORWARD
        and content is not None
        and all(is_of_gradients(fact, content) for fact in facts)
    }


def carries_gradients(fact: Fact) -> bool:
    """Whether a fact sends gradients of parameters."""
    return fact.role == Role.GRADIENTS


def total_count(rows: Mapping[RowKey, Facts]) -> int:
    """The calls of all rows."""
    return sum(map(count_of, rows.values()))


def rows_written(between: Between, owner: Owner, keys: Iterable[RowKey]) -> dict[RowKey, Facts]:
    """What the target has for some rows, of those that differ."""
    old, new = between.state.get(owner), between.target.get(owner)
    rows = {}
    for key in keys:
        before, after = old.row(key) if old else EMPTY, new.row(key) if new else EMPTY
        if before != after:
            rows[key] = after
    return rows


@once
def gathered_nbytes(content: Content | None) -> int:
    """Bytes of one gather of a unit in forward; 0 if it has several sizes or none."""
    sizes = {fact.nbytes for facts in gathers_of(content, Phase.FORWARD).values() for fact in facts}
    return sizes.pop() if len(sizes) == 1 else 0
