"""Compare two profiles: the changes, where they are, and their probable causes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, TypeAlias

from pytest_fsdp_comm.comm.calls import UNTIMED, Calls
from pytest_fsdp_comm.comm.cost import Cost, cost_of_change
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.causes import Cause, Inputs, find_causes, swapped_axes
from pytest_fsdp_comm.comm.explanation.search import Explanation, explain
from pytest_fsdp_comm.comm.explanation.steps import Evidence, Replaced, Step
from pytest_fsdp_comm.comm.explanation.training import (
    TrainingChange,
    find_training_changes,
    reports_step,
)
from pytest_fsdp_comm.comm.mesh import MeshAxis, show_mesh
from pytest_fsdp_comm.comm.profile import (
    CommProfile,
    Row,
    RowKey,
    Site,
    Subject,
    alike_but,
    comparable,
    step_order,
)
from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks, write_ranks

Place: TypeAlias = tuple[str | None, RowKey]
_Rows: TypeAlias = tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class NewCalls:
    """The sites of calls that the snapshot has fewer of."""

    sites: tuple[tuple[str | None, Site], ...] = ()
    """With the owner of each; all that have such calls."""
    is_certain: bool = True
    """Whether all of these sites issued new calls, rather than one or some of them."""

    @classmethod
    def join(cls, parts: Iterable[NewCalls]) -> NewCalls:
        """The sites of several rows."""
        held = tuple(parts)
        sites = dict.fromkeys(chain.from_iterable(one.sites for one in held))
        return cls(tuple(sites), all(one.is_certain for one in held))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row that differs, for every module in which it differs in the same way."""

    subject: Subject | Literal["frame", "memory", "answer"]
    phase: Phase | None
    """None for a change of the frame (world size, recorded ranks, mesh), of gathered bytes, and of
    a simulated rank's answers."""
    owners: tuple[str | None, ...] = ()
    """FQNs in natural order; None stands for no module."""
    what: str
    """E.g. ``all_gather[dp]``, ``unshard``, ``(Shard(dim=0))->(Replicate())``, ``world_size``."""
    before: tuple[Row, ...] = ()
    """What the snapshot has of the first owner; several where ranks differ; empty if it is new."""
    after: tuple[Row, ...] = ()
    """What was recorded of the first owner; empty if it is gone."""
    old_text: str = ""
    """Where there is no phase."""
    new_text: str = ""
    """Where there is no phase."""
    new_calls: NewCalls = NewCalls()
    """Those of all owners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between a snapshot and a recording."""

    changes: tuple[Change, ...]
    """Collectives first, in the order of the profile; empty if nothing differs."""
    explanation: Explanation | None = None
    """The explanation of differing rows; None if no rows differ."""
    left: tuple[Change, ...] = ()
    """Rows that the explanation leaves over, and changes of frame and memory."""
    causes: tuple[Cause, ...] = ()
    """Probable causes, regressions first."""
    recorded: Mapping[Place, _Rows] = field(default_factory=dict)
    """The rows that were recorded, with their sites."""
    training: tuple[TrainingChange | Step, ...] = ()
    """Changes that break training, worst first."""
    cost: Cost = field(default_factory=Cost)

    def new_calls(self, step: Replaced, owner: str | None, key: RowKey) -> NewCalls:
        """Where calls of a module were issued of which a step adds some."""
        rows = step.rows[owner]
        return _new_calls(
            owner,
            step.was[owner].get(key, ()),
            rows[key],
            self.recorded.get((owner, key), ()),
            is_of_dtensors=any(one.subject == "redistribution" for one in rows),
        )

    @property
    def told(self) -> tuple[TrainingChange | Step, ...]:
        """All that is told of the whole: what breaks training, regressions, the rest, torch's."""
        steps = () if self.explanation is None else self.explanation.steps
        # Of one dependence the step of forward is told before its counterpart in backward. By
        # identity: what a step writes is not hashable.
        places = {
            id(step): (not cause.is_of_regression, cause.is_of_torch)
            for cause in self.causes
            for step in cause.steps
        }
        others = sorted(
            (step for step in steps if not reports_step(self.training, step)),
            key=lambda step: (places.get(id(step), (True, False)), _is_counterpart(step)),
        )
        return (*self.training, *others)


