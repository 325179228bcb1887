"""The process that ranks are forked from: what it needs, and what its death costs."""

import re

import pytest
from running import command_lines

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

KILLED = """
import os, pathlib, signal, subprocess, time
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, scope="module", timeout_s=60)

def test_before():
    dist.all_reduce(torch.ones(1))

def test_killed(dist_info):
    if dist_info.rank == 1:
        subprocess.Popen(["sleep", "4243"])
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)

def test_after(tmp_path):
    dist.all_reduce(torch.ones(1))
    (tmp_path / "file").touch()

class TestBetween:
    pytestmark = []

    @pytest.mark.distributed(world_size=2, scope="module")
    def test_kept(self):
        dist.barrier()
"""
BETWEEN = """
import os, pathlib, signal
import pytest
import torch.distributed as dist

@pytest.mark.distributed(world_size=2, scope="module")
def test_first():
    dist.barrier()

def test_plain():
    children = pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
        os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOWAIT)

@pytest.mark.distributed(world_size=2, scope="module")
def test_second():
    dist.barrier()
"""


def test_ranks_run_without_numpy(pytester):
    """Torch does not need it, nor do its builds for the CPU bring it."""
    pytester.makeconftest("import sys; sys.modules['numpy'] = None")
    pytester.makepyfile(
        """
        import pytest
        import torch
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        @pytest.mark.distributed(world_size=2)
        @pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")
        def test_step(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
            model = nn.Linear(4, 4)
            fully_shard(model, mesh=device_mesh())
            with comm_mode(model):
                model(torch.ones(2, 4)).sum().backward()
            assert comm_mode == comm_snapshot
            assert fsdp_tree(model) == comm_snapshot(name="tree")
        """
    )
    pytester.runpytest_subprocess("--snapshot-update").assert_outcomes(passed=1)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.release
@pytest.mark.cold
def test_modules_for_fixtures_are_preloaded(pytester):
    """In each rank of each test it would take longer than a small test."""
    pytester.makeconftest(
        """
        import sys
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_setup(item):
            names = ["recording.comm_mode", "fsdp_tree", "reports.html.pages"]
            imported = [name for name in names if f"pytest_fsdp_comm.{name}" in sys.modules]
            item.user_properties.append(("imported", imported))
        """
    )
    source = """
        import pytest

        @pytest.mark.distributed(world_size=2)
        def test_it({fixture}, request):
            assert request.node.user_properties == [("imported", {imported})]
    """
    for fixture, imported in [
        ("comm_mode", ["recording.comm_mode"]),
        ("fsdp_tree", ["fsdp_tree"]),
        ("tmp_path", []),
    ]:
        pytester.makepyfile(test_it=source.format(fixture=fixture, imported=imported))
        pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_its_death_costs_one_test(pytester):
    pytester.makepyfile(KILLED)
    result = pytester.runpytest_subprocess("-v", timeout=extend_under_load(100))
    result.assert_outcomes(passed=3, failed=1)
    output = result.stdout.str()
    assert re.search(
        r"ranks 0-1 died with the fork server \(the parent of all ranks\), which "
        r"was killed by signal 9",
        output,
    ), output
    assert "INTERNALERROR" not in output
    assert not [line for line in command_lines() if "4243" in line]


FAILING = """
import pytest_fsdp_comm.ranks.rank.main as worker
from pytest_fsdp_comm import UpstreamChangedError

def fail():
    raise {error}

worker.processes.forget_exit_functions = fail
"""


@pytest.mark.parametrize("arguments", [(), ("-n", "2", "--dist", "loadfile")], ids=["one", "xdist"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("UpstreamChangedError('torch 9 no longer has name')", "torch 9 no longer has name"),
        ("KeyError('unforeseen')", "Traceback*"),
    ],
    ids=["foreseen", "unforeseen"],
)
def test_ranks_that_cannot_be_prepared_fail_each_test(pytester, arguments, error, text):
    pytester.makeconftest(FAILING.format(error=error))
    pytester.makepyfile(BETWEEN.replace("os.kill", "print"))
    result = pytester.runpytest_subprocess(*arguments, timeout=extend_under_load(100))
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines([f"ranks 0-1 could not be prepared: {text}"] * 2)
    assert "INTERNALERROR" not in result.stdout.str()
    # The server has removed its directory itself.
    assert "vanished" not in result.stdout.str()
    if "KeyError" in error:
        result.stdout.fnmatch_lines(["KeyError: 'unforeseen'"])


def test_a_plain_test_may_reap_the_fork_server(pytester):
    waiting = BETWEEN.replace(" | os.WNOWAIT", "")
    assert waiting != BETWEEN
    pytester.makepyfile(waiting)
    pytester.runpytest_subprocess("-v", timeout=extend_under_load(100)).assert_outcomes(passed=3)
