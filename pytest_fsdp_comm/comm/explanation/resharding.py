"""Explain changes in when units are resharded, and where backward gathers them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.evidence import Recordings
from pytest_fsdp_comm.comm.explanation.gradients import explain_changed_reductions
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Content,
    count_calls_of_all_keys,
    count_forward_gathers,
    get_sole,
    is_gather,
    is_part,
)
from pytest_fsdp_comm.comm.explanation.steps import Problem, Replaced, Step
from pytest_fsdp_comm.comm.explanation.words import add_calls, describe_calls, name_modules
from pytest_fsdp_comm.comm.profile import RowKey


@dataclass(frozen=True, kw_only=True)
class GatheredElsewhere(Replaced):
    """Backward gathers units over other axes."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        def choose(old: Content, new: Content) -> list[RowKey]:
            before, after = (
                {key.axis for key in side.gathers[Phase.BACKWARD]} for side in (old, new)
            )
            is_moved = before and after and before != after
            is_same = (
                is_moved
                and _are_forward_gathers_contained(old, new)
                and _are_forward_gathers_contained(new, old)
            )
            return _list_unit_keys_but_reductions(old, new) if is_same else []

        yield from cls.propose_copied_rows(between, between.select(choose))

    def describe(self, recordings: Recordings) -> str:
        keys = [key for rows in self.rows.values() for key, value in rows.items() if value]
        axes = sorted({key.axis for key in keys} - {""})
        return f"{name_modules(self.owners)} now gathered over {', '.join(axes)} in backward"

    def find_cause(self, recordings: Recordings) -> str:
        guess = "reshard_after_forward became an int, a different int, or True"
        return _describe_policy_change(self, recordings) or guess


