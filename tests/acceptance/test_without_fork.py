"""On a system that cannot fork, such as Windows, distributed tests say so and others run.

Simulated by taking away what such systems lack, before this plugin is imported; it is seen to run
on none of them.
"""

import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.cold,  # takes away what Linux has before this plugin is imported
    pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has"),
]

# What Python's documentation says is not available on Windows, as far as other packages here, which
# look at sys.platform, can do without it.
NO_FORK = """
import ctypes, os, signal, socket, sys

for name in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for module, names in {
    os: "fork forkpty getpgrp setpgid killpg tcgetpgrp tcsetpgrp posix_fallocate pread mkfifo",
    signal: "SIGHUP SIGKILL SIGUSR1 SIGTTOU SIGCHLD pthread_sigmask sigwait",
    socket: "AF_UNIX",
}.items():
    for name in names.split():
        delattr(module, name)

class _Library(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *args, **kwargs)

ctypes.CDLL = _Library
"""
SOURCE = """
import pytest

def test_plain():
    assert 1 + 1 == 2

@pytest.mark.distributed(world_size=2)
def test_ranks(dist_info, device_mesh):
    raise AssertionError("must not run")

@pytest.mark.distributed(world_size=64, backend="fake")
class TestFake:
    @pytest.mark.parametrize("n", [1, 2])
    def test_simulated(self, n):
        raise AssertionError("must not run")

@pytest.mark.skip(reason="said by the test")
@pytest.mark.distributed(world_size=2)
def test_skipped():
    raise AssertionError("must not run")

def test_recorded_here(comm_mode, comm_snapshot):
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with comm_mode:
        dist.all_reduce(torch.ones(2))
    assert comm_mode == comm_snapshot
    dist.destroy_process_group()
"""
TEXT = "distributed tests fork their ranks, which linux does not support; run pytest on "


@pytest.fixture
def no_fork(pytester):
    (pytester.path / "no_fork.py").write_text(NO_FORK)
    pytester.makepyfile(test_it=SOURCE)
    return lambda *arguments: pytester.runpytest_subprocess(
        "-p", "no_fork", "-p", "no:cacheprovider", *arguments
    )


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), marks=pytest.mark.release),
        pytest.param(("-n", "2"), marks=pytest.mark.release),
        pytest.param(("--comm-report=report",), marks=pytest.mark.release),
    ],
)
def test_without_fork_only_distributed_tests_fail(no_fork, pytester, arguments):
    result = no_fork("--snapshot-update", *arguments)
    result.assert_outcomes(passed=2, errors=3, skipped=1)
    shown = result.stdout.str() + result.stderr.str()
    assert shown.count(f"\n{TEXT}") == 3
    assert "Linux, for example in WSL, a container or a virtual machine\n" in shown
    assert "Traceback" not in shown
    assert "INTERNALERROR" not in shown
    assert [path.name for path in pytester.path.glob("snapshots/*/*")] == [
        "test_recorded_here.ws1.comm"
    ]


@pytest.mark.release
def test_without_fork_snapshots_are_kept(no_fork, pytester):
    kept = pytester.mkdir("snapshots") / "test_it" / "test_ranks.ws2.comm"
    kept.parent.mkdir()
    kept.write_text("reviewed")
    no_fork("--snapshot-update").assert_outcomes(passed=2, errors=3, skipped=1)
    assert kept.read_text() == "reviewed"


def test_without_fork_other_sessions_are_unaffected(no_fork):
    result = no_fork("--collect-only", "-q")
    assert result.ret == 0
    assert "6 tests collected" in result.stdout.str()
    result = no_fork("-k", "plain")
    result.assert_outcomes(passed=1, deselected=5)
    assert "need Linux" not in result.stdout.str()


def test_commands_run_without_fork(pytester):
    (pytester.path / "no_fork.py").write_text(NO_FORK)
    pytester.mkdir("snapshots")
    start = "import no_fork; from pytest_fsdp_comm.command_line.main import main; main()"
    for command, text in {
        "--help": "usage: fsdp-comm",
        "accept .": "no directory 'received'",
    }.items():
        ended = subprocess.run(
            [sys.executable, "-c", start, *command.split()],
            capture_output=True,
            text=True,
            check=False,
        )
        assert text in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.release
def test_without_fork_rankless_modules_import(pytester):
    (pytester.path / "no_fork.py").write_text(NO_FORK)
    names = "comm command_line reports snapshots text tree sharding recording"
    program = (
        "import torch, torch.distributed.fsdp, torch.distributed.tensor, no_fork\n"
        "import importlib, pkgutil, pytest_fsdp_comm\n"
        f"rooms = {names.split()!r}\n"
        "for found in pkgutil.walk_packages(pytest_fsdp_comm.__path__, 'pytest_fsdp_comm.'):\n"
        "    _, room, *inner = found.name.split('.')\n"
        "    if room in rooms or (not inner and room not in {'ranks', '__main__'}):\n"
        "        importlib.import_module(found.name)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
