"""Infers transformations of the whole: other names, lists, counts, sizes and types.

A proposal is a guess with all its numbers; whether it is true shows when it is applied.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import ROOT_FQN, Phase, Role
from pytest_fsdp_comm.comm.story.between import Between, gathers_of, role_of, sizes_of
from pytest_fsdp_comm.comm.story.facts import Owner, count_of
from pytest_fsdp_comm.comm.story.names import template
from pytest_fsdp_comm.comm.story.steps import (
    ActivationSizes,
    AxisRenamed,
    AxisSizes,
    Counts,
    Dtype,
    Layers,
    Renamed,
    Scope,
    Step,
    in_scope,
    is_kept,
    is_of_gradients,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_fsdp_comm.comm.story.facts import Content, Fact, State

_MOST_TERMS: Final = 64
"""The largest product of a ratio's sides that is told: 3/2 is, 129/65 is a coincidence."""


_MOST_RATIOS: Final = 3


_MOST_RENAMES: Final = 6


def propose_anywhere(between: Between, least: int) -> Iterator[Step]:
    """Steps that hold in all modules alike, or rename them.

    Args:
        between: The states.
        least: The lowest `Step.order` of interest.
    """
    for order, proposals in (
        (AxisRenamed.order, (_axes_renamed,)),
        (Renamed.order, (_renamed,)),
        (Layers.order, (_layers,)),
        (Counts.order, (_counts, _activation_sizes, _axis_sizes, _dtypes)),
    ):
        for propose in proposals if order >= least else ():
            yield from propose(between)


def _axes_renamed(between: Between) -> Iterator[Step]:
    old, new = ({axis.name: axis for axis in axes} for axes in between.axes)
    used = {fact.row.axis for content in between.state.values() for fact in content.facts}
    for gone in sorted(used.intersection(old).difference(new)):
        for came in sorted(set(new).difference(old)):
            is_alike = (old[gone].size, old[gone].dims) == (new[came].size, new[came].dims)
            yield AxisRenamed(old=gone, new=came, is_alike=is_alike)


def _renamed(between: Between) -> Iterator[Step]:
    gone = [owner for owner in between.gone if owner is not None]
    came = {owner for owner in between.came if owner is not None}
    if not gone or not came:
        # A root that stays the root is on both sides.
        yield from _unwrapped(between)
        return
    prefixes: Counter[tuple[str, str]] = Counter()
    templates = {template(owner) for owner in came}
    for old in {template(owner) for owner in gone}:
        for new in templates:
            prefixes[_without_common_end(old, new)] += 1
    for (old, new), _ in prefixes.most_common(_MOST_RENAMES):
        if old.count("*") != new.count("*"):
            continue
        for keeps_root in (True, False) if not old or not new else (False,):
            step = Renamed(old=old, new=new, keeps_root=keeps_root)
            moved = {owner: step.name(owner) for owner in between.state}
            names = set(moved.values())
            changes = [owner for owner, name in moved.items() if owner != name]
            is_leaf = {template(owner or "") for owner in changes} == {old}
            step = replace(step, is_leaf=is_leaf)
            if (
                changes
                and _is_rename(between, old, new, changes, moved)
                and len(names) == len(moved)
                and all(owner in gone for owner in changes if owner != ROOT_FQN)
                and {template(moved[owner] or "") for owner in changes} <= templates
            ):
                yield step
    yield from _unwrapped(between)


def _is_rename(
    between: Between, old: str, new: str, changes: list[Owner], moved: Mapping[Owner, Owner]
) -> bool:
    """Whether what moved is known again: by the modules below it, or by all that it does."""
    if not old or not new:
        return True
    if f"{new}.".startswith(f"{old}.") or f"{old}.".startswith(f"{new}."):
        return False
    below = {template(owner or "") for owner in changes} - {old}
    return bool(below) or all(
        between.state[owner] is between.target.get(moved[owner]) for owner in changes
    )


def _unwrapped(between: Between) -> Iterator[Step]:
    """A whole that moved below a name, or out of it, with the root among it."""
    for names, others, wraps in (
        (between.state, between.target, True),
        (between.target, between.state, False),
    ):
        below = {owner.split(".")[0] for owner in others if owner}
        if len(below) != 1:
            continue
        prefix = next(iter(below))
        known = [owner for owner in names if owner]
        if known and all(f"{prefix}.{owner}" in others for owner in known):
            old, new = ("", prefix) if wraps else (prefix, "")
            for keeps_root in (True, False):
                step = Renamed(old=old, new=new, keeps_root=keeps_root)
                moved = [step.name(owner) for owner in between.state]
                if len(set(moved)) == len(moved):
                    yield step


