"""What one rank did with one test."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pytest_fsdp_comm.ranks.wire.positions import Position


class Stopped(StrEnum):
    """Why a rank that still ran was ended."""

    AFTER_FAILURE = "after failure"
    """Another rank had failed, and the grace period was over."""
    AT_DEADLINE = "at deadline"
    """The test, or what pytest-timeout limits, ran out of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """A report that pytest made in a rank: of a phase, or of a subtest within one."""

    report: dict[str, Any]
    """As ``pytest_report_to_serializable`` gives it, with a ``stop``: `time.time` on the rank."""
    is_subtest: bool = False
    """Whether the phase goes on after it."""
    precedes_debugger: bool = False
    """Whether a debugger follows, so the other ranks must wait."""
    nbytes_reported: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of ``stdout`` and ``stderr`` that reports hold; the rest is in its logs alone."""

    @property
    def has_failed(self) -> bool:
        """Whether the phase or subtest failed."""
        return bool(self.report["outcome"] == "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningSeen:
    """A warning that a rank's test gave; see `pytest.hookspec.pytest_warning_recorded`."""

    text: str
    category_module: str
    category_name: str
    filename: str
    lineno: int
    when: str
    nodeid: str
    location: tuple[str, int, str] | None
    """File, line and function, where pytest knows them."""


@dataclass(slots=True, kw_only=True)
class RankResult:
    """What one rank did with one test so far: its supervisor writes here until the test ends."""

    rank: int
    reports: tuple[PhaseReport, ...] = ()
    """The phases and subtests that ended, in order."""
    has_failed_phase: bool = False
    """Whether a phase failed; after a failed subtest the test goes on."""
    warnings: tuple[WarningSeen, ...] = ()
    is_done: bool = False
    payloads: tuple[str, ...] | None = None
    """What each extension sent; None if the rank did not come so far."""
    further_ranks: tuple[int, ...] = ()
    """As of `TestEnded`."""
    escaped: str | None = None
    """The exception that went through pytest's protocol, such as ``Exit``; None if none did."""
    entered_debugger: bool = False
    skipped_debuggers: tuple[str, ...] = ()
    """Where it came to a debugger and went on, as ``file:line``."""
    status: int | None = None
    """Exit status, or minus the signal's number, of a process that ended early; else None."""
    ended_at: float | None = None
    """`time.time` of an end before the end of the test; None if it finished the test."""
    stopped: Stopped | None = None
    """Why the supervisor ended it; None if it did not."""
    timeout_s: float | None = None
    """The timeout of pytest-timeout that ran out; None if it was the test's deadline or none."""
    unreported: dict[str, str] = dataclasses.field(default_factory=dict)
    """What its unfinished phase printed, by ``stdout`` and ``stderr``; empty if it finished."""
    position: Position | None = None
    """Where it was when the rank set was stopped; None if it was not, or did not answer."""
    lost: str = ""
    """What became of a rank whose process was lost, to be read after its name; else empty."""

    @property
    def is_over(self) -> bool:
        """Whether no more of this test can come from the rank."""
        return self.is_done or self.status is not None or bool(self.lost)

    @property
    def has_died(self) -> bool:
        """Whether the rank left the test before its end, on its own."""
        return self.status is not None or self.escaped is not None or bool(self.lost)

    @property
    def has_failed(self) -> bool:
        """Whether the other ranks need not wait for this one any more."""
        return self.has_failed_phase or self.has_died
