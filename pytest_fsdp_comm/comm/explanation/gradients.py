"""Explain changes in how the gradients of units are reduced."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import ClassVar, Final, Literal, TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.events import REDUCING, Phase, Role
from pytest_fsdp_comm.comm.explanation.evidence import (
    Recordings,
    count_acts,
    count_elements,
    list_gathered_axes,
)
from pytest_fsdp_comm.comm.explanation.states import (
    NOTHING,
    Between,
    Content,
    Owner,
    Rows,
    calls_of,
    count_calls,
    count_forward_gathers,
    get_sole,
    is_gather,
    max_nbytes,
    nbytes_of,
    role_of,
)
from pytest_fsdp_comm.comm.explanation.steps import (
    Part,
    Problem,
    Replaced,
    Step,
    list_collective_rows,
)
from pytest_fsdp_comm.comm.explanation.words import (
    describe_sizes,
    name_factor,
    name_modules,
    name_operations,
)
from pytest_fsdp_comm.comm.profile import RowKey
from pytest_fsdp_comm.text.words import show_count, show_nbytes

Keys: TypeAlias = Mapping[Owner, Iterable[RowKey]]
_Kind: TypeAlias = Literal["reduced", "times", "part"]
_FROZEN: Final = "frozen, as the tree shows"
_THAWED: Final = f"parameters are no longer {_FROZEN}"


def _group_reduction_changes_by_ratio(
    between: Between, kind: _Kind
) -> dict[Fraction, dict[Owner, list[RowKey]]]:
    """Return the differing reductions of units whose gathers did not change, by kind of change.

    The keys are ratios of counts. For other kinds than ``times``, 1 means more, and 0 less.
    """
    groups: defaultdict[Fraction, dict[Owner, list[RowKey]]] = defaultdict(dict)
    for group in between.differences:
        old, new = group.old, group.new
        has_same_gathers = all(
            old.gathers[phase] == new.gathers[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        if NOTHING in {old, new} or not has_same_gathers:
            continue
        keys_by_ratio: defaultdict[Fraction, list[RowKey]] = defaultdict(list)
        for key in {**old.reductions, **new.reductions}:
            change = _classify_reduction_change(old.row(key), new.row(key))
            if change is not None and change[0] == kind:
                keys_by_ratio[change[1]].append(key)
        for ratio, keys in keys_by_ratio.items():
            groups[ratio].update(dict.fromkeys(group.owners, keys))
    return groups


def _classify_reduction_change(before: Rows, after: Rows) -> tuple[_Kind, Fraction] | None:
    if before == after:
        return None
    if not (before and after):
        return "reduced", Fraction(0 if before else 1)
    ratio = Fraction(count_calls(after), count_calls(before))
    if _multiply_call_counts(before, ratio) == _multiply_call_counts(after, Fraction(1)):
        return "times", ratio
    # Sizes can also change with the dtype alone, so compare elements.
    old, new = (count_elements(calls_of(rows)) for rows in (before, after))
    return ("part", Fraction(new > old)) if ratio == 1 and old != new else None


def _multiply_call_counts(rows: Rows, factor: Fraction) -> list[tuple[object, Calls, Fraction]]:
    return [
        (row.ranks, replace(call, count=0), call.count * factor)
        for row in rows
        for call in row.calls
    ]


class _GradientStep(Replaced):
    def _describe_unchanged_gathers(self, recordings: Recordings) -> str:
        """Return what both recordings show about the gathers of these units; empty if changed."""

        def is_gather_of_units(key: RowKey, call: Calls, owner: Owner) -> bool:
            return owner in self.rows and is_gather(key, call)

        if recordings.ratio(is_gather_of_units) != 1:
            return ""
        is_unchanged = recordings.is_unchanged(is_gather_of_units)
        return ", gathers unchanged" if is_unchanged else ", gathered as often as before"


@dataclass(frozen=True, kw_only=True)
class ReducedTimes(_GradientStep):
    """Gradients of units are reduced more or less often."""

    times: Fraction
    is_sharded: bool
    """Whether forward gathers the units."""
    has_others: bool
    """Whether the reductions of other units did not change."""
    is_alone: bool
    """Whether these other units are gathered once in forward."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for times, keys in _group_reduction_changes_by_ratio(between, "times").items():
            is_sharded = all(between.state[owner].gathers[Phase.FORWARD] for owner in keys)
            # If forward gathers the other units only once, there is one micro-batch.
            other_units = [
                content
                for owner, content in between.state.items()
                if owner not in keys
                and content.reductions
                and content.reductions == between.target[owner].reductions
            ]
            is_alone = bool(other_units) and all(
                count_forward_gathers(content) == 1 for content in other_units
            )
            yield from cls.propose_copied_rows(
                between,
                keys,
                times=times,
                is_sharded=is_sharded,
                has_others=bool(other_units),
                is_alone=is_sharded and is_alone,
            )

    def find_problem(self, recordings: Recordings) -> Problem | None:
        return "times"

    @property
    def is_regression(self) -> bool:
        return True

    def describe(self, recordings: Recordings) -> str:
        counts = [
            {
                count_calls(state[owner].row(key))
                for owner, rows in self.rows.items()
                for key in rows
            }
            for state in recordings.states
        ]
        often = f"{name_factor(self.times)} as often"
        if all(len(side) == 1 for side in counts):
            # Without FSDP, each parameter of a module has calls of its own.
            often = "{} -> {} times" if self.is_sharded else "in {} -> {} calls"
            often = often.format(*chain(*counts))
        kinds = ", ".join(self._list_kinds(recordings))
        gathers = self._describe_unchanged_gathers(recordings)
        text = f"gradients of {name_modules(self.owners)} reduced {often} ({kinds}){gathers}"
        # Until FSDP reduces them, it accumulates gradients unsharded.
        trees = recordings.trees
        is_frozen = trees is not None and trees.frozen | trees.partly_frozen
        is_synced_late = self.times < 1 and self.is_sharded and kinds == "reduce_scatter"
        # If other units are reduced as before, these may be frozen in some of the backwards.
        is_accumulated = is_synced_late and bool(gathers) and not (is_frozen or self.has_others)
        is_accumulated &= not any(
            call.lacks_last
            for row in recordings.new.collectives
            if row.owner in self.owners
            for call in row.calls
        )
        nbytes = sum(max_nbytes(rows) for side in self.rows.values() for rows in side.values())
        return (
            f"{text}; {show_nbytes(nbytes)} of unsharded gradients are held until then"
            if is_accumulated
            else text
        )

    def find_cause(self, recordings: Recordings) -> str:
        if self.times <= 1:
            return ""
        kinds = {row.what for row in list_collective_rows(self.rows)}
        if "reduce_scatter" in kinds and self._has_unchanged_all_reduces(recordings):
            return (
                "HSDP: micro-batches but the last now call set_requires_all_reduce(False), which "
                "saves memory, instead of set_requires_gradient_sync(False)"
            )
        call = f"set_requires_{'all_reduce' if kinds == {'all_reduce'} else 'gradient_sync'}(False)"
        # The other units show that only this unit's backward runs several times.
        if self.is_alone or (not self.is_sharded and list_gathered_axes(recordings.new)):
            return (
                "the unit's backward runs several times, e.g. for a chunked loss: "
                f"call {call} on the unit for all backwards but the last"
            )
        switch, steps, when = f"call {call}", "", "in each micro-batch"
        if not self.is_sharded:
            switch = "run forward and backward inside no_sync()"
            steps = f"{self.times} steps instead of one, or "
        else:
            if kinds != {"all_reduce"}:
                switch += ", or run backward inside no_sync() with FSDP1,"
            reduced = {row.count for row in list_collective_rows(self.rows)}
            gathered = count_acts(recordings.new, Phase.BACKWARD, "unshard")
            backwards = {gathered[owner] for owner in self.owners} - {0}
            often, passes = get_sole(reduced, 0), get_sole(backwards, 0)
            if 1 < often < passes:
                when = f"in {often} of {passes} micro-batches"
            elif often > passes > 0 or not passes:
                when = "in each micro-batch, or in several backwards of one forward"
        loss = ", or another loss reaches them too, and should not" if self.has_others else ""
        if self.is_sharded and self.has_others:
            return f"reduced {when}: {call} does not reach these units (e.g. recurse=False){loss}"
        return f"{steps}reduced {when}: {switch} for all micro-batches but the last{loss}"

    def _list_kinds(self, recordings: Recordings) -> list[str]:
        """List the kinds of the calls; with axes, if other calls of a kind did not change."""
        changed = {key for rows in self.rows.values() for key in rows if key.axis}
        state = recordings.states[0]
        others = {
            key.what for owner in self.owners for key in state[owner].reductions.keys() - changed
        }
        is_split = not others.isdisjoint(key.what for key in changed)
        return sorted({str(key) if is_split else key.what for key in changed})

    def _has_unchanged_all_reduces(self, recordings: Recordings) -> bool:
        """Whether the replicas of these units reduce gradients as often as before."""
        old, new = recordings.states
        return all(
            any(
                key.what == "all_reduce" and rows == new[owner].row(key)
                for key, rows in old[owner].reductions.items()
            )
            for owner in self.owners
        )


