"""Supervises the ranks of a test: receives their reports, and stops ranks that hang."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import pytest

from pytest_fsdp_comm.errors import printable
from pytest_fsdp_comm.ranks.hangs.stacks import (
    append_code,
    find_innermost_user_frame,
    read_dump,
    show_code,
    show_site,
    show_stack,
)
from pytest_fsdp_comm.ranks.hangs.terminate import load_position
from pytest_fsdp_comm.ranks.hangs.waiting import Stranded, find_stranded
from pytest_fsdp_comm.ranks.rank.kept_output import read_log_parts
from pytest_fsdp_comm.ranks.session.verdict import describe_positions
from pytest_fsdp_comm.ranks.start.ending import remove_directory
from pytest_fsdp_comm.ranks.start.fork_server import RankServer, ServerDiedError
from pytest_fsdp_comm.ranks.wire import messages
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.ranks.wire.results import (
    Activity,
    PhaseReport,
    Position,
    RankResult,
    Stopped,
    WarningSeen,
)
from pytest_fsdp_comm.text.codec import CodecError
from pytest_fsdp_comm.text.rank_lists import (
    group_ranks_by_text,
    name_ranks,
    prefix_texts_with_ranks,
)

# How long other ranks may run once a rank has failed. Most fail within a second, because their
# connections to the failed rank close; a rank that does not fail usually hangs. A rank that is
# comparing snapshots or formatting its failure does not wait for other ranks, so it gets more time.
GRACE_S = 1.0
_POLL_S = 0.05
_DUMP_S = 1.0
# How long to wait for a watchdog, which needs the GIL and a core; ranks may share few cores.
_ANSWER_S = 1.0
# How long to wait for answers that include process groups, which take CPU time to read.
_GROUPS_S = 8.0
_STREAMS = ("stdout", "stderr")
# Longest pause in the middle of a message. A live rank sends a message without pausing, so a longer
# pause means that the rank was killed or stopped.
_STALLS_S = 5.0
# How long spawned ranks may import and collect before the test begins. Importing torch and a large
# project takes minutes on a busy network file system; the fork server gets as long.
STARTS_WITHIN_S = 300.0
# Maximum number of messages to drain from a rank, in case it never stops sending.
_DRAINED_MESSAGES = 1000

_Channel: TypeAlias = Channel[messages.RankMessage]


class Supervision:
    """A running rank set and the results of its current test."""

    def __init__(
        self,
        spec: messages.RankSetSpec,
        server: RankServer,
        connections: Mapping[int, tuple[Connection, Connection]],
        config: pytest.Config,
        *,
        are_spawned: bool = False,
    ) -> None:
        self._are_spawned = are_spawned
        self.spec = spec
        self.server = server
        self._channels: dict[int, _Channel] = {}
        self._watchdogs: dict[int, _Channel] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, None)
        for rank, (connection, watchdog) in connections.items():
            self._channels[rank] = Channel(connection, stalls_s=extend_under_load(_STALLS_S))
            self._watchdogs[rank] = Channel(watchdog, stalls_s=extend_under_load(_STALLS_S))
            self._selector.register(self._channels[rank], selectors.EVENT_READ, rank)
        self._exited: set[int] = set()
        # For each rank and stream, how many bytes of the log are in reports of earlier tests.
        self._reported: dict[int, Mapping[str, int]] = {}
        self._echoed: Counter[tuple[int, str]] = Counter()
        self._reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        if hasattr(config, "workerinput"):  # an xdist worker has no terminal
            self._reporter = None
        self._questions = 0
        self._reset_for_test(spec.next_test)

    # With scope="module", ranks can run several tests. If the next test is sure to run on the same
    # ranks, they keep the fixtures that both tests share, as pytest does. After a test that
    # passed on all ranks and did not replace a process group, the ranks wait for `RunTest`. If no
    # other test follows, they receive `EndTests`, or are killed. If the teardown of a kept fixture
    # fails, the failure is reported with the next test.

    def _reset_for_test(self, next_test: messages.NextTest) -> None:
        ranks = self.spec.settings.ranks
        self._results = {rank: RankResult(rank=rank, is_starting=True) for rank in ranks}
        self._have_ended_tests: set[int] = set()
        self._stranded: Stranded = {}
        self._next_check_at, self._check_after_s = 0.0, GRACE_S
        self._had_done: bool | None = None
        self._next_test = next_test
        self.is_reusable = False
        """Whether all ranks have passed the last test and are waiting for the next one."""

    def begin_next_test(self, item_index: int, next_test: messages.NextTest) -> None:
        self._reported = {
            rank: result.reports[-1].nbytes_reported for rank, result in self._results.items()
        }
        self._reset_for_test(next_test)
        self._send_to_ranks(
            self._channels, messages.RunTest(item_index=item_index, next_test=next_test)
        )

    def run(
        self,
        *,
        started_at: float,
        timeout_s: float,
        progress_after_s: float = math.inf,
        nodeid: str = "",
    ) -> dict[int, RankResult]:
        """Wait until the test is over on all ranks, or stop them; return the result of each rank.

        The deadline is `timeout_s` after all ranks have begun the test. They were started at
        `started_at` (`time.monotonic`). Print progress after `progress_after_s`, and again each
        time the elapsed time has doubled.
        """
        results = self._results.values()
        limit_s = extend_under_load(STARTS_WITHIN_S) if self._are_spawned else timeout_s
        deadline, is_starting, shows_after_s = started_at + limit_s, True, progress_after_s
        grace_ends_at: float | None = None
        was_debugged = False
        while not all(result.is_over for result in results):
            now = time.monotonic()
            if is_starting and not any(r.is_starting and not r.is_over for r in results):
                is_starting, started_at, limit_s = False, now, timeout_s
                deadline, shows_after_s = now + timeout_s, progress_after_s
            if any(result.is_debugging and not result.is_over for result in results):
                was_debugged = True
                # Do not stop ranks while a user is debugging, even if a rank has failed.
                grace_ends_at = None
                self._process_events(_POLL_S)
                continue
            if grace_ends_at is None and any(result.has_failed for result in results):
                grace_ends_at = now + extend_under_load(GRACE_S)
            # A test that has been debugged no longer has a deadline.
            if now > deadline and not was_debugged:
                has_failed = grace_ends_at is not None
                self._mark_running_as_stopped(
                    Stopped.AFTER_FAILURE if has_failed else Stopped.AT_DEADLINE
                )
                break
            if grace_ends_at is not None and now > grace_ends_at:
                if not self._is_any_rank_reporting():
                    self._mark_running_as_stopped(Stopped.AFTER_FAILURE)
                    break
                grace_ends_at = time.monotonic() + extend_under_load(GRACE_S)
            if not (is_starting or grace_ends_at) and self._check_for_stranded_ranks(now):
                self._mark_running_as_stopped(Stopped.AT_DEADLINE)
                break
            after_s = now - started_at
            if self._reporter is not None and after_s > shows_after_s:
                self._show_progress(nodeid, after_s, limit_s, is_starting=is_starting)
                shows_after_s = 2 * after_s
            self._process_events(min(_POLL_S, max(deadline - now, 0.001)))
        self._finish_test()
        return dict(self._results)

    def _is_any_rank_reporting(self) -> bool:
        """Whether a running rank compares snapshots or formats its failure."""
        # Ask twice: on a busy machine, a rank may answer late, or be about to compare.
        for _ in range(2):
            running = [rank for rank, result in self._results.items() if not result.is_over]
            if any(position.is_reporting for position in self._ask_positions(running).values()):
                return True
            self._process_events(_POLL_S)
        return False

    def _finish_test(self) -> None:
        results = self._results.values()
        # The report compares the last calls of failed ranks, so ask where the ranks are, unless
        # `_mark_running_as_stopped` has asked already.
        has_failed = any(result.has_failed for result in results)
        if has_failed and not any(result.stopped for result in results):
            self._locate_ranks()
        for result in results:
            if result.is_done:
                position = result.position or Position(site="")
                result.position = replace(position, activity=Activity.HAS_ENDED)
        self._print_new_log_lines()
        self.is_reusable = not self._exited and all(
            result.is_done and not result.has_failed and result.can_run_another
            for result in results
        )
        if not self.is_reusable:
            # Tear down kept fixtures now, so that this test's report includes their failures.
            self._tear_down_kept_fixtures()
        self._read_unreported_output()

    def can_run(self, item_index: int) -> bool:
        """Return whether the ranks are waiting for a test, and may run the one at `item_index`."""
        expected = self._next_test
        return not expected.is_none and expected.index in {None, item_index}

    def end(self, within_s: float) -> tuple[list[str], list[str]]:
        """Kill the ranks; describe failed teardowns of kept fixtures, and ranks that survived."""
        problems = self._tear_down_and_list_problems()
        try:
            done = {rank for rank, result in self._results.items() if result.is_done}
            unended = self.server.end_ranks(
                within_s,
                running=self._results.keys() - done,
                unanswered=done - self._have_ended_tests,
            )
        finally:
            self._selector.close()
        remove_directory(self.spec.directory)
        return problems, [
            f"rank {rank} of {self.spec.nodeid} has not ended: its process {pid} still exists "
            f"{within_s:.0f} s after SIGKILL.\n"
            "Perhaps a driver or a file server does not respond: /proc/"
            f"{pid}/stack (readable as root) shows where it is stuck. Later tests get new ranks."
            for rank, pid in unended.items()
        ]

    def _tear_down_and_list_problems(self) -> list[str]:
        """Tear down the fixtures that ranks kept for the next test, and describe the failures."""
        # pytest has logged the reports of the last test, so drop these, and collect new reports.
        results = self._results.items()
        self._results = {rank: replace(result, reports=()) for rank, result in results}
        self._tear_down_kept_fixtures()
        late = {
            rank: _read_failure_message(report)
            for rank, result in self._results.items()
            for report in result.reports
            if report.has_failed
        }
        return [
            f"{name_ranks(ranks)}: teardown failed in a fixture of {self.spec.nodeid} or a later "
            f"test of its module:\n{text}"
            for ranks, text in group_ranks_by_text(late)
        ]

    def _tear_down_kept_fixtures(self) -> None:
        """Give ranks a second to tear down the fixtures that they kept for the next test."""
        if self._next_test.is_none:
            return
        self._next_test = messages.NextTest()
        waiting = {rank for rank, result in self._results.items() if result.is_done}
        self._send_to_ranks(waiting - self._exited, messages.EndTests())
        until = time.monotonic() + extend_under_load(GRACE_S)
        with contextlib.suppress(ServerDiedError):  # the ranks died with the server
            while waiting - self._exited - self._have_ended_tests and time.monotonic() < until:
                self._process_events(_POLL_S)

    def _send_to_ranks(
        self, ranks: Iterable[int], message: messages.RunTest | messages.EndTests
    ) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):  # the rank has died; `_note_ended_ranks` will notice
                self._channels[rank].send(message)

    def _process_events(self, timeout_s: float) -> None:
        events = self._selector.select(timeout_s)
        for key, _ in events:
            if key.data is not None:
                self._read_and_apply_message(key.data)
        # Also check after each timeout, because launched ranks never make `server` readable.
        if not events or any(key.fileobj is self.server for key, _ in events):
            self._note_ended_ranks()
        self._print_new_log_lines()

    def _note_ended_ranks(self) -> None:
        for rank, status in self.server.exit_statuses().items():
            if rank not in self._exited:
                # Note [Dead ranks are read first]: the last messages of a dead rank are still in
                # the socket. They may say that the rank finished the test, or why it failed, so
                # read them all before marking a rank as dead or stopped.
                self._drain_messages(rank)
                self._exited.add(rank)
                if not self._results[rank].is_done:
                    self._results[rank].status = status
                    self._results[rank].ended_at = time.time()
                    self._results[rank].position = load_position(self.spec.position_path(rank))

    def _drain_messages(self, rank: int) -> None:
        """Read all messages that a rank has sent; see Note [Dead ranks are read first]."""
        channel = self._channels[rank]
        for _ in range(_DRAINED_MESSAGES):
            if channel.is_closed or not channel.connection.poll(0):
                break
            self._read_and_apply_message(rank)

    def _read_and_apply_message(self, rank: int) -> None:
        channel = self._channels[rank]
        try:
            message = channel.receive()
            if message is not None:
                self._update_result(self._results[rank], message)
        except (CodecError, OSError) as error:
            result = self._results[rank]
            result.escaped = (
                f"a broken connection to pytest ({type(error).__name__}: {error}; perhaps the test "
                "used one of pytest's file descriptors)"
            )
            result.ended_at = time.time()
            channel.is_closed = True
        if channel.is_closed:
            self._selector.unregister(channel)

    def _update_result(self, result: RankResult, message: messages.RankMessage) -> None:
        match message:
            case PhaseReport():
                result.reports += (message,)
                if not message.is_subtest:
                    result.phase_began_at = time.time()
                result.is_debugging = message.precedes_debugger
            case WarningSeen():
                result.warnings += (message,)
            case messages.TestBegun():
                result.is_starting, result.phase_began_at = False, time.time()
            case messages.Debugging():
                result.is_debugging = message.has_begun
            case messages.TestEnded():
                result.payloads = message.payloads
                result.further_ranks = message.further_ranks
                result.can_run_another = message.can_run_another
                result.escaped = message.escaped
                result.session_exit = message.session_exit
                result.is_done = True
                result.ended_at = time.time() if result.has_died else None
            case messages.TestsEnded():
                self._have_ended_tests.add(result.rank)
            case messages.PositionAnswer():
                raise CodecError(f"expected a report from a rank, got {type(message).__name__}")

    def _mark_running_as_stopped(self, why: Stopped) -> None:
        """Mark all running ranks as stopped, and record where they are; `end` kills them later."""
        # On a busy machine, a rank may have finished, but its last message may not have been read.
        running = [result for result in self._results.values() if not result.is_over]
        for result in running:
            self._drain_messages(result.rank)
        self._locate_ranks()
        for result in running:
            # Ignore messages that arrive after the deadline: SIGUSR1 may have interrupted the call
            # that hung, so that the test continued.
            if why is Stopped.AFTER_FAILURE and not result.is_over:
                self._drain_messages(result.rank)
            if not result.is_over:
                result.stopped, result.ended_at = why, time.time()

    def _locate_ranks(self) -> None:
        # Note [Locating ranks]: each rank has a watchdog thread that reports where the rank is. Ask
        # the watchdogs twice: first without groups, which is so quick that all positions are from
        # the same moment, then with groups, which takes CPU time. A rank whose code holds the GIL
        # does not answer, so send it a signal whose handler dumps the stack. Do this last, because
        # the signal can interrupt the call that the rank is waiting in. If the rank then answers
        # after all, and is still where the dump says, it was only slow.
        results = self._results
        positions = self._ask_positions(results)
        running = [rank for rank, result in results.items() if not result.is_over]
        silent = [rank for rank in running if rank not in positions]
        able = [rank for rank, result in results.items() if rank in positions or result.is_done]
        positions |= self._ask_positions(able, within_s=_GROUPS_S, with_groups=True)
        positions |= self._locate_silent_ranks(silent)
        for rank, position in positions.items():
            results[rank].position = position
            if self._is_collecting(rank):
                results[rank].position = replace(position, activity=Activity.STARTS)

    def _is_collecting(self, rank: int) -> bool:
        # Forked ranks do not import or collect: they are forked from a process that has.
        result = self._results[rank]
        return self._are_spawned and result.is_starting and not result.is_over

    def _locate_silent_ranks(self, silent: Collection[int]) -> dict[int, Position]:
        """Locate ranks whose watchdog does not answer; see Note [Locating ranks]."""
        for rank in silent:
            if rank in self.server.pids and rank not in self.server.exit_statuses():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.server.pids[rank], signal.SIGUSR1)
        until = time.monotonic() + extend_under_load(_DUMP_S)
        dumped = {}
        for rank in silent:
            frames = read_dump(self.spec.stacks_path(rank), until=until)
            user = find_innermost_user_frame(frames)
            dumped[rank] = Position(
                site=show_site(user),
                code=show_code(user),
                stack=show_stack(frames),
                activity=Activity.HOLDS_GIL if frames else Activity.SILENT,
            )
        late = self._ask_positions(silent, with_groups=True)
        return dumped | {rank: late[rank] for rank in late if late[rank].site == dumped[rank].site}

    def _ask_positions(
        self, ranks: Collection[int], *, within_s: float = _ANSWER_S, with_groups: bool = False
    ) -> dict[int, Position]:
        """Ask ranks where they are; return the positions of those that answer in time."""
        self._questions += 1
        for rank in ranks:
            with contextlib.suppress(OSError):
                question = messages.PositionQuestion(
                    number=self._questions, with_groups=with_groups
                )
                self._watchdogs[rank].send(question)
        until = time.monotonic() + extend_under_load(within_s)
        positions = {}
        for rank in ranks:
            with contextlib.suppress(OSError, CodecError):
                # Do not wait for a dead rank, whose children may keep its socket open.
                while answer := self._watchdogs[rank].receive(
                    within_s=0.0 if rank in self._exited else until - time.monotonic()
                ):
                    # Skip late answers to earlier questions.
                    if (
                        isinstance(answer, messages.PositionAnswer)
                        and answer.number == self._questions
                    ):
                        positions[rank] = answer.position
                        if self._results[rank].is_done:
                            positions[rank] = replace(positions[rank], activity=Activity.HAS_ENDED)
                        break
        return positions

    def _check_for_stranded_ranks(self, now: float) -> bool:
        """If a check is due, return whether a rank waits for a rank that issues no more calls."""
        # A rank may run much longer than another rank, but it cannot complete a collective that a
        # rank never called which has finished, or which waits in a comparison. A rank counts as
        # stuck if two checks in a row find it in such a collective. Check more rarely as time
        # passes, but soon after the first rank has finished. Leave short tests alone until then,
        # because an answer takes time and memory of the rank.
        has_done = any(result.is_done for result in self._results.values())
        if has_done != self._had_done:
            self._had_done, self._check_after_s = has_done, GRACE_S if has_done else 5 * GRACE_S
            self._next_check_at = now + self._check_after_s
        if now < self._next_check_at:
            return False
        before, limit_s = self._stranded, self.spec.settings.timeout_s
        self._stranded = find_stranded(
            self._ask_positions(self._results, with_groups=True), limit_s
        )
        self._check_after_s = GRACE_S if self._stranded else 2 * self._check_after_s
        self._next_check_at = time.monotonic() + self._check_after_s
        if not self._stranded or self._stranded != before:
            return False
        for rank, (_, absent) in self._stranded.items():
            self._results[rank].waited_for = absent
        return True

    def _show_progress(
        self, nodeid: str, after_s: float, limit_s: float, *, is_starting: bool
    ) -> None:
        sites = {
            rank: "done"
            if position.activity is Activity.HAS_ENDED
            else f"at {append_code(position.site, position.code) or 'an unknown line'}"
            for rank, position in self._ask_positions(self._results).items()
        }
        sites |= {
            rank: "still importing or collecting"
            for rank in self._results
            if self._is_collecting(rank)
        }
        did, limit = "is still running", f"deadline {limit_s:g} s"
        if is_starting:
            did, limit = "has not begun on all ranks", f"limit {limit_s:.0f} s"
        where = "; ".join(prefix_texts_with_ranks(sites))
        self._reporter.ensure_newline()
        self._reporter.write_line(
            f"fsdp-comm: {printable(nodeid)} {did} after {after_s:.0f} s ({limit}): "
            f"{where or 'no rank responds'}"
        )

    def show_interrupt(self, nodeid: str, after_s: float) -> None:
        if self._reporter is not None:
            self._locate_ranks()
            self._reporter.ensure_newline()
            title = f"fsdp-comm: {nodeid} was interrupted after {after_s:.0f} s"
            for line in (title, *describe_positions(self._results)):
                self._reporter.write_line(printable(line))

    def _print_new_log_lines(self) -> None:
        """Print new lines of the logs that `RankSetSpec.echoes` names."""
        for rank, stream in itertools.product(self.spec.settings.ranks, self.spec.echoes):
            with (
                contextlib.suppress(FileNotFoundError),  # not created yet, or removed
                self.spec.log_path(rank, stream).open("rb") as file,
            ):
                file.seek(self._echoed[rank, stream])
                data = file.read()
                # Print an incomplete last line later, when the rank has written the rest of it.
                lines = data[: data.rfind(b"\n") + 1]
                self._echoed[rank, stream] += len(lines)
                if lines and self._reporter is not None:
                    self._reporter.ensure_newline()
                for line in lines.decode("utf-8", "backslashreplace").splitlines():
                    sys.stdout.write(f"[rank {rank}] {line}\n")
                sys.stdout.flush()

    def _read_unreported_output(self) -> None:
        for rank, result in self._results.items():
            for stream in () if result.is_done else _STREAMS:
                with (
                    contextlib.suppress(FileNotFoundError),
                    self.spec.log_path(rank, stream).open("rb") as file,
                ):
                    # Skip output that is already in a report.
                    reported = self._reported.get(rank, {})
                    if result.reports:
                        reported = result.reports[-1].nbytes_reported
                    start = reported.get(stream, 0)
                    end = os.fstat(file.fileno()).st_size
                    if end > start:
                        result.unreported[stream] = read_log_parts(file.fileno(), [(start, end)])


def _read_failure_message(phase: PhaseReport) -> str:
    longrepr = phase.report["longrepr"]
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    return str(crash["message"] if crash else longrepr)
