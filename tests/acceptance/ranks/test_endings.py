"""A rank that is hard to end ends no session: every wait has its bound, and the test says so."""

import contextlib
import os
import re
import signal
import time

import pytest
from running import command_lines, start, wait_for

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

LEAVING = """
import os, subprocess, sys, time
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, timeout_s={timeout_s}{more})

def leave_the_group(dist_info):
    if dist_info.rank == 0:
        os.setpgid(0, os.getpgid(os.getppid()))

def test_leaves_its_group(dist_info):
    leave_the_group(dist_info)

def test_after():
    dist.barrier()

def test_leaves_its_group_and_hangs(dist_info):
    leave_the_group(dist_info)
    if dist_info.rank == 0:
        time.sleep(1000)

def test_leaves_children_in_sessions_of_their_own():
    subprocess.Popen(["sleep", "4244"], start_new_session=True)
    # A daemon, as the books have it: its parent is gone.
    code = "import subprocess; subprocess.Popen(['sleep', '4245'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], check=True)
    if "daemon" in {daemons}:
        assert b"4245" in subprocess.check_output(["ps", "-eo", "args"])

def test_last():
    dist.barrier()
"""
PYTEST = ("-p", "no:cacheprovider", "-v")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="forked"),
        pytest.param(", scope='module'", id="kept", marks=pytest.mark.release),
    ],
)
def test_rank_outside_its_process_group_is_ended(pytester, more):
    pytester.makepyfile(
        LEAVING.format(more=more, timeout_s=extend_under_load(5), daemons=["daemon"])
    )
    result = pytester.runpytest_subprocess(*PYTEST, "-W", "ignore", timeout=extend_under_load(100))
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        ["*_hangs FAILED*", "*test_last PASSED*", "rank 0 did not finish within * s*"]
    )
    left = [line for line in command_lines() if "4244" in line or "4245" in line]
    assert not left


# Nothing here can be made to wait in the kernel for ever, so that its end is left out instead: of
# the ranks that ask for it, no signal is sent. The kernel ends them with the fork server.
UNKILLABLE = """
import os, pathlib
import pytest_fsdp_comm.ranks.session.runner as runner
import pytest_fsdp_comm.ranks.start.fork_server as server

runner.PATIENCE_S = {patience_s}
HERE = pathlib.Path(__file__).parent

def sparing(kill):
    def spare(pids):
        kill([pid for pid in pids if not (HERE / f"spared{{abs(pid)}}").exists()])
    return spare

server.ending.kill = sparing(server.ending.kill)
"""
STUCK = """
import os, pathlib, time
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, timeout_s={timeout_s}{more})

def become_unkillable(dist_info):
    if dist_info.rank == 1:
        pathlib.Path(f"spared{{os.getpid()}}").touch()

def test_before():
    dist.barrier()

def test_stuck(dist_info):
    become_unkillable(dist_info)

def test_stuck_and_failing(dist_info):
    become_unkillable(dist_info)
    assert False, "for another reason"

def test_stuck_and_hanging(dist_info):
    become_unkillable(dist_info)
    time.sleep(1000)

def test_after():
    dist.barrier()

def test_plain():
    pass
"""


def says_unended(name):
    return f"rank 1 of {name} has not ended: its process * still exists * s after SIGKILL*"


@pytest.mark.parametrize(
    "arguments",
    [pytest.param((), id="one"), pytest.param(("-n", "1"), id="xdist", marks=pytest.mark.release)],
)
def test_a_rank_that_cannot_be_ended_fails_its_test(pytester, arguments):
    pytester.makeconftest(UNKILLABLE.format(patience_s=1.0))
    pytester.makepyfile(test_it=STUCK.format(more="", timeout_s=extend_under_load(3)))
    result = pytester.runpytest_subprocess(*PYTEST, *arguments, timeout=extend_under_load(60))
    result.assert_outcomes(passed=3, failed=3)
    texts = ["*_ test_stuck _*", says_unended("test_it.py::test_stuck")]
    texts += ["Perhaps a driver or a file server does not respond: * Later tests get new ranks."]
    texts += ["*for another reason", "*- Problems -*", says_unended("*::test_stuck_and_failing")]
    texts += ["*ranks 0-1 did not finish within * s*", says_unended("*::test_stuck_and_hanging")]
    result.stdout.fnmatch_lines(texts)
    assert "INTERNALERROR" not in result.stdout.str()
    # At the end of the session they were gone.
    assert "has not ended" not in result.stderr.str()
    assert not [line for line in command_lines() if str(pytester.path) in line]


