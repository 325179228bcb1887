"""What a supervisor receives from ranks, and what it passes on, without any process."""

import os
import threading
import time
from multiprocessing.connection import Pipe
from types import SimpleNamespace

import pytest

from pytest_fsdp_comm.options import DistributedSettings
from pytest_fsdp_comm.ranks.session.supervision import Supervision
from pytest_fsdp_comm.ranks.wire import messages
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.ranks.wire.messages import RankSetSpec
from pytest_fsdp_comm.ranks.wire.results import (
    Activity,
    PhaseReport,
    Position,
    RankResult,
    Stopped,
)

# The end of a pipe that nobody writes into.
NEVER_READABLE, _ = os.pipe()


class NoServer:
    """Rank 1 is no process, and has no watchdog."""

    def __init__(self):
        self.pids = {}
        ours, theirs = Pipe()
        watchdog, closed = Pipe()
        closed.close()
        self.connections = {1: (ours, watchdog)}
        self.rank = Channel(theirs)

    def fileno(self):
        return NEVER_READABLE

    def exit_statuses(self):
        return {}

    def end_ranks(self, within_s, **_):
        assert within_s == 0.0
        self.rank.close()
        return {}


@pytest.fixture
def spec(tmp_path):
    settings = DistributedSettings(
        world_size=2, backend="gloo", ranks=(1,), scope="test", timeout_s=20.0, device=None
    )
    return RankSetSpec(
        item_index=0,
        nodeid="test_it.py::test_it",
        settings=settings,
        directory=tmp_path,
        basetemp=tmp_path,
        echoes=(),
    )


@pytest.fixture
def supervision(spec, pytestconfig):
    server = NoServer()
    supervision = Supervision(spec, server, server.connections, pytestconfig)
    yield supervision
    supervision.end(0.0)


@pytest.fixture
def rank(supervision):
    return supervision.server.rank


@pytest.fixture
def spawned(spec, pytestconfig):
    server = NoServer()
    supervision = Supervision(spec, server, server.connections, pytestconfig, are_spawned=True)
    yield supervision
    supervision.end(0.0)


def test_deadline_counts_from_the_start_of_the_test(spawned):
    rank, ago = spawned.server.rank, time.monotonic() - 100
    rank.send(messages.TestBegun())
    end = messages.TestEnded(payloads=(), escaped=None)
    timer = threading.Timer(0.2, rank.send, [end])
    timer.start()
    results = spawned.run(started_at=ago, timeout_s=extend_under_load(20))
    timer.join()
    assert (results[1].stopped, results[1].is_done) == (None, True)


def test_deadline_of_a_begun_test_holds(spawned):
    spawned.server.rank.send(messages.TestBegun())
    results = spawned.run(started_at=time.monotonic(), timeout_s=0.1)
    assert results[1].stopped is Stopped.AT_DEADLINE
    assert not results[1].is_starting
    assert results[1].position.activity is Activity.SILENT


def test_spawned_rank_may_only_start_for_so_long(spawned, monkeypatch):
    monkeypatch.setattr("pytest_fsdp_comm.ranks.session.supervision.STARTS_WITHIN_S", 0.1)
    results = spawned.run(started_at=time.monotonic(), timeout_s=extend_under_load(60))
    assert results[1].stopped is Stopped.AT_DEADLINE
    assert results[1].is_starting
    assert results[1].position.activity is Activity.STARTS


@pytest.mark.parametrize("outcome", ["failed", "passed"])
def test_failure_received_with_the_end_counts(supervision, rank, outcome):
    rank.send(PhaseReport(report={"outcome": outcome}))
    rank.send(messages.TestEnded(payloads=(), escaped=None))
    results = supervision.run(started_at=time.monotonic(), timeout_s=extend_under_load(20))
    assert [report.has_failed for report in results[1].reports] == [outcome == "failed"]
    assert supervision.is_reusable == (outcome == "passed")


def end_test_when_located(supervision, rank, monkeypatch):
    """Have a rank end its test while it is asked where it is."""

    def locate():
        rank.send(PhaseReport(report={"outcome": "failed"}))
        rank.send(messages.TestEnded(payloads=(), escaped=None))

    monkeypatch.setattr(supervision, "_locate_ranks", locate)


def test_rank_that_ends_at_the_deadline_is_late(supervision, rank, monkeypatch):
    end_test_when_located(supervision, rank, monkeypatch)
    results = supervision.run(started_at=time.monotonic() - 19.9, timeout_s=20)
    assert results[1].stopped is Stopped.AT_DEADLINE
    assert 0 < results[1].unfinished_s < 20
    assert not supervision.is_reusable


def test_messages_while_ranks_are_located_count(supervision, rank, monkeypatch):
    monkeypatch.setattr("pytest_fsdp_comm.ranks.session.supervision.GRACE_S", 0.1)
    rank.send(PhaseReport(report={"outcome": "failed"}))
    end_test_when_located(supervision, rank, monkeypatch)
    results = supervision.run(started_at=time.monotonic(), timeout_s=extend_under_load(20))
    assert [report.has_failed for report in results[1].reports] == [True, True]
    assert results[1].stopped is None
    assert results[1].position.activity is Activity.HAS_ENDED


