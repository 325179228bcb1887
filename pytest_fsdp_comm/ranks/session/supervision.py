"""Watches one test on its ranks: collects what they send, and ends them at the deadline."""

from __future__ import annotations

import contextlib
import math
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.ranks.hangs.stacks import read_stacks
from pytest_fsdp_comm.ranks.rank.kept_output import (
    KEPT_NBYTES,
    MOST_ON_DISK_NBYTES,
    OutputFile,
    read_kept,
)
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.results import RankResult, Stopped

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from pytest_fsdp_comm.ranks.wire.launch import Launch, RankProcesses

# Once a rank has failed, the others fail within a second of it (their connections close) or hang.
GRACE_S = 1.0
_POLL_S = 0.05
_DUMP_S = 1.0
_ANSWER_S = 0.7
_STREAMS = ("stdout", "stderr")
# A message fits into the socket, unless the rank does not read at all.
_SEND_S = 1.0
_GREETING_NBYTES = 4096


HasFailedElsewhere = Callable[[bool], bool]


TellProgress = Callable[["Supervision", float], float]


def _silently(supervision: Supervision, seconds: float) -> float:
    del supervision, seconds
    return math.inf


def _nowhere(has_failed: bool) -> bool:
    del has_failed
    return False


@dataclass(frozen=True, slots=True)
class _Timer:
    """A timeout that pytest-timeout set in a rank."""

    timeout_s: float
    until: float
    """When it runs out (`time.monotonic`)."""


@dataclass(slots=True)
class _Rank:
    """What is known so far of one rank."""

    channel: Channel | None = None
    watchdog: Channel | None = None
    position: dict[str, Any] | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    payloads: list[Any] | None = None
    escaped: str | None = None
    is_done: bool = False
    status: int | None = None
    ended_at: float | None = None
    stopped: Stopped | None = None
    stacks: str = ""
    timer: _Timer | None = None
    is_debugging: bool = False
    nbytes_read: dict[str, int] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.is_done or self.status is not None

    @property
    def has_failed(self) -> bool:
        # After a failed subtest the test goes on.
        failed = any(
            entry["report"]["outcome"] == "failed" and not entry["is_subtest"]
            for entry in self.reports
        )
        return failed or self.escaped is not None or (self.status is not None and not self.is_done)


