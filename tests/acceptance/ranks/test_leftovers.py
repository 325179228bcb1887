"""However a session ends, nothing of it is left: no process, no directory, no shared memory.

The sessions run side by side, and each asks for its own leftovers: whatever a session starts has
its working directory, below which ``TMPDIR`` is too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import UNSAFE_TO_FORK

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and /dev/shm")

TEST = """
import multiprocessing, multiprocessing.util, os, pathlib, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
import pytest

HERE = pathlib.Path.cwd()
pytestmark = pytest.mark.distributed(world_size=2{more})

def share(request, dist_info):
    name = f"{{HERE.name}}-{{dist_info.rank}}"
    request.config.memory = SharedMemory(name=name, create=True, size=64)

def test_passing(request, dist_info):
    share(request, dist_info)  # and forget it
    request.config.pool = multiprocessing.get_context("forkserver").Pool(1)
    assert request.config.pool.map(abs, [-1]) == [1]
    request.config.manager = multiprocessing.get_context("fork").Manager()
    if {scoped}:
        file = HERE / f"finalized{{dist_info.rank}}"
        multiprocessing.util.Finalize(None, file.touch, exitpriority=1)

def test_endless(request, dist_info):
    share(request, dist_info)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    code = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)  # a daemon, whose parent is gone
    request.config.manager = multiprocessing.get_context("fork").Manager()
    (HERE / f"started{{dist_info.rank}}").write_text(str(os.getppid()))
    time.sleep(1000)
"""
MEMORY = Path("/dev/shm")  # noqa: S108  # where Linux has it
QUIET = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:randomly")
ENDLESS = (*QUIET, "-k", "endless")
PASSING = (*QUIET, "-k", "passing")


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a session is started."""

    arguments: tuple[str, ...] = ENDLESS
    program: tuple[str, ...] = ()
    """What runs pytest; empty for a process that has torch already."""
    more: str = ""
    conftest: str = ""


PYTEST = ("-m", "pytest")
WAYS = {
    "forked": Way(),
    "forked in a group": Way(program=PYTEST),
    "kept": Way(more=", scope='module'"),
    "spawned": Way(program=PYTEST, conftest=UNSAFE_TO_FORK),
    "xdist": Way(program=PYTEST, arguments=(*ENDLESS, "-n", "1")),
    "passing": Way(arguments=PASSING),
    "passing, kept": Way(arguments=PASSING, more=", scope='module'"),
}
# To whom: the process that was started, its whole group (as by a terminal that is closed, or a CI
# that is out of time), or the process above a rank's fork server. None: it ends by itself.
ENDS = [
    ("forked", signal.SIGHUP, "session"),
    ("forked", signal.SIGTERM, "session"),
    ("forked in a group", signal.SIGKILL, "group"),
    ("kept", signal.SIGKILL, "session"),
    ("spawned", signal.SIGHUP, "group"),
    ("xdist", signal.SIGTERM, "session"),
    ("xdist", signal.SIGKILL, "worker"),
    ("passing", None, ""),
    ("passing, kept", None, ""),
]


def end_id(end):
    way, number, whom = end
    return f"{way}-{signal.Signals(number).name}-{whom}" if number else way


def processes_in(directory):
    """The processes whose working directory it is, with their command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == directory:
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                state = (process / "stat").read_text().rpartition(") ")[2][:1]
                if state != "Z":
                    found[int(process.name)] = words.decode(errors="replace")[:150]
    return found


def left_of(directory):
    """What a session has left that was started in a directory."""
    entries = [entry.name for entry in (directory / "tmp").iterdir()]
    # pytest keeps the temporary directories of its last sessions, torch a cache, torchrun logs.
    kept = ("pytest-of-", "torchinductor_", "torchelastic_")
    return [
        *processes_in(directory).values(),
        *[name for name in entries if not name.startswith(kept)],
        *[entry.name for entry in MEMORY.glob(f"{directory.name}*")],
    ]


def start_session(directory, way, starter):
    """Starts a session, and returns its process id."""
    (directory / "tmp").mkdir(parents=True)
    text = TEST.format(more=way.more, scoped=not way.more)
    (directory / "test_it.py").write_text(text)
    (directory / "conftest.py").write_text(way.conftest)
    (directory / "pytest.ini").write_text("[pytest]\n")
    with pytest.MonkeyPatch.context() as patch, (directory / "output").open("wb") as output:
        patch.chdir(directory)
        patch.setenv("TMPDIR", str(directory / "tmp"))
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS", "CI"):
            patch.delenv(name, raising=False)
        if not way.program:
            return starter.start(way.arguments, output.fileno(), output.fileno())._pid
        session = subprocess.Popen(
            [sys.executable, *way.program, *way.arguments],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    threading.Thread(target=session.wait).start()
    return session.pid


def end_session(pid, directory, number, whom):
    if whom == "group":
        os.killpg(pid, number)
    elif whom == "session":
        os.kill(pid, number)
    else:
        server = (directory / "started1").read_text()
        stat = Path(f"/proc/{server}/stat").read_text()
        os.kill(int(stat.rpartition(") ")[2].split()[1]), number)


def wait_until(conditions, *, timeout_s):
    until = time.monotonic() + extend_under_load(timeout_s)
    while not all(condition() for condition in conditions) and time.monotonic() < until:
        time.sleep(0.1)


@pytest.fixture(scope="module")
def leftovers(tmp_path_factory, _warm_starter):
    """What each session has left once it has ended, and its directory."""
    running = {}
    for end in ENDS:
        # Its name is that of shared memory too, and sockets have short paths.
        directory = tmp_path_factory.mktemp(f"left{os.getpid()}-").resolve()
        running[end] = start_session(directory, WAYS[end[0]], _warm_starter), directory
    endless = [directory for (_, number, _), (_, directory) in running.items() if number]
    wait_until([(d / f"started{rank}").exists for d in endless for rank in (0, 1)], timeout_s=150)
    for (_, number, whom), (pid, directory) in running.items():
        if number and (directory / "started1").exists():
            end_session(pid, directory, number, whom)
    directories = [directory for _, directory in running.values()]
    wait_until([lambda d=d: not left_of(d) for d in directories], timeout_s=60)
    found = {}
    for end, (_, directory) in running.items():
        found[end] = left_of(directory), directory
        for pid in processes_in(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for memory in MEMORY.glob(f"{directory.name}*"):
            memory.unlink()
    return found


@pytest.mark.parametrize("end", ENDS, ids=end_id)
def test_nothing_is_left_of_a_session(leftovers, end):
    left, directory = leftovers[end]
    assert not left
    output = (directory / "output").read_text()
    if end[1]:
        assert all((directory / f"started{rank}").exists() for rank in (0, 1)), output
    else:
        assert "1 passed" in output, output


def test_multiprocessing_cleans_up_after_a_pass(leftovers):
    _, directory = leftovers["passing", None, ""]
    assert all((directory / f"finalized{rank}").exists() for rank in (0, 1))
