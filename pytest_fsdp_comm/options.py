"""Command line, ini and marker, parsed once into frozen values; every usage error lives here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["gloo", "nccl", "fake"]
Scope = Literal["test", "module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSettings:
    """How one test runs on ranks, after marker, options, ini values and defaults are resolved."""

    world_size: int
    """Ranks of the test's process group; at least 1."""
    backend: Backend
    """The backend of the default process group."""
    ranks: tuple[int, ...]
    """The ranks that really run, ascending: all of them, or the chosen ones with ``fake``."""
    scope: Scope
    """``test``: fresh ranks for each test; ``module``: kept for a module's tests of equal
    settings."""
    timeout_s: float
    """Seconds from the start of the ranks until they are dumped and killed; greater than 0."""
    device: str | None
    """``cpu``, ``cuda``; None lets the backend decide."""
