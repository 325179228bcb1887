"""The result of a test on one rank, and where a rank is."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Activity(StrEnum):
    """What a rank is doing."""

    RUNS = "runs"
    REPORTS = "reports"
    """The test raised an exception at `Position.site`, and pytest is creating the report."""
    COMPARES = "compares"
    """The rank waits until all ranks reach the same comparison, or another call that merges their
    recordings."""
    HAS_ENDED = "has ended"
    HOLDS_GIL = "holds the GIL"
    """The watchdog cannot run, so only the stack is known: a signal handler dumped it."""
    STARTS = "starts"
    """The rank is a new process that is still importing or collecting, so no test has begun."""
    SILENT = "silent"
    """The rank is alive, but neither answered nor dumped its stack in time."""

    @property
    def is_known(self) -> bool:
        """Whether the rank's watchdog answered, so that the rank's process groups are known."""
        return self not in (Activity.HOLDS_GIL, Activity.STARTS, Activity.SILENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCollective:
    """A collective that a rank called on a process group."""

    seq: int
    """Number of the collective on its group, starting at 1; equal on all ranks of the group."""
    kind: str
    nbytes: int
    """Size of the rank's input in bytes."""
    is_done: bool
    """Whether the rank has finished the collective; also True if gloo raised an error in it."""
    sent: str = ""
    """The rank's input in words, such as ``4 float32``."""
    owner: str = ""
    """FQN of the module to which the collective is attributed; empty if unknown."""
    is_last: bool = False
    """Whether this is the most recent collective of the rank, across all groups."""
    is_waited_in: bool = False
    """Whether the main thread waits for the collective; False while it runs in the background."""
    timeout_s: float = 0.0
    """How long the rank will wait at most; 0 if user code sets a timeout in ``Work.wait``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """The collectives that a rank has called on one process group."""

    name: str
    """torch's name for the group; the same on all ranks of the group."""
    axis: str
    """The mesh axis of the group, named as in snapshots; empty if unknown."""
    is_shape: bool
    """Whether `axis` is only the group's shape, such as ``size2.stride4``."""
    ranks: tuple[int, ...]
    """The group's global ranks; empty if torch does not list them."""
    collectives: tuple[IssuedCollective, ...]
    """The last collectives, in order; empty if the rank has called none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank is, and what it is doing there."""

    site: str
    """``path:line in function`` of the innermost user code; empty if there is none, or unknown."""
    code: str = ""
    """The line of source code at `site`, such as ``lock.acquire()``; empty if unknown."""
    stack: tuple[str, ...] = ()
    """The formatted stack, innermost frame first; empty if unknown."""
    module: str = ""
    """FQN of the module whose forward or FSDP hook is running; empty for the root or if unknown."""
    groups: tuple[GroupPosition, ...] = ()
    """All process groups of the rank; empty if they were not read."""
    activity: Activity = Activity.RUNS
    is_joining: bool = False
    """Whether the rank is waiting for other ranks to create the process group."""
    is_reporting: bool = False
    """Whether the rank is comparing with a snapshot, formatting a failure or saving coverage data.
    None of these requires other ranks."""


class Stopped(StrEnum):
    """Why the supervisor stopped a rank that was still running."""

    AFTER_FAILURE = "after failure"
    """Another rank had failed, and the grace period was over."""
    AT_DEADLINE = "at deadline"
    """The time limit (ours or pytest-timeout's) had passed, or a rank could never finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """A report that pytest created in a rank for a phase, or for a subtest within a phase."""

    report: dict[str, Any]
    """The result of ``pytest_report_to_serializable``; ``stop`` is `time.time` on the rank."""
    is_subtest: bool = False
    precedes_debugger: bool = False
    """Whether a debugger opens after this report, so that the other ranks must not be stopped."""
    nbytes_reported: dict[str, int] = dataclasses.field(default_factory=dict)
    """For each stream, how many bytes of the rank's log are in this report and earlier ones."""

    @property
    def has_failed(self) -> bool:
        return bool(self.report["outcome"] == "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningSeen:
    """A warning that a test raised; see `pytest.hookspec.pytest_warning_recorded`."""

    text: str
    category_module: str
    category_name: str
    filename: str
    lineno: int
    nodeid: str
    location: tuple[str, int, str] | None
    """File, line and function, if pytest knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionExit:
    """How a test ended the session: through `pytest.exit` or a KeyboardInterrupt."""

    status: int
    reason: str
    """The message of `pytest.exit`, or where the rank was interrupted."""


@dataclass(slots=True, kw_only=True)
class RankResult:
    """The result of one test on one rank; the supervisor updates it until the test ends."""

    rank: int
    reports: tuple[PhaseReport, ...] = ()
    warnings: tuple[WarningSeen, ...] = ()
    phase_began_at: float = dataclasses.field(default_factory=time.time)
    """`time.time` when the previous phase's report arrived, or when the rank began the test."""
    is_starting: bool = False
    """Whether the rank has not begun the test yet."""
    is_done: bool = False
    payloads: tuple[str, ...] | None = None
    further_ranks: tuple[int, ...] = ()
    can_run_another: bool = False
    is_debugging: bool = False
    """Whether the user is in a debugger on this rank, or about to enter it."""
    escaped: str | None = None
    session_exit: SessionExit | None = None
    status: int | str | None = None
    """Exit status of a rank that died, or minus the number of the signal that killed it. If the
    rank was lost, a description to print after its name. None if the rank did not die."""
    ended_at: float | None = None
    """`time.time` when the rank died or was stopped; None if it finished the test."""
    stopped: Stopped | None = None
    unreported: dict[str, str] = dataclasses.field(default_factory=dict)
    """Output of the phase that the rank did not finish, keyed by stream; empty if there is none."""
    waited_for: tuple[int, ...] = ()
    """Ranks that this rank waits for, although they have finished the test, or wait in turn until
    this rank reaches a comparison."""
    position: Position | None = None
    """Where the rank was when the supervisor last asked; None if unknown."""

    @property
    def is_over(self) -> bool:
        """Whether the test is over on this rank, so no more reports of the test can arrive."""
        return self.is_done or self.status is not None

    @property
    def unfinished_s(self) -> float:
        """How many seconds the unfinished phase lasted; 0 if the rank finished the test."""
        return 0.0 if self.ended_at is None else self.ended_at - self.phase_began_at

    @property
    def has_died(self) -> bool:
        """Whether the rank left the test before its end without being stopped by the supervisor."""
        has_left = self.escaped is not None or self.session_exit is not None
        return has_left or self.status is not None

    @property
    def has_failed(self) -> bool:
        """Whether the test has failed on this rank, so that other ranks get only a grace period."""
        # Ignore failed subtests, because the test continues after them.
        has_failed = any(report.has_failed and not report.is_subtest for report in self.reports)
        return has_failed or self.has_died
