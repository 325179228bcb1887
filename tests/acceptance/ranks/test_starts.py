"""The directory of a session's ranks: what becomes of it without ranks."""

import signal

import pytest
from running import start, wait_for

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

SOURCE = """
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=60)

def test_after():
    dist.barrier()
"""
PYTEST = ("-p", "no:cacheprovider", "-v")


@pytest.fixture
def tmpdir_of_session(pytester, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("tmp")))
    return pytester.path / "tmp"


def left_in(directory):
    return [path.name for path in directory.glob("fsdp-comm*")]


FULL_DISK = """
import errno
import pathlib

make = pathlib.Path.mkdir

def make_on_full_disk(path, *arguments, **options):
    if path.name == "2" and path.parent.name.startswith("fsdp-comm-"):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    make(path, *arguments, **options)

pathlib.Path.mkdir = make_on_full_disk
"""


def test_ranks_that_cannot_start_fail_only_their_test(pytester, tmpdir_of_session):
    pytester.makeconftest(FULL_DISK)
    pytester.makepyfile("""
        import pytest

        @pytest.mark.distributed(world_size=2)
        @pytest.mark.parametrize("number", [1, 2, 3])
        def test_number(number):
            pass
    """)
    result = pytester.runpytest_subprocess(*PYTEST, timeout=extend_under_load(60))
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_number?2? FAILED*",
            "ranks 0-1 could not be started: ?Errno 28? No space left on device: '*/fsdp-comm-*'",
        ]
    )
    assert not left_in(tmpdir_of_session)


NO_FORK = """
import pytest_fsdp_comm.ranks.session.runner as runner

def fork_server(*_, **__):
    raise BlockingIOError(11, "Resource temporarily unavailable")

runner.fork_server = fork_server
"""


def test_failed_start_leaves_no_directory(pytester, tmpdir_of_session):
    pytester.makeconftest(NO_FORK)
    pytester.makepyfile(test_it=SOURCE)
    result = pytester.runpytest_subprocess(*PYTEST, timeout=extend_under_load(60))
    assert "Resource temporarily unavailable" in f"{result.stdout}{result.stderr}"
    assert not left_in(tmpdir_of_session)


SLOW_SERVER = """
import pathlib, time
import pytest_fsdp_comm.ranks.session.runner as runner
import pytest_fsdp_comm.ranks.start.fork_server as server

start_rank = server._Server._start_rank

def start_noted(self, rank):
    pathlib.Path("forked").touch()
    start_rank(self, rank)

server._Server._start_rank = start_noted
make_template = runner.RankTemplate

def make_slowly(*arguments, **more):
    pathlib.Path("preparing").touch()
    time.sleep(SECONDS)
    return make_template(*arguments, **more)

runner.RankTemplate = make_slowly
"""


def test_no_rank_starts_after_its_session_has_ended(tmp_path):
    (tmp_path / "conftest.py").write_text(SLOW_SERVER.replace("SECONDS", str(extend_under_load(8))))
    (tmp_path / "test_it.py").write_text(SOURCE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    session = start(tmp_path, "test_it.py")
    wait_for((tmp_path / "preparing").exists)
    session.send_signal(signal.SIGINT)
    output, _ = session.communicate(timeout=extend_under_load(30))
    assert session.returncode == pytest.ExitCode.INTERRUPTED
    # Nobody would listen to them.
    assert not (tmp_path / "forked").exists()
    assert "ConnectionRefusedError" not in output
    assert not left_in(tmp_path)
