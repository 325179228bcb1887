"""What an explanation is made of: changes of contents, each with its sentence and its cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.explanation.contents import (
    NOTHING,
    Content,
    Owner,
    Rows,
    State,
    calls_of,
)
from pytest_fsdp_comm.comm.explanation.templates import template
from pytest_fsdp_comm.comm.profile import RowKey
from pytest_fsdp_comm.text.fqn import name_owners
from pytest_fsdp_comm.text.nbytes import show_nbytes, show_nbytes_change

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_fsdp_comm.comm.explanation.contents import Pool
    from pytest_fsdp_comm.comm.profile import Row

Kind: TypeAlias = Literal[
    "axis renamed",
    "renamed",
    "layers",
    "counts",
    "sizes",
    "dtype",
    "unit sizes",
    # Of units.
    "freed",
    "gathered elsewhere",
    "gathered in backward",
    "used in backward",
    "reduced",
    "reduced by more",
    "reduced times",
    "part reduced",
    "gradient sizes",
    "sharded",
    "split off",
    "regrouped",
    "called",
    "unit",
    "buckets",
    # Of passes.
    "axis",
    "phase",
    "recomputed",
    "sequence parallel",
    "redistributed",
    "gathered in full",
]
Writes: TypeAlias = Literal["counts", "sizes", "rows", ""]

_MAX_GROUPS: Final = 3

# Note [Steps]: a step tells an effect: what is different, not why. It is exact or it is not told,
# so each says what it `claims`: where anything of that is different at the end, it is refuted.
# A `GlobalStep` and its like, in `names` and `amounts`, can be applied to any state. A `Replaced`
# has its rows from the new profile: see Note [Evidence of a proposal] in `units`.


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change."""

    kind: Kind
    order: ClassVar[int]
    """Steps are applied in this order: names first, single modules last."""
    writes: Writes = ""
    """What of a row it writes, which two steps must not do; empty for names, and with them all."""
    is_regression: bool = field(default=False, compare=False)
    """Whether nobody wants it, if a cause of it is known."""

    @property
    def line(self) -> str:
        """What is told of it."""
        raise NotImplementedError

    @property
    def cause(self) -> str:
        """Why it may have come about, by what is sent alone; empty if the line says all."""
        return ""

    @property
    def description_cost(self) -> float:
        """What telling it costs, in lines: 4 is a line of a collective that is left over."""
        return 2.0

    def apply(self, state: State, pool: Pool) -> State:
        """The state after it."""
        raise NotImplementedError

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        """Whether it speaks about a call, of the old profile after it or of the new one."""
        raise NotImplementedError


class GlobalStep(Step):
    """A step that changes rows alike in all modules."""

    def apply(self, state: State, pool: Pool) -> State:
        made: dict[Content, Content] = {}
        after = State()
        for owner, content in state.items():
            if not self.includes(owner):
                after[owner] = content
                continue
            if content not in made:
                rows = chain.from_iterable(content.rows.values())
                made[content] = pool.content([self.change(row, content) for row in rows])
            after[owner] = made[content]
        return after

    def includes(self, owner: Owner) -> bool:
        """Whether it changes anything of a module."""
        return True

    def change(self, row: Row, content: Content) -> Row:
        """A row after the step."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Replaced(Step):
    """Some rows of some modules are others; see Note [Steps]."""

    order = 5
    writes: Writes = "rows"
    came: bool = True
    """False where it is what `kind` says the other way round."""
    rows: Mapping[Owner, Mapping[RowKey, Rows]]
    """What the new profile has for each of these rows; empty where it has none."""
    was: Mapping[Owner, Mapping[RowKey, Rows]] = field(compare=False)
    sentence: Callable[[Replaced], str] = field(compare=False)
    """Makes its line: of the steps that are proposed, few are told."""
    claim: Callable[[RowKey, Calls], bool] | None = field(default=None, compare=False)
    """What it speaks about beside the rows that it writes; None for nothing."""
    is_claim_of_all: bool = field(default=False, compare=False)
    """Whether it claims that of all modules; otherwise of those whose rows it writes."""
    cause: str = field(default="", compare=False)
    about: tuple[Owner, ...] = field(default=(), compare=False)
    """The modules whose code has the cause; empty for all whose rows it writes."""
    more_cost: float = field(default=0.0, compare=False)
    """What it costs beside what others do: more where another step would say more."""

    @property
    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.rows)

    @property
    def line(self) -> str:
        return self.sentence(self)

    @property
    def who(self) -> str:
        return name_owners(self.owners)

    @property
    def sums(self) -> str:
        """The kinds of collectives of its rows: ``all_reduce[rep], reduce_scatter[dp]``."""
        return ", ".join(
            sorted({str(key) for held in self.rows.values() for key in held if key.axis})
        )

    @cached_property
    def description_cost(self) -> float:
        kinds = {(template(owner or ""), *rows) for owner, rows in self.rows.items()}
        return 2.0 + 0.5 * (len(kinds) - 1) + self.more_cost

    def apply(self, state: State, pool: Pool) -> State:
        after = State(state)
        for owner, written in self.rows.items():
            kept = (rows for key, rows in state[owner].rows.items() if key not in written)
            content = pool.content(chain.from_iterable((*kept, *written.values())))
            if content is not NOTHING:
                after[owner] = content
            else:
                after.pop(owner, None)
        return after

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        is_its = key in self.rows.get(owner, {})
        if is_its or self.claim is None or not (self.is_claim_of_all or owner in self.rows):
            return is_its
        return self.claim(key, call)

    def calls(
        self,
        includes: Callable[[RowKey, Calls], bool] = lambda _key, _call: True,
        owners: Iterable[Owner] = (),
    ) -> str:
        """How much more or less is sent: ``3 calls, 30.0 KiB in all``; empty if nothing is."""
        count = nbytes = 0
        is_sized = True
        for sign, side in ((1, self.rows), (-1, self.was)):
            for owner in owners or self.owners:
                for key, rows in side.get(owner, {}).items():
                    for call in calls_of(rows) if key.subject == "collective" else ():
                        if includes(key, call):
                            count += sign * call.count
                            nbytes += sign * call.count * call.nbytes
                            is_sized &= not call.lacks_size
        # The bytes of some would read as those of all.
        nbytes *= is_sized
        if abs(count) == 1:
            return f"1 call of {show_nbytes(abs(nbytes))}" if nbytes else "1 call"
        in_all = f", {show_nbytes(abs(nbytes))} in all" if nbytes else ""
        return f"{abs(count)} calls{in_all}" if count else ""

    def with_calls(
        self, text: str, includes: Callable[[RowKey, Calls], bool], owners: Iterable[Owner] = ()
    ) -> str:
        calls = self.calls(includes, owners)
        return f"{text}: {calls}" if calls else text


def show_sizes(sizes: Mapping[Owner, tuple[int, int]]) -> str:
    """Bytes before and after, the largest change first: ``layers.{0..2} 10.1 -> 40.2 KiB``."""
    # 0 where a module has several sizes.
    owners: dict[tuple[int, int], list[Owner]] = {}
    for owner, nbytes in sizes.items():
        owners.setdefault(nbytes, []).append(owner)
    groups = sorted(owners.items(), key=lambda group: -abs(group[0][1] - group[0][0]))
    shown = [
        f"{name_owners(found)} {show_nbytes_change(*nbytes) if all(nbytes) else 'resized'}"
        for nbytes, found in groups[:_MAX_GROUPS]
    ]
    more = len(groups) - len(shown)
    return f"{', '.join(shown)}{f' and {more} more' if more > 0 else ''}"
