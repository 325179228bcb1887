"""Define the states that the search explores: the rows of each module, and how states differ."""

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
from pytest_fsdp_comm.comm.profile import CommProfile, Row, RowKey, replace_fields, sort_rows
from pytest_fsdp_comm.text.fqn import natural_key

_T = TypeVar("_T")

# Note [Contents]: a `Content` has the rows of a module without the module's name. A model of 126
# layers has thousands of rows, but only a dozen different contents. Each search has a `Pool`, which
# creates each content only once. Contents are therefore compared by identity, and a step changes a
# content once for all modules that share it. Never compare contents of two pools. Contents omit
# prefetch distances, which depend on the order of units, and `is_async`:
# `timing.find_timing_changes` compares both.

Owner: TypeAlias = str | None
Rows: TypeAlias = "tuple[Row, ...]"
"""A module's rows with the same key, without owner and sites; several if ranks differ."""


class Content:
    """The rows of one module. Only `Pool` creates contents; see Note [Contents]."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows_by_key: defaultdict[RowKey, list[Row]] = defaultdict(list)
        for row in rows:
            rows_by_key[row.key].append(row)
        self.rows: Mapping[RowKey, Rows] = {
            key: tuple(sorted(key_rows, key=lambda row: row.ranks))
            for key, key_rows in rows_by_key.items()
        }

    def row(self, key: RowKey) -> Rows:
        return self.rows.get(key, ())

    def calls(self) -> Iterator[tuple[RowKey, Calls]]:
        """Iterate over all calls, each with the key of its row."""
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
        """Bytes of one forward gather of the unit; 0 without gathers, or if their sizes differ."""
        gathers = self.gathers[Phase.FORWARD].values()
        return get_sole((call.nbytes for rows in gathers for call in calls_of(rows)), 0)

    @cached_property
    def unit_rows(self) -> Mapping[RowKey, Rows]:
        return self._select_matching_rows(is_of_whole_unit)

    @cached_property
    def reductions(self) -> Mapping[RowKey, Rows]:
        rows = self._select_matching_rows(lambda key, call: is_of_gradients(key, call, self))
        return {key: key_rows for key, key_rows in rows.items() if key.phase is not Phase.FORWARD}

    def _select_matching_rows(self, matches: Callable[[RowKey, Calls], bool]) -> dict[RowKey, Rows]:
        return {
            key: rows
            for key, rows in self.rows.items()
            if all(matches(key, call) for call in calls_of(rows))
        }

    @cached_property
    def stays_unsharded(self) -> bool:
        """Whether the unit is gathered in forward and not gathered again in backward."""
        phases = {key.phase for key, call in self.calls() if is_gather(key, call)}
        return Phase.FORWARD in phases and Phase.BACKWARD not in phases

    @cached_property
    def is_resharded(self) -> bool:
        """Whether the unit is resharded after its forward."""
        return any(key.what == "reshard" and key.phase is Phase.FORWARD for key in self.rows)


NOTHING: Final = Content(())


class State(dict[Owner, Content]):
    """Maps each module that has rows to its content, and all other modules to `NOTHING`."""

    def __missing__(self, owner: Owner) -> Content:
        return NOTHING

    def row_keys(self) -> set[RowKey]:
        return {key for content in set(self.values()) for key in content.rows}


class Pool:
    """Creates the contents of a search; equal contents are one object. See Note [Contents]."""

    def __init__(self) -> None:
        self._contents: dict[frozenset[Row], Content] = {frozenset(): NOTHING}

    def content(self, rows: Iterable[Row]) -> Content:
        content_rows = tuple(rows)
        key = frozenset(content_rows)
        if key not in self._contents:
            self._contents[key] = Content(content_rows)
        return self._contents[key]

    def state(self, profile: CommProfile) -> State:
        rows_by_owner: defaultdict[Owner, list[Row]] = defaultdict(list)
        # Let equal layers share their rows, because calls are slow to hash and to copy.
        shared: dict[object, Row] = {}
        for row in profile.rows:
            content = row.key, row.calls, row.ranks
            if content not in shared:
                untimed = replace_fields(row.calls, **UNTIMED)
                shared[content] = replace(row, owner=None, calls=untimed, sites=())
            rows_by_owner[row.owner].append(shared[content])
        contents: dict[tuple[int, ...], Content] = {}
        state = State()
        for owner, rows in rows_by_owner.items():
            ids = tuple(map(id, rows))
            if ids not in contents:
                contents[ids] = self.content(rows)
            state[owner] = contents[ids]
        return state


def rows_in(state: State, owners: Iterable[Owner]) -> tuple[Row, ...]:
    """Return the rows of `owners` in the order of a profile."""
    return sort_rows(
        replace(row, owner=owner)
        for owner in owners
        for row in chain.from_iterable(state[owner].rows.values())
    )


def calls_of(rows: Rows) -> Iterator[Calls]:
    """Iterate over the calls of all rows."""
    return chain.from_iterable(row.calls for row in rows)


def count_calls(rows: Iterable[Row]) -> int:
    """Return the number of calls."""
    return sum(row.count for row in rows)


def nbytes_of(rows: Iterable[Row]) -> int:
    """Return the total bytes of all calls."""
    return sum(row.nbytes for row in rows)


def count_calls_of_all_keys(rows: Mapping[RowKey, Rows]) -> int:
    """Return the number of calls in all rows."""
    return sum(map(count_calls, rows.values()))


def count_forward_gathers(content: Content) -> int:
    """Return how often a unit is gathered in forward."""
    return count_calls_of_all_keys(content.gathers[Phase.FORWARD])


def max_nbytes(rows: Rows) -> int:
    """Return the bytes of the largest call; 0 if there are no calls."""
    return max((call.nbytes for call in calls_of(rows)), default=0)


def is_part(part: Rows, rows: Rows) -> bool:
    """Whether `rows` include all calls of `part`, on the same ranks."""
    counts = {(row.ranks, replace(call, count=0)): call.count for row in rows for call in row.calls}
    return all(
        call.count <= counts.get((row.ranks, replace(call, count=0)), 0)
        for row in part
        for call in row.calls
    )


def get_sole(values: Iterable[_T], otherwise: _T) -> _T:
    """Return the value if all values are equal; `otherwise` if they differ or there are none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else otherwise


