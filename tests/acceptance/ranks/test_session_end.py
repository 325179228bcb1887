"""What plain pytest and Python do at the end of a session, ranks do before their verdict.

What ends a session early ends it from a rank, too.
"""

import re

import pytest

SOURCE = """
import atexit
import os
import pathlib
import threading
import time
import weakref

import pytest

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=60)
as_errors = pytest.mark.filterwarnings("error")

class Broken:
    def __init__(self):
        self.itself = self
    def __del__(self):
        raise ValueError("raised in a cycle")

class Whole:
    def __init__(self):
        self.itself = self
    def __del__(self):
        pathlib.Path("collected").touch()

def raise_at_exit():
    raise ValueError("raised at exit")

@pytest.fixture
def broken():
    return Broken()

@pytest.fixture(scope="session")
def of_session(dist_info):
    yield
    assert dist_info.rank == 0, "session's end"

@pytest.fixture(scope="module")
def of_module(dist_info):
    yield
    assert dist_info.rank == 1, "module's end"

# Function-scoped in a fixture of wider scope would be an error of pytest.
@pytest.fixture(scope="session")
def dist_info():
    import torch.distributed as dist
    class Info:
        rank = dist.get_rank()
    return Info

@as_errors
def test_cycle(dist_info):
    if dist_info.rank == 1:
        Broken()

@as_errors
def test_cycle_of_a_fixture(broken): pass

def test_cycle_that_warns(): Broken()

@as_errors
def test_whole_cycle(): Whole()

@as_errors
def test_late_thread():
    def run():
        # After the teardown has looked: nothing but the end is left.
        while threading.main_thread().ident and not ended.wait(0.01):
            pass
        raise ValueError("raised in a thread")
    ended = threading.Event()
    class Last:
        def __init__(self):
            self.itself = self
        def __del__(self):
            ended.set()
            thread.join()
    thread = threading.Thread(target=run)
    thread.start()
    Last()

def test_session(of_session): pass

def test_module(of_module): pass

@as_errors
def test_exit_functions(dist_info):
    atexit.register(pathlib.Path(f"at_exit{dist_info.rank}").touch)
    kept.append(Whole())
    weakref.finalize(kept[0], pathlib.Path(f"finalized{dist_info.rank}").touch)

def test_raising_exit_function():
    atexit.register(raise_at_exit)

kept = []
pid = os.getpid()
atexit.register(lambda: pathlib.Path("of_parent").open("a").write(f"{os.getpid() == pid}\\n"))
"""


@pytest.fixture(scope="module")
def session(run_session):
    return run_session(SOURCE, "-v")


def told(session, title):
    """What is written under a title of the terminal."""
    assert session.output.count(title) == 1, session.output
    return re.split(r"\n(?:___|===)", session.output.partition(title)[2])[0]


def test_finalizer_exception_fails_the_test(session):
    found = told(session, "ERROR at teardown of test_cycle ")
    assert "ValueError: raised in a cycle" in found
    assert "Exception ignored in: <function Broken.__del__" in found
    assert "rank 1 failed\nrank 0 did not fail" in found
    # Of the test, not of what runs it.
    assert "pytest_fsdp_comm" not in found
    told(session, "ERROR at teardown of test_cycle_of_a_fixture ")
    assert "Exception in thread" in told(session, "ERROR at teardown of test_late_thread ")
    # Without errors from warnings it is a warning, and where nothing is raised it is nothing.
    assert "test_cycle_that_warns ERROR" not in session.output
    warned = session.output.partition("warnings summary")[2]
    assert warned.count("Exception ignored in: <function Broken.__del__") == 1
    assert (session.path / "collected").exists()
    assert "test_whole_cycle ERROR" not in session.output


def test_finalizers_of_wider_scopes_fail_once(session):
    for scope, rank in {"session": 1, "module": 0}.items():
        found = told(session, f"ERROR at teardown of test_{scope} ")
        assert f"AssertionError: {scope}'s end" in found
        assert f"rank {rank} failed\nrank {1 - rank} did not fail" in found


def test_exit_functions_run_in_their_rank_and_warn(session):
    for rank in (0, 1):
        assert (session.path / f"at_exit{rank}").exists()
        assert (session.path / f"finalized{rank}").exists()
    assert (session.path / "of_parent").read_text() == "True\n"
    warned = session.output.partition("warnings summary")[2]
    assert len(re.findall("Exception ignored in atexit callback: <function raise_at", warned)) == 1
    assert "ValueError: raised at exit" in warned
    assert "9 passed, 2 warnings, 5 errors" in session.output


EXITS = """
import os
import signal
import time

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=60)

@pytest.fixture
def exiting():
    yield
    pytest.exit("enough", returncode=7)

def test_all():
    pytest.exit("enough", returncode=7)

def test_one(dist_info):
    if dist_info.rank == 1:
        pytest.exit("enough", returncode=0)
    dist.barrier()

def test_teardown(exiting): pass

def test_interrupt(dist_info):
    if dist_info.rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

def test_failed(dist_info):
    if dist_info.rank == 0:
        assert False, "before"
    time.sleep(0.5)
    pytest.exit("enough")

def test_z_never(): open("never", "w").close()
"""
NONE = "(no tests ran|4 deselected)"
ENDED = {
    "all": (7, "_pytest.outcomes.Exit: enough", NONE),
    "one": (0, "_pytest.outcomes.Exit: rank 1: enough", NONE),
    "teardown": (7, "_pytest.outcomes.Exit: enough", "1 passed"),
    "interrupt": (2, r"_pytest.outcomes.Exit: rank 1: interrupted at \S+:28 in \w+", NONE),
    "failed": (2, "_pytest.outcomes.Exit: rank 1: enough", "1 failed"),
    "reruns": (7, "_pytest.outcomes.Exit: enough", NONE),
    "xdist": (2, "xdist.dsession.Interrupted: enough", NONE),
}


@pytest.mark.parametrize("name", ENDED)
def test_session_ends_as_a_rank_ends_it(run_session, name):
    test, arguments, plugins = {
        "reruns": ("all", ("--reruns", "1"), ("rerunfailures",)),
        "xdist": ("all", ("-n", "1"), ()),
    }.get(name, (name, (), ()))
    status, reason, outcome = ENDED[name]
    session = run_session(EXITS, "-q", "-k", f"{test} or never", *arguments, plugins=plugins)
    assert re.search(rf"^!+ {reason} !+$", session.output, re.MULTILINE), session.output
    assert re.search(rf"^{outcome}", session.output, re.MULTILINE), session.output
    assert session.status == status
    assert not (session.path / "never").exists()
    assert ("AssertionError: before" in session.output) == (name == "failed")
