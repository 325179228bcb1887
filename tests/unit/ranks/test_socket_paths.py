"""A rank of a busy machine reaches its supervisor, however late that is."""

import socket
import threading
import time

import pytest

from pytest_fsdp_comm.ranks.wire.socket_paths import connect


@pytest.fixture
def bound(tmp_path):
    """A socket at a path, at which nobody listens yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        yield listener, tmp_path / "socket"


def test_a_refused_connection_is_retried(bound):
    listener, path = bound
    listening = threading.Timer(0.3, listener.listen)
    listening.start()
    with connect(path, within_s=30.0) as connection:
        connection.sendall(b"here")
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(4) == b"here"
    listening.join()


def test_connection_retries_are_bounded(bound):
    _, path = bound
    began_at = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        connect(path, within_s=0.2)
    assert 0.2 <= time.monotonic() - began_at < 10


def test_connecting_to_a_missing_socket_fails_at_once(tmp_path):
    began_at = time.monotonic()
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / "none", within_s=60.0)
    assert time.monotonic() - began_at < 10
