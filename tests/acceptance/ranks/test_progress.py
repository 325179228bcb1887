"""The terminal shows that a test is slow but healthy, where its ranks are, and what they log."""

import re
from itertools import pairwise

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

SOURCE = """
import time
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=3, timeout_s=600)

def test_quick():
    pass

def test_slow(dist_info):
    if dist_info.rank == 2:
        return
    if dist_info.rank == 1:
        time.sleep(SECONDS)
"""


@pytest.fixture
def project(pytester):
    pause_s = extend_under_load(1)
    pytester.makepyfile(test_it=SOURCE.replace("SECONDS", f"3 * {pause_s}"))
    pytester.makeini(f"[pytest]\nfsdp_comm_progress_s = {pause_s}")
    return pytester


def test_progress_is_printed_at_each_doubling(project):
    result = project.runpytest_subprocess()
    result.assert_outcomes(passed=2)
    told = [line for line in result.outlines if line.startswith("fsdp-comm: test_it")]
    assert len(told) >= 2
    line = re.compile(
        r"fsdp-comm: test_it.py::test_slow is still running after (\d+) s \(deadline 600 s\): "
        r"ranks 0, 2 done; rank 1 at test_it.py:\d+ in test_slow: time.sleep\(3 \* [\d.]+\)"
    )
    seconds = [int(line.fullmatch(text)[1]) for text in told]
    # The seconds are rounded.
    assert all(later >= 2 * sooner - 1 for sooner, later in pairwise(seconds))


def test_under_xdist_nothing_is_printed(project):
    result = project.runpytest_subprocess("-n", "1")
    result.assert_outcomes(passed=2)
    assert "still running" not in result.stdout.str()


def test_a_bad_interval_is_a_usage_error(project):
    project.makeini("[pytest]\nfsdp_comm_progress_s = soon")
    result = project.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*ini fsdp_comm_progress_s: *soon*"])


LOGS = """
import logging
import pytest

@pytest.mark.distributed(world_size=2)
def test_ranks(dist_info):
    logging.info("one\\ntwo %d", dist_info.rank)
    logging.debug("below the level")

def test_plain():
    logging.info("three")
"""
LIVE = ("-o", "log_cli=true", "--log-cli-level=INFO", "-k", "test_")


def test_live_logs_name_their_rank(run_session):
    session = run_session(LOGS, *LIVE)
    text = session.output.partition("test_it.py::")[2]
    for rank in (0, 1):
        said = rf"\n\[rank {rank}\] INFO +root:test_it.py:7 one\n\[rank {rank}\] +two {rank}\n"
        assert re.search(said, text), text
    assert text.count(" one\n") == 2
    assert "below" not in text
    assert re.search(r"^test_it.py::test_ranks PASSED +\[ 50%\]$", text, re.MULTILINE), text
    assert re.search(r"^INFO +root:test_it.py:11 three$", text, re.MULTILINE), text


def test_live_logs_are_not_shown_under_xdist(run_session):
    session = run_session(LOGS, *LIVE, "-n", "1")
    assert session.status == 0, session.output
    assert "two" not in session.output
