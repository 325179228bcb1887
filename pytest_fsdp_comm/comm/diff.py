"""Compares two profiles and says what changed, where, and probably why."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pytest_fsdp_comm.comm.causes import find_causes
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import CommProfile, Site, restrict
from pytest_fsdp_comm.text.fqn import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_fsdp_comm.comm.profile import Row, RowKey

_PHASE_ORDER: Final = {phase: place for place, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Count and bytes of one row, for some ranks."""

    count: int
    nbytes: int
    """Bytes on one rank; 0 where only counts are compared."""
    ranks: tuple[int, ...] = ()
    """The ranks for which it holds; empty for all."""


_Amounts: TypeAlias = tuple[Amount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row that differs, for every module in which it differs in the same way."""

    subject: Literal["collective", "reshard", "redistribution", "world_size", "mesh"]
    phase: Phase | None
    """None for a change of the world size or the mesh."""
    owners: tuple[str | None, ...] = ()
    """FQNs in natural order; None stands for no module."""
    what: str
    """E.g. ``all_gather[dp]``, ``unshard``, ``(Shard(dim=0))->(Replicate())``, ``world_size``."""
    before: tuple[Amount, ...] = ()
    """What the snapshot has; several where ranks differ; empty if the row is new."""
    after: tuple[Amount, ...] = ()
    """What was recorded; empty if the row is gone."""
    old_text: str = ""
    """For world size and mesh."""
    new_text: str = ""
    """For world size and mesh."""
    sites: tuple[Site, ...] = ()
    """Where the recorded collectives of the first owner were issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that differs between a snapshot and what was recorded."""

    changes: tuple[Change, ...]
    """Empty if nothing differs. Collectives first, in the order of the profile."""
    causes: tuple[str, ...] = ()
    """Probable causes, the most specific first; empty if no known pattern fits."""


def compare(old: CommProfile, new: CommProfile) -> Comparison:
    """Compares a snapshot with what was recorded.

    Where fewer ranks were recorded than the world has (the fake backend), only these are compared.

    Args:
        old: The snapshot.
        new: What was recorded.
    """
    if new.recorded_ranks and len(new.recorded_ranks) < new.world_size:
        old = restrict(old, new.recorded_ranks)
    sites = {row.key: row.sites for row in reversed(new.rows)}
    changes = [
        *_compare_frames(old, new),
        *_compare_rows("collective", old.rows, new.rows, sites),
        *_compare_rows("reshard", old.reshards, new.reshards, {}),
        *_compare_rows("redistribution", old.redistributions, new.redistributions, {}),
    ]
    return Comparison(changes=tuple(changes), causes=find_causes(old, new) if changes else ())


def _compare_frames(old: CommProfile, new: CommProfile) -> Iterable[Change]:
    def axes(profile: CommProfile) -> str:
        return " ".join(f"{axis.name}={axis.size}" for axis in profile.mesh_axes) or "none"

    pairs: tuple[tuple[Literal["world_size", "mesh"], str, str], ...] = (
        ("world_size", str(old.world_size), str(new.world_size)),
        ("mesh", axes(old), axes(new)),
    )
    for subject, before, after in pairs:
        if before != after:
            yield Change(subject=subject, phase=None, what=subject, old_text=before, new_text=after)


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


def _described(what: Sequence[str]) -> str:
    return f"{what[0]}[{what[1]}]" if len(what) > 1 else what[0]


def _by_key(rows: Iterable[Row]) -> dict[RowKey, _Amounts]:
    found: defaultdict[RowKey, list[Amount]] = defaultdict(list)
    for row in rows:
        amount = Amount(count=row.count, nbytes=row.nbytes, ranks=row.ranks)
        found[row.key].append(amount)
    return {key: tuple(amounts) for key, amounts in found.items()}
