"""Messages of any size and number take time in proportion to their bytes."""

import contextlib
import os
import socket
import threading
import time

import pytest

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.ranks.wire import messages
from pytest_fsdp_comm.ranks.wire.channel import Channel

MB = 1_000_000


@pytest.fixture
def channels():
    """A rank's end, and its supervisor's."""
    ours, theirs = socket.socketpair()
    with (
        contextlib.closing(Channel(ours, messages.RANK)) as rank,
        contextlib.closing(Channel(theirs, messages.SUPERVISOR)) as supervisor,
    ):
        yield rank, supervisor


def skipped(site):
    return messages.DebuggerSkipped(site=site)


def test_a_message_of_100_mb_is_received_in_seconds(channels):
    rank, supervisor = channels
    sent = [skipped("before"), skipped("x" * 100 * MB), skipped("after")]
    sender = threading.Thread(target=lambda: [rank.send(message) for message in sent])
    received, chunks = [], 0
    began_at = time.process_time()
    sender.start()
    while len(received) < len(sent):
        # Each call reads what is there and no more: between two, the supervisor serves others.
        received += supervisor.receive_available()
        chunks += 1
    sender.join()
    # Looking at all of it again for each chunk took 25 s for a fifth of it.
    assert time.process_time() - began_at < 5
    assert received == sent
    assert chunks > 1000
    assert not supervisor._pending


def test_messages_arrive_from_a_test_that_replaces_getpid(channels, monkeypatch):
    rank, supervisor = channels
    monkeypatch.setattr("os.getpid", lambda: 1234)
    rank.send(skipped("here"))
    assert list(supervisor.receive_available()) == [skipped("here")]


def test_messages_received_in_pieces_are_whole(channels):
    rank, supervisor = channels
    sent = [skipped(str(number)) for number in range(100)]
    data = b"".join(b'{"type":"DebuggerSkipped","site":"%d"}\n' % number for number in range(100))
    received = []
    for start in range(0, len(data), 7):
        rank._connection.sendall(data[start : start + 7])
        received += supervisor.receive_available()
    assert received == sent
    for piece in (data[:50], data[50:]):
        rank._connection.sendall(piece)
    assert [supervisor.receive() for _ in sent] == sent
    rank.close()
    assert supervisor.receive() is None


def test_descriptors_travel_with_a_message_in_any_number(channels):
    rank, supervisor = channels
    ends = [os.pipe() for _ in range(200)]
    for start in range(0, len(ends), 100):
        rank.send_descriptors([end for pair in ends[start : start + 100] for end in pair])
    rank.send(skipped("x" * 1000))
    rank.send(skipped("after"))
    assert [supervisor.receive() for _ in range(2)] == [skipped("x" * 1000), skipped("after")]
    # Each is a copy.
    for _, write_end in ends:
        os.close(write_end)
    copies = [supervisor.take_descriptors() for _ in range(150)]
    for (read_end, _), (_, copied_end) in zip(ends[:150], copies, strict=True):
        os.write(copied_end, b"through")
        assert os.read(read_end, 10) == b"through"
    for copy in copies:
        for end in copy:
            os.close(end)
    # Those that nobody took end with the channel.
    supervisor.close()
    for read_end, _ in ends:
        assert os.read(read_end, 10) == b""
        os.close(read_end)


def test_nobody_waits_for_descriptors_that_do_not_come(channels):
    rank, supervisor = channels
    read_end, write_end = os.pipe()
    rank.send_descriptors([write_end])
    os.close(write_end)
    rank.send(skipped("instead"))
    assert supervisor.take_descriptors() is None
    assert os.read(read_end, 10) == b""  # the one that came is closed
    os.close(read_end)
    assert supervisor.receive() == skipped("instead")
    rank.close()
    assert supervisor.take_descriptors() is None


def test_descriptors_that_were_lost_are_an_error(channels, few_descriptors):
    rank, supervisor = channels
    rank.send_descriptors([0, 1, 2])
    few_descriptors(2)
    with pytest.raises(FsdpCommError, match=r"too many open files: raise the limit \(ulimit -n\)"):
        supervisor.receive()
    copies = supervisor.take_descriptors()
    for copy in copies:
        os.close(copy)
