"""Where a fork would be unsafe, ranks are new pytest processes, and the terminal says why."""

import os
import re

import pytest
import running
from running import UNSAFE_TO_FORK

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

TEST = """
import logging, os
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("value", [3])
def test_sum(value, dist_info, tmp_path, comm_mode):
    logging.info("one\\ntwo %d", dist_info.rank)
    assert dist.get_world_size() == 2
    tensor = torch.full((1,), float(value))
    with comm_mode:
        dist.all_reduce(tensor)
    assert tensor.item() == 6
    assert comm_mode.counts("all_reduce") == 1
    (tmp_path / "mine").write_text(str(dist_info.rank))
    assert len(str(tmp_path)) > 1000

@pytest.mark.distributed(world_size=2)
def test_failing(dist_info):
    print("from rank", dist_info.rank)
    if (child := os.fork()) == 0:
        return
    os.waitpid(child, 0)
    assert dist_info.rank != 1, "rank one is out"
"""


def test_ranks_are_spawned_where_forking_is_unsafe(pytester, monkeypatch):
    """Below a long TMPDIR, with logs shown live and a test that forks."""
    directory = str(pytester.mkdir("t"))
    while len(directory) < 1000:
        directory += "/" + "d" * min(99, 1000 - len(directory))
    os.makedirs(directory)  # noqa: PTH103  # as the user has it: a text
    monkeypatch.setenv("TMPDIR", directory)
    monkeypatch.delenv("PYTEST_DEBUG_TEMPROOT")  # of pytester
    pytester.makeconftest(UNSAFE_TO_FORK)
    pytester.makepyfile(test_it=TEST)
    options = ("-p", "no:cacheprovider", "-o", "log_cli=true", "--log-cli-level=INFO")
    result = pytester.run(running.PYTHON, "-m", "pytest", *options, timeout=extend_under_load(200))
    result.assert_outcomes(passed=1, failed=1)
    shown = result.stdout.str()
    assert (
        "fsdp-comm: threads have been running since collection: 'poller', so forking is "
        "not safe. Ranks start as new pytest processes"
    ) in shown
    assert "AssertionError: rank one is out" in shown
    assert "rank 1 failed" in shown
    assert "from rank 0" in shown
    for rank in (0, 1):
        said = rf"\n\[rank {rank}\] INFO +root:test_it.py:\d+ one\n\[rank {rank}\] +two {rank}\n"
        assert re.search(said, shown), shown
    assert not [name for name in os.listdir(directory) if name.startswith("fsdp-comm")]  # noqa: PTH208  # see above


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
        pytest.param(
            *("", "--comm-start=auto", "not in", "fsdp-comm: world size 2 *, backend *gloo"),
            marks=pytest.mark.release,
        ),
        (UNSAFE_TO_FORK, "--comm-start=fork", "not in", "fsdp-comm: *, ranks are forked"),
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
    assert ("so forking is not safe" in result.stdout.str()) == (option == "-n1")


SLOW = """
import os, time
import pytest
from pytest_fsdp_comm.ranks.session import supervision

supervision.STARTS_WITHIN_S = {limit_s}
"""
# Only ranks are slow to import this, not the session's process.
PAUSE = """
if "PYTEST_FSDP_COMM_RANK" in os.environ:
    time.sleep({pause_s})
"""
QUICK = """
@pytest.mark.distributed(world_size=2, timeout_s={timeout_s})
def test_quick(dist_info):
    pass
"""


@pytest.mark.release
def test_start_of_a_spawned_rank_is_not_test_time(pytester):
    """The module takes longer to import than the test may take."""
    pytester.makeconftest(UNSAFE_TO_FORK)
    limit_s = extend_under_load(3)
    source = SLOW.format(limit_s=300) + PAUSE.format(pause_s=limit_s + 1)
    pytester.makepyfile(test_it=source + QUICK.format(timeout_s=limit_s))
    result = pytester.run(running.PYTHON, "-m", "pytest", "-q", timeout=extend_under_load(100))
    result.assert_outcomes(passed=1)


@pytest.mark.release
def test_spawned_rank_that_never_starts_is_located(pytester):
    """It hangs while it imports the conftest.py, which ranks do first."""
    pytester.makeini(f"[pytest]\nfsdp_comm_progress_s = {extend_under_load(1)}")
    source = SLOW.format(limit_s=extend_under_load(5)) + PAUSE.format(pause_s=1000)
    pytester.makeconftest(UNSAFE_TO_FORK + source)
    pytester.makepyfile(test_it="import pytest" + QUICK.format(timeout_s=600))
    result = pytester.run(running.PYTHON, "-m", "pytest", "-q", timeout=extend_under_load(100))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "fsdp-comm: test_it.py::test_quick has not begun on all ranks after * s (limit * s): "
            "ranks 0-1 still importing or collecting",
            "ranks 0-1 did not begin the test within * s; all ranks were stopped.",
            "ranks 0-1 are still importing or collecting, at (innermost frame first):",
            "    conftest.py:* in <module>: time.sleep(1000)",
        ]
    )