def _without_common_end(old: str, new: str) -> tuple[str, str]:
    one, other = old.split("."), new.split(".")
    while one and other and one[-1] == other[-1]:
        one.pop()
        other.pop()
    return ".".join(one), ".".join(other)


def _layers(between: Between) -> Iterator[Step]:
    old, new = _lists(between.state), _lists(between.target)
    for prefix in sorted(set(old) & set(new)):
        before, after = _length(old[prefix]), _length(new[prefix])
        if before is None or after is None or before == after or not min(before, after):
            continue
        for at, period in _places(old[prefix], new[prefix], before, after):
            yield Layers(
                prefix=prefix,
                old=before,
                new=after,
                at=at,
                period=period,
                has_units=_has_units(between, prefix),
            )


def _has_units(between: Between, prefix: str) -> bool:
    """Whether each module of a list is gathered, so that none is unseen."""
    names = f"{prefix}.*" if prefix else "*"
    return all(
        gathers_of(content, Phase.FORWARD)
        for state in (between.state, between.target)
        for owner, content in state.items()
        if owner is not None and template(owner) == names
    ) and any(template(owner or "") == names for owner in between.state)


_Lists = dict[str, dict[str, dict[int, dict[str, int]]]]


def _lists(state: State) -> _Lists:
    """By prefix and instance: what each number of a list of modules holds, by relative name."""
    found: _Lists = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for owner, content in state.items():
        if not owner or "+" in owner:
            continue
        segments = owner.split(".")
        for depth, segment in enumerate(segments):
            if segment.isdecimal():
                instance = ".".join(segments[:depth])
                rest = ".".join(segments[depth + 1 :])
                found[template(instance)][instance][int(segment)][rest] = id(content)
    return found


def _length(instances: Mapping[str, Mapping[int, object]]) -> int | None:
    """How many modules each list has, with nothing missing; None if they differ."""
    lengths = {
        len(numbers) if set(numbers) == set(range(len(numbers))) else -1
        for numbers in instances.values()
    }
    length = lengths.pop()
    return None if lengths or length < 0 else length


def _places(
    old: Mapping[str, Mapping[int, Mapping[str, int]]],
    new: Mapping[str, Mapping[int, Mapping[str, int]]],
    before: int,
    after: int,
) -> Iterator[tuple[int, int]]:
    """Where layers may have come or gone, and with which period."""
    more = after - before
    sides = old, new
    numbers = next(iter(sides[0 if more > 0 else 1].values()))
    contents = [numbers[n] for n in range(min(before, after))]
    ends = [n for n in range(1, len(contents)) if contents[n] != contents[n - 1]]
    places = list(dict.fromkeys([len(contents), *reversed(ends)]))[:4]
    if more > 0:
        for at in places:
            for period in (1, 2, 3, 4):
                if period <= at and more % period == 0 and (period == 1 or ends):
                    yield at, period
        return
    for at in dict.fromkeys([*places, 0]):
        yield at, 1


def _ratios(pairs: Iterable[tuple[int, int, int]]) -> list[Fraction]:
    """The ratios that hold for most.

    Args:
        pairs: What was, what is, and in how many modules.
    """
    weights: Counter[tuple[int, int]] = Counter()
    for old, new, weight in pairs:
        if old and new and old != new:
            weights[old, new] += weight
    ratios: Counter[Fraction] = Counter()
    for (old, new), weight in weights.items():
        ratios[Fraction(new, old)] += weight
    return [
        ratio
        for ratio, _ in ratios.most_common(_MOST_RATIOS)
        if ratio.numerator * ratio.denominator <= _MOST_TERMS
    ]


