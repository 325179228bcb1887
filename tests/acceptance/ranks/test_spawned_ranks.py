"""Where a fork would be unsafe, ranks are new pytest processes, and the terminal says why."""

import pytest
from running import UNSAFE_TO_FORK

TEST = """
import pytest
import torch
import torch.distributed as dist

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("value", [3])
def test_sum(value, dist_info, tmp_path, comm_mode):
    assert dist.get_world_size() == 2
    tensor = torch.full((1,), float(value))
    with comm_mode:
        dist.all_reduce(tensor)
    assert tensor.item() == 6
    assert comm_mode.counts("all_reduce") == 1
    (tmp_path / "mine").write_text(str(dist_info.rank))

@pytest.mark.distributed(world_size=2)
def test_failing(dist_info):
    print("from rank", dist_info.rank)
    assert dist_info.rank != 1, "rank one is out"
"""

UNSAFE = {
    "thread": (
        UNSAFE_TO_FORK,
        "fsdp-comm: threads have been running since collection: 'poller', which a fork does "
        "not survive",
    ),
    "native": (
        "import ctypes\n"
        "thread = ctypes.c_ulong()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.pthread_create(ctypes.byref(thread), None, libc.usleep, 60_000_000)\n"
        "libc.pthread_setname_np(thread, b'pool-1')",
        "fsdp-comm: native threads (1) have been running since collection: 'pool-1', which a fork "
        "does not survive",
    ),
    "group": (
        "import os, tempfile, torch.distributed as dist\n"
        "if 'PYTEST_FSDP_COMM_RANK' not in os.environ:\n"
        "    store = dist.FileStore(tempfile.mktemp(), 1)\n"
        "    dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n",
        "fsdp-comm: a process group was made during collection, which a fork does not survive",
    ),
}


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_ranks_are_spawned_where_forking_is_unsafe(pytester, unsafe):
    conftest, reason = UNSAFE[unsafe]
    pytester.makeconftest(conftest)
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    shown = result.stdout.str()
    assert reason in shown
    assert "ranks are started as new pytest processes" in shown
    assert "AssertionError: rank one is out" in shown
    assert "rank 1 failed first" in shown
    assert "from rank 0" in shown


WHICH = """
import os
import pytest

@pytest.mark.distributed(world_size=2)
def test_start():
    assert "PYTEST_FSDP_COMM_LAUNCHED" {operator} os.environ
"""


@pytest.mark.parametrize(
    ("conftest", "option", "operator", "line"),
    [
        ("", "--comm-start=auto", "not in", "fsdp-comm: world size 2, backend *gloo"),
        (UNSAFE_TO_FORK, "--comm-start=fork", "not in", "fsdp-comm: *, ranks are forked"),
        ("", "-ofsdp_comm_start=spawn", "in", "fsdp-comm: *, ranks are new processes"),
        # A worker of xdist has no terminal.
        (UNSAFE_TO_FORK, "-n1", "in", "*: PytestWarning: fsdp-comm: threads have been running *"),
    ],
)
def test_start_of_ranks_follows_the_setting(pytester, conftest, option, operator, line):
    pytester.makeconftest(conftest)
    pytester.makepyfile(test_it=WHICH.format(operator=operator))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", option)
    result.assert_outcomes(passed=1, warnings=int(option == "-n1"))
    result.stdout.fnmatch_lines([line])
    assert ("which a fork does not survive" in result.stdout.str()) == (option == "-n1")
