"""Several sessions of one launch: which processes meet, and what errors the others get."""

import dataclasses
import signal
import time

import pytest

from pytest_fsdp_comm.launch_environment import LaunchedRank
from pytest_fsdp_comm.ranks.launched import follower as follower_module
from pytest_fsdp_comm.ranks.launched import leader as leader_module
from pytest_fsdp_comm.ranks.launched import meeting as meeting_module
from pytest_fsdp_comm.ranks.launched.follower import Follower, _EndedError
from pytest_fsdp_comm.ranks.launched.leader import Leader
from pytest_fsdp_comm.ranks.launched.meeting import PLAN, Meeting


@pytest.fixture(scope="module")
def port():
    from torch.distributed import TCPStore

    served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield served.port
    del served


@pytest.fixture
def launched(port, request):
    """Rank 0 of two, as torchrun starts it."""
    return LaunchedRank(
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=2,
        host="localhost",
        port=port,
        has_store=True,
        run_id=f"{request.node.name}.0",
        launcher="torchrun",
    )


@pytest.fixture(autouse=True)
def _own_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def meet(request):
    """Connects as a rank's process does."""
    meetings = []

    def meet(launched, rank=0, **changes):
        changed = dataclasses.replace(launched, rank=rank, **changes)
        meetings.append(Meeting(request.session, changed))
        meetings[-1].connect()
        return meetings[-1]

    yield meet
    for meeting in meetings:
        meeting.close()


@pytest.fixture
def impatient(monkeypatch):
    for module in (follower_module, leader_module):
        monkeypatch.setattr(module, "MEET_TIMEOUT_S", 0.3)
        monkeypatch.setattr(module, "_EXPLAIN_AFTER_S", 0.1)


def wait_for(condition):
    # The store answers nobody who writes: another client may see it a little later.
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until


def test_each_process_counts_its_sessions(launched, meet):
    first, second = meet(launched), meet(launched)
    other = meet(launched, rank=1)
    assert [one.session_number for one in (first, second, other)] == [1, 2, 1]
    assert (other.sessions_of(0), other.sessions_of(1)) == (2, 1)
    first.store.put(PLAN, "first")
    wait_for(lambda: other.store.has(PLAN))
    assert other.store.get(PLAN) == "first"
    assert not second.store.has(PLAN)


def test_a_restart_ignores_what_an_earlier_run_left_on_the_store(launched, meet):
    before = meet(launched)
    before.store.put(PLAN, "stale")
    wait_for(lambda: before.store.has(PLAN))
    after = meet(launched, run_id=launched.run_id.replace(".0", ".1"))
    assert after.session_number == 1
    assert not after.store.has(PLAN)


def test_a_process_that_comes_too_late_ends_with_a_reason(launched, meet, request):
    meet(launched)
    meet(launched)
    follower = Follower(request.session, dataclasses.replace(launched, rank=1))
    with pytest.raises(_EndedError, match="rank 0 is in pytest session 2 of this launch") as caught:
        follower.meet([])
    assert "this process comes to session 1: it is too late" in str(caught.value)


@pytest.mark.usefixtures("impatient")
def test_a_process_that_nobody_joins_ends_with_a_reason(launched, meet, request, monkeypatch):
    complaints = []
    monkeypatch.setattr(follower_module, "_complain", lambda _, text: complaints.append(text))
    meet(launched, rank=1)
    follower = Follower(request.session, dataclasses.replace(launched, rank=1))
    what = r"rank 0 to begin pytest session 2 of this launch \(begun so far: 0\)"
    with pytest.raises(_EndedError, match=rf"waited 0\.3 s for {what}\. Do all ranks run the same"):
        follower.meet([])
    assert [text.partition(" session")[0] for text in complaints] == [
        "rank 1: waiting for rank 0 to begin pytest"
    ]


def test_rank_0_does_not_wait_for_a_process_in_a_later_session(launched, meet, request):
    meet(launched, rank=1)
    meet(launched, rank=1)
    leader = Leader(request.session, launched)
    with pytest.raises(pytest.UsageError, match=r"rank 0 is in pytest session 1 of this launch, r"):
        leader.meet(())
    leader.close()


def test_without_a_network_nobody_waits_for_the_store(launched, request, monkeypatch):
    for name in (meeting_module, follower_module):
        monkeypatch.setattr(name, "no_network_problem", lambda: "no network")
    changed = dataclasses.replace(launched, has_store=False)
    with pytest.raises(pytest.UsageError, match="cannot be served: no network"):
        Leader(request.session, changed).meet(())
    follower = Follower(request.session, dataclasses.replace(changed, rank=1))
    with pytest.raises(_EndedError, match=r"cannot reach rank 0 at localhost:\d+ .*: no network"):
        follower.meet([])


@pytest.mark.usefixtures("impatient")
def test_rank_0_waits_for_a_bounded_time(launched, meet, request):
    meet(launched)
    leader = Leader(request.session, launched)
    text = r"rank 1 of 2 did not join within 0\.3 s \(pytest session 2 of this launch\)"
    with pytest.raises(pytest.UsageError, match=text):
        leader.meet(())
    leader.close()


def test_a_closing_store_turns_away_the_next_session(launched, meet):
    from pytest_fsdp_comm.ranks.wire.text_store import StoreLostError

    serving = meet(launched)
    serving.announce_close()
    with pytest.raises(StoreLostError, match="the session before, which ends"):
        meet(launched, rank=1)
