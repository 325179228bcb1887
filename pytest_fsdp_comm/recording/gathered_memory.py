"""How many bytes of parameters are gathered at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class GatheredMemory:
    """Follow what each unit holds beyond its own shard, and keep the largest sum."""

    def __init__(self) -> None:
        """Start with no unit."""
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
