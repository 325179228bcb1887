"""A launched process other than rank 0's: runs its rank of each test, and reports nothing."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_fsdp_comm.ranks.launched.agreement import describe_difference, positions
from pytest_fsdp_comm.ranks.launched.meeting import MEET_TIMEOUT_S, PLAN, Meeting, read
from pytest_fsdp_comm.ranks.launched.sigterm import (
    SIGTERM_REASON,
    Termination,
    runs_pytest_only,
)
from pytest_fsdp_comm.ranks.rank.main import save_coverage
from pytest_fsdp_comm.ranks.rank.network import no_network_problem
from pytest_fsdp_comm.ranks.session.runner import RankRunner
from pytest_fsdp_comm.ranks.wire.messages import (
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
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.wire.extension import RankExtension
    from pytest_fsdp_comm.ranks.wire.results import RankResult

# Longer than the leader waits for others: it runs code of users, which may hold the GIL.
_SILENT_AFTER_S = 60.0
_LAST_WORDS_S = 5.0
_EXPLAIN_AFTER_S = 60.0
_RECONNECT_S = 0.1
_COMMANDS: tuple[type[BeginTest | EndSession], ...] = (BeginTest, EndSession)


class _EndedError(Exception):
    """This process must end before the leader's session does; the text says why."""


class Follower(Meeting):
    """A launched process that runs its rank of each test as the leader announces it."""

    _plan: Plan
    _command: BeginTest | EndSession

    def __init__(self, session: pytest.Session, launched: LaunchedRank) -> None:
        """Handle SIGTERM from now on; `meet` connects."""
        super().__init__(session, launched)
        self.termination = Termination(session.config, defers=True)

    def meet(self, tests: Sequence[PlannedTest]) -> str:
        """Take the leader's order and seed; return how the tests differ, empty if only in order."""
        plan = self._plan = self._await_plan()
        config = self.session.config
        if plan.randomly_seed is not None and config.pluginmanager.has_plugin("randomly"):
            # pytest-randomly chose another one in each process.
            config.option.randomly_seed = plan.randomly_seed
        order = positions(plan.tests, tests)
        if order is not None:
            items = self.session.items
            items[:] = [items[place] for place in order]
            return ""
        if self.session.testsfailed:
            return (
                f"could not collect all tests ({self.session.testsfailed} errors); run `pytest "
                "--collect-only` there to see them"
            )
        return describe_difference(plan.tests, tests)

    def shake_hands(self, problem: str) -> None:
        """Answer the leader with what `meet` returned, and give signs of life from now on."""
        self.begin_heartbeat()
        self.send(
            f"handshake/{self.launched.rank}",
            FollowerHandshake(host=socket.gethostname(), problem=problem),
        )

    def await_command(self) -> BeginTest | EndSession:
        """Wait for the leader's next announcement."""
        text = self._await(self.name("command", ahead=1), self._look_for_leader)
        self._command = read(text, *_COMMANDS)
        return self._command

    def basetemp(self) -> Path:
        """The leader's: on one machine the ranks' directories are beside each other."""
        return self._plan.basetemp

    def begin(self, index: int, *, reuses_ranks: bool) -> bool:
        """See `Peers`; whether kept ranks run the test is what the leader announced."""
        reuses_ranks = isinstance(self._command, BeginTest) and self._command.reuses_ranks
        return super().begin(index, reuses_ranks=reuses_ranks)

    def share(
        self, results: Mapping[int, RankResult], *, can_keep: bool
    ) -> tuple[dict[int, RankResult], bool]:
        """See `Peers`."""
        self.send(
            self.name(f"result/{self.launched.rank}"),
            FollowerResult(
                result=results[self.launched.rank],
                can_keep=can_keep,
                began_at=self.began_at,
                is_terminating=self.termination.signalled_at is not None,
            ),
        )
        verdict = read(self._await(self.name("verdict"), self._look_for_leader), Verdict)
        self.forget_exchange()
        return dict(results), verdict.keeps

    def close(self) -> None:
        """See `Peers`."""
        if self.is_connected:
            self.termination.ignore()
            with suppress(StoreLostError):
                self.store.put(f"sign_off/{self.launched.rank}", "")
            super().close()

    def _await(self, name: str, look: Callable[[], None]) -> str:
        """Wait for a text of the leader's until `look` raises, however long its own tests last."""

        def given_up(_: Collection[int]) -> Collection[int]:
            signalled_at = self.termination.signalled_at
            if signalled_at is not None and time.monotonic() > signalled_at + _LAST_WORDS_S:
                raise _EndedError(SIGTERM_REASON)
            look()
            return ()

        ((_, text),) = self.await_texts({0: name}, given_up)
        return text

    def _look_for_leader(self) -> None:
        silence_s = self.silence_s(0)
        if silence_s > _SILENT_AFTER_S:
            raise _EndedError(
                f"rank 0 has been silent for {silence_s:.0f} s (killed, or its machine or network "
                "failed)"
            )

    def _await_plan(self) -> Plan:
        """Connect to the leader's session that is this one, however late it comes."""
        launched = self.launched
        began_at = time.monotonic()
        until, explains_at = began_at + MEET_TIMEOUT_S, began_at + _EXPLAIN_AFTER_S

        def look() -> None:
            nonlocal explains_at
            number, begun = self.session_number, self.sessions_of(0)
            if begun > number:
                raise _EndedError(
                    f"rank 0 is in pytest session {begun} of this launch, and this process comes "
                    f"to session {number}: it is too late for it. Do all ranks run the same "
                    "sessions, one after another?"
                )
            now = time.monotonic()
            what = f"rank 0 to begin pytest session {number} of this launch (begun so far: {begun})"
            if now > until:
                raise _EndedError(
                    f"waited {MEET_TIMEOUT_S:g} s for {what}. Do all ranks run the same sessions, "
                    "one after another, with tests of this plugin in each?"
                )
            if now > explains_at:
                explains_at = until
                _complain(self.session, f"rank {launched.rank}: waiting for {what}")

        while True:
            try:
                self.connect()
                return read(self._await(PLAN, look), Plan)
            except StoreLostError as error:
                # Rank 0 may have served it for the session before, with which it ended.
                is_final = launched.has_store or no_network_problem()
                if is_final or time.monotonic() > until:
                    raise _EndedError(
                        f"cannot reach rank 0 at {launched.host}:{launched.port} (MASTER_ADDR, "
                        f"MASTER_PORT): {error}"
                    ) from None
                time.sleep(_RECONNECT_S)


