"""The fork server, its directory and the connections of its ranks."""

import contextlib
import os
import select
import signal
import stat
import sys
from pathlib import Path

import pytest
from running import wait_for

from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.options import DistributedSettings
from pytest_fsdp_comm.ranks.start import fork_server
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.ranks.wire.messages import RankSetSpec

RANKS = 2


@pytest.fixture
def server(tmp_path, monkeypatch):
    """One whose ranks write which they are, and their process ids, and live on."""

    def run_rank(spec, rank, descriptors):
        assert all(stat.S_ISSOCK(os.fstat(descriptor).st_mode) for descriptor in descriptors)
        (spec.directory / f"rank{rank}").write_text(f"{spec.nodeid} {os.getpid()}")
        select.select([], [], [])

    monkeypatch.setattr(fork_server, "PRELOADED", ())
    directory = tmp_path / "session"
    directory.mkdir()
    found = fork_server.fork_server(lambda: run_rank, directory)
    yield found
    everybody = children(found)
    found.close()
    wait_for(lambda: all(map(is_gone, everybody)))


@pytest.fixture
def start(server, tmp_path):
    connections = contextlib.ExitStack()

    def start_set(name, size=RANKS):
        directory = tmp_path / name
        directory.mkdir()
        spec = RankSetSpec(
            item_index=0,
            nodeid=name,
            settings=DistributedSettings(
                world_size=size,
                ranks=tuple(range(size)),
                scope="test",
                backend="gloo",
                device="cpu",
                timeout_s=60,
            ),
            directory=directory,
            basetemp=directory,
            echoes=(),
        )
        started = server.start_ranks(spec)
        for pair in started.values():
            for connection in pair:
                connections.enter_context(connection)
        written = {rank: f"{name} {pid}" for rank, pid in server.pids.items()}
        wait_for(lambda: written == {rank: read(directory / f"rank{rank}") for rank in written})
        return started

    with connections:
        yield start_set


def read(path):
    return path.read_text() if path.exists() else ""


def children(server):
    path = Path(f"/proc/{server._pid}/task/{server._pid}/children")
    return {int(pid) for pid in path.read_text().split()}


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("is_lazy", [False, True])
def test_server_imports_before_the_first_request(tmp_path, monkeypatch, is_lazy):
    (tmp_path / "noted.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_server, "PRELOADED", ())
    (tmp_path / "session").mkdir()
    server = fork_server.fork_server(
        lambda: None, tmp_path / "session", ("noted",), is_lazy=is_lazy
    )
    if is_lazy:
        assert server.close() == 0
        assert not (tmp_path / "imported").exists()
    else:
        wait_for((tmp_path / "imported").exists)
        server.close()


@linux
def test_replies_of_a_dead_server_are_read(server, tmp_path):
    server.exit_statuses()  # it lives, and has said nothing

    def fail():
        raise FsdpCommError("torch 9 no longer has name")

    directory = tmp_path / "failing"
    directory.mkdir()
    failing = fork_server.fork_server(fail, directory)
    # Sent before its end: a client that misses the directory finds the reason.
    wait_for(lambda: not directory.exists())
    with pytest.raises(fork_server.ServerDiedError, match="torch 9 no longer has name"):
        failing.exit_statuses()
    failing.close()
    killed = fork_server.fork_server(lambda: os.kill(os.getpid(), 9), directory)
    wait_for(lambda: killed.has_died)
    with pytest.raises(fork_server.ServerDiedError) as caught:
        killed.exit_statuses()
    assert not str(caught.value)
    killed.close()


@linux
def test_only_a_living_server_is_killed(tmp_path, monkeypatch):
    directory = tmp_path / "session"
    directory.mkdir()
    server = fork_server.fork_server(lambda: select.select([], [], []), directory)
    killed = []
    kill = fork_server.ending.kill
    with monkeypatch.context() as patch:
        patch.setattr(fork_server.ending, "kill", lambda pids: killed.append([*pids]))
        server.kill()
        assert killed == [[server._pid]]
        kill([server._pid])
        wait_for(lambda: server.has_died)
        server.kill()  # its number may belong to another process now
    assert len(killed) == 1
    server.close()


@linux
@pytest.mark.parametrize("is_killed", [False, True])
def test_interrupted_close_leaves_no_directory(is_killed, tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server, "PRELOADED", ())
    monkeypatch.setattr(fork_server, "_CLOSED_WITHIN_S", 0.0)
    directory = tmp_path / "session"
    directory.mkdir()
    (directory / "rank0.stdout").touch()

    def prepare():
        wait_for((tmp_path / "go").exists)

    closing = fork_server.fork_server(prepare, directory)
    kill = closing.kill

    def interrupt():
        if is_killed:
            kill()
        raise KeyboardInterrupt

    monkeypatch.setattr(closing, "kill", interrupt)
    with pytest.raises(KeyboardInterrupt):
        closing.close()
    (tmp_path / "go").touch()
    wait_for(lambda: closing.has_died)
    assert not directory.exists()


@linux
def test_rank_connections_end_with_the_rank(server, start):
    connections = start("forked")
    os.kill(server.pids[0], signal.SIGKILL)
    for connection in connections[0]:
        assert connection.poll(extend_under_load(30))
        with pytest.raises(EOFError):
            connection.recv_bytes()
    assert not any(connection.poll(0) for connection in connections[1])
    assert server.end_ranks(extend_under_load(10)) == {}


@linux
def test_pytest_has_two_open_files_per_rank(server, start, few_descriptors):
    few_descriptors(2 * 64 + 10, server._pid)
    connections = start("many", size=64)
    assert len(connections) == 64
    for pair in connections.values():
        for connection in pair:
            connection.close()
    assert server.end_ranks(extend_under_load(10)) == {}
    with pytest.raises(OSError, match="Too many open files"):
        start("too many", size=80)
    # Of which no connection is taken for one of the next ranks.
    (connection, _), _ = start("few").values()
    os.kill(server.pids[0], signal.SIGKILL)
    assert connection.poll(extend_under_load(30))
    with pytest.raises(EOFError):
        connection.recv_bytes()