# Nothing ends it: neither the fork server's end, nor that its supervisor hangs up.
STAYING = """
import ctypes
libc = ctypes.CDLL(None)

def become_immortal(dist_info):
    if dist_info.rank == 1:
        become_unkillable(dist_info)
        libc.prctl(1, 0)
        os._exit = lambda status: time.sleep(1000)

def test_immortal(dist_info):
    become_immortal(dist_info)
"""


@pytest.fixture
def spared(pytester):
    """The processes that pretend to be unkillable; killed in the end."""

    def find():
        return [int(path.name.removeprefix("spared")) for path in pytester.path.glob("spared*")]

    yield find
    for pid in find():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_kept_rank_that_does_not_end_is_reported(pytester, spared):
    pytester.makeconftest(UNKILLABLE.format(patience_s=1.0))
    pytester.makepyfile(
        test_it=STUCK.format(more=", scope='module'", timeout_s=extend_under_load(3)) + STAYING
    )
    result = pytester.runpytest_subprocess(
        *PYTEST, "-k", "immortal or before", timeout=extend_under_load(60)
    )
    result.assert_outcomes(passed=2, deselected=5)
    (pid,) = spared()
    result.stderr.fnmatch_lines(
        [
            "fsdp-comm: rank 1 of test_it.py::test_* has not ended: its process "
            f"{pid} still exists * s after SIGKILL.",
            f"Perhaps a driver or a file server does not respond: /proc/{pid}/stack *",
        ]
    )
    os.kill(pid, 0)


WAITING = """
import os, pathlib, time
import pytest

@pytest.mark.distributed(world_size=2)
def test_stuck(dist_info):
    if dist_info.rank == 1:
        pathlib.Path(f"spared{os.getpid()}").touch()
        pathlib.Path("started").touch()
    if SLEEPS:
        time.sleep(1000)
"""


# SIGTERM ends pytest at once, whatever it waits for.
@pytest.mark.parametrize(
    ("number", "sleeps"),
    [
        pytest.param(signal.SIGINT, True, id="SIGINT in the test", marks=pytest.mark.release),
        pytest.param(signal.SIGINT, False, id="SIGINT in the wait for its end"),
        pytest.param(signal.SIGTERM, True, id="SIGTERM", marks=pytest.mark.release),
    ],
)
def test_unkillable_rank_does_not_block_an_interrupt(tmp_path, number, sleeps):
    (tmp_path / "conftest.py").write_text(UNKILLABLE.format(patience_s=60.0))
    (tmp_path / "test_it.py").write_text(WAITING.replace("SLEEPS", str(sleeps)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    session = start(tmp_path, "test_it.py")
    wait_for((tmp_path / "started").exists)
    time.sleep(extend_under_load(1))
    assert session.poll() is None
    session.send_signal(number)
    # The bound is 0.3 s; the wait that it must not fall into takes `patience_s`.
    output, _ = session.communicate(timeout=extend_under_load(20))
    wait_for(lambda: not list(tmp_path.glob("fsdp-comm*")))
    wait_for(lambda: not [x for x in command_lines() if str(tmp_path) in x])
    if number == signal.SIGINT:
        assert session.returncode == pytest.ExitCode.INTERRUPTED
        assert "KeyboardInterrupt" in output
        where = (
            r"\nfsdp-comm: test_it.py::test_stuck was interrupted after \d+ s\n"
            r"ranks 0-1 are at \(innermost frame first\):\n"
            r"    test_it.py:11 in test_stuck: time.sleep\(1000\)\n"
        )
        assert bool(re.search(where, output)) == sleeps, output


BROKEN = """
import os
import re
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=60{more})

BROKEN = [b"no json\\n", b"[1]\\n", b"\\xff\\n", b'{{"type": "PhaseReport", "report": 1}}\\n']

@pytest.mark.parametrize("said", BROKEN, ids=str)
def test_broken(request, dist_info, said):
    if dist_info.rank == 1:
        plugin = request.config.pluginmanager.get_plugin("fsdp-comm-rank")
        os.write(plugin._channel.fileno(), said)
    dist.barrier()

def test_after():
    dist.barrier()
"""


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="forked"),
        pytest.param(", scope='module'", id="kept", marks=pytest.mark.release),
    ],
)
def test_writing_to_the_connection_fails_one_test(pytester, more):
    pytester.makepyfile(BROKEN.format(more=more))
    result = pytester.runpytest_subprocess(*PYTEST, timeout=extend_under_load(100))
    result.assert_outcomes(passed=1, failed=4)
    output = result.stdout.str()
    assert output.count("rank 1 left the test with a broken connection to pytest (") == 4, output
    assert "INTERNALERROR" not in output
