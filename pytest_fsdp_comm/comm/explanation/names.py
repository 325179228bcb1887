"""Propose renamed axes, renamed modules, and longer or shorter lists of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import ROOT_FQN, Phase
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Owner,
    Pool,
    State,
    replace_prefix,
    sole,
    template,
)
from pytest_fsdp_comm.comm.explanation.steps import GlobalStep, Step
from pytest_fsdp_comm.comm.profile import Row, RowKey

_MOST_RENAMES: Final = 6


@dataclass(frozen=True, kw_only=True)
class AxisRenamed(GlobalStep):
    """All collectives over one mesh axis moved to another, new axis."""

    kind: str = "axis renamed"
    order: ClassVar[int] = 0
    old: str
    new: str
    is_alike: bool
    """Whether both lie alike among the ranks: then it is a name that changed."""

    def change(self, row: Row, content: Content) -> Row:
        return replace(row, axis=self.new) if row.axis == self.old else row

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        # Nothing is left on the old axis.
        return key.axis == self.old


def propose_axes(between: Between) -> Iterator[Step]:
    """Propose renamed axes."""
    old, new = ({axis.name: axis for axis in axes} for axes in between.axes)
    used = {key.axis for key in between.state.row_keys()}
    for gone in sorted(used.intersection(old).difference(new)):
        for came in sorted(set(new).difference(old)):
            is_alike = (old[gone].size, old[gone].dims) == (new[came].size, new[came].dims)
            yield AxisRenamed(old=gone, new=came, is_alike=is_alike)


@dataclass(frozen=True, kw_only=True)
class Renamed(Step):
    """Modules have other names: all below a prefix, or all but the root."""

    kind: str = "renamed"
    order: ClassVar[int] = 1
    old: str
    """A prefix whose numbers are written ``*``; empty for everything."""
    new: str
    keeps_root: bool = False
    """The root stays the root: everything but its unit moved."""
    is_leaf: bool = False
    """Nothing is below it, so that another module with equal rows looks the same."""

    def apply(self, state: State, pool: Pool) -> State:
        return State({self.name(owner): content for owner, content in state.items()})

    def name(self, owner: Owner) -> Owner:
        if owner is None or (owner == ROOT_FQN and self.keeps_root):
            return owner
        return replace_prefix(owner, self.old, self.new)

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        # Nothing is left below the old prefix, unless that is a part of the new one.
        if owner is None or self.name(owner) == owner:
            return False
        return not self.new or replace_prefix(owner, self.new, "\0") == owner


def propose_names(between: Between) -> Iterator[Step]:
    """Propose renamed modules."""
    gone = [owner for owner in between.gone if owner is not None]
    templates = {template(owner) for owner in between.added if owner is not None}
    prefixes: Counter[tuple[str, str]] = Counter()
    for old in {template(owner) for owner in gone}:
        for new in templates:
            prefixes[_without_common_end(old, new)] += 1
    for (old, new), _ in prefixes.most_common(_MOST_RENAMES):
        if old.count("*") != new.count("*"):
            continue
        for keeps_root in (True, False) if not old or not new else (False,):
            step = Renamed(old=old, new=new, keeps_root=keeps_root)
            moved = {owner: step.name(owner) for owner in between.state}
            changes = [owner for owner, name in moved.items() if owner != name]
            is_leaf = {template(owner or "") for owner in changes} == {old}
            if (
                changes
                and _is_rename(between, step, changes)
                and len(set(moved.values())) == len(moved)
                and {template(moved[owner] or "") for owner in changes} <= templates
            ):
                yield replace(step, is_leaf=is_leaf)


def _without_common_end(old: str, new: str) -> tuple[str, str]:
    one, other = old.split("."), new.split(".")
    while one and other and one[-1] == other[-1]:
        one.pop()
        other.pop()
    return ".".join(one), ".".join(other)


def _is_rename(between: Between, step: Renamed, changes: list[Owner]) -> bool:
    """Whether what moved is known again: by the modules below it, or by all that it does."""
    old, new = step.old, step.new
    below = {template(owner or "") for owner in changes} - {old}
    if not old or not new:
        return not old or bool(below)
    if f"{new}.".startswith(f"{old}.") or f"{old}.".startswith(f"{new}."):
        return False
    return bool(below) or all(
        between.state[owner] is between.target[step.name(owner)] for owner in changes
    )


# Note [Layers]: a list that is longer or shorter changes the names of all layers behind the place
# where some came or went, so that these would differ too. The step inserts or removes numbers at
# one place and moves the rest. What it inserts is what the `period` layers before repeat: 1 where
# all are alike, 2 where every second one is a mixture of experts. Between equal layers every place
# gives the same state, so only the end and the places where neighbours differ are tried.


@dataclass(frozen=True, kw_only=True)
class Layers(Step):
    """A list of modules is longer or shorter; what came equals its siblings; see Note [Layers]."""

    kind: str = "layers"
    order: ClassVar[int] = 2
    prefix: str
    """Of the list, with ``*`` for the numbers of lists around it: ``layers.*.experts``."""
    old: int
    """How many there were."""
    new: int
    at: int
    """From which place on layers came or went."""
    period: int = 1
    """After how many layers the same content comes again."""
    has_units: bool = True
    """Whether its modules are gathered; otherwise modules that send nothing are not seen."""

    @property
    def description_cost(self) -> float:
        return 1.5  # the least of all steps

    def apply(self, state: State, pool: Pool) -> State:
        after = State()
        more = self.new - self.old
        for owner, content in state.items():
            place = self._place(owner)
            if place is None or place < self.at:
                after[owner] = content
            elif more > 0 or place >= self.at - more:
                after[self._moved(owner, place + more)] = content
        for owner, content in state.items():
            place = self._place(owner)
            if place is not None and self.at - self.period <= place < self.at:
                for new in range(place + self.period, self.at + more, self.period):
                    after[self._moved(owner, new)] = content
        return after

    @property
    def _depth(self) -> int:
        return self.prefix.count(".") + 1 if self.prefix else 0

    def _place(self, owner: Owner) -> int | None:
        """The number of the list's module that a module is, or is in; None if it is in none."""
        segments = [] if owner is None else owner.split(".")
        depth = self._depth
        if len(segments) <= depth or not segments[depth].isdecimal():
            return None
        return int(segments[depth]) if template(".".join(segments[:depth])) == self.prefix else None

    def _moved(self, owner: Owner, place: int) -> str:
        segments = (owner or "").split(".")
        return ".".join((*segments[: self._depth], str(place), *segments[self._depth + 1 :]))

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        # Of the layers that came, all is known; of what went, nothing is left.
        place = self._place(owner)
        return place is not None and (
            place >= self.new or self.at <= place < self.at + self.new - self.old
        )


