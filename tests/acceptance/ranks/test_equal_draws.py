"""What ranks draw at random, with Hypothesis too, is the same on each of them."""

import re

import pytest

pytest.importorskip("hypothesis")

SOURCE = """
import random
import unittest

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given, settings
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

@settings(max_examples=12)
@given(number=st.integers(), words=st.lists(st.text(max_size=3), max_size=3))
def test_examples(number, words, dist_info, device_mesh):
    assume(number % 3)
    assert_equal_on_ranks((number, words))

class TestMethods(unittest.TestCase):
    @settings(max_examples=3)
    @given(st.integers())
    def test_method(self, number):
        assert_equal_on_ranks(number)

@given(number=st.integers())
def test_failing_on_one_rank(number):
    assert_equal_on_ranks(number)
    assert number < 1000 or dist.get_rank() == 0, "too large"

@given(st.data())
def test_failing_after_draws(data):
    first = data.draw(st.integers())
    assert_equal_on_ranks(first)
    second = data.draw(st.integers(max_value=first))
    assert_equal_on_ranks(second)
    assert first < 1000

@settings(max_examples=2)
@example(1)
@example(2)
@given(st.integers())
def test_failing_explicitly(number):
    assert_equal_on_ranks(number)
    assert number != 2

@given(st.integers())
def test_skipping(number): pytest.skip("not here")
"""


@pytest.fixture(scope="module")
def session(run_session):
    return run_session(SOURCE, "-v", "--durations=0", plugins=("hypothesispytest",))


def told(session, name):
    return re.split(r"\n(?:___|===)", session.output.partition(f"___ {name} ___")[2])[0]


def test_ranks_draw_alike_with_the_seeds_of_the_user(session):
    assert "3 failed, 5 passed, 1 skipped" in session.output
    for name in ("test_random", "test_random_on_kept_ranks[2]", "test_examples"):
        assert f"test_it.py::{name} PASSED" in session.output


def test_a_failure_on_one_rank_is_reported_at_once_with_its_example_and_seed(session):
    story = told(session, "test_failing_on_one_rank")
    assert re.search(r"E +AssertionError: too large", story)
    assert re.search(r"Failing test case: test_failing_on_one_rank\(\nE +number=[\d_]{4,},", story)
    assert re.search(r"--hypothesis-seed=N draws the same ones again, with N = \d+", story)
    assert "rank 1 failed first\nrank 0 was still running" in story
    story = told(session, "test_failing_after_draws")
    assert re.search(r"E +Draw 1: [\d_]{4,}\nE +Draw 2: ", story)
    assert re.search(r"Failing explicit example: test_failing_exp\w+\(\nE +number=2,", told(
        session, "test_failing_explicitly"
    ))  # fmt: skip
    slowest = re.findall(r"([\d.]+)s call +test_it.py::test_failing", session.output)
    assert len(slowest) == 3
    assert max(map(float, slowest)) < 30, "none hung until its deadline of 60 s"