def _is_said(training: Iterable[TrainingChange | Step], change: Change) -> bool:
    """Whether a row that is left over is all about gradients of which more is said."""
    rows = (*change.before, *change.after)
    return any(
        isinstance(one, TrainingChange)
        and all(one.covers(change.owners, row.key, row.calls) for row in rows)
        for one in training
    )


def _is_counterpart(step: Step) -> bool:
    """Whether it tells what backward has for a redistribution in forward."""
    return (
        isinstance(step, Replaced)
        and step.kind == "redistributed"
        and step.facts["phase"] is Phase.BACKWARD
    )


def compare(old: CommProfile, new: CommProfile, evidence: Evidence | None = None) -> Comparison:
    """Compare a snapshot with what was recorded, as far as it is comparable."""
    words = {True: "compared", False: "not compared"}
    sizes = words[old.sizes_activations], words[new.sizes_activations]
    old, new = comparable(old, new)
    frames = tuple(_compare_frames(old, new, sizes))
    recorded = _by_place(new.rows)
    rows = tuple(_compare_rows(old.rows, new.rows, recorded))
    if not (frames or rows):
        return Comparison(changes=())
    cost = cost_of_change(old, new)
    if not rows:
        causes = tuple(swapped_axes(old, new))
        return Comparison(changes=frames, left=frames, causes=causes, cost=cost)
    explanation = explain(old, new)
    causes = find_causes(
        explanation,
        Inputs(old=old, new=new, trees=evidence),
        is_same_mesh=all(one.subject != "frame" for one in frames),
    )
    of_torch = [step for cause in causes if cause.is_of_torch for step in cause.steps]
    training = find_training_changes(old, new, explanation.steps, evidence, of_torch)
    left = _compare_rows(explanation.before, explanation.after, recorded)
    return Comparison(
        changes=(*frames, *rows),
        explanation=explanation,
        left=(*frames, *(one for one in left if not _is_said(training, one))),
        causes=causes,
        training=training,
        recorded=recorded,
        cost=cost,
    )


def _compare_frames(old: CommProfile, new: CommProfile, sizes: tuple[str, str]) -> Iterable[Change]:
    def ranks(profile: CommProfile) -> str:
        return write_ranks(profile.recorded_ranks) or "all"

    def peak(profile: CommProfile) -> str:
        return " / ".join(
            f"{peak.nbytes:_} B{f' on {name_ranks(peak.ranks)}' if peak.ranks else ''}"
            for peak in profile.peaks
        )

    pairs: tuple[tuple[Literal["frame", "memory"], str, str, str], ...] = (
        ("frame", "world_size", str(old.world_size), str(new.world_size)),
        ("frame", "activation sizes", *sizes),
        ("frame", "recorded ranks", ranks(old), ranks(new)),
        ("frame", "mesh", *_meshes(old.mesh_axes, new.mesh_axes)),
        ("memory", "peak gathered", peak(old) or "0 B", peak(new) or "0 B"),
    )
    for subject, what, before, after in pairs:
        if before != after:
            yield Change(subject=subject, phase=None, what=what, old_text=before, new_text=after)
    sides = old.answers, new.answers
    for site, how in sorted({(one.site, one.how) for side in sides for one in side}):
        before, after = (
            ", ".join(one.value for one in side if (one.site, one.how) == (site, how)) or "nothing"
            for side in sides
        )
        if before != after:
            what = f"assumed value in {site} ({how})"
            yield Change(subject="answer", phase=None, what=what, old_text=before, new_text=after)


