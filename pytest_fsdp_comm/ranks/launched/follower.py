"""A launched process other than rank 0's: runs its rank of each test, and is silent."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.launched.heartbeat import Pulse
from pytest_fsdp_comm.ranks.launched.meeting import PLAN, Meeting, farewell, fits, hello, polls
from pytest_fsdp_comm.ranks.launched.sigterm import TOLD_TO_END, Termination
from pytest_fsdp_comm.ranks.rank.main import save_coverage
from pytest_fsdp_comm.ranks.start.fork_client import ServerDiedError
from pytest_fsdp_comm.ranks.wire.text_store import StoreLostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.session.runner import RankRunner
    from pytest_fsdp_comm.ranks.wire.launch import LaunchedPart
    from pytest_fsdp_comm.ranks.wire.results import RankResult

# Longer than the leader waits for others: it runs code of users, which may hold the GIL.
_SILENT_AFTER_S = 60.0
_LAST_WORDS_S = 5.0


class _EndedError(Exception):
    """This process has to end before the session does; the text says why."""


class Follower:
    """The other processes, seen from one that does not report."""

    def __init__(self, session: pytest.Session, launched: LaunchedRank) -> None:
        """Prepares; connects to nothing."""
        self._session = session
        self._launched = launched
        self._meeting: Meeting | None = None
        self._leader: Pulse | None = None
        self._basetemp = Path()
        self._began_at = 0.0
        self._command: dict[str, Any] = {}

    def meet(self, plan: Sequence[str]) -> None:
        """Compares this process's tests with the leader's, and tells it.

        Raises:
            _EndedError: The leader did not come.
        """
        where = f"{self._launched.host}:{self._launched.port} (MASTER_ADDR, MASTER_PORT)"
        try:
            self._meeting = Meeting(self._launched, Termination(defers=True))
        except StoreLostError as error:
            raise _EndedError(f"rank 0 was not met at {where}: {error}") from None
        self._leader = Pulse(self._meeting.store, 0)
        told = json.loads(self._await(PLAN))
        self._basetemp = Path(told["basetemp"])
        said = {"host": socket.gethostname(), "problem": self._difference(told["tests"], plan)}
        self._meeting.store.put(hello(self._launched.rank), json.dumps(said))

    def next_item(self) -> pytest.Item | None:
        """Waits for the next test; None if there is none."""
        meeting = self._met()
        self._command = json.loads(self._await(f"command/{meeting.number + 1}"))
        return self._session.items[self._command["item"]] if "item" in self._command else None

    @property
    def status(self) -> int:
        """The session's exit status, once there is no next test."""
        return int(self._command["status"])

    def basetemp(self) -> Path:
        """The leader's, so that on one machine the ranks' directories are beside each other."""
        return self._basetemp

    def takes(self, item: pytest.Item) -> bool:
        """See `Peers`."""
        return fits(item, self._launched)

    def begin(self, index: int, *, continues: bool) -> bool:
        """See `Peers`."""
        del index, continues
        decided: bool = self._command["continues"]
        self._met().begin(continues=decided)
        self._began_at = time.time()
        return decided

    def part(self) -> LaunchedPart:
        """See `Peers`."""
        return self._met().part()

    def has_failed_elsewhere(self, has_failed: bool) -> bool:
        """See `Peers`."""
        return self._met().has_failed_elsewhere(has_failed)

    def share(
        self, results: Mapping[int, RankResult], *, keeps: bool
    ) -> tuple[dict[int, RankResult], bool]:
        """Sends what this process's rank did, and waits until the others are done."""
        meeting = self._met()
        result = results[self._launched.rank]
        is_told_to_end = meeting.termination.told_at is not None
        answer = {
            "result": result.to_json(),
            "keeps": keeps,
            "began_at": self._began_at,
            "is_told_to_end": is_told_to_end,
        }
        meeting.store.put(meeting.names.result(self._launched.rank), json.dumps(answer))
        verdict = json.loads(self._await(meeting.names.verdict))
        meeting.forget_exchange()
        return dict(results), verdict["keeps"]

    def close(self) -> None:
        """See `Peers`."""
        if self._meeting is not None:
            meeting, self._meeting = self._meeting, None
            meeting.termination.ignore()
            meeting.close()
            with suppress(StoreLostError):
                meeting.store.put(farewell(self._launched.rank), "")

    def _met(self) -> Meeting:
        if self._meeting is None:
            raise RuntimeError("meet() comes first")
        return self._meeting

    def _await(self, name: str) -> str:
        """Waits for what the leader writes, however long its own tests take."""
        meeting = self._met()
        for _ in polls():
            if meeting.store.has(name):
                return meeting.store.get(name)
            told_at = meeting.termination.told_at
            if told_at is not None and time.monotonic() > told_at + _LAST_WORDS_S:
                raise _EndedError(TOLD_TO_END)
            silence_s = self._leader.silence_s() if self._leader else 0.0
            if silence_s > _SILENT_AFTER_S:
                raise _EndedError(
                    f"nothing was heard of rank 0 for {silence_s:.0f} s (killed, or its machine or "
                    "network failed)"
                )
        raise AssertionError  # polls() never ends

    def _difference(self, theirs: Sequence[str], ours: Sequence[str]) -> str:
        """What differs from the leader's tests; empty if nothing does."""
        if list(theirs) == list(ours):
            return ""
        if self._session.testsfailed:
            return (
                f"could not collect all tests ({self._session.testsfailed} errors); run `pytest "
                "--collect-only` there to see them"
            )
        for place, (their, our) in enumerate(zip(theirs, ours, strict=False)):
            if their != our:
                return (
                    f"has as test {place + 1} of {len(ours)}\n    {our}\n  where rank 0 has\n"
                    f"    {their}\n  Do names or order depend on chance (pytest-randomly: give all "
                    "ranks the same -p randomly_seed=N), on local files (--lf), or on the rank?"
                )
        return f"has {len(ours)} tests, rank 0 has {len(theirs)}; do all ranks see the same files?"


def follow(
    session: pytest.Session, follower: Follower, runner: RankRunner, plan: Sequence[str]
) -> NoReturn:
    """Runs this process's rank of every test that the leader names, and ends the process.

    pytest's end of a session, with its reports, caches, JUnit files and snapshots, is for the
    leader alone, whatever plugins there are; so this process ends without it, as forked ranks do.
    """
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        runner.start()
        follower.meet(plan)
        while (item := follower.next_item()) is not None:
            runner.run_part(item, item.stash[SETTINGS])
        status = follower.status
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
