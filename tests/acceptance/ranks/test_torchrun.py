"""Tests whose ranks were started by torchrun, or by variables as a scheduler sets them.

A start takes seconds, so that each session looks at many things, and most sessions are not
torchrun's own: variables alone start them from a process that has imported torch (`warm`).
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest
import running

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE
from pytest_fsdp_comm.ranks.wire.load import extend_under_load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, ends process groups")

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "gpus-and-clusters.md").read_text()
PRELUDE = """
import atexit, os, pathlib, signal, sys, time, warnings
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

def rank():
    return int(os.environ["RANK"])

def launched_pid():
    return os.getpid() if rank() else os.getppid()
"""
STEP = """
@pytest.mark.distributed{marker}
def test_step{marker_name}(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
    mesh = device_mesh()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with comm_mode(model):
        model(torch.randn(2, 8)).sum().backward()
    assert comm_mode == comm_snapshot
    assert fsdp_tree(model) == comm_snapshot(name="tree")
"""
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider")
TORCHRUN = ("-m", "torch.distributed.run")
# It chooses a free port itself.
STANDALONE = ("--standalone", "--nproc-per-node", "2")
PORTS = itertools.count()


def free_port():
    """One that the system gives nobody on its own, nor this function another process."""
    for number in PORTS:
        port = 10_000 + os.getpid() % 1_000 * 20 + number % 20
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def environment(**changes):
    names = ("asyncio", "hypothesispytest", "randomly", "rerunfailures", "timeout")
    found = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Also where a fixture of the module starts a session.
        "PYTEST_ADDOPTS": " ".join(f"-p no:{name}" for name in names),
        **changes,
    }
    for name in ("PYTEST_XDIST_WORKER", "CI", INSIDE_VARIABLE):
        found.pop(name, None)
    return found


def start(path, command, **variables):
    return subprocess.Popen(
        command,
        cwd=path,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


def end(process, timeout_s=180):
    try:
        out, err = process.communicate(timeout=extend_under_load(timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"still ran after {timeout_s} s:\n{out}\n{err}")
    return Ended(process.returncode, out, err)


class Warm:
    """A pytest session that began with torch imported; as far as `end` needs it, a Popen."""

    def __init__(self, starter, path, arguments, variables):
        self._streams = [
            tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # `communicate` closes it
            for _ in range(2)
        ]
        self._process = starter.start(
            [*PYTEST[2:], *arguments],
            *(stream.fileno() for stream in self._streams),
            directory=path,
            environment=environment(**variables),
        )

    def communicate(self, timeout=None):
        self._process.wait(timeout)
        self.returncode = self._process.returncode
        texts = []
        for stream in self._streams:
            stream.seek(0)
            texts.append(stream.read())
            stream.close()
        return texts

    def kill(self):
        self._process.kill()


@pytest.fixture(scope="module")
def start_alone(_warm_starter):
    def start_alone(path, *arguments, **variables):
        return Warm(_warm_starter, path, arguments, variables)

    return start_alone


@pytest.fixture(scope="module")
def start_by_variables(start_alone):
    def start_by_variables(path, *arguments, seeds=(), **variables):
        variables |= {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
        }
        own = [{"RANK": str(number)} for number in (0, 1)]
        for of_one, seed in zip(own, seeds, strict=False):
            of_one["PYTEST_ADDOPTS"] = f"--randomly-seed={seed}"
        return [start_alone(path, *arguments, **variables | of_one) for of_one in own]

    return start_by_variables


def start_python(path, *command, **variables):
    # torchrun starts its workers with the second.
    return start(path, [running.PYTHON, *command], PYTHON_EXEC=running.PYTHON, **variables)


def start_torchrun(path, *command, options=(), **variables):
    return start_python(path, *TORCHRUN, *STANDALONE, *options, *command, **variables)


def project(path, *parts, ini="[pytest]\n"):
    path.mkdir(exist_ok=True)
    (path / "test_it.py").write_text("\n".join([PRELUDE, *parts]))
    (path / "pytest.ini").write_text(ini)
    return path


def snapshots(path):
    root = path / "snapshots"
    return {str(f.relative_to(root)): f.read_text() for f in root.rglob("*") if f.is_file()}


def junit_cases(path):
    return list(ET.parse(path / "junit.xml").iter("testcase"))  # noqa: S314  # our own file


def left_behind(path):
    """Command lines of what still runs, and directories of ranks."""
    running = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (directory / "cwd").readlink() == path:
                running.append((directory / "cmdline").read_text())
    return [*running, *path.glob("fsdp-comm*")]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A test on both ranks, of which one does something else, and what the user must read."""

    body: str
    says: tuple[str, ...] = ()
    outcome: str = "failed"
    marker: str = "(timeout_s=60)"
    before: str = ""
    arguments: str = ""


FAULTS = {
    "exception": Fault(
        body="print('seen by', rank())\n    if rank() == 1: raise LookupError('nothing here')\n"
        "    dist.barrier()",
        says=(
            "LookupError: nothing here",
            "rank 1 failed first",
            "rank 0 failed later: .*Connection (closed|reset) by peer",
            r"Captured stdout call \(rank 0\) -+\nseen by 0",
            r"Captured stdout call \(rank 1\) -+\nseen by 1",
        ),
    ),
    # More than the store takes in one piece.
    "much_output": Fault(
        body="print('x' * (9 << 20))\n    assert rank() != 1, 'told'", says=("told",)
    ),
    "other_world_size": Fault(
        body="raise RuntimeError", marker="(world_size=4)", outcome="skipped"
    ),
    "simulated": Fault(
        body="assert dist.get_world_size() == 4",
        marker="(world_size=4, backend='fake')",
        outcome="passed",
    ),
    "paths": Fault(
        arguments="tmp_path",
        body="(tmp_path / 'mine').touch()\n"
        "    assert tmp_path.parent.name.startswith(f'rank{rank()}-')\n"
        "    assert [file.name for file in tmp_path.iterdir()] == ['mine']",
        outcome="passed",
    ),
    "warning": Fault(body="warnings.warn('told once')", outcome="passed"),
    "kept": Fault(
        body="global KEPT\n    KEPT = os.getpid()",
        marker="(scope='module', timeout_s=61)",
        outcome="passed",
    ),
    "kept_again": Fault(
        body="assert KEPT == os.getpid()\n    dist.barrier()",
        marker="(scope='module', timeout_s=61)",
        outcome="passed",
    ),
}
PLAIN = """
def test_plain():
    with open("plain", "a") as file:
        print(os.getpid(), file=file)
"""


SHUFFLED = """
import os, random

def pytest_collection_modifyitems(items):
    if os.environ["RANK"] != "0":
        random.shuffle(items)
"""


def faulty_source():
    parts = []
    for name, fault in FAULTS.items():
        parts.append(
            f"{fault.before}\n@pytest.mark.distributed{fault.marker}\n"
            f"def test_{name}({fault.arguments}):\n    {fault.body}\n"
        )
        if name != "kept":
            parts.append(
                f"@pytest.mark.distributed(2, timeout_s=60)\ndef test_after_{name}():\n"
                "    tensor = torch.ones(1)\n    dist.all_reduce(tensor)\n"
                "    assert tensor.item() == 2\n"
            )
    return [*parts, PLAIN]


def outcomes(text, name):
    pattern = rf"^test_it.py::{name} (?:<- \S+ )?([A-Z]+)"
    return [found.lower() for found in re.findall(pattern, text, re.MULTILINE)]


def test_faults_leave_the_next_test_healthy(start_by_variables, tmp_path):
    """One session with all faults, each followed by a healthy test, in an order of each rank."""
    path = project(tmp_path, *faulty_source())
    (path / "conftest.py").write_text(SHUFFLED)
    arguments = ("-v", "-rA", "--junitxml=junit.xml")
    ended, follower = map(end, start_by_variables(path, *arguments, TMPDIR=str(path)))
    assert follower == Ended(0, "", "")
    for name, fault in FAULTS.items():
        assert outcomes(ended.out, f"test_{name}") == [fault.outcome], ended.out + ended.err
        told = "\n".join(running.stories(ended.out, f"test_{name}"))
        for pattern in fault.says:
            assert re.search(pattern, told), f"{pattern!r} is not in\n{told[:3000]}"
        if name != "kept":
            assert outcomes(ended.out, f"test_after_{name}") == ["passed"], name

    assert ended.status == 1
    assert ended.out.count("test session starts") == 1
    assert f"fsdp-comm: ranks 0-1 on {socket.gethostname()}" in ended.out
    assert "needs 4 ranks, but RANK and WORLD_SIZE started 2" in ended.out
    assert "UserWarning: told once" in ended.out
    assert ", 1 warning in " in ended.out
    names = [case.get("name") for case in junit_cases(path)]
    assert len(names) == len(set(names)) == 2 * len(FAULTS)
    assert len((path / "plain").read_text().splitlines()) == 1
    assert left_behind(path) == []


@pytest.fixture(scope="module")
def forked(start_alone, tmp_path_factory):
    """A project with the snapshots that ranks forked by pytest itself wrote."""
    four = STEP.format(marker="(world_size=4)", marker_name="_4")
    path = project(tmp_path_factory.mktemp("forked"), STEP.format(marker="", marker_name=""), four)
    ended = end(start_alone(path, "--snapshot-update"))
    assert "4 snapshots generated." in ended.out
    return path


def copied(forked, path):
    return Path(shutil.copytree(forked, path))


LAST = """
@pytest.mark.distributed
def test_fails():
    # The agent of rank 0 must not fail while another rank is still busy with its end.
    atexit.register(time.sleep, rank())
    assert rank() == 0, "not me"

@pytest.mark.distributed
def test_never(): open("ran", "w").close()
"""


@pytest.mark.release
@pytest.mark.upstream
def test_two_agents_write_alike_and_stop_together(forked, tmp_path):
    path = copied(forked, tmp_path / "project")
    (path / "test_it.py").write_text((path / "test_it.py").read_text() + LAST)
    for file in (path / "snapshots").rglob("*.ws2.*"):
        file.unlink()
    # As the page says, with a rank on each "machine".
    (shown,) = re.findall(r"^\$ torchrun (.*) -m pytest$", PAGE, re.MULTILINE)
    port = free_port()
    options = shown.replace("host0:29500", f"localhost:{port}").split()
    options[options.index("--nproc-per-node") + 1] = "1"
    command = (*TORCHRUN, *options, *PYTEST, "-x", "-rs", "--snapshot-update")

    def serves():
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            return True
        return False

    agents = [start_python(path, *command)]
    # An agent whose ranks succeeded waits minutes for one that failed, if it serves their store.
    running.wait_for(serves)
    agents.append(start_python(path, *command))
    ended = [end(agent) for agent in agents]
    (report,) = (one.out for one in ended if one.out)
    assert "needs 4 ranks, but torchrun started 2" in report
    assert "2 snapshots generated." in report
    assert "1 failed, 1 passed, 1 skipped" in report
    assert "stopping after 1 failures" in report
    assert "AssertionError: not me" in report
    assert sorted(one.status for one in ended) == [0, 1]
    assert not (path / "ran").exists()
    # Those of the test that needs other ranks are there, too.
    assert snapshots(path) == snapshots(forked)


KILL = """
@pytest.mark.distributed
def test_fails(): assert rank() == 0, 'told before'

@pytest.mark.distributed
def test_kill():
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1":
        return
    if rank() == {rank}: os.kill(launched_pid(), signal.SIGKILL)
    time.sleep(1000)

@pytest.mark.distributed
def test_never(): open('ran', 'w').close()
"""


def test_killed_torchrun_process_restarts_session(tmp_path):
    path = project(tmp_path, KILL.format(rank=1))
    ended = end(start_torchrun(path, *PYTEST, options=("--max-restarts", "1")))
    first, second = ended.out.split("test session starts")[1:]
    assert "AssertionError: told before" in first
    assert f"rank 1 was lost (host {socket.gethostname()}): its process crashed or" in first
    assert "rank 0 was still running when the test was stopped, at:\n" in first
    assert "1 failed, 2 passed" in second
    assert (path / "ran").exists()


@pytest.mark.release
def test_killed_process_of_rank_0_ends_the_others(start_by_variables, tmp_path):
    path = project(tmp_path, KILL.format(rank=0))
    tmpdir = {"TMPDIR": str(tmp_path)}  # for what the killed process cannot remove
    killed, follower = start_by_variables(path, **tmpdir)
    assert end(killed).status == -signal.SIGKILL
    assert (end(follower).status, (path / "ran").exists()) == (1, False)
    assert [line for line in left_behind(path) if not isinstance(line, Path)] == []


FATAL = {
    "hang": Fault(
        body="if rank() == 1: time.sleep(1000)\n    dist.all_reduce(torch.ones(1))",
        marker="(timeout_s=LIMIT_S)",
        says=(
            r"ranks 0-1 did not finish within [\d.]+ s",
            r"rank 0 is at \(innermost frame first\):\n    .*test_it.py.*\n(    .*\n)*    inside",
            r"rank 1 is at \(innermost frame first\):\n    .*test_it.py:\d+ in test_hang",
        ),
    ),
    "exit_of_rank_0": Fault(
        body="print('last words')\n    if rank() == 0: os._exit(4)\n    dist.barrier()",
        says=(
            r"rank 0 exited with status 4 \(os._exit, or a crash\) during call",
            "last words",
        ),
    ),
}


@pytest.mark.parametrize("name", FATAL)
def test_rank_that_hangs_or_dies_ends_the_session(start_by_variables, tmp_path, name):
    fault = FATAL[name]
    marker = fault.marker.replace("LIMIT_S", str(extend_under_load(2)))
    path = project(
        tmp_path,
        f"@pytest.mark.distributed{marker}\ndef test_{name}():\n    {fault.body}\n",
        "@pytest.mark.distributed\ndef test_never(): open('ran', 'w').close()\n",
        PLAIN,
    )
    ended, follower = map(end, start_by_variables(path, "--junitxml=junit.xml", TMPDIR=str(path)))
    assert ended.status == 1
    assert follower.status in {0, 1, -signal.SIGKILL}
    for pattern in fault.says:
        assert re.search(pattern, ended.out), f"{pattern!r} is not in\n{ended.out}"
    assert "did not finish the test, so no other distributed test can run" in ended.out
    assert [len(case.findall("failure")) for case in junit_cases(path)] == [1]
    assert not (path / "ran").exists()
    assert left_behind(path) == []


@pytest.mark.release
def test_exit_of_a_launched_rank_ends_the_session(start_by_variables, tmp_path):
    body = "    if rank() == 1: pytest.exit('enough', returncode=7)\n    dist.barrier()\n"
    never = "@pytest.mark.distributed\ndef test_never(): open('ran', 'w').close()\n"
    path = project(tmp_path, f"@pytest.mark.distributed\ndef test_exit():\n{body}", never)
    leader, follower = map(end, start_by_variables(path, TMPDIR=str(path)))
    assert (leader.status, follower.status) == (7, 0)
    assert "! _pytest.outcomes.Exit: rank 1: enough !" in leader.out
    assert "FAILED" not in leader.out
    assert not (path / "ran").exists()


def test_different_collected_tests_stop_the_session(start_by_variables, tmp_path):
    path = project(
        tmp_path,
        "@pytest.mark.distributed\n@pytest.mark.parametrize('n', [rank(), 2])\n"
        "def test_n(n): pass\n"
        "@pytest.mark.distributed(timeout_s=2 + rank())\ndef test_timeout(): pass\n",
    )
    leader, follower = map(end, start_by_variables(path))
    assert (leader.status, follower.status) == (4, 0)
    said = leader.err
    assert "ERROR: all launched ranks must collect the same tests (in any order):\n" in said
    assert (
        f"rank 1 (on {socket.gethostname()}) did not collect 2 of rank 0's 3 tests:\n"
        "    test_it.py::test_n[0] on 2 ranks (gloo, scope test, timeout 120 s)\n"
        "    test_it.py::test_timeout on 2 ranks (gloo, scope test, timeout 2 s)\n"
        "  and collected 2 that rank 0 did not:\n"
        "    test_it.py::test_n[1] on 2 ranks (gloo, scope test, timeout 120 s)\n"
        "    test_it.py::test_timeout on 2 ranks (gloo, scope test, timeout 3 s)\n"
        "compare what `pytest --collect-only -q` prints on each"
    ) in said


RANDOM = """
import random

def agree(n):
    drawn = [None, None]
    dist.all_gather_object(drawn, random.random())
    assert drawn[0] == drawn[1]

@pytest.mark.distributed(2)
@pytest.mark.parametrize("n", range(4))
def test_fresh(n): agree(n)

@pytest.mark.distributed(2, scope="module")
@pytest.mark.parametrize("n", range(4))
def test_kept(n): agree(n)
"""


@pytest.mark.release
def test_randomly_shuffles_and_seeds_all_ranks_alike(start_alone, start_by_variables, tmp_path):
    path = project(tmp_path, RANDOM)
    options = ("-v", *(f"-pno:{name}" for name in ("asyncio", "hypothesispytest", "timeout")))
    # Each process would choose one of its own; these two give other orders.
    leader, follower = map(end, start_by_variables(path, *options, seeds=(0, 1)))
    assert (leader.status, follower) == (0, Ended(0, "", "")), leader.out
    assert "8 passed" in leader.out
    alone = end(start_alone(path, *options, "--randomly-seed=0", PYTEST_ADDOPTS=""))
    assert "8 passed" in alone.out

    def order(text):
        return re.findall(r"^test_it.py::(\S+) PASSED", text, re.MULTILINE)

    assert order(leader.out) == order(alone.out) != sorted(order(alone.out))


def test_session_without_ranks_runs_in_every_process(start_by_variables, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_plain(): open('ran' + os.environ['RANK'], 'w').close()\n"
    )
    for ended in map(end, start_by_variables(tmp_path)):
        assert "1 passed" in ended.out
        assert "test session starts" in ended.out
    assert {file.name for file in tmp_path.glob("ran*")} == {"ran0", "ran1"}


@pytest.mark.release
def test_launched_ranks_compare_if_fork_is_unsafe(forked, start_by_variables, tmp_path):
    path = copied(forked, tmp_path / "project")
    file = path / "test_it.py"
    file.write_text(file.read_text().replace("for layer in model:", "for layer in model[:1]:"))
    (path / "conftest.py").write_text(running.UNSAFE_TO_FORK)
    leader, follower = map(end, start_by_variables(path))
    assert "rank 0 of 2 started by RANK and WORLD_SIZE" in leader.out
    assert "comm_mode differs from snapshots/test_it/test_step.ws2.comm" in leader.out
    assert (leader.status, follower) == (1, Ended(0, "", ""))
    assert snapshots(path) == snapshots(forked)


@pytest.mark.parametrize("arguments", [(), ("-k", "plain")])
def test_processes_that_cannot_meet_write_nothing(start_alone, tmp_path, arguments):
    path = project(
        tmp_path,
        STEP.format(marker="", marker_name=""),
        "@pytest.mark.distributed(3)\ndef test_other(): open('ran', 'w').close()",
        "def test_plain(): pass",
    )
    variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    ended = end(start_alone(path, *arguments, "--snapshot-update", **variables))
    assert not (path / "snapshots").exists()
    assert not (path / "ran").exists()
    if not arguments:
        assert ended.status == pytest.ExitCode.USAGE_ERROR
        assert "process 0 of 2 that a launcher started" in ended.err
        assert "sh -c 'RANK=$OMPI_COMM_WORLD_RANK" in ended.err
    else:
        # Nothing of this plugin's is run: as without it.
        assert (ended.status, ended.err) == (0, "")


def test_xdist_on_launched_ranks_is_a_usage_error(start_alone, tmp_path):
    path = project(tmp_path, STEP.format(marker="", marker_name=""))
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    ended = end(start_alone(path, "-n", "2", **variables))
    assert ended.status == pytest.ExitCode.USAGE_ERROR
    assert (
        "ERROR: -n 2: pytest-xdist would start workers in each of the 2 processes that RANK and "
        "WORLD_SIZE started as ranks: leave out -n, or run pytest -n without a launcher"
    ) in ended.err


@pytest.mark.release
def test_a_port_that_is_taken_is_a_usage_error(start_alone, tmp_path):
    path = project(tmp_path, STEP.format(marker="", marker_name=""))
    with socket.socket(socket.AF_INET6) as taken:
        taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taken.bind(("::", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ended = end(start_alone(path, **variables))
    assert ended.status == pytest.ExitCode.USAGE_ERROR
    assert (
        f"ERROR: cannot serve the store of the launched ranks at 127.0.0.1:{port} (MASTER_ADDR, "
        "MASTER_PORT): "
    ) in ended.err
    assert "If there is no launcher, unset RANK and WORLD_SIZE" in ended.err


@pytest.fixture
def hosts():
    """Two network namespaces, joined by a cable: prefixes of a command for each, and addresses."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts need the command `ip`, which is not installed")
    names = [f"fsdp-comm-{os.getpid()}-{number}" for number in (0, 1)]
    addresses = ["10.213.77.1", "10.213.77.2"]

    def ip(*arguments, check=True):
        command = [shutil.which("ip"), *arguments]
        return subprocess.run(command, check=check, capture_output=True, text=True)

    made = ip("netns", "add", names[0], check=False)
    if made.returncode:
        pytest.skip(f"two hosts need `ip netns`, which is not permitted: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable0", "netns", names[0], "type", "veth")
        ip("-n", names[0], "link", "set", "veth0", "netns", names[1], "name", "cable1")
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"cable{number}")
            ip("-n", name, "link", "set", f"cable{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, addresses
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def test_two_hosts_report_and_record_as_one(hosts, forked, tmp_path):
    names, addresses = hosts
    fails = "@pytest.mark.distributed\ndef test_fails(): assert rank() == 0, os.uname().nodename\n"
    path = project(tmp_path, STEP.format(marker="", marker_name=""), fails)
    both = []
    for rank, name in enumerate(names):
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
        command += [f'hostname host{rank} && exec "$@"', "sh", sys.executable, *PYTEST]
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        variables |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": addresses[0], "MASTER_PORT": "29500"}
        # As nothing resolves the hosts' names.
        variables["GLOO_SOCKET_IFNAME"] = f"cable{rank}"
        both.append(start(path, [*command, "--snapshot-update"], **variables))
    first, second = map(end, both)
    assert "fsdp-comm: rank 0 on host0; rank 1 on host1" in first.out, first.err
    assert "1 failed, 1 passed" in first.out
    assert "AssertionError: host1" in first.out
    assert (first.status, second.status, second.out) == (1, 0, "")
    files = {name: text for name, text in snapshots(forked).items() if ".ws2." in name}
    assert snapshots(path) == files
    assert len(files) == 2
