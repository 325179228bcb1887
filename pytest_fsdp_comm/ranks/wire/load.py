"""Scales time limits to the load of the machine."""

from __future__ import annotations

import os

# Time limits suffice for this many busy processes per core; if there are more, extend the limits.
_PER_CORE = 2


def extend_under_load(seconds: float) -> float:
    """Return `seconds`, or more if other processes compete for the cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / _PER_CORE)
