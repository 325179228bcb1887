"""TMPDIR may be as long as a path can be."""

import os

import pytest
import running
from running import UNSAFE_TO_FORK

SOURCE = """
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=60)

@pytest.mark.parametrize("number", range({tests}))
def test_sum(number, comm_mode, tmp_path, dist_info):
    with comm_mode:
        dist.all_reduce(torch.ones(1))
    assert comm_mode.counts("all_reduce") == 1
    (tmp_path / "mine").write_text(str(dist_info.rank))
    assert len(str(tmp_path)) > {length}
"""


@pytest.mark.parametrize(
    ("length", "arguments", "conftest"),
    [(200, (), ""), (1000, ("-n", "2"), ""), (1000, (), UNSAFE_TO_FORK)],
    ids=["200-forked", "1000-xdist", "1000-spawned"],
)
def test_ranks_start_below_a_long_tmpdir(pytester, monkeypatch, length, arguments, conftest):
    directory = str(pytester.mkdir("t"))
    while len(directory) < length:
        directory += "/" + "d" * min(99, length - len(directory))
    os.makedirs(directory)  # noqa: PTH103  # as the user has it: a text
    monkeypatch.setenv("TMPDIR", directory)
    monkeypatch.delenv("PYTEST_DEBUG_TEMPROOT")  # of pytester
    pytester.makeconftest(conftest)
    tests = 1 if conftest else 3
    pytester.makepyfile(SOURCE.format(length=length, tests=tests))
    result = pytester.run(
        running.PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *arguments, timeout=100
    )
    result.assert_outcomes(passed=tests)
    assert not [name for name in os.listdir(directory) if name.startswith("fsdp-comm")]  # noqa: PTH208  # see above
