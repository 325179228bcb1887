"""Explain where the host waits, and which calls nothing can hide any more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_fsdp_comm.comm.calls import Calls
from pytest_fsdp_comm.comm.cost import Volume
from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.explanation.evidence import Recordings
from pytest_fsdp_comm.comm.explanation.states import (
    Between,
    Owner,
    count_calls,
    role_of,
    sort_owners,
)
from pytest_fsdp_comm.comm.explanation.steps import Replaced, Step
from pytest_fsdp_comm.comm.explanation.words import name_times, name_with_phase
from pytest_fsdp_comm.comm.profile import Row, RowKey
from pytest_fsdp_comm.text.words import show_count, show_nbytes


@dataclass(frozen=True, kw_only=True)
class Waits(Replaced):
    """The host waits for the GPU in other places, or more or less often."""

    way: str
    """How the host waits, such as ``item`` or ``copy_to_host``."""
    phase: Phase

    @property
    def description_cost(self) -> float:
        # Rows of host waits cost little, but say nothing about what they expose.
        return 0.5

    @classmethod
    def propose(cls, between: Between) -> Iterator[Step]:
        groups: defaultdict[tuple[RowKey, bool], dict[Owner, list[RowKey]]] = defaultdict(dict)
        for group in between.differences:
            for key, before, after in group.rows:
                if key.subject == "host_wait" and count_calls(before) != count_calls(after):
                    is_added = count_calls(after) > count_calls(before)
                    chosen = [key]
                    groups[key, is_added].update(dict.fromkeys(group.owners, chosen))
        for (key, is_added), keys in groups.items():
            yield from cls.propose_copied_rows(
                between, keys, is_added=is_added, way=key.what, phase=key.phase
            )

    def describe(self, recordings: Recordings) -> str:
        where = name_with_phase(self.owners, self.phase)
        old, new = (
            sum(count_calls(rows) for side in sides.values() for rows in side.values())
            for sides in (self.old_rows, self.rows)
        )
        if not new:
            return f"{where}: the host no longer waits for the GPU ({self.way})"
        now, often = ("", f"{old} -> {new} times") if old else ("now ", name_times(new))
        text = f"{where}: the host {now}waits for the GPU {often} ({self.way})"
        is_harmless = self.is_added and not any(
            change.is_lost for change in find_exposure_changes(recordings)
        )
        return f"{text}, which exposes no call" if is_harmless else text

    @property
    def is_regression(self) -> bool:
        return self.is_added


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposureChange:
    """Calls that nothing can hide any more, or that something can hide now."""

    key: RowKey
    owners: tuple[Owner, ...]
    """The new names of the owners, in natural order."""
    is_lost: bool
    """Whether more calls are exposed now."""
    changed: Volume
    """The calls that changed, on one rank."""
    is_whole: bool
    """Whether all calls of these rows changed."""
    is_async: bool
    """Whether all exposed calls are asynchronous."""
    is_of_parameters: bool

    def has_changed(self, calls: Calls) -> bool:
        """Whether calls of the new recording are exposed now, or no longer."""
        return calls.exposed == self.is_lost

    def describe(self) -> str:
        """Describe which calls changed, and how much they send per rank."""
        calls = "gathers" if self.is_of_parameters else str(self.key)
        some = "" if self.is_whole else "some "
        how = "can no longer be hidden" if self.is_lost else "can be hidden now"
        nbytes = f", {show_nbytes(self.changed.nbytes)}" if self.changed.nbytes else ""
        amount = f"{show_count(self.changed.count, 'call')}{nbytes} per rank"
        return f"{some}{calls} of {name_with_phase(self.owners, self.key.phase)} {how}: {amount}"


def find_exposure_changes(recordings: Recordings) -> tuple[ExposureChange, ...]:
    """Compare the exposed calls of rows that both recordings have; lost overlap comes first."""
    if not recordings.new.shows_overlap:
        return ()
    old_rows = {(row.owner, row.key, row.ranks): row for row in recordings.renamed.collectives}
    groups: defaultdict[tuple[RowKey, bool, bool], dict[Row, Volume]] = defaultdict(dict)
    for row in recordings.new.collectives:
        before = old_rows.get((row.owner, row.key, row.ranks))
        if before is None:
            continue
        (old_exposed, old_hidden), (exposed, hidden) = map(_split_by_exposure, (before, row))
        is_lost = exposed.count > old_exposed.count
        more, fewer = _subtract(exposed, old_exposed), _subtract(old_hidden, hidden)
        if not is_lost:
            more, fewer = _subtract(hidden, old_hidden), _subtract(old_exposed, exposed)
        # If calls were added or removed, as by a second forward, these two differ.
        changed = min(more, fewer, key=lambda volume: volume.count)
        if row.count == before.count and row.nbytes != before.nbytes:
            # The bytes exposed before and now are those of calls of other sizes.
            changed = Volume(count=changed.count)
        if changed.count > 0:
            sides = ((old_exposed, old_hidden), (exposed, hidden))
            is_whole = all(min(part.count for part in side) == 0 for side in sides)
            groups[row.key, is_lost, is_whole][row] = changed
    changes = [
        ExposureChange(
            key=key,
            owners=sort_owners({row.owner for row in rows}),
            is_lost=is_lost,
            changed=sum(rows.values(), Volume()),
            is_whole=is_whole,
            is_async=all(call.is_async for row in rows for call in row.calls if call.exposed),
            is_of_parameters=role_of(tuple(rows)) == Role.PARAMETERS,
        )
        for (key, is_lost, is_whole), rows in groups.items()
    ]
    return tuple(sorted(changes, key=lambda change: (not change.is_lost, -change.changed.nbytes)))


def _split_by_exposure(row: Row) -> tuple[Volume, Volume]:
    """Return the exposed calls of a row, and the others."""
    exposed = Volume(
        count=sum(call.count for call in row.calls if call.exposed), nbytes=row.exposed_nbytes
    )
    return exposed, _subtract(Volume(count=row.count, nbytes=row.nbytes), exposed)


def _subtract(volume: Volume, less: Volume) -> Volume:
    return Volume(count=volume.count - less.count, nbytes=volume.nbytes - less.nbytes)
