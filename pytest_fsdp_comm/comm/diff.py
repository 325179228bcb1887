"""Compares two profiles and says what changed, where, and probably why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pytest_fsdp_comm.comm.causes import Cause, find_causes
from pytest_fsdp_comm.comm.cost import Cost, cost_of_change
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.mesh import show_mesh
from pytest_fsdp_comm.comm.profile import (
    Calls,
    CommProfile,
    RowKey,
    Site,
    alike_but,
    restrict,
    without_activation_sizes,
    without_async,
)
from pytest_fsdp_comm.comm.story.facts import Rows
from pytest_fsdp_comm.comm.story.search import Story, explain
from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks, write_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_fsdp_comm.comm.evidence import Evidence
    from pytest_fsdp_comm.comm.links import Links
    from pytest_fsdp_comm.comm.profile import Row

_PHASE_ORDER: Final = {phase: place for place, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much one row is, for some ranks."""

    count: int
    calls: tuple[Calls, ...] = ()
    """As `Row.calls`."""
    ranks: tuple[int, ...] = ()
    """The ranks for which it holds; empty for all."""

    @property
    def nbytes(self) -> int:
        """Bytes on one rank; 0 where only counts are compared."""
        return sum(calls.count * calls.nbytes for calls in self.calls)


_Amounts: TypeAlias = tuple[Amount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row that differs, for every module in which it differs in the same way."""

    subject: Literal["collective", "reshard", "redistribution", "frame", "memory"]
    phase: Phase | None
    """None for a change of the frame (world size, recorded ranks, mesh) and of gathered bytes."""
    owners: tuple[str | None, ...] = ()
    """FQNs in natural order; None stands for no module."""
    what: str
    """E.g. ``all_gather[dp]``, ``unshard``, ``(Shard(dim=0))->(Replicate())``, ``world_size``."""
    before: tuple[Amount, ...] = ()
    """What the snapshot has; several where ranks differ; empty if the row is new."""
    after: tuple[Amount, ...] = ()
    """What was recorded; empty if the row is gone."""
    old_text: str = ""
    """Of frame and memory."""
    new_text: str = ""
    """Of frame and memory."""
    sites: tuple[Site, ...] = ()
    """Where the recorded collectives of the first owner were issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that differs between a snapshot and what was recorded."""

    changes: tuple[Change, ...]
    """All of it, one by one; empty if nothing differs. Collectives first, in the order of the
    profile."""
    story: Story | None = None
    """What explains rows that differ; None if no rows do."""
    left: tuple[Change, ...] = ()
    """What the story leaves over, and what is no row: frame and memory."""
    causes: tuple[Cause, ...] = ()
    """Readings of the story, those of regressions first; empty if none is known."""
    sites: Mapping[RowKey, tuple[Site, ...]] = field(default_factory=dict)
    """Where the recorded collectives of each row were issued."""
    cost: Cost = field(default_factory=Cost)
    """What the changes cost; nothing if nothing differs."""


def compare(
    old: CommProfile,
    new: CommProfile,
    links: Links | None = None,
    evidence: Evidence | None = None,
) -> Comparison:
    """Compares a snapshot with what was recorded.

    Where the snapshot has all ranks, but only some were recorded now (the fake backend), only these
    are compared. Where torch said on one side only which calls are asynchronous, none are compared
    for that. Where sizes of activations are compared on one side only, that is a change, and no
    size of any is another.

    Args:
        old: The snapshot.
        new: What was recorded.
        links: How fast axes are; None estimates no seconds.
        evidence: What the trees of the same test say; None if they were not compared.
    """
    if new.recorded_ranks and not old.recorded_ranks:
        old = restrict(old, new.recorded_ranks)
    if old.shows_async != new.shows_async:
        old, new = without_async(old), without_async(new)
    frames = tuple(_compare_frames(old, new))
    if old.sizes_activations != new.sizes_activations:
        old, new = without_activation_sizes(old), without_activation_sizes(new)
    sites = {row.key: row.sites for row in reversed(new.rows)}
    before = Rows(old.rows, old.reshards, old.redistributions)
    after = Rows(new.rows, new.reshards, new.redistributions)
    rows = tuple(_compare_all_rows(before, after, sites))
    if not (frames or rows):
        return Comparison(changes=())
    cost = cost_of_change(old, new, links)
    if not rows:
        return Comparison(changes=frames, left=frames, cost=cost)
    story = explain(old, new)
    return Comparison(
        changes=(*frames, *rows),
        story=story,
        left=(*frames, *_compare_all_rows(story.before, story.after, sites)),
        causes=find_causes(
            story, evidence, is_same_mesh=all(one.subject != "frame" for one in frames)
        ),
        sites=sites,
        cost=cost,
    )


def _compare_all_rows(
    old: Rows, new: Rows, sites: Mapping[RowKey, tuple[Site, ...]]
) -> Iterable[Change]:
    yield from _compare_rows("collective", old.collectives, new.collectives, sites)
    yield from _compare_rows("reshard", old.reshards, new.reshards, {})
    yield from _compare_rows("redistribution", old.redistributions, new.redistributions, {})


def _compare_frames(old: CommProfile, new: CommProfile) -> Iterable[Change]:
    def ranks(profile: CommProfile) -> str:
        return write_ranks(profile.recorded_ranks) or "all"

    def sizes(profile: CommProfile) -> str:
        return "compared" if profile.sizes_activations else "not compared"

    def peak(profile: CommProfile) -> str:
        return " / ".join(
            f"{peak.nbytes:_} B{f' on {name_ranks(peak.ranks)}' if peak.ranks else ''}"
            for peak in profile.peaks
        )

    pairs: tuple[tuple[Literal["frame", "memory"], str, str, str], ...] = (
        ("frame", "world_size", str(old.world_size), str(new.world_size)),
        ("frame", "activation sizes", sizes(old), sizes(new)),
        ("frame", "recorded ranks", ranks(old), ranks(new)),
        ("frame", "mesh", show_mesh(old.mesh_axes), show_mesh(new.mesh_axes)),
        ("memory", "peak gathered", peak(old) or "0 B", peak(new) or "0 B"),
    )
    for subject, what, before, after in pairs:
        if before != after:
            yield Change(subject=subject, phase=None, what=what, old_text=before, new_text=after)


def _compare_rows(
    subject: Literal["collective", "reshard", "redistribution"],
    old: Iterable[Row],
    new: Iterable[Row],
    sites: Mapping[RowKey, tuple[Site, ...]],
) -> Iterable[Change]:
    before, after = _by_key(old), _by_key(new)
    groups: dict[tuple[Phase, str, _Amounts, _Amounts], list[RowKey]] = {}
    # The order of the new profile, with what is gone at its place among the old.
    for key in sorted({**after, **before}, key=lambda key: _PHASE_ORDER[key[0]]):
        was, now = before.get(key, ()), after.get(key, ())
        if was != now:
            if not (was and now):
                # Of what came or went as a whole, prefetch distances are no part of the change.
                was, now = _without_ahead(was), _without_ahead(now)
            phase, _, what = key
            groups.setdefault((phase, _described(what), was, now), []).append(key)
    for (phase, described, was, now), keys in groups.items():
        owners = sorted((owner for _, owner, _ in keys), key=lambda name: natural_key(name or ""))
        yield Change(
            subject=subject,
            phase=phase,
            owners=tuple(owners),
            what=described,
            before=was,
            after=now,
            sites=sites.get(keys[0], ()),
        )


def _without_ahead(amounts: _Amounts) -> _Amounts:
    return tuple(replace(amount, calls=alike_but(amount.calls, ahead=0)) for amount in amounts)


def _described(what: Sequence[str]) -> str:
    return f"{what[0]}[{what[1]}]" if len(what) > 1 else what[0]


def _by_key(rows: Iterable[Row]) -> dict[RowKey, _Amounts]:
    found: defaultdict[RowKey, list[Amount]] = defaultdict(list)
    for row in rows:
        amount = Amount(count=row.count, calls=row.calls, ranks=row.ranks)
        found[row.key].append(amount)
    return {key: tuple(amounts) for key, amounts in found.items()}
