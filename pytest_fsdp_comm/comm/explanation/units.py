"""Explain FSDP units that were added, removed, regrouped, resized, or called more often."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import ClassVar, Final, TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.evidence import (
    Recordings,
    count_elements,
    count_more_acts,
)
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Owner,
    Rows,
    State,
    calls_of,
    count_calls_of_all_keys,
    count_forward_gathers,
    is_gather,
    is_of_parameters,
    max_nbytes,
    sizes_of,
    template,
)
from pytest_fsdp_comm.comm.explanation.steps import Part, Problem, Replaced, Step
from pytest_fsdp_comm.comm.explanation.words import (
    add_calls,
    describe_calls,
    describe_sizes,
    name_modules,
    name_times,
)
from pytest_fsdp_comm.comm.profile import RowKey
from pytest_fsdp_comm.text.fqn import fold_fqns
from pytest_fsdp_comm.text.rank_lists import name_ranks
from pytest_fsdp_comm.text.words import join_first

_Ranks: TypeAlias = tuple[int, ...]
_MAX_PARENTS: Final = 3


@dataclass(frozen=True, kw_only=True)
class UnitSizes(Replaced):
    """The parameters of units have other sizes."""

    writes: ClassVar[Part] = "sizes"
    sizes: Mapping[Owner, tuple[int, int]]
    """Bytes of a gather in both recordings; 0 if the gathers of a unit differ."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        rows: dict[Owner, Mapping[RowKey, Rows]] = {}
        for group in between.differences:
            resized = _make_resized_rows(group.old, group.new)
            rows.update(dict.fromkeys(group.owners if resized else (), resized))
        if not rows:
            return
        sizes = {
            owner: (between.state[owner].gathered_nbytes, between.target[owner].gathered_nbytes)
            for owner in rows
        }
        # Change only the sizes, because rows copied from the target could also have new counts.
        old_rows = {owner: between.state[owner].rows for owner in rows}
        yield cls(rows=rows, old_rows=old_rows, sizes=sizes)

    @property
    def is_effect(self) -> bool:
        return True

    @property
    def changes_units(self) -> bool:
        return True

    def describe(self, recordings: Recordings) -> str:
        # An earlier step may have added modules with the old sizes of their siblings.
        sizes = {owner: self.sizes[owner] for owner in recordings.list_old_modules(self.sizes)}
        return f"unit sizes changed: {describe_sizes(sizes)} per gather"


def _make_resized_rows(old: Content, new: Content) -> dict[RowKey, Rows]:
    """Return a unit's rows with new sizes; empty if the sizes on an axis have no common ratio."""
    gathers = old.gathers[Phase.FORWARD]
    if not gathers or old.rows.keys() != new.rows.keys():
        return {}
    ratios: dict[str, Fraction] = {}
    for key, rows in old.rows.items():
        if all(is_of_parameters(key, call) for call in calls_of(rows)):
            sizes = sizes_of(rows, new.row(key))
            if not (sizes and all(sizes)):
                return {}
            ratio = Fraction(sizes[1], sizes[0])
            if ratios.setdefault(key.axis, ratio) != ratio:
                return {}
    if all(ratios[key.axis] == 1 for key in gathers):
        return {}

    def resize(key: RowKey, call: Calls) -> Calls:
        ratio = ratios.get(key.axis, 1) if is_of_parameters(key, call) else 1
        return replace(call, nbytes=int(call.nbytes * ratio))

    return {
        key: tuple(
            replace(row, calls=tuple(resize(key, call) for call in row.calls)) for row in rows
        )
        for key, rows in old.rows.items()
        if any(is_of_parameters(key, call) for call in calls_of(rows))
    }