def role_of(rows: Rows) -> str:
    """Return the role that all calls share; empty if they have none, or if their roles differ."""
    # Ignore the map of used parameters, which DDP sends in addition to gradients.
    ignored = Role.UNUSED_PARAMETERS
    return get_sole((call.role for call in calls_of(rows) if call.role != ignored), "")


def sizes_of(before: Rows, after: Rows) -> tuple[int, int] | None:
    """Return the bytes per call on both sides; None if a side has no calls or several sizes."""
    old, new = (get_sole((call.nbytes for call in calls_of(rows)), -1) for rows in (before, after))
    return None if -1 in {old, new} else (old, new)


def is_gather(_key: RowKey, call: Calls) -> bool:
    """Whether a call sends parameters."""
    return call.role == Role.PARAMETERS


def is_from_user_code(rows: Rows) -> bool:
    """Whether other rules, about units, do not explain these calls."""
    # Units send nothing while the optimizer runs.
    calls = calls_of(tuple(row for row in rows if row.phase is not Phase.OPTIMIZER))
    return {call.role for call in calls} <= {"", Role.ACTIVATIONS}


def is_of_parameters(_key: RowKey, call: Calls) -> bool:
    """Whether a call sends parameters or gradients."""
    return call.role in {Role.PARAMETERS, Role.GRADIENTS}


def is_of_unit(key: RowKey, call: Calls) -> bool:
    """Whether a row's calls gather, unshard or reshard an FSDP unit."""
    return call.role == Role.PARAMETERS or key.subject == "reshard"


def is_of_whole_unit(key: RowKey, call: Calls) -> bool:
    """Whether a row's calls gather, unshard, reshard or reduce an FSDP unit."""
    return is_of_parameters(key, call) or key.subject == "reshard"


def is_of_gradients(key: RowKey, call: Calls, content: Content) -> bool:
    """Whether a call sends gradients.

    A redistribution outside forward counts too, if its phase sends gradients but no activations.
    """
    if key.subject != "redistribution" or key.phase is Phase.FORWARD:
        return call.role == Role.GRADIENTS
    roles = {sent.role for sent_key, sent in content.calls() if sent_key.phase is key.phase}
    return Role.GRADIENTS in roles and Role.ACTIVATIONS not in roles


class Difference(NamedTuple):
    """A difference between two states, and the modules that have it."""

    owners: list[Owner]
    old: Content
    new: Content
    rows: list[tuple[RowKey, Rows, Rows]]
    """Each key that differs, with the rows of both sides."""