@dataclass(frozen=True, kw_only=True)
class Freed(Replaced):
    """Units are resharded after forward and gathered again in backward, or no longer are."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        def choose(less: Content, more: Content) -> list[RowKey]:
            is_changed = (
                more.is_resharded
                and not less.is_resharded
                and _are_forward_gathers_contained(less, more)
                and count_calls_of_all_keys(more.gathers[Phase.BACKWARD])
                > count_calls_of_all_keys(less.gathers[Phase.BACKWARD])
            )
            return _list_unit_keys_but_reductions(less, more) if is_changed else []

        old, new = between.origin, between.target
        for is_added in (False, True):
            # A unit that forward uses twice is still gathered between its two backwards. Fewer
            # gathers could also be fewer micro-batches, but then there are fewer reductions, too.
            less, _ = between.sides(is_added=is_added)
            keys = {
                owner: unit_keys
                for owner, unit_keys in between.select(choose, is_added=is_added).items()
                if not less[owner].gathers[Phase.BACKWARD]
                or old[owner].reductions == new[owner].reductions
            }
            yield from cls.propose_copied_rows(between, keys, is_added=is_added)

    def describe(self, recordings: Recordings) -> str:
        less = recordings.states[0 if self.is_added else 1]
        is_gathered = any(less[owner].gathers[Phase.BACKWARD] for owner in self.owners)
        again = "more often" if is_gathered else "again"
        how = f"now resharded after forward and gathered {again} in backward"
        if not self.is_added:
            again = "gathered less often" if is_gathered else "not gathered again"
            how = f"no longer resharded after forward, so {again} in backward"
        calls = describe_calls(
            self,
            recordings,
            lambda key, call: key.phase is Phase.BACKWARD and is_gather(key, call),
            is_change=True,
        )
        return f"{name_modules(recordings.list_old_modules(self.owners))} {how}: {calls}"

    def find_cause(self, recordings: Recordings) -> str:
        value, old_name, cost = ("False", "SHARD_GRAD_OP", "less traffic, more memory")
        root = "became a root"
        if self.is_added:
            value, old_name, cost = ("True", "FULL_SHARD", "more traffic, less memory")
            root = "is no longer a root"
        less, more = recordings.states if self.is_added else reversed(recordings.states)
        if any(
            count_forward_gathers(more[owner]) > count_forward_gathers(less[owner])
            and (Phase.BACKWARD, "reshard") not in {(k.phase, k.what) for k in less[owner].rows}
            for owner in self.owners
        ):
            # Backward does not reshard the unit either, so later forwards need not gather it.
            is_kept = "no longer " if self.is_added else ""
            call = f"set_reshard_after_backward(False) is {is_kept or 'now '}called"
            return f"the units are {is_kept}kept from one micro-batch to the next: {call}"
        if change := _describe_policy_change(self, recordings):
            return change
        trees = recordings.trees
        if trees is not None and trees.rules_out_other_resharding(self.owners):
            forward = "forward may run without the unit's hooks"
            shown = "its resharding is set as before, as the tree shows"
            return "" if self.is_added else f"{forward}: {shown}"
        guess = f"reshard_after_forward became {value} (FSDP1: {old_name}), or the unit {root}"
        return f"{guess}: {cost}"


@dataclass(frozen=True, kw_only=True)
class GatheredInBackward(Replaced):
    """Backward gathers units, or no longer does; their gathers in forward are unchanged."""

    is_reduced: bool
    """Whether the gradients of the units were reduced before."""
    is_used: bool
    """Whether the reductions of the units were added or removed too."""

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        for is_added in (False, True):
            keys = between.select(_find_keys_if_backward_gathers_added, is_added=is_added)
            reductions = {
                tuple(bool(state[owner].reductions) for state in (between.state, between.target))
                for owner in keys
            }
            # If recomputing the forward gathers a unit, backward need not gather it again.
            sides = between.origin, between.target
            is_again = any(side[owner].gathers[Phase.RECOMPUTE] for side in sides for owner in keys)
            if len(reductions) == 1 and not is_again:
                old, new = reductions.pop()
                was_reduced = old if is_added else new
                is_used = (new if is_added else old) and not was_reduced
                yield from cls.propose_copied_rows(
                    between, keys, is_added=is_added, is_reduced=was_reduced, is_used=is_used
                )

    def find_problem(self, recordings: Recordings) -> Problem | None:
        return "unreduced" if self.is_used and not self.is_added else None

    @property
    def is_regression(self) -> bool:
        return self.is_added

    def describe(self, recordings: Recordings) -> str:
        who = name_modules(self.owners)
        if self.is_used:
            how = "now gathered and reduced" if self.is_added else "no longer gathered or reduced"
            return f"{who} {how} in backward"
        calls = describe_calls(self, recordings, is_gather) if self.is_added else ""
        how = "now" if self.is_added else "no longer"
        return add_calls(f"{who} {how} gathered in backward", calls)

    def find_cause(self, recordings: Recordings) -> str:
        if self.is_used:
            return explain_changed_reductions(self, recordings, alternative="")
        if not self.is_reduced:
            how = "now" if self.is_added else "no longer"
            other = "no longer" if self.is_added else "now"
            return (
                f"the units' inputs {how} need gradients, so backward {how} runs through them, or "
                f"set_unshard_in_backward(False) is {other} called on them"
            )
        if not self.is_added:
            return "set_unshard_in_backward(False) is now called on the unit"
        return (
            "set_unshard_in_backward(False) is no longer called on the unit; the call saves this "
            "gather if backward does not need the weight, e.g. of an embedding"
        )


def _find_keys_if_backward_gathers_added(without: Content, having: Content) -> Iterable[RowKey]:
    forward = having.gathers[Phase.FORWARD]
    is_changed = (
        forward
        and forward == without.gathers[Phase.FORWARD]
        and having.is_resharded
        and without.is_resharded
        and having.gathers[Phase.BACKWARD]
        and not without.gathers[Phase.BACKWARD]
        and without.reductions in ({}, having.reductions)
    )
    return [*having.unit_rows, *without.unit_rows] if is_changed else []


def _list_unit_keys_but_reductions(*sides: Content) -> list[RowKey]:
    return [key for content in sides for key in content.unit_rows if key not in content.reductions]


def _are_forward_gathers_contained(first: Content, second: Content) -> bool:
    """Whether `first` has forward gathers, and `second` has all of them at least as often."""
    # Counts may differ: a unit that stays unsharded is gathered only once for all micro-batches.
    less, more = first.gathers[Phase.FORWARD], second.gathers[Phase.FORWARD]
    return bool(less) and all(is_part(rows, more.get(key, ())) for key, rows in less.items())


def _describe_policy_change(step: Replaced, recordings: Recordings) -> str:
    """Describe how the units' resharding after forward changed in the trees; "" if it did not."""
    trees = recordings.trees
    if trees is None or not trees.has_units(step.owners):
        return ""
    change = get_sole((trees.policies.get(owner or "", "") for owner in step.owners), "")
    return f"{change}, as the tree shows" if change else ""
