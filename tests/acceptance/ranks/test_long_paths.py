"""TMPDIR may be as long as a path can be; test_spawned_ranks.py has spawned ranks below one."""

import os

import pytest
import running

SOURCE = """
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=60)

@pytest.mark.parametrize("number", range(3))
def test_sum(number, comm_mode, tmp_path, dist_info):
    with comm_mode:
        dist.all_reduce(torch.ones(1))
    assert comm_mode.counts("all_reduce") == 1
    (tmp_path / "mine").write_text(str(dist_info.rank))
    assert len(str(tmp_path)) > {length}
"""


@pytest.mark.parametrize(
    ("length", "arguments"), [(200, ()), (1000, ("-n", "2"))], ids=["200-forked", "1000-xdist"]
)
def test_ranks_start_below_a_long_tmpdir(pytester, monkeypatch, length, arguments):
    directory = str(pytester.mkdir("t"))
    while len(directory) < length:
        directory += "/" + "d" * min(99, length - len(directory))
    os.makedirs(directory)  # noqa: PTH103  # as the user has it: a text
    monkeypatch.setenv("TMPDIR", directory)
    monkeypatch.delenv("PYTEST_DEBUG_TEMPROOT")  # of pytester
    pytester.makepyfile(SOURCE.format(length=length))
    result = pytester.run(
        running.PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *arguments, timeout=100
    )
    result.assert_outcomes(passed=3)
    assert not [name for name in os.listdir(directory) if name.startswith("fsdp-comm")]  # noqa: PTH208  # see above
