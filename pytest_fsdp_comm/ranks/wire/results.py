"""What one rank did with one test."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Stopped(StrEnum):
    """Why a rank that still ran was ended."""

    AFTER_FAILURE = "after failure"
    """Another rank had failed, and the grace period was over."""
    AT_DEADLINE = "at deadline"
    TOO_MUCH_OUTPUT = "too much output"
    """Its output took more of the disk than it may."""


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
    position: dict[str, Any] | None = None
    """Where it was when the set was stopped, as `position.read_position`, with ``is_over`` if it
    had finished the test; None if nobody asked, or it did not answer."""
    lost: str = ""
    """What is known of a rank that is gone with the process that should tell of it, to be read
    after its name; empty if that process answered."""

    @classmethod
    def of_lost(cls, rank: int, text: str) -> RankResult:
        """Of a rank of which nobody can tell more than this text (see `lost`)."""
        return cls(
            rank=rank,
            reports=(),
            warnings=(),
            payloads=None,
            escaped=None,
            status=None,
            ended_at=None,
            stopped=None,
            stacks="",
            unreported={},
            lost=text,
        )

    def to_json(self) -> dict[str, Any]:
        """As values that JSON can carry."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any], *, clock_offset_s: float) -> RankResult:
        """Reads what `to_json` gave.

        Args:
            values: From another process.
            clock_offset_s: Added to every time, all of which are by that process's clock.
        """
        reports = []
        for report, at in values["reports"]:
            for name in ("start", "stop"):
                if report.get(name) is not None:
                    report[name] += clock_offset_s
            reports.append((report, at + clock_offset_s))
        ended_at, stopped = values["ended_at"], values["stopped"]
        changed = {
            "reports": tuple(reports),
            "warnings": tuple(values["warnings"]),
            "ended_at": None if ended_at is None else ended_at + clock_offset_s,
            "stopped": None if stopped is None else Stopped(stopped),
        }
        return cls(**{**values, **changed})