@dataclass(frozen=True, kw_only=True)
class Sharded(Replaced):
    """Replicated modules are sharded now, or the reverse."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for is_added in (False, True):
            # FSDP1 all-reduces unsharded gradients even over a group of one rank.
            axes = between.axes[not is_added]
            single_rank_axes = {axis.name for axis in axes if axis.size == 1}

            def choose(
                replicated: Content, sharded: Content, alone: set[str] = single_rank_axes
            ) -> list[RowKey]:
                is_alone = alone.issuperset(key.axis for key in replicated.reductions)
                is_changed = _has_become_sharded(replicated, sharded) and not is_alone
                return [*sharded.unit_rows, *replicated.unit_rows] if is_changed else []

            keys = between.select(choose, is_added=is_added)
            keys |= _find_keys_of_units_inside_replicated(keys, *between.sides(is_added=is_added))
            yield from cls.propose_copied_rows(between, keys, is_added=is_added)

    def describe(self, recordings: Recordings) -> str:
        who = name_modules(self.owners)
        old, new = (_collect_gather_axes(state, self.owners) for state in recordings.states)
        if old and new:
            # They were sharded before, but another step reports the old axes.
            return (
                f"{who} sharded over {', '.join(sorted(new))} instead of {', '.join(sorted(old))}"
            )
        if self.is_added:
            gathered = "parameters gathered, gradients reduce-scattered"
            return f"{who} sharded instead of replicated: {gathered}"
        reduced = "gradients all-reduced, parameters no longer gathered"
        return f"{who} replicated instead of sharded: {reduced}"


@dataclass(frozen=True, kw_only=True)
class ShardedElsewhere(Replaced):
    """Units are sharded over other axes than before."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        # An axis of the same ranks was renamed, see `AxisRenamed`.
        old_axes, new_axes = (
            {axis.name: replace(axis, name="") for axis in axes} for axes in between.axes
        )

        def choose(old: Content, new: Content) -> list[RowKey]:
            before, after = (
                {key.axis for key in side.gathers[Phase.FORWARD]} for side in (old, new)
            )
            ranks = {old_axes.get(name) for name in before} & {new_axes[name] for name in after}
            is_moved = before and after and before.isdisjoint(after) and not ranks
            sides = (*old.unit_rows, *old.reductions, *new.unit_rows, *new.reductions)
            return [*dict.fromkeys(sides)] if is_moved else []

        yield from cls.propose_copied_rows(between, between.select(choose))

    def describe(self, recordings: Recordings) -> str:
        (old, old_reduced), (new, new_reduced) = (
            (
                _collect_gather_axes(state, self.owners),
                {key.axis for owner in self.owners for key in state[owner].reductions if key.axis},
            )
            for state in recordings.states
        )
        before = _describe_axes(old, old_reduced - old - new_reduced, recordings.old_axes)
        after = _describe_axes(new, new_reduced - new - old_reduced, {})
        return f"{name_modules(self.owners)}: {before} -> {after}"


def _collect_gather_axes(state: State, owners: Iterable[Owner]) -> set[str]:
    return {key.axis for owner in owners for key in state[owner].gathers[Phase.FORWARD]}


def _describe_axes(sharded: set[str], replicated: set[str], names: Mapping[str, str]) -> str:
    """Return ``sharded over dp, replicated over rep``, with the axes renamed as in `names`."""
    over, replicas = (
        ", ".join(sorted(names.get(axis, axis) for axis in axes)) for axes in (sharded, replicated)
    )
    return f"sharded over {over}{f', replicated over {replicas}' if replicas else ''}"


def _find_keys_of_units_inside_replicated(
    owners: Iterable[Owner], replicated: State, sharded: State
) -> dict[Owner, list[RowKey]]:
    """Return the rows of sharded units whose gradients a replicated module around them reduces."""
    keys: dict[Owner, list[RowKey]] = {}
    for owner in owners:
        alone, whole = (
            count_elements(chain.from_iterable(map(calls_of, side[owner].reductions.values())))
            for side in (sharded, replicated)
        )
        prefix = f"{owner}." if owner else ""
        for name, content in sharded.items() if whole > alone and owner is not None else ():
            is_inside = name is not None and name != owner and name.startswith(prefix)
            if is_inside and content.unit_rows and not replicated[name].unit_rows:
                keys[name] = [*content.unit_rows]
    return keys


def _has_become_sharded(replicated: Content, sharded: Content) -> bool:
    old, new = sharded.reductions, replicated.reductions
    return (
        bool(sharded.gathers[Phase.FORWARD])
        and not replicated.gathers[Phase.FORWARD]
        and {key.what for key in old} == {"reduce_scatter"}
        and {key.what for key in new} == {"all_reduce"}
        and count_calls_of_all_keys(old) == count_calls_of_all_keys(new)
    )


