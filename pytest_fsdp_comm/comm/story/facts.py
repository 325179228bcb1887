"""What the search looks at: a profile as the contents of modules, in which equal ones are one.

A model of 126 layers has thousands of rows, and a dozen different contents. A step of a story
changes contents, so it costs as much as there are different ones.

How far ahead FSDP gathers and what is asynchronous are left out: `timing` tells them apart.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeAlias,
    TypeVar,
)

from pytest_fsdp_comm.comm.profile import (
    Calls,
    CommRow,
    RedistributionRow,
    ReshardRow,
    alike_but,
    sort_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_fsdp_comm.comm.events import Phase
    from pytest_fsdp_comm.comm.profile import CommProfile

_P = ParamSpec("_P")
_T = TypeVar("_T")

Owner: TypeAlias = str | None
Subject: TypeAlias = Literal["collective", "reshard", "redistribution"]


class RowKey(NamedTuple):
    """What distinguishes the rows of one owner."""

    subject: Subject
    phase: Phase
    what: str
    """Kind, ``unshard`` or ``reshard``, or the change of placements."""
    axis: str
    """Of a collective; otherwise empty."""


class Fact(NamedTuple):
    """One kind of call of a row."""

    row: RowKey
    role: str = ""
    dtype: str = ""
    nbytes: int = 0
    """Of one call."""
    is_object: bool = False
    peer: int = 0
    root_rank: int = -1
    ranks: tuple[int, ...] = ()

    @property
    def is_collective(self) -> bool:
        """Whether something is sent."""
        return self.row.subject == "collective"


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
        known: dict[tuple[RowKey, tuple[Calls, ...], int, tuple[int, ...]], Counter[Fact]] = {}
        for subject, row in _rows(profile):
            what = row.what
            key = RowKey(subject, row.phase, what[0], what[1] if len(what) > 1 else "")
            place = (key, row.calls, row.count, row.ranks)
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


def _rows(
    profile: CommProfile,
) -> Iterator[tuple[Subject, CommRow | ReshardRow | RedistributionRow]]:
    for row in profile.rows:
        yield "collective", row
    for reshard in profile.reshards:
        yield "reshard", reshard
    for redistribution in profile.redistributions:
        yield "redistribution", redistribution


def _facts_of(
    key: RowKey, calls: tuple[Calls, ...], count: int, ranks: tuple[int, ...]
) -> Counter[Fact]:
    if not calls:
        return Counter({Fact(key, ranks=ranks): count})
    facts: Counter[Fact] = Counter()
    for one in calls:
        fact = Fact(
            key,
            role=one.role,
            dtype=one.dtype,
            nbytes=one.nbytes,
            is_object=one.is_object,
            peer=one.peer,
            root_rank=one.root_rank,
            ranks=ranks,
        )
        facts[fact] += one.count
    return facts


class Rows(NamedTuple):
    """A state as rows again."""

    collectives: tuple[CommRow, ...]
    reshards: tuple[ReshardRow, ...]
    redistributions: tuple[RedistributionRow, ...]


def rows_of(state: State, owners: Iterable[Owner]) -> Rows:
    """The rows of some owners."""
    collectives: list[CommRow] = []
    reshards: list[ReshardRow] = []
    redistributions: list[RedistributionRow] = []
    for owner in owners:
        content = state.get(owner)
        for key, facts in content.rows.items() if content is not None else ():
            by_ranks: defaultdict[tuple[int, ...], dict[Fact, int]] = defaultdict(dict)
            for fact, count in facts.items():
                by_ranks[fact.ranks][fact] = count
            for ranks, held in by_ranks.items():
                if key.subject == "collective":
                    collectives.append(
                        CommRow(
                            phase=key.phase,
                            owner=owner,
                            kind=key.what,
                            axis=key.axis,
                            calls=alike_but(_calls(held)),
                            ranks=ranks,
                        )
                    )
                elif key.subject == "reshard":
                    reshards.append(
                        ReshardRow(
                            phase=key.phase,
                            module=owner,
                            action=key.what,
                            count=sum(held.values()),
                            ranks=ranks,
                        )
                    )
                else:
                    redistributions.append(
                        RedistributionRow(
                            phase=key.phase,
                            owner=owner,
                            change=key.what,
                            count=sum(held.values()),
                            ranks=ranks,
                        )
                    )
    return Rows(sort_rows(collectives), sort_rows(reshards), sort_rows(redistributions))


def _calls(facts: Facts) -> Iterator[Calls]:
    for fact, count in facts.items():
        yield Calls(
            nbytes=fact.nbytes,
            dtype=fact.dtype,
            role=fact.role,
            is_object=fact.is_object,
            peer=fact.peer,
            root_rank=fact.root_rank,
            count=count,
        )


def nbytes_of(facts: Facts) -> int:
    """The bytes of all calls together."""
    return sum(fact.nbytes * count for fact, count in facts.items())


def count_of(facts: Facts) -> int:
    """How many calls there are."""
    return sum(facts.values())
