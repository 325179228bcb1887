"""The messages between processes: frozen dataclasses that the receiver parses strictly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pytest_fsdp_comm.options import DistributedSettings
from pytest_fsdp_comm.ranks.wire.results import PhaseReport, Position, SessionExit, WarningSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTest:
    """Whether the same ranks run another test after this one, and which test."""

    index: int | None = None
    """The next test's index among the session's items, if the test is sure to run on these ranks.
    The ranks then keep the fixtures that both tests share. If None, they tear down all fixtures."""
    is_none: bool = True
    """Whether this is the ranks' last test, after which they run their exit functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetSpec:
    """Describes a rank set: the ranks that run one test, or several tests with scope="module"."""

    item_index: int
    """The index of the first test among the session's items."""
    nodeid: str
    """The node id of the first test; spawned ranks collect only this test."""
    settings: DistributedSettings
    directory: Path
    """The directory for this rank set's logs and store; no other rank set uses it."""
    basetemp: Path
    echoes: tuple[str, ...]
    """Names of the logs to print while the test is running: ``stdout`` and ``stderr`` under ``-s``,
    ``terminal`` under ``--setup-show`` or ``log_cli``."""
    next_test: NextTest = NextTest()
    store_prefix: str = ""
    """Prefix of this rank set's keys in the launcher's store."""
    slots: tuple[Path, ...] = ()
    """The lock files of the slots, which the server keeps locked until the ranks have ended."""
    terminal: tuple[int, ...] = ()
    """Descriptors of the session's stdin, stdout and stderr; empty if there is no terminal."""
    foreground: int = 0
    """pytest's process group, which has the terminal while no rank is in a debugger."""
    debugged_rank: int = 0
    gpus: tuple[str, ...] = ()
    """The GPUs to make visible to ranks, as the user listed them; if empty, hide no GPUs."""

    def log_path(self, rank: int, stream: str) -> Path:
        """Return the log of a rank's ``stdout`` or ``stderr``, or of its ``terminal`` reporter."""
        return self.directory / f"rank{rank}.{stream}"

    def stacks_path(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.stacks"

    def position_path(self, rank: int) -> Path:
        """Return the file in which a rank saves its position before it dies."""
        return self.directory / f"rank{rank}.position"


# Messages from a rank to its supervisor, in addition to `PhaseReport` and `WarningSeen`.


@dataclass(frozen=True, slots=True, kw_only=True)
class TestBegun:
    """Reports that the rank has started up, and begins a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Debugging:
    """Reports that the user entered or left a debugger; from then on, the test has no deadline."""

    has_begun: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TestEnded:
    """Reports that the rank has finished the test and is waiting for the next command."""

    payloads: tuple[str, ...] | None = None
    """The serialized payload of each `RankExtension`; None if pytest's protocol raised."""
    escaped: str | None = None
    """The exception that pytest's protocol raised, in words; None if there was none."""
    session_exit: SessionExit | None = None
    further_ranks: tuple[int, ...] = ()
    """Ranks on which the test must also run; if there are any, the test runs again on all ranks."""
    can_run_another: bool = True
    """False if the test has destroyed or replaced the process group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsEnded:
    """Answers `EndTests`, after the reports of any failures in teardown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionAnswer:
    """A watchdog's answer to `PositionQuestion`."""

    number: int
    position: Position


RankMessage = (
    PhaseReport | WarningSeen | Debugging | TestBegun | TestEnded | TestsEnded | PositionAnswer
)

# Messages from the supervisor to a rank or to its watchdog.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTest:
    """Asks ranks that have finished a test to run another test."""

    item_index: int
    next_test: NextTest


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTests:
    """Asks ranks to tear down the fixtures that they kept, because they will run no other test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionQuestion:
    """Asks a watchdog where its rank is."""

    number: int
    """Identifies the question, so that a late answer to an earlier question can be ignored."""
    with_groups: bool
    """Whether to read `Position.groups`, which is slow if many ranks share few cores."""


# Messages from the pytest process to its fork server.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """Asks the server to fork a rank of the last `RankSetSpec`; two descriptors for it follow."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSet:
    """Asks the server to kill the rank set."""

    within_s: float


ServerRequest = RankSetSpec | StartRank | EndSet

# Messages from the fork server to its pytest process.


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStarted:
    """Answers the last `StartRank` of a rank set."""

    pids: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """Reports that a rank's process has ended before the server received `EndSet`."""

    rank: int
    status: int
    """The exit status, or minus the number of the signal that killed the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEnded:
    """Answers `EndSet`."""

    unended: dict[int, int]
    """The pids of ranks that SIGKILL did not end, keyed by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFailed:
    """Reports why the fork server failed; it sends nothing after this message."""

    reason: str


ServerReply = SetStarted | RankExited | SetEnded | ServerFailed

# Messages between a launched rank and rank 0's process, which supervises it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The first message that a launched rank sends on each of its two connections."""

    token: str
    """A secret from the launcher's store, which proves that the sender is a rank."""
    rank: int
    host: str
    tests: tuple[str, ...] | None
    """The tests that the rank collected, with their settings; None on the watchdog's connection."""
    problem: str = ""
    """Why the rank could not collect all tests; empty if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers `Joined` once all ranks have joined with the same tests."""

    order: tuple[int, ...]
    """For each test of rank 0, in order, its index among the tests of the receiving rank."""
    randomly_seed: int | None
    """The seed that pytest-randomly chose on rank 0; None without that plugin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """Asks launched ranks to exit."""


RankCommand = RunTest | EndTests | Welcome | RankSetSpec | EndSession


Message = RankMessage | RankCommand | PositionQuestion | ServerRequest | ServerReply | Joined
BY_NAME: Final[dict[str, Any]] = {cls.__name__: cls for cls in get_args(Message)}
