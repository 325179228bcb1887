"""Rank 0's process: announces the next test, and reports what all ranks did with it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm.ranks.launched.agreement import USUAL_REASONS
from pytest_fsdp_comm.ranks.launched.heartbeat import Pulse
from pytest_fsdp_comm.ranks.launched.meeting import (
    MEET_TIMEOUT_S,
    PLAN,
    Meeting,
    fits,
    handshake,
    polls,
    sign_off,
)
from pytest_fsdp_comm.ranks.launched.sigterm import SIGTERM_REASON, Termination
from pytest_fsdp_comm.ranks.rank.isolation import resolve_basetemp
from pytest_fsdp_comm.ranks.session.peers import SharedResults
from pytest_fsdp_comm.ranks.wire.messages import (
    BeginTest,
    EndSession,
    FollowerHandshake,
    FollowerResult,
    Plan,
    Verdict,
)
from pytest_fsdp_comm.ranks.wire.results import RankResult
from pytest_fsdp_comm.ranks.wire.text_store import StoreLostError
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.wire.messages import PlannedTest
    from pytest_fsdp_comm.ranks.wire.rank_set import LocalRank

# The other processes run no code of users: a silence is a death.
_SILENT_AFTER_S = 15.0
# After SIGTERM, which all processes of a machine get, until the living have answered: a second for
# their ranks to fail, and the time of a dump.
_LAST_ANSWERS_S = 4.0
_FAREWELL_S = 10.0
_EXPLAIN_AFTER_S = 10.0
# Hosts agree about the time to some ms, and the leader learns of theirs to some ms only.
_LARGEST_CLOCK_ERROR_S = 1.0


class Leader:
    """The other processes, seen from rank 0's."""

    def __init__(self, session: pytest.Session, launched: LaunchedRank) -> None:
        """Stores the arguments; `meet` connects.

        Args:
            session: The session, after collection.
            launched: This process's rank.
        """
        self._session = session
        self._launched = launched
        self._others = range(1, launched.world_size)
        self._hosts: dict[int, str] = {}
        self._pulses: dict[int, Pulse] = {}
        self._lost: dict[int, str] = {}
        self._meeting: Meeting | None = None
        self._began_at: float | None = None

    def meet(self, tests: tuple[PlannedTest, ...]) -> None:
        """Waits until every process has collected the same tests.

        Args:
            tests: The tests, in order.

        Raises:
            pytest.UsageError: One did not, or did not come.
        """
        config = self._session.config
        termination = Termination(config, defers=False)
        where = f"{self._launched.host}:{self._launched.port}"
        try:
            self._meeting = Meeting(self._launched, termination)
        except StoreLostError as error:
            raise pytest.UsageError(
                f"the store of the launched ranks at {where} (MASTER_ADDR, MASTER_PORT) cannot be "
                f"{'reached' if self._launched.has_store else 'served'}: {error}; is the port free "
                f"and the same for every rank? Without a launcher, unset {self._launched.variables}"
            ) from None
        has_seed = config.pluginmanager.has_plugin("randomly")
        seed = config.getoption("randomly_seed") if has_seed else None
        plan = Plan(tests=tests, basetemp=self.basetemp(), randomly_seed=seed)
        self._meeting.begin_heartbeat()
        self._meeting.send(PLAN, plan)
        self._await_handshakes()
        self._pulses = {rank: Pulse(self._meeting.store, rank) for rank in self._others}
        self._introduce()

    def basetemp(self) -> Path:
        """The session's own."""
        return resolve_basetemp(self._session.config)

    def can_run(self, item: pytest.Item) -> bool:
        """See `Peers`."""
        return fits(item, self._launched)

    def begin(self, index: int, *, reuses_ranks: bool) -> bool:
        """Makes every process run a test."""
        meeting = self._require_meeting()
        meeting.termination.defers = True
        # Every process has read what belongs to the test before the last one.
        read_by_all = meeting.names_before_last
        meeting.begin(reuses_ranks=reuses_ranks)
        self._began_at = time.time()
        with suppress(StoreLostError):
            meeting.store.remove(read_by_all.command)
            meeting.store.remove(read_by_all.verdict)
            command = BeginTest(item_index=index, reuses_ranks=reuses_ranks)
            meeting.send(meeting.names.command, command)
        return reuses_ranks

    def local_rank(self) -> LocalRank:
        """See `Peers`."""
        return self._require_meeting().local_rank()

    def has_failed_elsewhere(self, has_failed: bool) -> bool:
        """See `Peers`; a process that is gone has failed, too."""
        try:
            self._look_for_lost(self._others)
            return self._require_meeting().has_failed_elsewhere(has_failed or bool(self._lost))
        except StoreLostError:
            return True

    def without_thread(self) -> AbstractContextManager[None]:
        """See `Peers`."""
        return self._require_meeting().without_thread()

    def share(self, results: Mapping[int, RankResult], *, can_keep: bool) -> SharedResults:
        """Gathers what every rank did; a rank that is gone ends the session after this test."""
        meeting = self._require_meeting()
        gathered, ending = dict(results), []
        keeps = can_keep
        try:
            for answer in self._answers():
                rank = answer.result.rank
                gathered[rank] = answer.result.shifted(self._clock_offset_s(answer.began_at))
                keeps = keeps and answer.can_keep
                if answer.is_terminating:
                    ending.append(rank)
            keeps = keeps and not self._lost
            meeting.send(meeting.names.verdict, Verdict(keeps=keeps))
            meeting.store.remove(meeting.names.failed)
            meeting.forget_exchange()
        except StoreLostError as error:
            lost = _lost(f"the ranks' TCP store is gone ({error})")
            self._lost |= {rank: lost for rank in self._others if rank not in gathered}
            keeps = False
        gathered |= {rank: RankResult(rank=rank, lost=lost) for rank, lost in self._lost.items()}
        self._end_session_if_lost(ending)
        return SharedResults(results=dict(sorted(gathered.items())), keeps=keeps)

    def close(self) -> None:
        """Sends every process the session's status, and waits until those alive have read it."""
        meeting = self._meeting
        if meeting is None:
            return
        self._meeting = None
        self._pulses = {}  # with them goes the store that this process may serve
        # When the first process ends with a failure, the launcher ends the others.
        meeting.termination.ignore()
        with suppress(StoreLostError):
            status = int(self._session.exitstatus)
            if not self._launched.has_store:
                meeting.announce_close()
            meeting.send(meeting.next_names.command, EndSession(status=status))
            if not self._launched.has_store:
                self._await_sign_offs(meeting)
        meeting.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """From here on the session ends anyway, and nothing may interrupt its report."""
        if self._meeting is not None:
            self._meeting.termination.defers = True

    def _require_meeting(self) -> Meeting:
        if self._meeting is None:
            raise RuntimeError("meet() comes first")
        return self._meeting

    def _await_handshakes(self) -> None:
        meeting = self._require_meeting()
        started_at = time.monotonic()
        has_explained = False
        problems: dict[int, str] = {}
        for _ in polls():
            for rank in self._others:
                if rank not in self._hosts and meeting.store.has(handshake(rank)):
                    said = meeting.receive(
                        handshake(rank), {"FollowerHandshake": FollowerHandshake}
                    )
                    self._hosts[rank] = said.host
                    if said.problem:
                        problems[rank] = f"(on {said.host}) {said.problem}"
            missing = [rank for rank in self._others if rank not in self._hosts]
            waited_s = time.monotonic() - started_at
            if not missing:
                break
            if waited_s > MEET_TIMEOUT_S:
                raise pytest.UsageError(
                    f"{name_ranks(missing)} of {self._launched.world_size} did not join within "
                    f"{MEET_TIMEOUT_S:g} s{_which(meeting)}. According to "
                    f"{self._launched.launcher}, this process is rank 0 of "
                    f"{self._launched.world_size}: has every rank been started, with the same "
                    f"tests? If there is no launcher, unset {self._launched.variables}"
                )
            self._look_for_later_sessions(missing)
            if waited_s > _EXPLAIN_AFTER_S and not has_explained:
                has_explained = True
                self._write_line(
                    f"fsdp-comm: waiting for {name_ranks(missing)} to collect tests"
                    f"{_which(meeting)}"
                )
        if problems:
            lines = "\n".join(f"{name_ranks(r)} {text}" for r, text in fold_equal(problems))
            raise pytest.UsageError(
                "the launched ranks must collect the same tests, in whatever order"
                f"{_which(meeting)}:\n{lines}\n{USUAL_REASONS}"
            )

    def _look_for_later_sessions(self, missing: Iterable[int]) -> None:
        """Ends a wait that would be in vain."""
        meeting = self._require_meeting()
        begun = {rank: meeting.sessions_of(rank) for rank in missing}
        later = {
            rank: str(count) for rank, count in begun.items() if count > meeting.session_number
        }
        if later:
            lines = "; ".join(f"{name_ranks(r)} in session {text}" for r, text in fold_equal(later))
            raise pytest.UsageError(
                f"rank 0 is in pytest session {meeting.session_number} of this launch, {lines}: "
                "every rank must run the same sessions, one after another"
            )

    def _introduce(self) -> None:
        hosts = {0: socket.gethostname(), **self._hosts}
        where = "; ".join(f"{name_ranks(ranks)} on {host}" for ranks, host in fold_equal(hosts))
        self._write_line(f"fsdp-comm: {where}")

    def _write_line(self, text: str) -> None:
        reporter: Any = self._session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(text)
            reporter.flush()

    def _answers(self) -> Iterator[FollowerResult]:
        """The other processes' results, as they come, until none is waited for."""
        meeting = self._require_meeting()
        waiting = set(self._others)
        for _ in polls():
            for rank in sorted(waiting):
                name = meeting.names.result(rank)
                if meeting.store.has(name):
                    yield meeting.receive(name, {"FollowerResult": FollowerResult})
                    meeting.store.remove(name)
                    waiting.discard(rank)
                    # It may have been slow, but it is not gone.
                    self._lost.pop(rank, None)
            self._look_for_lost(waiting)
            signalled_at = meeting.termination.signalled_at
            if signalled_at is not None and time.monotonic() > signalled_at + _LAST_ANSWERS_S:
                for rank in waiting:
                    self._lost.setdefault(
                        rank,
                        _lost(
                            "its pytest process was gone when the launcher ended the others "
                            "(killed, perhaps for memory, or crashed)",
                            host=self._hosts[rank],
                        ),
                    )
            if not waiting - self._lost.keys():
                return

    def _look_for_lost(self, waiting: Iterable[int]) -> None:
        for rank in waiting:
            silence_s = self._pulses[rank].silence_s()
            if silence_s > _SILENT_AFTER_S:
                self._lost.setdefault(
                    rank,
                    _lost(
                        f"its pytest process has been silent for {silence_s:.0f} s (killed, or "
                        "its machine or network failed)",
                        host=self._hosts[rank],
                    ),
                )

    def _clock_offset_s(self, began_at: float) -> float:
        offset_s = 0.0 if self._began_at is None else self._began_at - began_at
        return offset_s if abs(offset_s) > _LARGEST_CLOCK_ERROR_S else 0.0

    def _end_session_if_lost(self, ending: Sequence[int]) -> None:
        meeting = self._require_meeting()
        if self._lost:
            self._session.shouldfail = (
                f"lost {name_ranks(sorted(self._lost))} of {self._launched.world_size}, so no "
                "other distributed test can run"
            )
        elif meeting.termination.signalled_at is not None:
            self._session.shouldfail = SIGTERM_REASON
        elif ending:
            self._session.shouldfail = f"{name_ranks(ending)}: {SIGTERM_REASON}"
        else:
            meeting.termination.defers = False

    def _await_sign_offs(self, meeting: Meeting) -> None:
        """Waits for those that still read from the store, which ends with this process."""
        until = time.monotonic() + _FAREWELL_S
        waiting = set(self._hosts) - self._lost.keys()
        for _ in polls():
            waiting = {rank for rank in waiting if not meeting.store.has(sign_off(rank))}
            if not waiting or time.monotonic() > until:
                return


def _which(meeting: Meeting) -> str:
    number = meeting.session_number
    return f" (pytest session {number} of this launch)" if number > 1 else ""


def _lost(reason: str, *, host: str = "") -> str:
    return f"was lost{f' on {host}' if host else ''}: {reason}"