# If only one side has a unit, it was split off from its parent, was regrouped with other units, or
# is new. Bytes tell these cases apart: `SplitOff` and `Regrouped` require that gathers and
# reductions have equal total bytes on both sides; `Gathered` requires that no other unit lost
# bytes. If several cases apply, `description_cost` makes the search prefer `SplitOff`.
@dataclass(frozen=True, kw_only=True)
class SplitOff(Replaced):
    """Modules became units of their own, or were merged into the unit above."""

    modules: tuple[str, ...]
    parents: tuple[str, ...]
    times: int
    """How often forward gathers the modules now, if that is more often than all other units."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for is_added in (False, True):
            yield from cls._propose_split_or_merge(between, is_added=is_added)

    @classmethod
    def _propose_split_or_merge(cls, between: Between, *, is_added: bool) -> Iterator[Step]:
        large, small = between.sides(is_added=is_added)
        # Modules that are units only in `small`, keyed by the closest unit above them in `large`.
        children: defaultdict[str, list[str]] = defaultdict(list)
        for owner in between.owners:
            if owner and small[owner].gathers[Phase.FORWARD]:
                parent = _find_enclosing_unit(owner, large)
                if parent is not None and not large[owner].gathers[Phase.FORWARD]:
                    children[parent].append(owner)
        units = {
            parent: modules
            for parent, modules in children.items()
            if _have_same_bytes([large[parent]], [small[owner] for owner in (parent, *modules)])
        }
        modules = tuple(chain.from_iterable(units.values()))
        # Ignore units that stay unsharded: they are gathered only once for all micro-batches.
        other_count = max(
            (
                count_forward_gathers(content)
                for state in (between.origin, between.target)
                for owner, content in state.items()
                if owner not in modules and not content.stays_unsharded
            ),
            default=0,
        )
        often = max(
            (count_forward_gathers(between.target[module]) for module in modules), default=0
        )
        is_called = is_added and 0 < other_count < often
        owners = chain.from_iterable((parent, *units[parent]) for parent in units)
        keys: dict[Owner, list[RowKey]] = {owner: _unit_keys(between, owner) for owner in owners}
        yield from cls.propose_copied_rows(
            between,
            keys,
            is_added=is_added,
            modules=modules,
            parents=tuple(units),
            times=often if is_called else 0,
        )

    @property
    def sending_owners(self) -> tuple[Owner, ...]:
        return self.modules

    @property
    def changes_units(self) -> bool:
        return True

    @property
    def is_regression(self) -> bool:
        return self.is_added

    def describe(self, recordings: Recordings) -> str:
        parts = name_modules(self.modules)
        named = join_first(fold_fqns(self.parents), _MAX_PARENTS)
        parents = f"unit{'s' if len(self.parents) > 1 else ''} {named}"
        if not self.is_added:
            return f"{parts} merged into {parents}"
        times = f", gathered {self.times} times in forward" if self.times else ""
        calls = describe_calls(self, recordings, is_gather, owners=self.modules)
        return add_calls(f"{parts} split off from {parents}{times}", calls)

    def find_cause(self, recordings: Recordings) -> str:
        return _explain_more_calls(self, recordings) if self.times else ""


def _unit_keys(between: Between, owner: Owner) -> list[RowKey]:
    return [*between.state[owner].unit_rows, *between.target[owner].unit_rows]


def _find_enclosing_unit(owner: str, state: State) -> str | None:
    name = owner.partition("+")[0]
    while name:
        name = name.rpartition(".")[0]
        if state[name].gathers[Phase.FORWARD]:
            return name
    return None


def _have_same_bytes(*sides: Sequence[Content]) -> bool:
    """Whether all sides have the same total bytes if each unit is gathered and reduced once."""
    # Units may have no gathers, but gathers of several sizes in one unit cannot be compared.
    if any(unit.gathers[Phase.FORWARD] and not unit.gathered_nbytes for unit in chain(*sides)):
        return False
    gathered = {sum(unit.gathered_nbytes for unit in side) for side in sides}
    reduced = {
        sum(
            max_nbytes(rows)
            for unit in side
            for key, rows in unit.reductions.items()
            if key.what == "reduce_scatter"
        )
        for side in sides
    }
    return len(gathered) == len(reduced) == 1


@dataclass(frozen=True, kw_only=True)
class Regrouped(Replaced):
    """The same parameters are spread over other units."""

    removed: tuple[Owner, ...]
    added: tuple[Owner, ...]
    sending_owners: ClassVar[tuple[Owner, ...]] = ()

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        old, new = (
            {
                owner: state[owner].gathered_nbytes
                for owner in between.owners
                if owner is not None and state[owner].gathers[Phase.FORWARD]
            }
            for state in (between.state, between.target)
        )
        owners = [owner for owner in {**old, **new} if old.get(owner) != new.get(owner)]
        removed = [owner for owner in owners if owner in old]
        added = [owner for owner in owners if owner in new]
        is_renamed = Counter(between.state[owner] for owner in removed) == Counter(
            between.target[owner] for owner in added
        )
        if (
            not is_renamed
            and not (set(removed) <= set(added) or set(added) <= set(removed))
            and _have_same_bytes(
                [between.state[owner] for owner in removed],
                [between.target[owner] for owner in added],
            )
            and _collect_gather_policies(between.state, removed)
            == _collect_gather_policies(between.target, added)
        ):
            keys: dict[Owner, list[RowKey]] = {
                owner: _unit_keys(between, owner) for owner in owners
            }
            yield from cls.propose_copied_rows(
                between, keys, removed=tuple(removed), added=tuple(added)
            )

    @cached_property
    def description_cost(self) -> float:
        return super().description_cost + 0.5  # the sentence says little

    @property
    def changes_units(self) -> bool:
        return True

    def describe(self, recordings: Recordings) -> str:
        change = f"{name_modules(self.removed)} -> {name_modules(self.added)}"
        return f"units regrouped, same parameter bytes in total: {change}"


def _collect_gather_policies(state: State, units: Iterable[Owner]) -> set[tuple[bool, int]]:
    """Return the pairs (stays unsharded, number of forward gathers) of all units but the root."""
    return {
        (state[unit].stays_unsharded, count_forward_gathers(state[unit])) for unit in units if unit
    }


@dataclass(frozen=True, kw_only=True)
class MovedUnits(Replaced):
    """Units moved to another stage of a pipeline, so other ranks gather them."""

    ranks: Mapping[Owner, tuple[_Ranks, _Ranks]]
    """The ranks that gather each unit in both recordings."""
    sending_owners: ClassVar[tuple[Owner, ...]] = ()

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        has_stages = any(key.what == "send" for key in between.state.row_keys())
        # In another mesh, the same stage has other ranks.
        if not has_stages or between.axes[0] != between.axes[1]:
            return
        keys: dict[Owner, Iterable[RowKey]] = {}
        ranks: dict[Owner, tuple[_Ranks, _Ranks]] = {}
        for group in between.differences:
            old, new = map(_list_ranks_of_forward_gathers, (group.old, group.new))
            if old and new and set(old).isdisjoint(new):
                changed = [key for key, *_ in group.rows]
                keys.update(dict.fromkeys(group.owners, changed))
                ranks.update(dict.fromkeys(group.owners, (old, new)))
        yield from cls.propose_copied_rows(between, keys, ranks=ranks)

    @property
    def changes_units(self) -> bool:
        return True

    def describe(self, recordings: Recordings) -> str:
        owners: defaultdict[tuple[_Ranks, _Ranks], list[Owner]] = defaultdict(list)
        for owner, ranks in self.ranks.items():
            owners[ranks].append(owner)
        moves = [
            f"{name_modules(group)} moved from {name_ranks(old)} to {name_ranks(new)}"
            for (old, new), group in owners.items()
        ]
        return f"pipeline stages: {join_first(moves, _MAX_PARENTS)}"


def _list_ranks_of_forward_gathers(content: Content) -> _Ranks:
    """Return the ranks that gather a unit in forward; empty if all ranks do, or none."""
    rows = chain.from_iterable(content.gathers[Phase.FORWARD].values())
    ranks = [row.ranks for row in rows]
    return tuple(sorted({*chain.from_iterable(ranks)})) if all(ranks) else ()


@dataclass(frozen=True, kw_only=True)
class Called(Replaced):
    """Forward gathers some units more or less often, and all others as before."""

    times: Mapping[Owner, int]
    """How often forward gathers each unit now."""
    other_units: int
    """How often forward gathers the other units, at most."""
    is_called: bool
    """Whether calls explain the gathers: no pipeline, and more gathers than other units have."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        keys = between.select(_find_keys_if_gather_counts_changed)
        # All other units must have unchanged gathers, except units that stay unsharded.
        other_units = [
            (content.gathers[Phase.FORWARD], between.target[owner].gathers[Phase.FORWARD])
            for owner, content in between.state.items()
            if owner not in keys and content.gathers[Phase.FORWARD] and not content.stays_unsharded
        ]
        if not other_units or any(old != new for old, new in other_units):
            return
        most = max(count_calls_of_all_keys(gathers) for gathers, _ in other_units)
        old, new = (
            {owner: count_forward_gathers(state[owner]) for owner in keys}
            for state in (between.state, between.target)
        )
        # With pipelines, gathers depend on the schedule, not on how often a unit is called.
        is_called = all(key.what not in {"send", "recv"} for key in between.state.row_keys())
        is_called &= max(new.values(), default=0) > most and sum(new.values()) > sum(old.values())
        yield from cls.propose_copied_rows(
            between, keys, times=new, other_units=most, is_called=is_called
        )

    @property
    def changes_units(self) -> bool:
        return True

    @property
    def is_regression(self) -> bool:
        return True

    def describe(self, recordings: Recordings) -> str:
        who = name_modules(self.owners)
        old, new = recordings.states
        counts_of_others = {
            count_forward_gathers(content)
            for owner, content in new.items()
            if owner not in self.rows
        } - {0}
        others = ""
        if len(counts_of_others) == 1:
            others = f", other units {name_times(*counts_of_others)}"
        owners: defaultdict[int, list[Owner]] = defaultdict(list)
        for owner in self.owners:
            owners[self.times[owner]].append(owner)
        if len(owners) == 1:
            (count,) = owners
            old_counts = {count_forward_gathers(old[owner]) for owner in self.owners}
            # If ranks differ, the counts may be equal, and only the ranks changed.
            is_same = old_counts == {count}
            often = f"{'/'.join(map(str, sorted(old_counts)))} -> {count} times"
            if {count} == {self.other_units} == counts_of_others:
                often = f"{count} times" if is_same else often
                return f"{who} gathered {often} in forward, now as often as the others"
            often = name_times(count) if is_same else often
            return f"{who} gathered {often} in forward{others}"
        units = [
            f"{name_modules(group)} {name_times(count)}" for count, group in sorted(owners.items())
        ]
        return f"gathered in forward: {', '.join(units)}{others}"

    def find_cause(self, recordings: Recordings) -> str:
        return _explain_more_calls(self, recordings) if self.is_called else ""


