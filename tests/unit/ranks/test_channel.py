"""Messages of any size arrive whole, and whoever reads never waits for ever."""

import contextlib
import os
import threading
import time
from multiprocessing.connection import Pipe

import pytest

from pytest_fsdp_comm.ranks.wire import messages
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.load import extend_under_load

MB = 1_000_000


@pytest.fixture
def channels():
    """A rank's end, and its supervisor's."""
    ours, theirs = Pipe()
    with (
        contextlib.closing(Channel(ours)) as rank,
        contextlib.closing(Channel(theirs, stalls_s=extend_under_load(1))) as supervisor,
    ):
        yield rank, supervisor


def ended(text):
    return messages.TestEnded(payloads=(text,), escaped=None)


def test_receive_is_linear_in_the_messages_size(channels):
    rank, supervisor = channels

    def timed_receive(size):
        sent = [ended("before"), ended("x" * size), ended("after")]
        sender = threading.Thread(target=lambda: [rank.send(message) for message in sent])
        received = []
        start = time.process_time()
        sender.start()
        while len(received) < len(sent):
            received += supervisor.receive_available()
        sender.join()
        assert received == sent
        return time.process_time() - start

    base_s = timed_receive(10 * MB)
    assert timed_receive(100 * MB) < 4 * 10 * base_s  # quadratic: 100 times as long


def test_send_works_if_the_test_replaces_getpid(channels, monkeypatch):
    rank, supervisor = channels
    monkeypatch.setattr("os.getpid", lambda: 1234)
    rank.send(ended("here"))
    assert list(supervisor.receive_available()) == [ended("here")]


def test_receive_after_the_end_returns_what_was_sent(channels):
    rank, supervisor = channels
    rank.send(ended("here"))
    rank.close()
    assert supervisor.receive(within_s=1.0) == ended("here")
    assert not supervisor.is_closed
    assert supervisor.receive(within_s=1.0) is None
    assert supervisor.is_closed


def test_receive_gives_up_when_nothing_comes(channels):
    _, supervisor = channels
    with pytest.raises(TimeoutError):
        supervisor.receive(within_s=0.0)


# As of a rank that was killed while it sent, without and with a child that keeps its connection.
@pytest.mark.parametrize("is_kept", [False, True])
def test_part_of_a_message_stalls_nobody(channels, is_kept):
    rank, supervisor = channels
    os.write(rank.fileno(), (1000).to_bytes(4, "big") + b"part")
    if is_kept:
        with pytest.raises(BlockingIOError):
            supervisor.receive()
    else:
        rank.close()
        assert supervisor.receive() is None
        assert supervisor.is_closed


def test_send_to_an_end_that_reads_nothing_gives_up(channels):
    _, supervisor = channels
    with pytest.raises(BlockingIOError):
        supervisor.send(ended("x" * 100 * MB))


def test_text_that_a_test_wrote_is_an_error(channels):
    rank, supervisor = channels
    os.write(rank.fileno(), b" printed by a test")
    with pytest.raises(OSError, match="bad message length"):
        supervisor.receive()
