"""Explain how two snapshots differ, for failed tests, the command line and reviews."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pytest_fsdp_comm.comm import diff as comm_diff
from pytest_fsdp_comm.comm.diff import Change
from pytest_fsdp_comm.comm.explanation.steps import Evidence
from pytest_fsdp_comm.comm.profile import CommProfile
from pytest_fsdp_comm.reports.changes import (
    headline,
    headline_of_steps,
    render_comparison,
    render_tree_changes,
)
from pytest_fsdp_comm.reports.explanation import FailureText
from pytest_fsdp_comm.snapshots.documents import Profile
from pytest_fsdp_comm.tree import diff as tree_diff
from pytest_fsdp_comm.tree.diff import TreeChange
from pytest_fsdp_comm.tree.profile import (
    ParameterFacts,
    TreeFacts,
    TreeProfile,
    lost_root,
    new_roots,
    policy_change,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How two snapshots differ, or why they were not compared."""

    explanation: FailureText
    changes: tuple[Change, ...] | tuple[TreeChange, ...] = ()
    """The changes; empty if the compared facts are equal or nothing was compared."""
    text: str = ""
    """Replaces the headline of `changes`: a model-wide change, or why nothing was compared."""


def explain_profiles(
    sides: tuple[Profile, Profile], *, where: str, evidence: Evidence | None = None
) -> Difference:
    """Explain how a reviewed and a recorded profile differ."""
    old, new = sides
    match sides:
        case CommProfile() as old, CommProfile() as new:
            comparison = comm_diff.compare(old, new, evidence)
            explanation = render_comparison(comparison, snapshot=where, notes=new.notes)
            return Difference(
                explanation=_within_scope(explanation, old, new),
                changes=comparison.changes,
                text=headline_of_steps(comparison),
            )
        case TreeProfile() as old, TreeProfile() as new:
            changes = tree_diff.compare(old, new)
            explanation = render_tree_changes(changes, snapshot=where)
            return Difference(explanation=_within_scope(explanation, old, new), changes=changes)
    text = f"the snapshot's kind is {kind_of(old)!r}, but {kind_of(new)!r} was recorded"
    return Difference(explanation=replace(head_of(sides, where=where), changes=(text,)), text=text)


def head_of(sides: tuple[Profile, Profile], *, where: str) -> FailureText:
    """Return only the first line of `explain_profiles`, which is the same on all ranks."""
    old, new = sides
    compared = "comm_mode" if isinstance(new, CommProfile) else "fsdp_tree"
    head = FailureText(head=f"{compared} differs from {where}", compared=compared, snapshot=where)
    return _within_scope(head, old, new)


def kind_of(profile: Profile) -> Literal["comm", "tree"]:
    """Return the kind of a snapshot, as named in its first line."""
    return "comm" if isinstance(profile, CommProfile) else "tree"


def headline_of_values(differences: Mapping[str, Difference]) -> str:
    """Return one line: the most important change, and why some values could not be compared."""
    # Changes that break training come first, then model-wide changes.
    for diff in sorted(differences.values(), key=lambda diff: not diff.text):
        if diff.explanation.training:
            return diff.text or headline(diff.changes)
    changes = [change for diff in differences.values() for change in diff.changes]
    model_wide = [diff.text for diff in differences.values() if diff.text and diff.changes]
    texts = {name: diff.text for name, diff in differences.items() if diff.text}
    if model_wide:
        return model_wide[0]
    if not changes and len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    first = [headline(changes)] if changes else []
    return "; ".join((*first, *(f"{name}: {text}" for name, text in texts.items())))


def evidence_of(pairs: Iterable[tuple[Profile, Profile]]) -> Evidence | None:
    """Return evidence for causes from the first pair of trees; None if there are no trees."""
    for old, new in pairs:
        match old, new:
            case TreeProfile(common=TreeFacts() as was), TreeProfile(common=TreeFacts() as now):
                return tree_evidence(was, now)
    return None