def _meshes(old: Sequence[MeshAxis], new: Sequence[MeshAxis]) -> tuple[str, str]:
    """Both meshes; equal if all that one lacks is an axis over which nothing is sent any more."""
    before, after = ({axis.name for axis in axes} for axes in (old, new))
    shared = before & after
    is_same = [axis for axis in old if axis.name in shared] == [
        axis for axis in new if axis.name in shared
    ]
    if is_same and shared and (before <= after or after <= before):
        return "", ""
    return show_mesh(old), show_mesh(new)


def _compare_rows(
    old: Iterable[Row], new: Iterable[Row], recorded: Mapping[Place, _Rows]
) -> Iterable[Change]:
    before, after = _by_place(old), _by_place(new)
    groups: dict[tuple[object, ...], list[Change]] = {}
    # The order of the new profile, with what is gone at its place among the old.
    for owner, key in sorted({**after, **before}, key=lambda place: step_order(place[1])):
        was, now = before.get((owner, key), ()), after.get((owner, key), ())
        if was == now:
            continue
        if not (was and now):
            # Of what came or went as a whole, prefetch distances are no part of the change.
            was, now = (
                tuple(replace(row, calls=alike_but(row.calls, ahead=0)) for row in rows)
                for rows in (was, now)
            )
        change = Change(
            subject=key.subject,
            phase=key.phase,
            owners=(owner,),
            what=str(key),
            before=was,
            after=now,
            new_calls=_new_calls(owner, was, now, recorded.get((owner, key), ())),
        )
        # What they say, whichever owner they have.
        amounts = (tuple((row.calls, row.ranks) for row in rows) for rows in (was, now))
        groups.setdefault((key, *amounts), []).append(change)
    for alike in groups.values():
        owners = sorted(
            (owner for change in alike for owner in change.owners),
            key=lambda name: natural_key(name or ""),
        )
        yield replace(
            alike[0],
            owners=tuple(owners),
            new_calls=NewCalls.join(change.new_calls for change in alike),
        )


def _new_calls(
    owner: str | None, was: _Rows, now: _Rows, recorded: _Rows, *, is_of_dtensors: bool = False
) -> NewCalls:
    """Find the sites by what calls are: a snapshot has no sites."""
    sites: dict[Site, None] = {}
    is_certain = True
    for row in now:
        before = [
            Counter({replace(one, count=0): one.count for one in alike_but(old.calls, **UNTIMED)})
            for old in was
            if _share_ranks(old, row)
        ]
        for call in alike_but(row.calls, **UNTIMED):
            kind = replace(call, count=0)
            more = call.count - min((some[kind] for some in before), default=0)
            for one in recorded if more > 0 else ():
                counts = Counter[str]()
                found = []
                for site in one.sites if _share_ranks(one, row) else ():
                    is_sender = site.is_of_dtensor or not is_of_dtensors
                    if is_sender and _kind_of(site.calls, call) == kind:
                        found.append(site)
                        counts[site.call_site] += site.calls.count
                # A line with more calls than all that are not new has new ones.
                least = counts.total() - more
                certain = {line for line, count in counts.items() if count > least}
                is_certain &= bool(certain) or not found
                lines = certain or counts
                sites |= dict.fromkeys(site for site in found if site.call_site in lines)
    return NewCalls(tuple((owner, site) for site in sites), is_certain)


def _kind_of(recorded: Calls, compared: Calls) -> Calls:
    """What recorded calls are, in all that is compared but when they are issued."""
    changes = {**UNTIMED, "count": 0}
    if compared.is_unsized:
        changes |= {"nbytes": 0, "is_unsized": True}
    return replace(recorded, **changes)


def _share_ranks(one: Row, other: Row) -> bool:
    return not (one.ranks and other.ranks and set(one.ranks).isdisjoint(other.ranks))


def _by_place(rows: Iterable[Row]) -> dict[Place, _Rows]:
    found: defaultdict[Place, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.owner, row.key].append(row)
    return {place: tuple(held) for place, held in found.items()}
