"""Rank 0's process: announces the next test, and reports what all ranks did with it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm.ranks.launched.agreement import USUAL_REASONS
from pytest_fsdp_comm.ranks.launched.meeting import MEET_TIMEOUT_S, PLAN, Meeting, read
from pytest_fsdp_comm.ranks.launched.sigterm import SIGTERM_REASON, Termination
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
from pytest_fsdp_comm.text.rank_lists import name_equal, name_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pytest_fsdp_comm.launch_environment import LaunchedRank
    from pytest_fsdp_comm.ranks.wire.messages import PlannedTest

# The other processes run no code of users: a silence is a death.
_SILENT_AFTER_S = 15.0
# After SIGTERM, until the living have answered: a second for their ranks to fail, and the time of a
# dump.
_LAST_ANSWERS_S = 4.0
_SIGN_OFF_S = 10.0
_EXPLAIN_AFTER_S = 10.0
# Hosts agree about the time to some ms, and the leader learns of theirs to some ms only.
_LARGEST_CLOCK_ERROR_S = 1.0


class Leader(Meeting):
    """Rank 0's process, whose session pytest runs as usual."""

    def __init__(self, session: pytest.Session, launched: LaunchedRank) -> None:
        """Handle SIGTERM from now on; `meet` connects."""
        super().__init__(session, launched)
        self.termination = Termination(session.config, defers=False)
        self._others = range(1, launched.world_size)
        self._hosts: dict[int, str] = {}
        self._lost: dict[int, str] = {}

    def meet(self, tests: tuple[PlannedTest, ...]) -> None:
        """Wait until every process has collected the same tests, in whatever order."""
        config, launched = self.session.config, self.launched
        try:
            self.connect()
        except StoreLostError as error:
            raise pytest.UsageError(
                f"the store of the launched ranks at {launched.host}:{launched.port} (MASTER_ADDR, "
                f"MASTER_PORT) cannot be {'reached' if launched.has_store else 'served'}: {error}; "
                "is the port free and the same for every rank? Without a launcher, unset "
                "RANK and WORLD_SIZE"
            ) from None
        has_seed = config.pluginmanager.has_plugin("randomly")
        seed = config.getoption("randomly_seed") if has_seed else None
        self.begin_heartbeat()
        self.send(PLAN, Plan(tests=tests, basetemp=self.basetemp(), randomly_seed=seed))
        self._await_handshakes()
        hosts = {0: socket.gethostname(), **self._hosts}
        where = name_equal({rank: f"on {host}" for rank, host in hosts.items()})
        self._write_line(f"fsdp-comm: {'; '.join(where)}")

    def begin(self, index: int, *, reuses_ranks: bool) -> bool:
        """See `Peers`."""
        self.termination.defers = True
        # Every process has read what belongs to the test before the last one.
        read_by_all = [self.name(what, ahead=-1) for what in ("command", "verdict")]
        super().begin(index, reuses_ranks=reuses_ranks)
        with suppress(StoreLostError):
            for name in read_by_all:
                self.store.remove(name)
            command = BeginTest(item_index=index, reuses_ranks=reuses_ranks)
            self.send(self.name("command"), command)
        return reuses_ranks

    def has_failed_elsewhere(self, has_failed: bool) -> bool:
        """See `Peers`; a lost process has failed, too."""
        try:
            self._look_for_lost(self._others)
            return super().has_failed_elsewhere(has_failed or bool(self._lost))
        except StoreLostError:
            return True

    def share(
        self, results: Mapping[int, RankResult], *, can_keep: bool
    ) -> tuple[dict[int, RankResult], bool]:
        """See `Peers`; a lost rank ends the session after this test."""
        gathered, ending = dict(results), []
        keeps = can_keep
        names = {rank: self.name(f"result/{rank}") for rank in self._others}
        try:
            for rank, text in self.await_texts(names, self._silent):
                answer = read(text, FollowerResult)
                self.store.remove(names[rank])
                # It may have been slow, but it is not gone.
                self._lost.pop(rank, None)
                gathered[rank] = answer.result.shifted(self._clock_offset_s(answer.began_at))
                keeps = keeps and answer.can_keep
                if answer.is_terminating:
                    ending.append(rank)
            keeps = keeps and not self._lost
            self.send(self.name("verdict"), Verdict(keeps=keeps))
            self.store.remove(self.name("failed"))
            self.forget_exchange()
        except StoreLostError as error:
            lost = f"was lost: the ranks' TCP store is gone ({error})"
            self._lost |= {rank: lost for rank in self._others if rank not in gathered}
            keeps = False
        gathered |= {rank: RankResult(rank=rank, lost=lost) for rank, lost in self._lost.items()}
        self._end_session_if_lost(ending)
        return dict(sorted(gathered.items())), keeps

    def close(self) -> None:
        """See `Peers`; sends the session's status, and waits until those alive have read it."""
        if not self.is_connected:
            return
        self.termination.ignore()
        with suppress(StoreLostError):
            if not self.launched.has_store:
                self.announce_close()
            status = int(self.session.exitstatus)
            self.send(self.name("command", ahead=1), EndSession(status=status))
            if not self.launched.has_store:
                # Some processes still read from the store, which ends with this one.
                until = time.monotonic() + _SIGN_OFF_S
                names = {rank: f"sign_off/{rank}" for rank in self._hosts if rank not in self._lost}
                for _ in self.await_texts(
                    names, lambda missing: missing if time.monotonic() > until else ()
                ):
                    pass
        super().close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Let nothing interrupt the session's report from here on."""
        if self.is_connected:
            self.termination.defers = True

    def _await_handshakes(self) -> None:
        started_at = time.monotonic()
        explains_at = started_at + _EXPLAIN_AFTER_S
        problems: dict[int, str] = {}

        def explain(missing: Collection[int]) -> Collection[int]:
            nonlocal explains_at
            now = time.monotonic()
            if now > started_at + MEET_TIMEOUT_S:
                raise pytest.UsageError(
                    f"{name_ranks([*missing])} of {self.launched.world_size} did not join within "
                    f"{MEET_TIMEOUT_S:g} s{self._which}. According to "
                    f"{self.launched.launcher}, this process is rank 0 of "
                    f"{self.launched.world_size}: has every rank been started, with the same "
                    f"tests? If there is no launcher, unset RANK and WORLD_SIZE"
                )
            self._look_for_later_sessions(missing)
            if now > explains_at:
                explains_at = started_at + MEET_TIMEOUT_S
                self._write_line(
                    f"fsdp-comm: waiting for {name_ranks([*missing])} to collect tests{self._which}"
                )
            return ()

        names = {rank: f"handshake/{rank}" for rank in self._others}
        for rank, text in self.await_texts(names, explain):
            joined = read(text, FollowerHandshake)
            self._hosts[rank] = joined.host
            if joined.problem:
                problems[rank] = f"(on {joined.host}) {joined.problem}"
        if problems:
            lines = "\n".join(name_equal(problems))
            raise pytest.UsageError(
                "the launched ranks must collect the same tests, in whatever order"
                f"{self._which}:\n{lines}\n{USUAL_REASONS}"
            )

    def _look_for_later_sessions(self, missing: Iterable[int]) -> None:
        begun = {rank: self.sessions_of(rank) for rank in missing}
        number = self.session_number
        later = {rank: f"in session {count}" for rank, count in begun.items() if count > number}
        if later:
            raise pytest.UsageError(
                f"rank 0 is in pytest session {number} of this launch, "
                f"{'; '.join(name_equal(later))}: every rank must run the same sessions, one after "
                "another"
            )

    @property
    def _which(self) -> str:
        number = self.session_number
        return f" (pytest session {number} of this launch)" if number > 1 else ""

    def _write_line(self, text: str) -> None:
        reporter: Any = self.session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(text)
            reporter.flush()

    def _silent(self, missing: Collection[int]) -> Collection[int]:
        self._look_for_lost(missing)
        signalled_at = self.termination.signalled_at
        if signalled_at is not None and time.monotonic() > signalled_at + _LAST_ANSWERS_S:
            for rank in missing:
                self._note_lost(
                    rank,
                    "its pytest process was gone when the launcher ended the others (killed, "
                    "perhaps for memory, or crashed)",
                )
        return self._lost.keys()

    def _look_for_lost(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            silence_s = self.silence_s(rank)
            if silence_s > _SILENT_AFTER_S:
                self._note_lost(
                    rank,
                    f"its pytest process has been silent for {silence_s:.0f} s (killed, or its "
                    "machine or network failed)",
                )

    def _note_lost(self, rank: int, reason: str) -> None:
        self._lost.setdefault(rank, f"was lost on {self._hosts[rank]}: {reason}")

    def _clock_offset_s(self, began_at: float) -> float:
        offset_s = self.began_at - began_at
        return offset_s if abs(offset_s) > _LARGEST_CLOCK_ERROR_S else 0.0

    def _end_session_if_lost(self, ending: Sequence[int]) -> None:
        if self._lost:
            self.session.shouldfail = (
                f"lost {name_ranks(sorted(self._lost))} of {self.launched.world_size}, so no "
                "other distributed test can run"
            )
        elif self.termination.signalled_at is not None:
            self.session.shouldfail = SIGTERM_REASON
        elif ending:
            self.session.shouldfail = f"{name_ranks(ending)}: {SIGTERM_REASON}"
        else:
            self.termination.defers = False
