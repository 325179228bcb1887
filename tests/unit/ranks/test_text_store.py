"""Texts, heartbeats and exchanges on a real store."""

import threading
import time

import pytest

from pytest_fsdp_comm.ranks.launched import heartbeat
from pytest_fsdp_comm.ranks.launched.heartbeat import Heartbeat, Pulse
from pytest_fsdp_comm.ranks.wire.exchange import RankExchange, forget
from pytest_fsdp_comm.ranks.wire.rank_set import StoreAddress
from pytest_fsdp_comm.ranks.wire.text_store import StoreLostError, TextStore, connect_store


@pytest.fixture(scope="module")
def address():
    from torch.distributed import TCPStore

    # A port that the system chooses, and that no other test can take meanwhile.
    served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield StoreAddress(host="localhost", port=served.port, prefix="test")
    del served


@pytest.fixture
def connect(address, request):
    def make():
        return TextStore(connect_store(address.below(request.node.name), timeout_s=10))

    return make


# The store itself drops a client that sends 8 MiB at once.
@pytest.mark.parametrize("text", ["", "ü\udcff\n", "ü" * (5 << 20)], ids=["empty", "odd", "long"])
def test_a_text_of_any_length_is_put_read_and_removed(connect, text):
    here, there = connect(), connect()
    assert not there.has("name")
    here.put("name", text)
    # The store answers nobody who writes: another client may see it a little later.
    until = time.monotonic() + 10
    while not there.has("name"):
        assert time.monotonic() < until
    assert there.get("name") == text
    assert there.remove("name")
    assert not there.remove("name")
    assert not here.has("name")
    assert not here.has("name@0")


def test_stores_below_different_names_are_apart(connect):
    store = connect()
    store.below("a").put("name", "1")
    assert not store.below("b").has("name")
    assert store.has("a/name")


def test_ranks_exchange_texts_and_leave_nothing(connect):
    ends = {rank: RankExchange(connect(), rank, (0, 1)) for rank in (0, 1)}
    received = {}

    def run(rank):
        received[rank] = [ends[rank](f"{number} of {rank}") for number in range(3)]
        ends[rank].meet("joined")
        ends[rank].leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert received == {0: received[1], 1: [[f"{n} of 0", f"{n} of 1"] for n in range(3)]}
    store = connect()
    assert store.has("3.1")
    assert store.has("3.1.text")
    for rank in ends:
        forget(connect(), rank)
    names = [f"{number}.{rank}" for number in (1, 2, 3) for rank in ends]
    assert not any(store.has(name) or store.has(f"{name}.text") for name in names)


def test_a_process_that_is_gone_is_silent(connect, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    beat = Heartbeat(connect(), 3)
    pulse = Pulse(connect(), 3)

    def longest_silence_s(duration_s):
        until, longest = time.monotonic() + duration_s, 0.0
        while time.monotonic() < until:
            longest = max(longest, pulse.silence_s())
            time.sleep(0.01)
        return longest

    assert longest_silence_s(1.0) < 0.9
    beat.close()
    assert longest_silence_s(1.5) > 1.0
    # Silence counts only while somebody listens.
    time.sleep(0.5)
    assert pulse.silence_s() == 0.0


def test_a_store_that_cannot_be_served_says_why_in_one_line(address):
    with pytest.raises(StoreLostError, match="EADDRINUSE") as caught:
        connect_store(address, timeout_s=5, serves=True)
    assert "\n" not in str(caught.value)