def follow(
    follower: Follower,
    tests: Sequence[PlannedTest],
    extensions: Sequence[RankExtension[Any]],
    *,
    preloaded: Sequence[str],
) -> NoReturn:
    """Run this process's rank of every test that the leader announces, and end the session."""
    # pytest's end of a session, with its reports, caches, JUnit files and snapshots, is for the
    # leader alone, whatever plugins there are; so this session ends without it, as forked ranks do.
    session = follower.session
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    runner: RankRunner | None = None
    try:
        problem = follower.meet(tests)
        # Its items are in the leader's order now.
        runner = RankRunner(session, extensions, follower, preloaded=preloaded)
        if not problem:
            # Before `shake_hands`: see Note [A thread that no fork meets].
            runner.start()
        follower.shake_hands(problem)
        while isinstance(command := follower.await_command(), BeginTest):
            runner.run_unreported(session.items[command.item_index])
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
    _leave_session(session.config, status)


def _leave_session(config: pytest.Config, status: int) -> NoReturn:
    """Make `pytest.main` return a status, without what plugins do at a session's end."""
    manager = config.pluginmanager
    capture: Any = manager.get_plugin("capturemanager")
    if capture is not None and capture.is_globally_capturing():
        capture.read_global_capture()  # which the end of capturing would write
    for plugin in manager.get_plugins():
        manager.unregister(plugin)
    pytest.exit("this process only follows rank 0's", returncode=status)


def _complain(session: pytest.Session, text: str) -> None:
    capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        sys.stderr.write(f"fsdp-comm: {text}\n")
        sys.stderr.flush()
