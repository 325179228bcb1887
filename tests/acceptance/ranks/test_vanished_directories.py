"""A session whose directory vanishes goes on: the tests that needed it fail, and say why."""

import signal

import pytest
from running import start, wait_for

SOURCE = """
import pathlib, shutil, tempfile
import pytest
import torch
import torch.distributed as dist

def distributed(**arguments):
    return pytest.mark.distributed(world_size=2, timeout_s=60, **arguments)

def empty(dist_info=None):
    if dist_info is None or dist_info.rank == 0:
        for entry in pathlib.Path(tempfile.gettempdir()).iterdir():
            shutil.rmtree(entry, ignore_errors=True)
    if dist_info is not None:
        dist.barrier()

@distributed()
def test_before():
    dist.barrier()

def test_plain():
    empty()

class TestInClass:
    @distributed()
    def test_after_plain(self, tmp_path):
        dist.barrier()

    @distributed()
    @pytest.mark.parametrize("more", [1])
    def test_needs_nothing_more(self, dist_info, more):
        empty(dist_info)

    @distributed()
    def test_exchanges(self, dist_info, comm_mode, comm_snapshot):
        with comm_mode:
            dist.all_reduce(torch.ones(3))
        empty(dist_info)
        assert comm_mode == comm_snapshot

@distributed()
def test_fails(dist_info):
    empty(dist_info)
    assert 0, "for another reason"

@distributed(scope="module")
def test_kept(dist_info):
    empty(dist_info)

@distributed(scope="module")
def test_after_kept(dist_info):
    dist.barrier()

@distributed(scope="module")
def test_at_last(dist_info):
    dist.barrier()
"""
UNSAFE = (
    "import threading\nstop = threading.Event()\n"
    "threading.Thread(target=stop.wait, name='poller', daemon=True).start()\n"
)
PYTEST = ("-p", "no:cacheprovider", "-v")
VANISHED = "the directory of the session's ranks, *fsdp-comm-*, vanished {} test*"


@pytest.fixture
def tmpdir_of_session(pytester, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("tmp")))
    return pytester.path / "tmp"


def left_in(directory):
    return [path.name for path in directory.glob("fsdp-comm*")]


@pytest.mark.parametrize("arguments", [(), ("-n", "1", "--rank-slots", "2")], ids=["one", "xdist"])
def test_a_session_goes_on_without_its_directory(pytester, tmpdir_of_session, arguments):
    pytester.makepyfile(**{"tests/sub/test_it": SOURCE})
    result = pytester.runpytest_subprocess(*PYTEST, *arguments, "-Werror", timeout=100)
    output = result.stdout.str()
    assert "INTERNALERROR" not in output
    result.assert_outcomes(passed=7, failed=2, warnings=5)
    result.stdout.fnmatch_lines(
        [
            "*_ TestInClass.test_exchanges _*",
            "E *the other ranks are out of reach: *, has vanished. Did a test empty the *",
            "*- Problems -*",
            VANISHED.format("while this"),
            "*_ test_fails _*",
            "*for another reason",
            "*- Problems -*",
            VANISHED.format("while this"),
            "*warnings summary*",
            f"*PytestWarning: {VANISHED.format('before this')}",
        ]
    )
    assert output.count("vanished while this") == 2
    # Once for each time that it had vanished.
    assert output.count("vanished before this") == 5
    assert not left_in(tmpdir_of_session)


def test_spawned_ranks_get_another_directory(pytester, tmpdir_of_session):
    pytester.makeconftest(UNSAFE)
    pytester.makepyfile(test_it=SOURCE)
    result = pytester.runpytest_subprocess(*PYTEST, "-k", "plain or exchanges", timeout=100)
    result.assert_outcomes(passed=2, failed=1, deselected=6)
    result.stdout.fnmatch_lines(["E *the other ranks are out of reach: *, has vanished.*"])
    assert not left_in(tmpdir_of_session)


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


def test_ranks_that_the_system_does_not_let_start_fail_their_test_alone(
    pytester, tmpdir_of_session
):
    pytester.makeconftest(FULL_DISK)
    pytester.makepyfile("""
        import pytest

        @pytest.mark.distributed(world_size=2)
        @pytest.mark.parametrize("number", [1, 2, 3])
        def test_number(number):
            pass
    """)
    result = pytester.runpytest_subprocess(*PYTEST, timeout=60)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_number?2? FAILED*",
            "ranks 0-1 could not be started: ?Errno 28? No space left on device: '*/2'",
        ]
    )
    assert "vanished" not in result.stdout.str()
    assert not left_in(tmpdir_of_session)


NO_FORK = """
import pytest_fsdp_comm.ranks.session.runner as runner

def fork_server(*_, **__):
    raise BlockingIOError(11, "Resource temporarily unavailable")

runner.fork_server = fork_server
"""


def test_a_session_that_cannot_start_leaves_no_directory(pytester, tmpdir_of_session):
    pytester.makeconftest(NO_FORK)
    pytester.makepyfile(test_it=SOURCE)
    result = pytester.runpytest_subprocess(*PYTEST, timeout=60)
    assert "Resource temporarily unavailable" in f"{result.stdout}{result.stderr}"
    assert not left_in(tmpdir_of_session)


SLOW_SERVER = """
import pathlib, time
import pytest_fsdp_comm.ranks.session.runner as runner
import pytest_fsdp_comm.ranks.start.fork_server as server

fork = server._Server._fork

def fork_noted(self, run):
    pathlib.Path("forked").touch()
    return fork(self, run)

server._Server._fork = fork_noted
make_template = runner.RankTemplate

def make_slowly(*arguments, **more):
    pathlib.Path("forked").unlink(missing_ok=True)  # of the server itself
    pathlib.Path("preparing").touch()
    time.sleep(8)
    return make_template(*arguments, **more)

runner.RankTemplate = make_slowly
"""


def test_no_rank_starts_after_its_session_has_ended(tmp_path):
    (tmp_path / "conftest.py").write_text(SLOW_SERVER)
    (tmp_path / "test_it.py").write_text(SOURCE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    session = start(tmp_path, "test_it.py")
    signal.signal(signal.SIGINT, before)
    wait_for((tmp_path / "preparing").exists, timeout_s=60)
    session.send_signal(signal.SIGINT)
    output, _ = session.communicate(timeout=30)
    assert session.returncode == pytest.ExitCode.INTERRUPTED
    # Nobody would listen to them.
    assert not (tmp_path / "forked").exists()
    assert "ConnectionRefusedError" not in output
    assert not left_in(tmp_path)
