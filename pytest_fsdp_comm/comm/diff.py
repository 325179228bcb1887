"""Compare a recording with a snapshot: find changes, explain them, and look for likely causes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, TypeAlias

from pytest_fsdp_comm.comm.calls import UNTIMED, Calls
from pytest_fsdp_comm.comm.cost import Cost, cost_of_change
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.explanation.causes import Cause, find_causes
from pytest_fsdp_comm.comm.explanation.evidence import Evidence, Recordings
from pytest_fsdp_comm.comm.explanation.overlap import ExposureChange, find_exposure_changes
from pytest_fsdp_comm.comm.explanation.passes import Redistributed
from pytest_fsdp_comm.comm.explanation.search import Explanation, explain
from pytest_fsdp_comm.comm.explanation.steps import Replaced, Step, rename_rows
from pytest_fsdp_comm.comm.explanation.training import (
    TrainingChange,
    find_training_changes,
    reports_step,
)
from pytest_fsdp_comm.comm.mesh import MeshAxis, group_counts, name_mesh_change, show_mesh
from pytest_fsdp_comm.comm.profile import (
    CommProfile,
    Row,
    RowKey,
    Site,
    Subject,
    make_comparable,
    replace_fields,
    subject_and_phase_sort_key,
)
from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.text.rank_lists import name_ranks, write_ranks
from pytest_fsdp_comm.text.words import show_count

OwnerAndKey: TypeAlias = tuple[str | None, RowKey]
_Rows: TypeAlias = tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class NewCalls:
    """The lines of code that issued calls missing from the snapshot."""

    sites: tuple[tuple[str | None, Site], ...] = ()
    """The owner and the site of each line that may have issued new calls."""
    is_certain: bool = True
    """Whether it is certain that each of the `sites` issued a new call."""

    @classmethod
    def join(cls, parts: Iterable[NewCalls]) -> NewCalls:
        parts = tuple(parts)
        sites = dict.fromkeys(chain.from_iterable(part.sites for part in parts))
        return cls(tuple(sites), all(part.is_certain for part in parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two profiles, and all modules that have it."""

    subject: Subject | Literal["frame", "memory", "answer"]
    phase: Phase | None
    """None if the difference is not in rows, but in the frame (world size, activation sizes,
    recorded ranks, mesh), in the peak of gathered bytes, or in an assumed value."""
    owners: tuple[str | None, ...] = ()
    """FQNs in natural order; None for rows without a module."""
    what: str
    """What differs, such as ``all_gather[dp]``, ``unshard``, ``(Shard(dim=0))->(Replicate())`` or
    ``world_size``."""
    before: tuple[Row, ...] = ()
    """The snapshot's rows for the first owner: several if ranks differ, empty if there are none."""
    after: tuple[Row, ...] = ()
    """The recording's rows for the first owner; see `before`."""
    old_text: str = ""
    new_text: str = ""
    """`old_text` and `new_text` are the two values; both are empty if the difference is in rows. If
    only `old_text` is empty, `new_text` says what changed."""
    new_calls: NewCalls = NewCalls()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between a snapshot and a recording."""

    changes: tuple[Change, ...]
    """Changes without a phase, then changed rows in profile order; empty if nothing differs."""
    explanation: Explanation | None = None
    """None if no rows differ."""
    remaining: tuple[Change, ...] = ()
    """The changes that the explanation does not cover."""
    causes: tuple[Cause, ...] = ()
    """Likely causes, regressions first."""
    recorded: Mapping[OwnerAndKey, _Rows] = field(default_factory=dict)
    """The rows of the recording, with their sites, keyed by owner and row key."""
    training: tuple[TrainingChange | Step, ...] = ()
    """Changes that break training, worst first."""
    reported: tuple[TrainingChange | Step, ...] = ()
    """The changes in `training`, then other changes of gradients, regressions, and other steps."""
    sentences: tuple[str, ...] = ()
    """One line for each change in `reported`; true of both recordings."""
    exposures: tuple[ExposureChange, ...] = ()
    """Calls that are exposed now, or no longer, on simulated ranks."""
    cost: Cost = field(default_factory=Cost)

    def new_calls(self, step: Replaced, owner: str | None, key: RowKey) -> NewCalls:
        """Find the lines that issued the calls that a step adds to these rows of the owner."""
        rows = step.rows[owner]
        return _find_new_call_sites(
            owner,
            step.old_rows[owner].get(key, ()),
            rows[key],
            self.recorded.get((owner, key), ()),
            is_of_dtensors=any(changed.subject == "redistribution" for changed in rows),
        )


def _is_covered_by_problem(training: Iterable[TrainingChange | Step], change: Change) -> bool:
    """Whether the report of one training problem already covers all rows of a remaining change."""
    rows = (*change.before, *change.after)
    return any(
        isinstance(item, TrainingChange)
        and all(item.covers(change.owners, row.key, row.calls) for row in rows)
        for item in training
    )


def _sort_unreported_steps(
    steps: Iterable[Step],
    training: Sequence[TrainingChange | Step],
    causes: Iterable[Cause],
) -> list[Step]:
    """Sort the steps that `training` does not report: regressions first, changes of torch last."""
    # Use ids as keys, because steps are not hashable.
    order = {
        id(step): (not cause.is_of_regression, cause.is_of_torch)
        for cause in causes
        for step in cause.steps
    }
    # A redistribution in forward comes before its counterpart in backward.
    return sorted(
        (step for step in steps if not reports_step(training, step)),
        key=lambda step: (order.get(id(step), (True, False)), _is_redistribution_in_backward(step)),
    )


def _is_redistribution_in_backward(step: Step) -> bool:
    return isinstance(step, Redistributed) and step.phase is Phase.BACKWARD


def compare(old: CommProfile, new: CommProfile, evidence: Evidence | None = None) -> Comparison:
    """Compare two profiles (see Note [Comparable]), and explain the diff."""
    words = {True: "compared", False: "not compared"}
    sizes = words[old.sizes_activations], words[new.sizes_activations]
    complete = old, new
    old, new = make_comparable(old, new)
    frames = tuple(_compare_run_facts(old, new, sizes))
    recorded = _group_rows_by_owner_and_key(new.rows)
    rows = tuple(_compare_rows(old.rows, new.rows, recorded))
    if not (frames or rows):
        return Comparison(changes=())
    cost = cost_of_change(old, new)
    explanation = explain(old, new)
    backwards = [
        {call.backwards for row in side.collectives for call in row.calls} - {""}
        for side in complete
    ]
    recordings = Recordings(
        old=old,
        renamed=rename_rows(old, explanation.steps),
        new=new,
        trees=evidence,
        has_same_backwards=backwards[0] == backwards[1] != set(),
    )
    causes = find_causes(
        explanation,
        recordings,
        is_same_mesh=not any(change.subject == "frame" and change.old_text for change in frames),
    )
    of_torch = [step for cause in causes if cause.is_of_torch for step in cause.steps]
    training, others = find_training_changes(recordings, explanation.steps, of_torch)
    of_gradients = (*training, *others)
    reported = (*of_gradients, *_sort_unreported_steps(explanation.steps, of_gradients, causes))
    remaining = _compare_rows(explanation.before, explanation.after, recorded)
    return Comparison(
        changes=(*frames, *rows),
        explanation=explanation,
        remaining=(
            *frames,
            *(item for item in remaining if not _is_covered_by_problem(of_gradients, item)),
        ),
        causes=causes,
        training=training,
        reported=reported,
        sentences=tuple(change.describe(recordings) for change in reported),
        recorded=recorded,
        exposures=find_exposure_changes(recordings),
        cost=cost,
    )


def _compare_run_facts(
    old: CommProfile, new: CommProfile, sizes: tuple[str, str]
) -> Iterable[Change]:
    def write_recorded_ranks(profile: CommProfile) -> str:
        return write_ranks(profile.recorded_ranks) or "all"

    def write_peaks(profile: CommProfile) -> str:
        return " / ".join(
            f"{peak.nbytes:_} B{f' on {name_ranks(peak.ranks)}' if peak.ranks else ''}"
            for peak in profile.peaks
        )

    pairs: tuple[tuple[Literal["frame", "memory"], str, str, str], ...] = (
        ("frame", "world_size", str(old.world_size), str(new.world_size)),
        ("frame", "activation sizes", *sizes),
        ("frame", "recorded ranks", write_recorded_ranks(old), write_recorded_ranks(new)),
        (
            "frame",
            name_mesh_change(old.mesh_axes, new.mesh_axes),
            *_describe_changed_meshes(old.mesh_axes, new.mesh_axes),
        ),
        ("memory", "peak gathered", write_peaks(old) or "0 B", write_peaks(new) or "0 B"),
    )
    for subject, what, before, after in pairs:
        if before != after:
            yield Change(subject=subject, phase=None, what=what, old_text=before, new_text=after)
    yield from _compare_group_counts(old.mesh_axes, new.mesh_axes)
    sides = old.answers, new.answers
    for key in sorted({(answer.site, answer.how) for side in sides for answer in side}):
        before, after = (
            ", ".join(item.value for item in side if (item.site, item.how) == key) for side in sides
        )
        if before != after:
            what = f"assumed value in {key[0]} ({key[1]})"
            now = (after if before else f"now {after}") or "none"
            yield Change(subject="answer", phase=None, what=what, old_text=before, new_text=now)


def _compare_group_counts(old: Iterable[MeshAxis], new: Iterable[MeshAxis]) -> Iterable[Change]:
    counts = group_counts(old)
    for axis, after in group_counts(new).items():
        before = counts.get(axis, after)
        if before != after:
            text = f"{axis.name} now has {show_count(after, 'process group')} instead of {before}"
            text += ", e.g. by new_group() in each module or step" if after > before else ""
            yield Change(subject="frame", phase=None, what="mesh", new_text=text)


def _describe_changed_meshes(old: Sequence[MeshAxis], new: Sequence[MeshAxis]) -> tuple[str, str]:
    """Describe both meshes; return two empty strings if one only adds axes to the other."""
    before, after = ({axis.name for axis in axes} for axes in (old, new))
    shared = before & after
    is_same = [axis for axis in old if axis.name in shared] == [
        axis for axis in new if axis.name in shared
    ]
    if not (before and after) or (is_same and shared and (before <= after or after <= before)):
        return "", ""
    return show_mesh(old), show_mesh(new)


def _compare_rows(
    old: Iterable[Row], new: Iterable[Row], recorded: Mapping[OwnerAndKey, _Rows]
) -> Iterable[Change]:
    before, after = _group_rows_by_owner_and_key(old), _group_rows_by_owner_and_key(new)
    groups: dict[tuple[object, ...], list[Change]] = {}
    # Use the order of the new profile. In each phase, removed rows come last, in their old order.
    for owner, key in sorted(
        {**after, **before}, key=lambda pair: subject_and_phase_sort_key(pair[1])
    ):
        was, now = before.get((owner, key), ()), after.get((owner, key), ())
        if was == now:
            continue
        if not (was and now):
            # Do not print prefetch distances of added or removed rows.
            was, now = (
                tuple(replace(row, calls=replace_fields(row.calls, ahead=0)) for row in rows)
                for rows in (was, now)
            )
        change = Change(
            subject=key.subject,
            phase=key.phase,
            owners=(owner,),
            what=str(key),
            before=was,
            after=now,
            new_calls=_find_new_call_sites(owner, was, now, recorded.get((owner, key), ())),
        )
        # Merge changes that differ only in their owner.
        amounts = (tuple((row.calls, row.ranks) for row in rows) for rows in (was, now))
        groups.setdefault((key, *amounts), []).append(change)
    for changes in groups.values():
        owners = sorted(
            (owner for change in changes for owner in change.owners),
            key=lambda name: natural_key(name or ""),
        )
        yield replace(
            changes[0],
            owners=tuple(owners),
            new_calls=NewCalls.join(change.new_calls for change in changes),
        )


def _find_new_call_sites(
    owner: str | None, was: _Rows, now: _Rows, recorded: _Rows, *, is_of_dtensors: bool = False
) -> NewCalls:
    """Find the lines that issued new calls. Snapshots store no lines, so compare call fields."""
    sites: dict[Site, None] = {}
    is_certain = True
    for row in now:
        before = [
            Counter(
                {
                    replace(call, count=0): call.count
                    for call in replace_fields(old.calls, **UNTIMED)
                }
            )
            for old in was
            if _have_common_ranks(old, row)
        ]
        for call in replace_fields(row.calls, **UNTIMED):
            kind = replace(call, count=0)
            num_new = call.count - min((counts[kind] for counts in before), default=0)
            for recorded_row in recorded if num_new > 0 else ():
                counts = Counter[str]()
                candidates = []
                for site in recorded_row.sites if _have_common_ranks(recorded_row, row) else ():
                    is_sender = site.is_of_dtensor or not is_of_dtensors
                    if is_sender and _clear_uncompared_fields(site.calls, call) == kind:
                        candidates.append(site)
                        counts[site.call_site] += site.calls.count
                # If a line issued more of these calls than the snapshot has, one of them is new.
                num_old = counts.total() - num_new
                certain = {line for line, count in counts.items() if count > num_old}
                is_certain &= bool(certain) or not candidates
                lines = certain or counts
                sites |= dict.fromkeys(site for site in candidates if site.call_site in lines)
    return NewCalls(tuple((owner, site) for site in sites), is_certain)


def _clear_uncompared_fields(recorded: Calls, compared: Calls) -> Calls:
    """Clear the timing and count of recorded calls; if `compared` has no size, clear the sizes."""
    changes = {**UNTIMED, "count": 0}
    if compared.is_unsized:
        changes |= {"nbytes": 0, "is_unsized": True}
    return replace(recorded, **changes)


def _have_common_ranks(first: Row, second: Row) -> bool:
    return not (first.ranks and second.ranks and set(first.ranks).isdisjoint(second.ranks))


def _group_rows_by_owner_and_key(rows: Iterable[Row]) -> dict[OwnerAndKey, _Rows]:
    groups: defaultdict[OwnerAndKey, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.owner, row.key].append(row)
    return {owner_and_key: tuple(group) for owner_and_key, group in groups.items()}