def propose_layers(between: Between) -> Iterator[Step]:
    """Propose longer or shorter lists of modules."""
    old, new = _lists(between.state), _lists(between.target)
    for prefix in sorted(set(old) & set(new)):
        before, after = _length(old[prefix]), _length(new[prefix])
        if before and after and before != after:
            fewer = next(iter((old if before < after else new)[prefix].values()))
            has_units = _has_units(between, prefix)
            step = Layers(prefix=prefix, old=before, new=after, at=0, has_units=has_units)
            for at, period in _places(fewer, before, after):
                yield replace(step, at=at, period=period)


_List = dict[int, dict[str, "Content"]]
"""What each number of a list of modules holds, by relative name."""


def _lists(state: State) -> dict[str, dict[str, _List]]:
    """The lists of a state, by prefix with ``*`` for numbers, then by the prefix itself."""
    found: dict[str, dict[str, _List]] = {}
    for owner, content in state.items():
        segments = (owner or "").split(".") if "+" not in (owner or "") else []
        for depth, segment in enumerate(segments):
            if segment.isdecimal():
                name = ".".join(segments[:depth])
                alike = found.setdefault(template(name), {}).setdefault(name, {})
                alike.setdefault(int(segment), {})[".".join(segments[depth + 1 :])] = content
    return found


def _length(lists: Mapping[str, _List]) -> int:
    """How many modules each list has, with nothing missing; 0 if they differ."""
    return sole((len(one) * (one.keys() == {*range(len(one))}) for one in lists.values()), 0)


def _places(modules: _List, before: int, after: int) -> Iterator[tuple[int, int]]:
    """Where layers may have come or gone, and with which period, by those of the shorter list."""
    contents = [modules[n] for n in range(min(before, after))]
    ends = [n for n in range(1, len(contents)) if contents[n] != contents[n - 1]]
    places = list(dict.fromkeys([len(contents), *reversed(ends)]))[:4]
    if after < before:
        yield from ((at, 1) for at in dict.fromkeys([*places, 0]))
        return
    for at in places:
        for period in (1, 2, 3, 4):
            if period <= at and (after - before) % period == 0 and (period == 1 or ends):
                yield at, period


def _has_units(between: Between, prefix: str) -> bool:
    names = f"{prefix}.*" if prefix else "*"
    old, new = (
        [content for owner, content in state.items() if template(owner or "") == names]
        for state in (between.state, between.target)
    )
    return bool(old) and all(content.gathers[Phase.FORWARD] for content in (*old, *new))
