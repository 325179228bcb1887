"""The terminal shows that a test is slow but healthy, and where its ranks are."""

import re

import pytest

SOURCE = """
import time
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=3, timeout_s=60)

def test_quick():
    pass

def test_slow(dist_info):
    if dist_info.rank == 2:
        return
    if dist_info.rank == 1:
        time.sleep(3)
"""


@pytest.fixture
def project(pytester):
    pytester.makepyfile(test_it=SOURCE)
    pytester.makeini("[pytest]\nfsdp_comm_progress_s = 1")
    return pytester


def test_progress_is_printed_each_time_the_duration_doubles(project):
    result = project.runpytest_subprocess()
    result.assert_outcomes(passed=2)
    told = [line for line in result.outlines if line.startswith("fsdp-comm: test_it")]
    assert len(told) >= 2
    assert [re.sub(r"py:\d+", "py:N", line) for line in told] == [
        f"fsdp-comm: test_it.py::test_slow is still running after {seconds} s (deadline 60 s): "
        "ranks 0, 2 done; rank 1 at test_it.py:N in test_slow: time.sleep(3)"
        # A busy machine may take a second more to start and end the ranks.
        for seconds in (1, 2, 4)[: len(told)]
    ]


def test_under_xdist_nothing_is_printed(project):
    result = project.runpytest_subprocess("-n", "1")
    result.assert_outcomes(passed=2)
    assert "still running" not in result.stdout.str()


def test_a_bad_interval_is_a_usage_error(project):
    project.makeini("[pytest]\nfsdp_comm_progress_s = soon")
    result = project.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*ini fsdp_comm_progress_s: *soon*"])
