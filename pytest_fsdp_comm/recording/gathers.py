"""How far ahead of its use FSDP gathers a unit, and how many bytes are gathered at once."""

# Note [Counting slots]
# Distance is counted in slots, not in time or bytes: each use of a unit, in forward or in backward,
# opens the next slot. A gather that a unit issues for itself has distance 0; one that is issued
# while the unit before it is used, 1. The count follows from the order of the calls alone, so that
# it is the same on every rank, on every backend and in every run.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Gather:
    """One gather of a unit's parameters: what its events have in common, until they are named."""

    slot: int
    ahead: int | None = None
    """How many slots later its unit was used; None until then."""
    dtypes: list[list[Any]] = field(default_factory=list)
    """What FSDP2 gathers of each parameter, and sends as uint8 if they differ; else empty."""


class Prefetches:
    """Count slots, and the distance of each gather from its use. See Note [Counting slots]."""

    def __init__(self) -> None:
        self._slot = 0
        self._user: tuple[Any, Any] = (None, None)
        self._unused: dict[Any, Gather] = {}

    def open_slot(self, phase: Any, user: Any) -> None:
        """Open the next slot, unless the last one is of the same user in the same phase."""
        # So that the parameter groups of one module open one slot, as do calls of one module that
        # follow each other (a loss in chunks). By identity: modules may define equality.
        last_phase, last_user = self._user
        if phase != last_phase or user is not last_user:
            self._slot += 1
            self._user = (phase, user)

    def begin(self) -> Gather:
        return Gather(self._slot)

    def issued(self, unit: Any, gather: Gather) -> None:
        self._unused[unit] = gather

    def used(self, unit: Any) -> None:
        """A unit's parameters are used; only the first use of a gather counts."""
        gather = self._unused.pop(unit, None)
        if gather is not None:
            gather.ahead = self._slot - gather.slot

    def freed(self, unit: Any) -> None:
        """A unit's parameters were freed: if nothing has used them by now, nothing will."""
        self._unused.pop(unit, None)


class GatheredMemory:
    """Follow what each unit holds beyond its own shard, and keep the largest sum."""

    def __init__(self) -> None:
        self._nbytes: dict[Any, int] = {}
        self._total = 0
        self.peak = 0

    def learn(self, unit: Any, held: Callable[[Any], int]) -> None:
        """Add a unit that is not known yet, just before its first change or when all is over."""
        # What it holds by then, it has held all the time: the peak rises by it, whenever the peak
        # was. A step therefore has the same peak whether it gathers the root, or finds it gathered
        # by an earlier forward.
        if unit not in self._nbytes:
            nbytes = self._nbytes[unit] = held(unit)
            self._total += nbytes
            self.peak += nbytes

    def hold(self, unit: Any, nbytes: int) -> None:
        """Note what a known unit holds from now on; 0 if only its own shard."""
        self._total += nbytes - self._nbytes[unit]
        self._nbytes[unit] = nbytes
        self.peak = max(self.peak, self._total)
