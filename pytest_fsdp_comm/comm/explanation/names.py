"""Explain renamed axes, renamed modules, and longer or shorter lists of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import ROOT_FQN, Phase
from pytest_fsdp_comm.comm.explanation.evidence import Recordings
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Owner,
    Pool,
    State,
    get_sole,
    replace_prefix,
    template,
)
from pytest_fsdp_comm.comm.explanation.steps import GlobalStep, Part, Step
from pytest_fsdp_comm.comm.profile import Row, RowKey
from pytest_fsdp_comm.text.fqn import ROOT_TEXT

_MOST_RENAMES: Final = 6
_STILL_PRESENT: Final = ", the others are still in the model"
_List: TypeAlias = dict[int, dict[str, Content]]
"""The contents of a module list, keyed by index, then by name relative to that module."""
_WORLD: Final = "world"
"""The axis of the default group."""


@dataclass(frozen=True, kw_only=True)
class AxisRenamed(GlobalStep):
    """All collectives over one mesh axis moved to a new axis."""

    order: ClassVar[int] = 0
    writes: ClassVar[Part] = "names"
    old: str
    new: str
    has_same_ranks: bool
    """Whether both axes have the same ranks, so that only the name changed."""

    def change(self, row: Row, content: Content) -> Row:
        return replace(row, axis=self.rename_axis(row.axis))

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        # The old name must have no rows in the new profile.
        return key.axis == self.old

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        old, new = ({axis.name: axis for axis in axes} for axes in between.axes)
        used = {key.axis for key in between.state.row_keys()}
        for lost in sorted(used.intersection(old).difference(new)):
            for added in sorted(set(new).difference(old)):
                sides = ((axis.size, axis.dims) for axis in (old[lost], new[added]))
                yield cls(old=lost, new=added, has_same_ranks=len({*sides}) == 1)

    def rename_axis(self, axis: str) -> str:
        return self.new if axis == self.old else axis

    def describe(self, recordings: Recordings) -> str:
        if self.has_same_ranks and _WORLD in {self.old, self.new}:
            return f"collectives over {self.old} are now over {self.new} (same ranks)"
        if self.has_same_ranks:
            return f"mesh axis {self.old} renamed to {self.new} (same ranks)"
        # Another step may move some of them to a third axis.
        owners_and_keys = {(row.owner, row.key) for row in recordings.new.rows}
        moved = [
            (renamed.owner, renamed.key) in owners_and_keys
            for old, renamed in recordings.renamed_pairs
            if old.axis == self.old
        ]
        return f"{'all ' if all(moved) else ''}collectives over {self.old} moved to {self.new}"


@dataclass(frozen=True, kw_only=True)
class Renamed(Step):
    """Modules below a prefix, or all modules, were renamed."""

    order: ClassVar[int] = 1
    writes: ClassVar[Part] = "names"
    old: str
    """The old prefix, with ``*`` for numbers; empty if all modules were renamed."""
    new: str
    keeps_root: bool = False
    is_leaf: bool = False
    """Whether the module has no submodules, so it may have been replaced rather than renamed."""

    def apply(self, state: State, pool: Pool) -> State:
        return State({self.rename_owner(owner): content for owner, content in state.items()})

    def rename_owner(self, owner: Owner) -> Owner:
        if owner is None or (owner == ROOT_FQN and self.keeps_root):
            return owner
        return replace_prefix(owner, self.old, self.new)

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        # No rows may remain below the old prefix, except rows that are also below the new prefix.
        if owner is None or self.rename_owner(owner) == owner:
            return False
        return not self.new or replace_prefix(owner, self.new, "\0") == owner

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        removed = [owner for owner in between.removed if owner is not None]
        templates = {template(owner) for owner in between.added if owner is not None}
        prefixes: Counter[tuple[str, str]] = Counter()
        for old in sorted({template(owner) for owner in removed}):
            for new in sorted(templates):
                prefixes[_strip_common_end(old, new)] += 1
        for (old, new), _ in prefixes.most_common(_MOST_RENAMES):
            if old.count("*") != new.count("*"):
                continue
            for keeps_root in (True, False) if not old or not new else (False,):
                step = cls(old=old, new=new, keeps_root=keeps_root)
                moved = {owner: step.rename_owner(owner) for owner in between.state}
                changes = [owner for owner, name in moved.items() if owner != name]
                is_leaf = {template(owner or "") for owner in changes} == {old}
                if (
                    changes
                    and _is_rename(between, step, changes)
                    and len(set(moved.values())) == len(moved)
                    and {template(moved[owner] or "") for owner in changes} <= templates
                ):
                    yield replace(step, is_leaf=is_leaf)

    def describe(self, recordings: Recordings) -> str:
        if not self.old:
            modules = "all modules except the root unit" if self.keeps_root else "all modules"
            return f"{modules} moved below {self.new}"
        if not self.new:
            root = "; the root unit did not move" if self.keeps_root else ""
            return f"modules below {self.old} moved to the top level{root}"
        replaced = " (or replaced by a module with the same rows)" if self.is_leaf else ""
        return f"module {self.old} renamed to {self.new}{replaced}"


def _strip_common_end(old: str, new: str) -> tuple[str, str]:
    old_parts, new_parts = old.split("."), new.split(".")
    while old_parts and new_parts and old_parts[-1] == new_parts[-1]:
        old_parts.pop()
        new_parts.pop()
    return ".".join(old_parts), ".".join(new_parts)


def _is_rename(between: Between, step: Renamed, changes: list[Owner]) -> bool:
    """Whether submodules or equal rows indicate that the modules were renamed, not replaced."""
    old, new = step.old, step.new
    submodules = {template(owner or "") for owner in changes} - {old}
    if not old or not new:
        return not old or bool(submodules)
    if f"{new}.".startswith(f"{old}.") or f"{old}.".startswith(f"{new}."):
        return False
    return bool(submodules) or all(
        between.state[owner] is between.target[step.rename_owner(owner)] for owner in changes
    )


@dataclass(frozen=True, kw_only=True)
class Layers(Step):
    """A list of modules grew or shrank; added modules have the same rows as their siblings.

    If modules are added or removed in the middle, all later modules get new numbers, so their rows
    differ too. The step therefore also renumbers the modules after the changed position.
    """

    order: ClassVar[int] = 2
    prefix: str
    """Name of the list, with ``*`` for numbers of outer lists: ``layers.*.experts``."""
    old: int
    new: int
    start: int
    """Index of the first added or removed module."""
    period: int = 1
    """Length of the repeating pattern, such as 2 if every second layer is a mixture of experts."""
    has_units: bool = True
    """Whether all modules are units; if not, `old` and `new` count only modules with rows."""

    @property
    def description_cost(self) -> float:
        return 1.5  # no other step costs less

    def apply(self, state: State, pool: Pool) -> State:
        after = State()
        more = self.new - self.old
        for owner, content in state.items():
            index = self._find_list_index(owner)
            if index is None or index < self.start:
                after[owner] = content
            elif more > 0 or index >= self.start - more:
                after[self._replace_list_index(owner, index + more)] = content
        for owner, content in state.items():
            index = self._find_list_index(owner)
            if index is not None and self.start - self.period <= index < self.start:
                for new in range(index + self.period, self.start + more, self.period):
                    after[self._replace_list_index(owner, new)] = content
        return after

    @property
    def _depth(self) -> int:
        return self.prefix.count(".") + 1 if self.prefix else 0

    def _find_list_index(self, owner: Owner) -> int | None:
        """Return the index of the list entry that is or contains `owner`; None outside the list."""
        segments = [] if owner is None else owner.split(".")
        depth = self._depth
        if len(segments) <= depth or not segments[depth].isdecimal():
            return None
        return int(segments[depth]) if template(".".join(segments[:depth])) == self.prefix else None

    def _replace_list_index(self, owner: Owner, index: int) -> str:
        segments = (owner or "").split(".")
        return ".".join((*segments[: self._depth], str(index), *segments[self._depth + 1 :]))

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        # Added modules must have the rows of their siblings, and removed modules must have no rows.
        index = self._find_list_index(owner)
        return index is not None and (
            index >= self.new or self.start <= index < self.start + self.new - self.old
        )

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        old, new = _find_module_lists(between.state), _find_module_lists(between.target)
        for prefix in sorted(set(old) & set(new)):
            before, after = _find_common_length(old[prefix]), _find_common_length(new[prefix])
            if before and after and before != after:
                fewer = next(iter((old if before < after else new)[prefix].values()))
                has_units = _are_all_modules_units(between, prefix)
                step = cls(prefix=prefix, old=before, new=after, start=0, has_units=has_units)
                for start, period in _propose_starts_and_periods(fewer, before, after):
                    yield replace(step, start=start, period=period)

    def describe(self, recordings: Recordings) -> str:
        modules = "modules" if self.has_units else "modules that communicate"
        change = f"{self.prefix or ROOT_TEXT}: {self.old} -> {self.new}"
        if self.new > self.old:
            return f"{change} {modules}, the new ones like their siblings"
        others = self._describe_removed_modules(recordings)
        if self.has_units and others == _STILL_PRESENT:
            modules = "units"
        return f"{change} {modules}{others}"

    def _describe_removed_modules(self, recordings: Recordings) -> str:
        """Return what both recordings and the trees show about modules that have no rows now."""
        trees, (old, new) = recordings.trees, recordings.states
        gone = old.keys() - new.keys()
        if trees is None:
            both = old.keys() & new.keys()
            num_larger = sum(old[name].gathered_nbytes < new[name].gathered_nbytes for name in both)
            merged = ", merged into another unit" if num_larger == 1 else ""
            return f", the others removed{merged} or not run"
        if trees.has_units(gone):
            return ", the others send nothing"
        prefixes = tuple(f"{owner}." for owner in gone if owner)
        is_present = any(name.startswith(prefixes) for name in trees.trainable)
        return _STILL_PRESENT if self.has_units and is_present else ""


def _find_module_lists(state: State) -> dict[str, dict[str, _List]]:
    """Return the module lists in a state, keyed by the `template` of their name, then by name."""
    lists: dict[str, dict[str, _List]] = {}
    for owner, content in state.items():
        segments = (owner or "").split(".") if "+" not in (owner or "") else []
        for depth, segment in enumerate(segments):
            if segment.isdecimal():
                name = ".".join(segments[:depth])
                siblings = lists.setdefault(template(name), {}).setdefault(name, {})
                siblings.setdefault(int(segment), {})[".".join(segments[depth + 1 :])] = content
    return lists


def _find_common_length(lists: Mapping[str, _List]) -> int:
    """Return the length of the lists; 0 if their lengths differ or an index is missing."""
    return get_sole(
        (len(modules) * (modules.keys() == {*range(len(modules))}) for modules in lists.values()), 0
    )


def _propose_starts_and_periods(
    modules: _List, before: int, after: int
) -> Iterator[tuple[int, int]]:
    """Yield possible values of `Layers.start` and `Layers.period`, based on the shorter list."""
    # Among equal modules, it does not matter where a module is added or removed. So try only the
    # end of the list, and the positions where neighbours differ.
    contents = [modules[n] for n in range(min(before, after))]
    ends = [n for n in range(1, len(contents)) if contents[n] != contents[n - 1]]
    starts = list(dict.fromkeys([len(contents), *reversed(ends)]))[:4]
    if after < before:
        yield from ((start, 1) for start in dict.fromkeys([*starts, 0]))
        return
    for start in starts:
        for period in (1, 2, 3, 4):
            if period <= start and (after - before) % period == 0 and (period == 1 or ends):
                yield start, period


def _are_all_modules_units(between: Between, prefix: str) -> bool:
    names = f"{prefix}.*" if prefix else "*"
    old, new = (
        [content for owner, content in state.items() if template(owner or "") == names]
        for state in (between.state, between.target)
    )
    return bool(old) and all(content.gathers[Phase.FORWARD] for content in (*old, *new))
