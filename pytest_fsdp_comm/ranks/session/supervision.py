"""Watches one test on its ranks: collects what they send, and ends them at the deadline."""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from pytest_fsdp_comm.ranks.hangs.process_state import is_alive, silent_activity
from pytest_fsdp_comm.ranks.hangs.stacks import read_dump, show_stack
from pytest_fsdp_comm.ranks.rank.kept_output import MOST_ON_DISK_NBYTES, OutputFile, read_kept
from pytest_fsdp_comm.ranks.session.echo import Echo
from pytest_fsdp_comm.ranks.start.fork_client import ServerDiedError
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.messages import (
    LAST_WORDS,
    SUPERVISOR,
    DebuggerEntered,
    DebuggerLeft,
    DebuggerSkipped,
    EndTests,
    PositionAnswer,
    PositionQuestion,
    RankHandshake,
    RankMessage,
    RunTest,
    SupervisorMessage,
    TestEnded,
    TestsEnded,
    TimerCancelled,
    TimerSet,
    WatchdogHandshake,
)
from pytest_fsdp_comm.ranks.wire.positions import Activity, Position
from pytest_fsdp_comm.ranks.wire.rank_set import NextTest
from pytest_fsdp_comm.ranks.wire.results import PhaseReport, RankResult, Stopped, WarningSeen
from pytest_fsdp_comm.text.codec import CodecError

if TYPE_CHECKING:
    import socket

    from pytest_fsdp_comm.ranks.session.progress import Progress
    from pytest_fsdp_comm.ranks.wire.rank_set import RankProcesses, RankSetSpec

# Once a rank has failed, the others fail within a second of it (their connections close) or hang.
GRACE_S = 1.0
_POLL_S = 0.05
_DUMP_S = 1.0
# A thread of the rank answers as soon as it gets the GIL.
_ANSWER_S = 0.5
# Reading the groups takes processor time of each rank, and ranks may share few cores.
_GROUPS_S = 8.0
_STREAMS = ("stdout", "stderr")
# A message fits into the socket, unless the rank does not read at all.
_SEND_S = 1.0
# More than a socket holds: a rank that goes on sending is not listened to for ever.
_DRAINED_CHUNKS = 64
_GREETING_NBYTES = 4096


_Channel: TypeAlias = Channel[SupervisorMessage, RankMessage]

HasFailedElsewhere = Callable[[bool], bool]
"""Called again and again while ranks run, with whether one of them has failed; returns whether one
that another process supervises has."""


@dataclass(slots=True, kw_only=True)
class _Rank:
    """What is known so far of one rank's test."""

    channel: _Channel | None = None
    watchdog: _Channel | None = None
    position: Position | None = None
    reports: list[PhaseReport] = field(default_factory=list)
    warnings: list[WarningSeen] = field(default_factory=list)
    payloads: tuple[str, ...] | None = None
    escaped: str | None = None
    is_done: bool = False
    can_run_another: bool = False
    has_ended_tests: bool = False
    status: int | None = None
    ended_at: float | None = None
    seen_alive_at: float | None = None
    stopped: Stopped | None = None
    stacks: str = ""
    timer: TimerSet | None = None
    is_debugging: bool = False
    entered_debugger: bool = False
    skipped_debuggers: list[str] = field(default_factory=list)
    nbytes_reported: dict[str, int] = field(default_factory=dict)
    has_failed_phase: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_done or self.status is not None

    @property
    def has_failed(self) -> bool:
        died = self.status is not None and not self.is_done
        return self.has_failed_phase or self.escaped is not None or died


