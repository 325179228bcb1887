"""The result of one rank's test, and the position of a rank."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Activity(StrEnum):
    """The state of a rank at its position."""

    RUNS = "runs"
    REPORTS = "reports"
    """The test raised at `Position.site`, and pytest is making the report."""
    HAS_ENDED = "has ended"
    HOLDS_GIL = "holds the GIL"
    """The watchdog cannot run; only the site is known, from a dumped stack."""
    SILENT = "silent"
    """The rank is alive, but did not answer in time."""

    @property
    def is_known(self) -> bool:
        """Whether the rank's watchdog answered, so that its groups are known."""
        return self in (Activity.RUNS, Activity.REPORTS, Activity.HAS_ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCollective:
    """One collective that a rank issued on a process group."""

    seq: int
    """Its number on the group, from 1; equal on all ranks of the group."""
    kind: str
    nbytes: int
    """Bytes of the rank's input."""
    is_done: bool
    """Whether the rank has finished it, or gloo failed in it."""
    sent: str = ""
    """The rank's input in words, such as ``4 float32``."""
    owner: str = ""
    """FQN of its owner; empty if it has none, or no recording was active."""
    is_last: bool = False
    """Whether it is the last one that the rank called, on any group."""
    is_waited_in: bool = False
    """Whether the main thread waits for it; False if it is done or in the background."""
    timeout_s: float = 0.0
    """The longest time that a rank waits for it; 0 if the call has a timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """The collectives that a rank has called on one process group."""

    name: str
    """torch's name, equal on all ranks of the group."""
    axis: str
    """Its mesh axis, as in recordings and trees; empty if unknown."""
    is_shape: bool
    """Whether `axis` is only the group's shape, such as ``size2.stride4``."""
    ranks: tuple[int, ...]
    """The group's global ranks; empty if torch does not list them."""
    collectives: tuple[IssuedCollective, ...]
    """The last ones in order; empty if the rank has called none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of one rank."""

    site: str
    """``path:line in function`` of the innermost user code; empty if there is none, or unknown."""
    code: str = ""
    """The line of source there, such as ``lock.acquire()``; empty if unknown."""
    stack: tuple[str, ...] = ()
    """The formatted stack, innermost frame first; empty if unknown."""
    module: str = ""
    """FQN of the running module or FSDP unit; empty for the root or none."""
    groups: tuple[GroupPosition, ...] = ()
    """All process groups of the rank; empty if they were not read."""
    activity: Activity = Activity.RUNS
    is_joining: bool = False
    """Whether it waits for the other ranks to create the process group."""
    is_waiting: bool = False
    """Whether it is in a call that waits for other ranks, or that may wait in torch."""
    is_reporting: bool = False
    """Whether it compares with a snapshot or formats a failure, which needs no other rank."""


class Stopped(StrEnum):
    """Why the supervisor stopped a rank that was still running."""

    AFTER_FAILURE = "after failure"
    """Another rank had failed, and the grace period was over."""
    AT_DEADLINE = "at deadline"
    """The time limit, perhaps of pytest-timeout, was over, or a rank could never finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """A report that pytest made in a rank: of a phase, or of a subtest within one."""

    report: dict[str, Any]
    """The result of ``pytest_report_to_serializable``; its ``stop`` is the rank's `time.time`."""
    is_subtest: bool = False
    precedes_debugger: bool = False
    """Whether a debugger follows, so that the other ranks must wait."""
    nbytes_reported: dict[str, int] = dataclasses.field(default_factory=dict)
    """By stream: how many bytes of the rank's log are in reports so far."""

    @property
    def has_failed(self) -> bool:
        return bool(self.report["outcome"] == "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningSeen:
    """A warning that a rank raised; see `pytest.hookspec.pytest_warning_recorded`."""

    text: str
    category_module: str
    category_name: str
    filename: str
    lineno: int
    when: str
    nodeid: str
    location: tuple[str, int, str] | None
    """File, line and function, if pytest knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionExit:
    """How a test ended the session: with `pytest.exit`, or by a KeyboardInterrupt."""

    status: int
    reason: str
    """The text of `pytest.exit`, or where the rank was interrupted."""


@dataclass(slots=True, kw_only=True)
class RankResult:
    """The result of one test on one rank; its supervisor updates it until the test ends."""

    rank: int
    reports: tuple[PhaseReport, ...] = ()
    warnings: tuple[WarningSeen, ...] = ()
    phase_began_at: float = dataclasses.field(default_factory=time.time)
    """`time.time` of the last report, or of the start of the test."""
    is_done: bool = False
    payloads: tuple[str, ...] | None = None
    further_ranks: tuple[int, ...] = ()
    can_run_another: bool = False
    is_debugging: bool = False
    """Whether the user is in a debugger, or about to enter one."""
    escaped: str | None = None
    session_exit: SessionExit | None = None
    status: int | str | None = None
    """Exit status of a process that died, or minus the signal's number. For a rank that was lost,
    what happened to it, as a text that follows its name. None if the rank did not die."""
    ended_at: float | None = None
    """`time.time` when it died or was stopped; None if it finished the test."""
    stopped: Stopped | None = None
    unreported: dict[str, str] = dataclasses.field(default_factory=dict)
    """By stream: the output of its unfinished phase; empty if it finished the test."""
    waited_for: tuple[int, ...] = ()
    """The ranks that it waits for, although they have finished the test."""
    position: Position | None = None
    """Where it was when the ranks were stopped; None if they were not, or it did not answer."""

    @property
    def is_over(self) -> bool:
        """Whether the test is over on this rank, so that no report of it follows."""
        return self.is_done or self.status is not None

    @property
    def unfinished_s(self) -> float:
        """How long the unfinished phase took; 0 if the rank finished the test."""
        return 0.0 if self.ended_at is None else self.ended_at - self.phase_began_at

    @property
    def has_died(self) -> bool:
        """Whether the rank left the test before its end, without being stopped."""
        has_left = self.escaped is not None or self.session_exit is not None
        return has_left or self.status is not None

    @property
    def has_failed(self) -> bool:
        """Whether the other ranks need not wait for this rank any more."""
        # After a failed subtest, the test goes on.
        has_failed = any(report.has_failed and not report.is_subtest for report in self.reports)
        return has_failed or self.has_died
