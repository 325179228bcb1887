"""Whoever waits for another process has a bound, and is heard by what it waits for."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_fsdp_comm.ranks.start import ending, fork_server
from pytest_fsdp_comm.ranks.start.fork_server import ForkServer, ServerDiedError
from pytest_fsdp_comm.ranks.wire import messages
from pytest_fsdp_comm.ranks.wire.channel import Channel
from pytest_fsdp_comm.ranks.wire.load import extend_under_load


@pytest.fixture
def channels():
    """A fork client's end, and a fork server's."""
    ours, theirs = Pipe()
    with (
        contextlib.closing(Channel(ours)) as our,
        contextlib.closing(Channel(theirs)) as their,
    ):
        yield our, their


def started(pid):
    return messages.SetStarted(pids={0: pid})


def end(within_s):
    return messages.EndSet(within_s=within_s)


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server that has not started, its end of the connection, and how often it was killed."""
    ends, killed = [], []

    def start(_, theirs):
        ends.append(Channel(Connection(os.dup(theirs.fileno()))))
        return 0

    monkeypatch.setattr(ForkServer, "kill", lambda _: killed.append(True))
    found = ForkServer(start, tmp_path)
    yield found, ends[0], killed
    ends[0].close()
    found._channel.close()
    os.close(found._until_exit)


def test_a_server_that_does_not_answer_is_killed(server, monkeypatch):
    ours, theirs, killed = server
    for name in ("_PREPARED_WITHIN_S", "_ANSWERED_WITHIN_S"):
        monkeypatch.setattr(fork_server, name, 0.05)
    theirs.send(messages.SetEnded(unended={}))  # of an earlier rank set
    with pytest.raises(ServerDiedError):
        ours._await_reply(messages.SetStarted, 0.05)
    assert len(killed) == 1
    ours.pids = {0: 2**22 + 1}  # of nobody
    assert ours.end_ranks(0.0) == {}
    assert len(killed) == 2


def test_a_server_tells_which_ranks_it_could_not_end(server):
    ours, theirs, _ = server
    theirs.send(messages.RankExited(rank=0, status=3))
    theirs.send(messages.SetEnded(unended={1: 11}))
    ours.pids = {0: 10, 1: 11}
    assert ours.end_ranks(0.0) == {1: 11}
    assert ours.exit_statuses() == {0: 3}
    assert theirs.receive() == end(0.0)


def test_channel_ignores_a_forked_child(channels):
    ours, theirs = channels
    pid = os.fork()
    if pid == 0:
        ours.send(end(1.0))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    ours.send(end(2.0))
    assert theirs.receive() == end(2.0)


def test_a_channel_knows_whether_the_other_end_is_gone(channels):
    ours, theirs = channels
    theirs.send(started(1))
    assert not ours.is_hung_up()
    theirs.close()
    assert ours.is_hung_up()  # though there is something to read
    assert ours.receive() == started(1)
    assert ours.is_hung_up()


def test_ranks_of_a_dying_pytest_get_time_to_end(channels, monkeypatch):
    ours, theirs = channels
    ours.close()
    wakeup, _ = ends = socket.socketpair()
    # Its children lose it after its connection has ended.
    patience = iter([ending.HURRIED_S] * 2)
    server = SimpleNamespace(
        _channel=theirs, _wakeup=wakeup, _patience_s=lambda: next(patience, ending.PATIENCE_S)
    )
    clock = itertools.count(step=ending.HURRIED_S / 6)
    monkeypatch.setattr(fork_server, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    gone_at = 3 * ending.HURRIED_S
    monkeypatch.setattr(ending, "await_end", lambda _: 0 if next(clock) > gone_at else None)
    assert fork_server._Server._await_ends(server, {0: 10}, ending.PATIENCE_S) == {}
    for end in ends:
        end.close()


def test_a_child_that_does_not_end_is_not_waited_for():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        started_at = time.monotonic()
        assert ending.await_end(child.pid, within_s=0.1) is None
        assert ending.await_end(child.pid) is None
        assert time.monotonic() - started_at < extend_under_load(5)
    finally:
        ending.kill([child.pid])
    assert ending.await_end(child.pid, within_s=extend_under_load(10)) == -signal.SIGKILL
    # As where somebody else has reaped it.
    assert ending.await_end(child.pid) == 0
    child.returncode = -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody adopts orphans")
def test_child_without_a_command_yet_gets_time():
    # As one that has ended and was not waited for: between two programs, a process shows none.
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not Path(f"/proc/{child.pid}/cmdline").read_bytes()
    assert ending._is_resource_cleaner(child.pid)
    assert not ending._is_resource_cleaner(os.getpid())
    assert child.wait() == 0


ADOPTING = '''
import os, subprocess, sys, time
from pytest_fsdp_comm.ranks.start import ending

ending.adopt_orphans()
ending._CLEANED_WITHIN_S = 50.0
spared = subprocess.Popen(["sleep", "4246"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
code = """
from subprocess import DEVNULL, Popen
print(Popen(['sleep', '4247'], stdout=DEVNULL, stderr=DEVNULL, start_new_session=True).pid)
"""
told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
orphan = int(told)
os.kill(orphan, 0)
clean = "import sys; sys.stdin.read(); print('cleaned', flush=True)  # resource_tracker"
cleaner = subprocess.Popen([sys.executable, "-c", clean], stdin=subprocess.PIPE)
kill = ending.kill
def kill_all_but_the_cleaner(pids):
    kill(pids)
    # It cleans up once the others are gone, and ends then.
    cleaner.stdin.close()
ending.kill = kill_all_but_the_cleaner
assert not ending.kill_children([spared.pid], within_s=ending.extend_under_load(10))
ending.kill = kill
try:
    os.kill(orphan, 0)
except ProcessLookupError:
    print("gone")
assert spared.poll() is None
ending.kill = lambda pids: None
assert ending.kill_children([], within_s=0.05) == {spared.pid}
ending.kill = kill
assert not ending.kill_children([], within_s=ending.extend_under_load(10))
try:
    os.kill(spared.pid, 0)
except ProcessLookupError:
    print("gone")
sys.stdout.flush()
os._exit(0)
'''


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody adopts orphans")
def test_orphans_are_found_in_sessions_of_their_own():
    done = subprocess.run(
        [sys.executable, "-c", ADOPTING],
        capture_output=True,
        text=True,
        check=False,
        timeout=extend_under_load(60),
    )
    assert done.stdout.split() == ["cleaned", "gone", "gone"], done.stderr