def _within_scope(explanation: FailureText, was: Profile, now: Profile) -> FailureText:
    """Mention in the first line that torch versions differ, or that sizes are not compared."""
    if kind_of(was) != kind_of(now):
        return explanation
    if isinstance(was, CommProfile) and isinstance(now, CommProfile):
        explanation = _within_sizes(explanation, was, now)
    old, new = (profile.torch_version.partition("+")[0] for profile in (was, now))
    if not old or not new or old == new:
        return explanation
    return explanation.within(f"recorded with torch {old}, this is {new}")


def _within_sizes(explanation: FailureText, was: CommProfile, now: CommProfile) -> FailureText:
    option = "activation_nbytes=False"
    if was.sizes_activations and now.sizes_activations:
        return explanation
    if not (was.sizes_activations or now.sizes_activations):
        return explanation.within(f"activation sizes not compared ({option})")
    written, compared = ("with", "without") if now.sizes_activations else ("without", "with")
    cure = f"with comm_snapshot({option})" if now.sizes_activations else f"without {option}"
    return explanation.within(
        f"which was recorded {written} {option} and is compared {compared} it",
        f"compare as the file was recorded, {cure}",
    )


def tree_evidence(old: TreeFacts, new: TreeFacts) -> Evidence:
    """Return changes to the units that exist in both trees, as evidence for likely causes."""
    before, after = old.units.get(1, {}), new.units.get(1, {})
    units = frozenset(before) & frozenset(after)
    parameters = _parameters_of(units, old.parameters, new.parameters)
    frozen: set[str] = set()
    partly_frozen: set[str] = set()
    thawed: set[str] = set()
    for unit, pairs in parameters.items():
        if any(was.trainable and not now.trainable for was, now in pairs):
            still_trains = any(now.trainable for _, now in pairs)
            (partly_frozen if still_trains else frozen).add(unit)
        if any(now.trainable and not was.trainable for was, now in pairs):
            thawed.add(unit)
    return Evidence(
        units=units,
        frozen=frozenset(frozen),
        partly_frozen=frozenset(partly_frozen),
        thawed=frozenset(thawed),
        trainable=frozenset(_trainable({*before, *after}, new.parameters)),
        policies={
            unit: policy
            for unit in units
            for policy in [policy_change(before[unit], after[unit])]
            if policy
        },
        new_roots=new_roots(old, new),
        lost_root=lost_root(old, new),
        prefetching=frozenset(
            name
            for name in ("forward_prefetch", "backward_prefetch", "prefetch")
            for unit in units
            if getattr(before[unit], name) != getattr(after[unit], name)
        ),
        is_other_dtype=any(
            was.dtype != now.dtype for pairs in parameters.values() for was, now in pairs
        ),
        is_other_policy=any(before[unit].precision != after[unit].precision for unit in units),
        is_other_shape={name: facts.shape for name, facts in old.parameters.items()}
        != {name: facts.shape for name, facts in new.parameters.items()},
        is_reduce_dtype_unset=all(
            facts.kind == "fsdp2" and facts.precision.reduce_dtype is None
            for unit in units
            for facts in (before[unit], after[unit])
            if facts.precision.param_dtype is not None
        ),
    )


def _trainable(units: set[str], parameters: Mapping[str, ParameterFacts]) -> Iterator[str]:
    """Yield the module and the unit of each trainable parameter."""
    unit_of = {module: unit for unit in units for module in unit.split("+")}
    for name in (name for name, facts in parameters.items() if facts.trainable):
        yield name.rpartition(".")[0]
        yield _unit_around(name, unit_of) or ""


def _unit_around(name: str, unit_of: Mapping[str, str]) -> str | None:
    """Return the innermost unit that contains a parameter; None if no unit contains it."""
    while name and name not in unit_of:
        name = name.rpartition(".")[0]
    return unit_of.get(name)


def _parameters_of(
    units: frozenset[str], old: Mapping[str, ParameterFacts], new: Mapping[str, ParameterFacts]
) -> dict[str, list[tuple[ParameterFacts, ParameterFacts]]]:
    unit_of = {module: unit for unit in units for module in unit.split("+")}
    pairs: defaultdict[str, list[tuple[ParameterFacts, ParameterFacts]]] = defaultdict(list)
    for name in old.keys() & new.keys():
        unit = _unit_around(name, unit_of)
        pairs[name.rpartition(".")[0] if unit is None else unit].append((old[name], new[name]))
    return pairs