def _counts(between: Between) -> Iterator[Step]:
    sends = any(
        fact.role == Role.ACTIVATIONS
        for content in _contents(between.state)
        for fact in content.facts
    )
    for scope in Scope:
        pairs = [
            (count_of(before), count_of(after), len(change.owners))
            for change in between.changes
            if change.content is not None
            for _, before, after in change.rows
            if before and after and in_scope(scope, next(iter(before)), change.content)
        ]
        for ratio in _ratios(pairs):
            # All divide, or nothing is that much less often.
            if ratio.denominator == 1 or all(
                count % ratio.denominator == 0
                for content in _contents(between.state)
                for fact, count in content.facts.items()
                if in_scope(scope, fact, content)
            ):
                # Other scopes leave no unit out.
                units = between.state.items() if scope is Scope.FORWARD else ()
                kept = (owner for owner, content in units if is_kept(content))
                yield Counts(scope=scope, factor=ratio, has_activations=sends, kept=tuple(kept))
                if scope in {Scope.UNREDUCED, Scope.UNREDUCED_OUTSIDE}:
                    for reductions in _ratios_of_reductions(between):
                        yield Counts(
                            scope=scope,
                            factor=ratio,
                            has_activations=sends,
                            reductions=reductions,
                        )


def _ratios_of_reductions(between: Between) -> list[Fraction]:
    """How much more often gradients are reduced, by whole numbers."""
    pairs = [
        (count_of(before), count_of(after), len(change.owners))
        for change in between.changes
        if change.content is not None
        for key, before, after in change.rows
        if key.axis and before and after
        if all(is_of_gradients(fact, change.content) for fact in before)
    ]
    return [ratio for ratio in _ratios(pairs) if ratio.denominator == 1]


def _contents(state: State) -> Iterable[Content]:
    """Each content once."""
    return {id(content): content for content in state.values()}.values()


def _divides(state: State, factor: Fraction, includes: Callable[[Fact], bool]) -> bool:
    """Whether the bytes of all facts that are meant can be scaled."""
    return factor.denominator == 1 or all(
        fact.nbytes % factor.denominator == 0
        for content in _contents(state)
        for fact in content.facts
        if includes(fact)
    )


def _activation_sizes(between: Between) -> Iterator[Step]:
    pairs = [
        (*sizes, len(change.owners))
        for change in between.changes
        for _, before, after in change.rows
        for sizes in [sizes_of(before, after)]
        if sizes is not None and role_of(before) == role_of(after) == Role.ACTIVATIONS
    ]
    for ratio in _ratios(pairs):
        for with_loss in (False, True):
            step = ActivationSizes(factor=ratio, with_loss=with_loss)
            if _divides(between.state, ratio, step.is_meant):
                yield step


def _dtypes(between: Between) -> Iterator[Step]:
    found: defaultdict[tuple[str, str, Fraction], defaultdict[tuple[str, str], set[Owner]]]
    found = defaultdict(lambda: defaultdict(set))
    for change in between.changes:
        for key, before, after in change.rows:
            sizes = sizes_of(before, after)
            old, new = {fact.dtype for fact in before}, {fact.dtype for fact in after}
            role = role_of(before)
            if not (sizes and all(sizes) and len(old) == len(new) == 1 and old != new):
                continue
            if not _follows(sizes, *old, *new):
                continue
            if role and role == role_of(after):
                factor = Fraction(sizes[1], sizes[0])
                found[old.pop(), new.pop(), factor][role, key.axis].update(change.owners)
    for (old_dtype, new_dtype, factor), owners in found.items():
        by_role = [{part for part in owners if part[0] == role} for role, _ in owners]
        choices = [set(owners), *by_role, *({part} for part in owners)]
        for parts in dict.fromkeys(map(frozenset, choices)):
            changed = frozenset(owner for part in parts for owner in owners[part])
            for some in (frozenset[Owner](), changed):
                step = Dtype(parts=parts, old=old_dtype, new=new_dtype, factor=factor, owners=some)
                if _divides(between.state, factor, step.is_meant):
                    yield step


_ITEMSIZES: Final = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def _follows(sizes: tuple[int, int], old: str, new: str) -> bool:
    """Whether bytes change as the element type does, where its size is known."""
    if old not in _ITEMSIZES or new not in _ITEMSIZES:
        return True
    return sizes[1] * _ITEMSIZES[old] == sizes[0] * _ITEMSIZES[new]


def _axis_sizes(between: Between) -> Iterator[Step]:
    found: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for change in between.changes:
        for key, before, after in change.rows:
            sizes = sizes_of(before, after)
            if role_of(before) == role_of(after) == Role.GRADIENTS and sizes is not None:
                found[key.axis].append((*sizes, len(change.owners)))
    for axis, pairs in found.items():
        for ratio in _ratios(pairs):
            step = AxisSizes(axis=axis, factor=ratio)
            if _divides(between.state, ratio, step.is_meant):
                yield step