@pytest.mark.parametrize(
    ("answers", "stopped"),
    [
        ([True, True, True], None),
        # On a busy machine, a rank may answer late.
        ([None, True, False, True], None),
        ([False, True, True], None),
        ([False, False], Stopped.AFTER_FAILURE),
        ([True, False, None], Stopped.AFTER_FAILURE),
    ],
)
def test_grace_waits_for_a_rank_that_reports(supervision, rank, monkeypatch, answers, stopped):
    monkeypatch.setattr("pytest_fsdp_comm.ranks.session.supervision.GRACE_S", 0.1)
    rank.send(PhaseReport(report={"outcome": "failed"}))
    left = [*answers]

    def ask(_):
        is_reporting = left.pop(0)
        if stopped is None and not left:
            rank.send(messages.TestEnded(payloads=(), escaped=None))
        return {} if is_reporting is None else {1: Position(site="", is_reporting=is_reporting)}

    monkeypatch.setattr(supervision, "_ask_positions", ask)
    monkeypatch.setattr(supervision, "_locate_ranks", lambda: None)
    results = supervision.run(started_at=time.monotonic(), timeout_s=extend_under_load(20))
    assert results[1].stopped is stopped
    assert not left


@pytest.mark.parametrize(
    ("seqs", "stopped"),
    [
        ((5, 5), Stopped.AT_DEADLINE),
        ((5, 6, 6), Stopped.AT_DEADLINE),
        ((5, 6), None),
        ((5, 0, 5), None),
    ],
)
def test_stranded_rank_is_stopped_if_seen_twice(supervision, rank, monkeypatch, seqs, stopped):
    monkeypatch.setattr("pytest_fsdp_comm.ranks.session.supervision.GRACE_S", 0.1)
    supervision._results[1].is_starting = False
    supervision._results[0] = RankResult(rank=0, is_done=True)
    answers = [{1: (f"#{seq} of 0", (0,))} if seq else {} for seq in seqs]

    def find(*_):
        if stopped is None and len(answers) == 1:
            rank.send(messages.TestEnded(payloads=(), escaped=None))
        return answers.pop(0)

    monkeypatch.setattr("pytest_fsdp_comm.ranks.session.supervision.find_stranded", find)
    monkeypatch.setattr(supervision, "_ask_positions", lambda *_, **__: {})
    result = supervision.run(started_at=time.monotonic(), timeout_s=extend_under_load(20))[1]
    assert (result.stopped, answers) == (stopped, [])
    assert result.waited_for == (() if stopped is None else (0,))


def test_rank_that_waits_for_a_comparing_rank_is_stopped(supervision, monkeypatch):
    """No rank has finished the test, so nothing but the positions shows the hang."""
    monkeypatch.setattr("pytest_fsdp_comm.ranks.session.supervision.GRACE_S", 0.1)
    supervision._results[1].is_starting = False
    stranded = {1: ("#5 of 0", (0,))}
    found = "pytest_fsdp_comm.ranks.session.supervision.find_stranded"
    monkeypatch.setattr(found, lambda *_: stranded)
    monkeypatch.setattr(supervision, "_ask_positions", lambda *_, **__: {})
    result = supervision.run(started_at=time.monotonic(), timeout_s=extend_under_load(20))[1]
    assert (result.stopped, result.waited_for) == (Stopped.AT_DEADLINE, (0,))


def test_ended_rank_with_a_late_answer_is_asked_again(supervision, monkeypatch):
    asked = []

    def ask(ranks, **how):
        asked.append((len(ranks), how))
        return {}

    monkeypatch.setattr(supervision, "_ask_positions", ask)
    supervision._results[1].is_done = True
    supervision._locate_ranks()
    # The last question is for ranks that hold the GIL.
    assert [(count, how.get("with_groups", False)) for count, how in asked] == [
        (1, False),
        (1, True),
        (0, True),
    ]


def test_interrupt_shows_the_test_and_its_ranks(supervision, monkeypatch):
    shown = []
    at = Position(site="it.py:1 in it", stack=("it.py:1 in it: sleep()",))
    reporter = SimpleNamespace(ensure_newline=lambda: None, write_line=shown.append)
    monkeypatch.setattr(supervision, "_reporter", reporter)
    monkeypatch.setattr(supervision, "_ask_positions", lambda ranks, **_: dict.fromkeys(ranks, at))
    supervision._results[0] = RankResult(rank=0, is_done=True)
    supervision.show_interrupt("test_it.py::test_it[\x1b]", 4.2)
    assert shown == [
        r"fsdp-comm: test_it.py::test_it[\x1b] was interrupted after 4 s",
        "rank 1 is at (innermost frame first):",
        "    it.py:1 in it: sleep()",
        "rank 0 had finished.",
    ]


def test_endlessly_sending_rank_stops_at_deadline(supervision, rank, monkeypatch):
    message = messages.Debugging(has_begun=False)
    rank.send(message)  # makes it readable, and stays there
    monkeypatch.setattr(supervision._channels[1], "receive", lambda: message)
    results = supervision.run(started_at=time.monotonic() - 19.9, timeout_s=20)
    assert results[1].stopped is Stopped.AT_DEADLINE