class Supervision:
    """One set of ranks, for the tests that it runs one after another."""

    def __init__(self, launch: Launch, listener: socket.socket, processes: RankProcesses) -> None:
        """Takes over a set of ranks that has just been started.

        Args:
            launch: What the ranks were told.
            listener: Listens at the launch's socket path.
            processes: The ranks' processes.
        """
        self._launch = launch
        self._listener = listener
        self._listener.settimeout(0.0)
        self._processes = processes
        self._ranks = {rank: _Rank() for rank in launch.ranks}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._descriptor = processes.fileno()
        if self._descriptor is not None:
            self._selector.register(self._descriptor, selectors.EVENT_READ, None)
        # Where the logs were when a later test of the set began.
        self._begun_at: dict[tuple[int, str], int] = {}
        self._outputs = {
            (rank, stream): OutputFile(launch.log_path(rank, stream))
            for rank in launch.ranks
            for stream in _STREAMS
        }
        self._bounded_at = 0.0
        self._echo = _Echo(launch) if launch.echoes else None
        self._questions = 0
        self.is_reusable = False
        """All ranks finished the last test and wait for another."""

    def run(
        self,
        *,
        started_at: float,
        has_failed_elsewhere: HasFailedElsewhere = _nowhere,
        tell_progress: TellProgress = _silently,
    ) -> dict[int, RankResult]:
        """Waits until every rank finished the test, failed with a grace period, or ran out of time.

        Args:
            started_at: When the ranks were started for this test (`time.monotonic`).
            has_failed_elsewhere: Asked again and again while ranks run, and told whether one of
                them has failed; says whether one that another process supervises has.
            tell_progress: Called now and then with the seconds that the test has run; returns after
                how many to call it again.

        Returns:
            What each rank did.
        """
        deadline = started_at + self._launch.settings.timeout_s
        next_told_s = tell_progress(self, 0.0)
        first_failure: float | None = None
        was_debugged = False
        while not all(rank.is_over for rank in self._ranks.values()):
            now = time.monotonic()
            if any(rank.is_debugging and not rank.is_over for rank in self._ranks.values()):
                was_debugged = True
                # Whoever failed, it is the debugger's turn.
                first_failure = None
                self._wait(_POLL_S)
                self._release_output()
                continue
            has_failed = any(rank.has_failed for rank in self._ranks.values())
            has_failed = has_failed_elsewhere(has_failed) or has_failed
            if first_failure is None and has_failed:
                first_failure = now
            if first_failure is not None and now > first_failure + GRACE_S:
                self._stop(Stopped.AFTER_FAILURE)
                break
            if now - started_at > next_told_s:
                next_told_s = tell_progress(self, now - started_at)
            ends_at = min([deadline, *(timer.until for timer in self._timers())])
            # Time in a debugger is not the test's, and how much it was does not matter any more.
            if now > ends_at and not was_debugged:
                self._stop(Stopped.AT_DEADLINE)
                break
            self._wait(min(_POLL_S, max(ends_at - now, 0.001)))
            if self._bound_output():
                break
        if self._echo:
            self._echo.copy()
        results = {number: self._result(number, rank) for number, rank in self._ranks.items()}
        self.is_reusable = not any(rank.has_failed for rank in self._ranks.values()) and all(
            rank.is_done and rank.status is None for rank in self._ranks.values()
        )
        return results

    def run_next(
        self,
        item_index: int,
        *,
        started_at: float,
        has_failed_elsewhere: HasFailedElsewhere = _nowhere,
        tell_progress: TellProgress = _silently,
    ) -> dict[int, RankResult]:
        """Runs another test on the same ranks."""
        for number, rank in self._ranks.items():
            for stream in _STREAMS:
                size = 0
                with contextlib.suppress(FileNotFoundError):
                    size = self._launch.log_path(number, stream).stat().st_size
                self._begun_at[number, stream] = size
            self._ranks[number] = _Rank(channel=rank.channel, watchdog=rank.watchdog)
            if rank.channel is not None:
                self._selector.unregister(rank.channel)
                self._selector.register(rank.channel, selectors.EVENT_READ, self._ranks[number])
                with contextlib.suppress(OSError):  # it has died, which will be noticed
                    rank.channel.send({"item": item_index})
        return self.run(
            started_at=started_at,
            has_failed_elsewhere=has_failed_elsewhere,
            tell_progress=tell_progress,
        )

    def end(self, within_s: float) -> dict[int, int]:
        """Kills every process of the set; see `RankProcesses.end`."""
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

    def _timers(self) -> list[_Timer]:
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
        if now < self._bounded_at + _POLL_S:
            return False
        self._bounded_at = now
        fast = [
            number
            for number, taken in self._release_output().items()
            if taken > MOST_ON_DISK_NBYTES
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
        return rank.nbytes_read.get(stream, self._begun_at.get((number, stream), 0))

    def _note_ends(self) -> None:
        for number, status in self._processes.exit_statuses().items():
            rank = self._ranks[number]
            if rank.status is None:
                # What it sent before its end is still in the socket.
                self._drain(rank)
                rank.status = status
                rank.ended_at = time.time()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # whoever called has hung up
            connection, _ = self._listener.accept()
            channel = Channel(connection)
            channel.settimeout(_SEND_S)
            self._selector.register(channel, selectors.EVENT_READ, None)

    def _greet(self, channel: Channel) -> None:
        """Reads who has called, once that was said; whoever says something else is a stranger."""
        try:
            said = list(channel.receive_available())
            if not said and not channel.is_closed and channel.nbytes_pending < _GREETING_NBYTES:
                return
            hello, *more = said
            rank = self._ranks[hello["rank"]]
        except (ValueError, LookupError, TypeError, OSError):
            self._selector.unregister(channel)
            channel.close()
            return
        self._selector.unregister(channel)
        if "watchdog" in hello:
            rank.watchdog = channel
            return
        rank.channel = channel
        self._selector.register(channel, selectors.EVENT_READ, rank)
        # What came in one piece with the greeting makes no descriptor readable again.
        for message in more:
            _record(rank, message)

    def _drain(self, rank: _Rank) -> None:
        while rank.channel is None and self._admit():
            pass
        while rank.channel is not None and not rank.channel.is_closed:
            with contextlib.suppress(BlockingIOError):
                rank.channel.settimeout(0.0)
                self._read(rank)
                continue
            break

    def _admit(self) -> bool:
        """Lets in who has called; whether there was anybody."""
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
        channel = rank.channel
        if channel is None:
            return
        try:
            for message in channel.receive_available():
                _record(rank, message)
        except BlockingIOError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            # The rank's test wrote to a descriptor that is not its own.
            rank.escaped = f"a broken connection ({type(error).__name__}: {error})"
            rank.ended_at = time.time()
            channel.is_closed = True
        if channel.is_closed:
            self._selector.unregister(channel)

    def _stop(self, why: Stopped) -> None:
        """Asks the ranks that still run for their stacks, then leaves them to `end`."""
        running = {number: rank for number, rank in self._ranks.items() if not rank.is_over}
        for number in running:
            self._processes.send_signal(number, signal.SIGUSR1)
        asked = self._ask_positions()
        until = time.monotonic() + _DUMP_S
        for number, rank in running.items():
            rank.stopped = why
            rank.stacks = read_stacks(self._launch.stacks_path(number), until=until)
        # Most have answered by now; one that holds the GIL never does.
        self._take_positions(asked)
        for rank in running.values():
            if not rank.stacks and rank.position is not None:
                rank.stacks = rank.position["site"]  # on a busy machine a dump may come too late
        # It may be long until `end`, where ranks of other processes are waited for: until then it
        # must neither write on nor wear out the machine.
        for number in running:
            self._processes.send_signal(number, signal.SIGSTOP)

    def _take_positions(self, asked: Sequence[tuple[_Rank, Channel]]) -> None:
        until = time.monotonic() + _ANSWER_S
        for rank, watchdog in asked:
            rank.position = None
            with contextlib.suppress(OSError):
                while rank.position is None:
                    watchdog.settimeout(max(until - time.monotonic(), 0.001))
                    answer = watchdog.receive()
                    if answer is None:
                        break
                    # An earlier question may have been answered after its time.
                    if answer["number"] == self._questions:
                        rank.position = {**answer["position"], "is_over": rank.is_over}

    def positions(self) -> dict[int, dict[str, Any]]:
        """Where the ranks are, as `position.read_position`; those without an answer are missing."""
        self._take_positions(self._ask_positions())
        ranks = self._ranks.items()
        return {number: rank.position for number, rank in ranks if rank.position is not None}

    def _ask_positions(self) -> list[tuple[_Rank, Channel]]:
        """Asks every rank that lives where it is, those that have finished the test too."""
        asked = []
        self._questions += 1
        for rank in self._ranks.values():
            if rank.watchdog is not None and rank.status is None:
                with contextlib.suppress(OSError):  # it died just now
                    rank.watchdog.settimeout(_SEND_S)
                    rank.watchdog.send({"number": self._questions})
                    asked.append((rank, rank.watchdog))
        return asked

    def _result(self, number: int, rank: _Rank) -> RankResult:
        return RankResult(
            rank=number,
            reports=tuple((entry["report"], entry["at"]) for entry in rank.reports),
            warnings=tuple(rank.warnings),
            payloads=rank.payloads,
            escaped=rank.escaped,
            status=None if rank.is_done else rank.status,
            ended_at=rank.ended_at,
            stopped=rank.stopped,
            timeout_s=min(
                (timer.timeout_s for timer in self._timers() if timer.until < time.monotonic()),
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
            path = self._launch.log_path(number, stream)
            if path.exists():
                with path.open("rb") as file:
                    start = self._unread_from(number, rank, stream)
                    found[stream], _ = read_kept(file.fileno(), start)
        return {stream: text for stream, text in found.items() if text}


def _record(rank: _Rank, message: Mapping[str, Any]) -> None:
    rank.is_debugging = message.get("debugs", rank.is_debugging)
    if "report" in message:
        rank.reports.append({name: message[name] for name in ("report", "at", "is_subtest")})
        rank.nbytes_read = message["read"]
    if "warning" in message:
        rank.warnings.append(message["warning"])
    if "timer_s" in message:
        timeout_s = message["timer_s"]
        rank.timer = None if timeout_s is None else _Timer(timeout_s, message["at"] + timeout_s)
    if "done" in message:
        rank.payloads = message.get("payloads")
        if "escaped" in message:
            rank.escaped = message["escaped"]
            rank.ended_at = message["escaped_at"]
        rank.is_done = True


class _Echo:
    """Shows each rank's new lines under its name."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._offsets: dict[tuple[int, str], int] = {}

    def copy(self) -> None:
        for rank in self._launch.ranks:
            for stream in self._launch.echoes:
                self._copy_one(rank, stream)
        sys.stdout.flush()

    def _copy_one(self, rank: int, stream: str) -> None:
        path = self._launch.log_path(rank, stream)
        offset = self._offsets.get((rank, stream), 0)
        if not path.exists() or path.stat().st_size <= offset:
            return
        with path.open("rb") as file:
            if path.stat().st_size - offset > KEPT_NBYTES:
                # What is shown has no limit, as what is seen needs no room; only how fast it comes.
                text, end = read_kept(file.fileno(), offset)
            else:
                file.seek(offset)
                data = file.read()
                # The rest of the last line is still to come.
                whole = data[: data.rfind(b"\n") + 1]
                text, end = whole.decode("utf-8", "backslashreplace"), offset + len(whole)
        self._offsets[rank, stream] = end
        for line in text.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
