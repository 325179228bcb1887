"""States of the search: the rows of each module on both sides, and their differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Final, NamedTuple, TypeAlias, TypeVar

from pytest_fsdp_comm.comm.calls import UNTIMED, Calls
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey, alike_but, sort_rows
from pytest_fsdp_comm.text.fqn import natural_key

_T = TypeVar("_T")

# Note [Contents]: a model of 126 layers has thousands of rows, and a dozen different contents: the
# rows of a module without its name. A `Pool`, one for each search, makes each content once, so that
# contents are compared by identity, a step changes each of them once however many modules have it,
# and what it is asked is found once (`cached_property`). Never compare contents of two pools: equal
# ones are not the same. How far ahead FSDP gathers and what is
# asynchronous are left out: they follow from the order of units, and `timing` compares them apart.

Owner: TypeAlias = str | None
Rows: TypeAlias = "tuple[Row, ...]"
"""The rows of one key, without owner and sites; several if ranks differ."""


class Content:
    """The rows of one module. Only `Pool` creates contents; see Note [Contents]."""

    def __init__(self, rows: Iterable[Row]) -> None:
        held: defaultdict[RowKey, list[Row]] = defaultdict(list)
        for row in rows:
            held[row.key].append(row)
        self.rows: Mapping[RowKey, Rows] = {
            key: tuple(sorted(alike, key=lambda row: row.ranks)) for key, alike in held.items()
        }

    def row(self, key: RowKey) -> Rows:
        return self.rows.get(key, ())

    def calls(self) -> Iterator[tuple[RowKey, Calls]]:
        """All calls, each with the key of its row."""
        return ((key, call) for key, rows in self.rows.items() for call in calls_of(rows))

    @cached_property
    def gathers(self) -> Mapping[Phase, Mapping[RowKey, Rows]]:
        gathers = {key: rows for key, rows in self.rows.items() if role_of(rows) == Role.PARAMETERS}
        return {
            phase: {key: rows for key, rows in gathers.items() if key.phase is phase}
            for phase in Phase
        }

    @cached_property
    def gathered_nbytes(self) -> int:
        """Bytes of each gather of a unit in forward; 0 for no gathers or several sizes."""
        gathers = self.gathers[Phase.FORWARD].values()
        return sole((call.nbytes for rows in gathers for call in calls_of(rows)), 0)

    @cached_property
    def unit_rows(self) -> Mapping[RowKey, Rows]:
        return self._rows_of(is_of_whole_unit)

    @cached_property
    def reductions(self) -> Mapping[RowKey, Rows]:
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
    """The content of each module with rows; `NOTHING` for other modules."""

    def __missing__(self, owner: Owner) -> Content:
        return NOTHING

    def row_keys(self) -> set[RowKey]:
        return {key for content in set(self.values()) for key in content.rows}


class Pool:
    """Create each content once; see Note [Contents]."""

    def __init__(self) -> None:
        self._contents: dict[frozenset[Row], Content] = {frozenset(): NOTHING}

    def content(self, rows: Iterable[Row]) -> Content:
        held = tuple(rows)
        key = frozenset(held)
        if key not in self._contents:
            self._contents[key] = Content(held)
        return self._contents[key]

    def state(self, profile: CommProfile) -> State:
        held: defaultdict[Owner, list[Row]] = defaultdict(list)
        # Equal layers have equal calls, which are slow to hash and to copy.
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
    """Return the rows of some modules in the order of a profile."""
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


def forward_gathers(content: Content) -> int:
    """How often a unit is gathered in forward."""
    return total_count(content.gathers[Phase.FORWARD])


def largest(rows: Rows) -> int:
    """The most bytes of a call."""
    return max((call.nbytes for call in calls_of(rows)), default=0)


def is_part(some: Rows, rows: Rows) -> bool:
    """Whether all calls of some rows are among others, on the same ranks."""
    counts = {(row.ranks, replace(one, count=0)): one.count for row in rows for one in row.calls}
    return all(
        one.count <= counts.get((row.ranks, replace(one, count=0)), 0)
        for row in some
        for one in row.calls
    )


def sole(values: Iterable[_T], otherwise: _T) -> _T:
    """Return the value that all `values` equal, or `otherwise` for none or several values."""
    found = set(values)
    return found.pop() if len(found) == 1 else otherwise


def role_of(rows: Rows) -> str:
    """Return the role of all calls; empty for no role or several roles."""
    # Ignore the map of unused parameters that DDP sends next to gradients.
    beside = Role.UNUSED_PARAMETERS
    return sole((call.role for call in calls_of(rows) if call.role != beside), "")


def sizes_of(before: Rows, after: Rows) -> tuple[int, int] | None:
    """Return the bytes per call on both sides; None if a side has no calls or several sizes."""
    old, new = (sole((call.nbytes for call in calls_of(rows)), -1) for rows in (before, after))
    return None if -1 in {old, new} else (old, new)


def is_gather(_key: RowKey, call: Calls) -> bool:
    """Whether parameters are sent."""
    return call.role == Role.PARAMETERS


def is_of_parameters(_key: RowKey, call: Calls) -> bool:
    """Whether parameters or their gradients are sent."""
    return call.role in {Role.PARAMETERS, Role.GRADIENTS}


def is_of_unit(key: RowKey, call: Calls) -> bool:
    """Whether a call gathers or reshards an FSDP unit."""
    return call.role == Role.PARAMETERS or key.subject == "reshard"


def is_of_whole_unit(key: RowKey, call: Calls) -> bool:
    """Whether a call gathers, reshards or reduces an FSDP unit."""
    return is_of_parameters(key, call) or key.subject == "reshard"


def is_of_gradients(key: RowKey, call: Calls, content: Content) -> bool:
    """Whether a call is about gradients; a redistribution is if only gradients are sent with it."""
    if key.subject != "redistribution" or key.phase is Phase.FORWARD:
        return call.role == Role.GRADIENTS
    beside = {other.role for at, other in content.calls() if at.phase is key.phase}
    return Role.GRADIENTS in beside and Role.ACTIVATIONS not in beside


# Note [Both ways]: most changes have a reverse, such as split off and merged. One function proposes
# both. `came` is True if the target has something that the state lacks; `sides` and `select` swap
# the two accordingly. Only sentences and causes differ.


class Alike(NamedTuple):
    """Modules with the same difference."""

    owners: list[Owner]
    old: Content
    new: Content
    rows: list[tuple[RowKey, Rows, Rows]]
    """The keys that differ, with the rows of both sides."""


class Between:
    """Two states and their differences."""

    def __init__(
        self,
        state: State,
        target: State,
        origin: State,
        axes: tuple[tuple[MeshAxis, ...], tuple[MeshAxis, ...]],
    ) -> None:
        self.state = state
        self.target = target
        self.origin = origin
        """The state before the first step."""
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
        # Modules in which the same differs share one list: see `steps.replaced`.
        return {
            owner: chosen
            for alike, chosen in zip(self.alike, keys, strict=True)
            for owner in (alike.owners if chosen else ())
        }


def differences(old: State, new: State) -> list[Alike]:
    """Return the differences of two states, grouped by modules with the same difference."""
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
    """Return the modules whose content differs between two states."""
    return [owner for owner in {**old, **new} if old[owner] is not new[owner]]


def keys_that_differ(old: Content, new: Content) -> Iterator[RowKey]:
    """Iterate over the keys whose rows differ between two contents."""
    return (key for key in {**old.rows, **new.rows} if old.row(key) != new.row(key))


def sort_owners(owners: Iterable[Owner]) -> tuple[Owner, ...]:
    """Return each module once, in natural order, None last."""
    return tuple(sorted(set(owners), key=lambda name: (name is None, natural_key(name or ""))))


@lru_cache(maxsize=100_000)
def template(fqn: str) -> str:
    """The name with ``*`` for each number: ``layers.*.experts.*`` of ``layers.3.experts.7``."""
    # "+" joins the modules of one unit.
    return "+".join(
        ".".join("*" if segment.isdecimal() else segment for segment in part.split("."))
        for part in fqn.split("+")
    )


@lru_cache(maxsize=100_000)
def replace_prefix(fqn: str, old: str, new: str) -> str:
    """The name with another beginning, in each module of a unit that has it.

    Both are whole segments with ``*`` for numbers in order; an empty `old` begins all names.
    """
    if "+" in fqn:
        return "+".join(replace_prefix(part, old, new) for part in fqn.split("+"))
    if not old:
        return f"{new}.{fqn}" if fqn else new
    segments, wanted = fqn.split("."), old.split(".")
    numbers = []
    if len(segments) < len(wanted):
        return fqn
    for segment, want in zip(segments, wanted, strict=False):
        if want == "*" and segment.isdecimal():
            numbers.append(segment)
        elif segment != want:
            return fqn
    given = iter(numbers)
    written = [next(given) if part == "*" else part for part in new.split(".") if part]
    return ".".join((*written, *segments[len(wanted) :]))
