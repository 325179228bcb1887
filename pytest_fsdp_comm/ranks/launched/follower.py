"""A launched process other than rank 0's: runs its rank of each test, and reports nothing."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.launched.heartbeat import Pulse
from pytest_fsdp_comm.ranks.launched.meeting import PLAN, Meeting, farewell, fits, hello, polls
from pytest_fsdp_comm.ranks.launched.sigterm import SIGTERM_REASON, Termination
from pytest_fsdp_comm.ranks.rank.main import save_coverage
from pytest_fsdp_comm.ranks.session.peers import SharedResults
from pytest_fsdp_comm.ranks.start.fork_client import ServerDiedError
from pytest_fsdp_comm.ranks.wire.messages import (
    FROM_LEADER,
    BeginTest,
    EndSession,
    FollowerHello,
    FollowerResult,
    Plan,
    Verdict,
)
from pytest_fsdp_comm.ranks.wire.text_store import StoreLostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.session.runner import RankRunner
    from pytest_fsdp_comm.ranks.wire.rank_set import LocalRank
    from pytest_fsdp_comm.ranks.wire.results import RankResult

# Longer than the leader waits for others: it runs code of users, which may hold the GIL.
_SILENT_AFTER_S = 60.0
_LAST_WORDS_S = 5.0

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
        self._joined: _Joined | None = None
        self._begun: _Begun | None = None

    def meet(self, tests: Sequence[str]) -> None:
        """Compares this process's tests with the leader's, and sends the difference.

        Args:
            tests: This process's, in order.

        Raises:
            _EndedError: The leader did not come.
        """
        where = f"{self._launched.host}:{self._launched.port} (MASTER_ADDR, MASTER_PORT)"
        try:
            meeting = Meeting(self._launched, Termination(defers=True))
        except StoreLostError as error:
            raise _EndedError(f"cannot reach rank 0 at {where}: {error}") from None
        leader = Pulse(meeting.store, 0)
        plan = _await(meeting, leader, PLAN, {"Plan": Plan})
        self._joined = _Joined(meeting=meeting, leader=leader, plan=plan)
        problem = self._difference(plan.tests, tests)
        meeting.send(
            hello(self._launched.rank), FollowerHello(host=socket.gethostname(), problem=problem)
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
            meeting.close()
            with suppress(StoreLostError):
                meeting.store.put(farewell(self._launched.rank), "")

    def _require_joined(self) -> _Joined:
        if self._joined is None:
            raise RuntimeError("meet() comes first")
        return self._joined

    def _test(self) -> _Begun:
        if self._begun is None:
            raise RuntimeError("await_command() comes first")
        return self._begun

    def _difference(self, theirs: Sequence[str], ours: Sequence[str]) -> str:
        """What differs from the leader's tests; empty if nothing does."""
        if list(theirs) == list(ours):
            return ""
        if self._session.testsfailed:
            return (
                f"could not collect all tests ({self._session.testsfailed} errors); run `pytest "
                "--collect-only` there to see them"
            )
        for number, (their, our) in enumerate(zip(theirs, ours, strict=False), start=1):
            if their != our:
                return (
                    f"has as test {number} of {len(ours)}\n    {our}\n  where rank 0 has\n"
                    f"    {their}\n  Do names or order depend on chance (pytest-randomly: pass the "
                    "same --randomly-seed=N to all ranks), on local files (--lf), or on the rank?"
                )
        return f"has {len(ours)} tests, rank 0 has {len(theirs)}; do all ranks see the same files?"


def _await(
    meeting: Meeting, leader: Pulse, name: str, heard: Mapping[str, type[_Message]]
) -> _Message:
    """Waits for a message of the leader's, however long its own tests last."""
    for _ in polls():
        if meeting.store.has(name):
            return meeting.receive(name, heard)
        signalled_at = meeting.termination.signalled_at
        if signalled_at is not None and time.monotonic() > signalled_at + _LAST_WORDS_S:
            raise _EndedError(SIGTERM_REASON)
        silence_s = leader.silence_s()
        if silence_s > _SILENT_AFTER_S:
            raise _EndedError(
                f"rank 0 has been silent for {silence_s:.0f} s (killed, or its machine or network "
                "failed)"
            )
    raise AssertionError  # polls() never ends


def follow(
    session: pytest.Session, follower: Follower, runner: RankRunner, tests: Sequence[str]
) -> NoReturn:
    """Runs this process's rank of every test that the leader announces, and ends the process.

    pytest's end of a session, with its reports, caches, JUnit files and snapshots, is for the
    leader alone, whatever plugins there are; so this process ends without it, as forked ranks do.

    Args:
        session: The session, after collection.
        follower: The other processes.
        runner: Not started yet.
        tests: As for `Follower.meet`.
    """
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        runner.start()
        follower.meet(tests)
        while isinstance(command := follower.await_command(), BeginTest):
            item = session.items[command.item_index]
            runner.run_unreported(item, item.stash[SETTINGS])
        status = command.status
    except (_EndedError, StoreLostError, ServerDiedError) as problem:
        what = f"the store is gone: {problem}" if isinstance(problem, StoreLostError) else problem
        _complain(session, f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}: {what}")
        status = int(pytest.ExitCode.TESTS_FAILED)
    except KeyboardInterrupt:
        status = int(pytest.ExitCode.INTERRUPTED)
    except BaseException:  # noqa: BLE001  # nothing may unwind into pytest's report, which is held
        _complain(session, traceback.format_exc())
    finally:
        with suppress(BaseException):
            runner.close()
        save_coverage()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _complain(session: pytest.Session, text: str) -> None:
    capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    sys.stderr.write(f"fsdp-comm: {text}\n")
