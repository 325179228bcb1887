"""What differs between a state and the one that is to be reached: steps are inferred from it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_fsdp_comm.comm.explanation.steps import Kind, Replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_fsdp_comm.comm.explanation.contents import Content, Owner, Rows, State
    from pytest_fsdp_comm.comm.mesh import MeshAxis
    from pytest_fsdp_comm.comm.profile import RowKey


class Alike(NamedTuple):
    """What differs in some modules."""

    owners: list[Owner]
    old: Content
    new: Content
    rows: list[tuple[RowKey, Rows, Rows]]
    """Those that differ, on both sides."""


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
        self.owners = owners_that_differ(state, target)
        self.gone = [owner for owner in self.owners if owner not in target]
        self.added = [owner for owner in self.owners if owner not in state]
        self.changed = [owner for owner in self.owners if owner in state and owner in target]

    def sides(self, *, came: bool) -> tuple[State, State]:
        """The state without something and the one with it, which came or went."""
        return (self.state, self.target) if came else (self.target, self.state)

    @cached_property
    def alike(self) -> list[Alike]:
        """What differs, once for all modules in which the same does."""
        owners: dict[tuple[Content, Content], list[Owner]] = {}
        for owner in self.owners:
            owners.setdefault((self.state[owner], self.target[owner]), []).append(owner)
        return [
            Alike(
                owners=alike,
                old=old,
                new=new,
                rows=[(key, old.row(key), new.row(key)) for key in keys_that_differ(old, new)],
            )
            for (old, new), alike in owners.items()
        ]

    def select(
        self, choose: Callable[[Content, Content], Iterable[RowKey]], *, came: bool = True
    ) -> dict[Owner, list[RowKey]]:
        """Rows that are chosen by contents, once for all modules in which the same differs.

        Args:
            choose: Gives the rows for the content without something and the one with it.
            came: Whether it came: then the first content is that of `state`.
        """
        keys: dict[Owner, list[RowKey]] = {}
        for alike in self.alike:
            chosen = list(choose(*((alike.old, alike.new) if came else (alike.new, alike.old))))
            keys.update(dict.fromkeys(alike.owners if chosen else (), chosen))
        return keys

    def select_rows(
        self, is_meant: Callable[[RowKey, Rows, Rows], object]
    ) -> dict[Owner, list[RowKey]]:
        """The rows that differ and are meant.

        Args:
            is_meant: Looks at the key and at both sides.
        """
        keys: dict[Owner, list[RowKey]] = {}
        for alike in self.alike:
            chosen = [key for key, before, after in alike.rows if is_meant(key, before, after)]
            keys.update(dict.fromkeys(alike.owners if chosen else (), chosen))
        return keys

    def replaced(
        self, kind: Kind, keys: Mapping[Owner, Iterable[RowKey]], **fields: Any
    ) -> Iterator[Replaced]:
        """The step that writes what the target has for some rows, as far as it differs.

        Args:
            kind: What the step is.
            keys: The rows, by module; no step if there are none.
            fields: The others of `Replaced`.
        """
        # Modules in which the same differs share what is written.
        shared: dict[tuple[object, ...], tuple[dict[RowKey, Rows], dict[RowKey, Rows]]] = {}
        sides: dict[Owner, tuple[dict[RowKey, Rows], dict[RowKey, Rows]]] = {}
        for owner, wanted in keys.items():
            old, new = self.state[owner], self.target[owner]
            place = old, new, id(wanted)
            if place not in shared:
                differing = [key for key in dict.fromkeys(wanted) if old.row(key) != new.row(key)]
                shared[place] = (
                    {key: old.row(key) for key in differing},
                    {key: new.row(key) for key in differing},
                )
            sides[owner] = shared[place]
        if sides:
            before = {owner: was for owner, (was, _) in sides.items()}
            after = {owner: now for owner, (_, now) in sides.items()}
            yield Replaced(kind=kind, rows=after, was=before, **fields)


def owners_that_differ(old: State, new: State) -> list[Owner]:
    """The modules that do not do the same in two states."""
    return [owner for owner in {**old, **new} if old[owner] is not new[owner]]


def keys_that_differ(old: Content, new: Content) -> Iterator[RowKey]:
    """The rows of a module that differ between two contents."""
    return (key for key in {**old.rows, **new.rows} if old.row(key) != new.row(key))
