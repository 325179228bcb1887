"""A launched process other than rank 0's: runs its rank of each test, and reports nothing."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.launched.agreement import describe_difference, positions
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
from pytest_fsdp_comm.ranks.launched.program import leave_session, runs_pytest_only
from pytest_fsdp_comm.ranks.launched.sigterm import SIGTERM_REASON, Termination
from pytest_fsdp_comm.ranks.rank.main import save_coverage
from pytest_fsdp_comm.ranks.rank.network import no_network_problem
from pytest_fsdp_comm.ranks.session.peers import SharedResults
from pytest_fsdp_comm.ranks.wire.messages import (
    FROM_LEADER,
    BeginTest,
    EndSession,
    FollowerHandshake,
    FollowerResult,
    Plan,
    PlannedTest,
    Verdict,
)
from pytest_fsdp_comm.ranks.wire.text_store import StoreLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.session.runner import RankRunner
    from pytest_fsdp_comm.ranks.wire.rank_set import LocalRank
    from pytest_fsdp_comm.ranks.wire.results import RankResult

# Longer than the leader waits for others: it runs code of users, which may hold the GIL.
_SILENT_AFTER_S = 60.0
_LAST_WORDS_S = 5.0
_EXPLAIN_AFTER_S = 60.0
_RECONNECT_S = 0.1

_Message = TypeVar("_Message")


class _EndedError(Exception):
    """This process must end before the session does; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """The connection to the other processes."""

    meeting: Meeting
    leader: Pulse
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """The test that the leader announced last."""

    command: BeginTest
    began_at: float
    """`time.time` here."""


class Follower:
    """The other processes, seen from one that does not report."""

    def __init__(self, session: pytest.Session, launched: LaunchedRank) -> None:
        """Stores the arguments; `meet` connects.

        Args:
            session: The session, after collection.
            launched: This process's rank.
        """
        self._session = session
        self._launched = launched
        self._termination = Termination(session.config, defers=True)
        self._joined: _Joined | None = None
        self._begun: _Begun | None = None

    def meet(self, tests: Sequence[PlannedTest]) -> str:
        """Brings this process's tests into the leader's order, and sets the leader's seed.

        Args:
            tests: This process's, in order.

        Returns:
            How they differ from the leader's; empty if only in order.

        Raises:
            _EndedError: The leader did not come.
        """
        joined = self._joined = self._await_leader()
        plan = joined.plan
        config = self._session.config
        if plan.randomly_seed is not None and config.pluginmanager.has_plugin("randomly"):
            # It chose another one in each process.
            config.option.randomly_seed = plan.randomly_seed
        order = positions(plan.tests, tests)
        if order is None:
            return self._difference(plan.tests, tests)
        items = self._session.items
        items[:] = [items[place] for place in order]
        return ""

    def shake_hands(self, problem: str) -> None:
        """Answers the leader, which from now on expects signs of life.

        Args:
            problem: What `meet` returned.
        """
        meeting = self._require_joined().meeting
        meeting.begin_heartbeat()
        meeting.send(
            handshake(self._launched.rank),
            FollowerHandshake(host=socket.gethostname(), problem=problem),
        )

    def await_command(self) -> BeginTest | EndSession:
        """Waits for what the leader announces next."""
        joined = self._require_joined()
        command = _await(
            joined.meeting, joined.leader, joined.meeting.next_names.command, FROM_LEADER
        )
        if isinstance(command, BeginTest):
            self._begun = _Begun(command=command, began_at=time.time())
        return command

    def basetemp(self) -> Path:
        """The leader's, so that on one machine the ranks' directories are beside each other."""
        return self._require_joined().plan.basetemp

    def can_run(self, item: pytest.Item) -> bool:
        """See `Peers`."""
        return fits(item, self._launched)

    def begin(self, index: int, *, reuses_ranks: bool) -> bool:
        """See `Peers`."""
        del index, reuses_ranks
        decided = self._test().command.reuses_ranks
        self._require_joined().meeting.begin(reuses_ranks=decided)
        return decided

    def local_rank(self) -> LocalRank:
        """See `Peers`."""
        return self._require_joined().meeting.local_rank()

    def has_failed_elsewhere(self, has_failed: bool) -> bool:
        """See `Peers`."""
        return self._require_joined().meeting.has_failed_elsewhere(has_failed)

    def without_thread(self) -> AbstractContextManager[None]:
        """See `Peers`."""
        return self._require_joined().meeting.without_thread()

    def share(self, results: Mapping[int, RankResult], *, can_keep: bool) -> SharedResults:
        """Sends what this process's rank did, and waits until the others are done."""
        joined = self._require_joined()
        meeting = joined.meeting
        meeting.send(
            meeting.names.result(self._launched.rank),
            FollowerResult(
                result=results[self._launched.rank],
                can_keep=can_keep,
                began_at=self._test().began_at,
                is_terminating=meeting.termination.signalled_at is not None,
            ),
        )
        verdict = _await(meeting, joined.leader, meeting.names.verdict, {"Verdict": Verdict})
        meeting.forget_exchange()
        return SharedResults(results=dict(results), keeps=verdict.keeps)

    def close(self) -> None:
        """See `Peers`."""
        if self._joined is not None:
            meeting = self._joined.meeting
            self._joined = None
            meeting.termination.ignore()
            with suppress(StoreLostError):
                meeting.store.put(sign_off(self._launched.rank), "")
            meeting.close()

    def _require_joined(self) -> _Joined:
        if self._joined is None:
            raise RuntimeError("meet() comes first")
        return self._joined

    def _test(self) -> _Begun:
        if self._begun is None:
            raise RuntimeError("await_command() comes first")
        return self._begun

    def _difference(self, theirs: Sequence[PlannedTest], ours: Sequence[PlannedTest]) -> str:
        if self._session.testsfailed:
            return (
                f"could not collect all tests ({self._session.testsfailed} errors); run `pytest "
                "--collect-only` there to see them"
            )
        return describe_difference(theirs, ours)

    def _await_leader(self) -> _Joined:
        """Connects to the leader's session that is this one, however late it comes."""
        launched = self._launched
        until = time.monotonic() + MEET_TIMEOUT_S
        while True:
            try:
                meeting = Meeting(launched, self._termination)
                plan = self._await_plan(meeting, until)
            except StoreLostError as error:
                # Rank 0 may have served it for the session before, with which it ended.
                is_final = launched.has_store or no_network_problem()
                if is_final or time.monotonic() > until:
                    raise _EndedError(
                        f"cannot reach rank 0 at {launched.host}:{launched.port} (MASTER_ADDR, "
                        f"MASTER_PORT): {error}"
                    ) from None
                time.sleep(_RECONNECT_S)
            else:
                return _Joined(meeting=meeting, leader=Pulse(meeting.store, 0), plan=plan)

    def _await_plan(self, meeting: Meeting, until: float) -> Plan:
        number = meeting.session_number
        explains_at = time.monotonic() + _EXPLAIN_AFTER_S
        for _ in _polls_until_ended(meeting):
            begun = meeting.sessions_of(0)
            if begun > number:
                raise _EndedError(
                    f"rank 0 is in pytest session {begun} of this launch, and this process comes "
                    f"to session {number}: it is too late for it. Do all ranks run the same "
                    "sessions, one after another?"
                )
            if meeting.store.has(PLAN):
                return meeting.receive(PLAN, {"Plan": Plan})
            now = time.monotonic()
            what = f"rank 0 to begin pytest session {number} of this launch (begun so far: {begun})"
            if now > until:
                raise _EndedError(
                    f"waited {MEET_TIMEOUT_S:g} s for {what}. Do all ranks run the same sessions, "
                    "one after another, with tests of this plugin in each?"
                )
            if now > explains_at:
                explains_at = until
                _complain(self._session, f"rank {self._launched.rank}: waiting for {what}")
        raise AssertionError  # the loop never ends


