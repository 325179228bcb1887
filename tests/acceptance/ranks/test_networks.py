"""Ranks where the machine's network is not as usual."""

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="makes a network namespace")

# Before any rank is forked: this process and its children are alone in a namespace of their own.
ALONE = """
import ctypes, subprocess

def pytest_configure(config):
    if ctypes.CDLL(None).unshare(0x40000000):
        import pytest
        pytest.exit("not permitted", returncode=77)
    for command in ("link set lo up", "addr del 127.0.0.1/8 dev lo"):
        subprocess.run(["ip", *command.split()], check=True)
"""
TEST = """
import pytest, torch
import torch.distributed as dist

@pytest.mark.distributed(world_size=2, timeout_s=60)
def test_sum():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
"""


def test_ranks_connect_over_ipv6_alone(pytester):
    pytester.makeconftest(ALONE)
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    if result.ret == 77:
        pytest.skip("this user may make no network namespace")
    result.assert_outcomes(passed=1)
    assert "so forking is not safe" not in result.stdout.str()