class Supervision:
    """Supervises one rank set, for the tests that it runs one after another."""

    def __init__(
        self, spec: RankSetSpec, listener: socket.socket, processes: RankProcesses
    ) -> None:
        """Begins with a rank set that has just been started.

        Args:
            spec: How it was started.
            listener: Listens at its socket path; closed with it.
            processes: Its processes.
        """
        self._spec = spec
        self._listener = listener
        self._listener.settimeout(0.0)
        self._processes = processes
        self._ranks = {rank: _Rank() for rank in spec.ranks}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._descriptor = processes.fileno()
        if self._descriptor is not None:
            self._selector.register(self._descriptor, selectors.EVENT_READ, None)
        # The size of each log when a later test of the rank set began.
        self._log_starts: dict[tuple[int, str], int] = {}
        self._outputs = {
            (rank, stream): OutputFile(spec.log_path(rank, stream))
            for rank in spec.ranks
            for stream in _STREAMS
        }
        self._bounded_at: float | None = None
        self._echo = Echo(spec) if spec.echoes else None
        self._questions = 0
        self._next_test = spec.next_test
        self.is_reusable = False
        """Whether all ranks finished the last test and wait for another."""

    def run(
        self,
        *,
        started_at: float,
        has_failed_elsewhere: HasFailedElsewhere | None = None,
        progress: Progress | None = None,
    ) -> dict[int, RankResult]:
        """Waits until every rank finished the test, failed with a grace period, or ran out of time.

        Args:
            started_at: When the ranks were started for this test (`time.monotonic`).
            has_failed_elsewhere: Asked for the ranks that other processes supervise; None if there
                are none.
            progress: Shows that the test still runs; None does not.

        Returns:
            What each rank did.
        """
        deadline = started_at + self._spec.settings.timeout_s
        progress_after_s = progress.first_after_s if progress else None
        first_failure: float | None = None
        was_debugged = False
        while not all(rank.is_over for rank in self._ranks.values()):
            now = time.monotonic()
            if any(rank.is_debugging and not rank.is_over for rank in self._ranks.values()):
                was_debugged = True
                # Even if a rank has failed, it is the debugger's turn.
                first_failure = None
                self._wait(_POLL_S)
                self._release_output()
                continue
            has_failed = self._has_failed(has_failed_elsewhere)
            if first_failure is None and has_failed:
                first_failure = now
                self._note_survivors()
            if first_failure is not None and now > first_failure + GRACE_S:
                self._stop(Stopped.AFTER_FAILURE)
                break
            after_s = now - started_at
            if progress and progress_after_s is not None and after_s > progress_after_s:
                progress.show(self._positions(), after_s=after_s)
                progress_after_s = 2 * after_s
            ends_at = min([deadline, *(timer.runs_out_at for timer in self._timers())])
            # Time in a debugger is not the test's, and how much it was no longer matters.
            if now > ends_at and not was_debugged:
                self._stop(Stopped.AT_DEADLINE)
                break
            self._wait(min(_POLL_S, max(ends_at - now, 0.001)))
            if self._bound_output():
                break
        self._look_back(has_failed_elsewhere)
        if self._echo:
            self._echo.copy()
        self.is_reusable = not self._has_failed(None) and all(
            rank.is_done and rank.can_run_another and rank.status is None
            for rank in self._ranks.values()
        )
        if not self.is_reusable:
            # The fixtures that they kept end with this test, and what fails then is its failure.
            self._end_tests()
        return {number: self._result(number, rank) for number, rank in self._ranks.items()}

    def run_next(
        self,
        item_index: int,
        next_test: NextTest,
        *,
        started_at: float,
        has_failed_elsewhere: HasFailedElsewhere | None = None,
        progress: Progress | None = None,
    ) -> dict[int, RankResult]:
        """Runs another test on the same ranks."""
        self._next_test = next_test
        for number, rank in self._ranks.items():
            for stream in _STREAMS:
                size = 0
                with contextlib.suppress(FileNotFoundError):
                    size = self._spec.log_path(number, stream).stat().st_size
                self._log_starts[number, stream] = size
            self._ranks[number] = _Rank(channel=rank.channel, watchdog=rank.watchdog)
            if rank.channel is not None:
                self._selector.unregister(rank.channel)
                self._selector.register(rank.channel, selectors.EVENT_READ, self._ranks[number])
                with contextlib.suppress(OSError):  # it has died, which will be noticed
                    rank.channel.send(RunTest(item_index=item_index, next_test=next_test))
        return self.run(
            started_at=started_at, has_failed_elsewhere=has_failed_elsewhere, progress=progress
        )

    def can_run(self, item_index: int) -> bool:
        """Whether the ranks expect a test, after one that they passed."""
        expected = self._next_test
        return not expected.is_none and expected.index in {None, item_index}

    def late_failures(self) -> dict[int, PhaseReport]:
        """What failed in ranks when fixtures ended that had been kept for another test."""
        before = {number: len(rank.reports) for number, rank in self._ranks.items()}
        self._end_tests()
        return {
            number: report
            for number, rank in self._ranks.items()
            for report in rank.reports[before[number] :]
            if report.has_failed
        }

    def _end_tests(self) -> None:
        """Has the ranks that wait for another test end what they kept for it, within a second."""
        if self._next_test.is_none:
            return
        self._next_test = NextTest()
        waiting = [rank for rank in self._ranks.values() if rank.is_done and rank.status is None]
        for rank in waiting:
            if rank.channel is not None:
                with contextlib.suppress(OSError):  # it died just now
                    rank.channel.send(EndTests())
        until = time.monotonic() + GRACE_S
        with contextlib.suppress(ServerDiedError):  # and with it the ranks
            while time.monotonic() < until:
                if all(rank.has_ended_tests or rank.status is not None for rank in waiting):
                    break
                self._wait(_POLL_S)

    def end(self, within_s: float) -> dict[int, int]:
        """Kills every process of the rank set; see `RankProcesses.end`."""
        try:
            return self._processes.end(within_s)
        finally:
            callers = [key.fileobj for key in self._selector.get_map().values()]
            self._selector.close()
            self._listener.close()
            known = [end for rank in self._ranks.values() for end in (rank.channel, rank.watchdog)]
            for channel in (*callers, *known):
                if isinstance(channel, Channel):
                    channel.close()

    def _has_failed(self, elsewhere: HasFailedElsewhere | None) -> bool:
        """Whether a rank has failed; passes it on to those that others supervise, and asks them."""
        has_failed = any(rank.has_failed for rank in self._ranks.values())
        return (elsewhere is not None and elsewhere(has_failed)) or has_failed

    def _look_back(self, elsewhere: HasFailedElsewhere | None) -> None:
        """Once more: a rank may have failed and ended in one turn, and others wait for it."""
        if self._has_failed(elsewhere) and not any(rank.stopped for rank in self._ranks.values()):
            # Those that failed because of another rank know what they sent.
            self._locate()

    def _timers(self) -> list[TimerSet]:
        ranks = self._ranks.values()
        return [rank.timer for rank in ranks if rank.timer is not None and not rank.is_over]

    def _wait(self, timeout_s: float) -> None:
        events = self._selector.select(timeout_s)
        # Where nothing happens, asked to be sure.
        may_have_ended = self._descriptor is None or not events
        for key, _ in events:
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Rank):
                self._read(key.data)
            elif isinstance(key.fileobj, Channel):
                self._greet(key.fileobj)
            else:
                may_have_ended = True
        if may_have_ended:
            self._note_ends()
        if self._echo:
            self._echo.copy()

    def _bound_output(self) -> bool:
        """Frees the disk of output that is not kept; whether a rank had to be stopped for its."""
        now = time.monotonic()
        if self._bounded_at is not None and now < self._bounded_at + _POLL_S:
            return False
        self._bounded_at = now
        fast = [
            number
            for number, nbytes in self._release_output().items()
            if nbytes > MOST_ON_DISK_NBYTES
        ]
        if not fast:
            return False
        self._stop(Stopped.AFTER_FAILURE)
        for number in fast:
            self._ranks[number].stopped = Stopped.TOO_MUCH_OUTPUT
            self._ranks[number].ended_at = time.time()
        return True

    def _release_output(self) -> dict[int, int]:
        """How many bytes of disk the largest file of each rank still takes."""
        return {
            number: max(
                self._outputs[number, stream].release(self._unread_from(number, rank, stream))
                for stream in _STREAMS
            )
            for number, rank in self._ranks.items()
        }

    def _unread_from(self, number: int, rank: _Rank, stream: str) -> int:
        return rank.nbytes_reported.get(stream, self._log_starts.get((number, stream), 0))

    def _note_ends(self) -> None:
        for number, status in self._processes.exit_statuses().items():
            rank = self._ranks[number]
            if rank.status is None:
                # What it sent before its end is still in the socket.
                self._drain(rank)
                rank.status = status
                rank.ended_at = time.time()

    def _note_survivors(self) -> None:
        """Notes which ranks outlive a failure: if they die later, that is not its cause."""
        for number, rank in self._ranks.items():
            looked_at = time.time()
            if not rank.is_over and is_alive(self._processes.pid(number)):
                rank.seen_alive_at = looked_at

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the caller has hung up
            connection, _ = self._listener.accept()
            channel = Channel(connection, SUPERVISOR)
            channel.settimeout(_SEND_S)
            self._selector.register(channel, selectors.EVENT_READ, None)

    def _greet(self, channel: _Channel) -> None:
        """Reads who has called, once that has come; anything but a greeting is a stranger's."""
        handshake: RankMessage | None = None
        with contextlib.suppress(CodecError, OSError):
            handshake = next(channel.receive_available(), None)
            if (
                handshake is None
                and not channel.is_closed
                and channel.nbytes_pending < _GREETING_NBYTES
            ):
                return
        self._selector.unregister(channel)
        match handshake:
            case WatchdogHandshake() if handshake.rank in self._ranks:
                self._ranks[handshake.rank].watchdog = channel
            case RankHandshake() if handshake.rank in self._ranks:
                rank = self._ranks[handshake.rank]
                rank.channel = channel
                self._selector.register(channel, selectors.EVENT_READ, rank)
                # What came in one piece with the greeting makes no descriptor readable again.
                self._record_all(rank, channel, channel.take_pending)
            case _:
                channel.close()

    def _drain(self, rank: _Rank) -> None:
        while rank.channel is None and self._admit():
            pass
        with contextlib.suppress(BlockingIOError):
            for _ in range(_DRAINED_CHUNKS):
                if rank.channel is None or rank.channel.is_closed:
                    break
                rank.channel.settimeout(0.0)
                self._read(rank)

    def _admit(self) -> bool:
        """Accepts those who have called; returns whether anybody had."""
        found = False
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
                found = True
            elif isinstance(key.fileobj, Channel) and key.data is None:
                self._greet(key.fileobj)
                found = True
        return found

    def _read(self, rank: _Rank) -> None:
        if rank.channel is not None:
            self._record_all(rank, rank.channel, rank.channel.receive_available)

    def _record_all(
        self, rank: _Rank, channel: _Channel, receive: Callable[[], Iterator[RankMessage]]
    ) -> None:
        try:
            for message in receive():
                _record(rank, message)
        except BlockingIOError:
            raise
        except (CodecError, OSError) as error:
            # The rank's test wrote to a descriptor that is not its own.
            rank.escaped = f"a broken connection ({type(error).__name__}: {error})"
            rank.ended_at = time.time()
            channel.is_closed = True
        if channel.is_closed:
            self._selector.unregister(channel)

    def _stop(self, why: Stopped) -> None:
        """Notes where the ranks are that still run, then leaves them to `end`."""
        running = {number: rank for number, rank in self._ranks.items() if not rank.is_over}
        # On a busy machine they may have ended the test, or a subtest, and not been heard yet.
        for rank in running.values():
            self._drain(rank)
        self._locate()
        for number, rank in running.items():
            if rank.is_over:
                continue
            # It may be long until `end`, where ranks of other processes are waited for: until then
            # it must neither write on nor wear out the machine.
            self._processes.send_signal(number, signal.SIGSTOP)
            if why is Stopped.AFTER_FAILURE:
                self._drain(rank)
            # Past the deadline it would be wrong: that it was asked may have freed it.
            if rank.is_done:
                self._processes.send_signal(number, signal.SIGCONT)
                rank.position = Position(site="", activity=Activity.HAS_ENDED)
                rank.stacks = ""
            elif rank.status is None:
                rank.stopped = why

    def _locate(self) -> None:
        """Finds out where every rank is that lives, and what each waits for."""
        # All at one moment, as far as that goes: then who is silent, then what takes longer.
        self._ask(self._ranks.values(), within_s=_ANSWER_S)
        silent = {
            number: rank
            for number, rank in self._ranks.items()
            if rank.position is None and not rank.is_over
        }
        answered = [rank for rank in self._ranks.values() if rank.position is not None]
        self._ask(answered, within_s=_GROUPS_S, with_groups=True)
        # Last: the signal may interrupt what the rank does, which then goes on.
        self._dump_stacks(silent)
        for rank in self._ranks.values():
            if rank.position is None and rank.is_done:
                rank.position = Position(site="", activity=Activity.HAS_ENDED)
            if rank.position is not None and rank.position.activity.is_known:
                rank.stacks = "\n".join(rank.position.stack)

    def _dump_stacks(self, silent: Mapping[int, _Rank]) -> None:
        """Finds out where ranks are that run no Python code of another thread than the main one."""
        activities = {number: silent_activity(self._processes.pid(number)) for number in silent}
        can_dump = [number for number in silent if activities[number] is Activity.SILENT]
        for number in can_dump:
            self._processes.send_signal(number, signal.SIGUSR1)
        until = time.monotonic() + _DUMP_S
        dumped = {}
        for number, rank in silent.items():
            path = self._spec.stacks_path(number)
            frames = read_dump(path, until=until) if number in can_dump else []
            place = next((frame for frame in frames if frame.is_users), None)
            rank.stacks = "\n".join(show_stack(frames))
            dumped[number] = Position(
                site=place.site if place else "",
                code=place.code if place else "",
                activity=Activity.HOLDS_GIL if frames else activities[number],
            )
        self._ask([silent[number] for number in can_dump], within_s=_ANSWER_S, with_groups=True)
        for number, rank in silent.items():
            # One that answers from the same place was only slow; from another one, the signal has
            # interrupted what it was in.
            if rank.position is None or rank.position.site != dumped[number].site:
                rank.position = dumped[number]

    def _ask(self, ranks: Iterable[_Rank], *, within_s: float, with_groups: bool = False) -> None:
        """Asks ranks where they are; one that does not answer in time keeps what was known."""
        self._questions += 1
        asked = []
        for rank in ranks:
            if rank.watchdog is not None:
                # A dead one may have left its last words.
                asked.append((rank, rank.watchdog))
                with contextlib.suppress(OSError):
                    rank.watchdog.settimeout(_SEND_S)
                    rank.watchdog.send(
                        PositionQuestion(number=self._questions, with_groups=with_groups)
                    )
        until = time.monotonic() + within_s
        for rank, watchdog in asked:
            with contextlib.suppress(OSError, CodecError):
                while True:
                    # What a dead one has said is there; its children may keep the socket open.
                    left_s = until - time.monotonic() if rank.status is None else 0.0
                    watchdog.settimeout(max(left_s, 0.001))
                    answer = watchdog.receive()
                    if answer is None:
                        break
                    # An earlier question may have been answered after its time.
                    if isinstance(answer, PositionAnswer) and answer.number in (
                        LAST_WORDS,
                        self._questions,
                    ):
                        rank.position = answer.position
                        if rank.is_done:
                            rank.position = replace(rank.position, activity=Activity.HAS_ENDED)
                        break

    def _positions(self) -> dict[int, Position]:
        """Where the ranks are now; those without an answer are missing."""
        for rank in self._ranks.values():
            rank.position = None
        self._ask(self._ranks.values(), within_s=_ANSWER_S)
        ranks = self._ranks.items()
        return {number: rank.position for number, rank in ranks if rank.position is not None}

    def _result(self, number: int, rank: _Rank) -> RankResult:
        return RankResult(
            rank=number,
            reports=tuple(rank.reports),
            warnings=tuple(rank.warnings),
            payloads=rank.payloads,
            escaped=rank.escaped,
            entered_debugger=rank.entered_debugger,
            skipped_debuggers=tuple(rank.skipped_debuggers),
            status=None if rank.is_done else rank.status,
            ended_at=rank.ended_at,
            seen_alive_at=rank.seen_alive_at,
            stopped=rank.stopped,
            timeout_s=min(
                (
                    timer.timeout_s
                    for timer in self._timers()
                    if timer.runs_out_at < time.monotonic()
                ),
                default=None,
            ),
            stacks=rank.stacks,
            position=rank.position,
            unreported={} if rank.is_done else self._unreported(number, rank),
        )

    def _unreported(self, number: int, rank: _Rank) -> dict[str, str]:
        """What a rank printed in the phase that it did not end."""
        found = {}
        for stream in _STREAMS:
            with (
                contextlib.suppress(FileNotFoundError),
                self._spec.log_path(number, stream).open("rb") as file,
            ):
                start = self._unread_from(number, rank, stream)
                found[stream] = str(read_kept(file.fileno(), start)[0])
        return {stream: text for stream, text in found.items() if text}