def _find_keys_if_gather_counts_changed(old: Content, new: Content) -> list[RowKey]:
    before, after = old.gathers[Phase.FORWARD], new.gathers[Phase.FORWARD]
    is_changed = (
        before.keys() == after.keys()
        and before != after
        # A unit that stays unsharded is gathered only once, however often it is called.
        and not new.stays_unsharded
        and all(
            _collect_call_sizes(before[key]) == _collect_call_sizes(after[key]) for key in before
        )
    )
    return [*old.unit_rows, *new.unit_rows] if is_changed else []


def _collect_call_sizes(rows: Rows) -> set[int]:
    return {call.nbytes for call in calls_of(rows)}


@dataclass(frozen=True, kw_only=True)
class Gathered(Replaced):
    """Units are gathered that were not gathered before, or no longer are."""

    is_reduced: bool
    """Whether their gradients are reduced too."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for is_added in (False, True):
            yield from cls._propose_addition_or_removal(between, is_added=is_added)

    @classmethod
    def _propose_addition_or_removal(cls, between: Between, *, is_added: bool) -> Iterator[Step]:
        without, having = between.sides(is_added=is_added)
        if any(
            having[owner].gathered_nbytes < without[owner].gathered_nbytes
            for owner in between.changed
        ):
            return

        def choose(less: Content, more: Content) -> Iterable[RowKey]:
            is_new = more.gathers[Phase.FORWARD] and not less.unit_rows
            return more.unit_rows if is_new else ()

        keys = between.select(choose, is_added=is_added)
        # No other unit may be added or removed, unless `Sharded` reports it.
        if any(
            having[owner].gathers[Phase.FORWARD] and not without[owner].gathers[Phase.FORWARD]
            for owner in between.owners
            if owner not in keys and not _has_become_sharded(without[owner], having[owner])
        ):
            return
        is_reduced = any(having[owner].reductions for owner in keys)
        yield from cls.propose_copied_rows(between, keys, is_added=is_added, is_reduced=is_reduced)

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        return is_gather(key, call) and key.phase is Phase.FORWARD

    @cached_property
    def description_cost(self) -> float:
        return super().description_cost + 0.5  # the sentence says little

    @property
    def changes_units(self) -> bool:
        return True

    @property
    def reports_other_units(self) -> bool:
        return True

    def find_problem(self, recordings: Recordings) -> Problem | None:
        is_lost = self.is_reduced and not self.is_added
        return "unreduced" if is_lost and not self._is_skipped(recordings) else None

    def _is_skipped(self, recordings: Recordings) -> bool:
        """Whether the trees show that these are still units, and the peak that none is gathered."""
        is_unit = recordings.trees is not None and recordings.trees.has_units(self.owners)
        is_gathered = recordings.can_still_be_gathered(self.owners)
        return is_unit and not (self.is_added or is_gathered)

    def find_cause(self, recordings: Recordings) -> str:
        trees = recordings.trees
        if not (self.is_reduced and trees and self._is_skipped(recordings)):
            return ""
        if not trees.emptied.isdisjoint(self.owners):
            return ""
        return "not called in this step: they are still units, as the tree shows"

    @property
    def is_regression(self) -> bool:
        return not self.is_added

    def describe(self, recordings: Recordings) -> str:
        who, others = name_modules(self.owners), self._describe_unchanged_other_units(recordings)
        if self._can_still_be_unsharded(recordings):
            how = "not run, or gathered before it, without later changes of their shards"
            return f"{who} no longer gathered in this step: {how}"
        gathers = f", gathers of {others}" if others else ""
        if not self.is_added:
            reduced = " or reduced" if self.is_reduced else ""
            return f"{who} no longer gathered{reduced}{gathers}"
        if self.owners == (None,):
            who = "units outside the recorded model"
        return add_calls(
            f"{who} now gathered{' and reduced' if self.is_reduced else ''}{gathers}",
            describe_calls(self, recordings, is_of_parameters if self.is_reduced else is_gather),
        )

    def _can_still_be_unsharded(self, recordings: Recordings) -> bool:
        """Whether the units are reduced and hold their parameters, but are not gathered."""
        trees = recordings.trees
        is_unit = trees is None or trees.has_units(self.owners)
        can_be_gathered = is_unit and recordings.can_still_be_gathered(self.owners)
        return can_be_gathered and not (self.is_added or self.is_reduced)

    def _describe_unchanged_other_units(self, recordings: Recordings) -> str:
        """Return ``other units unchanged``, if that is true and there are other units."""

        def is_of_others(key: RowKey, call: Calls, owner: Owner) -> bool:
            return owner not in self.rows and is_gather(key, call)

        old, _ = recordings.states
        if not any(
            is_of_others(key, call, owner)
            for owner, content in old.items()
            for key, call in content.calls()
        ):
            return ""
        if recordings.is_unchanged(is_of_others):
            return "other units unchanged"
        is_same_forward = recordings.is_unchanged(
            lambda key, call, owner: key.phase is Phase.FORWARD and is_of_others(key, call, owner)
        )
        return "other units unchanged in forward" if is_same_forward else ""


def _explain_more_calls(step: Replaced, recordings: Recordings) -> str:
    more = count_more_acts(recordings, Phase.FORWARD, "unshard")
    # Ignore gathers in backward: calling a unit without a backward changes what is prefetched.
    is_reduced, is_resharded = (
        any(acts[owner] == more[owner] > 0 for owner in step.owners)
        for act in ("reduce_scatter", "reshard")
        for acts in [count_more_acts(recordings, Phase.BACKWARD, act)]
    )
    if is_reduced:
        return "the unit runs several times, each time with a backward that reduces its gradients"
    if is_resharded:
        return (
            "called several times in one forward, e.g. by a loop or a chunked loss: leave it in "
            "its parent's unit, or set its reshard_after_forward to False"
        )
    again = "the unit runs again without a backward, e.g. under no_grad()"
    # In a list of layers, only the first layer may have inputs that require no gradients.
    lists = Counter(template(owner) for owner in step.owners if owner is not None)
    if any("*" in name and number > 1 for name, number in lists.items()):
        return again
    return f"{again}, or is called several times on inputs that need no gradient"