@dataclass(frozen=True, kw_only=True)
class Reduced(_GradientStep):
    """Gradients of units are reduced by new collectives, or no longer reduced by some."""

    is_by_more: bool
    """Whether other collectives reduce gradients of these units in both recordings."""
    is_again: bool
    """Whether the collectives run where the gradients are reduced already: same phase and axis."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for ratio, keys in _group_reduction_changes_by_ratio(between, "reduced").items():
            is_added = bool(ratio)
            less, more = between.sides(is_added=is_added)
            # Include reshards in backward, which happen only if backward reduces the gradients.
            freed = {
                owner: [
                    key
                    for key in (*less[owner].rows, *more[owner].rows)
                    if key.what == "reshard" and key.phase is Phase.BACKWARD
                ]
                for owner in keys
                if not less[owner].reductions
            }
            # Phases and axes in which gradients are reduced on the side with fewer reductions.
            reduced_in = {(key.phase, key.axis) for owner in keys for key in less[owner].reductions}
            yield from cls.propose_copied_rows(
                between,
                {owner: [*rows, *freed.get(owner, ())] for owner, rows in keys.items()},
                is_added=is_added,
                is_by_more=bool(reduced_in),
                is_again=all(
                    (key.phase, key.axis) in reduced_in for rows in keys.values() for key in rows
                ),
            )

    @property
    def _has_reductions(self) -> bool:
        """Whether these collectives reduce; an optimizer may also gather gradients."""
        rows = chain(list_collective_rows(self.rows), list_collective_rows(self.old_rows))
        return any(row.what in REDUCING for row in rows)

    def find_problem(self, recordings: Recordings) -> Problem | None:
        if not self._has_reductions:
            return None
        if not self.is_added:
            return "unreduced"
        return "again" if self.is_again else None

    def describe(self, recordings: Recordings) -> str:
        gradients = f"gradients of {name_modules(self.owners)}"
        operations = name_operations(self)
        if not self._has_reductions:
            return f"{gradients} {'now' if self.is_added else 'no longer'} sent by {operations}"
        gathers = self._describe_unchanged_gathers(recordings)
        how = "now" if self.is_added else "no longer"
        if carrying := self._name_axes_carrying_gradients_instead(recordings):
            new_calls = f"perhaps sent by new calls over {carrying}"
            return f"{gradients} no longer reduced by {operations}, {new_calls}"
        if not self.is_by_more:
            return f"{gradients} {how} reduced ({operations}){gathers}"
        old, new = recordings.states
        has_kept = any(
            new[unit].row(key) == rows
            for unit in self.owners
            for key, rows in old[unit].reductions.items()
        )
        how += " also" if self.is_added and has_kept else ""
        return f"{gradients} {how} reduced by {operations}{gathers}"

    def _name_axes_carrying_gradients_instead(self, recordings: Recordings) -> str:
        """Name the axes whose new calls may carry the gradients instead; empty if none can."""
        lost = Counter[str]()
        for row in list_collective_rows(self.old_rows):
            lost[row.axis] += count_elements(row.calls)
        can_carry = lost and not self.is_added and not self.is_by_more
        return ", ".join(sorted(lost)) if can_carry and lost <= recordings.carried_elements else ""

    def find_cause(self, recordings: Recordings) -> str:
        if self.is_by_more or self._name_axes_carrying_gradients_instead(recordings):
            return ""
        known = explain_changed_reductions(self, recordings)
        reason = "parameters are frozen or detached, or gradient synchronization is switched off"
        return known or ("" if self.is_added else reason)


@dataclass(frozen=True, kw_only=True)
class ReducedPart(_GradientStep):
    """As many reductions as before carry gradients of another size."""

    writes: ClassVar[Part] = "sizes"
    is_of_unit: bool
    """Whether forward gathers the units; if not, only the sizes are known."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for ratio, keys in _group_reduction_changes_by_ratio(between, "part").items():
            for is_of_unit in (False, True):
                chosen = {
                    owner: rows
                    for owner, rows in keys.items()
                    if bool(between.state[owner].gathers[Phase.FORWARD]) == is_of_unit
                }
                yield from cls.propose_copied_rows(
                    between, chosen, is_added=bool(ratio), is_of_unit=is_of_unit
                )

    def describe(self, recordings: Recordings) -> str:
        sides = [*zip(self.rows.values(), self.old_rows.values(), strict=True)]
        # On another number of ranks, the same parameters have gradients of another size.
        sizes_of_axes = [[axis.size for axis in side.mesh_axes] for side in recordings.sides]
        changes = {nbytes_of(new[key]) - nbytes_of(old[key]) for new, old in sides for key in new}
        which = "different"
        if min(changes) >= 0 or max(changes) <= 0:
            which = "more" if max(changes) > 0 else "fewer"
        gradients = "gradients of"
        if self.is_of_unit and sizes_of_axes[0] == sizes_of_axes[1]:
            gathers = self._describe_unchanged_gathers(recordings)
            gradients = f"gradients of {which} parameters are now reduced{gathers}:"
        elif not self.is_of_unit:
            gradients = f"{which} gradients are now reduced:"
        sizes = {
            owner: max((max_nbytes(old[key]), max_nbytes(new[key])) for key in new if key.axis)
            for (owner, new), old in zip(self.rows.items(), self.old_rows.values(), strict=True)
        }
        return f"{gradients} {describe_sizes(sizes)} per call"

    def find_cause(self, recordings: Recordings) -> str:
        if not self.is_of_unit:
            return self._explain_changed_gradient_size(recordings)
        trees = recordings.trees
        lost = "some parameters {}got no gradient: not used, or behind detach() or no_grad()"
        if trees is None or not trees.has_units(self.owners):
            return "" if self.is_added else lost.format("are frozen, or ")
        owners = {*self.owners} - {None}
        if owners <= trees.frozen | trees.partly_frozen:
            return f"some parameters are {_FROZEN}"
        if self.is_added or trees.is_other_shape or owners & (trees.frozen | trees.partly_frozen):
            return _THAWED if owners <= trees.thawed else ""
        return f"{lost.format('')}; nothing was frozen, as the tree shows"

    def _explain_changed_gradient_size(self, recordings: Recordings) -> str:
        trees = recordings.trees
        if trees is not None:
            is_frozen = not self.is_added and trees.frozen | trees.partly_frozen
            is_thawed = self.is_added and trees.thawed
            text = f"parameters are {_FROZEN}" if is_frozen else _THAWED if is_thawed else ""
            return "" if trees.is_other_shape else text
        if self.is_added:
            return "parameters were added or enlarged, or are no longer frozen"
        return "parameters were removed, made smaller or frozen"