def _record(rank: _Rank, message: RankMessage) -> None:
    match message:
        case PhaseReport():
            _record_report(rank, message)
        case WarningSeen():
            rank.warnings.append(message)
        case TimerSet() | TimerCancelled():
            rank.timer = message if isinstance(message, TimerSet) else None
        case DebuggerEntered():
            rank.is_debugging = rank.entered_debugger = True
        case DebuggerLeft():
            rank.is_debugging = False
        case DebuggerSkipped():
            rank.skipped_debuggers.append(message.site)
        case TestEnded():
            _record_end(rank, message)
        case TestsEnded():
            rank.has_ended_tests = True
        case RankHandshake() | WatchdogHandshake() | PositionAnswer():
            raise CodecError(f"expected what a rank reports, got {type(message).__name__}")


def _record_report(rank: _Rank, report: PhaseReport) -> None:
    rank.is_debugging = report.precedes_debugger
    rank.reports.append(report)
    # After a failed subtest the test goes on.
    rank.has_failed_phase |= report.has_failed and not report.is_subtest
    rank.nbytes_reported = report.nbytes_reported


def _record_end(rank: _Rank, ended: TestEnded) -> None:
    if ended.last_report is not None:
        _record_report(rank, ended.last_report)
    rank.payloads = ended.payloads
    rank.can_run_another = ended.can_run_another
    if ended.escaped is not None:
        rank.escaped = ended.escaped.text
        rank.ended_at = ended.escaped.at
    rank.is_done = True