def _polls_until_ended(meeting: Meeting) -> Iterator[None]:
    """`polls`, until the launcher has ended this process."""
    for _ in polls():
        yield
        signalled_at = meeting.termination.signalled_at
        if signalled_at is not None and time.monotonic() > signalled_at + _LAST_WORDS_S:
            raise _EndedError(SIGTERM_REASON)


def _await(
    meeting: Meeting, leader: Pulse, name: str, heard: Mapping[str, type[_Message]]
) -> _Message:
    """Waits for a message of the leader's, however long its own tests last."""
    for _ in _polls_until_ended(meeting):
        if meeting.store.has(name):
            return meeting.receive(name, heard)
        silence_s = leader.silence_s()
        if silence_s > _SILENT_AFTER_S:
            raise _EndedError(
                f"rank 0 has been silent for {silence_s:.0f} s (killed, or its machine or network "
                "failed)"
            )
    raise AssertionError  # the loop never ends


def follow(
    session: pytest.Session,
    follower: Follower,
    make_runner: Callable[[], RankRunner],
    tests: Sequence[PlannedTest],
) -> NoReturn:
    """Runs this process's rank of every test that the leader announces, and ends the session.

    pytest's end of a session, with its reports, caches, JUnit files and snapshots, is for the
    leader alone, whatever plugins there are; so this session ends without it, as forked ranks do.

    Args:
        session: The session, after collection.
        follower: The other processes.
        make_runner: Called once the tests are in the leader's order.
        tests: As for `Follower.meet`.
    """
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    runner: RankRunner | None = None
    try:
        problem = follower.meet(tests)
        runner = make_runner()
        if not problem:
            # Forks the fork server, before there is a thread.
            runner.start()
        follower.shake_hands(problem)
        while isinstance(command := follower.await_command(), BeginTest):
            item = session.items[command.item_index]
            runner.run_unreported(item, item.stash[SETTINGS])
        status = command.status
    except (_EndedError, StoreLostError) as problem:
        what = f"the store is gone: {problem}" if isinstance(problem, StoreLostError) else problem
        _complain(session, f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}: {what}")
        status = int(pytest.ExitCode.TESTS_FAILED)
    except KeyboardInterrupt:
        status = int(pytest.ExitCode.INTERRUPTED)
    except BaseException:  # noqa: BLE001  # nothing may unwind into pytest's report, which is held
        _complain(session, traceback.format_exc())
    finally:
        with suppress(BaseException):
            (runner or follower).close()
        save_coverage()
        sys.stdout.flush()
        sys.stderr.flush()
        if runs_pytest_only():
            os._exit(status)
    leave_session(session.config, status)


def _complain(session: pytest.Session, text: str) -> None:
    capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        sys.stderr.write(f"fsdp-comm: {text}\n")
        sys.stderr.flush()
