"""What the search looks at: a profile as the contents of modules, in which equal ones are one.

A model of 126 layers has thousands of rows, and a dozen different contents. A step of a story
changes contents, so it costs as much as there are different ones.

How far ahead FSDP gathers and what is asynchronous are left out: `timing` tells them apart.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

from pytest_fsdp_comm.comm.calls import UNTIMED, Calls
from pytest_fsdp_comm.comm.profile import Row, RowKey, alike_but, sort_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_fsdp_comm.comm.profile import CommProfile

_P = ParamSpec("_P")
_T = TypeVar("_T")

Owner: TypeAlias = str | None


class Fact(NamedTuple):
    """One kind of call of a row."""

    row: RowKey
    call: Calls
    """What each of them is; its count is 0."""
    ranks: tuple[int, ...] = ()

    @property
    def role(self) -> str:
        """As `Calls.role`."""
        return self.call.role

    @property
    def dtype(self) -> str:
        """As `Calls.dtype`."""
        return self.call.dtype

    @property
    def nbytes(self) -> int:
        """Of one call."""
        return self.call.nbytes

    def with_call(self, **changes: Any) -> Fact:
        """The fact with changed fields of its call."""
        return self._replace(call=replace(self.call, **changes))


Facts: TypeAlias = "Mapping[Fact, int]"
"""How often one owner, or a row of it, does what."""


class Content:
    """All that one module does. Made by `Pool` alone, so that equal contents are one object."""

    __slots__ = ("answers", "facts", "rows")

    def __init__(self, facts: Facts) -> None:
        """Sorts the facts into rows.

        Args:
            facts: At least one.
        """
        self.facts = facts
        rows: defaultdict[RowKey, dict[Fact, int]] = defaultdict(dict)
        for fact, count in facts.items():
            rows[fact.row][fact] = count
        self.rows: Mapping[RowKey, Facts] = rows
        self.answers: dict[object, Any] = {}
        """What was asked of it before, by question: see `once`."""

    def row(self, key: RowKey) -> Facts:
        """The facts of one row; empty if there is none."""
        return self.rows.get(key, {})


def once(question: Callable[Concatenate[Content | None, _P], _T]) -> Callable[..., _T]:
    """Answers a question to a content once for all modules that have it."""

    @functools.wraps(question)
    def ask(content: Content | None, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if content is None:
            return question(content, *args, **kwargs)
        key = (question, *args)
        if key not in content.answers:
            content.answers[key] = question(content, *args, **kwargs)
        answer: _T = content.answers[key]
        return answer

    return ask


State: TypeAlias = "Mapping[Owner, Content]"
"""The content of each owner that does anything."""


class Pool:
    """Makes each content once."""

    def __init__(self) -> None:
        """Begins empty: one pool for each explanation."""
        self._contents: dict[frozenset[tuple[Fact, int]], Content] = {}

    def content(self, facts: Facts) -> Content | None:
        """The content of some facts; None if there are none."""
        held = {fact: count for fact, count in facts.items() if count}
        if not held:
            return None
        key = frozenset(held.items())
        found = self._contents.get(key)
        if found is None:
            found = self._contents[key] = Content(held)
        return found

    def state(self, profile: CommProfile) -> State:
        """The contents of a profile."""
        facts: defaultdict[Owner, Counter[Fact]] = defaultdict(Counter)
        # Rows of equal layers have equal calls, which are long to take apart.
        known: dict[tuple[RowKey, tuple[Calls, ...], tuple[int, ...]], Counter[Fact]] = {}
        for row in profile.rows:
            place = (row.key, row.calls, row.ranks)
            if place not in known:
                known[place] = _facts_of(*place)
            facts[row.owner].update(known[place])
        # Most contents are equal: each is taken apart once.
        contents: dict[frozenset[tuple[Fact, int]], Content | None] = {}
        state: dict[Owner, Content] = {}
        for owner, counts in facts.items():
            whole = frozenset(counts.items())
            if whole not in contents:
                contents[whole] = self.content(counts)
            content = contents[whole]
            if content is not None:
                state[owner] = content
        return state


def _facts_of(key: RowKey, calls: tuple[Calls, ...], ranks: tuple[int, ...]) -> Counter[Fact]:
    facts: Counter[Fact] = Counter()
    for one in calls:
        call = replace(one, **UNTIMED, count=0)
        facts[Fact(key, call, ranks)] += one.count
    return facts


def rows_of(state: State, owners: Iterable[Owner]) -> tuple[Row, ...]:
    """The rows of some owners."""
    rows: list[Row] = []
    for owner in owners:
        content = state.get(owner)
        for key, facts in content.rows.items() if content is not None else ():
            by_ranks: defaultdict[tuple[int, ...], list[Calls]] = defaultdict(list)
            for fact, count in facts.items():
                by_ranks[fact.ranks].append(replace(fact.call, count=count))
            rows += [
                Row(**key._asdict(), owner=owner, calls=alike_but(calls), ranks=ranks)
                for ranks, calls in by_ranks.items()
            ]
    return sort_rows(rows)


def nbytes_of(facts: Facts) -> int:
    """The bytes of all calls together."""
    return sum(fact.nbytes * count for fact, count in facts.items())


def count_of(facts: Facts) -> int:
    """How many calls there are."""
    return sum(facts.values())
