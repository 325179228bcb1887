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


# Note [Both ways]: most changes have a mirror image: freed or kept after forward, split off or
# merged. One function proposes both: `came` says whether the target has something that the state
# lacks, `sides` and `select` swap the two accordingly, and only the sentences and causes differ.


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
        """Compare the states, by identity of contents."""
        self.state = state
        self.target = target
        self.origin = origin
        """What the first step began with."""
        self.axes = axes
        """Of the old and the new profile."""
        self.owners = owners_that_differ(state, target)
        self.gone = [owner for owner in self.owners if owner not in target]
        self.added = [owner for owner in self.owners if owner not in state]
        self.changed = [owner for owner in self.owners if owner in state and owner in target]

    def sides(self, *, came: bool) -> tuple[State, State]:
        """The state without what came or went, and the one with it; see Note [Both ways]."""
        return (self.state, self.target) if came else (self.target, self.state)

    @cached_property
    def alike(self) -> list[Alike]:
        """What differs, once for all modules in which the same does."""
        return differences(self.state, self.target)

    def select(
        self, choose: Callable[[Content, Content], Iterable[RowKey]], *, came: bool = True
    ) -> dict[Owner, list[RowKey]]:
        """Rows chosen for the content without what came or went and the one with it."""
        return self._chosen(
            list(choose(*((alike.old, alike.new) if came else (alike.new, alike.old))))
            for alike in self.alike
        )

    def select_rows(
        self, is_meant: Callable[[RowKey, Rows, Rows], object]
    ) -> dict[Owner, list[RowKey]]:
        """The rows that differ and are meant, by their key and both sides."""
        return self._chosen(
            [row[0] for row in alike.rows if is_meant(*row)] for alike in self.alike
        )

    def _chosen(self, keys: Iterable[list[RowKey]]) -> dict[Owner, list[RowKey]]:
        # Modules in which the same differs share one list: see `replaced`.
        return {
            owner: chosen
            for alike, chosen in zip(self.alike, keys, strict=True)
            for owner in (alike.owners if chosen else ())
        }

    def replaced(
        self, kind: Kind, keys: Mapping[Owner, Iterable[RowKey]], **fields: Any
    ) -> Iterator[Replaced]:
        """The step that writes the target's rows where they differ; none if no rows are given."""
        # Modules in which the same differs share what is written.
        shared: dict[tuple[object, ...], list[dict[RowKey, Rows]]] = {}
        sides: dict[Owner, list[dict[RowKey, Rows]]] = {}
        for owner, wanted in keys.items():
            old, new = self.state[owner], self.target[owner]
            place = old, new, id(wanted)
            if place not in shared:
                differing = [key for key in dict.fromkeys(wanted) if old.row(key) != new.row(key)]
                shared[place] = [{key: one.row(key) for key in differing} for one in (old, new)]
            sides[owner] = shared[place]
        if sides:
            was, now = ({owner: two[i] for owner, two in sides.items()} for i in (0, 1))
            yield Replaced(kind=kind, rows=now, was=was, **fields)


def differences(old: State, new: State) -> list[Alike]:
    """What differs between two states, once for all modules in which the same does."""
    alike: dict[tuple[Content, Content], list[Owner]] = {}
    for owner in owners_that_differ(old, new):
        alike.setdefault((old[owner], new[owner]), []).append(owner)
    return [
        Alike(
            owners,
            was,
            now,
            [(key, was.row(key), now.row(key)) for key in keys_that_differ(was, now)],
        )
        for (was, now), owners in alike.items()
    ]


def owners_that_differ(old: State, new: State) -> list[Owner]:
    """The modules that do not do the same in two states."""
    return [owner for owner in {**old, **new} if old[owner] is not new[owner]]


def keys_that_differ(old: Content, new: Content) -> Iterator[RowKey]:
    """The rows of a module that differ between two contents."""
    return (key for key in {**old.rows, **new.rows} if old.row(key) != new.row(key))
