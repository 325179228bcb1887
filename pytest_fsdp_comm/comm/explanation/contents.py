"""What the search looks at: a profile as what each module does, in which equal contents are one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from pytest_fsdp_comm.comm.calls import UNTIMED
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.profile import Row, alike_but, sort_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_fsdp_comm.comm.calls import Calls
    from pytest_fsdp_comm.comm.profile import CommProfile, RowKey

_T = TypeVar("_T")

# Note [Contents]: a model of 126 layers has thousands of rows, and a dozen different contents: the
# rows of a module without its name. A `Pool`, one for each search, makes each content once, so that
# contents are compared by identity, a step changes each of them once however many modules have it,
# and what it is asked is found once (`cached_property`). Never compare contents of two pools: equal
# ones are not the same. How far ahead FSDP gathers and what is
# asynchronous are left out: they follow from the order of units, and `timing` compares them apart.

Owner: TypeAlias = str | None
Rows: TypeAlias = "tuple[Row, ...]"
"""The rows of one key, without owner and sites: several where ranks differ, none if it has none."""


class Content:
    """All that one module does, made by `Pool` alone; see Note [Contents]."""

    def __init__(self, rows: Iterable[Row]) -> None:
        """Sort rows by their keys."""
        held: defaultdict[RowKey, list[Row]] = defaultdict(list)
        for row in rows:
            held[row.key].append(row)
        self.rows: Mapping[RowKey, Rows] = {
            key: tuple(sorted(alike, key=lambda row: row.ranks)) for key, alike in held.items()
        }

    def row(self, key: RowKey) -> Rows:
        """The rows of one key; empty if it has none."""
        return self.rows.get(key, ())

    def calls(self) -> Iterator[tuple[RowKey, Calls]]:
        """All calls, each with the key of its row."""
        return ((key, call) for key, rows in self.rows.items() for call in calls_of(rows))

    @cached_property
    def gathers(self) -> Mapping[Phase, Mapping[RowKey, Rows]]:
        """The rows of each phase in which parameters are gathered."""
        gathers = {key: rows for key, rows in self.rows.items() if role_of(rows) == Role.PARAMETERS}
        return {
            phase: {key: rows for key, rows in gathers.items() if key.phase is phase}
            for phase in Phase
        }

    @cached_property
    def gathered_nbytes(self) -> int:
        """Bytes of one gather of a unit in forward; 0 if it has several sizes or none."""
        gathers = self.gathers[Phase.FORWARD].values()
        return sole((call.nbytes for rows in gathers for call in calls_of(rows)), 0)

    @cached_property
    def unit_rows(self) -> Mapping[RowKey, Rows]:
        """All rows that a unit of FSDP has."""
        return self._rows_of(is_of_whole_unit)

    @cached_property
    def reductions(self) -> Mapping[RowKey, Rows]:
        """The rows about gradients of parameters."""
        rows = self._rows_of(lambda key, call: is_of_gradients(key, call, self))
        return {key: held for key, held in rows.items() if key.phase is not Phase.FORWARD}

    def _rows_of(self, is_meant: Callable[[RowKey, Calls], bool]) -> dict[RowKey, Rows]:
        return {
            key: rows
            for key, rows in self.rows.items()
            if all(is_meant(key, call) for call in calls_of(rows))
        }

    @cached_property
    def is_kept(self) -> bool:
        """Whether a unit is gathered in forward, and not again in backward."""
        phases = {key.phase for key, call in self.calls() if is_gather(key, call)}
        return Phase.FORWARD in phases and Phase.BACKWARD not in phases

    @cached_property
    def is_freed(self) -> bool:
        """Whether a unit is resharded after its forward."""
        return any(key.what == "reshard" and key.phase is Phase.FORWARD for key in self.rows)


NOTHING: Final = Content(())


class State(dict[Owner, Content]):
    """The content of each module that does anything; `NOTHING` of any other."""

    def __missing__(self, owner: Owner) -> Content:
        """The content of a module that does nothing."""
        return NOTHING

    def row_keys(self) -> set[RowKey]:
        """The keys of all rows of all modules."""
        return {key for content in set(self.values()) for key in content.rows}


class Pool:
    """Makes each content once; see Note [Contents]."""

    def __init__(self) -> None:
        """Begin empty."""
        self._contents: dict[frozenset[Row], Content] = {frozenset(): NOTHING}

    def content(self, rows: Iterable[Row]) -> Content:
        """The content with some rows."""
        held = tuple(rows)
        key = frozenset(held)
        if key not in self._contents:
            self._contents[key] = Content(held)
        return self._contents[key]

    def state(self, profile: CommProfile) -> State:
        """The contents of a profile."""
        held: defaultdict[Owner, list[Row]] = defaultdict(list)
        # Rows of equal layers have equal calls, which are long to hash and to take apart.
        known: dict[object, Row] = {}
        for row in profile.rows:
            place = row.key, row.calls, row.ranks
            if place not in known:
                untimed = alike_but(row.calls, **UNTIMED)
                known[place] = replace(row, owner=None, calls=untimed, sites=())
            held[row.owner].append(known[place])
        contents: dict[tuple[int, ...], Content] = {}
        state = State()
        for owner, rows in held.items():
            ids = tuple(map(id, rows))
            if ids not in contents:
                contents[ids] = self.content(rows)
            state[owner] = contents[ids]
        return state


def rows_in(state: State, owners: Iterable[Owner]) -> tuple[Row, ...]:
    """The rows of some modules, as those of a profile."""
    return sort_rows(
        replace(row, owner=owner)
        for owner in owners
        for row in chain.from_iterable(state[owner].rows.values())
    )


def calls_of(rows: Rows) -> Iterator[Calls]:
    """The calls of some rows."""
    return chain.from_iterable(row.calls for row in rows)


def count_of(rows: Iterable[Row]) -> int:
    """How many calls there are."""
    return sum(row.count for row in rows)


def nbytes_of(rows: Iterable[Row]) -> int:
    """The bytes of all calls together."""
    return sum(row.nbytes for row in rows)


def total_count(rows: Mapping[RowKey, Rows]) -> int:
    """The calls of all rows."""
    return sum(map(count_of, rows.values()))


def is_part(some: Rows, rows: Rows) -> bool:
    """Whether all calls of some rows are among others, on the same ranks."""
    counts = {(row.ranks, replace(one, count=0)): one.count for row in rows for one in row.calls}
    return all(
        one.count <= counts.get((row.ranks, replace(one, count=0)), 0)
        for row in some
        for one in row.calls
    )


def sole(values: Iterable[_T], otherwise: _T) -> _T:
    """The one value that all of them are; another if they are several, or none."""
    found = set(values)
    return found.pop() if len(found) == 1 else otherwise


def role_of(rows: Rows) -> str:
    """The role of all calls; empty if they have several, or none."""
    # DDP sends its map beside gradients, whatever happens to them.
    beside = Role.UNUSED_PARAMETERS
    return sole((call.role for call in calls_of(rows) if call.role != beside), "")


def sizes_of(before: Rows, after: Rows) -> tuple[int, int] | None:
    """Bytes of a call on both sides; None if either has calls of several sizes, or none."""
    old, new = (sole((call.nbytes for call in calls_of(rows)), -1) for rows in (before, after))
    return None if -1 in {old, new} else (old, new)


def is_gather(_key: RowKey, call: Calls) -> bool:
    """Whether parameters are sent."""
    return call.role == Role.PARAMETERS


def is_of_parameters(_key: RowKey, call: Calls) -> bool:
    """Whether parameters or their gradients are sent."""
    return call.role in {Role.PARAMETERS, Role.GRADIENTS}


def is_of_unit(key: RowKey, call: Calls) -> bool:
    """Whether it is what a unit of FSDP does to be gathered."""
    return call.role == Role.PARAMETERS or key.subject == "reshard"


def is_of_whole_unit(key: RowKey, call: Calls) -> bool:
    """Whether it is what a unit of FSDP does to be gathered and reduced."""
    return is_of_parameters(key, call) or key.subject == "reshard"


def is_of_gradients(key: RowKey, call: Calls, content: Content) -> bool:
    """Whether it is about gradients of parameters: their redistributions say so by company."""
    if key.subject != "redistribution" or key.phase is Phase.FORWARD:
        return call.role == Role.GRADIENTS
    beside = {other.role for at, other in content.calls() if at.phase is key.phase}
    return Role.GRADIENTS in beside and Role.ACTIVATIONS not in beside