@dataclass(frozen=True, kw_only=True)
class Buckets(Replaced):
    """Gradients of the same total size are reduced in other calls, e.g. in other buckets of DDP."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        def is_split_otherwise(_key: RowKey, before: Rows, after: Rows) -> bool:
            old, new = (
                {call for call in calls_of(rows) if call.role == Role.GRADIENTS}
                for rows in (before, after)
            )
            is_of_gradients = role_of(before) == role_of(after) == Role.GRADIENTS
            return is_of_gradients and old != new and _sum_nbytes(old) == _sum_nbytes(new)

        keys = between.select_rows(is_split_otherwise)
        yield from cls.propose_copied_rows(between, keys)

    def describe(self, recordings: Recordings) -> str:
        old, new = (
            {
                sum(call.count for call in row.calls if call.role == Role.GRADIENTS)
                for row in list_collective_rows(rows)
            }
            for rows in (self.old_rows, self.rows)
        )
        calls = "1 call" if new == {1} else f"{'/'.join(map(str, sorted(new)))} calls"
        how = f"reduced in {calls} of other sizes" if old == new else f"now reduced in {calls}"
        return f"gradients of {name_modules(self.owners)} {how}, same bytes in total"


def _sum_nbytes(calls: Iterable[Calls]) -> Counter[Calls]:
    """Return the total bytes of the calls that differ only in size and number."""
    nbytes = Counter[Calls]()
    for call in calls:
        nbytes[replace(call, nbytes=0, count=0)] += call.nbytes * call.count
    return nbytes


@dataclass(frozen=True, kw_only=True)
class Flattened(Replaced):
    """User code reduces gradients in a few large buffers, or no longer does."""

    axis: str
    reduced: tuple[Owner, ...]
    """The modules whose gradients have calls of their own, on the side without buffers."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for is_added in (True, False):
            apart, flat = between.sides(is_added=is_added)
            for key, rows in flat[None].rows.items():
                if key.what != "all_reduce" or role_of(rows) or apart[None].row(key):
                    continue
                keys: dict[Owner, list[RowKey]] = {
                    owner: lost
                    for owner in between.owners
                    for lost in [_find_gradients_not_in_flat(apart[owner], flat[owner], key.axis)]
                    if owner is not None and lost
                }
                parts = [
                    call
                    for owner in keys
                    for lost in keys[owner]
                    for call in calls_of(apart[owner].row(lost))
                ]
                sent, flat_sent = count_elements(parts), count_elements(calls_of(rows))
                # Buffers hold all gradients once; hooks may send them in several backwards.
                once = count_elements(replace(call, count=1) for call in parts)
                if sent and sent % flat_sent == 0 and once <= flat_sent:
                    yield from cls.propose_copied_rows(
                        between,
                        {**keys, None: [key]},
                        is_added=is_added,
                        axis=key.axis,
                        reduced=tuple(keys),
                    )

    def reduces_elsewhere(self, owner: Owner) -> bool:
        return self.is_added and owner in self.reduced

    def describe(self, recordings: Recordings) -> str:
        sides = [
            [row for row in list_collective_rows(side) if row.axis == self.axis]
            for side in (self.old_rows, self.rows)
        ]
        old, new = map(count_calls, sides)
        how = f"{'no longer' if self.is_added else 'now'} have calls of their own"
        calls = f"{old} -> {show_count(new, 'call')} of all_reduce[{self.axis}]"
        factor = Fraction(nbytes_of(sides[1]), nbytes_of(sides[0]))
        amount = "same bytes in total" if factor == 1 else f"{name_factor(factor)} the bytes"
        return f"gradients of {name_modules(self.reduced)} {how}: {calls}, {amount}"

    def find_cause(self, recordings: Recordings) -> str:
        apart, flat = (
            [row for row in list_collective_rows(side) if row.axis == self.axis]
            for side in (self.old_rows, self.rows)
        )
        is_flat = count_calls(flat) < count_calls(apart)
        if not self.is_added:
            return ""
        if nbytes_of(flat) < nbytes_of(apart):
            return (
                "each gradient is sent once now, or these calls send something else, such as "
                "weights that are averaged after several steps"
            )
        return "gradients are flattened into buffers" if is_flat else ""


