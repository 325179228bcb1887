"""What one rank did with one test, and where it is."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Activity(StrEnum):
    """What a rank does where it is."""

    RUNS = "runs"
    REPORTS = "reports"
    """The test raised, at `Position.site`, and pytest makes the report."""
    HAS_ENDED = "has ended"
    HOLDS_GIL = "holds the GIL"
    """None of its threads can run Python code; only its site is known, from its stack."""
    SILENT = "silent"
    """It lives, and did not answer in time."""

    @property
    def is_known(self) -> bool:
        """Whether the rank has answered, so that its groups are known."""
        return self in (Activity.RUNS, Activity.REPORTS, Activity.HAS_ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCollective:
    """One collective that a rank issued on a process group."""

    seq: int
    """Its number in the group's order, from 1; equal on all ranks of the group."""
    kind: str
    """Such as ``all_gather``."""
    nbytes: int
    """Bytes of the rank's input."""
    is_done: bool
    """Whether the rank has finished it, or gloo has failed in it."""
    sent: str = ""
    """The rank's input in words, such as ``4 float32``."""
    owner: str = ""
    """FQN of the module that it serves; empty if it has none, or nothing recorded it."""
    is_last: bool = False
    """Whether the rank has issued none after it, on any group."""
    is_waited_in: bool = False
    """Whether the main thread waits for it; False if done or in background."""
    timeout_s: float = 0.0
    """How long a rank waits for it at most; 0 if the call itself has a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """How far a rank has come on one process group."""

    name: str
    """Equal on all of its ranks."""
    axis: str
    """What recordings and trees call it; empty if unknown."""
    is_shape: bool
    """Whether `axis` only tells its shape, such as ``size2.stride4``."""
    ranks: tuple[int, ...]
    """The group's global ranks; empty where torch does not list them."""
    collectives: tuple[IssuedCollective, ...]
    """The last ones in order; empty if the rank has issued none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where one rank is."""

    site: str
    """``path:line in function`` of the innermost user code; empty if unknown, or if none runs."""
    code: str = ""
    """The line of source there, such as ``lock.acquire()``; empty if unknown."""
    stack: tuple[str, ...] = ()
    """Lines that say more of the stack than `site`, innermost frame first; empty if unknown."""
    module: str = ""
    """FQN of the module or FSDP unit that runs; empty for the root or none."""
    groups: tuple[GroupPosition, ...] = ()
    """Each process group of the rank; empty if only the place was read."""
    activity: Activity = Activity.RUNS
    is_joining: bool = False
    """Whether it waits for the other ranks to make their process group."""
    is_waiting: bool = False
    """Whether it is inside torch, or waits for other ranks or for what it started in torch."""
    is_reporting: bool = False
    """Whether it compares with a snapshot or formats a failure, and so waits for no other rank."""


class Stopped(StrEnum):
    """Why a rank that still ran was ended."""

    AFTER_FAILURE = "after failure"
    """Another rank had failed, and the grace period was over."""
    AT_DEADLINE = "at deadline"
    """The test, or what pytest-timeout limits, ran out of time, or could not end any more."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionExit:
    """How a test ended the session: with `pytest.exit`, or by a KeyboardInterrupt."""

    status: int
    reason: str
    """The text of `pytest.exit`, or where the rank was interrupted."""


@dataclass(slots=True, kw_only=True)
class RankResult:
    """What one rank did with one test so far: its supervisor writes here until the test ends."""

    rank: int
    reports: tuple[PhaseReport, ...] = ()
    """The phases and subtests that ended, in order."""
    warnings: tuple[WarningSeen, ...] = ()
    phase_began_at: float = dataclasses.field(default_factory=time.time)
    """`time.time` of the last report, or of the start of the test."""
    is_done: bool = False
    payloads: tuple[str, ...] | None = None
    """What each extension sent; None if the rank did not come so far."""
    further_ranks: tuple[int, ...] = ()
    can_run_another: bool = False
    """As `further_ranks` of `TestEnded`."""
    is_debugging: bool = False
    """Whether a human works in a debugger, or is about to."""
    escaped: str | None = None
    """The exception that went through pytest's protocol, as a plugin's may; None if none did."""
    session_exit: SessionExit | None = None
    status: int | str | None = None
    """Of a process that ended early its exit status, or minus the signal's number; of one that was
    lost what became of it, to be read after its name; else None."""
    ended_at: float | None = None
    """`time.time` at which it died or was stopped; None if it finished the test."""
    stopped: Stopped | None = None
    """Why the supervisor ended it; None if it did not."""
    unreported: dict[str, str] = dataclasses.field(default_factory=dict)
    """What its unfinished phase printed, by ``stdout`` and ``stderr``; empty if it finished."""
    waited_for: tuple[int, ...] = ()
    """The ranks that have ended the test and without which it cannot."""
    position: Position | None = None
    """Where it was when the rank set was stopped; None if it was not, or did not answer."""

    @property
    def is_over(self) -> bool:
        """Whether no more of this test can come from the rank."""
        return self.is_done or self.status is not None

    @property
    def unfinished_s(self) -> float:
        """How long the phase took that the rank did not finish; 0 if it finished all."""
        return 0.0 if self.ended_at is None else self.ended_at - self.phase_began_at

    @property
    def has_died(self) -> bool:
        """Whether the rank left the test before its end, on its own."""
        has_left = self.escaped is not None or self.session_exit is not None
        return has_left or self.status is not None

    @property
    def has_failed(self) -> bool:
        """Whether the other ranks need not wait for this one any more."""
        # After a failed subtest the test goes on.
        has_failed = any(one.has_failed and not one.is_subtest for one in self.reports)
        return has_failed or self.has_died
