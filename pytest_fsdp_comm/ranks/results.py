"""What one rank did with one test."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Stopped(StrEnum):
    """Why a rank that still ran was ended."""

    AFTER_FAILURE = "after failure"
    """Another rank had failed, and the grace period was over."""
    AT_DEADLINE = "at deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """One rank's part in one test."""

    rank: int
    """The rank, from 0."""
    reports: tuple[tuple[dict[str, Any], float], ...]
    """Serialized reports of the phases that ended, each with the rank's `time.time`."""
    warnings: tuple[dict[str, Any], ...]
    """Serialized warnings."""
    payloads: list[Any] | None
    """What the extensions sent; None if the rank did not come so far."""
    escaped: str | None
    """The exception that went through pytest's protocol, such as ``Exit``; None if none did."""
    status: int | None
    """Exit status, or minus the signal's number, of a rank that ended on its own; None if it
    finished the test."""
    ended_at: float | None
    """`time.time` of an end before the end of the test; None if it finished the test."""
    stopped: Stopped | None
    """Why the supervisor ended it; None if it did not."""
    timeout_s: float | None = None
    """The timeout of pytest-timeout that ran out; None if it was the test's deadline or none."""
    stacks: str
    """Where it was when it was stopped, innermost frame first; empty if unknown."""
    unreported: dict[str, str]
    """What it printed in the phase that it did not end, by ``stdout`` and ``stderr``; empty if it
    finished the test."""
