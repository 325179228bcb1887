"""What processes send each other: a frozen value for each message, read strictly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pytest_fsdp_comm.options import DistributedSettings
from pytest_fsdp_comm.ranks.wire.results import PhaseReport, Position, SessionExit, WarningSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTest:
    """What follows a test on the same ranks."""

    index: int | None = None
    """The next test, by its index in the session's items, if it is sure to be run by these ranks
    or by none: the fixtures that it shares with the test before stay. None ends them all."""
    is_none: bool = True
    """Whether no other test follows, so that the ranks do what a process does at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetSpec:
    """How to start a rank set; each of its processes gets it.

    Sent alone it begins one: to a fork server before a `StartRank` for each rank, to the launched
    ranks after the end of the last set.
    """

    item_index: int
    """The first test, by its index in the session's items."""
    nodeid: str
    """The first test, for ranks that collect again."""
    settings: DistributedSettings
    directory: Path
    """Of this rank set alone; holds the logs and the stores."""
    basetemp: Path
    echoes: tuple[str, ...]
    """Streams to show meanwhile: with ``-s`` the rank's, with ``--setup-show`` or ``log_cli`` its
    pytest's."""
    next_test: NextTest = NextTest()
    store_prefix: str = ""
    """Of this rank set's names on the launcher's store; empty if it has a store of its own."""
    slots: tuple[Path, ...] = ()
    """Files of the slots, which the server locks while the ranks live."""
    terminal: tuple[int, ...] = ()
    """Descriptors of the session's standard input, output and error; empty if it has none."""
    foreground: int = 0
    """The session's process group, which has the terminal while no debugger runs."""
    debugged_rank: int = 0
    gpus: tuple[str, ...] = ()
    """By the names of the caller's visible list; empty leaves the list as it is."""

    def log_path(self, rank: int, stream: str) -> Path:
        """Where a rank's ``stdout`` or ``stderr`` goes, or the ``terminal`` of its pytest."""
        return self.directory / f"rank{rank}.{stream}"

    def stacks_path(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.stacks"


# From a rank to its supervisor; so are `PhaseReport` and `WarningSeen`, which a result holds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Debugging:
    """A human began or ended work in a debugger, in which time does not count."""

    has_begun: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TestEnded:
    """The rank has finished the test, and waits for another one."""

    payloads: tuple[str, ...] | None
    """What each extension carries out, as its `payload_type` is dumped; None after an escape."""
    escaped: str | None
    """The exception that went through pytest's protocol; None if it returned."""
    session_exit: SessionExit | None = None
    further_ranks: tuple[int, ...] = ()
    """Ranks that have to run as well, so that the test runs again on all of them."""
    can_run_another: bool = True
    """False where the test destroyed the process group, or put another in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsEnded:
    """Answers `EndTests`, after the reports of what failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionAnswer:
    """A watchdog's answer to `PositionQuestion`."""

    number: int
    position: Position


RankMessage = PhaseReport | WarningSeen | Debugging | TestEnded | TestsEnded | PositionAnswer

# From the supervisor to a rank, or to its watchdog.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTest:
    """Kept ranks are to run another test."""

    item_index: int
    next_test: NextTest


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTests:
    """No other test follows, though one might have: end the fixtures that were kept for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionQuestion:
    """Asks a watchdog where its rank is."""

    number: int
    """Counts the questions: an answer may come after its time."""
    with_groups: bool
    """Whether to look for `Position.groups`: it takes long where many ranks share few cores."""


# From the pytest process to its fork server.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """Fork a rank; its ends of two connections follow, as `RunRank` gets them."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSet:
    """Kill what is left of the rank set."""

    within_s: float


ServerRequest = RankSetSpec | StartRank | EndSet

# From the fork server to its pytest process.


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStarted:
    """Answers the last `StartRank`."""

    pids: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process has ended, before `EndSet`."""

    rank: int
    status: int
    """Exit status, or minus the signal's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEnded:
    """Answers `EndSet`."""

    unended: dict[int, int]
    """Process ids, by rank, of those that were killed and are still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFailed:
    """The fork server's last words."""

    reason: str


ServerReply = SetStarted | RankExited | SetEnded | ServerFailed

# Between a launched rank and rank 0's process, which supervises it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A launched rank's first message on each of its two connections."""

    token: str
    """Read from the launcher's store, so that no other program is taken for a rank."""
    rank: int
    host: str
    tests: tuple[str, ...] | None
    """What it collected, and how that runs on ranks, in its own order; None from the watchdog."""
    problem: str = ""
    """Why it could not collect all tests; empty if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers `Joined`: all ranks have collected the same tests."""

    order: tuple[int, ...]
    """Where each test of rank 0 is among the rank's own."""
    randomly_seed: int | None
    """pytest-randomly's; None without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """There is no other test."""


RankCommand = RunTest | EndTests | Welcome | RankSetSpec | EndSession


Message = RankMessage | RankCommand | PositionQuestion | ServerRequest | ServerReply | Joined
BY_NAME: Final[dict[str, Any]] = {cls.__name__: cls for cls in get_args(Message)}
