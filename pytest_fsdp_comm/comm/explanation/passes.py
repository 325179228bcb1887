"""Explain changes to phases, axes and activations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final, TypeAlias

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import Volume, find_busiest
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.evidence import NORM, Recordings
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    Owner,
    Rows,
    calls_of,
    count_calls,
    count_calls_of_all_keys,
    get_sole,
    is_from_user_code,
    is_part,
    keys_that_differ,
    nbytes_of,
    role_of,
)
from pytest_fsdp_comm.comm.explanation.steps import (
    Problem,
    Replaced,
    RowsByOwner,
    Step,
    list_collective_rows,
)
from pytest_fsdp_comm.comm.explanation.words import (
    add_calls,
    describe_calls,
    name_modules,
    name_operations,
    name_phase,
    name_with_phase,
)
from pytest_fsdp_comm.comm.profile import Row, RowKey
from pytest_fsdp_comm.text.words import show_count, show_nbytes_change

_PARTS: Final = (
    (Phase.BACKWARD, Phase.RECOMPUTE),
    (Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER),
    (Phase.OPTIMIZER,),
)
_FULL: Final = {
    frozenset({"all_gather"}): ("full", "gathered"),
    frozenset({"all_reduce"}): ("partial", "reduced"),
    frozenset({"all_gather", "all_reduce"}): ("full or partial", "gathered or reduced"),
}
"""An adjective and a verb for DTensors that are gathered in full, keyed by the kinds of calls."""


@dataclass(frozen=True, kw_only=True)
class AxisUsed(Replaced):
    """An axis has its first collectives, or lost all of them."""

    axis: str

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        # An axis of the same ranks was renamed, see `AxisRenamed`.
        old, new = ({replace(axis, name=""): axis.name for axis in axes} for axes in between.axes)
        lost, added = (
            {side[ranks] for ranks in side.keys() - other} - {*other.values()}
            for side, other in ((old, new), (new, old))
        )
        for is_added, axes in ((True, added), (False, lost)):
            for axis in sorted(axes):
                keys = between.select_rows(
                    partial(_is_over_axis_or_redistribution, axis, is_added=is_added)
                )
                yield from cls.propose_copied_rows(between, keys, is_added=is_added, axis=axis)

    def describe(self, recordings: Recordings) -> str:
        side = self.rows if self.is_added else self.old_rows
        senders = [owner for owner, rows in side.items() if self.axis in {key.axis for key in rows}]
        who = name_modules(senders)
        if not self.is_added:
            is_of_all = {row.owner for row in recordings.renamed.collectives} <= {*self.owners}
            return f"{'' if is_of_all else f'{who}: '}no more collectives over {self.axis}"
        # Do not subtract replaced rows: they have this axis only because it was renamed.
        calls = describe_calls(self, recordings, lambda key, _: key.axis == self.axis, is_new=True)
        return add_calls(f"{who}: new collectives over {self.axis}, which had none before", calls)


def _is_over_axis_or_redistribution(
    axis: str, key: RowKey, before: Rows, after: Rows, *, is_added: bool
) -> bool:
    is_move = key.subject == "redistribution" and not (before and after)
    # If the axis was renamed, rows that the new profile lacks have the new name, too.
    return (key.axis == axis and bool(after if is_added else before)) or is_move


@dataclass(frozen=True, kw_only=True)
class Recomputed(Replaced):
    """Activation checkpointing repeats collectives of forward, or no longer repeats them."""

    is_moved: bool
    """Whether gathers only moved from backward into recomputation."""
    gathers_again: bool
    """Whether units are gathered both in recomputation and in backward."""
    is_partly: bool
    """Whether both recordings recompute something."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for is_added in (True, False):
            yield from cls._propose_addition_or_removal(between, is_added=is_added)

    @classmethod
    def _propose_addition_or_removal(cls, between: Between, *, is_added: bool) -> Iterator[Step]:
        less, more = between.sides(is_added=is_added)
        keys = between.select_rows(lambda key, *_: key.phase is Phase.RECOMPUTE)
        # Recomputation repeats collectives of forward, so it cannot send more bytes than forward.
        for owner, owner_keys in keys.items():
            for key in owner_keys:
                again = more[owner].row(key)
                sent = more[owner].row(key._replace(phase=Phase.FORWARD))
                if less[owner].row(key) or not sent or nbytes_of(again) > nbytes_of(sent):
                    return
        gathers = [more[owner].gathers for owner in keys]
        # Units whose gathers moved from backward into recomputation.
        moved = {
            owner: [key for key in less[owner].unit_rows if key.phase is Phase.BACKWARD]
            for owner in keys
            if count_calls_of_all_keys(less[owner].gathers[Phase.BACKWARD])
            == count_calls_of_all_keys(more[owner].gathers[Phase.RECOMPUTE])
            > count_calls_of_all_keys(more[owner].gathers[Phase.BACKWARD])
        }
        is_of_units = all(
            key in more[owner].unit_rows for owner, owner_keys in keys.items() for key in owner_keys
        )
        # Modules whose other collectives are recomputed as before are only gathered elsewhere.
        recomputed = {key.phase for owner in keys for key in less[owner].rows}
        if is_of_units and Phase.RECOMPUTE in recomputed:
            return
        # Prefetching may move the gathers of some units, too.
        if is_of_units and moved and moved.keys() != keys.keys():
            return
        yield from cls.propose_copied_rows(
            between,
            {owner: [*owner_keys, *moved.get(owner, ())] for owner, owner_keys in keys.items()},
            is_added=is_added,
            is_moved=bool(moved) and is_of_units,
            gathers_again=any(
                phases[Phase.RECOMPUTE] and phases[Phase.BACKWARD] for phases in gathers
            ),
            is_partly=any(key.phase is Phase.RECOMPUTE for key in less.row_keys()),
        )

    def describe(self, recordings: Recordings) -> str:
        who = name_modules(self.owners)
        if self.is_moved:
            pair = ("recomputation", "backward") if self.is_added else ("backward", "recomputation")
            return "{} gathered in {} instead of {}".format(who, *pair)
        if not self.is_added:
            return f"recomputation no longer repeats the forward collectives of {who}"
        calls = describe_calls(self, recordings)
        return f"recomputation now repeats the forward collectives of {who}: {calls}"

    def find_cause(self, recordings: Recordings) -> str:
        if self.is_moved:
            return ""  # unknown: a different list of modules to prefetch has the same effect
        if self.is_added and self.gathers_again:
            return (
                "reentrant checkpointing gathers the units a second time (if it wraps FSDP1's "
                "units, or after set_modules_to_forward_prefetch): pass use_reentrant=False"
            )
        if self.is_partly:
            more_or_less = "more" if self.is_added else "less"
            return (
                f"{more_or_less} is recomputed: different modules are checkpointed, or in a "
                "different mode"
            )
        if self.is_added:
            return (
                "activation checkpointing was switched on or covers more of each module, or "
                "selective checkpointing no longer saves the results of these collectives"
            )
        alternative = "selective checkpointing now saves the results of these collectives"
        if self.gathers_again:
            alternative = "use_reentrant became False"
        return (
            "activation checkpointing was switched off or covers only parts that send nothing, or "
            f"{alternative}"
        )


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(Replaced):
    """All-reduces of activations over an axis became reduce-scatters, or the reverse."""

    axis: str
    is_whole: bool
    """Whether all modules changed, so that sequence parallelism was switched on or off."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for is_added in (True, False):
            off, on = between.sides(is_added=is_added)
            axes = dict.fromkeys(
                key.axis
                for owner in between.changed
                for key, rows in off[owner].rows.items()
                if key == _forward_key("all_reduce", key.axis)
                and _count_calls_by_size_and_dtype(rows)
                == _count_calls_by_size_and_dtype(
                    on[owner].row(key._replace(what="reduce_scatter"))
                )
            )
            for axis in axes:
                if _forward_key("all_reduce", axis) in on.row_keys():
                    continue
                keys = between.select_rows(
                    lambda key, *_, axis=axis: key.axis == axis or key.subject == "redistribution"
                )
                # Without sequence parallelism, nothing is scattered or has to be gathered.
                is_whole = off.row_keys().isdisjoint(
                    {_forward_key("reduce_scatter", axis), _forward_key("all_gather", axis)}
                )
                yield from cls.propose_copied_rows(
                    between, keys, is_added=is_added, axis=axis, is_whole=is_whole
                )

    def describe(self, recordings: Recordings) -> str:
        kinds = ("all-reduces", "reduce-scatters")
        old, new = kinds if self.is_added else kinds[::-1]
        became = f"forward {old} became {new} of the same size"
        if self.is_whole:
            is_on = "switched on" if self.is_added else "switched off"
            return f"sequence parallelism over {self.axis} {is_on}: {became}"
        sums = {_forward_key(kind, self.axis) for kind in ("all_reduce", "reduce_scatter")}
        owners = [owner for owner, rows in self.rows.items() if not sums.isdisjoint(rows)]
        return f"{name_modules(owners)}[{self.axis}]: {became}"


def _forward_key(kind: str, axis: str) -> RowKey:
    return RowKey("collective", Phase.FORWARD, kind, axis)


def _count_calls_by_size_and_dtype(rows: Rows) -> Counter[tuple[int, str]]:
    amounts: Counter[tuple[int, str]] = Counter()
    for call in calls_of(rows):
        amounts[call.nbytes, call.dtype] += call.count
    return amounts


@dataclass(frozen=True, kw_only=True)
class PhaseUsed(Replaced):
    """Phases, such as backward or the optimizer step, have their first collectives, or lost all."""

    phases: tuple[Phase, ...]
    has_norms: bool
    """Whether norms of DTensors are reduced there."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for is_added in (True, False):
            less, more = between.sides(is_added=is_added)
            without, having = ({key.phase for key in side.row_keys()} for side in (less, more))
            for phases in _PARTS:
                # Recomputation is optional, but the other phases must exist.
                is_there = {phases[0], phases[-1]} <= {*having, Phase.RECOMPUTE}
                if not (without.isdisjoint(phases) and is_there):
                    continue
                keys = between.select(partial(_find_changes_in_phases, phases), is_added=is_added)
                yield from cls._propose_steps_for_phases(between, phases, keys, is_added=is_added)
                # If ranks compute the loss together, they communicate outside all modules.
                loss = [
                    key
                    for key in keys_that_differ(less[None], more[None])
                    if key.phase is Phase.OUTSIDE and not less[None].row(key)
                ]
                if loss and Phase.BACKWARD in phases:
                    keys[None] = [*keys.get(None, ()), *loss]
                    yield from cls._propose_steps_for_phases(
                        between, (*phases, Phase.OUTSIDE), keys, is_added=is_added
                    )

    @classmethod
    def _propose_steps_for_phases(
        cls,
        between: Between,
        phases: tuple[Phase, ...],
        keys: Mapping[Owner, Iterable[RowKey]],
        *,
        is_added: bool,
    ) -> Iterator[Step]:
        # If no gradients are reduced any more, do not also report that their norms are gone.
        was_reduced, is_reduced = (
            any(content.reductions for content in state.values())
            for state in (between.origin, between.target)
        )
        has_norms = any(NORM in key.what for owner_keys in keys.values() for key in owner_keys)
        yield from cls.propose_copied_rows(
            between,
            keys,
            is_added=is_added,
            phases=phases,
            has_norms=has_norms and (is_reduced or not was_reduced),
        )

    def claims(self, owner: Owner, key: RowKey, call: Calls) -> bool:
        return key.phase is Phase.FORWARD

    def find_problem(self, recordings: Recordings) -> Problem | None:
        is_lost = Phase.BACKWARD in self.phases and not self.is_added
        return "unreduced" if is_lost else None

    @property
    def is_regression(self) -> bool:
        return self.has_norms and not self.is_added

    def describe(self, recordings: Recordings) -> str:
        phases = {key.phase for rows in self.rows.values() for key in rows}
        names = {Phase.OUTSIDE: "the loss", Phase.OPTIMIZER: "the optimizer phase"}
        where = " and ".join(names.get(phase, phase) for phase in self.phases if phase in phases)
        is_unchanged = recordings.is_unchanged(lambda key, *_: key.phase is Phase.FORWARD)
        forward = ", forward unchanged" if is_unchanged else ""
        if not self.is_added:
            return f"no more collectives in {where}{forward}"
        calls = describe_calls(self, recordings, lambda key, _: key.phase in self.phases)
        kinds = name_operations(self)
        new = "new collectives" if ", " in kinds else f"new {kinds}"
        return add_calls(f"{new} in {where}{forward}", calls)

    def find_cause(self, recordings: Recordings) -> str:
        if not self.has_norms:
            return self._explain_reduced_scalar()
        if self.is_added:
            return (
                "norms of gradients or weights are now computed, e.g. by clip_grad_norm_, by "
                "logging, or by an optimizer such as LAMB"
            )
        text = "norms of gradients or weights are no longer computed"
        old, new = recordings.states
        if any(
            key.phase is Phase.OUTSIDE
            and key.subject == "redistribution"
            # More DTensors are redistributed: norms may now be computed from whole tensors.
            and count_calls(rows) > count_calls(old[owner].row(key))
            for owner, content in new.items()
            for key, rows in content.rows.items()
        ):
            return f"{text}, or computed otherwise, e.g. with another norm_type"
        how = "before zero_grad(), on the sharded parameters"
        return f"{text}: is clip_grad_norm_ still called, {how}?"

    def _explain_reduced_scalar(self) -> str:
        # DTensors would be redistributed.
        sizes = {
            (row.subject, row.what, call.nbytes)
            for side in (self.rows, self.old_rows)
            for rows_by_key in side.values()
            for rows in rows_by_key.values()
            for row in rows
            for call in row.calls
        }
        if self.phases != (Phase.OPTIMIZER,) or sizes != {("collective", "all_reduce", 4)}:
            return ""
        how = "now" if self.is_added else "no longer"
        return (
            f"a number is {how} reduced: the norm of FSDP1's clip_grad_norm_ (torch's function of "
            "this name uses the norm of each shard), or a scaler's check"
        )


