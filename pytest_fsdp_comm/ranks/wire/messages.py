"""The messages between processes, each a frozen dataclass that is parsed strictly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pytest_fsdp_comm.options import DistributedSettings
from pytest_fsdp_comm.ranks.wire.results import PhaseReport, Position, SessionExit, WarningSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTest:
    """Whether another test follows on the same ranks, and which."""

    index: int | None = None
    """Index in the session's items of the next test that runs on these ranks, if that is certain.
    Ranks keep the fixtures that it shares with this test. None tears down all fixtures."""
    is_none: bool = True
    """Whether no other test follows, so that ranks run their exit functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetSpec:
    """Describes a rank set to its processes; for a fork server, `StartRank` messages follow."""

    item_index: int
    """The first test, by its index in the session's items."""
    nodeid: str
    """The first test, for spawned ranks, which collect again."""
    settings: DistributedSettings
    directory: Path
    """Used only by this rank set, for logs and stores."""
    basetemp: Path
    echoes: tuple[str, ...]
    """Logs to print while ranks run: their streams with ``-s``, ``terminal`` with ``--setup-show``
    or ``log_cli``."""
    next_test: NextTest = NextTest()
    store_prefix: str = ""
    """Prefix of this rank set's keys on the launcher's store."""
    slots: tuple[Path, ...] = ()
    """Files of slots, which the server locks until the ranks have ended."""
    terminal: tuple[int, ...] = ()
    """Descriptors of the session's stdin, stdout and stderr; empty if there is no terminal."""
    foreground: int = 0
    """The session's process group, which has the terminal while no debugger runs."""
    debugged_rank: int = 0
    gpus: tuple[str, ...] = ()
    """Names from the caller's list of visible GPUs; empty leaves the list unchanged."""

    def log_path(self, rank: int, stream: str) -> Path:
        """Return the log of a rank's ``stdout``, ``stderr``, or pytest's ``terminal``."""
        return self.directory / f"rank{rank}.{stream}"

    def stacks_path(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.stacks"


# From a rank to its supervisor. `PhaseReport` and `WarningSeen` in `results` are sent too.


@dataclass(frozen=True, slots=True, kw_only=True)
class Debugging:
    """The user has entered or left a debugger; the time in it does not count."""

    has_begun: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TestEnded:
    """The rank has finished the test, and waits for another one."""

    payloads: tuple[str, ...] | None
    """The serialized value of each extension; None if the protocol raised."""
    escaped: str | None
    """The exception that pytest's protocol raised; None if it returned."""
    session_exit: SessionExit | None = None
    further_ranks: tuple[int, ...] = ()
    """Ranks that have to run too; the test runs again, with these."""
    can_run_another: bool = True
    """False if the test destroyed or replaced the process group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsEnded:
    """Answers `EndTests`, after reports of failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionAnswer:
    """A watchdog's answer to `PositionQuestion`."""

    number: int
    position: Position


RankMessage = PhaseReport | WarningSeen | Debugging | TestEnded | TestsEnded | PositionAnswer

# From the supervisor to a rank, or to its watchdog.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTest:
    """Asks kept ranks to run another test."""

    item_index: int
    next_test: NextTest


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTests:
    """Asks kept ranks to tear down their fixtures, because no other test follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionQuestion:
    """Asks a watchdog where its rank is."""

    number: int
    """Identifies the question, because its answer may come too late."""
    with_groups: bool
    """Whether to read `Position.groups`, which is slow if many ranks share few cores."""


# From the pytest process to its fork server.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """Asks to fork a rank; the two descriptors for `RunRank` follow."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSet:
    """Asks to kill the rank set."""

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
    """By rank: the pids that SIGKILL did not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFailed:
    """The last message of a fork server that failed."""

    reason: str


ServerReply = SetStarted | RankExited | SetEnded | ServerFailed

# Between a launched rank and rank 0's process, which supervises it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A launched rank's first message on each of its two connections."""

    token: str
    """Read from the launcher's store; proves that the sender is a rank."""
    rank: int
    host: str
    tests: tuple[str, ...] | None
    """The tests that it collected, with their settings, in order; None from the watchdog."""
    problem: str = ""
    """Why it could not collect all tests; empty if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answers `Joined`: all ranks have collected the same tests."""

    order: tuple[int, ...]
    """The index of each of rank 0's tests among the rank's tests."""
    randomly_seed: int | None
    """The seed of pytest-randomly; None without that plugin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """Asks launched ranks to exit."""


RankCommand = RunTest | EndTests | Welcome | RankSetSpec | EndSession


Message = RankMessage | RankCommand | PositionQuestion | ServerRequest | ServerReply | Joined
BY_NAME: Final[dict[str, Any]] = {cls.__name__: cls for cls in get_args(Message)}
