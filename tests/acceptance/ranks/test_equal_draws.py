"""What ranks draw at random, with Hypothesis too, is the same on each of them."""

import pytest

pytest.importorskip("hypothesis")

SOURCE = """
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=60)
kept = pytest.mark.distributed(world_size=2, timeout_s=60, scope="module")

def assert_equal_on_ranks(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    assert values[0] == values[1]

def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()

random.seed(11)  # A user's choice, before the fork.

def test_random():
    first = drawn()
    assert_equal_on_ranks(first)
    assert first[0] == random.Random(11).random()

@kept
@pytest.mark.parametrize("n", [1, 2])
def test_random_on_kept_ranks(n):
    assert_equal_on_ranks(drawn())
    rank = dist.get_rank()
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)

@settings(derandomize=True, deadline=None, max_examples=12)
@given(number=st.integers(), words=st.lists(st.text(max_size=3), max_size=3))
def test_examples(number, words, dist_info, device_mesh):
    assume(number % 3)
    assert_equal_on_ranks((number, words))
"""


def test_ranks_draw_equal_values(run_session):
    ran = run_session(SOURCE, plugins=("hypothesispytest",))
    assert "4 passed" in ran.output