def _find_changes_in_phases(
    phases: Container[Phase], less: Content, more: Content
) -> Iterator[RowKey]:
    for key in keys_that_differ(less, more):
        # If a unit stays unsharded after forward and no backward reshards it, the next forward does
        # not gather it again.
        is_for_backward = key.phase is Phase.FORWARD and (
            key.subject == "reshard"
            or (more.stays_unsharded and role_of(more.row(key) or less.row(key)) == Role.PARAMETERS)
        )
        if key.phase in phases or (is_for_backward and Phase.BACKWARD in phases):
            yield key


@dataclass(frozen=True, kw_only=True)
class Redistributed(Replaced):
    """Modules redistribute a DTensor, or no longer do."""

    phase: Phase
    placements: str
    """The placements before and after, such as ``(Shard(dim=0))->(Replicate())``."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        groups: defaultdict[tuple[Phase, str, bool], dict[Owner, list[RowKey]]] = defaultdict(dict)
        for group in between.differences:
            for key, before, after in group.rows:
                if key.subject != "redistribution" or (before and after):
                    continue
                sent = {
                    sent_key: count_calls(new) - count_calls(old)
                    for sent_key, old, new in group.rows
                    if sent_key.subject == "collective" and sent_key.phase is key.phase
                }
                is_whole = "Shard" not in key.what.partition("->")[2]
                target = between.target[group.owners[0]]
                if after and is_whole and _is_gathered_by_user(key.phase, map(target.row, sent)):
                    continue  # see `GatheredInFull`
                # A redistribution issues one collective, so both counts change by the same number.
                if [*sent.values()] == [count_calls(after) - count_calls(before)]:
                    keys = groups[key.phase, key.what, bool(after)]
                    chosen = [key, *sent]
                    keys.update(dict.fromkeys(group.owners, chosen))
        for (phase, placements, is_added), keys in groups.items():
            yield from cls.propose_copied_rows(
                between, keys, is_added=is_added, phase=phase, placements=placements
            )

    @property
    def is_regression(self) -> bool:
        return self.phase is not Phase.OPTIMIZER  # where norms of gradients are computed

    def find_problem(self, recordings: Recordings) -> Problem | None:
        # Backward must reduce a partial gradient. If nothing else changed for these modules, the
        # reduction is lost.
        is_partial = "Partial" in self.placements.partition("->")[0]
        if self.is_added or self.phase is not Phase.BACKWARD or not is_partial:
            return None
        is_alone = recordings.is_unchanged(
            lambda key, _, owner: owner in self.rows and key not in self.rows[owner]
        )
        return "unreduced" if is_alone else None

    def describe(self, recordings: Recordings) -> str:
        source, _, target = self.placements.partition("->")
        how = "now" if self.is_added else "no longer"
        where = name_with_phase(self.owners, self.phase)
        change = f"{where}: {how} redistributed {source} -> {target}"
        if not self.is_added:
            return change
        return f"{change} by {name_operations(self)}: {describe_calls(self, recordings)}"

    def find_cause(self, recordings: Recordings) -> str:
        is_by_plan = self.phase is Phase.FORWARD and None not in self.owners
        # The layouts of a new module are intended, and other placements are the cause themselves.
        trees = recordings.trees
        if not self.is_added and trees is not None and trees.resharded.issuperset(self.owners):
            return (
                "the parallelize_module plan gives the module other layouts, or none, as the tree "
                "shows"
            )
        is_shown = trees is not None and (
            not trees.old_modules.issuperset(self.owners)
            or not trees.resharded.isdisjoint(self.owners)
        )
        if is_shown or not (self.is_added and is_by_plan):
            return ""
        return (
            "the module's layouts in the parallelize_module plan no longer match those of the "
            "modules before or after it, or redistribute() or full_tensor() is called"
        )


@dataclass(frozen=True, kw_only=True)
class Exchanged(Replaced):
    """Other collectives replace all calls that modules issue over an axis, or in a phase."""

    phase: Phase
    axis: str
    """Empty if the axes differ; `old` and `new` then name them."""
    old: tuple[str, ...]
    new: tuple[str, ...]

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        groups: defaultdict[
            tuple[Phase, str, tuple[str, ...], tuple[str, ...]], dict[Owner, list[RowKey]]
        ] = defaultdict(dict)
        for group in between.differences:
            lost, added = _split_lost_and_added_rows(group.rows)
            pairs = dict.fromkeys((key.phase, key.axis) for key, *_ in lost)
            for phase, axis in (*pairs, *dict.fromkeys((phase, "") for phase, _ in pairs)):
                removed, new = (
                    [row for row in side if row[0].phase is phase and axis in {"", row[0].axis}]
                    for side in (lost, added)
                )
                keys = [row[0] for row in (*removed, *new)]
                kinds = [
                    tuple(sorted(row[0].what if axis else str(row[0]) for row in side))
                    for side in (removed, new)
                ]
                if new and all(is_from_user_code(row[1] or row[2]) for row in (*removed, *new)):
                    owners = groups[phase, axis, kinds[0], kinds[1]]
                    owners.update(dict.fromkeys(group.owners, keys))
        for (phase, axis, old, new_kinds), rows in groups.items():
            yield from cls.propose_copied_rows(
                between, rows, phase=phase, axis=axis, old=old, new=new_kinds
            )

    def describe(self, recordings: Recordings) -> str:
        who = "" if self.owners == (None,) else f"{name_modules(self.owners)}: "
        before, after = (
            _find_nbytes_on_busiest_rank(list_collective_rows(side))
            for side in (self.old_rows, self.rows)
        )
        differs = any(
            row.ranks for rows in (self.old_rows, self.rows) for row in list_collective_rows(rows)
        )
        counts = {count_calls(list_collective_rows(side)) for side in (self.old_rows, self.rows)}
        same = ", same size" if len(counts) == 1 else ", same bytes in all"
        if differs:
            same = ", same size on the rank that sends most"
        amount = same if before == after else f", {show_nbytes_change(before, after)}"
        if before == after and _has_all_reduce(self.old) != _has_all_reduce(self.new):
            amount += " (an all_reduce sends about twice its size)"
        # Objects have no size.
        amount = amount if before and after else ""
        kinds = f"{_join_kinds(self.new)}{_make_objects_suffix(self.rows)} instead of "
        old_kinds = [_rename_axis_in_kind(kind, recordings.old_axes) for kind in self.old]
        kinds += f"{_join_kinds(old_kinds)}{_make_objects_suffix(self.old_rows)}"
        over = f" over {self.axis}" if self.axis else ""
        return f"{who}{kinds}{over} {name_phase(self.phase)}{amount}"


def _rename_axis_in_kind(kind: str, names: Mapping[str, str]) -> str:
    """Rename the axis of ``all_reduce[dp]``."""
    what, _, axis = kind.removesuffix("]").partition("[")
    return f"{what}[{names.get(axis, axis)}]" if axis else kind


def _has_all_reduce(kinds: Iterable[str]) -> bool:
    return any(kind.startswith("all_reduce") for kind in kinds)


def _join_kinds(kinds: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def _make_objects_suffix(side: RowsByOwner) -> str:
    calls = calls_of(tuple(list_collective_rows(side)))
    return " of objects" if all(call.is_object for call in calls) else ""


@dataclass(frozen=True, kw_only=True)
class OtherTensors(Replaced):
    """As many calls as before send tensors that belong to no module, or no longer do."""

    key: RowKey
    modules: tuple[Owner, ...]

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for is_added in (True, False):
            owned, loose = between.sides(is_added=is_added)
            for key, rows in loose[None].rows.items():
                if not key.axis or owned[None].row(key):
                    continue
                modules = tuple(
                    owner
                    for owner in between.owners
                    if owner is not None and owned[owner].row(key) and not loose[owner].row(key)
                )
                if count_calls(rows) == sum(
                    count_calls(owned[owner].row(key)) for owner in modules
                ):
                    chosen = [key]
                    keys: dict[Owner, list[RowKey]] = dict.fromkeys((*modules, None), chosen)
                    yield from cls.propose_copied_rows(
                        between, keys, is_added=is_added, key=key, modules=modules
                    )

    def describe(self, recordings: Recordings) -> str:
        sides = [tuple(list_collective_rows(side)) for side in (self.old_rows, self.rows)]
        before, after = map(_find_nbytes_on_busiest_rank, sides)
        calls = show_count(count_calls(sides[1 if self.is_added else 0]), "call")
        how = "other tensors than those" if self.is_added else "tensors"
        amount = "same bytes" if before == after else show_nbytes_change(before, after)
        where = f"{self.key} {name_phase(self.key.phase)}"
        old, new = (get_sole((call.dtype for call in calls_of(side)), "") for side in sides)
        dtype = f" in {new} instead of {old}" if old and new and old != new else ""
        return f"{where}: {calls} now send {how} of {name_modules(self.modules)}{dtype}, {amount}"


def _find_nbytes_on_busiest_rank(rows: Iterable[Row]) -> int:
    """Return the bytes of rows on the rank that sends the most."""
    return find_busiest((row.ranks, Volume(nbytes=row.nbytes)) for row in rows).nbytes


_RowDiff: TypeAlias = tuple[RowKey, Rows, Rows]


def _split_lost_and_added_rows(rows: Iterable[_RowDiff]) -> tuple[list[_RowDiff], list[_RowDiff]]:
    """Return the rows of collectives that only the old state has, and those of the new one."""
    sent = [row for row in rows if row[0].axis]
    return [row for row in sent if not row[2]], [row for row in sent if not row[1]]


@dataclass(frozen=True, kw_only=True)
class GatheredInFull(Replaced):
    """User code gathers or reduces whole DTensors, as ``full_tensor()`` does."""

    phase: Phase
    roles: str
    """Roles of the DTensors, joined with ``and``; empty if one of them is unknown."""
    order: ClassVar[int] = 5

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        by_role: defaultdict[tuple[Phase, str], dict[Owner, list[RowKey]]] = defaultdict(dict)
        for phase in (Phase.OUTSIDE, Phase.FORWARD):
            for owner, keys in between.select(partial(_find_keys_of_full_gathers, phase)).items():
                new = between.target[owner]
                sent = [new.row(key) for key in keys if key.subject == "collective"]
                if _is_gathered_by_user(phase, sent) and not _has_fewer_gathers(phase, between):
                    roles = _collect_roles(sent)
                    by_role[phase, "" if "" in roles else " and ".join(sorted(roles))][owner] = keys
        for (phase, role_names), rows in by_role.items():
            yield from cls.propose_copied_rows(between, rows, phase=phase, roles=role_names)

    @property
    def is_regression(self) -> bool:
        return True

    def describe(self, recordings: Recordings) -> str:
        word, verb = _FULL[self._collective_kinds]
        tensors = f"{word} {self.roles or 'DTensors'} {verb}"
        tensors = f"{name_modules(self.owners)}: {tensors}" if self.roles else tensors
        calls = describe_calls(self, recordings, is_change=True)
        others = self._list_others_redistributed_as_before(recordings)
        also = f", beside {name_modules(others)} as before" if others else ""
        return f"{tensors} {name_phase(self.phase)}{also}: {calls}"

    def _list_others_redistributed_as_before(self, recordings: Recordings) -> list[Owner]:
        """Return other modules whose DTensors both recordings redistribute in the same way."""
        old, new = recordings.states
        moves = {
            key for rows in self.rows.values() for key in rows if key.subject == "redistribution"
        }
        return [
            owner
            for owner, content in old.items()
            if owner is not None and owner not in self.rows
            if any(
                key in moves and rows == new[owner].row(key) for key, rows in content.rows.items()
            )
        ]

    @property
    def _collective_kinds(self) -> frozenset[str]:
        keys = [key for rows in self.rows.values() for key in rows]
        return frozenset(key.what for key in keys if key.subject == "collective")

    def find_cause(self, recordings: Recordings) -> str:
        if self._collective_kinds == {"all_reduce"}:
            return (
                "full_tensor() or redistribute() of partial results, such as norms or sums to log"
            )
        # The states of an optimizer have no role.
        example = "" if self.roles else "the optimizer's, "
        where = (
            f"a full state dict (e.g. {example}for a checkpoint), or a DTensor that is printed or "
            "logged"
        )
        if self.roles == Role.GRADIENTS:
            where = "by an optimizer that needs whole matrices, by clipping or by logging"
        if self.phase is Phase.FORWARD:
            where = "e.g. once for each chunk of a loss"
        return f"full_tensor() or redistribute(), {where}"


def _has_fewer_gathers(phase: Phase, between: Between) -> bool:
    """Whether gathers in a phase may only have moved from one owner to another."""
    return any(
        key.phase is phase and key.what == "all_gather" and nbytes_of(after) < nbytes_of(before)
        for group in between.differences
        for key, before, after in group.rows
    )


def _is_gathered_by_user(phase: Phase, sent: Iterable[Rows]) -> bool:
    is_forward = phase is Phase.FORWARD
    return phase is Phase.OUTSIDE or (is_forward and _collect_roles(sent) == {Role.PARAMETERS})


def _collect_roles(sent: Iterable[Rows]) -> set[str]:
    return {call.role for rows in sent for call in calls_of(rows)}


def _find_keys_of_full_gathers(phase: Phase, old: Content, new: Content) -> list[RowKey]:
    keys = [
        key
        for key in keys_that_differ(old, new)
        if key.phase is phase
        and (key.what in {"all_gather", "all_reduce"} or key.subject == "redistribution")
    ]
    moves = [key for key in keys if key.subject == "redistribution"]
    is_whole = (
        moves
        and len(keys) > len(moves)
        and all("Shard" not in key.what.partition("->")[2] for key in moves)
        and all(is_part(old.row(key), new.row(key)) for key in keys)
    )
    return keys if is_whole else []