class Between:
    """The current state of the search, its target, and the differences between them."""

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
        """Mesh axes of the old and the new profile."""
        self.owners = owners_that_differ(state, target)
        self.removed = [owner for owner in self.owners if owner not in target]
        self.added = [owner for owner in self.owners if owner not in state]
        self.changed = [owner for owner in self.owners if owner in state and owner in target]

    def sides(self, *, is_added: bool) -> tuple[State, State]:
        """Return the side without a change, then the side with it.

        One function proposes both a change, such as splitting off a unit, and its reverse, such as
        merging it. If `is_added`, the target has the change; otherwise, the state has it.
        """
        return (self.state, self.target) if is_added else (self.target, self.state)

    @cached_property
    def differences(self) -> list[Difference]:
        return differences(self.state, self.target)

    def select(
        self, choose: Callable[[Content, Content], Iterable[RowKey]], *, is_added: bool = True
    ) -> dict[Owner, list[RowKey]]:
        """Call `choose` with both `sides` of each module that differs; return the chosen keys."""
        return self._assign_keys_to_owners(
            list(choose(*((group.old, group.new) if is_added else (group.new, group.old))))
            for group in self.differences
        )

    def select_rows(
        self, matches: Callable[[RowKey, Rows, Rows], object]
    ) -> dict[Owner, list[RowKey]]:
        """Return the keys of differing rows for which ``matches(key, old, new)`` is true."""
        return self._assign_keys_to_owners(
            [row[0] for row in group.rows if matches(*row)] for group in self.differences
        )

    def _assign_keys_to_owners(self, keys: Iterable[list[RowKey]]) -> dict[Owner, list[RowKey]]:
        # Modules with the same difference share one list; `propose_copied_rows` uses its identity.
        return {
            owner: chosen
            for group, chosen in zip(self.differences, keys, strict=True)
            for owner in (group.owners if chosen else ())
        }


def differences(old: State, new: State) -> list[Difference]:
    """Return the differences between two states, one for each group of modules that share it."""
    owners_by_change: dict[tuple[Content, Content], list[Owner]] = {}
    for owner in owners_that_differ(old, new):
        owners_by_change.setdefault((old[owner], new[owner]), []).append(owner)
    return [
        Difference(
            owners,
            was,
            now,
            [(key, was.row(key), now.row(key)) for key in keys_that_differ(was, now)],
        )
        for (was, now), owners in owners_by_change.items()
    ]


def owners_that_differ(old: State, new: State) -> list[Owner]:
    """Return the modules whose content differs between two states."""
    return [owner for owner in {**old, **new} if old[owner] is not new[owner]]


def keys_that_differ(old: Content, new: Content) -> Iterator[RowKey]:
    """Iterate over the keys whose rows differ between two contents."""
    return (key for key in {**old.rows, **new.rows} if old.row(key) != new.row(key))


def sort_owners(owners: Iterable[Owner]) -> tuple[Owner, ...]:
    """Return each module once, in natural order, with None last."""
    return tuple(sorted(set(owners), key=lambda name: (name is None, natural_key(name or ""))))


@lru_cache(maxsize=100_000)
def template(fqn: str) -> str:
    """Replace numbers with ``*``: ``layers.3.experts.7`` becomes ``layers.*.experts.*``."""
    # "+" joins the modules of one unit.
    return "+".join(
        ".".join("*" if segment.isdecimal() else segment for segment in part.split("."))
        for part in fqn.split("+")
    )


@lru_cache(maxsize=100_000)
def replace_prefix(fqn: str, old: str, new: str) -> str:
    """Replace the prefix `old` with `new` in an FQN, or in each of the FQNs that ``+`` joins.

    A prefix consists of whole segments, with ``*`` for numbers. An empty `old` matches all names.
    """
    if "+" in fqn:
        return "+".join(replace_prefix(part, old, new) for part in fqn.split("+"))
    if not old:
        return f"{new}.{fqn}" if fqn else new
    segments, pattern = fqn.split("."), old.split(".")
    numbers = []
    if len(segments) < len(pattern):
        return fqn
    for segment, expected in zip(segments, pattern, strict=False):
        if expected == "*" and segment.isdecimal():
            numbers.append(segment)
        elif segment != expected:
            return fqn
    remaining = iter(numbers)
    prefix = [next(remaining) if part == "*" else part for part in new.split(".") if part]
    return ".".join((*prefix, *segments[len(pattern) :]))