def _find_gradients_not_in_flat(apart: Content, flat: Content, axis: str) -> list[RowKey]:
    return [
        key
        for key, rows in apart.rows.items()
        if key.axis == axis and role_of(rows) == Role.GRADIENTS and not flat.row(key)
    ]


def explain_changed_reductions(
    step: Replaced,
    recordings: Recordings,
    alternative: str = ", or its gradients are not synchronized",
) -> str:
    """Return why units now reduce gradients or no longer do; empty if the trees do not show it.

    Args:
        step: The step that adds or removes reductions.
        recordings: Both recordings, with trees.
        alternative: Another reason that the rows allow, if nothing was frozen.
    """
    trees, owners = recordings.trees, {*step.owners} - {None}
    if trees is None or not owners or not trees.has_units(owners):
        return ""
    if not step.is_added and owners <= trees.frozen:
        added = "; no unit reduces the gradients of the trained parameters inside"
        return f"parameters are {_FROZEN}{added if owners & trees.trainable else ''}"
    if not step.is_added and owners.isdisjoint(trees.frozen | trees.partly_frozen):
        unused = f"the loss no longer depends on the unit{alternative}"
        return f"{unused}: nothing was frozen, as the tree shows"
    return _THAWED if step.is_added and owners <= trees.thawed else ""
