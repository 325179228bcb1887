"""Only one rank explains a comparison that fails on 4 ranks."""

import shutil

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

# Slow, so that the rank that explains is the last by more than the grace of other failures.
CONFTEST = """
import os
import time
from pathlib import Path
from pytest_fsdp_comm.comm import diff

EXPLAIN = diff.explain

def counting(old, new):
    with Path(__file__).with_name("calls.txt").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(SECONDS)
    return EXPLAIN(old, new)

diff.explain = counting
"""
SOURCE = """
import pytest
import torch
import torch.distributed as dist

COUNT = 1

@pytest.mark.distributed(world_size=4)
@pytest.mark.parametrize("number", range(2))
def test_step(comm_mode, comm_snapshot, number):
    with comm_mode:
        for _ in range(COUNT):
            dist.all_reduce(torch.ones(2))
    assert comm_mode == comm_snapshot"""


@pytest.fixture(scope="module")
def snapshots(run_session):
    session = run_session(SOURCE, "--snapshot-update")
    assert session.status == 0, session.output
    return session.path / "snapshots"


@pytest.fixture
def changed(pytester, snapshots):
    shutil.copytree(snapshots, pytester.path / "snapshots")
    pytester.makeconftest(CONFTEST.replace("SECONDS", str(extend_under_load(2))))
    pytester.makepyfile(test_it=SOURCE.replace("COUNT = 1", "COUNT = 4"))
    return pytester


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((), "", id="forked"),
        pytest.param(("-n", "2"), "", id="xdist", marks=pytest.mark.release),
        pytest.param(("--assert=plain",), "", id="plain", marks=pytest.mark.release),
        pytest.param(("--comm-report=report",), "", id="report", marks=pytest.mark.release),
        pytest.param((), ", 'mine'", id="message", marks=pytest.mark.release),
    ],
)
def test_one_rank_explains_once(changed, arguments, message):
    file = changed.path / "test_it.py"
    file.write_text(file.read_text() + message)
    result = changed.runpytest_subprocess(*arguments)
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert len((changed.path / "calls.txt").read_text().split()) == 2
    outside = "(no-module) outside forward and backward"
    # Once for each test, and once for both.
    assert text.count(f"{outside}: all_reduce[world] 1 -> 4 (+3)") == 3
    # No rank is odd.
    assert "still running" not in text
    assert "ranks 0" not in text
