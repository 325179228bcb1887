"""Ranks that share no random state get one; those that do keep what they have."""

import random

import numpy as np
import pytest
import torch

from pytest_fsdp_comm.ranks.rank.processes import (
    equalize_random_states,
    read_random_states,
    restore_random_states,
)


class Exchange:
    """Of two ranks: this one, and one that gave its text before."""

    def __init__(self, other=None):
        self.other = other
        self.given = None

    def share(self, name, text):
        assert name == "random"
        self.given = text
        return [self.other or text, text]


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002, S311  # what is tested


@pytest.fixture(autouse=True)
def _restored():
    before = read_random_states()
    yield
    restore_random_states(before)


def seed(python, numpy, of_torch):
    random.seed(python)
    np.random.seed(numpy)  # noqa: NPY002  # what is tested
    torch.manual_seed(of_torch)


def test_equalize_seeds_only_differing_libraries():
    seed(1, 1, 7)
    other = Exchange()
    equalize_random_states(other)
    seed(1, 1, 7)
    unchanged = drawn()
    found = []
    for rank_seed in (2, 3):
        seed(rank_seed, rank_seed, 7)
        equalize_random_states(Exchange(other.given))
        found.append(drawn())
    assert found[0] == found[1]
    assert found[0][:2] != unchanged[:2]
    assert found[0][2] == unchanged[2]


def test_equal_states_stay_as_the_user_seeded_them():
    seed(4, 5, 6)
    expected = drawn()
    seed(4, 5, 6)
    equalize_random_states(Exchange())
    assert drawn() == expected


def test_states_come_back_as_they_were_read():
    states = read_random_states()
    first = drawn()
    assert drawn() != first
    restore_random_states(states)
    assert drawn() == first
