"""Fixtures of a session run in each rank of each test."""

import pytest

SESSION = """
import pytest

ranks = pytest.mark.distributed(world_size=2)
twice = pytest.mark.parametrize("time", [1, 2])

@pytest.fixture(scope="session")
def named(tmp_path_factory):
    return tmp_path_factory.mktemp("data", numbered=False)

@pytest.fixture(scope="module")
def below_base(tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "data"
    path.mkdir(parents=True)

@ranks
@twice
def test_own_directories(named, time, tmp_path):
    (tmp_path / "kept").touch()

@ranks
@twice
def test_base(below_base, time): pass
"""


@pytest.fixture(scope="module")
def session(run_session):
    return run_session(SESSION, "--basetemp=base")


def test_each_rank_of_each_test_has_its_own_directory(session):
    assert " 4 passed in " in session.output
    assert len([*session.path.glob("base/rank*/test_own_directories_?_0/kept")]) == 4
    # None for tests that ask for no directory.
    assert len([*session.path.glob("base/rank*")]) == 4 + 4
