"""Compares two profiles and says what changed, where, and probably why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pytest_fsdp_comm.comm.causes import find_causes
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.comm.profile import CommProfile, Site, restrict
from pytest_fsdp_comm.text.fqn import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Count and bytes of one row, for some ranks."""

    count: int
    nbytes: int
    """Bytes on one rank; 0 where only counts are compared."""
    ranks: tuple[int, ...] = ()
    """The ranks for which it holds; empty for all."""


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
    changes = [
        *_compare_frames(old, new),
        *_compare_rows("collective", old.rows, new.rows),
        *_compare_rows("reshard", old.reshards, new.reshards),
        *_compare_rows("redistribution", old.redistributions, new.redistributions),
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
    old: Sequence[Any],
    new: Sequence[Any],
) -> Iterable[Change]:
    before, after = _by_key(old), _by_key(new)
    sites = {row.key: row.sites for row in reversed(new)} if subject == "collective" else {}
    groups: dict[Any, list[Any]] = {}
    # The order of the new profile, with what is gone at its place among the old.
    for key in _merged_order(before, after):
        if before.get(key) != after.get(key):
            phase, _, *what = key
            content = (phase, _what(what), before.get(key, ()), after.get(key, ()))
            groups.setdefault(content, []).append(key)
    for (phase, what, was, now), keys in groups.items():
        owners = sorted((key[1] for key in keys), key=lambda name: natural_key(name or ""))
        yield Change(
            subject=subject,
            phase=phase,
            owners=tuple(owners),
            what=what,
            before=was,
            after=now,
            sites=sites.get(keys[0], ()),
        )


def _what(parts: Sequence[str]) -> str:
    return f"{parts[0]}[{parts[1]}]" if len(parts) > 1 else parts[0]


def _by_key(rows: Iterable[Any]) -> dict[Any, tuple[Amount, ...]]:
    found: dict[Any, list[Amount]] = {}
    for row in rows:
        amount = Amount(count=row.count, nbytes=getattr(row, "nbytes", 0), ranks=row.ranks)
        found.setdefault(row.key, []).append(amount)
    return {key: tuple(amounts) for key, amounts in found.items()}


def _merged_order(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[Any]:
    order = {phase: place for place, phase in enumerate(Phase)}
    return sorted({**after, **before}, key=lambda key: order[key[0]])
